"""Writes the events of a watched rank, with the lines of the script that led to them."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from evenstep.tools.doctor.run.events import Event, Place, Plan
from evenstep.tools.observing.patching import Patches
from evenstep.tools.observing.script import Script

_QUIET_S = 1.5  # time without an event, after which the script's place is recorded
_MOST_OF_A_PLACE = 300  # events of a kind at one line: a script may write a file for every sample
_FREQUENT = ("write", "fetch", "norm")


class Writer:
    """Writes the events of this process.

    Args:
        plan: The plan, with the directory for events and the number of steps to watch.
        rank: The rank.
        script: The path of the script.

    Attributes:
        plan: The plan.
        rank: The rank.
        script: Finds lines of the script's own files on the stack.
        num_steps: The number of optimizer steps so far.
        is_over: Whether enough steps were made.
    """

    def __init__(self, plan: Plan, rank: int, script: str) -> None:
        self.plan, self.rank, self.script = plan, rank, Script(script)
        self.num_steps = 0
        self.is_over = False
        self._counts: Counter[tuple[str, Place]] = Counter()
        self._calls = 0
        self._pid = os.getpid()
        self._last = time.monotonic()
        # Forked workers and the rank write to one file. With O_APPEND, the kernel keeps each line whole.
        self._file = os.open(plan.file_of(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, kind: str, **facts: Any) -> None:
        """Write an event, with the lines of the script that led to it."""
        self.write(kind, self.script.places(), facts)

    def write(self, kind: str, places: list[Place], facts: dict[str, Any]) -> None:
        """Write an event."""
        if os.getpid() != self._pid and kind != "fetch":
            return  # in a loader's worker, where the step isn't known
        key = kind, places[0] if places else ("", 0)
        self._counts[key] += 1
        if kind in _FREQUENT and self._counts[key] > _MOST_OF_A_PLACE:
            return
        now = time.monotonic()
        if kind != "idle":
            self._last = now
        event = Event(kind, now, self.num_steps, places, facts)
        os.write(self._file, f"{event.as_line()}\n".encode())

    def enter(self, op: str, *, group: str = "") -> Callable[[], None]:
        """Record the begin of a collective. Returns a function that records its end."""
        self._calls += 1
        self.note("enter", op=op, call=self._calls, group=group)
        return functools.partial(self.write, "leave", [], {"call": self._calls})

    def watch_idleness(self, patches: Patches) -> None:
        """Record the script's place whenever there is no event for a while, until the patches are undone."""
        ended = threading.Event()

        def poll() -> None:
            while not ended.wait(_QUIET_S / 2):
                if time.monotonic() - self._last > _QUIET_S:
                    self._note_idleness()

        thread = threading.Thread(target=poll, name="evenstep doctor", daemon=True)
        thread.start()
        patches.later(thread.join)
        patches.later(ended.set)

    def _note_idleness(self) -> None:
        # In a function, so that this thread keeps no frame. A frame would keep the script's model alive. The model
        # would then be destroyed in this thread, where torch's wrapper and process group may wait for each other.
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        if frame is not None:
            self.write("idle", self.script.places(frame), {"function": frame.f_code.co_name})
