"""A rank must not outlive whoever started it, however that one ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process as soon as the thread that started it ends. Linux only; elsewhere nothing.

    Survives `exec`. Also ends the process at once if the parent went before this was called.

    Args:
        parent_pid: The process that started this one, as it said itself: it may be 1 in a container, so that
            "my parent is now 1" proves nothing.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)
