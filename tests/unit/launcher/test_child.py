"""A child keeps its number until it is released."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from evenstep.ground.host.processes import state_and_start
from evenstep.launcher.spawn.child import Child, Guard, keep_ended_children, stop

NOBODY = 2**22 + 1  # more than any process's number


def fork(body: Callable[[], object]) -> int:
    """A child that leads a session, as ranks do."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            body()
        finally:
            os._exit(5)
    return pid


@pytest.mark.parametrize(("ending", "code"), [(lambda: None, 5), (lambda: os.kill(os.getpid(), 9), -9)])
def test_a_child_that_has_ended_is_looked_at_and_not_reaped(ending: Callable[[], object], code: int) -> None:
    child = Child(fork(ending))
    assert child.wait(30) == child.poll() == child.returncode == code
    assert state_and_start(child.pid)[0] == "Z", "its number is nobody else's"
    child.release()
    child.release()
    assert state_and_start(child.pid)[0] == ""


def test_a_group_is_killed_after_its_leader_and_a_strangers_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of a child that was reaped may come back as that of another process."""
    ready = tmp_path / "ready"

    def leave_a_worker() -> None:
        if os.fork() == 0:
            ready.write_text(str(os.getpid()))
            time.sleep(60)

    child = Child(fork(leave_a_worker))
    assert child.wait(30) == 5
    while not (ready.exists() and ready.read_text()):
        time.sleep(0.01)
    worker = int(ready.read_text())
    assert state_and_start(worker)[0] not in ("", "Z")
    child.signal_group(signal.SIGKILL)
    while state_and_start(worker)[0] not in ("", "Z"):
        time.sleep(0.01)
    child.release()
    killed: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda pid, which: killed.append(pid))
    child.signal_group(signal.SIGKILL)
    child.send_signal(signal.SIGKILL)
    assert killed == []


class Interrupted(Exception):
    """What the handler of a second signal raises."""


def test_a_child_that_leads_no_group_yet_gets_the_signal_all_the_same() -> None:
    """It was forked a moment ago."""
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    child = Child(pid)
    child.signal_group(signal.SIGKILL)
    assert child.wait(30) == -signal.SIGKILL
    child.release()


def test_who_is_asked_to_end_has_the_time_for_it(tmp_path: Path) -> None:
    """As a rank that saves."""
    ready = tmp_path / "ready"

    def save_and_end(*_: object) -> None:
        time.sleep(0.3)
        os._exit(75)

    def train() -> None:
        signal.signal(signal.SIGTERM, save_and_end)
        ready.touch()
        time.sleep(60)

    child = Child(fork(train))
    while not ready.exists():
        time.sleep(0.01)
    assert stop({0: child}, lambda _: child.send_signal(signal.SIGTERM), patience_s=60, terminate_s=60) == []
    child.release()
    assert child.returncode == 75


@pytest.mark.parametrize("is_asking", [True, False])
def test_an_interrupt_while_children_are_asked_or_awaited_kills_all_of_them(is_asking: bool) -> None:
    """A second Ctrl-C: the ranks that save, and those that haven't been asked yet, must not be left behind."""
    children = {number: Child(fork(lambda: time.sleep(60))) for number in range(2)}

    def interrupt(*_: object) -> None:
        raise Interrupted

    def ask(number: int) -> None:
        if is_asking:
            signal.raise_signal(signal.SIGALRM)
        elif number == 1:
            signal.setitimer(signal.ITIMER_REAL, 0.01)

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(Interrupted):
            stop(children, ask, patience_s=60, terminate_s=60)
        assert [child.wait(30) for child in children.values()] == [-signal.SIGKILL] * 2
    finally:
        signal.signal(signal.SIGALRM, before)
        for child in children.values():
            child.signal_group(signal.SIGKILL)
            child.wait(30)
            child.release()


def test_a_guard_kills_the_groups_that_are_left_whichever_have_gone(tmp_path: Path) -> None:
    """The first rank has left nothing; what the second one has started must not survive the launcher for that."""
    told = tmp_path / "pid"

    def launch() -> None:
        rank = fork(lambda: time.sleep(60))
        Guard([NOBODY, rank])
        told.with_suffix(".new").write_text(str(rank))
        told.with_suffix(".new").rename(told)
        time.sleep(60)

    launcher = Child(fork(launch))
    while not told.exists():
        time.sleep(0.01)
    rank = int(told.read_text())
    try:
        launcher.send_signal(signal.SIGKILL)
        assert launcher.wait(30) == -signal.SIGKILL
        deadline = time.monotonic() + 30
        while state_and_start(rank)[0] not in ("", "Z") and time.monotonic() < deadline:
            time.sleep(0.01)
        assert state_and_start(rank)[0] in ("", "Z")
    finally:
        if state_and_start(rank)[0] not in ("", "Z"):
            os.killpg(rank, signal.SIGKILL)
        launcher.release()


def test_how_children_end_is_known_where_the_starter_had_that_ignored() -> None:
    """A shell's `trap "" CHLD`, a supervisor: the kernel then reaps children, and no parent learns how they ended."""
    before = signal.getsignal(signal.SIGCHLD)
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        restore = keep_ended_children()
        assert subprocess.run([sys.executable, "-c", "raise SystemExit(3)"], check=False).returncode == 3
        restore()
        assert signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        keep_ended_children()()
        assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL, "what wasn't ignored is left alone"
    finally:
        signal.signal(signal.SIGCHLD, before)
