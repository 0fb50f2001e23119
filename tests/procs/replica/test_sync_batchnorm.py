"""Batch normalisation over ranks against one process on the whole batch, in float64, to 1e-10."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import evenstep
from evenstep.errors import MismatchError
from evenstep.replica.normalization.sync_batchnorm import SyncLayers
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


def wrapped(seed, num_steps, norm, recompute, broadcast):
    """Shares of random lengths, empty ones among them, also on rank 0; torch's class is replaced."""
    world = evenstep.init(quiet=True)
    shared = random.Random(seed)
    model = evenstep.DistributedDataParallel(
        Net(norm, seed, recompute), bucket_cap_mb=1e-4, broadcast_buffers=broadcast, world=world
    )
    plain = Net(nn.BatchNorm1d, seed, recompute)
    if norm is nn.BatchNorm1d:
        model.module = evenstep.SyncBatchNorm.convert_sync_batchnorm(model.module)
    kinds = {type(each) for each in model.modules() if "BatchNorm" in type(each).__name__}
    assert kinds == {evenstep.SyncBatchNorm}
    assert isinstance(model.module.norms[0], nn.SyncBatchNorm)
    generator = torch.Generator().manual_seed(seed)
    for step in range(num_steps):
        rows = shared.randint(2, 9)
        cuts = [0] * world.world_size + [rows] if step == 1 else random_cuts(shared, rows, world.world_size)
        if recompute:  # reentrant checkpoints want the first pass of every rank to be a real one
            cuts = [0, *range(1, world.world_size), rows]
        whole, target = torch.randn(rows, 5, generator=generator).double(), torch.ones(rows, 2).double()
        mine = share_of(whole, cuts, world.rank)
        loss = nn.functional.mse_loss(model(mine), share_of(target, cuts, world.rank))
        model.backward(loss, weight=len(mine))
        nn.functional.mse_loss(plain(whole), target).backward()
        compare(model, plain, f"seed {seed}, step {step}, cuts {cuts}")
        model.zero_grad()
        plain.zero_grad()


@SIZES
def test_a_wrapped_model_steps_as_one_process(ranks, fresh_seed, nproc):
    ranks.run(wrapped, nproc, fresh_seed, 5, nn.SyncBatchNorm, None, True)


@pytest.mark.parametrize(("recompute", "broadcast"), [(False, True), (True, False), (None, False)])
def test_checkpoints_and_buffers_that_are_not_broadcast(ranks, fresh_seed, recompute, broadcast):
    ranks.run(wrapped, 2, fresh_seed, 5, evenstep.SyncBatchNorm, recompute, broadcast)


def in_microbatches(seed, plain_backward):
    """All ranks run equally many parts, and the k-th parts of all ranks are normalised together."""
    world = evenstep.init(quiet=True)
    model = evenstep.DistributedDataParallel(Net(evenstep.SyncBatchNorm, seed), world=world)
    plain = Net(nn.BatchNorm1d, seed)
    whole = torch.randn(8, 5, generator=torch.Generator().manual_seed(seed)).double()
    cuts = [0, 6, 8, 8, 8]
    mine = share_of(whole, cuts, world.rank)
    # Six, two and no rows in at most three parts, the empty ones first.
    parts = [[[0, 1], [2, 3], [4, 5]], [[], [6], [7]], [[], [], []]][: world.world_size]
    num_parts = 0
    for part in model.microbatches(mine, 3):
        assert torch.equal(part, whole[parts[world.rank][num_parts]])
        num_parts += 1
        loss = model(part).square().mean()
        loss.backward() if plain_backward else model.backward(loss, weight=len(part))
    for index in range(3):
        together = [each[index] for each in parts]
        out = plain(whole[[row for rows in together for row in rows]]).square()
        if plain_backward:
            sizes = [len(rows) for rows in together]
            (sum(each.mean() for each in out.split(sizes) if len(each)) / world.world_size).backward()
        else:
            (out.mean(1).sum() / 8).backward()
    compare(model, plain, f"seed {seed}")
    return num_parts


@pytest.mark.parametrize("plain_backward", [True, False])
@pytest.mark.parametrize("nproc", [2, 3])
def test_microbatches_of_unequal_shares_do_not_deadlock(ranks, fresh_seed, nproc, plain_backward):
    assert ranks.run(in_microbatches, nproc, fresh_seed, plain_backward) == [3] * nproc


@on_ranks(2)
def test_a_nan_with_weight_zero_stays_where_it_is(world):
    """A loss that doesn't count has no effect on the others' gradients, though its rows are part of the batch."""
    model = evenstep.DistributedDataParallel(Net(evenstep.SyncBatchNorm, 0), world=world)
    plain = Net(nn.BatchNorm1d, 0)
    whole = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).double()
    loss = model(whole[world.rank * 3 :][:3]).square().mean()
    model.backward(loss * float("nan") if world.rank else loss, weight=0 if world.rank else 3)
    plain(whole)[:3].square().mean().backward()
    compare(model, plain, "NaN with weight 0")


# ---------------------------------------------------------------------- ranks that have run out of batches


class Windows:
    """What the layers see of an engine: a window is a forward and a backward pass."""

    num_reductions = 0

    def contribution(self):
        return 1.0

    def announce(self):
        pass


class Straight(Net):
    """Every normalisation once, in the order of `named_modules`."""

    def forward(self, x):
        x = self.norms[1](torch.tanh(self.norms[0](self.first(x))))
        return self.head(torch.tanh(self.norms[2](x)))


def replayed(seed, has_record):
    """Rank 0 goes on; the others shadow its windows, and their running statistics stay equal."""
    world, engine = evenstep.init(quiet=True), Windows()
    kind = Net if has_record else Straight
    net, plain = kind(evenstep.SyncBatchNorm, seed), kind(nn.BatchNorm1d, seed)
    layers = SyncLayers(net, world, engine)
    generator = torch.Generator().manual_seed(seed)
    if has_record:
        whole = torch.randn(world.world_size * 2, 5, generator=generator).double()
        net(whole[world.rank * 2 :][:2]).square().sum().backward()
        plain(whole).square().sum().backward()
        net.zero_grad(), plain.zero_grad()
    x = torch.randn(5, 5, generator=generator).double()
    for _ in range(2):
        engine.num_reductions += 1
        if world.rank == 0:
            net(x).square().sum().backward()
        else:
            layers.shadow()
        plain(x).square().sum().backward()
    for (name, a), b in zip(net.named_buffers(), plain.buffers(), strict=True):
        close(a, b, name)
    if world.rank == 0:
        for (name, a), b in zip(net.named_parameters(), plain.parameters(), strict=True):
            if b.grad is not None:
                close(a.grad, b.grad, name)
    return [(list(layers.layers.values()).index(layer), is_backward) for layer, is_backward in layers.recorded]


@pytest.mark.parametrize("nproc", [2, 3])
def test_a_rank_without_batches_replays_what_was_recorded(ranks, fresh_seed, nproc):
    recorded = ranks.run(replayed, nproc, fresh_seed, True)
    assert recorded[0] == [(0, False), (1, False), (2, False), (1, False), (1, True), (2, True), (1, True), (0, True)]
    assert all(each == recorded[0] for each in recorded)


@pytest.mark.parametrize("nproc", [2, 3])
def test_a_rank_that_never_had_a_batch_takes_the_layers_in_order_and_back(ranks, fresh_seed, nproc):
    ranks.run(replayed, nproc, fresh_seed, False)


@pytest.mark.parametrize("backward", [True, False])
@on_ranks(2)
def test_a_changed_sequence_is_an_error_with_names(world, backward):
    """Rank 0 uses another layer than the one that is replayed."""
    net = nn.ModuleDict({name: evenstep.SyncBatchNorm(3) for name in ("left", "right")})
    engine = Windows()
    layers = SyncLayers(net, world, engine)
    x = torch.randn(4, 3, requires_grad=True)
    if backward:
        outs = [net["left"](x).sin().sum(), net["right"](x).sin().sum()]
        pattern = "rank 0 is in backward of SyncBatchNorm 'left'; rank 1 is in backward of SyncBatchNorm 'right'"
        with pytest.raises(MismatchError, match=pattern):
            outs[world.rank].backward()
        return
    net["left"](x).sum().backward()
    pattern = "rank 0 is in forward of SyncBatchNorm 'right'; rank 1 is in forward of SyncBatchNorm 'left'"
    with pytest.raises(MismatchError, match=pattern):
        layers.shadow() if world.rank else net["right"](x)


@on_ranks(2)
def test_a_forward_that_meets_a_backward_is_named_too(world):
    net = nn.ModuleDict({"only": evenstep.SyncBatchNorm(3)})
    engine = Windows()
    layers = SyncLayers(net, world, engine)
    out = net["only"](torch.randn(4, 3, requires_grad=True)).sin().sum()
    with pytest.raises(MismatchError, match=r"(for|back)ward of SyncBatchNorm 'only': "):
        out.backward() if world.rank else layers.shadow()
    world.close()  # the channel is of no use after that


def joined(seed, num_parts):
    """Rank r has 2 + r batches; whoever has no more takes part with count 0, and the others don't notice."""
    world = evenstep.init(quiet=True)
    model = evenstep.DistributedDataParallel(Net(evenstep.SyncBatchNorm, seed), bucket_cap_mb=1e-4, world=world)
    plain = Net(nn.BatchNorm1d, seed)
    generator = torch.Generator().manual_seed(seed)
    batches = torch.randn(world.world_size + 1, world.world_size, 4, 5, generator=generator).double()
    with model.join():
        for step in range(2 + world.rank):
            active = list(range(max(0, step - 1), world.world_size))
            for part in model.microbatches(batches[step, world.rank], num_parts):
                model.backward(model(part).square().mean(), weight=len(part))
            length = 4 // num_parts
            for begin in range(0, 4, length):
                whole = batches[step, active, begin : begin + length].flatten(0, 1)
                (plain(whole).square().mean() / num_parts).backward()
            compare(model, plain, f"seed {seed}, step {step}")
            model.zero_grad()
            plain.zero_grad()
    return [buffer.tolist() for buffer in model.buffers()]


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("nproc", [2, 3])
def test_ranks_that_leave_a_joined_loop_early(ranks, fresh_seed, nproc, num_parts):
    buffers = ranks.run(joined, nproc, fresh_seed, num_parts)
    assert all(each == buffers[0] for each in buffers)


def wrapped_part_without_samples(seed: int, is_weighted: bool) -> None:
    """A part with the layer is wrapped, too, and the last rank's share is empty in some steps."""
    world = evenstep.init(quiet=True)
    torch.manual_seed(seed)
    part = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Tanh()).double()
    alone = nn.Sequential(copy.deepcopy(part), nn.Linear(4, 2).double())
    part = evenstep.SyncBatchNorm.convert_sync_batchnorm(part)
    module = nn.Sequential(evenstep.DistributedDataParallel(part), copy.deepcopy(alone[1]))
    model = evenstep.DistributedDataParallel(module)
    for step in range(3):
        torch.manual_seed(seed + step)
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


@pytest.mark.parametrize("is_weighted", [True, False])
@pytest.mark.parametrize("nproc", [1, 3])
def test_rows_of_a_dummy_batch_count_nothing_in_a_wrapped_part(ranks, fresh_seed, nproc, is_weighted):
    ranks.run(wrapped_part_without_samples, nproc, fresh_seed, is_weighted)
