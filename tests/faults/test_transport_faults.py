"""Ranks that die, stop, disagree or stay away, seen by those who share memory with them."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import evenstep
from evenstep.errors import (
    CollectiveTimeoutError,
    ConfigurationError,
    EvenstepError,
    MismatchError,
    PeerLostError,
    RankFailedError,
)
from evenstep.testing import RankPool
from evenstep.transport.core.transport import Transport
from evenstep.transport.shm.handshake import connect_shared_memory
from evenstep.transport.shm.transport import SharedMemoryTransport

CPU = torch.device("cpu")


def connect(timeout_s: float = 30.0) -> SharedMemoryTransport:
    made = connect_shared_memory(evenstep.init(quiet=True).control, timeout_s=timeout_s)
    assert isinstance(made, SharedMemoryTransport), made
    return made


def all_reduce_until_somebody_dies(victim: int, numel: int, directory: Path) -> None:
    """The victim is killed by a thread of its own, wherever it is; the others note what they learned and when."""
    transport = connect()
    tensor = transport.allocate(numel, dtype=torch.float32, device=CPU)
    transport.all_reduce(tensor).wait()
    if transport.rank == victim:

        def kill() -> None:
            (directory / "killed").write_text(repr(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Timer(0.3, kill).start()
    try:
        while True:
            transport.all_reduce(tensor).wait()
    except EvenstepError as error:
        learned = time.monotonic()
        text = f"{type(error).__name__} {learned!r} {error}"
        (directory / str(transport.rank)).write_text(text)
        raise


@pytest.mark.extended
@pytest.mark.parametrize("numel", [16, 1 << 20])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_peer_killed_in_the_middle_is_named_at_once(tmp_path: Path, victim: int, numel: int) -> None:
    with RankPool() as pool, pytest.raises(RankFailedError, match=f"rank {victim} .*SIGKILL"):
        pool.run(all_reduce_until_somebody_dies, 3, victim, numel, tmp_path)
    killed = float((tmp_path / "killed").read_text())
    for rank in {0, 1, 2} - {victim}:
        kind, learned, text = (tmp_path / str(rank)).read_text().split(" ", 2)
        assert kind == "PeerLostError"
        assert f"rank {rank} lost" in text
        # A survivor may meet another one that has already given up, but the dead are named first.
        assert f"rank {victim} (pid" in text
        assert "whose process has ended" in text
        assert float(learned) - killed < 0.5


def refused_on_one_rank() -> list[tuple[str, str]]:
    """What a rank is told of calls whose arguments rank 1 may not make."""
    told = []
    for case in range(6):
        transport = connect()
        odd = transport.rank == 1
        calls: list[Any] = [
            lambda t=transport, o=odd: t.all_reduce(torch.eye(3).to_sparse() if o else torch.eye(3)),
            lambda t=transport, o=odd: t.all_reduce(torch.ones(3, dtype=torch.bool), "mean" if o else "sum"),
            lambda t=transport, o=odd: t.broadcast(torch.ones(3), 7 if o else 0),
            lambda t=transport, o=odd: t.all_gather(torch.empty(8 if o else 9), torch.ones(3)),
            lambda t=transport, o=odd: t.all_reduce(torch.ones(1).expand(100_000) if o else torch.ones(100_000)),
            lambda t=transport, o=odd: t.gather(None, torch.ones(3), 1),
        ]
        started = time.monotonic()
        with pytest.raises(ConfigurationError if odd else MismatchError) as caught:
            calls[case]().wait()
        assert time.monotonic() - started < 2
        with pytest.raises(MismatchError) as again:
            transport.all_reduce(torch.zeros(1)).wait()
        told.append((str(caught.value), str(again.value)))
        transport.close()
    return told


def test_what_one_rank_refuses_is_an_error_on_all_at_once(ranks: RankPool) -> None:
    """Nobody waits for the call that isn't made, and all learn whose arguments were wrong, and why."""
    first, second, third = ranks.run(refused_on_one_rank, 3)
    assert first == third
    for (told, again), (reason, then) in zip(first, second, strict=True):
        assert told == again == then
        assert "rank 1: no call, because its arguments were refused. Rank 1: " in told
        assert told.endswith(reason)
    assert "ranks 0, 2: all_reduce(sum) of float32 [3, 3]; rank 1" in first[0][0]
    reasons = [reason for reason, _ in second]
    words = ("sparse", "neither true nor false", "src=7", "3 times the elements", "share memory", "has to pass out")
    assert all(word in reason for word, reason in zip(words, reasons, strict=True)), reasons


def refused_on_all_ranks() -> list[float]:
    return sums_between_refusals(connect(), 20)


def sums_between_refusals(transport: Transport, num_refused: int) -> list[float]:
    """Every rank refuses what it is given, each time; a sum of ones after every second time."""
    sums = []
    for number in range(num_refused):
        with pytest.raises(ConfigurationError):
            transport.broadcast(torch.ones(3), 7 + transport.rank)
        if number % 2:
            tensor = torch.ones(1)
            transport.all_reduce(tensor).wait()
            sums.append(float(tensor))
    transport.close()
    return sums


def test_what_all_ranks_refuse_is_no_call(ranks: RankPool) -> None:
    assert ranks.run(refused_on_all_ranks, 3) == [[3.0] * 10] * 3


def given_up_on() -> str:
    """Rank 0 gives rank 1 up. Rank 1 comes, ends that call, and makes another."""
    world = evenstep.init(quiet=True)
    transport = connect(timeout_s=0.3 if world.rank == 0 else 50)
    text = ""
    if transport.rank == 0:
        with pytest.raises(CollectiveTimeoutError):
            transport.all_reduce(torch.ones(2)).wait()
    world.barrier()
    if transport.rank == 1:
        tensor = torch.ones(2)
        transport.all_reduce(tensor).wait()
        assert tensor.tolist() == [2.0, 2.0]
        started = time.monotonic()
        with pytest.raises(PeerLostError) as caught:
            transport.all_reduce(tensor).wait()
        assert time.monotonic() - started < 20
        text = str(caught.value)
    world.barrier()
    transport.close()
    return text


def test_who_has_given_up_is_waited_for_by_nobody(ranks: RankPool) -> None:
    text = ranks.run(given_up_on, 2)[1]
    assert "rank 1 lost rank 0 (pid" in text
    assert "has given up or closed its end in shared memory collective number 2" in text


def wait_for_a_stopped_peer() -> tuple[float, str]:
    transport = connect()
    world = evenstep.init(quiet=True)
    pids = world.exchange(os.getpid())
    transport.all_reduce(torch.zeros(3)).wait()
    if transport.rank == 0:
        # Somebody else has to continue it: a stopped process can't.
        continuing = subprocess.Popen(["sh", "-c", f"kill -STOP {pids[1]}; sleep 2.6; kill -CONT {pids[1]}"])
        time.sleep(0.2)
    else:
        time.sleep(0.3)  # stopped in here
    tensor = torch.ones(3)
    told = io.StringIO()
    started = time.monotonic()
    with contextlib.redirect_stderr(told):
        transport.all_reduce(tensor).wait()
    if transport.rank == 0:
        continuing.wait()
    assert tensor.tolist() == [2.0] * 3
    transport.close()
    return time.monotonic() - started, told.getvalue()


def test_a_stopped_peer_is_waited_for_and_reported_once(ranks: RankPool) -> None:
    waited_s, told = ranks.run(wait_for_a_stopped_peer, 2)[0]
    assert waited_s > 2
    assert told.count("stopped (state T)") == 1
    assert "rank 1 (pid" in told
    assert "SIGCONT" in told


def shared_memory_in_use() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) * 1024
    raise AssertionError


def hold_much_and_die() -> None:
    transport = connect()
    tensor = transport.allocate(64 << 20, dtype=torch.float32, device=CPU)
    transport.all_reduce(tensor).wait()
    evenstep.init(quiet=True).barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def test_nothing_is_left_when_all_are_killed() -> None:
    files, memory = {path.name for path in Path("/dev/shm").iterdir()}, shared_memory_in_use()
    with RankPool() as pool, pytest.raises(RankFailedError, match="SIGKILL"):
        pool.run(hold_much_and_die, 2)
    deadline = time.monotonic() + 5
    while shared_memory_in_use() > memory + (256 << 20) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert shared_memory_in_use() < memory + (256 << 20)
    assert {path.name for path in Path("/dev/shm").iterdir()} - files == set()
