"""`ShardedOptimizer(share_parameters=True)`: one physical copy of the parameters for the ranks of a host."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import evenstep
from evenstep.errors import ConfigurationError, MismatchError, UsageError
from evenstep.replica.host_copy import HostCopy
from evenstep.transport import common
from evenstep.transport.common import is_in_common
from evenstep.transport.segment import PAGE_BYTES

from .test_several_hosts import on_hosts

SHARED = {"share_parameters": True}


def build(seed: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    convolution = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    return nn.Sequential(convolution, nn.Flatten(), nn.Linear(288, 200), nn.Tanh(), nn.Linear(200, 40)).to(dtype)


def wrap(seed: int, world: evenstep.World | None = None, dtype: torch.dtype = torch.float32):
    world = evenstep.init(quiet=True) if world is None else world
    return evenstep.DistributedDataParallel(build(seed, dtype), bucket_cap_mb=0.1, world=world)


def train(model, optimizers, seed: int, num_steps: int) -> None:
    """Steps of different lengths on ranks, so that a rank that is ahead would spoil what another still reads."""
    own = torch.Generator().manual_seed(seed * 100 + model.world.rank)
    dtype = next(model.parameters()).dtype
    for step in range(num_steps):
        for _ in range(1 + (step + model.world.rank) % 3):
            with torch.no_grad():
                model(torch.randn(20, 3, 8, 8, generator=own, dtype=dtype))
        x = torch.randn(3 + model.world.rank, 3, 8, 8, generator=own, dtype=dtype)
        model.backward(model(x).float().square().mean(), weight=len(x))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)


def values_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


# ---------------------------------------------------------------------- the same answer

CASES: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "AdamW": ({}, torch.float32),
    "stage 2": ({"shard_gradients": True}, torch.float32),
    "master weights": ({"master_weights": True, "reduce_dtype": torch.float32}, torch.bfloat16),
}


def trained(seed: int, case: str, shared: bool) -> tuple[list[torch.Tensor], dict[str, Any]]:
    options, dtype = CASES[case]
    model = wrap(seed, dtype=dtype)
    optimizer = evenstep.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01, share_parameters=shared, **options)
    train(model, [optimizer], seed, 3)
    model.register_comm_hook(None, default_hooks.allreduce_hook)  # lays the buckets out anew
    train(model, [optimizer], seed + 1, 3)
    assert all(is_in_common(p) is (shared and model.world.world_size > 1) for p in model.parameters())
    return values_of(model), optimizer.state_dict()


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_as_with_copies_of_their_own(ranks, fresh_seed, case):
    for nproc in (1, 2, 4):
        expected, state = ranks.run(trained, nproc, fresh_seed, case, False)[0]
        for got, own in ranks.run(trained, nproc, fresh_seed, case, True):
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
            for number, entries in state["state"].items():
                assert all(torch.equal(own["state"][number][key], value) for key, value in entries.items())


def two_optimizers(seed: int, shared: bool) -> list[torch.Tensor]:
    """One of them shares, the other doesn't, the third is plain; a group comes later."""
    model = wrap(seed)
    first, second, third = (list(model.module[index].parameters()) for index in (0, 2, 4))
    optimizers = [
        evenstep.ShardedOptimizer(model, torch.optim.SGD, first[:1], lr=0.1, momentum=0.9, share_parameters=shared),
        evenstep.ShardedOptimizer(model, torch.optim.AdamW, second, lr=0.01),
        torch.optim.SGD(third, lr=0.1),
    ]
    train(model, optimizers, seed, 2)
    optimizers[0].add_param_group({"params": first[1:], "lr": 0.05})
    train(model, optimizers, seed + 1, 2)
    assert [is_in_common(p) for p in model.parameters()] == [shared] * 2 + [False] * 4
    del optimizers[0]  # what follows it has copies again
    gc.collect()
    optimizers.append(evenstep.ShardedOptimizer(model, torch.optim.SGD, first, lr=0.1))
    train(model, optimizers, seed + 2, 2)
    assert not any(is_in_common(p) for p in model.parameters())
    return values_of(model)


def test_beside_other_optimizers(ranks, fresh_seed):
    expected = ranks.run(two_optimizers, 2, fresh_seed, False)
    for one, other in zip(expected, ranks.run(two_optimizers, 2, fresh_seed, True), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def on_several_hosts(names: str, seed: int, shared: bool) -> tuple[list[torch.Tensor], int]:
    evenstep.init(quiet=True)
    with on_hosts(names):
        world = evenstep.World.from_process_group()
    try:
        model = wrap(seed, world)
        optimizer = evenstep.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01, share_parameters=shared)
        train(model, [optimizer], seed, 4)
        if shared:  # each host has its own: what is written on the first isn't seen on the second
            world.barrier()
            if world.rank == 0:
                with torch.no_grad():
                    model.module[2].weight[0, 0] = 77.0
            world.barrier()
            assert (float(model.module[2].weight[0, 0]) == 77.0) is (names[world.rank] == names[0])
        return values_of(model)[3:], proportional_bytes()
    finally:
        world.close()


def test_each_of_several_hosts_has_a_copy(ranks, fresh_seed):
    expected, _ = ranks.run(on_several_hosts, 4, "aabb", fresh_seed, False)[0]
    for got, _ in ranks.run(on_several_hosts, 4, "aabb", fresh_seed, True):
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


# ---------------------------------------------------------------------- memory


def in_smaps(name: str) -> Iterator[dict[str, int]]:
    """Of this process's mappings of a file: what /proc says, in bytes; "start" is where it lies."""
    found: dict[str, int] | None = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            if found:
                yield found
            found = {"start": int(line.partition("-")[0], 16)} if f"/memfd:{name} (" in line else None
        elif found is not None and line.endswith(" kB"):
            key, number, _ = line.split()
            found[key.rstrip(":")] = int(number) * 1024
    if found:
        yield found


def proportional_bytes() -> int:
    """This process's part of the pages of parameters in common (PSS): the parts of all add up to the pages."""
    return sum(each["Pss"] for each in in_smaps(common.NAME))


def measure_memory(seed: int) -> tuple[int, int, int, int, int]:
    """(PSS, bytes mapped, bytes of parameters, pages of parameters that nobody else has, what buckets round up to)."""
    model = wrap(seed)
    gc.collect()
    before = {each["start"] for each in in_smaps(common.NAME)}  # of other tests on these ranks, not yet collected
    optimizer = evenstep.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01, **SHARED)
    train(model, [optimizer], seed, 3)
    world, weight = model.world, model.module[2].weight
    for writer in range(world.world_size):  # the same pages: what one writes the others see
        world.barrier()
        if world.rank == writer:
            with torch.no_grad():
                weight[0, writer] = 100.0 + writer
        world.barrier()
        assert float(weight[0, writer]) == 100.0 + writer
    mapped = [each for each in in_smaps(common.NAME) if each["start"] not in before]
    parts = [sum(each[key] for each in mapped) for key in ("Pss", "Size", "Private_Dirty")]
    world.barrier()
    rounding = PAGE_BYTES * len(model.engine.exchange.sharded_buckets)
    return parts[0], parts[1], sum(p.nbytes for p in model.parameters()), parts[2], rounding


@pytest.mark.parametrize("nproc", [2, 4])
def test_a_host_has_one_copy(ranks, fresh_seed, nproc):
    told = ranks.run(measure_memory, nproc, fresh_seed)
    parameters, rounding = told[0][2], told[0][4]
    in_all = sum(pss for pss, *_ in told)
    assert all(parameters <= size <= 1.1 * parameters + rounding for _, size, *_ in told)
    assert parameters <= in_all + 4096 * nproc  # PSS is rounded down
    assert in_all <= 1.1 * parameters + rounding
    assert all(private == 0 for _, _, _, private, _ in told)


def peaks_of_layouts(seed: int) -> tuple[int, int, int, int]:
    """Bytes: (parameters, the largest bucket, the most that was mapped while buckets were laid out anew, behind it)."""
    world = evenstep.init(quiet=True)
    torch.manual_seed(seed)
    layers = [nn.Linear(256, 256, bias=False) for _ in range(12)]  # 0.25 MiB each
    model = evenstep.DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.25, first_bucket_cap_mb=0.25)
    optimizer = evenstep.ShardedOptimizer(model, torch.optim.SGD, lr=0.1, **SHARED)
    gc.collect()
    before = sum(common._ranges.values())  # of this model and of those of earlier tests that are not gone yet
    peaks: list[int] = []

    def note(*args: Any, **options: Any) -> Any:
        mapping = common.map_in_common(*args, **options)
        peaks.append(sum(common._ranges.values()))
        return mapping

    with mock.patch("evenstep.replica.host_copy.map_in_common", note):
        model.register_comm_hook(None, default_hooks.allreduce_hook)  # lays the buckets out anew
    buckets = model.engine.exchange.sharded_buckets
    assert len(peaks) == len(buckets) >= 6
    largest = max(bucket.values.nbytes for bucket in buckets)
    assert world.exchange(len(peaks)) == [len(peaks)] * world.world_size
    del optimizer
    return before, largest, max(peaks), sum(common._ranges.values())


@pytest.mark.parametrize("nproc", [2, 3])
def test_a_host_never_has_two_copies(ranks, fresh_seed, nproc):
    """Not even while buckets are laid out anew: each gets its memory when the one before has left its own."""
    for before, largest, peak, after in ranks.run(peaks_of_layouts, nproc, fresh_seed):
        assert peak <= before + 2 * (largest + 65536)
        assert after == before


def left_behind(seed: int) -> tuple[int, list[str]]:
    """The memory outlives its first owner's model, and goes with the last; nobody keeps a descriptor."""
    model = wrap(seed)
    world = model.world
    optimizer = evenstep.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01, **SHARED)
    train(model, [optimizer], seed, 2)
    before = values_of(model)
    weights = list(model.parameters())
    del optimizer, model
    if world.rank == 0:  # who made it
        weights = []
    gc.collect()
    world.barrier()
    assert all(torch.equal(a, b) for a, b in zip(before, weights, strict=False))
    world.barrier()
    weights = []
    gc.collect()
    links = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            links.append(os.readlink(each))
    return proportional_bytes(), [link for link in links if common.NAME in link]


def test_memory_goes_with_the_last_who_uses_it(ranks, fresh_seed):
    # Collecting what torch has imported takes its time on a busy machine.
    assert ranks.run(left_behind, 3, fresh_seed, timeout_s=150) == [(0, [])] * 3


# ---------------------------------------------------------------------- loading, averaging, saving


def loaded(seed: int) -> None:
    model = wrap(seed)
    optimizer = evenstep.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01, **SHARED)
    train(model, [optimizer], seed, 2)
    other = build(seed + 1).state_dict()
    model.world.barrier()  # nobody reads any more
    model.module.load_state_dict(other)
    model.world.barrier()
    assert all(torch.equal(a, b) for a, b in zip(values_of(model), other.values(), strict=True))
    train(model, [optimizer], seed, 1)


def test_a_model_loads_a_state_dict(ranks, fresh_seed):
    ranks.run(loaded, 3, fresh_seed)


def averaged(seed: int, shared: bool) -> list[list[torch.Tensor]]:
    """(averages as evaluated, parameters afterwards, parameters after another step), ranks at different times."""
    model = wrap(seed)
    world = model.world
    optimizer = evenstep.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01, share_parameters=shared)
    average = evenstep.ExponentialAverage(model, 0.9)
    for step in range(3):
        train(model, [optimizer], seed + step, 1)
        average.update()
    seen: list[list[torch.Tensor]] = []
    before = values_of(model)
    for turn in range(world.world_size):  # one rank evaluates, the others train's values stay what they are
        world.barrier()
        if turn == world.rank:
            with average.applied():
                seen.append(values_of(model))
        else:
            assert all(torch.equal(a, b) for a, b in zip(values_of(model), before, strict=True))
    with average.applied():
        with pytest.raises(UsageError, match=r"ExponentialAverage\.update inside"):
            average.update()
        with pytest.raises(UsageError, match=r"ExponentialAverage\.applied inside"), average.applied():
            pass
    seen.append(values_of(model))
    train(model, [optimizer], seed + 9, 1)
    average.update()
    seen.append(values_of(model))
    seen.append(list(average.state_dict()["parameters"].values()))
    return seen


def test_an_average_is_applied_on_each_rank_by_itself(ranks, fresh_seed):
    expected = ranks.run(averaged, 3, fresh_seed, False)[0]
    for told in ranks.run(averaged, 3, fresh_seed, True):
        for got, want in zip(told, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def saved_and_resumed(seed: int, directory: Path, upto: int, shared: bool) -> tuple[int, list[torch.Tensor]]:
    world = evenstep.init(quiet=True)
    model = wrap(seed, world)
    optimizer = evenstep.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01, share_parameters=shared)
    checkpoint = evenstep.Checkpointer(directory, model=model, optimizer=optimizer, every_steps=2)
    begun = checkpoint.resume()
    for step in range(begun, upto):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(12, 3, 8, 8, generator=generator)[world.rank :: world.world_size]
        model.backward(model(x).square().mean(), weight=len(x))
        optimizer.step()
        optimizer.zero_grad()
        checkpoint.step()
    checkpoint.close()
    return begun, values_of(model)


def test_a_checkpoint_is_saved_and_resumed_from(ranks, fresh_seed, tmp_path):
    expected = ranks.run(saved_and_resumed, 2, fresh_seed, tmp_path / "whole", 4, False)[0][1]
    first = ranks.run(saved_and_resumed, 2, fresh_seed, tmp_path / "parts", 2, True)
    assert [resumed for resumed, _ in first] == [0, 0]
    for resumed, got in ranks.run(saved_and_resumed, 2, fresh_seed, tmp_path / "parts", 4, True):
        assert resumed == 2
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    for resumed, _ in ranks.run(saved_and_resumed, 3, fresh_seed, tmp_path / "parts", 6, True):
        assert resumed == 4


# ---------------------------------------------------------------------- mistakes


def replaced(seed: int, culprit: int) -> list[str]:
    told = []
    for when in ("before the first step", "later"):
        model = wrap(seed)
        optimizer = evenstep.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01, **SHARED)
        if when == "later":
            train(model, [optimizer], seed, 2)
        before = values_of(model)
        if model.world.rank == culprit:
            bias = model.module[2].bias
            bias.data = bias.data.clone()
        with pytest.raises(UsageError) as caught:
            train(model, [optimizer], seed, 1)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)), "nothing was written"
        told.append(str(caught.value))
    return told


def test_replacing_a_parameters_memory_is_an_error_on_all(ranks, fresh_seed):
    told = ranks.run(replaced, 3, fresh_seed, 1)
    assert told[0] == told[1] == told[2]
    for text in told[0]:
        assert text.startswith("rank 1: the memory of parameter '2.bias' was replaced")


def refusals(seed: int) -> list[str]:
    told = []
    evenstep.init(quiet=True)
    gloo = evenstep.World.from_process_group(transport="gloo", device="cpu")
    model, over_gloo = wrap(seed), wrap(seed, gloo)
    rank = model.world.rank
    for wrong in (
        lambda: evenstep.ShardedOptimizer(over_gloo, torch.optim.SGD, lr=0.1, **SHARED),
        lambda: evenstep.ShardedOptimizer(model, torch.optim.Adafactor, **SHARED),
        lambda: evenstep.ShardedOptimizer(model, torch.optim.SGD, lr=0.1, share_parameters="yes"),
        lambda: evenstep.ShardedOptimizer(model, torch.optim.SGD, lr=0.1, share_parameters=rank == 1),
    ):
        with pytest.raises((ConfigurationError, MismatchError)) as caught:
            wrong()
        told.append(str(caught.value))
    gloo.close()
    return told


def on_uneven_hosts(seed: int) -> str:
    evenstep.init(quiet=True)
    with on_hosts("aab"):
        world = evenstep.World.from_process_group()
    with pytest.raises(ConfigurationError) as caught:
        evenstep.ShardedOptimizer(wrap(seed, world), torch.optim.SGD, lr=0.1, **SHARED)
    world.close()
    return str(caught.value)


def test_where_it_cannot_work_it_is_refused(ranks, fresh_seed):
    told = ranks.run(refusals, 2, fresh_seed)
    assert told[0] == told[1]
    for text, what in zip(
        told[0],
        ["ranks that share memory, and these have gloo", "Adafactor", "'yes'", "False on rank 0 and True on rank 1"],
        strict=True,
    ):
        assert what in text
    assert all("consecutive numbers" in text for text in ranks.run(on_uneven_hosts, 3, fresh_seed))


def no_memory(seed: int, culprit: int, num_before: int) -> str:
    """The system refuses on one rank: that of rank 0 to make it, that of another to map it; buckets before had some."""
    model = wrap(seed)
    world = model.world
    gc.collect()
    before = sum(each["Size"] for each in in_smaps(common.NAME))  # of models of earlier tests that are not gone yet
    values = values_of(model)
    name = "os.memfd_create" if culprit == 0 else "evenstep.transport.common.Mapping"
    really, calls = os.memfd_create if culprit == 0 else common.Mapping, itertools.count()

    def failing(*args: Any, **options: Any) -> Any:
        if next(calls) < num_before:
            return really(*args, **options)
        raise OSError(12, "Cannot allocate memory")

    patched = mock.patch(name, failing) if world.rank == culprit else contextlib.nullcontext()
    with patched, pytest.raises(ConfigurationError) as caught:
        evenstep.ShardedOptimizer(model, torch.optim.SGD, lr=0.1, **SHARED)
    told = str(caught.value)
    del caught  # whose traceback holds what was mapped
    gc.collect()
    assert not any(is_in_common(p) for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(values, model.parameters(), strict=True))
    assert sum(each["Size"] for each in in_smaps(common.NAME)) <= before
    assert (
        repr(HostCopy(world, world.transport)) == f"<HostCopy of ranks {', '.join(map(str, range(world.world_size)))}>"
    )
    optimizer = evenstep.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)  # and without it one can go on
    train(model, [optimizer], seed, 1)
    return told


@pytest.mark.parametrize("num_before", [0, 1])
@pytest.mark.parametrize("culprit", [0, 1])
def test_memory_that_cannot_be_had_is_an_error_on_all(ranks, fresh_seed, culprit, num_before):
    told = ranks.run(no_memory, 2, fresh_seed, culprit, num_before)
    assert told[0] == told[1]
    assert f"on rank {culprit}: " in told[0]
    assert "Cannot allocate memory" in told[0]
