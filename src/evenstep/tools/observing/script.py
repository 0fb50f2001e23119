"""Becoming a script in a process that was started to observe it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from evenstep.launcher.spawn.script_runner import become_script


def run_observed(path: str, arguments: Sequence[str]) -> None:
    """Run a script as python would have, in a process that was started with `-m`.

    Args:
        path: Of the script.
        arguments: Its own.
    """
    if sys.path and sys.path[0] == os.getcwd():
        del sys.path[0]  # put there for `-m`; a script doesn't have it
    become_script(path, list(arguments))
