"""A child keeps its number until it is released."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from unittest import mock

import pytest

from evenstep.ground.host.processes import state_and_start
from evenstep.launcher.spawn.child import Child


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
    assert state_and_start(child.pid)[0] == ""
    with mock.patch.object(os, "killpg") as killpg:
        child.signal_group(signal.SIGKILL)
    killpg.assert_not_called()


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
