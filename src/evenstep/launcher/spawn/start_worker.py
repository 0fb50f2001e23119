"""Runs as a rank: `python -u start_worker.py PARENT_PID script|module|program|function TARGET ARGS...`.

`evenstep run` and `evenstep.launch` start it. For `evenstep.launch` the target is the descriptor from which functions
are read.

It is run as a file, not with `-m` or `-c`: these put the current directory first on the path, and a user's `random.py`
there would replace python's own while torch is imported. `python -P` would prevent that, but exists only from python
3.11 on.
"""

import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):  # python -P, 3.11 and later
    # Remove the directory of this file: its modules must not be importable by their bare names.
    del sys.path[0]

import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
WORKER = __file__


def die_with_parent(parent_pid: int) -> None:
    """Set SIGKILL as this process's parent-death signal. Does nothing on other systems than Linux.

    The kernel sends it as soon as the thread that started this process ends. The setting survives `exec`. If the parent
    has ended before this call, the process ends at once.

    Args:
        parent_pid: The pid of the process that started this one, passed by that process: it may be 1 in a container, so
            a parent of 1 doesn't prove that the parent has ended.
    """
    if sys.platform != "linux":
        return
    # Don't use `ground.compat.c_library.libc`: it would import the package, and with it torch.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def import_what_the_launcher_did() -> None:
    """Make `evenstep` the package to which this file belongs, even if another one would be found.

    The package may be on no path: `python -m evenstep run` finds it in the current directory.
    """
    package = Path(__file__).resolve().parents[2]
    found = (finder.find_spec(package.name, None) for finder in sys.meta_path)  # editable installations add one
    spec = next(filter(None, found), None)
    if spec is None or spec.origin is None or Path(spec.origin).resolve().parent != package:
        sys.path.insert(0, str(package.parent))


if __name__ == "__main__":
    # Set it before torch is imported: a launcher that is interrupted now may not have recorded this process yet.
    die_with_parent(int(sys.argv[1]))
    import_what_the_launcher_did()
    from evenstep.launcher.spawn.script_runner import main

    main(sys.argv[2:])
