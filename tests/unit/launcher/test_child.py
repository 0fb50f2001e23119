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

from evenstep.launcher.spawn.child import Child, keep_ended_children
from evenstep.processes import state_and_start


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


def test_a_child_that_runs_is_not_released() -> None:
    child = Child(fork(lambda: time.sleep(60)))
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.01)
    child.release()
    assert child.poll() is None
    child.send_signal(signal.SIGKILL)
    assert child.wait(30) == -signal.SIGKILL
    child.release()


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
