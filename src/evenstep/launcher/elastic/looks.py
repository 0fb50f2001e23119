"""Stacks of the workers of loaders; and what nodes tell each other of their ranks."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from evenstep.ground.health.first_failure import printable
from evenstep.launcher.failure.hangs import RankLook
from evenstep.launcher.failure.stacks import StackRequest, parse_stacks, place_in_worker
from evenstep.processes import children

_MOST_WORKERS = 8
_TRIES = 6  # on a busy node a worker may not run for so long that it doesn't answer
_MOST_SENT = 64  # ranks of a node, to other nodes
_MOST_TEXT = 3000  # characters, of a stack


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
