"""Which lines of a stack are the user's own."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

import torch

PACKAGE = str(Path(__file__).resolve().parents[2]) + os.sep
TORCH = str(Path(torch.__file__).parent) + os.sep
_OTHERS = ("<", sysconfig.get_path("stdlib") + os.sep, PACKAGE, TORCH)


def is_users(file: str) -> bool:
    """Whether a file belongs neither to an installed package, nor to python, torch or evenstep."""
    return not ("site-packages" in file or "dist-packages" in file or file.startswith(_OTHERS))


def user_site() -> str:
    """The innermost line of this thread's stack that is the user's."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if is_users(name):
            return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "nowhere in a script"
