"""Gradients that aren't finite, scalers, and gradients of 16 bits."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from unittest import mock

import pytest
import torch
from torch import nn

import evenstep
from evenstep.errors import ConfigurationError, MismatchError, NonFiniteError
from evenstep.replica.gradients.buckets.bucket import Bucket
from tests.ranks import on_ranks


def build(seed: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 3)).to(dtype)


class Poisoned(nn.Module):
    """Multiplies the gradient of one layer by infinity when told to."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.inner = build(seed)
        self.poison = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner[1](self.inner[0](x))
        out = self.inner[2](hidden)
        if self.poison:
            out.register_hook(lambda grad: grad * torch.inf)
        return out


launch = Bucket.launch


def launch_and_wait(bucket: Bucket, *args: object, **kwargs: object) -> None:
    launch(bucket, *args, **kwargs)
    if bucket.work is not None:
        bucket.work.wait()


def warned(
    seed: int, transport: str | None, poisoned: list[int], width: int, scaled: bool, sharded: bool, cap_mb: float | None
) -> list[str]:
    """What is said by default where the third backward pass is bad on some ranks."""
    launched = contextlib.nullcontext()
    if transport is not None:
        evenstep.init(quiet=True).close()
        # The sum is there at once: a look at a bucket that has begun to travel would see the others' part.
        launched = mock.patch.object(Bucket, "launch", launch_and_wait)
    world = evenstep.init(quiet=True, transport=transport)
    model = evenstep.DistributedDataParallel(
        nn.Sequential(Poisoned(seed), nn.Linear(3, width, dtype=torch.float64)), bucket_cap_mb=cap_mb
    )
    if sharded:
        optimizer: torch.optim.Optimizer = evenstep.ShardedOptimizer(model, torch.optim.SGD, lr=0.0)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    with warnings.catch_warnings(record=True) as caught, launched:
        warnings.simplefilter("always")
        for step in range(6):
            model.module[0].poison = step in (2, 4) and world.rank in poisoned
            model(torch.randn(4, 6, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    del scaler
    if transport is not None:
        world.close()
    return [str(each.message) for each in caught if "not a number" in str(each.message)]


@pytest.mark.extended(ranks=3)
@pytest.mark.parametrize("transport", [None, pytest.param("gloo", marks=pytest.mark.extended)])
@pytest.mark.parametrize(("nproc", "poisoned"), [(2, [1]), (3, [0, 2])])
def test_a_bad_gradient_is_said_once_by_default(ranks, fresh_seed, nproc, poisoned, transport):
    # Small buckets, one that travels in place, several of different sizes, and one that is divided.
    for width, sharded, cap_mb in (
        (2, False, None),
        (60_000, False, None),
        (60_000, False, 0.01),
        (60_000, True, None),
    ):
        told = ranks.run(warned, nproc, fresh_seed, transport, poisoned, width, False, sharded, cap_mb)
        assert told[1:] == [[]] * (nproc - 1)
        assert len(told[0]) == 1, (width, sharded, cap_mb)
        assert "(in backward pass 3)" in told[0][0]
        named = {rank for rank in range(nproc) if f"at least on rank {rank}: '0.inner" in told[0][0]}
        # In shared memory a rank's part of the sum is overwritten: where another explains it, that one isn't named.
        assert named == set(poisoned) or (transport is None and named and named < set(poisoned)), told[0][0]
        assert "'1." not in told[0][0], "the gradient of the last layer was fine"
        assert "only in the sum" not in told[0][0]
    assert ranks.run(warned, nproc, fresh_seed, transport, poisoned, 2, True, False, None) == [[]] * nproc


@pytest.mark.parametrize("kind", ["lent", "sparse"])
@on_ranks(2)
def test_a_nan_in_lent_or_sparse_gradients_is_reported(world, fresh_seed, kind):
    """Gradients that aren't in memory of their own."""
    torch.manual_seed(fresh_seed)
    module = nn.Sequential(nn.Embedding(9, 300, sparse=kind == "sparse"), nn.Linear(300, 300))
    model = evenstep.DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind == "lent":
        optimizer = evenstep.ShardedOptimizer(model, torch.optim.SGD, lr=0.1, shard_gradients=True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(3):
            is_bad = step == 1 and world.rank == 1
            (model(torch.arange(4)).square().mean() * (math.nan if is_bad else 1.0)).backward()
            optimizer.step()
            model.zero_grad()
    found = [str(each.message) for each in told if "in backward pass 2" in str(each.message)]
    assert len(found) == (world.rank == 0)
    assert all("rank 1: " in each and "'0.weight'" in each for each in found)


def overflown(seed: int, scaler: str) -> str:
    """What is raised for an overflow on the last rank, with a scaler that the model was told of, or that it wasn't."""
    world = evenstep.init(quiet=True)
    model = evenstep.DistributedDataParallel(Poisoned(seed), on_nonfinite="raise")
    model.module.poison = world.rank == world.world_size - 1
    loss = model(torch.randn(4, 6, dtype=torch.float64)).sum()
    made = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=bool(scaler))
    if scaler != "told of":
        with pytest.raises(NonFiniteError) as caught:
            model.backward(made.scale(loss))
        return str(caught.value)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [p.detach().clone() for p in model.parameters()]
    model.backward(loss, scaler=made)
    made.step(optimizer)
    made.update()
    assert made.get_scale() == 2.0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return ""


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_bad_gradient_raises_on_every_rank_or_is_the_scalers_business(ranks, fresh_seed, nproc):
    """A plain "raise" ended the run at the first overflow, and "skip" left torch's scaler without gradients."""
    assert ranks.run(overflown, nproc, fresh_seed, "told of") == [""] * nproc
    (text,) = set(ranks.run(overflown, nproc, fresh_seed, "only the loss"))
    assert "model.backward(loss, scaler=scaler)" in text
    (text,) = set(ranks.run(overflown, nproc, fresh_seed, ""))
    assert "scaler" not in text
    assert f"on rank {nproc - 1}: " in text
    assert "'inner.0.weight'" in text


@pytest.mark.parametrize("weighted", [True, False])
@on_ranks(2)
def test_an_overflow_of_the_sum_is_nobodys(world, fresh_seed, weighted):
    """Every rank's gradient and their mean are finite, and their sum is not."""
    model = evenstep.DistributedDataParallel(build(fresh_seed, torch.float32))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for factor in (1.0, 3e38, 1.0):
            loss = model(torch.ones(1, 6))[0, 0].mul(factor)
            model.backward(loss, weight=1.0) if weighted else loss.backward()
            if weighted:  # the scale of weights keeps the sum as small as the mean
                assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
            model.zero_grad()
    told = [str(each.message) for each in caught if "not a number" in str(each.message)]
    assert len(told) == (world.rank == 0 and not weighted)
    assert all("averaged, only in the sum over ranks: " in each and "rank 0:" not in each for each in told)


# ---------------------------------------------------------------------- 16-bit gradients, added in float32

WIDE = {"reduce_dtype": torch.float32}


def half_gradients(seed: int, gloo: bool, dtype: torch.dtype, options: dict, weighted: bool) -> float:
    """The largest error of the mean of 16-bit gradients, in units of half a unit in the last place."""
    world = evenstep.init(quiet=True)
    if gloo:
        world = evenstep.World.from_process_group(transport="gloo", device="cpu")
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(40, 60, bias=False), nn.Linear(60, 30, bias=False)).to(dtype)
    twin = copy.deepcopy(module)
    model = evenstep.DistributedDataParallel(module, bucket_cap_mb=5e-3, world=world, **options)
    generator = torch.Generator().manual_seed(seed + world.rank)
    worst = 0.0
    for turn in range(3):
        x = torch.randn(6, 40, generator=generator).to(dtype)
        weight, total = 1.0, float(world.world_size)
        loss, own = model(x).float().square().mean(), twin(x).float().square().mean()
        if weighted:
            weight, total = float(1 + world.rank), world.world_size * (world.world_size + 1) / 2
            model.backward(loss, weight=weight)
        else:
            loss.backward()
        scale = model.engine.exchange.scale.agreed if weighted else 1.0
        (own * (weight / scale)).backward()
        for parameter, each in zip(model.parameters(), twin.parameters(), strict=True):
            exact = world.gather(each.grad.double().unsqueeze(0)).sum(0) * scale / total
            assert parameter.grad.dtype is dtype
            unit = torch.finfo(dtype).eps / 2 * exact.abs().clamp_min(torch.finfo(dtype).tiny)
            worst = max(worst, float(((parameter.grad.double() - exact) / unit).abs().max()))
        model.zero_grad(set_to_none=turn != 1)
        twin.zero_grad()
    if gloo:
        world.close()
    return worst


@pytest.mark.parametrize("gloo", [False, True])
def test_16_bit_gradients_are_added_in_float32_and_rounded_once(ranks, fresh_seed, gloo):
    for dtype, weighted in ((torch.bfloat16, False), (torch.float16, True)):
        wide = ranks.run(half_gradients, 3, fresh_seed, gloo, dtype, WIDE, weighted)
        narrow = ranks.run(half_gradients, 3, fresh_seed, gloo, dtype, {}, weighted)
        assert max(wide) <= 1.001, "one rounding"
        # Shared memory divides before it rounds; elsewhere what was added in 16 bits is rounded again as it is divided.
        assert max(narrow) > 1.2 if gloo else max(narrow) <= 1.001


def without_samples(seed: int, weighted: list[bool | None], gloo: bool) -> list[float]:
    """Parameters after windows in which the last rank has no samples, and so no idea how the others count.

    Args:
        seed: Of the model and its samples.
        weighted: Of each window, whether the others' passes have weights; None: they have no samples, either.
        gloo: Over Gloo, which compares nothing.
    """
    world = evenstep.init(quiet=True)
    if gloo:
        world = evenstep.World.from_process_group(transport="gloo", device="cpu")
    model = evenstep.DistributedDataParallel(build(seed, torch.float16), world=world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(seed)
    for counts in weighted:
        x = torch.randn(4, 6, generator=generator).to(torch.float16)
        x = x[:0] if counts is None or world.rank == world.world_size - 1 else x
        for part in model.microbatches(x, 2):
            loss = model(part).float().square().mean()
            model.backward(loss, weight=1024 * len(part)) if counts else loss.backward()
        if counts:
            assert world.world_size == 1 or model.engine.exchange.scale.agreed > 1024
        optimizer.step()
        optimizer.zero_grad()
    if gloo:
        world.close()
    return torch.cat([p.detach().float().reshape(-1) for p in model.parameters()]).tolist()


@pytest.mark.parametrize("gloo", [False, True])
@pytest.mark.parametrize(
    "weighted", [[False, False], [True, False], [True, True], [False, True, False], [None, True], [False] * 20]
)
def test_16_bit_models_take_ranks_without_samples(ranks, fresh_seed, weighted, gloo):
    """Those agreed on a scale of weights with nobody: a mismatch."""
    told = ranks.run(without_samples, 3, fresh_seed, weighted, gloo)
    assert told[0] == told[1] == told[2]
    assert all(math.isfinite(each) for each in told[0])


@on_ranks(2)
def test_what_cant_be_reduced_so_is_named(world):
    """float32 gradients that a sum in 16 bits couldn't hold are found before they are added."""
    model = evenstep.DistributedDataParallel(
        build(0, torch.float32), reduce_dtype=torch.float16, on_nonfinite="skip", world=world
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (model(torch.ones(1, 6)).sum() * (1e6 if world.rank == 1 else 1.0)).backward()
    assert model.skipped_steps == 1
    assert len(caught) == (world.rank == 0)
    assert all("on rank 1: " in str(each.message) and "'2.bias'" in str(each.message) for each in caught)
    for wrong in ({"reduce_dtype": torch.int32}, {"reduce_dtype": "float32"}):
        with pytest.raises(ConfigurationError, match="reduce_dtype"):
            evenstep.DistributedDataParallel(build(0), **wrong)
    with pytest.raises(MismatchError, match="reduce_dtype is"):
        evenstep.DistributedDataParallel(build(0), reduce_dtype=torch.float64 if world.rank else None)


def small_gradients(seed: int, gloo: bool, dtype: torch.dtype, options: dict) -> float:
    """How far a scaled and clipped step is from one process's, in parts of that step; float16 is too coarse for it."""
    world = evenstep.init(quiet=True)
    if gloo:
        world = evenstep.World.from_process_group(transport="gloo", device="cpu")
    module = build(seed, dtype)
    twin = copy.deepcopy(module).float()
    model = evenstep.DistributedDataParallel(module, bucket_cap_mb=5e-4, reduce_dtype=torch.float16, world=world)
    optimizer = evenstep.ShardedOptimizer(model, torch.optim.SGD, lr=1.0, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    x = torch.randn(world.world_size, 4, 6, generator=torch.Generator().manual_seed(seed)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_() if parameter.dim() == 1 else None  # so that the step can be told from the value
    twin.load_state_dict(module.state_dict())
    model.backward(model(x[world.rank]).float().square().mean() * 1e-7, weight=4, scaler=scaler)
    scaler.unscale_(optimizer)
    norm = evenstep.clip_grad_norm_(optimizer, 1e-9)
    scaler.step(optimizer)
    (twin(x.flatten(0, 1).float()).square().mean() * 1e-7).backward()
    expected = torch.nn.utils.clip_grad_norm_(twin.parameters(), 1e-9)
    got = torch.cat([-p.detach().float() for p in module.parameters() if p.dim() == 1])
    step = torch.cat([p.grad for p in twin.parameters() if p.dim() == 1])
    if gloo:
        world.close()
    return max(float((got - step).abs().max() / step.abs().max()), abs(float(norm / expected) - 1.0))


@pytest.mark.parametrize("gloo", [False, True])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float32, {}), (torch.float32, {"shard_gradients": True}), (torch.bfloat16, {"master_weights": True})],
)
def test_what_a_scaler_has_kept_is_not_lost_when_it_is_unscaled(ranks, fresh_seed, dtype, options, gloo):
    """A divided gradient was unscaled and clipped in the float16 in which it was added, off by half and more."""
    rounding = 0.1 if dtype == torch.bfloat16 else 0.03  # the model computes in bfloat16, its twin in float32
    assert max(ranks.run(small_gradients, 3, fresh_seed, gloo, dtype, options)) < rounding
