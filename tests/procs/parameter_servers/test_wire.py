"""Calls between processes that are stopped, killed, forked, busy, another user's, or a thousand strangers."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from evenstep.ground.host.network import LOOPBACK
from evenstep.parameter_servers.wire import Message
from tests.wire_cases import Place, listening, wait_until

_FORK = multiprocessing.get_context("fork")
MANY_BYTES = 16_000_000  # more than the kernel keeps of a connection


@contextlib.contextmanager
def child(target: Callable[..., Any], *args: Any) -> Iterator[BaseProcess]:
    """A forked process; killed at the end where it still runs."""
    process = _FORK.Process(target=_run, args=(target, args))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads: the child has only one
        process.start()
    try:
        yield process
    finally:
        if process.is_alive():
            os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        process.close()


def _run(target: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)  # threads of OpenMP are not there after a fork
    target(*args)


@pytest.fixture(params=["unix", "tcp"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    return tmp_path if request.param == "unix" else LOOPBACK


def stop_for(process: BaseProcess, pause_s: float) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(pause_s)
    os.kill(process.pid, signal.SIGCONT)


def call_fork_and_sleep(place: Place) -> None:
    client = place.client()
    client.call("begin")
    pid = os.fork()  # as a loader's worker; it lives on
    if pid == 0:
        time.sleep(600)
    client.call("forked", pid=pid)
    time.sleep(600)


# ---------------------------------------------------------------------- who is lost


@pytest.mark.parametrize(("is_one_node", "silent_s"), [(True, 3600), (False, 1.0)])
def test_a_process_that_has_ended_is_lost_though_its_child_lives(tmp_path: Path, silent_s: float, *, is_one_node: bool):
    """One node sees at once that it has gone; between nodes its connection ends, and it doesn't come back."""
    pids: list[int] = []

    def answer(rank: int, message: Message) -> Message:
        pids.extend([message.head["pid"]] if "pid" in message.head else [])
        return Message({})

    where = tmp_path if is_one_node else LOOPBACK
    with listening(where, answer, silent_s=silent_s) as place, child(call_fork_and_sleep, place) as process:
        wait_until(lambda: len(pids) == 1)
        try:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            assert place.has_lost.wait(60)
            os.kill(pids[0], 0)
        finally:
            os.kill(pids[0], signal.SIGKILL)


# ---------------------------------------------------------------------- who isn't


def push_many(place: Place) -> None:
    client, number, is_enough = place.client(), 0, False
    while not is_enough:
        number += 1
        answer = client.call("echo", [torch.full((MANY_BYTES // 4,), float(number))], number=number)
        assert bool((answer.tensors[0] == number).all())
        is_enough = answer.head["is_enough"]
    client.close()


@pytest.mark.extended
def test_a_client_that_is_stopped_in_the_middle_of_a_frame_is_not_lost(where: Path | str):
    """For much longer than silent_s: in its calls, and in answers that it doesn't read."""
    is_enough = False

    def answer(rank: int, message: Message) -> Message:
        return Message({"is_enough": is_enough}, message.tensors)

    with listening(where, answer, most_bytes=MANY_BYTES, silent_s=0.5) as place, child(push_many, place) as process:
        wait_until(lambda: len(place.calls) > 1)
        for pause_s in (0.2, 2.5, 2.5):
            stop_for(process, pause_s)
            before = len(place.calls)
            wait_until(lambda before=before: len(place.calls) > before + 1)  # type: ignore[misc]
        is_enough = True
        process.join()
        assert process.exitcode == 0
        assert place.lost == []


def serve(where: Path | str, connection: Any) -> None:
    with listening(where, most_bytes=MANY_BYTES, silent_s=0.5) as place:
        connection.send(place.listener.address)
        connection.recv()
        connection.send((place.calls, place.lost))


@pytest.mark.extended
def test_a_listener_that_is_stopped_is_waited_for(where: Path | str):
    """In the middle of a large frame, too, which it doesn't read; and when a client wants to connect."""
    mine, theirs = _FORK.Pipe()
    with mine, theirs, child(serve, where, theirs) as process, listening(silent_s=0.5, most_bytes=MANY_BYTES) as here:
        address = mine.recv()
        client = here.client(address=address)
        timer = threading.Thread(target=stop_for, args=(process, 2.5))
        timer.start()
        for number in range(10):
            answer = client.call("echo", [torch.full((MANY_BYTES // 4,), float(number))], number=number)
            assert bool((answer.tensors[0] == number).all())
        timer.join()
        timer = threading.Thread(target=stop_for, args=(process, 2.0))
        timer.start()
        time.sleep(0.5)
        client._line.close()
        assert client.call("echo").head["rank"] == 0
        timer.join()
        mine.send(None)
        assert mine.recv() == ([(0, "echo")] * 11, [])


# ---------------------------------------------------------------------- strangers


def come_through_an_open_folder(place: Place) -> None:
    os.setgid(65534)
    os.setuid(65534)
    with place.reached() as stranger:
        os._exit(8 if stranger.recv(32) == b"" else 9)


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's process is made by root")
def test_another_user_at_a_unix_socket(capfd: pytest.CaptureFixture[str]):
    """The kernel says who it is where somebody has opened the folder, which keeps it out else."""
    folder = Path("/tmp") / f"evenstep-test-{os.getpid()}"
    folder.mkdir(mode=0o700)
    try:
        with listening(folder) as place:
            folder.chmod(0o777)
            (folder / "socket").chmod(0o777)
            client = place.client()
            with child(come_through_an_open_folder, place) as process:
                process.join()
                assert process.exitcode == 8
            assert client.call("echo").head["rank"] == 0
            client.close()
    finally:
        (folder / "socket").unlink(missing_ok=True)
        folder.rmdir()
    assert "refused: another user's" in capfd.readouterr().err
