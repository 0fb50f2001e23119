"""Makes a forked rank like a process that python has just started: [Note: ranks forked from a zygote]."""

from __future__ import annotations

import ctypes
import importlib.machinery
import io
import mmap
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from evenstep.ground import environment
from evenstep.ground.compat.c_library.libc import c_library
from evenstep.processes import stat_fields

_SET_BLAS_THREADS = (
    "openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "scipy_openblas_set_num_threads64_",
)


def settle(variables: Mapping[str, str], descriptors: Sequence[int]) -> None:
    """Take over a rank's variables and streams, and start threads and random numbers as a new process would.

    Args:
        variables: The whole environment.
        descriptors: What become stdin, stdout and stderr; closed under their present numbers.
    """
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    for descriptor in descriptors:
        os.close(descriptor)
    environment.replace(variables)
    _set_signals()
    tempfile.tempdir = None  # an import may have asked for it, and TMPDIR may be another one here
    sys.stdout = sys.__stdout__ = _unbuffered(1, "<stdout>", sys.__stdout__)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _unbuffered(2, "<stderr>", sys.__stderr__)  # type: ignore[misc]
    _set_threads()
    # python's own generator is seeded anew by the fork; these would be the same in all ranks.
    torch.default_generator.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def _set_signals() -> None:
    """The launcher handles these, so what it executes has their defaults, also where nohup had them ignored."""
    for which in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1):
        if signal.getsignal(which) is signal.SIG_IGN:
            signal.signal(which, signal.default_int_handler if which == signal.SIGINT else signal.SIG_DFL)


class _MemoryMap(ctypes.Structure):
    """The kernel's `struct prctl_mm_map`."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("start_code", "end_code", "start_data", "end_data", "start_brk", "brk")),
        *((name, ctypes.c_uint64) for name in ("start_stack", "arg_start", "arg_end", "env_start", "env_end")),
        ("auxv", ctypes.c_uint64),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )


# By name, their places in /proc/PID/stat behind the name of the program.
_IN_STAT = {"start_code": 23, "end_code": 24, "start_stack": 25, "start_data": 42, "end_data": 43, "start_brk": 44}
_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_shown: list[mmap.mmap] = []  # the kernel reads it as long as this process lives


def show_as(command: Sequence[str], variables: Mapping[str, str]) -> bool:
    """Have `ps` and /proc show this command line and these variables, instead of the launcher's.

    Returns:
        Whether the kernel allowed it; else they show the launcher's.
    """
    texts = [b"".join(os.fsencode(word) + b"\0" for word in command)]
    texts.append(b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in variables.items()))
    # Private: the kernel shows nothing of what it would have to ask a file for, and counts shared memory as one.
    memory = mmap.mmap(-1, sum(map(len, texts)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(b"".join(texts))
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    fields = stat_fields("self")
    libc = c_library()
    libc.sbrk.restype = ctypes.c_void_p
    middle = begin + len(texts[0])
    wanted = _MemoryMap(
        **{name: int(fields[place]) for name, place in _IN_STAT.items()},
        brk=libc.sbrk(0),
        arg_start=begin,
        arg_end=middle,
        env_start=middle,
        env_end=middle + len(texts[1]),
        exe_fd=0xFFFFFFFF,
    )
    _shown.append(memory)
    return bool(libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(wanted), ctypes.sizeof(wanted), 0) == 0)


def search_path(path: Sequence[str], package: Path) -> list[str]:
    """The path on which a rank looks for modules, before its script's directory is put in front.

    Args:
        path: The launcher's: its first entry is the launcher's own directory, or the current one.
        package: The folder of evenstep, which may be on no path: `python -m` finds it in the current directory.
    """
    rest = list(path[1:])
    spec = importlib.machinery.PathFinder.find_spec(package.name, rest)
    if spec is None:
        for finder in sys.meta_path:  # of an editable installation
            found = getattr(finder, "find_spec", lambda *_: None)
            spec = spec or (None if finder is importlib.machinery.PathFinder else found(package.name, None))
    if spec is None or spec.origin is None or Path(spec.origin).resolve().parent != package:
        rest.insert(0, str(package.parent))
    return rest


def _unbuffered(descriptor: int, name: str, like: object) -> io.TextIOWrapper:
    """A stream as `python -u` makes it: what is written is seen, also if the process is killed."""
    raw = io.FileIO(descriptor, "wb", closefd=False)
    raw.name = name
    encoding, errors = getattr(like, "encoding", "utf-8"), getattr(like, "errors", "strict")
    stream = io.TextIOWrapper(raw, encoding=encoding, errors=errors, newline="\n", write_through=True)
    vars(stream)["mode"] = "w"
    return stream


def _set_threads() -> None:
    """`OMP_NUM_THREADS` as torch would have read it when it was loaded."""
    num_threads = environment.openmp_threads()
    if num_threads is not None and not environment.is_set("MKL_NUM_THREADS"):
        torch.set_num_threads(num_threads)


def mapped_files(maps: str) -> set[str]:
    """The files in the text of /proc/PID/maps; their names may have spaces. Pure."""
    places = [line.split(maxsplit=5) for line in maps.splitlines()]
    return {place[5] for place in places if len(place) == 6 and place[5].startswith("/")}


def set_blas_threads(variables: Mapping[str, str]) -> None:
    """The same for numpy's OpenBLAS; in the zygote, before it forks.

    In a fork OpenBLAS would first start as many threads as there are cores, only to leave most of them idle.

    Args:
        variables: Of the rank.
    """
    wanted = variables.get("OMP_NUM_THREADS", "")
    if not wanted.isdigit() or variables.get("OPENBLAS_NUM_THREADS") or variables.get("GOTO_NUM_THREADS"):
        return
    for file in mapped_files(Path("/proc/self/maps").read_text()):
        if "openblas" not in os.path.basename(file):
            continue
        library = ctypes.CDLL(file)  # numpy's: it is loaded already
        for function in _SET_BLAS_THREADS:
            if hasattr(library, function):
                getattr(library, function)(int(wanted))
