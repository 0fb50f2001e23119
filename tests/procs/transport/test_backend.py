"""The torch.distributed backend "evenstep": the same results as Gloo's, and torch's own wrappers on it unchanged."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import evenstep
from evenstep.errors import ConfigurationError
from evenstep.ground.environment import current_placement
from evenstep.testing import RankPool
from evenstep.transport import fallback
from evenstep.transport.backend.backend import EvenstepGroup
from evenstep.transport.shm.transport import SharedMemoryTransport
from tests.ranks import on_ranks
from tests.sockets import listening

# torch 2.13 warns of the names that torch 2.11 knows.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@contextlib.contextmanager
def both_groups() -> Iterator[tuple[dist.ProcessGroup, dist.ProcessGroup]]:
    """(Gloo, evenstep)"""
    evenstep.init(quiet=True)
    groups = dist.new_group(backend="gloo"), dist.new_group(backend="evenstep")
    assert isinstance(groups[1]._shared, SharedMemoryTransport), groups[1].why_gloo
    fallback.reset()
    try:
        yield groups
        groups[1].barrier().wait()
    finally:
        for group in groups:
            dist.destroy_process_group(group)


def check_equal(got: Any, expected: Any, what: str) -> None:
    if isinstance(expected, Tensor):
        assert got.dtype is expected.dtype, what
        assert torch.equal(got, expected), f"{what}: {got} instead of {expected}"
    elif isinstance(expected, list | tuple):
        for number, (one, other) in enumerate(zip(got, expected, strict=True)):
            check_equal(one, other, f"{what}[{number}]")
    else:
        assert got == expected, what


@on_ranks(2)
def test_coalesced_calls(world: evenstep.World) -> None:
    from torch.distributed.distributed_c10d import _coalescing_manager

    with both_groups() as (_, ours):
        rank, size = ours.rank(), ours.size()
        for device in (None, torch.device("cpu")):  # collected by torch, or one after the other
            sums = [torch.full((n,), float(rank)) for n in (1, 5, 40_000)]
            with _coalescing_manager(group=ours, device=device, async_ops=True) as manager:
                for each in sums:
                    dist.all_reduce(each, group=ours)
            manager.wait()
            outs, shares = ([torch.zeros(n * factor) for n in (3, 20_000)] for factor in (size, 1))
            with _coalescing_manager(group=ours, device=device):
                for out in outs:
                    all_gather_single(out, torch.full((out.numel() // size,), float(rank)), group=ours)
            with _coalescing_manager(group=ours, device=device):
                for share in shares:
                    reduce_scatter_single(share, torch.full((share.numel() * size,), float(rank)), group=ours)
            assert all(each.eq(sum(range(size))).all() for each in (*sums, *shares))
            assert all(out.view(size, -1).eq(torch.arange(size).view(-1, 1)).all() for out in outs)
        assert fallback.counts() == {}


@on_ranks(2)
def test_futures_and_splits(world: evenstep.World) -> None:
    with both_groups() as (_, ours):
        works = [dist.all_reduce(torch.full((n,), 1.0), group=ours, async_op=True) for n in (1, 300_000, 2)]
        doubled = [work.get_future().then(lambda done: done.value()[0] * 2) for work in works]
        for each in doubled:
            assert each.wait().eq(2 * ours.size()).all()
        assert all(work.is_completed() and work.is_success() for work in works)

        def chained(done: torch.futures.Future[list[Tensor]]) -> Tensor:
            """As PowerSGD does: another collective in the callback of the first."""
            tensor = done.value()[0]
            dist.all_reduce(tensor, group=ours)
            return tensor

        future = dist.all_reduce(torch.ones(200_000), group=ours, async_op=True).get_future().then(chained)
        assert future.wait().eq(ours.size() ** 2).all()

        split = ours.split_group([1, 0], group_name="turned")
        assert split is not None
        assert (split.rank(), split.group_name, split.name()) == (1 - ours.rank(), "turned", "evenstep")
        first = torch.tensor([float(ours.rank())])
        split.broadcast(first, 0).wait()
        assert first.item() == 1.0
        split.barrier().wait()
        split.shutdown()
        assert fallback.counts() == {}


@on_ranks(3)
def test_gloo_is_made_with_the_first_call_of_all_ranks_that_needs_it(world: evenstep.World) -> None:
    """Until then no port is open; it is counted, and ends with the group. Ranks come to the call at different times."""
    before = listening()
    group = dist.new_group(backend="evenstep")
    fallback.reset()
    dist.all_reduce(torch.ones(3), group=group)
    # A group of an earlier test may just be closing its port, in a thread.
    assert not listening() - before
    tensor = torch.eye(2).to_sparse()
    with world.main_first():
        pass
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert [address for address, _ in listening() - before] == ["127.0.0.1"]
    work.wait()
    dist.barrier(group)
    assert fallback.counts() == {"allreduce": 1}
    dist.destroy_process_group(group)
    del group, work
    assert listening() == before
    assert tensor.to_dense().tolist() == [[3.0, 0.0], [0.0, 3.0]]


class Standing(torch.Tensor):
    """A tensor without memory of its own, as DTensor is one: what is done with it is done with another."""

    behind: Tensor

    @staticmethod
    def __new__(cls, behind: Tensor) -> Standing:
        made = torch.Tensor._make_wrapper_subclass(cls, behind.shape, dtype=behind.dtype, device=behind.device)
        made.behind = behind
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = torch.utils._pytree.tree_map(lambda each: each.behind if isinstance(each, Standing) else each, args)
        return function(*args, **(kwargs or {}))


class Named(torch.Tensor):
    """A subclass with memory of its own."""


def without_memory() -> tuple[list[Any], dict[str, int]]:
    """What becomes of tensors that stand for others, of one with a class of its own, and of a sum behind them."""
    import torch.distributed._functional_collectives as functional

    with both_groups() as (_, ours):
        standing, named = Standing(torch.ones(3)), torch.ones(3).as_subclass(Named)
        dist.all_reduce(standing, group=ours)
        parts = [Standing(torch.zeros(70_000)) for _ in range(ours.size())]
        dist.all_gather(parts, torch.full((70_000,), float(ours.rank())), group=ours)
        not_awaited = functional.all_reduce(torch.ones(2), "sum", ours)
        assert type(not_awaited) is functional.AsyncCollectiveTensor
        dist.all_reduce(not_awaited, group=ours)
        with pytest.raises(
            ConfigurationError, match="dense CPU tensors, and this is a strided float32 Standing on cpu"
        ):
            ours._shared.all_reduce(standing)
        dist.all_reduce(named, group=ours)
        got = [standing.behind.tolist(), [float(each.behind[-1]) for each in parts], not_awaited.tolist()]
        return [*got, named.as_subclass(torch.Tensor).tolist(), type(named).__name__], fallback.counts()


def test_tensors_without_memory_of_their_own_are_torchs_to_open(ranks: RankPool) -> None:
    expected = [[2.0] * 3, [0.0, 1.0], [4.0] * 2, [2.0] * 3, "Named"]
    assert ranks.run(without_memory, 2) == [(expected, {"allreduce": 2, "allgather": 1})] * 2


def close_world() -> None:
    evenstep.init(quiet=True).close()


def as_the_default(backend: str, file: str) -> tuple[list[str], dict[str, int]]:
    """A program that knows nothing of evenstep but the name of the backend."""
    import torch.distributed._functional_collectives as functional
    from torch.distributed.device_mesh import init_device_mesh

    placement = current_placement()
    store = dist.FileStore(file, placement.world_size)
    dist.init_process_group(backend, store=store, rank=placement.rank, world_size=placement.world_size)
    try:
        fallback.reset()
        world, size = dist.group.WORLD, dist.get_world_size()
        assert isinstance(world, EvenstepGroup)
        ones = torch.ones(4)
        assert functional.all_reduce(ones, "sum", world).eq(size).all()
        gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
        assert gather(ones, 0, world).shape == (4 * size,)
        scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor
        assert scatter(torch.ones(4 * size), "sum", 0, world).eq(size).all()
        assert functional.all_to_all_single(torch.ones(size), None, None, world).eq(1).all()
        assert functional.broadcast(torch.full((2,), float(dist.get_rank())), 1, world).eq(1).all()
        # C++ calls Gloo where it doesn't find a method, and nobody counts that.
        assert world._shared.num_calls == 6, repr(world)  # two for the all_to_all, whose splits are told
        mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("outer", "inner"))
        inner = mesh.get_group("inner")
        assert functional.all_reduce(ones, "avg", inner).eq(1).all()
        dist.barrier()
        return [dist.get_backend(), world.name(), type(inner).__name__], fallback.counts()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["evenstep", "cpu:evenstep,cuda:nccl"])
def test_as_the_default_group(ranks: RankPool, tmp_path: Path, backend: str) -> None:
    ranks.run(close_world, 2)
    for names, counts in ranks.run(as_the_default, 2, backend, str(tmp_path / "store")):
        assert names == [backend, "evenstep", "EvenstepGroup"]
        assert counts == {}


# ---------------------------------------------------------------------- torch's own wrappers


def build_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(20, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 300), torch.nn.ReLU()
    ).double()


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        model(torch.randn(8, 20, generator=generator, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def with_ddp(group: dist.ProcessGroup, hook: str | None) -> list[Tensor]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = torch.nn.parallel.DistributedDataParallel(build_model(), process_group=group, bucket_cap_mb=0.05)
    if hook is not None:
        model.register_comm_hook(group, getattr(default_hooks, hook))
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), group.rank())
    return [each.detach() for each in model.state_dict().values()]


def with_zero(group: dist.ProcessGroup, hook: str | None) -> list[Tensor]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = torch.nn.parallel.DistributedDataParallel(build_model(), process_group=group)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, process_group=group, lr=0.01)
    train(model, optimizer, group.rank())
    optimizer.consolidate_state_dict(to=0)
    return [each.detach() for each in model.state_dict().values()]


def with_fsdp(group: dist.ProcessGroup, hook: str | None) -> list[Tensor]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    model = build_model()
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, torch.optim.AdamW(model.parameters(), lr=0.01), group.rank())
    return [each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.state_dict().values()]


def with_compiled_ddp(group: dist.ProcessGroup, hook: str | None) -> list[Tensor]:
    """DDP's reducer calls the group from C++ while torch.compile is tracing whatever runs."""
    model = torch.nn.parallel.DistributedDataParallel(build_model(), process_group=group)
    train(torch.compile(model, backend="eager"), torch.optim.SGD(model.parameters(), lr=0.1), group.rank())
    return [each.detach() for each in model.state_dict().values()]


WAYS = {"ddp": with_ddp, "zero": with_zero, "fsdp": with_fsdp, "compiled": with_compiled_ddp}


def trained_alike(way: str, hook: str | None) -> dict[str, int]:
    with both_groups() as (gloo, ours):
        expected = WAYS[way](gloo, hook)
        assert fallback.counts() == {}
        check_equal(WAYS[way](ours, hook), expected, way)
        return fallback.counts()


@pytest.mark.parametrize(
    ("way", "hook"),
    [
        ("ddp", None),
        ("ddp", "allreduce_hook"),
        ("ddp", "fp16_compress_hook"),
        ("zero", None),
        ("fsdp", None),
        ("compiled", None),
    ],
)
def test_torchs_wrappers_give_what_they_give_on_gloo(ranks: RankPool, way: str, hook: str | None) -> None:
    assert ranks.run(trained_alike, 2, way, hook, timeout_s=120) == [{}] * 2


# ---------------------------------------------------------------------- peers

END = r"""
counts = evenstep.transport.fallback.counts()
assert type(dist.group.WORLD).__name__ == "EvenstepGroup", dist.group.WORLD
assert counts == {}, counts
print(f"rank {dist.get_rank()} has trained\n", end="", flush=True)
dist.destroy_process_group()
"""

ACCELERATE = """
import torch, torch.distributed as dist, evenstep
from accelerate import Accelerator

dist.init_process_group("evenstep")  # accelerate takes the group that is there; it refuses names that it doesn't know
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.DataLoader(torch.randn(16, 4), batch_size=4)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for x in data:
    accelerator.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
weights = accelerator.gather(next(model.parameters()).detach().view(1, -1))
assert weights.shape[0] == 2 and torch.equal(weights[0], weights[1])
accelerator.wait_for_everyone()
"""

FABRIC = """
import torch, torch.distributed as dist, evenstep
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy

fabric = Fabric(accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="evenstep"))
fabric.launch()
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
data = fabric.setup_dataloaders(torch.utils.data.DataLoader(torch.randn(16, 4), batch_size=4))
for x in data:
    fabric.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
weights = fabric.all_gather(next(model.parameters()).detach().view(1, -1)).view(2, -1)
assert torch.equal(weights[0], weights[1])
fabric.barrier()
"""


@pytest.mark.parametrize(("peer", "script"), [("accelerate", ACCELERATE), ("lightning_fabric", FABRIC)])
def test_other_libraries(tmp_path: Path, peer: str, script: str) -> None:
    if importlib.util.find_spec(peer) is None:  # not importorskip: importing them changes this process
        pytest.skip(f"{peer} is not installed")
    (tmp_path / "train.py").write_text(script + END)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert all(f"rank {rank} has trained" in done.stdout for rank in range(2)), done.stdout


def held() -> tuple[int, int, int]:
    """What this process holds: descriptors, mappings of segments, threads."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("/memfd:evenstep")
    return len(list(Path("/proc/self/fd").iterdir())), maps, threading.active_count()


@on_ranks(3)
def test_groups_that_are_destroyed_leave_nothing(world: evenstep.World) -> None:
    """What a rank holds before and after groups, each with long and short collectives and messages."""
    world.barrier()
    before = (0, 0, 0)
    for number in range(12):
        if number == 2:  # what is made once is there
            before = held()
        group = dist.new_group(backend="evenstep")
        rank, size = dist.get_rank(), dist.get_world_size()
        for numel in (3, 100_000):
            tensor, got = torch.ones(numel), torch.zeros(numel)
            dist.all_reduce(tensor, group=group)
            sent = dist.isend(torch.full((numel,), float(rank)), (rank + 1) % size, group=group)
            dist.recv(got, (rank - 1) % size, group=group)
            assert sent is not None
            sent.wait()
            assert (tensor[-1].item(), got[-1].item()) == (size, (rank - 1) % size)
        dist.destroy_process_group(group)
        del group, sent, tensor, got
    assert held() == before
