"""Finds the lines of a stack that are the user's own."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import traceback
import warnings
from pathlib import Path

import torch

PACKAGE = str(Path(__file__).resolve().parents[2]) + os.sep
TORCH = str(Path(torch.__file__).parent) + os.sep
_OTHERS = ("<", sysconfig.get_path("stdlib") + os.sep, PACKAGE, TORCH)


def is_users(file: str) -> bool:
    """Whether a file belongs neither to an installed package, nor to python, torch or evenstep."""
    return not ("site-packages" in file or "dist-packages" in file or file.startswith(_OTHERS))


def user_site() -> str:
    """The innermost line of this thread's stack in the user's code; in an evenstep thread, the main thread's line."""
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    for stack in (sys._getframe(1), main):
        for frame, line in traceback.walk_stack(stack):
            if is_users(frame.f_code.co_filename):
                return f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
    return "nowhere in a script"


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, at the innermost line of this thread's stack in the user's code."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        if is_users(frame.f_code.co_filename):
            # Code of `exec` may have no name.
            module = frame.f_globals.get("__name__", "<string>")
            registry = frame.f_globals.setdefault("__warningregistry__", {})
            warnings.warn_explicit(message, category, frame.f_code.co_filename, line, module, registry)
            return
    warnings.warn(message, category, stacklevel=2)
