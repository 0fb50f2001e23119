"""Ends processes that ranks have started, if the launcher is killed: `python -I -S guard.py LAUNCHER_PID RANK_PID...`.

The kernel kills ranks when the process that started them ends (parent-death signal). The processes that ranks have
started have no such signal, and a killed launcher can't end them. So this process waits for the launcher's end, and
then kills the process group that each rank leads. A launcher that isn't killed ends this process first.

This file has few imports, so the process starts in 10 ms and needs 6 MB.
"""

import contextlib
import os
import signal
import sys
import time

_POLL_EVERY_S = 0.1


def main(launcher: int, ranks: list[int]) -> None:
    """Wait for the end of the launcher, then kill the groups of its ranks.

    Args:
        launcher: The launcher's pid: this process's parent.
        ranks: Pids of the ranks, each of which leads a process group. They stay valid as long as the launcher exists,
            because only the launcher reaps ranks.
    """
    for which in {*signal.Signals} - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(which, signal.SIG_IGN)  # schedulers signal every process
    while os.getppid() == launcher:
        time.sleep(_POLL_EVERY_S)
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(rank, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(pid) for pid in sys.argv[2:]])
