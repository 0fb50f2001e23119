"""What /proc says of processes, and what it says where it can't be read."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from evenstep.ground.host.processes import stat_fields, state_and_start
from tests.limits import no_descriptors


def test_a_process_that_is_there_and_one_that_is_not():
    state, start_ticks = state_and_start(os.getpid())
    assert state == "R"
    assert start_ticks > 0
    child = subprocess.Popen(["sleep", "60"])
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert state_and_start(child.pid)[0] == "Z"
    child.wait()
    assert state_and_start(child.pid) == ("", 0)


def test_that_proc_cannot_be_read_is_no_news_of_a_process():
    with no_descriptors():
        for pid in (os.getpid(), os.getppid()):
            with pytest.raises(OSError, match="Too many open files"):
                stat_fields(pid)
            with pytest.raises(OSError, match="Too many open files"):
                state_and_start(pid)
