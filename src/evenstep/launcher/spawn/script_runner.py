"""One rank: prepares the process, then becomes the user's script, or calls functions for `evenstep.launch`.

`start_worker.py` calls `main`, in a process that dies with the launcher and whose `sys.path` has no directory of the
script or the user yet.
"""

from __future__ import annotations

import _io
import atexit
import contextlib
import errno
import faulthandler
import fcntl
import gc
import importlib
import importlib.util
import io
import logging
import multiprocessing.util
import os
import resource
import signal
import stat
import sys
import types
from importlib.abc import InspectLoader
from pathlib import Path
from typing import Any

from evenstep.errors import ConfigurationError
from evenstep.ground.coordination.rendezvous_store import meet_without_port
from evenstep.ground.environment import current_placement, is_set, settings
from evenstep.ground.health import excepthook, heartbeat
from evenstep.ground.health.heartbeat import Note
from evenstep.ground.health.peer_heartbeats import own_page, write_page
from evenstep.ground.health.steps import count_optimizer_steps, mark_end_of_group
from evenstep.ground.host.processes import has_gpu_driver
from evenstep.launcher.spawn.log_lines import stamp_lines
from evenstep.launcher.spawn.own_ranks import refuse_own_ranks
from evenstep.launcher.spawn.remote import serve

# Healthy ranks get this signal, too, so it isn't SIGUSR1 or SIGUSR2, which scripts and libraries use.
STACK_SIGNAL = int(getattr(signal, "SIGRTMAX", signal.SIGUSR2 + 2)) - 2


_HIGHEST_FD, _NUM_FAR = 4096, 16  # descriptors with high numbers; the kernel's table grows with the highest one


def main(arguments: list[str]) -> None:
    """Prepare this process and run the target in it."""
    kind, target, *rest = arguments
    _share_one_file()
    placement, given = current_placement(), settings()
    page = own_page(placement)
    if page is not None:
        page.words[Note.IS_READY] = 1
    if kind == "program":
        # The parent-death signal of this process survives `exec`.
        os.execvp(target, [target, *rest])
    faulthandler.enable()
    meet_without_port(placement)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        if os.isatty(descriptor):
            setattr(sys, name, unbuffered(descriptor, f"<{name}>", getattr(sys, name)))
    if given.stamps_lines and all(_is_own_log(descriptor, placement.rank) for descriptor in (1, 2)):
        stamp_lines(placement.rank)
    if page is not None:
        write_page(placement)
        # Keep it open until the process ends: faulthandler writes to its descriptor.
        register_stacks(open_far(placement.pages[placement.local_rank]))
        page.words[Note.WRITES_STACKS] = 1
        count_optimizer_steps()
    if given.inject:
        # Import by name, because no module may depend on `testing`.
        importlib.import_module("evenstep.testing.faults").install(given.inject, rank=placement.rank)
    if kind != "function" and placement.world_size > 1:
        refuse_own_ranks()
        mark_end_of_group()
    excepthook.install(placement)
    # Modules imported so far are never freed, so garbage collections needn't scan them.
    atexit.register(end_quickly, os.getpid(), has_frozen_types=_reports_leaks())
    gc.freeze()
    if kind == "function":
        serve(int(target), placement.rank)
    elif kind == "module":
        _become_module(target, rest)
    else:
        become_script(target, rest)


class _Terminal(io.FileIO):
    """A terminal stream that discards output once the terminal is gone.

    A dropped connection makes the ranks save and stop. Without this class the rank that prints would fail before that.
    """

    def write(self, data: Any, /) -> int:
        """See base class."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return memoryview(data).nbytes


def unbuffered(descriptor: int, name: str, like: object) -> io.TextIOWrapper:
    """A stream as `python -u` makes it: output is visible at once, even if the process is killed."""
    raw = (_Terminal if os.isatty(descriptor) else io.FileIO)(descriptor, "wb", closefd=False)
    raw.name = name
    encoding, errors = getattr(like, "encoding", "utf-8"), getattr(like, "errors", "strict")
    stream = io.TextIOWrapper(raw, encoding=encoding, errors=errors, newline="\n", write_through=True)
    vars(stream)["mode"] = "w"
    return stream


def open_far(path: str) -> int:
    """A descriptor with a high number, to append to a file.

    A program may close descriptors that it hasn't opened (`os.closerange`). Its next files get their numbers, the
    lowest first, and stacks that are written to a low number would end up in such a file.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    near = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    try:
        highest = _HIGHEST_FD if limit == resource.RLIM_INFINITY else min(limit, _HIGHEST_FD)
        return fcntl.fcntl(near, fcntl.F_DUPFD_CLOEXEC, max(0, highest - _NUM_FAR))
    finally:
        os.close(near)


def register_stacks(file: int) -> None:
    """Make this process write its stacks to the descriptor `file` on `STACK_SIGNAL`. The caller keeps it open.

    Without a GPU only the main thread's stack is written, because that thread gets the signal. faulthandler reads other
    threads' frames without the interpreter lock, and healthy ranks with running threads sometimes died of SIGSEGV from
    that. With a GPU all stacks are written, because a backward hook may hang in one of autograd's threads.
    """
    all_threads = has_gpu_driver() and not is_set("EVENSTEP_SERVERS")  # RPC of parameter servers has python threads
    faulthandler.register(STACK_SIGNAL, file=file, all_threads=all_threads)


def end_quickly(pid: int, *, has_frozen_types: bool = False) -> None:
    """Make python end without its last collections, which take half of the time from an error to the end of the run.

    Objects that modules hold are released as usual. Cycles of objects, and the objects that they hold, aren't released:
    python doesn't promise to call their `__del__` at its end. Python's collection would close files, so their buffered
    output is flushed here instead. If a rank has failed, the launcher may kill it after this, so exit handlers run
    first.

    If a library reports objects that python hasn't released, python ends in the usual way: see `_reports_leaks`.

    Args:
        pid: The rank's process; a process that the script has forked ends in the usual way.
        has_frozen_types: Whether such a library was imported before the first `gc.freeze()`, as in the ranks of a
            second attempt.
    """
    if os.getpid() != pid:
        return
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]  # waits for children and their queues
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or replaced by the script
            stream.flush()
    for thing in gc.get_objects():  # objects created since the script began
        if issubclass(type(thing), _io._IOBase):
            with contextlib.suppress(Exception):  # closed, or not writable
                if stat.S_ISREG(os.fstat(thing.fileno()).st_mode):  # a pipe might wait for its reader
                    thing.flush()
    if not _reports_leaks():
        gc.freeze()
    elif has_frozen_types:
        gc.unfreeze()
    heartbeat.note(Note.IS_DONE)


def _reports_leaks() -> bool:
    """Whether nanobind, which triton and other libraries use for their python bindings, is in this process.

    At the very end of python, nanobind looks for types that weren't released, and prints thirty lines if it finds any.
    Classes are in reference cycles, which only a collection frees, and collections skip frozen objects.
    """
    return any(kind.__module__ == "nanobind" for kind in type.__subclasses__(type))


def _is_own_log(descriptor: int, rank: int) -> bool:
    """Whether a stream is a log file that the launcher has made. An inherited stream may be another file."""
    try:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.startswith(f"rank-{rank}.")
    except OSError:
        return False


def _share_one_file() -> None:
    """Make stdout and stderr share one descriptor if they were opened as the same file twice.

    Two descriptors with separate offsets would overwrite each other's output.
    """
    out, err = os.fstat(1), os.fstat(2)
    if stat.S_ISREG(out.st_mode) and os.path.samestat(out, err):
        os.dup2(1, 2)


def become_script(path: str, arguments: list[str]) -> None:
    """Run a script as python itself would run it."""
    sys.argv = [path, *arguments]
    _put_first(Path(path).resolve().parent)
    with io.open_code(str(Path(path).absolute())) as file:
        code = compile(file.read(), path, "exec")
    _run_as_main(code, __file__=path)


def _become_module(name: str, arguments: list[str]) -> None:
    _put_first(Path.cwd())
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    loader = spec.loader if spec is not None else None
    code = loader.get_code(spec.name) if spec is not None and isinstance(loader, InspectLoader) else None
    if spec is None or code is None:
        raise ConfigurationError(f"module {name} has no code to run. Give the name of a python module after -m.")
    sys.argv = [spec.origin or name, *arguments]
    _run_as_main(code, __file__=spec.origin, __spec__=spec, __loader__=spec.loader, __package__=spec.parent)


def _put_first(directory: Path) -> None:
    """Put a directory first on `sys.path`, as python itself would do."""
    if not getattr(sys.flags, "safe_path", False):  # python -P, 3.11 and later
        sys.path.insert(0, str(directory))


def _run_as_main(code: types.CodeType, **names: object) -> None:
    # A module that stays `__main__` until the process ends, unlike runpy's: the script's threads and exit handlers may
    # still pickle objects that it defines.
    module = types.ModuleType("__main__")
    module.__dict__.update(names)
    sys.modules["__main__"] = module
    exec(code, module.__dict__)
