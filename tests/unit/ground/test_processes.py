"""What /proc says of processes, and what it says where it can't be read."""

from __future__ import annotations

import os
import signal
import subprocess

from evenstep.ground.host.processes import state_and_start


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
