"""The engine against the reference engine and torch's own, on 2, 3 and 4 ranks.

python -m tests.procs.replica.test_engine 1000        # the long run: that many random windows on each number of ranks
"""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import random
import sys
import time
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.checkpoint import checkpoint

import evenstep
from evenstep.errors import ConfigurationError, MismatchError, UsageError
from evenstep.testing import RankPool
from tests.ranks import on_ranks
from tests.reference_engine import ReferenceReplica

SIZES = pytest.mark.parametrize("nproc", [2, 3])


class Branches(nn.Module):
    """Layers of which a call names the ones it uses."""

    def __init__(self, num_layers, width, seed):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))
        self.double()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / width**0.5)

    def forward(self, x, use):
        for index in use:
            x = torch.tanh(self.layers[index](x))
        return x


def grads(model):
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def assert_same_grads(got, expected, context=""):
    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert (a is None) == (b is None), f"{context}: parameter {index} is {a} and should be {b}"
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13, msg=lambda m, i=index: f"{context}, {i}: {m}")


# ---------------------------------------------------------------------- random cases against the reference


def random_windows(seed, num_models, num_windows, world=None):
    """Random models, buckets, unused layers, accumulation, weights and empty shares. Returns the number of windows."""
    world = world or evenstep.init(quiet=True)
    shared, own = random.Random(seed), random.Random(seed * 1000 + world.rank)
    checked = 0
    for _ in range(num_models):
        num_layers, width = shared.randint(1, 9), shared.choice([1, 3, 16])
        model_seed = shared.randrange(1 << 30)
        model = evenstep.DistributedDataParallel(
            Branches(num_layers, width, model_seed),
            bucket_cap_mb=shared.choice([1e-5, 1e-3, 25]),
            first_bucket_cap_mb=shared.choice([1e-5, 1]),
            world=world,
        )
        oracle_module = Branches(num_layers, width, model_seed).to(world.device)
        for window in range(num_windows):
            weighted, keep_views = shared.random() < 0.6, shared.random() < 0.3
            oracle = ReferenceReplica(oracle_module, world)
            num_microbatches = own.randint(1, 4)
            for index in range(num_microbatches):
                use = [own.randrange(num_layers) for _ in range(own.randint(1, num_layers))]
                rows = own.choice([0, 1, 2, 5])
                weight = own.choice([float(rows), rows * 7.5]) if weighted else None
                x = torch.randn(rows, width, dtype=torch.float64, device=world.device)
                last = index == num_microbatches - 1
                inside_at_forward = own.random() < 0.5  # must make no difference: the state at backward decides
                with model.no_sync() if inside_at_forward else contextlib.nullcontext():
                    loss = model(x, use).square().mean()
                with contextlib.nullcontext() if last else model.accumulate():
                    if weighted:
                        model.backward(loss, weight=weight)
                    else:
                        loss.backward()
                if rows:
                    oracle.add(oracle_module(x, use).square().mean(), weight if weighted else 1.0)
            oracle.average(over_ranks=not weighted)
            used_by_stand_in = {i for i, g in enumerate(grads(model)) if g is not None and not g.any()}
            expected = grads(oracle_module)
            for i in used_by_stand_in:  # a gradient of zeros, where the oracle may know of none
                if expected[i] is None:
                    expected[i] = torch.zeros_like(grads(model)[i])
            assert_same_grads(grads(model), expected, f"seed {seed}, window {window}, weighted {weighted}")
            checked += 1
            model.zero_grad(set_to_none=not keep_views)
            oracle_module.zero_grad()
    return checked


@pytest.mark.extended(ranks=3)
@SIZES
def test_random_windows_equal_the_reference(ranks, fresh_seed, nproc):
    assert ranks.run(random_windows, nproc, fresh_seed, 12, 6) == [72] * nproc


# ---------------------------------------------------------------------- what backward means


@on_ranks(2)
def test_mixing_the_two_backwards_between_ranks_is_an_error_on_all(world):
    model = evenstep.DistributedDataParallel(Branches(2, 4, 0), world=world)
    loss = model(torch.ones(2, 4, dtype=torch.float64), [0]).sum()
    with pytest.raises(UsageError, match=r"1 ranks called loss\.backward"):
        loss.backward() if world.rank == 0 else model.backward(loss)


@pytest.mark.parametrize("as_tensor", [True, False])
@on_ranks(2, 3)
def test_a_loss_with_weight_zero_is_ignored_even_if_it_is_nan(world, as_tensor):
    model = evenstep.DistributedDataParallel(Branches(2, 4, 0), world=world)
    module = Branches(2, 4, 0)
    x = torch.full((3, 4), float(world.rank + 1), dtype=torch.float64)
    for synchronise in (False, True):  # also in the middle of a window
        with contextlib.nullcontext() if synchronise else model.accumulate():
            loss = model(x, [0, 1]).sum()
            weight = 1.0
            if world.rank == 1:
                loss, weight = loss * float("nan"), 0.0
            model.backward(loss, weight=torch.tensor(weight) if as_tensor else weight)
    others = [torch.full((3, 4), r + 1.0, dtype=torch.float64) for r in range(world.world_size) if r != 1]
    torch.stack([module(x, [0, 1]).sum() for x in others]).mean().backward()
    assert_same_grads(grads(model), grads(module), "NaN with weight 0")
    model.zero_grad()
    model.backward(model(x, [0]).sum(), weight=0)
    assert grads(model) == [None] * 4, "a window without any weight has no gradient"
    for wrong, told in (
        (torch.ones(2), r"the loss is \[2\], not a tensor of one number"),
        (1.0, "of type float, not a"),
    ):
        with pytest.raises(ConfigurationError, match=told):
            model.backward(wrong, weight=1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@on_ranks(2)
def test_weights_do_not_overflow_sixteen_bits(world, dtype):
    """Sums of 30,000 tokens a rank would overflow float16 if they were not scaled first."""
    model = evenstep.DistributedDataParallel(nn.Linear(4, 4, bias=False).to(dtype), world=world)
    x = torch.full((2, 4), 2.0 * (world.rank + 1), dtype=dtype)
    for _ in range(2):
        with model.accumulate():
            model.backward(model(x).float().sum(dim=1).mean(), weight=30_000.0 * (world.rank + 1))
        model.backward(model(x).float().sum(dim=1).mean(), weight=30_000.0 * (world.rank + 1))
        mean = sum(2.0 * (r + 1) * (r + 1) for r in range(world.world_size)) / sum(
            r + 1 for r in range(world.world_size)
        )
        torch.testing.assert_close(model.module.weight.grad, torch.full((4, 4), mean, dtype=dtype), rtol=1e-2, atol=0)
        model.zero_grad()


@pytest.mark.parametrize("how", ["plain", "empty", "accumulated", "probe"])
@on_ranks(2)
def test_large_weights_make_no_scaler_skip_a_step_under_autocast(world, fresh_seed, how):
    """Gradients of 2,048 rows times their number overflowed float16 within autocast, and steps were skipped."""
    results = []
    for is_ours in (True, False):
        torch.manual_seed(fresh_seed)
        inner = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        model = evenstep.DistributedDataParallel(inner, world=world) if is_ours else inner
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        for step in range(4):
            x = torch.randn(2048, 8)
            y = torch.randn(2048, 4)
            if how == "empty" and step == 0:
                parts = [slice(0, 2048), slice(2048, 2048)]
            else:
                parts = [slice(0, 1500), slice(1500, 2048)]
            own = parts[world.rank] if is_ours else slice(None)
            if how == "probe" and is_ours and step == 0 and world.rank == 0:
                with model.no_sync():
                    model.backward(model(x[:3]).square().mean(), weight=3.0)
                model.zero_grad()
            num_parts = 2 if how == "accumulated" else 1
            rows = list(zip(x[own].tensor_split(num_parts), y[own].tensor_split(num_parts), strict=True))
            for number, (each_x, each_y) in enumerate(rows):
                with torch.autocast("cpu", torch.float16):
                    outputs = model(each_x)
                loss = (outputs.float() - each_y).square().sum() / max(1, each_y.numel())
                if not is_ours:
                    scaler.scale(loss * (len(each_x) / 2048)).backward()
                    continue
                with contextlib.nullcontext() if number == num_parts - 1 else model.no_sync():
                    model.backward(loss, weight=float(len(each_x)), scaler=scaler)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append((scaler.get_scale(), torch.cat([p.detach().flatten() for p in inner.parameters()])))
    ours, alone = results
    assert ours[0] == alone[0] == 65536.0
    torch.testing.assert_close(ours[1], alone[1], rtol=2e-3, atol=2e-4)


# ---------------------------------------------------------------------- accumulation


@on_ranks(2)
def test_a_loop_over_microbatches_must_be_finished(world):
    model = evenstep.DistributedDataParallel(Branches(2, 4, 0), world=world)
    x = torch.ones(5, 4, dtype=torch.float64)
    reductions = model.engine.num_reductions
    parts = model.microbatches(x, 2)
    model.backward(model(next(parts), [0]).sum(), weight=3)
    next(parts)  # the last part, and no backward
    with pytest.raises(UsageError, match="the last part was not followed by a backward pass"):
        next(parts)
    model.zero_grad()
    for part in model.microbatches(x, 3):
        model.backward(model(part, [0]).mean(), weight=len(part))
    assert model.engine.num_reductions == reductions + 1
    model.zero_grad()
    for part in model.microbatches(x, 3):
        model.backward(model(part, [0]).mean(), weight=len(part))
        break
    with pytest.raises(UsageError, match="left before its end"):
        model(x, [0])
    model.zero_grad()  # throws the half-made sum away
    model.backward(model(x, [0]).mean(), weight=5)
    assert model.engine.num_reductions == reductions + 2


@pytest.mark.parametrize("set_to_none", [True, False, None])
@on_ranks(2)
def test_what_is_left_and_an_empty_share_allow_one_kind_of_backward(world, set_to_none):
    model = evenstep.DistributedDataParallel(Branches(1, 4, 0), world=world)
    x = torch.ones(2, 4, dtype=torch.float64)
    model(x, [0]).mean().backward()
    if set_to_none is not None:
        model.zero_grad(set_to_none)
    with (
        contextlib.nullcontext()
        if set_to_none is not None
        else pytest.raises(UsageError, match="Call zero_grad between them")
    ):
        for part in model.microbatches(x[: 2 - 2 * world.rank], 1):
            model.backward(model(part, [0]).mean(), weight=len(part))


# ---------------------------------------------------------------------- empty shares


class Network(nn.Module):
    """Batch normalisation, dropout and a logarithm that is infinite at zero."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
        self.dropout, self.head = nn.Dropout(0.5), nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.dropout(self.norm(self.linear(x.abs().log()))))


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("first_batch_is_empty", [True, False])
@on_ranks(3)
def test_an_empty_share_leaves_no_trace(world, first_batch_is_empty, plain):
    world.diverge_random_streams()  # which the first training forward would do
    torch.manual_seed(0)
    model = evenstep.DistributedDataParallel(Network(), world=world)
    if not first_batch_is_empty:
        model.backward(model(torch.rand(3, 4) + 1).sum(), weight=3)
        model.zero_grad()
    x = torch.rand(5, 4) + 1 if world.rank == 0 else torch.rand(0, 4)
    state = torch.get_rng_state()
    buffers = [buffer.clone() for buffer in model.buffers()]
    out = model(x)
    assert out.shape == (len(x), 2)
    if world.rank != 0:
        assert torch.equal(state, torch.get_rng_state())
        assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    loss = nn.functional.mse_loss(out, torch.ones(len(x), 2))
    assert bool(loss.isnan()) == (len(x) == 0)
    if plain:
        loss.backward()
    else:
        model.backward(loss, weight=len(x))
    got = grads(model)
    assert all(g is not None and g.isfinite().all() and g.any() for g in got[:1] + got[-2:])
    if world.rank != 0:
        model.zero_grad()
        with pytest.raises(UsageError, match=r"weight=1.0 for an empty share"):
            model.backward(model(x).sum(), weight=1.0)
    sums = [float(g.double().sum()) for g in got]
    assert world.exchange(sums) == [sums] * 3


class WithLoss(nn.Module):
    """Returns outputs and, as some models do, a loss that is computed inside, and so also over a dummy batch."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(3, 2)
        self.double()

    def forward(self, x):
        out = self.layer(x).tanh()
        return out, out.square().sum()


@pytest.mark.parametrize("sharded", [False, True])
@on_ranks(1, 2, pytest.param(3, marks=pytest.mark.extended))
def test_a_pass_counts_for_what_its_loss_goes_through(world, fresh_seed, sharded):
    """What a pass counts for depends on the outputs that its loss goes through, whichever forward passes there were."""
    chance, own = random.Random(fresh_seed), random.Random(fresh_seed * 1000 + world.rank)
    model = evenstep.DistributedDataParallel(WithLoss(fresh_seed), world=world)
    alone = WithLoss(fresh_seed)
    if sharded:
        optimizer = evenstep.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(24):
        optimizer.zero_grad()
        reference.zero_grad()
        plain, together = chance.random() < 0.5, chance.random() < 0.5
        given = chance.random() < 0.5  # the weight
        sizes = [[chance.choice([0, 2, 3]) for _ in range(2)] for _ in range(world.world_size)]
        sizes[chance.randrange(world.world_size)] = [2, 3]
        generator = torch.Generator().manual_seed(fresh_seed + step)
        shares = [[torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in each] for each in sizes]
        abandoned = [model(torch.ones(2 * n, 3, dtype=torch.float64)) for n in own.choices([0, 1], k=own.randrange(3))]
        losses = [model(x)[1] for x in shares[world.rank]]
        del abandoned[1:]
        if own.random() < 0.5:
            losses.reverse()
            shares[world.rank].reverse()

        def weight_of(xs, *, given=given, plain=plain):
            num_samples = sum(map(len, xs))
            return num_samples if given and not plain else float(num_samples > 0)

        def run(loss, xs, *, given=given, plain=plain):
            if plain:
                loss.backward()
            else:
                model.backward(loss, **({"weight": weight_of(xs)} if given else {}))

        if together:
            run(sum(losses), shares[world.rank])
        else:
            with model.accumulate():
                run(losses[0], shares[world.rank][:1])
            run(losses[1], shares[world.rank][1:])
        total, terms = 0.0, []
        for each in shares:
            for xs in [each] if together else [each[:1], each[1:]]:
                total += weight_of(xs)
                terms += [weight_of(xs) * sum(alone(x)[1] for x in xs if len(x))] if weight_of(xs) else []
        (sum(terms) / (world.world_size if plain else total)).backward()
        optimizer.step()
        reference.step()
        for one, other in zip(model.parameters(), alone.parameters(), strict=True):
            context = f"seed {fresh_seed}, step {step}, plain {plain}, together {together}, given {given}, {sizes}"
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13, msg=lambda m, c=context: f"{c}: {m}")


# ---------------------------------------------------------------------- unused parameters, buffers


# ---------------------------------------------------------------------- overlap, views, cost


class LookAtTheEngine(torch.autograd.Function):
    """Identity; its backward waits until a bucket that was launched before has arrived."""

    @staticmethod
    def forward(ctx, x, seen):
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        model = ctx.seen["model"]
        deadline = time.monotonic() + 30
        works = [bucket.work for bucket in model.engine.buckets if bucket.work is not None]
        ctx.seen["num_in_flight"] = len(works)
        while works and not all(work.is_completed() for work in works) and time.monotonic() < deadline:
            time.sleep(0.001)
        ctx.seen["arrived"] = bool(works) and all(work.is_completed() for work in works)
        ctx.seen["backward_had_ended"] = model.engine.num_reductions > ctx.seen["reductions"]
        return grad, None


@on_ranks(2)
def test_all_reduces_travel_and_arrive_before_the_backward_pass_has_ended(world):
    seen = {}

    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.third = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            return self.third(self.second(LookAtTheEngine.apply(self.first(x), seen)))

    model = evenstep.DistributedDataParallel(Watched(), bucket_cap_mb=0.01, first_bucket_cap_mb=0.01, world=world)
    seen["model"] = model
    for _ in range(2):  # the first pass only counts
        seen["reductions"] = model.engine.num_reductions
        model(torch.randn(2, 64)).sum().backward()
    assert seen["num_in_flight"] >= 2
    assert seen["arrived"]
    assert not seen["backward_had_ended"]


@on_ranks(2)
def test_gradients_are_views_and_are_copied_at_most_once(world):
    model = evenstep.DistributedDataParallel(Branches(3, 8, 0), bucket_cap_mb=1e-3, world=world)
    copies = []
    original = torch._foreach_copy_
    x = torch.ones(2, 8, dtype=torch.float64)
    for step in range(4):
        torch._foreach_copy_ = lambda into, what: (copies.append(len(into)), original(into, what))
        try:
            model(x, [0, 1, 2]).sum().backward()
        finally:
            torch._foreach_copy_ = original
        views = [view for bucket in model.engine.buckets for view in bucket.views]
        assert {id(p.grad) for p in model.parameters()} == {id(view) for view in views}
        if step == 1:
            assert sum(copies) == 6  # all of them, in one batch per bucket
            assert len(copies) == len(model.engine.buckets)
        if step >= 2:
            assert copies == []  # nothing is copied while the views survive
        copies.clear()
        model.zero_grad(set_to_none=step == 0)


@on_ranks(2)
def test_a_steady_backward_pass_runs_no_python_function_per_parameter(world):
    """The engine's functions that run in a steady pass, for one bucket of 20, 80 and 240 parameters.

    Those of the transport aren't counted: it looks again and again whether the other rank has come.
    """
    counts = []
    for num_layers in (10, 40, 120):
        model = evenstep.DistributedDataParallel(Branches(num_layers, 2, 0), world=world, compare_every=0)
        x = torch.ones(2, 2, dtype=torch.float64)
        for step in range(5):
            loss = model(x, range(num_layers)).sum()
            num_calls = 0

            def count(frame, event, arg):
                nonlocal num_calls
                num_calls += event == "call" and "/replica/" in frame.f_code.co_filename

            sys.setprofile(count)
            try:
                loss.backward()
            finally:
                sys.setprofile(None)
            model.zero_grad(set_to_none=step % 2 == 0)
        assert len(model.engine.buckets) == 1
        counts.append(num_calls)
    assert 0 < counts[0] == counts[1] == counts[2]


class Path(nn.Module):
    """Multiplies by parameters in the order asked for, each in a reentrant checkpoint."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.a, self.b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    def forward(self, x, path):
        x = self.first(x)
        for name in path:
            x = checkpoint(self.multiply, x, name, use_reentrant=True)
        return x

    def multiply(self, x, name):
        return x * getattr(self, name)


@pytest.mark.parametrize("path", ["bba", "aba"])
@on_ranks(2)
def test_a_gradient_that_comes_after_its_bucket_was_sent_is_an_error_with_its_name(world, path):
    """Backward runs a path from its end. "bba": seen by the sentinel's hook; "aba": by the versions of the views."""
    model = evenstep.DistributedDataParallel(Path(), first_bucket_cap_mb=1.3e-4, bucket_cap_mb=1.3e-4, world=world)
    for _ in range(2):
        model(torch.ones(1, 2), "ba").sum().backward()
        model.zero_grad()
    assert next(bucket.names for bucket in model.engine.buckets) == ["a", "b"]
    with pytest.raises(UsageError, match=r"'[ab]'.* received another gradient"):
        model(torch.ones(1, 2), path).sum().backward()


# ---------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("count", "rank 0 has 4 parameters, rank {odd} has 6; the first that only rank {odd} has is '2.weight'"),
        ("shape", "parameter '1.weight' has shape [4, 4] on rank 0 but [5, 4] on rank {odd}"),
        ("dtype", "parameter '1.weight' has dtype float32 on rank 0 but float64 on rank {odd}"),
        ("frozen", "parameter '0.bias' has requires_grad True on rank 0 but False on rank {odd}"),
        ("name", "parameter 0 is 'a.weight' on rank 0 but 'b.weight' on rank {odd} (named otherwise or missing)"),
        ("buffer shape", "module buffer 'mean' has shape [1] on rank 0 but [2] on rank {odd}"),
        ("buffer dtype", "module buffer 'mean' has dtype float64 on rank 0 but int64 on rank {odd}"),
        ("buffer missing", "rank 0 has 1 module buffers, rank {odd} has 0; the first that only rank 0 has is 'mean'"),
        ("order", "parameter 0 is 'a.weight' on rank 0 but 'b.weight' on rank {odd} (registered in another order)"),
    ],
)
@on_ranks(2, 3)
def test_a_different_model_on_one_rank_is_an_error_on_all(world, kind, words):
    odd = world.rank == world.world_size - 1
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if odd and kind == "count":
        model.append(nn.Linear(4, 4))
    if odd and kind == "shape":
        model[1] = nn.Linear(4, 5)
    if odd and kind == "dtype":
        model[1] = model[1].double()
    if kind == "order":
        model = nn.Module()
        for name in reversed("ab") if odd else "ab":
            setattr(model, name, nn.Linear(4, 4))
    if odd and kind == "frozen":
        model[0].bias.requires_grad_(False)
    if kind == "name":
        model = nn.ModuleDict({"b" if odd else "a": nn.Linear(4, 4)})
    if kind == "buffer shape":
        model.register_buffer("mean", torch.zeros(2 if odd else 1))
    if kind == "buffer dtype":
        model.register_buffer("mean", torch.zeros(1, dtype=torch.int64 if odd else torch.float64))
    if kind == "buffer missing" and not odd:
        model.register_buffer("mean", torch.zeros(1))
    with pytest.raises(MismatchError) as error:
        evenstep.DistributedDataParallel(model, world=world)
    assert words.format(odd=world.world_size - 1) in str(error.value)
    assert world.exchange(str(error.value)) == [str(error.value)] * world.world_size


@pytest.mark.parametrize("weighted", [True, False])
@on_ranks(2)
def test_after_a_failed_backward_the_replicas_do_not_go_on(world, weighted):
    model = evenstep.DistributedDataParallel(Branches(2, 4, 0), world=world)
    x = torch.ones(2, 4, dtype=torch.float64)

    def explode(_):
        raise ArithmeticError("boom")

    loss, kept = model(x, [0, 1]).sum(), model(x, [1]).sum()
    model.module.layers[0].weight.register_hook(explode)
    with pytest.raises(ArithmeticError, match="boom"):
        model.backward(loss) if weighted else loss.backward()
    if weighted:  # a pass without a forward pass between is told, too
        for run in (model.backward, torch.Tensor.backward):
            with pytest.raises(UsageError, match="the last backward pass raised an exception"):
                run(kept)
    with pytest.raises(UsageError, match="the last backward pass raised an exception"):
        model(x, [0])


@pytest.mark.parametrize("how", ["assigned", "put there"])
@on_ranks(2)
def test_a_parameter_that_was_replaced_is_named(world, how):
    """Other parameters under the names of those that were wrapped: all are told, as often as they go on."""
    model = evenstep.DistributedDataParallel(Branches(2, 4, 0))
    x = torch.ones(2, 4, dtype=torch.float64)
    model(x, [0, 1]).sum().backward()
    if how == "assigned":
        model.module.load_state_dict({k: v.clone() for k, v in model.module.state_dict().items()}, assign=True)
    else:
        model.module.layers[0].weight = nn.Parameter(model.module.layers[0].weight.detach().clone())
    for _ in range(2):
        with pytest.raises(UsageError, match=r"'layers.0.weight' was replaced after the model was wrapped"):
            model(x, [0, 1])
    model = evenstep.DistributedDataParallel(model.module)
    model(x, [0, 1]).sum().backward()
    tied = model.module.layers[1]
    tied.weight = model.module.layers[0].weight  # one that is known already
    model(x, [0, 1]).sum().backward()


@pytest.mark.parametrize("back", [True, False])
@pytest.mark.parametrize("there", [torch.float32, torch.bfloat16])
@on_ranks(2)
def test_a_model_that_was_converted_is_told_of(world, there, back):
    """Elsewhere, and perhaps back, as a program does that saves a model: autograd has other nodes then."""
    model = evenstep.DistributedDataParallel(Branches(2, 4, 0))
    x = torch.ones(2, 4, dtype=torch.float64)
    for _ in range(2):
        model.zero_grad()
        model(x, [0, 1]).sum().backward()
    model.zero_grad(set_to_none=back)
    model.to(there)
    if back:
        model.to(torch.float64)
    with pytest.raises(UsageError, match=r"'.*(was converted or moved|Convert or move a model before)"):
        model(x if back else x.to(there), [0, 1]).sum().backward()


@on_ranks(2)
def test_a_part_of_a_model_that_was_converted_is_told_of(world):
    """torch moves what `p.grad` shows of a bucket along with the parameter; no other parameter of the bucket tells."""
    model = evenstep.DistributedDataParallel(nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]).double())
    x = torch.ones(2, 4, dtype=torch.float64)
    for _ in range(2):
        model.zero_grad(set_to_none=False)
        model(x).sum().backward()
    model.module[2].float().double()
    model.zero_grad(set_to_none=False)
    with pytest.raises(UsageError, match=r"'2.bias' was converted or moved after"):
        model(x).sum().backward()


@on_ranks(2)
def test_a_gradient_penalty_is_reduced_once(world):
    """torch.autograd.grad through the wrapped module averages nothing and disturbs nothing."""
    model = evenstep.DistributedDataParallel(Branches(2, 4, 0), world=world)
    module = Branches(2, 4, 0)
    for target in (model, module):
        x = torch.full((2, 4), 0.3, dtype=torch.float64, requires_grad=True)
        out = target(x, [0, 1])
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (out.sum() + slope.square().sum()).backward()
    assert model.engine.num_reductions == 1
    assert_same_grads(grads(model), grads(module), "gradient penalty")
    for parameter, own in zip(
        model.parameters(), module.parameters(), strict=True
    ):  # the first or the last of a bucket
        for target, of in ((model, parameter), (module, own)):
            target.zero_grad()
            (slope,) = torch.autograd.grad(target(x, [0, 1]).sum(), of, create_graph=True)
            (target(x, [0, 1]).sum() + slope.square().sum()).backward()
        assert_same_grads(grads(model), grads(module), "of one parameter")


@pytest.mark.parametrize("weighted", [True, False])
@on_ranks(1, 2, 3)
def test_averaged_gradients_can_be_differentiated(world, fresh_seed, weighted):
    """The gradient of a penalty on p.grad, beside one process on all rows; and buckets that keep no graph."""
    module = Branches(3, 4, fresh_seed)
    model = evenstep.DistributedDataParallel(copy.deepcopy(module), world=world, bucket_cap_mb=1e-4)
    warnings.filterwarnings("ignore", "Using backward.. with create_graph=True", UserWarning)
    generator = torch.Generator().manual_seed(fresh_seed)
    for num_passes in (1, 2, 1):
        sizes = [[1 + (rank + index) % 3 for rank in range(world.world_size)] for index in range(num_passes)]
        x = [torch.randn(sum(each), 4, dtype=torch.float64, generator=generator).split(each) for each in sizes]
        losses = [[module(rows, [0, 2]).square().mean() for rows in each] for each in x]
        if weighted:
            sums = [n * each for many in zip(sizes, losses, strict=True) for n, each in zip(*many, strict=True)]
            loss = sum(sums) / sum(map(sum, sizes))
        else:
            loss = sum(map(sum, losses)) / world.world_size
        used = [p for name, p in module.named_parameters() if not name.startswith("layers.1")]
        wanted = torch.autograd.grad(loss, used, create_graph=True)
        second = torch.autograd.grad(sum(each.square().sum() for each in wanted), used)
        mine = [each[world.rank] for each in sizes]
        for index, each in enumerate(x):
            with contextlib.nullcontext() if index == num_passes - 1 else model.accumulate():
                own = model(each[world.rank], [0, 2]).square().mean()
                if weighted:
                    model.backward(own, weight=mine[index], create_graph=True)
                else:
                    own.backward(create_graph=True)
        assert not any(view.requires_grad for bucket in model.engine.buckets for view in bucket.views)
        got = [p.grad for p in model.parameters() if p.grad is not None]
        assert_same_grads([each.detach() for each in got], wanted, "first")
        model.zero_grad()
        penalty = sum(each.square().sum() for each in got)
        if weighted:
            model.backward(penalty, weight=sum(mine))
        else:
            penalty.backward()
        assert_same_grads([p.grad for p in model.parameters() if p.grad is not None], second, "second")
        model.zero_grad()


def empty_shares_through_two_models(seed, num_steps, hooked):
    """A generator and a critic, wrapped, with several buckets each and shares of which some are empty.

    Perhaps with communication hooks, of the world's group or of one for each model.
    """
    world = evenstep.init(quiet=True)
    shared = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    networks = [Branches(3, 4, shared.randrange(1 << 30)) for _ in range(2)]
    models = [evenstep.DistributedDataParallel(copy.deepcopy(n), bucket_cap_mb=1e-4) for n in networks]
    groups = [dist.new_group() if hooked == "own groups" else None for _ in models]
    for model, group in zip(models, groups, strict=True):
        if hooked:
            model.register_comm_hook(group, default_hooks.allreduce_hook)
    transports = [model.engine.transport for model in models]
    assert transports[0] is not transports[1] or world.world_size == 1
    for step in range(num_steps):
        sizes = [shared.choice([0, 1, 3]) for _ in range(world.world_size)]
        sizes[shared.randrange(world.world_size)] = 2
        parts = torch.randn(sum(sizes), 4, dtype=torch.float64, generator=generator).split(sizes)
        x, all_x = parts[world.rank], torch.cat(parts)
        is_plain, through_both, whose = shared.random() < 0.3, shared.random() < 0.7, shared.randrange(2)
        made, all_made = models[0](x, [0, 2, 1]), networks[0](all_x, [0, 2, 1])
        if not through_both:
            made, all_made = made.detach(), all_made.detach()
        loss = models[1](made, [1, 0, 2]).square().mean()
        per_row = networks[1](all_made, [1, 0, 2]).square().mean(1)
        if is_plain:
            loss.backward()
            per_rank = [rows.mean() for rows in per_row.split(sizes) if len(rows)]
            (sum(per_rank) / world.world_size).backward()
        else:
            evenstep.backward(models[:: 1 - 2 * whose] if through_both else models[1:], loss, weight=len(x))
            per_row.mean().backward()
        for name, network, model in zip("GD", networks, models, strict=True):
            got = [p.grad for p in model.module.parameters()]
            context = f"seed {seed}, step {step}, sizes {sizes}, plain {is_plain}, both {through_both}, {name}"
            assert_same_grads(got, [p.grad for p in network.parameters()], context)
            network.zero_grad()
            model.zero_grad()
    for group in groups:
        if group is not None:
            dist.destroy_process_group(group)


@pytest.mark.parametrize(("nproc", "hooked"), [(1, ""), (2, ""), (3, ""), (2, "the world's group"), (2, "own groups")])
def test_several_models_with_empty_shares(ranks, fresh_seed, nproc, hooked):
    ranks.run(empty_shares_through_two_models, nproc, fresh_seed, 12, hooked)


@on_ranks(2)
def test_transports_of_wrapped_models_are_used_again(world):
    """Of models of which two are alive at a time: three, as a model is garbage when the collector has seen it."""
    gc.collect()
    kept, seen = [], set()
    for _ in range(6):
        kept = [*kept[-1:], evenstep.DistributedDataParallel(nn.Linear(2, 1))]
        seen.add(id(kept[-1].engine.transport))
    copied = pickle.loads(pickle.dumps(kept[-1]))
    assert len(seen) <= 3
    assert copied.engine.transport is world.transport


@on_ranks(2)
def test_a_module_can_be_wrapped_again(world):
    module = Branches(2, 4, 0)
    first = evenstep.DistributedDataParallel(module, world=world)
    del first
    second = evenstep.DistributedDataParallel(module, world=world)
    x = torch.full((2, 4), world.rank + 1.0, dtype=torch.float64)
    second(x, [0]).sum().backward()
    single = Branches(2, 4, 0)
    mean = sum(single(torch.full((2, 4), r + 1.0, dtype=torch.float64), [0]).sum() for r in range(world.world_size))
    (mean / world.world_size).backward()
    assert_same_grads(grads(second), grads(single), "wrapped twice")


if __name__ == "__main__":
    seed, num_windows = int(time.time()), int(sys.argv[1])
    with RankPool() as pool:
        for nproc in (2, 3, 4):
            checked = pool.run(random_windows, nproc, seed, -(-num_windows // 6), 6, timeout_s=36_000)
            print(f"{nproc} ranks: {checked[0]} windows equal the reference's, seed {seed}", flush=True)  # noqa: T201


@pytest.mark.parametrize("kind", ["plain", "synchronised statistics", "sharded"])
@on_ranks(2)
def test_a_model_that_is_deleted_is_freed_at_once(world, kind):
    """Without a collection."""
    warm = nn.Linear(2, 2)
    warm(torch.ones(1, 2)).sum().backward()
    torch.optim.AdamW(warm.parameters()).step()  # the first step of a process leaves frames of torch's behind
    gc.collect()
    gc.disable()
    try:
        module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        if kind == "synchronised statistics":
            module = evenstep.SyncBatchNorm.convert_sync_batchnorm(module)
        model = evenstep.DistributedDataParallel(module, compare_every=1)
        if kind == "sharded":
            optimizer = evenstep.ShardedOptimizer(model, torch.optim.AdamW)
        else:
            optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            model.backward(model(torch.randn(3 + world.rank, 4)).mean(), weight=3 + world.rank)
            optimizer.step()
            optimizer.zero_grad()
        held = {
            "model": model,
            "engine": model.engine,
            "weight": module[0].weight,
            "bucket": next(iter(model.engine.buckets)),
        }
        seen = {name: weakref.ref(each) for name, each in held.items()}
        del held, model, module, optimizer
        assert [name for name, each in seen.items() if each() is not None] == []
    finally:
        gc.enable()
