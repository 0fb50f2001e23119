"""Puts time, rank and step in front of every line that python writes to a rank's log file."""

from __future__ import annotations

import io
import sys
import time
from typing import cast

from evenstep.ground.health import heartbeat


class StampedLines(io.TextIOWrapper):
    """A text stream that writes a stamp before every line.

    Args:
        stream: The stream to replace; it must not be used afterwards.
        rank: The rank in the stamp.
    """

    def __init__(self, stream: io.TextIOWrapper, *, rank: int) -> None:
        encoding, errors = stream.encoding, stream.errors
        super().__init__(stream.detach(), encoding=encoding, errors=errors, line_buffering=True)
        self._rank = rank
        self._is_at_start = True

    def write(self, text: str) -> int:
        """Write text, which may be any part of a line or several lines."""
        stamped = []
        for line in text.splitlines(keepends=True):
            if self._is_at_start:
                stamped.append(stamp(time.time(), self._rank, heartbeat.finished_steps()))
            stamped.append(line)
            self._is_at_start = line.endswith("\n")
        super().write("".join(stamped))
        return len(text)


def stamp(seconds: float, rank: int, step: int) -> str:
    """The text before a line: "2026-11-21 18:24:03.125 rank 1 step 7 | ". Pure, except for the time zone."""
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    return f"{moment}.{int(seconds * 1000) % 1000:03d} rank {rank} step {step} | "


def stamp_lines(rank: int) -> None:
    """Put stamps before the lines of this process's stdout and stderr from now on."""
    sys.stdout = sys.__stdout__ = StampedLines(cast(io.TextIOWrapper, sys.stdout), rank=rank)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = StampedLines(cast(io.TextIOWrapper, sys.stderr), rank=rank)  # type: ignore[misc]
