"""Batch normalisation over ranks against one process on the whole batch, in float64, to 1e-10."""

from __future__ import annotations

import copy
import random
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.checkpoint import checkpoint

import evenstep
from evenstep.errors import MismatchError
from evenstep.replica.batches import split
from tests.ranks import on_ranks

SIZES = pytest.mark.parametrize("nproc", [2, 3])
PLAIN = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def close(got, expected, what, tolerance=1e-10):
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, msg=lambda m: f"{what}: {m}")


def summed(world, tensor):
    total = tensor.detach().clone()
    world.control.all_reduce(total).wait()
    return total


def share_of(batch, cuts, rank):
    return batch[cuts[rank] : cuts[rank + 1]]


def random_cuts(shared, num_rows, world_size):
    """Where the ranks' shares begin and end; some of them are empty."""
    return [0, *sorted(shared.randint(0, num_rows) for _ in range(world_size - 1)), num_rows]


# ---------------------------------------------------------------------- the layer alone


def random_layers(seed, num_cases):
    """Random shapes, settings and shares, two layers one after the other; returns how many shares were empty."""
    world = evenstep.init(quiet=True)
    shared = random.Random(seed)
    num_empty = 0
    for case in range(num_cases):
        dims, channels, rows = shared.randint(2, 5), shared.randint(1, 4), shared.randint(2, 9)
        generator = torch.Generator().manual_seed(shared.randrange(1 << 30))
        settings = {
            "eps": shared.choice([1e-5, 1e-2]),
            "momentum": shared.choice([0.1, 0.7, None]),
            "affine": shared.random() < 0.7,
            "track_running_stats": shared.random() < 0.7,
            "dtype": torch.float64,
        }
        what = f"seed {seed}, case {case}, {dims}D, {settings}"
        plain = nn.ModuleList(PLAIN[dims](channels, **settings) for _ in range(2))
        ours = nn.ModuleList(evenstep.SyncBatchNorm(channels, **settings) for _ in range(2))
        for parameter in plain.parameters():
            nn.init.normal_(parameter, generator=generator)
        ours.load_state_dict(plain.state_dict())
        for _ in range(shared.randint(1, 3)):
            cuts = random_cuts(shared, rows, world.world_size)
            shape = (rows, channels, *[shared.randint(1, 3) for _ in range(dims - 2)])
            offset = 10.0 ** shared.randint(0, 3)  # a mean far from 0 on which sums of squares would lose digits
            whole = torch.randn(shape, dtype=torch.float64, generator=generator) * 3 + offset
            if dims == 4 and shared.random() < 0.5:
                whole = whole.contiguous(memory_format=torch.channels_last)
            slope = torch.randn(shape, dtype=torch.float64, generator=generator)
            mine = share_of(whole, cuts, world.rank).clone().requires_grad_()
            whole.requires_grad_()
            num_empty += len(mine) == 0
            expected = plain[1](torch.tanh(plain[0](whole)))
            (expected.square() * slope).sum().backward()
            got = ours[1](torch.tanh(ours[0](mine)))
            assert got.is_contiguous() == share_of(expected, cuts, world.rank).is_contiguous() or len(mine) < 2
            (got.square() * share_of(slope, cuts, world.rank)).sum().backward()
            close(got, share_of(expected, cuts, world.rank), f"{what}: output")
            close(mine.grad, share_of(whole.grad, cuts, world.rank), f"{what}: gradient of the input")
            for (name, a), b in zip(ours.named_parameters(), plain.parameters(), strict=True):
                close(summed(world, a.grad), b.grad, f"{what}: gradient of {name}")
            for (name, a), b in zip(ours.named_buffers(), plain.buffers(), strict=True):
                close(a, b, f"{what}: {name}")
            ours.zero_grad()
            plain.zero_grad()
        ours.eval(), plain.eval()
        if settings["track_running_stats"]:
            close(ours[0](whole), plain[0](whole), f"{what}: evaluation")
    return num_empty


@SIZES
def test_ranks_normalise_as_one_process_on_the_whole_batch(ranks, fresh_seed, nproc):
    assert sum(ranks.run(random_layers, nproc, fresh_seed, 60 // nproc)) > 0


@pytest.mark.parametrize("own_parameters", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@on_ranks(2)
def test_sixteen_bit_inputs_have_float32_statistics(world, dtype, own_parameters):
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(9, 4, 5, 5, generator=generator).to(dtype) * 4 + 30
    cuts = [0, 2, 9] if world.world_size == 2 else None
    mine = share_of(whole, cuts, world.rank).clone().requires_grad_()
    layer = evenstep.SyncBatchNorm(4)
    if own_parameters:
        layer = layer.to(dtype)
    plain = nn.BatchNorm2d(4)
    whole = whole.float().requires_grad_()
    expected, got = plain(whole), layer(mine)
    assert got.dtype is dtype
    expected.square().mul(expected).sum().backward()
    got.square().mul(got).sum().backward()
    assert mine.grad.dtype is dtype
    tolerance = 0.05 if dtype is torch.bfloat16 else 0.01
    close(got.float(), share_of(expected, cuts, world.rank), "output", tolerance)
    close(mine.grad.float(), share_of(whole.grad, cuts, world.rank), "gradient", 10 * tolerance)
    if not own_parameters:  # statistics of 16-bit inputs have 32 bits
        close(layer.running_var, plain.running_var, "running variance", 1e-5)


@on_ranks(2)
def test_too_few_values_are_refused_on_every_rank_and_none_at_all_leave_no_trace(world):
    layer = evenstep.SyncBatchNorm(3)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(torch.ones(int(world.rank == 0), 3))
    before = [buffer.clone() for buffer in layer.buffers()]
    out = layer(torch.ones(0, 3))  # no rank has a row
    assert out.shape == (0, 3)
    assert all(torch.equal(a, b) for a, b in zip(before, layer.buffers(), strict=True))


@on_ranks(3)
def test_a_process_group_normalises_for_itself(world):
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    group = groups[world.rank % 2]
    net = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2)).double()
    net = evenstep.SyncBatchNorm.convert_sync_batchnorm(net, group)
    x = torch.arange(24.0, dtype=torch.float64).view(12, 2).sin()[world.rank * 4 : world.rank * 4 + 4]
    members = [0, 2] if world.rank != 1 else [1]
    whole = torch.arange(24.0, dtype=torch.float64).view(3, 4, 2).sin()[members].view(-1, 2)
    plain = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2)).double()
    begin = 4 * members.index(world.rank)
    close(net(x), plain(whole)[begin : begin + 4], "in a group")


# ---------------------------------------------------------------------- inside DistributedDataParallel


class Net(nn.Module):
    """Three normalisations, one of them met twice; the second part perhaps in a checkpoint."""

    def __init__(self, norm, seed, recompute=None):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.norms = nn.ModuleList(norm(6) for _ in range(3))
        self.recompute = recompute
        self.double()
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)

    def middle(self, x):
        return self.norms[2](torch.tanh(self.second(self.norms[1](x))))

    def forward(self, x):
        x = torch.tanh(self.norms[0](self.first(x)))
        x = self.middle(x) if self.recompute is None else checkpoint(self.middle, x, use_reentrant=self.recompute)
        return self.head(torch.tanh(self.norms[1](x)))


def compare(model, plain, what, tolerance=1e-10):
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        close(a.grad, b.grad, f"{what}: gradient of {name}", tolerance)
    for (name, a), b in zip(model.named_buffers(), plain.buffers(), strict=True):
        close(a, b, f"{what}: {name}", tolerance)


def wrapped(seed, num_steps, norm, recompute, broadcast, hooked=False):
    """Shares of random lengths, empty ones among them, in micro-batches; torch's class is replaced.

    The k-th parts of all ranks are normalised together. A loss that is no number and has no weight has no effect on the
    others' gradients, though its rows are part of the batch.
    """
    world = evenstep.init(quiet=True)
    shared, size = random.Random(seed), world.world_size
    model = evenstep.DistributedDataParallel(
        Net(norm, seed, recompute), bucket_cap_mb=1e-4, broadcast_buffers=broadcast, world=world
    )
    if hooked:  # a hook needs the sum of weights, while a rank without samples takes part in statistics
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    plain = Net(nn.BatchNorm1d, seed, recompute)
    if norm is nn.BatchNorm1d:
        model.module = evenstep.SyncBatchNorm.convert_sync_batchnorm(model.module)
    kinds = {type(each) for each in model.modules() if "BatchNorm" in type(each).__name__}
    assert kinds == {evenstep.SyncBatchNorm}
    assert isinstance(model.module.norms[0], nn.SyncBatchNorm)
    generator = torch.Generator().manual_seed(seed)
    for step in range(num_steps):
        rows, num_parts, weighted = shared.randint(2, 9), shared.choice([1, 1, 2, 3]), shared.random() < 0.7
        cuts = [0] * size + [rows] if step == 1 else random_cuts(shared, rows, size)
        if recompute:  # reentrant checkpoints want the first pass of every rank to be a real one
            cuts, num_parts = [0, *range(1, size), rows], 1
        muted = shared.randrange(size) if weighted and num_parts == 1 and shared.random() < 0.5 else None
        whole = torch.randn(rows, 5, generator=generator).double()
        parts = [split(share_of(whole, cuts, rank), num_parts) for rank in range(size)]
        most = max(map(len, parts))
        parts = [[whole[:0]] * (most - len(each)) + each for each in parts]  # the empty ones come first
        counts = [[0 if rank == muted else len(part) for part in each] for rank, each in enumerate(parts)]
        if min(sum(len(each[index]) for each in parts) for index in range(most)) < 2 or not any(map(any, counts)):
            continue  # no variance, or nothing that counts
        mine = parts[world.rank]
        given = model.microbatches(share_of(whole, cuts, world.rank), num_parts) if num_parts > 1 else mine
        for number, (part, expected) in enumerate(zip(given, mine, strict=True)):
            assert torch.equal(part, expected)
            loss = model(part).square().mean()
            if weighted:
                loss = loss * float("nan") if world.rank == muted else loss
                model.backward(loss, weight=counts[world.rank][number])
            else:
                loss.backward()
        total = sum(map(sum, counts))
        for index in range(most):
            together = [each[index] for each in parts]
            losses = plain(torch.cat(together)).square().mean(1).split([len(part) for part in together])
            shares = [each[index] / total if weighted else 1 / size for each in counts]
            sum(each.mean() * share for each, share in zip(losses, shares, strict=True) if len(each)).backward()
        compare(model, plain, f"seed {seed}, step {step}, cuts {cuts}, {num_parts} parts, weighted {weighted}, {muted}")
        model.zero_grad()
        plain.zero_grad()


@SIZES
def test_a_wrapped_model_steps_as_one_process(ranks, fresh_seed, nproc):
    ranks.run(wrapped, nproc, fresh_seed, 16, nn.SyncBatchNorm, None, True)
    ranks.run(wrapped, nproc, fresh_seed, 8, nn.SyncBatchNorm, None, True, True)


@pytest.mark.parametrize(("recompute", "broadcast"), [(False, True), (True, False), (None, False)])
def test_checkpoints_and_buffers_that_are_not_broadcast(ranks, fresh_seed, recompute, broadcast):
    ranks.run(wrapped, 2, fresh_seed, 8, evenstep.SyncBatchNorm, recompute, broadcast)


@on_ranks(2)
def test_parts_are_warned_of_once(world):
    model = evenstep.DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), evenstep.SyncBatchNorm(4)), world=world)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for num_parts in (1, 2, 2):
            assert not caught or num_parts == 2
            for part in model.microbatches(torch.randn(4, 3), num_parts):
                model.backward(model(part).square().mean(), weight=len(part))
            model.zero_grad()
    told = [each for each in caught if "microbatches with SyncBatchNorm: 2 parts" in str(each.message)]
    assert [each.filename for each in told] == ([__file__] if world.is_main else [])


# ---------------------------------------------------------------------- ranks that have run out of batches


class Straight(Net):
    """Every normalisation once, in the order of `named_modules`."""

    def forward(self, x):
        x = self.norms[1](torch.tanh(self.norms[0](self.first(x))))
        return self.head(torch.tanh(self.norms[2](self.second(x))))


class Either(nn.ModuleDict):
    """One of two layers, as the call says."""

    def forward(self, x, name):
        return self[name](x)


@on_ranks(2)
def test_a_layer_that_other_ranks_do_not_run_is_an_error_with_names(world):
    model = Either({name: evenstep.SyncBatchNorm(3) for name in ("left", "right")})
    model = evenstep.DistributedDataParallel(model)
    x = torch.randn(4, 3, requires_grad=True)
    pattern = "rank 0 is in forward of SyncBatchNorm 'right'; rank 1 is in forward of SyncBatchNorm 'left'"
    with pytest.raises(MismatchError, match=pattern):
        model(x, "left" if world.rank else "right")
    outs = [model(x, name).sin().sum() for name in ("left", "right", "left")]
    pattern = "rank 0 is in backward of SyncBatchNorm 'left'; rank 1 is in backward of SyncBatchNorm 'right'"
    with pytest.raises(MismatchError, match=pattern):
        outs[world.rank].backward()
    layer = evenstep.DistributedDataParallel(evenstep.SyncBatchNorm(3))
    out = layer(x).sin().sum()
    with pytest.raises(MismatchError, match=r"(for|back)ward of a SyncBatchNorm of 3 channels: "):
        out.backward() if world.rank else layer(x)
    world.close()  # the channel is of no use after that


def joined(seed, num_parts, least):
    """Rank r has `least` + r batches; whoever has no more takes part with count 0, and the others don't notice.

    Who never had one takes part in the layers in their order, and back.
    """
    world = evenstep.init(quiet=True)
    kind = Net if least else Straight
    model = evenstep.DistributedDataParallel(kind(evenstep.SyncBatchNorm, seed), bucket_cap_mb=1e-4, world=world)
    plain = kind(nn.BatchNorm1d, seed)
    generator = torch.Generator().manual_seed(seed)
    batches = torch.randn(world.world_size + least, world.world_size, 4, 5, generator=generator).double()
    with model.join():
        for step in range(least + world.rank):
            active = list(range(max(0, step - least + 1), world.world_size))
            mine = batches[step, world.rank]
            for part in model.microbatches(mine, num_parts) if least else [mine]:
                model.backward(model(part).square().mean(), weight=len(part))
            length = 4 // num_parts
            for begin in range(0, 4, length):
                whole = batches[step, active, begin : begin + length].flatten(0, 1)
                (plain(whole).square().mean() / num_parts).backward()
            compare(model, plain, f"seed {seed}, step {step}")
            model.zero_grad()
            plain.zero_grad()
    return [buffer.tolist() for buffer in model.buffers()]


@pytest.mark.parametrize(("num_parts", "least"), [(1, 2), (2, 2), (1, 0)])
@SIZES
def test_ranks_that_leave_a_joined_loop_early(ranks, fresh_seed, nproc, num_parts, least):
    buffers = ranks.run(joined, nproc, fresh_seed, num_parts, least)
    assert all(each == buffers[0] for each in buffers)


@pytest.mark.parametrize("is_weighted", [True, False])
@on_ranks(1, 3)
def test_rows_of_a_dummy_batch_count_nothing_in_a_wrapped_part(world, fresh_seed, is_weighted):
    """A part with the layer is wrapped, too, and the last rank's share is empty in some steps."""
    torch.manual_seed(fresh_seed)
    part = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Tanh()).double()
    alone = nn.Sequential(copy.deepcopy(part), nn.Linear(4, 2).double())
    part = evenstep.SyncBatchNorm.convert_sync_batchnorm(part)
    module = nn.Sequential(evenstep.DistributedDataParallel(part), copy.deepcopy(alone[1]))
    model = evenstep.DistributedDataParallel(module)
    for step in range(3):
        torch.manual_seed(fresh_seed + step)
        has_none = step > 0 and world.world_size > 1
        rows = [0 if has_none and rank == world.world_size - 1 else 5 for rank in range(world.world_size)]
        shares = torch.randn(sum(rows), 6, dtype=torch.float64).split(rows)
        loss = model(shares[world.rank]).square().mean()
        if is_weighted:
            model.backward(loss, weight=rows[world.rank])
        else:
            loss.backward()
        share = 1.0 if is_weighted else sum(map(bool, rows)) / world.world_size
        (alone(torch.cat(shares)).square().mean() * share).backward()
        for ours, wanted in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, wanted.grad)
        for ours, wanted in zip(model.buffers(), alone.buffers(), strict=True):
            torch.testing.assert_close(ours, wanted)
        model.zero_grad()
        alone.zero_grad()
