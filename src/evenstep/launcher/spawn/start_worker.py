"""What `evenstep run` starts as a rank: `python -u start_worker.py PARENT_PID script|module|program TARGET ARGS...`.

A file, and neither `-m` nor `-c`: those put the current directory first on the path, where a `random.py` of the
user's would stand for python's own while torch is imported. `python -P` would do, and exists from python 3.11 only.
"""

import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):  # python -P, 3.11 and later
    # The directory of this file, whose modules aren't meant to be imported by their bare names.
    del sys.path[0]

import importlib.util
from pathlib import Path


def die_with_the_launcher() -> None:
    """Before torch is imported: a launcher that is interrupted right now may not know of this process yet."""
    spec = importlib.util.spec_from_file_location("lifeline", Path(__file__).with_name("lifeline.py"))
    assert spec is not None
    assert spec.loader is not None
    lifeline = importlib.util.module_from_spec(spec)  # not through the package, which imports torch
    spec.loader.exec_module(lifeline)
    lifeline.die_with_parent(int(sys.argv[1]))


def import_what_the_launcher_did() -> None:
    """Have `evenstep` be the package that this file belongs to.

    It may be on nobody's path: `python -m evenstep run` finds it in the current directory.
    """
    package = Path(__file__).resolve().parents[1]
    spec = importlib.util.find_spec(package.name)
    if spec is None or spec.origin is None or Path(spec.origin).resolve().parent != package:
        sys.path.insert(0, str(package.parent))


if __name__ == "__main__":
    die_with_the_launcher()
    import_what_the_launcher_did()
    from evenstep.launcher.worker import main

    main(sys.argv[2:])
