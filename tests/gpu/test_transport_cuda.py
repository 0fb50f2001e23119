"""Tensors of a GPU through the host's memory: the conformance suite, streams, and ranks that fail."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import evenstep
from evenstep.errors import CollectiveTimeoutError, EvenstepError, MismatchError
from evenstep.testing import RankPool
from evenstep.testing.transport import Coverage, check_transport
from evenstep.transport.arrivals import plan_waiting
from evenstep.transport.base import Transport, Work
from evenstep.transport.host import connect_shared_memory
from evenstep.transport.through_host import ThroughHostTransport
from tests.gpu.sharing import device_of, world_over

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use"),
    pytest.mark.timeout(300),
]
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.int64,
    torch.uint8,
    torch.bool,
)
SHAPES = ((), (0,), (1,), (3, 5), (1000,), (100_000,), (300_000,))


@pytest.fixture(scope="module")
def gpu_ranks() -> Iterator[RankPool]:
    with RankPool(device=device_of(3)) as pool:
        for nproc in (2, 3):  # so that they are there before the first test looks who is
            pool.run(threading.active_count, nproc)
        yield pool


class OnGpu:
    """What it is given on the CPU lies on the GPU while it travels."""

    def __init__(self, behind: Transport) -> None:
        self.name, self.rank, self.world_size = behind.name, behind.rank, behind.world_size
        self._behind = behind

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)

    def split(self) -> OnGpu:
        return OnGpu(self._behind.split())

    def close(self) -> None:
        self._behind.close()

    def __getattr__(self, collective: str) -> Any:
        def call(*given: Any) -> Work:
            there = [(each, each.cuda()) if isinstance(each, Tensor) else (each, each) for each in given]
            return Back(getattr(self._behind, collective)(*(other for _, other in there)), there)

        return call


class Back:
    """A work whose tensors are copied back to the CPU."""

    def __init__(self, work: Work, pairs: Sequence[tuple[Any, Any]]) -> None:
        self._work, self._pairs = work, [pair for pair in pairs if isinstance(pair[0], Tensor)]

    def wait(self) -> None:
        self._work.wait()
        for cpu, gpu in self._pairs:
            cpu.copy_(gpu)

    def is_completed(self) -> bool:
        return self._work.is_completed()


def through_host(timeout_s: float = 60.0) -> ThroughHostTransport:
    world = evenstep.init(quiet=True)
    made = connect_shared_memory(world.control, plan_waiting(world.world_size, timeout_s=timeout_s))
    assert not isinstance(made, str), made
    return ThroughHostTransport(made)


def conforms(seed: int) -> int:
    return check_transport(lambda: OnGpu(through_host()), Coverage(dtypes=DTYPES, shapes=SHAPES, seed=seed))


@pytest.mark.parametrize("nproc", [2, 3])
def test_it_conforms(gpu_ranks: RankPool, nproc: int, fresh_seed: int) -> None:
    assert min(gpu_ranks.run(conforms, nproc, fresh_seed, timeout_s=250)) > 800


def on_streams(seed: int) -> None:
    """What is computed late is what travels, and what is computed behind `wait` has the result, on any stream."""
    with world_over("shared memory") as world:
        torch.manual_seed(seed)
        square, streams = torch.randn(2000, 2000, device="cuda"), [torch.cuda.Stream() for _ in range(3)]
        torch.cuda.synchronize()
        sums, works, values = [], [], []
        for turn in range(30):
            with torch.cuda.stream(streams[turn % 3]):
                for _ in range(5):
                    square @ square  # the GPU is busy with this when the call is made
                value = torch.full((1 << (turn % 18),), float(turn + world.rank), device="cuda")
                works.append(world.transport.all_reduce(value))
                values.append(value)
        for turn in reversed(range(30)):
            with torch.cuda.stream(streams[(turn + 1) % 3]):
                works[turn].wait()
                sums.append((turn, values[turn].double().mean() * 2))
                values[turn].zero_()  # behind the copy
        torch.cuda.synchronize()
        for turn, told in sums:
            assert told.item() == 2 * (2 * turn + 1), (turn, told)


def test_works_are_waited_for_on_any_stream(gpu_ranks: RankPool, fresh_seed: int) -> None:
    gpu_ranks.run(on_streams, 2, fresh_seed)


def failing() -> list[str]:
    world = evenstep.init(quiet=True)
    told = []
    transport = through_host()
    with pytest.raises(MismatchError) as caught:
        transport.all_reduce(torch.ones(3 + world.rank, device="cuda")).wait()
    told.append(str(caught.value))
    with pytest.raises(EvenstepError):
        transport.all_reduce(torch.ones(3, device="cuda")).wait()
    transport.close()
    waiting = through_host(timeout_s=2.0)
    if world.rank == 0:
        with pytest.raises(CollectiveTimeoutError, match="rank 0 waited"):
            waiting.all_reduce(torch.ones(3, device="cuda")).wait()
    world.barrier()
    waiting.close()
    return told


def test_what_goes_wrong_is_told_as_on_a_cpu(gpu_ranks: RankPool) -> None:
    for (message,) in gpu_ranks.run(failing, 2):
        assert "rank 0: all_reduce(sum) of float32 [3]; rank 1: all_reduce(sum) of float32 [4]" in message
