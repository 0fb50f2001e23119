"""The observed script: its own files, its lines on the stack, and running it in this process."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from evenstep.launcher.spawn.script_runner import become_script

Place = tuple[str, int]  # file and line

_MOST_PLACES = 4
_OF_OTHERS = tuple(f"{path}{os.sep}" for path in {sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")})
_PACKAGE = f"{Path(__file__).parents[2]}{os.sep}"
_BETWEEN = ("evenstep.tools.", "contextlib")  # modules between a patched call and its caller


class Script:
    """The own files of a script: those below its directory that belong to no library.

    Args:
        path: The path of the script.
    """

    def __init__(self, path: str) -> None:
        self._root = f"{Path(path).absolute().parent}{os.sep}"
        self._own: dict[str, str] = {}

    def own_file(self, name: str) -> str:
        """The absolute path of one of the script's own files; "" for any other file."""
        if name not in self._own:
            path = "" if name.startswith("<") else os.path.abspath(name)
            is_own = path.startswith(self._root) and not path.startswith((*_OF_OTHERS, _PACKAGE))
            self._own[name] = path if is_own and f"{os.sep}site-packages{os.sep}" not in path else ""
        return self._own[name]

    def places(self, frame: FrameType | None = None) -> list[Place]:
        """(file, line) of the script's own files on the stack, innermost first."""
        found: list[Place] = []
        at: FrameType | None = sys._getframe(1) if frame is None else frame
        while at is not None and len(found) < _MOST_PLACES:
            file = self.own_file(at.f_code.co_filename)
            if file:
                found.append((file, at.f_lineno))
            at = at.f_back
        return found

    def places_of(self, error: BaseException) -> list[Place]:
        """(file, line) of the script's own files in a traceback, innermost first."""
        lines = [(self.own_file(file), line) for file, line in _lines_of(error)]
        return [each for each in reversed(lines) if each[0]][:_MOST_PLACES]


def _lines_of(error: BaseException) -> list[Place]:
    found, tb = [], error.__traceback__
    while tb is not None:
        found.append((tb.tb_frame.f_code.co_filename, tb.tb_lineno))
        tb = tb.tb_next
    return found


def caller() -> FrameType:
    """The frame that called a patched function, as seen from the code that replaces the function."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(_BETWEEN):
        frame = frame.f_back
    return frame


def run_observed(path: str, arguments: Sequence[str]) -> None:
    """Run a script as python would, in a process that was started with `-m`.

    Args:
        path: The path of the script.
        arguments: The command-line arguments of the script.
    """
    if sys.path and sys.path[0] == os.getcwd():
        del sys.path[0]  # python adds it for `-m`, but not for a script
    become_script(path, list(arguments))
