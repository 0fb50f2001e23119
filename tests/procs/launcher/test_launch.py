"""`evenstep.launch`: results, exceptions, and what can't be sent."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import evenstep
from evenstep.errors import CollectiveTimeoutError, ConfigurationError, RankFailedError
from evenstep.ground.host.processes import children, is_running
from evenstep.launcher.pool import RankGroup


def train(offset: float, scale: float = 1.0) -> tuple[float, int, str]:
    with evenstep.init(quiet=True) as world:
        return world.mean(float(world.rank)) * scale + offset, world.world_size, str(world.device)


def threads() -> tuple[int, str]:
    return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


class NeedsTwo(Exception):
    """Can't be unpickled."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def cascade() -> None:
    world = evenstep.init(quiet=True)
    for step in range(5):
        if step == 3 and world.rank == 1:
            raise KeyError("bad sample")
        world.barrier()


def raise_unpicklable() -> None:
    raise NeedsTwo(1, 2)


def end_rank_1(how: str) -> None:
    if os.environ["RANK"] == "1":
        if how == "exit":
            sys.exit(3)
        if how == "_exit":
            os._exit(4)
        os.kill(os.getpid(), getattr(signal, how))
    time.sleep(0 if how == "exit" else 60)


def leave_pids(directory: str) -> None:
    Path(directory, os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(60)


def test_rank_0s_result_comes_back() -> None:
    assert evenstep.launch(train, 2, (3.0,), kwargs={"scale": 2.0}, device="cpu") == (4.0, 2, "cpu")


@pytest.mark.extended
def test_in_a_cascade_the_culprits_exception_is_raised() -> None:
    before = set(children(os.getpid()))  # the ranks of other tests
    with pytest.raises(KeyError, match="bad sample") as caught:
        evenstep.launch(cascade, 2)
    assert "on rank 1 (pid" in str(caught.value.__cause__)
    assert "in cascade" in str(caught.value.__cause__)
    if sys.version_info >= (3, 11):
        assert "rank 1" in caught.value.__notes__[0]
    assert set(children(os.getpid())) <= before


def test_an_exception_that_cannot_travel_is_told() -> None:
    with pytest.raises(RankFailedError, match=r"rank \d .* failed: NeedsTwo: 1 and 2") as caught:
        evenstep.launch(raise_unpicklable, 1)
    assert "raise_unpicklable" in str(caught.value.__cause__)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("how", "exitcode", "words"),
    [
        ("exit", 3, "SystemExit: 3"),
        ("_exit", 4, "exited with status 4"),
        ("SIGKILL", -9, "was killed by SIGKILL"),
        ("SIGSEGV", -11, "was killed by SIGSEGV"),
    ],
)
def test_who_ends_without_an_exception_is_named(how: str, exitcode: int, words: str) -> None:
    with pytest.raises(RankFailedError, match=words) as caught:
        evenstep.launch(end_rank_1, 2, (how,))
    assert (caught.value.rank, caught.value.exitcode) == (1, exitcode)
    assert "rank 1 (pid " in str(caught.value)


@pytest.mark.extended
def test_a_deadline_says_who_is_missing_and_where(tmp_path: Path) -> None:
    ranks = RankGroup(2)
    ranks.run(threads)  # or the deadline might pass while they import torch
    with pytest.raises(CollectiveTimeoutError, match=r"missing: rank 0, 1 of 2(.|\n)*in leave_pids"):
        ranks.run(leave_pids, (str(tmp_path),), timeout_s=5.0)


@pytest.mark.extended
def test_functions_of_a_notebook_travel_by_value() -> None:
    """`python -c` has no file that the ranks could import, like a notebook."""
    program = (
        "import evenstep\n"
        "class Mine(Exception): pass\n"
        "offset = 40\n"
        "def fn(x): return x + offset + evenstep.init(quiet=True).world_size\n"
        "def fail(): raise Mine('typed in')\n"
        "print(evenstep.launch(fn, 2, (0,)), evenstep.launch(lambda: [1], 1))\n"
        "try: evenstep.launch(fail, 1)\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[0] == "42 [1]", done.stderr
    assert "typed in" in done.stdout.splitlines()[1]


@pytest.mark.extended
def test_a_missing_main_guard_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import evenstep\ndef fn(): pass\nevenstep.launch(fn, 2)\n")
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 78
    assert "Traceback" not in done.stderr
    assert 'if __name__ == "__main__":' in done.stderr.splitlines()[-2]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("call", "status", "told"),
    [
        (
            "evenstep.launch(train, 0)",
            78,
            r"ConfigurationError: evenstep.launch: nproc=0.*\n  at .*script.py, line 7, in .*",
        ),
        (
            "evenstep.launch(train, 2)",
            1,
            r"UsageError: not like this\n  raised on rank [01] \(pid \d+\) of 2, at .*script.py, line 4, in train",
        ),
    ],
)
def test_a_mistake_in_a_script_is_one_message_and_a_status(tmp_path: Path, call: str, status: int, told: str) -> None:
    (tmp_path / "script.py").write_text(
        "import evenstep\n"
        "\n"
        "def train():\n"
        "    raise evenstep.errors.UsageError('not like this')\n"
        "\n"
        "if __name__ == '__main__':\n"
        f"    {call}\n"
    )
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (status, "")
    assert re.fullmatch(rf"evenstep: {told}\n", done.stderr), done.stderr


def start_sleepers(directory: str) -> None:
    sleeper = subprocess.Popen(["sleep", "60"])
    Path(directory, os.environ["RANK"]).write_text(str(sleeper.pid))
    time.sleep(60)


def sleepers_of(directory: Path) -> list[int]:
    """The processes that two ranks have started, once they have."""
    files = [directory / "0", directory / "1"]
    deadline = time.monotonic() + 90
    while not all(file.exists() and file.read_text() for file in files) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [int(file.read_text()) for file in files]


def are_gone(pids: list[int], *, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(is_running, pids))


@pytest.mark.parametrize("sent", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.extended)])
def test_what_ranks_have_started_ends_with_a_parent_that_is_killed(tmp_path: Path, sent: signal.Signals) -> None:
    """Within a second. What ranks have started doesn't get the signal by which the kernel ends ranks."""
    program = (
        # In the background of a shell, interrupts are ignored by whoever doesn't ask for them.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"import evenstep; from {__name__} import start_sleepers\n"
        f"evenstep.launch(start_sleepers, 2, ({str(tmp_path)!r},))"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    pids = sleepers_of(tmp_path)
    parent.send_signal(sent)
    _, err = parent.communicate(timeout=60)
    assert parent.returncode == -sent
    assert err.count("Traceback") == (1 if sent == signal.SIGINT else 0), err
    assert are_gone(pids, within_s=1.0)


@pytest.mark.parametrize("is_known", [True, False])
def test_an_interrupt_while_the_ranks_are_started_leaves_none(monkeypatch: pytest.MonkeyPatch, is_known: bool) -> None:
    """One that comes before the group knows of a rank's process, too."""
    inner, name = (RankGroup, "_start") if is_known else (subprocess, "Popen")
    start = getattr(inner, name)
    started = []

    def start_and_interrupt(*args: Any, **settings: Any) -> Any:
        started.append(start(*args, **settings))
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        return started[-1]

    monkeypatch.setattr(inner, name, start_and_interrupt)
    monkeypatch.setattr(RankGroup, "run", lambda *_, **__: pytest.fail("the interrupt was lost"))
    others = set(children(os.getpid()))  # the ranks of other tests
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            evenstep.launch(threads, 1)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(started) == 1
    if not is_known:
        assert started[0].wait(60) == 0
    assert set(children(os.getpid())) <= others


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fn": None}, "can't be called"),
        ({"nproc": 0}, "nproc=0"),
        ({"nproc": -2}, "nproc=-2"),
        ({"nproc": 2.0}, "nproc=2.0"),
        ({"nproc": True}, "nproc=True"),
        ({"args": "text"}, r"args=\('text',\)"),
        ({"device": "cuda:99"}, "cuda:99"),
        ({"threads_per_rank": 0}, "threads_per_rank=0; a whole number"),
    ],
)
def test_arguments_that_make_no_sense(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        evenstep.launch(**({"fn": threads, "nproc": 1} | arguments))  # type: ignore[arg-type]
