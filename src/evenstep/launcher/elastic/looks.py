"""Stacks of this node's ranks, asked for by a signal and read later; and what nodes tell each other of their ranks."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

from evenstep.ground.health.first_failure import printable
from evenstep.launcher.failure.hangs import RankLook
from evenstep.launcher.failure.stacks import parse_stacks, place_in_worker
from evenstep.launcher.spawn.script_runner import STACK_SIGNAL
from evenstep.processes import children, handles_signal

_LONGEST_S = 0.5
_MOST_WORKERS = 8
_TRIES = 6  # on a busy node a worker may not run for so long that it doesn't answer
_MOST_SENT = 64  # ranks of a node, to other nodes
_MOST_TEXT = 3000  # characters, of a stack


class RankProcess(Protocol):
    """What the launcher needs of a rank's process; `Child` has it."""

    @property
    def pid(self) -> int:
        """Its process, which leads a session of its own."""

    @property
    def returncode(self) -> int | Any:
        """None while it runs; negative: the signal that ended it."""

    def poll(self) -> int | None:
        """`returncode`, as of now."""

    def send_signal(self, which: int, /) -> None:
        """Send it a signal, if it still runs."""

    def signal_group(self, which: int, /) -> None:
        """Send a signal to it and to what it has started, such as the workers of its loaders, also after its end."""

    def release(self) -> None:
        """Reap it, if it has ended: [Note: signal before you reap]."""


class StackRequest:
    """Stacks that were asked for. Nothing waits for them: `is_complete` says when they are there.

    Args:
        processes: (pid, the file that it writes to), by rank; who doesn't handle the signal is left out.
    """

    def __init__(self, processes: Mapping[int, tuple[int, Path]]) -> None:
        self._sent = time.monotonic()
        self._begins: dict[int, tuple[Path, int]] = {}
        self._sizes: dict[int, int] = {}
        for rank, (pid, path) in processes.items():
            # Anything else would die of it: a script may have become another program.
            if handles_signal(pid, STACK_SIGNAL):
                self._begins[rank] = (path, path.stat().st_size)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, STACK_SIGNAL)

    def is_complete(self) -> bool:
        """Whether all have written, and no file has grown since the last call; or too much time has passed."""
        sizes = {rank: path.stat().st_size for rank, (path, _) in self._begins.items()}
        is_still = sizes == self._sizes and all(sizes[rank] > begin for rank, (_, begin) in self._begins.items())
        self._sizes = sizes
        return is_still or time.monotonic() - self._sent > _LONGEST_S

    def stacks(self) -> dict[int, str]:
        """What each has written, by rank; "" if it has not."""
        found = {}
        for rank, (path, begin) in self._begins.items():
            with path.open("rb") as file:
                file.seek(begin)
                found[rank] = file.read().decode(errors="replace").strip()
        return found


class WorkerStacks:
    """Where the workers of a rank's loader are, one after the other: they write to their rank's file."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, int, Path, int]] = deque()  # with how often each may still be asked
        self._asked: tuple[int, int, Path, int] | None = None
        self._request = StackRequest({})

    def ask(self, rank: int, pid: int, path: Path) -> None:
        """Ask the workers that a rank has forked."""
        self._waiting.extend((rank, child, path, _TRIES) for child in children(pid)[:_MOST_WORKERS])

    @property
    def is_busy(self) -> bool:
        """Whether one of them writes now."""
        return self._asked is not None

    def look(self) -> list[str]:
        """Lines on workers that are in the user's code; others wait for something to do. Never blocks."""
        lines = []
        if self._asked is not None:
            rank, worker, path, tries = self._asked
            if not self._request.is_complete():
                return []
            self._asked = None
            stacks = self._request.stacks()
            place = place_in_worker(parse_stacks(stacks.get(rank, "")))
            if place is not None:
                lines.append(f"a worker of rank {rank}'s loader (pid {worker}) is here:\n{place.stack}")
            elif stacks.get(rank) == "" and tries > 1:
                self._waiting.append((rank, worker, path, tries - 1))
        if self._waiting:
            self._asked = rank, worker, path, _ = self._waiting.popleft()
            self._request = StackRequest({rank: (worker, path)})
        return lines


def packed(looks: Sequence[RankLook]) -> str:
    """Looks as the launchers of other nodes read them; "" if nobody waits or is missing."""
    told = sorted(looks, key=lambda look: bool(look.call))[:_MOST_SENT]
    return json.dumps([asdict(replace(look, stack=look.stack[-_MOST_TEXT:])) for look in told]) if told else ""


def unpacked(texts: Iterable[tuple[str, str]]) -> list[RankLook]:
    """What other nodes have published; what can't be understood is passed over.

    Args:
        texts: (the node, in words; what it has published).
    """
    looks = []
    for node, text in texts:
        try:
            for each in json.loads(text) if text else []:
                look = RankLook(**each)
                looks.append(
                    replace(
                        look,
                        call=_shown(look.call),
                        phase=_shown(look.phase),
                        site=_shown(look.site),
                        stack=_shown(look.stack),
                        where=_shown(node),
                    )
                )
        except (ValueError, TypeError):
            continue
    return looks


def _shown(text: str) -> str:
    return printable(str(text))[:_MOST_TEXT]
