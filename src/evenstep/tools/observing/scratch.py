"""Redirects the files that an observed script writes to a directory of its run, so earlier trainings' files stay.

A file that the script opens for writing, saves, renames or removes is replaced by a copy in that directory, which the
script then reads on every rank. Directories are made in their real place, and removed after the run if they are empty.
Two things aren't redirected: files that a compiled library opens by itself (HDF5, SQLite), and listings of directories,
which show the state before the run.
"""

from __future__ import annotations

import builtins
import errno
import functools
import hashlib
import importlib
import io
import os
import pathlib
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from evenstep.checkpoint.checkpointer import Checkpointer
from evenstep.logger.logger import Logger
from evenstep.tools.observing.launch import MADE
from evenstep.tools.observing.patching import Patches

# Modules that write for the run and not for the script: their files aren't redirected.
_OF_THE_RUN = ("evenstep.", "torch._", "torch.distributed.elastic.", "torch.utils.cpp_extension.", "triton.")
# Modules of this package are on the stack between the script and a function that it calls. If they counted as the
# run's, the script's file wouldn't be redirected and would overwrite that of an earlier training.
_BETWEEN = f"{__name__.rpartition('.')[0]}."
_LIBRARIES = sys.stdlib_module_names | {"numpy", "safetensors"}  # their callers decide whose files they write
_GONE = ".gone"  # suffix of a marker file: the script has removed the real file, which still exists


class Scratch:
    """Redirects an observed script's files to a directory of the run, for writing and for reading back.

    Args:
        directory: The run's directory.
        writes: Called with the path of each file before the script writes, appends or renames to it.

    Attributes:
        saved: The paths of redirected files and directories, as the script wrote them.
    """

    def __init__(self, directory: Path, writes: Callable[[str], object] = lambda path: None) -> None:
        self._writes = writes
        self._directory = directory / "saved"
        self._own: set[str] = {os.path.abspath(directory)}  # directories without redirection
        self._emptied: set[str] = set()
        self.saved: list[str] = []

    def install(self, patches: Patches) -> None:
        """Redirect the files that this process writes, until the patches are undone."""
        self._stat, self._unlink, self._began_ns = os.stat, os.unlink, time.time_ns()
        # In python 3.10, paths call functions that pathlib stored when it was imported.
        accessor: Any = getattr(pathlib, "_normal_accessor", None)
        for module in (builtins, io, accessor):
            # A partial, not a function: as an attribute of a class, a function would become a method.
            patches.replace(module, "open", lambda original: functools.partial(self._open, original))
        for module in (os, accessor):
            for names, instead in (
                (("stat", "lstat"), self._look),
                (("remove", "unlink"), self._remove),
                (("rename", "replace"), self._rename),
                (("chmod", "chown", "utime"), self._change),
                (("mkdir",), self._mkdir),
            ):
                for name in names:
                    patches.around(module, name, instead)
        patches.around(shutil, "rmtree", self._rmtree)
        patches.around(tempfile, "mkdtemp", self._mkdtemp)
        write, read = (
            functools.partial(self._redirect, *each) for each in ((1, self._for_writing), (0, self._for_reading))
        )
        patches.around(torch, "save", write)
        patches.around(torch, "load", read)
        patches.around(Logger, "__init__", self._log)
        for name in ("safetensors", "safetensors.torch", "safetensors.numpy"):
            module = importlib.import_module(name)
            patches.around(module, "serialize_file", write)
            patches.around(module, "safe_open", read)

    # ------------------------------------------------------------------ what a script calls

    def _open(self, original: Callable[..., Any], file: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        if isinstance(file, int) or self._is_own(file):
            return original(file, mode, *arguments, **named)
        if set(mode) & set("wax+"):
            if "x" in mode and self._exists(file):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(file))
            return original(self._for_writing(file, keeps="w" not in mode), mode, *arguments, **named)
        return original(self._for_reading(file), mode, *arguments, **named)

    def _redirect(
        self, number: int, place: Callable[[Any], Any], original: Callable[..., Any], *arguments: Any, **named: Any
    ) -> Any:
        """Call a function with a redirected path: positional argument `number`, or the argument `f` or `filename`."""
        given = list(arguments)
        holder: Any = given if len(given) > number else named
        for key in (number,) if holder is given else named.keys() & {"f", "filename"}:
            if isinstance(holder[key], str | os.PathLike) and not self._is_own(holder[key]):
                holder[key] = place(holder[key])
        return original(*given, **named)

    def _look(self, original: Callable[..., Any], path: Any, *, dir_fd: int | None = None, **named: Any) -> Any:
        if not isinstance(path, int) and not self._is_own(path, dir_fd):
            file = _absolute(path, dir_fd)
            place = self._for_reading(file)
            if place != file:
                return original(place, **named)
        return original(path, dir_fd=dir_fd, **named)

    def _remove(self, original: Callable[..., Any], path: Any, *, dir_fd: int | None = None) -> None:
        file = _absolute(path, dir_fd)
        if self._is_own(path, dir_fd):
            original(path, dir_fd=dir_fd)
        elif not self._exists(file):
            original(self._for_reading(file))  # raises the system's error
        else:
            self._note(file)
            self._forget(file)

    def _rename(
        self,
        original: Callable[..., Any],
        src: Any,
        dst: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
    ) -> None:
        source, target = _absolute(src, src_dir_fd), _absolute(dst, dst_dir_fd)
        if self._is_own(src, src_dir_fd) or not self._is_file(source):
            original(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            return
        original(self._for_writing(source, keeps=True), self._for_writing(target))
        self._forget(source)

    def _change(
        self, original: Callable[..., Any], path: Any, *arguments: Any, dir_fd: int | None = None, **named: Any
    ) -> None:
        """Change the mode, owner or times of a redirected file."""
        if isinstance(path, int) or self._is_own(path, dir_fd) or not self._is_file(_absolute(path, dir_fd)):
            original(path, *arguments, **({} if dir_fd is None else {"dir_fd": dir_fd}), **named)
        else:
            original(self._for_writing(_absolute(path, dir_fd), keeps=True), *arguments, **named)

    def _mkdir(self, original: Callable[..., Any], path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        if _absolute(path, dir_fd) in self._emptied:
            self._emptied.discard(_absolute(path, dir_fd))
        else:
            original(path, mode, dir_fd=dir_fd)
            if not self._is_own(path, dir_fd):
                self._directory.parent.mkdir(exist_ok=True)
                with (self._directory.parent / MADE).open("ab") as file:
                    file.write(os.fsencode(_absolute(path, dir_fd)) + b"\0")

    def _rmtree(self, original: Callable[..., Any], path: Any, *arguments: Any, **named: Any) -> None:
        directory = _absolute(path)
        if self._is_own(path) or not os.path.isdir(directory):
            original(path, *arguments, **named)
            return
        self._note(directory)
        self._emptied.add(directory)
        for folder, _, files in os.walk(directory):
            for name in files:
                os.remove(os.path.join(folder, name))

    def _mkdtemp(self, original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        made = original(*arguments, **named)
        self._own.add(os.path.abspath(os.fsdecode(made)))
        return made

    def _log(self, original: Callable[..., None], logger: Logger, directory: Any, **named: Any) -> None:
        self._note(directory)
        original(logger, self._place(directory), **named)

    # ------------------------------------------------------------------ where files are

    def _for_writing(self, file: Any, *, keeps: bool = False) -> Any:
        """The path to write to instead. With `keeps`, a copy of the file's content is there already."""
        if os.path.isdir(file) or not os.path.isdir(os.path.dirname(_absolute(file))):
            return file  # opening it raises the system's error
        self._writes(_absolute(file))
        place = self._place(file)
        os.makedirs(place.parent, exist_ok=True)
        if keeps and not place.exists() and self._exists(file):
            shutil.copyfile(_absolute(file), place)
        elif not keeps:
            self._note(file)
        place.with_suffix(_GONE).unlink(missing_ok=True)
        return place

    def _for_reading(self, file: Any) -> Any:
        """The path to read instead: the redirected file if there is one, else the real file."""
        place = self._place(file)
        return place if self._is_there(place) or self._is_there(place.with_suffix(_GONE)) else file

    def _forget(self, file: str) -> None:
        """Hide a file from the script, as if it were removed."""
        place = self._place(file)
        os.makedirs(place.parent, exist_ok=True)
        place.unlink(missing_ok=True)
        if self._is_there(file) and self._stat(file).st_ctime_ns >= self._began_ns:
            self._unlink(file)  # this run made the file itself, through a file descriptor
        elif self._is_there(file):
            place.with_suffix(_GONE).touch()

    def _exists(self, file: Any) -> bool:
        """Whether a file exists from the script's point of view."""
        place = self._place(file)
        return self._is_there(place) or (self._is_there(file) and not self._is_there(place.with_suffix(_GONE)))

    def _is_file(self, file: str) -> bool:
        return self._exists(file) and not os.path.isdir(file)

    def _is_there(self, file: Any) -> bool:
        try:
            self._stat(file)
        except OSError:
            return False
        return True

    def _is_own(self, path: Any, dir_fd: int | None = None) -> bool:
        """Whether a file isn't redirected: it belongs to the run, or it is a device, a pipe or the like."""
        file = _absolute(path, dir_fd)
        if any(file == each or file.startswith(f"{each}{os.sep}") for each in self._own):
            return True
        if file.startswith(("/dev/", "/proc/", "/sys/")) or _caller().startswith(_OF_THE_RUN):
            return True
        try:
            mode = self._stat(file).st_mode
        except OSError:
            return False
        return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))

    def _note(self, path: Any) -> None:
        if os.fsdecode(path) not in self.saved:
            self.saved.append(os.fsdecode(path))

    def _place(self, path: Any) -> Path:
        """The redirected path of a file, the same on all ranks."""
        return self._directory / hashlib.sha256(os.fsencode(_absolute(path))).hexdigest()[:32]


def idle_checkpointers(patches: Patches) -> None:
    """Stop every `Checkpointer` from reading and writing, until the patches are undone."""
    for name, instead in _IDLE_CHECKPOINTER.items():
        patches.replace(Checkpointer, name, functools.partial(_instead, instead))


def _absolute(path: Any, dir_fd: int | None = None) -> str:
    if dir_fd is None:
        return os.path.abspath(os.fsdecode(path))
    return os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), os.fsdecode(path))


def _caller() -> str:
    """The module that called a library or this package; "" if there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if not name.startswith(_BETWEEN) and name.partition(".")[0] not in _LIBRARIES:
            return name
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""


def _instead(method: Callable[..., Any], original: object) -> Callable[..., Any]:
    return method


def _count_step(checkpoint: Checkpointer, **metrics: float) -> None:
    checkpoint.num_steps += 1


_IDLE_CHECKPOINTER: dict[str, Callable[..., Any]] = {
    "resume": lambda checkpoint, *, strict=True: 0,
    "discard": lambda checkpoint, *, after=0: None,
    "save": lambda checkpoint, **metrics: None,
    "step": _count_step,
}
