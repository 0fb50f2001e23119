"""What programs do between a backward pass and a step, and around optimizers, on 1 to 3 ranks."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import evenstep
from evenstep.errors import ConfigurationError, MismatchError, UsageError

SIZES = pytest.mark.parametrize("nproc", [1, 2, 3])


def build(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 5)).double()


def wrap(seed: int, **options: Any) -> evenstep.DistributedDataParallel:
    return evenstep.DistributedDataParallel(build(seed), bucket_cap_mb=5e-4, **options)


def batch(seed: int) -> torch.Tensor:
    return torch.randn(12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def backward(model: evenstep.DistributedDataParallel, seed: int) -> None:
    world = model.world
    x = batch(seed)[world.rank :: world.world_size]
    dtype = next(model.parameters()).dtype
    model.backward(model(x.to(dtype)).square().mean(), weight=len(x))


# ---------------------------------------------------------------------- complex parameters, hooks of state dicts


class Waves(nn.Module):
    """Complex numbers and real ones."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.complex = nn.Parameter(torch.randn(6, 3, dtype=torch.complex128))
        self.real = nn.Parameter(torch.randn(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex128) @ self.complex).abs() * self.real


def complex_training(seed: int, kind: str, options: dict[str, Any]) -> float:
    """The largest difference from one process with torch's optimizer."""
    evenstep.init(quiet=True)
    model, single = evenstep.DistributedDataParallel(Waves(seed)), Waves(seed)
    optimizer = evenstep.ShardedOptimizer(model, getattr(torch.optim, kind), lr=0.1, **options)
    plain = getattr(torch.optim, kind)(single.parameters(), lr=0.1)
    for step in range(4):
        x = batch(seed + step)
        world = model.world
        own = x[world.rank :: world.world_size]
        model.backward(model(own).square().mean(), weight=len(own))
        single(x).square().mean().backward()
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
    both = zip(model.parameters(), single.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in both)


@SIZES
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_complex_parameters_are_stepped(ranks, fresh_seed, nproc, kind):
    assert max(ranks.run(complex_training, nproc, fresh_seed, kind, {})) < 1e-11


@SIZES
def test_what_is_said_of_16_bits_or_real_numbers_leaves_others_as_they_are(ranks, fresh_seed, nproc):
    """Complex numbers lost their imaginary parts, and float64 half of its digits."""
    wide = {"master_weights": True, "reduce_dtype": torch.float64}
    assert max(ranks.run(complex_training, nproc, fresh_seed, "SGD", wide)) < 1e-11
    assert max(ranks.run(complex_training, nproc, fresh_seed, "SGD", {"reduce_dtype": torch.float32})) < 1e-5


# ---------------------------------------------------------------------- a loss with more in it than the model's outputs


def loss_beside(module: nn.Module, outputs: torch.Tensor, x: torch.Tensor, *, alone: bool) -> torch.Tensor:
    """With a term of parameters and data that doesn't go through the wrapper, or nothing but that."""
    beside = (module[2].weight * x.mean()).sum() + (module[0].bias * x.sum()).square().sum()
    return beside + (0.0 if alone else outputs.square().mean())


NUM_STEPS, NUM_ROUNDINGS = 5, 32  # of a step: sums of at most 24 numbers and 3 ranks, products, the step itself


def beside_outputs(seed: int, sharded: dict[str, Any] | None, set_to_none: bool) -> float:
    """The largest difference from one process, where gradients come before the pass has been noticed.

    In units of the largest value that there has been: each step multiplies a bias by a number that may be -20, and so
    its roundings.
    """
    world = evenstep.init(quiet=True)
    model, single = wrap(seed), build(seed)
    kind = torch.optim.SGD
    if sharded is None:
        optimizer: torch.optim.Optimizer = kind(model.parameters(), lr=0.1)
    else:
        optimizer = evenstep.ShardedOptimizer(model, kind, lr=0.1, **sharded)
    plain = kind(single.parameters(), lr=0.1)
    largest = max(float(p.detach().abs().max()) for p in single.parameters())
    for step in range(NUM_STEPS):
        for rank in range(world.world_size):
            x = batch(seed + step)[rank :: world.world_size]
            (loss_beside(single, single(x), x, alone=step == 3) / world.world_size).backward()
            if rank == world.rank:
                loss_beside(model.module, model(x), x, alone=step == 3).backward()
        for each in (optimizer, plain):
            each.step()
            each.zero_grad(set_to_none)
        largest = max(largest, *(float(p.detach().abs().max()) for p in single.parameters()))
    both = zip(model.parameters(), single.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in both) / largest


@SIZES
@pytest.mark.parametrize("sharded", [None, {}, {"shard_gradients": True}])
def test_gradients_that_come_beside_the_models_outputs_are_averaged(ranks, fresh_seed, nproc, sharded):
    """A sharded step took them for gradients of before the backward pass, and added each rank's own."""
    both_sides = 2 * NUM_STEPS * NUM_ROUNDINGS * torch.finfo(torch.float64).eps  # 7e-14; the order alone gave 2e-15
    for set_to_none in (True, False):
        assert max(ranks.run(beside_outputs, nproc, fresh_seed, sharded, set_to_none)) < both_sides


def hooked_states(seed: int) -> tuple[int, float]:
    """(how many parameters' states a hook of `state_dict` saw, by what a hook of `load_state_dict` multiplied)."""
    model = wrap(seed)
    optimizer = evenstep.ShardedOptimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    backward(model, seed)
    optimizer.step()
    before = optimizer.state_dict()
    seen: list[int] = []
    optimizer.register_state_dict_post_hook(lambda _, state: seen.append(len(state["state"])))
    optimizer.register_load_state_dict_pre_hook(
        lambda _, given: {
            **given,
            "state": {n: {k: v * 3 for k, v in each.items()} for n, each in given["state"].items()},
        }
    )
    optimizer.load_state_dict(before)
    after = optimizer.state_dict()
    ratio = after["state"][0]["momentum_buffer"] / before["state"][0]["momentum_buffer"]
    return seen[0], float(ratio.mean())


@SIZES
def test_hooks_of_state_dicts_see_the_state_and_may_change_it(ranks, fresh_seed, nproc):
    assert ranks.run(hooked_states, nproc, fresh_seed) == [(4, pytest.approx(3.0, rel=1e-12))] * nproc


def asked_within_windows(seed: int) -> float:
    """The largest difference from one process, where windows aren't begun with zero_grad."""
    world = evenstep.init(quiet=True)
    model, single = wrap(seed), build(seed)
    for step in range(4):
        for part in range(2):
            x = batch(seed + 2 * step + part)
            own = x[world.rank :: world.world_size]
            with model.accumulate() if part == 0 else contextlib.nullcontext():
                model.backward(model(own).square().mean(), weight=len(own))
            if part == 0:
                torch.autograd.grad(model(own).sum(), model.module[0].weight)
            (single(x).square().mean() / 2).backward()
    both = zip(model.parameters(), single.parameters(), strict=True)
    return max(float((a.grad - b.grad).abs().max()) for a, b in both)


@SIZES
def test_gradients_that_are_only_asked_for_change_no_window(ranks, fresh_seed, nproc):
    """What an earlier step had left in p.grad was averaged once more."""
    assert max(ranks.run(asked_within_windows, nproc, fresh_seed)) < 1e-11


def scaled_in_a_join(seed: int) -> float:
    """Unscaled and clipped steps in a reduce_dtype, of ranks that leave one by one."""
    world = evenstep.init(quiet=True)
    model = evenstep.DistributedDataParallel(build(seed), reduce_dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with model.join():
        for step in range(1 + world.rank):
            scaler.scale(model(batch(seed + step)).square().mean()).backward()
            scaler.unscale_(optimizer)
            evenstep.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return sum(float(p.detach().abs().sum()) for p in model.parameters())


@SIZES
def test_unscaling_and_clipping_wait_for_nobody_where_every_rank_has_all(ranks, fresh_seed, nproc):
    """They waited for the ranks that had left, until the deadline."""
    first, *others = ranks.run(scaled_in_a_join, nproc, fresh_seed, timeout_s=40)
    assert all(other == first for other in others)


# ---------------------------------------------------------------------- values beside 16-bit parameters


def written_between(seed: int, way: str, options: dict[str, Any]) -> tuple[list[float], list[float]]:
    """(parameters that were written to between steps, with values of full precision beside; what was written)."""
    world = evenstep.init(quiet=True)
    model = evenstep.DistributedDataParallel(build(seed).bfloat16(), bucket_cap_mb=5e-4)
    optimizer = evenstep.ShardedOptimizer(model, torch.optim.SGD, lr=1e-6, master_weights=True, **options)
    backward(model, seed)
    optimizer.step()
    optimizer.zero_grad()
    other = build(seed + 1).bfloat16()
    world.barrier()
    if way == "load":
        model.module.load_state_dict(other.state_dict())
    elif way == "replace":
        for parameter, value in zip(model.parameters(), other.parameters(), strict=True):
            parameter.data = value.detach().clone()
    else:  # in place
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), other.parameters(), strict=True):
                parameter.copy_(value)
    world.barrier()
    backward(model, seed)
    optimizer.step()
    world.barrier()
    return [torch.cat([p.detach().float().reshape(-1) for p in m.parameters()]).tolist() for m in (model, other)]


@SIZES
@pytest.mark.parametrize(
    ("way", "options"),
    [("load", {}), ("replace", {}), ("in place", {}), ("load", {"shard_gradients": True})],
)
def test_what_is_written_into_16_bit_parameters_counts(ranks, fresh_seed, nproc, way, options):
    """And not the values that a step keeps beside them, which were those of before."""
    for got, written in ranks.run(written_between, nproc, fresh_seed, way, options):
        assert got == pytest.approx(written, rel=0.02, abs=0.002)


def kept_beside(seed: int, when: str, options: dict[str, Any]) -> tuple[list[float], list[float]]:
    """(values of full precision beside parameters that were written to, as `when` finds them; what was written)."""
    world = evenstep.init(quiet=True)
    model = evenstep.DistributedDataParallel(build(seed).bfloat16(), bucket_cap_mb=5e-4)
    first, *rest = parameters = list(model.parameters())
    is_later = when == "another group"
    given = rest if is_later else parameters
    optimizer = evenstep.ShardedOptimizer(model, torch.optim.SGD, given, lr=1e-6, master_weights=True, **options)
    before = optimizer.state_dict()
    for _ in range(2):
        backward(model, seed)
        optimizer.step()
        optimizer.zero_grad()
    other = build(seed + 1).bfloat16()
    world.barrier()
    model.module.load_state_dict(other.state_dict())
    world.barrier()
    if when == "shards":
        _, shards = optimizer.state_shards()
        pieces = {(each.path[1], each.offset_numel): each.values for each in shards if each.path[2] == "master_weights"}
        told = [value.detach().reshape(-1) for value in other.parameters()]
        written = [told[number][offset : offset + len(values)] for (number, offset), values in pieces.items()]
        return torch.cat([*pieces.values()]).tolist(), torch.cat(written).tolist()
    if is_later:
        optimizer.add_param_group({"params": [first]})
        rest.append(first)
    if when == "an older state":
        optimizer.load_state_dict(before)
    if when != "state":
        backward(model, seed)
        optimizer.step()
    state, numbers = optimizer.state_dict()["state"], {id(p): number for number, p in enumerate(rest)}
    wholes = [state[numbers[id(p)] if is_later else index]["master_weights"] for index, p in enumerate(parameters)]
    world.barrier()
    return tuple(
        torch.cat([p.detach().float().reshape(-1) for p in each]).tolist() for each in (wholes, other.parameters())
    )


@SIZES
@pytest.mark.parametrize("when", ["state", "shards", "another group", "an older state"])
@pytest.mark.parametrize("options", [{}, {"shard_gradients": True}])
def test_what_is_written_counts_also_before_the_next_step(ranks, fresh_seed, nproc, when, options):
    """A state held values of before the writing, and what took them up again put them back into the parameters."""
    for got, written in ranks.run(kept_beside, nproc, fresh_seed, when, options):
        assert got == pytest.approx(written, rel=1e-3, abs=1e-3)


# ---------------------------------------------------------------------- clipping


def clipped_too_early() -> None:
    world = evenstep.init(quiet=True)
    model, other = wrap(0), wrap(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 6, dtype=torch.float64)
    with model.accumulate():
        model(x * (1 + world.rank)).sum().backward()
    other(x).sum().backward()
    targets = [optimizer, list(model.parameters()), (p for p in model.parameters()), model.module[0].weight, model]
    for target in [*targets, (p for p in model.parameters()), model.module[2]]:
        clip = evenstep.clip_grad_norm_ if target is not targets[-1] else evenstep.clip_grad_value_
        with pytest.raises(UsageError, match="this rank's alone"):
            clip(target, 1.0)
    assert float(evenstep.clip_grad_norm_(other.parameters(), 1.0, "inf")) > 0  # those have been averaged
    model(x).sum().backward()
    norms = world.exchange(float(evenstep.clip_grad_norm_(optimizer, 1.0)))
    assert norms[0] > 0
    assert len(set(norms)) == 1


def test_clipping_within_a_window_is_an_error_however_parameters_are_given(ranks):
    ranks.run(clipped_too_early, 2)


# ---------------------------------------------------------------------- LocalSGD


def clipped_alone(seed: int, way: str) -> tuple[float, float, float]:
    """(norm, that of this rank's mean gradient by torch alone, length of the step in units of the rate)."""
    world = evenstep.init(quiet=True)
    model = wrap(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = evenstep.LocalSGD(model, optimizer, every=3)
    single = build(seed)
    x = batch(seed)[world.rank :: world.world_size]
    for model_of, call in ((model, None), (single, 1)):
        if call is None:
            with model_of.accumulate():
                model_of.backward(model_of(x[:1]).square().mean(), weight=1)
            model_of.backward(model_of(x[1:]).square().mean(), weight=len(x) - 1)
        else:
            model_of(x).square().mean().backward()
    before = [p.detach().clone() for p in model.parameters()]
    if way == "torch":
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    elif way == "model":
        norm = evenstep.clip_grad_norm_(model, 1e-3)
    else:
        norm = evenstep.clip_grad_norm_(optimizer, 1e-3)
    assert local.step() is False
    moved = torch.cat([(a - b).reshape(-1) for a, b in zip(before, model.parameters(), strict=True)])
    expected = nn.utils.clip_grad_norm_(single.parameters(), 1e-3)
    local.close()
    return float(norm), float(expected), float(moved.norm().detach() / 0.1)


@SIZES
@pytest.mark.parametrize("way", ["torch", "model", "optimizer"])
def test_ranks_that_step_alone_clip_their_own_mean(ranks, fresh_seed, nproc, way):
    for norm, expected, length in ranks.run(clipped_alone, nproc, fresh_seed, way):
        assert norm == pytest.approx(expected, rel=1e-12)
        assert length == pytest.approx(1e-3, rel=1e-4)


def ended_alone(seed: int) -> list[float]:
    """A local gradient that nobody has dropped is not added to those that are averaged again."""
    world = evenstep.init(quiet=True)
    model = wrap(seed)
    local = evenstep.LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), every=1)
    backward(model, seed)
    local.step()
    assert math.isfinite(float(model.module[0].weight.grad.sum()))
    local.close()
    backward(model, seed)
    found = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    assert len({float(each) for each in world.gather(found.norm().reshape(1))}) == 1
    single = build(0)
    single.load_state_dict(model.module.state_dict())
    single(batch(seed)).square().mean().backward()
    expected = torch.cat([p.grad.reshape(-1) for p in single.parameters()])
    assert world.world_size == 1 or torch.allclose(found, expected, rtol=1e-12, atol=1e-14)
    return found.tolist()


@SIZES
def test_closing_drops_what_is_this_ranks_alone(ranks, fresh_seed, nproc):
    told = ranks.run(ended_alone, nproc, fresh_seed)
    assert all(each == told[0] for each in told)


def refused_alone() -> None:
    evenstep.init(quiet=True)
    model, other = wrap(0), nn.Linear(2, 7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mixed = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(ConfigurationError, match=r"\[7, 2\] isn't one of the model's"):
        evenstep.LocalSGD(model, mixed, every=2)
    local = evenstep.LocalSGD(model, optimizer, every=2)
    with pytest.raises(UsageError, match="another LocalSGD"):
        evenstep.LocalSGD(model, optimizer, every=2)
    local.close()
    local.close()
    evenstep.LocalSGD(model, optimizer, every=2).close()


@SIZES
def test_what_would_never_be_averaged_is_refused(ranks, nproc):
    ranks.run(refused_alone, nproc)


def saved_alone(seed: int, directory: str) -> tuple[list[bool], int]:
    """(which steps ended with an average, how many a checkpointer has counted: those behind the last one, too)."""
    evenstep.init(quiet=True)
    model = wrap(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = evenstep.LocalSGD(model, optimizer, every=3)
    checkpoint = evenstep.Checkpointer(directory, model=model, local_sgd=local, every_steps=1)
    averaged = []
    for step in range(7):
        backward(model, seed + step)
        averaged.append(local.step())
        optimizer.zero_grad()
        checkpoint.step()
    with pytest.raises(UsageError, match="after an exchange"):
        checkpoint.save()
    local.average()
    checkpoint.save()
    count = checkpoint.num_steps
    checkpoint.close()
    return averaged, count


@pytest.mark.parametrize("nproc", [2, 3])
def test_a_checkpointer_saves_where_ranks_have_the_same(ranks, fresh_seed, nproc, tmp_path):
    for averaged, count in ranks.run(saved_alone, nproc, fresh_seed, str(tmp_path / "runs")):
        assert averaged == [False, False, True, False, False, True, False]
        assert count == 7


# ---------------------------------------------------------------------- what only some ranks do


def alone(seed: int) -> str:
    """What this rank is told when rank 0 alone saves the optimizer."""
    world = evenstep.init(quiet=True)
    model = wrap(seed)
    optimizer = evenstep.ShardedOptimizer(model, torch.optim.AdamW, lr=0.1)
    backward(model, seed)
    optimizer.step()
    with pytest.raises(MismatchError) as caught:
        optimizer.state_dict() if world.is_main else world.gather(torch.ones(2))
    optimizer.state_dict()  # nobody waits for anybody
    return str(caught.value)


def test_a_state_dict_of_one_rank_alone_is_told_to_all(ranks, fresh_seed):
    """The others' next values were taken for state: an error about unpacking."""
    told = ranks.run(alone, 2, fresh_seed)
    assert told[0] == told[1]
    assert told[0].startswith(
        "the ranks make different calls. rank 0: a state_dict of an optimizer; rank 1: world.gather. Every rank"
    )


def test_torchs_wrapper_is_called_torchs(ranks):
    with pytest.raises(Exception, match=r"not torch's DistributedDataParallel\. Wrap the model first"):
        ranks.run(wrapped_by_torch, 1)


def wrapped_by_torch() -> None:
    evenstep.init(quiet=True)
    theirs = torch.nn.parallel.DistributedDataParallel.__new__(torch.nn.parallel.DistributedDataParallel)
    nn.Module.__init__(theirs)  # without a process group
    evenstep.ShardedOptimizer(theirs, torch.optim.AdamW, lr=0.1)


class Wide(torch.optim.Optimizer):
    """Element-wise, with state in dtypes of its own beside parameters of 16 bits, and a text."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {
                        "sum": torch.zeros(p.shape),
                        "count": torch.zeros(p.shape, dtype=torch.int64),
                        "told": "x",
                    }
                state["count"].add_(1)
                state["sum"].mul_(0.9).add_(p.grad.float())
                p.copy_(p.float() - group["lr"] * state["sum"] / state["count"])


def state_of_other_dtypes(seed: int, elementwise: bool) -> list[str]:
    """What differs from the optimizer that isn't divided, when a group was added between two steps."""
    evenstep.init(quiet=True)
    torch.manual_seed(seed)
    first = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 5)).bfloat16()
    models = [evenstep.DistributedDataParallel(copy.deepcopy(first), bucket_cap_mb=1e-4) for _ in range(2)]
    heads, bodies = ([list(model.module[n].parameters()) for model in models] for n in (0, 1))
    optimizers = [evenstep.ShardedOptimizer(models[0], Wide, heads[0], elementwise=elementwise), Wide(heads[1])]
    for step in range(5):
        x = torch.randn(4, 6).bfloat16()
        for model, optimizer, body in zip(models, optimizers, bodies, strict=True):
            if step == 3:
                optimizer.add_param_group({"params": body})
            model(x).square().mean().backward()
            optimizer.step()
            model.zero_grad()
    named = zip(models[0].module.named_parameters(), models[1].module.parameters(), strict=True)
    wrong = [name for (name, ours), theirs in named if not torch.equal(ours, theirs)]
    ours, theirs = (optimizer.state_dict()["state"] for optimizer in optimizers)
    for number, state in theirs.items():
        for key, value in state.items():
            other = ours[number][key]
            is_same = value == other if key == "told" else value.dtype is other.dtype and torch.equal(value, other)
            if not is_same:
                wrong.append(f"{key} of {number}")
    return wrong


@pytest.mark.parametrize("elementwise", [False, True])
@pytest.mark.parametrize("nproc", [1, 2])
def test_state_keeps_the_dtype_that_its_optimizer_chose_when_a_group_is_added(ranks, fresh_seed, nproc, elementwise):
    assert ranks.run(state_of_other_dtypes, nproc, fresh_seed, elementwise) == [[]] * nproc


# ---------------------------------------------------------------------- gradients that aren't in memory of their own


def warnings_of_nan(seed: int, kind: str) -> list[str]:
    """The warnings of three steps, in the second of which rank 1 has a NaN."""
    world = evenstep.init(quiet=True)
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Embedding(9, 300, sparse=kind == "sparse"), nn.Linear(300, 300))
    model = evenstep.DistributedDataParallel(module)
    optimizer: Any = None
    if kind == "lent":
        optimizer = evenstep.ShardedOptimizer(model, torch.optim.SGD, lr=0.1, shard_gradients=True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(3):
            out = model(torch.arange(4))
            is_bad = step == 1 and world.rank == 1
            (out.square().mean() * (float("nan") if is_bad else 1.0)).backward()
            if optimizer is not None:
                optimizer.step()
            model.zero_grad()
    return [str(each.message) for each in told if "not a number" in str(each.message)]


@pytest.mark.parametrize("kind", ["lent", "sparse"])
def test_a_nan_in_lent_or_sparse_gradients_is_reported(ranks, fresh_seed, kind):
    first, second = ranks.run(warnings_of_nan, 2, fresh_seed, kind)
    assert second == []
    assert len(first) == 1
    assert "rank 1: " in first[0]
    assert "'0.weight'" in first[0]
    assert "in backward pass 2" in first[0]
