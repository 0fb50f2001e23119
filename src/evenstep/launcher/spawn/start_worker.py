"""Runs as a rank: `python -u start_worker.py PARENT_PID script|module|program|function TARGET ARGS...`.

`evenstep run` starts it, and so does `evenstep.launch`; for the latter the target is the descriptor from which
functions are read.

A file, not `-m` or `-c`: those put the current directory first on the path, and a `random.py` of the user's there would
replace python's own while torch is imported. `python -P` would do, and exists from python 3.11 only.
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
    """Set SIGKILL as this process's parent-death signal. Linux only; elsewhere nothing.

    The kernel sends it as soon as the thread that started this process ends. Survives `exec`. Also ends the process
    at once if the parent went before this was called.

    Args:
        parent_pid: The pid of the process that started this one, passed by that process: it may be 1 in a container, so
            a parent of 1 doesn't prove that the parent has ended.
    """
    if sys.platform != "linux":
        return
    # Not `ground.compat.c_library.libc`: that would import the package, and with it torch.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def import_what_the_launcher_did() -> None:
    """Make `evenstep` the package that this file belongs to, even if another one has been imported.

    The package may be on no path: `python -m evenstep run` finds it in the current directory.
    """
    package = Path(__file__).resolve().parents[2]
    found = (finder.find_spec(package.name, None) for finder in sys.meta_path)  # an editable installation has its own
    spec = next(filter(None, found), None)
    if spec is None or spec.origin is None or Path(spec.origin).resolve().parent != package:
        sys.path.insert(0, str(package.parent))


if __name__ == "__main__":
    # Before torch is imported: a launcher that is interrupted right now may not have recorded this process yet.
    die_with_parent(int(sys.argv[1]))
    import_what_the_launcher_did()
    from evenstep.launcher.spawn.script_runner import main

    main(sys.argv[2:])
