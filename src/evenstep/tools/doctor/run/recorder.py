"""One rank under watch: writes down what the script does, and where. The parts below note each their own."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from evenstep.tools.doctor.run.events import Event, Place, Plan
from evenstep.tools.observing.patching import Patches

_QUIET_S = 1.5  # without an event, before the place of the script is noted
_MOST_PLACES = 4
_MOST_OF_A_PLACE = 300  # events of a kind at one line; a script may print in every sample
_OF_OTHERS = tuple(f"{path}{os.sep}" for path in {sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")})
_PACKAGE = f"{Path(__file__).parents[2]}{os.sep}"


class Recorder:
    """Writes events of this process.

    Args:
        plan: Where to, and how many steps are looked at.
        rank: This rank.
        script: Path of the script; files below its directory are the script's own.

    Attributes:
        plan: See above.
        rank: See above.
        num_steps: Optimizer steps so far, of the busiest optimizer.
        is_over: Whether enough were made.
    """

    def __init__(self, plan: Plan, rank: int, script: str) -> None:
        self.plan, self.rank = plan, rank
        self.num_steps = 0
        self.is_over = False
        self._root = f"{Path(script).absolute().parent}{os.sep}"
        self._own: dict[str, str] = {}
        self._counts: dict[tuple[str, Place], int] = {}
        self._calls = 0
        self._pid = os.getpid()
        self._main = threading.main_thread().ident
        self._last = time.monotonic()
        # Lines of forked workers and of the rank go to one file; the kernel keeps lines whole.
        self._file = os.open(plan.file_of(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, kind: str, **facts: Any) -> None:
        """Write an event down, with the lines of the script that led to it."""
        self.write(kind, self.places(), facts)

    def write(self, kind: str, places: list[Place], facts: dict[str, Any]) -> None:
        """Write an event down."""
        if os.getpid() != self._pid and kind != "fetch":
            return  # of a loader's worker, where no step is known
        key = kind, places[0] if places else ("", 0)
        self._counts[key] = self._counts.get(key, 0) + 1
        if kind in ("output", "write", "fetch", "norm", "sync") and self._counts[key] > _MOST_OF_A_PLACE:
            return
        now = time.monotonic()
        if kind != "idle":
            self._last = now
        event = Event(kind, now, self.num_steps, places, facts)
        os.write(self._file, f"{event.as_line()}\n".encode())

    def enter(self, op: str, *, group: str = "") -> int:
        """A call begins that other ranks have to make, too; returns its number."""
        self._calls += 1
        self.note("enter", op=op, call=self._calls, group=group)
        return self._calls

    def leave(self, call: int) -> None:
        """It has ended."""
        self.write("leave", [], {"call": call})

    # ------------------------------------------------------------------ where the script is

    def places(self, frame: FrameType | None = None) -> list[Place]:
        """Lines of the script's own files on the stack, innermost first."""
        found: list[Place] = []
        frame = sys._getframe(1) if frame is None else frame
        at: FrameType | None = frame
        while at is not None and len(found) < _MOST_PLACES:
            file = self.own_file(at.f_code.co_filename)
            if file:
                found.append((file, at.f_lineno))
            at = at.f_back
        return found

    def own_file(self, name: str) -> str:
        """The absolute path of a file of the script's; "" for any other."""
        if name not in self._own:
            path = "" if name.startswith("<") else os.path.abspath(name)
            is_own = path.startswith(self._root) and not path.startswith((*_OF_OTHERS, _PACKAGE))
            self._own[name] = path if is_own and f"{os.sep}site-packages{os.sep}" not in path else ""
        return self._own[name]

    def watch_idleness(self, patches: Patches) -> None:
        """Note where the script is whenever it is quiet, until the patches are undone."""
        ended = threading.Event()
        thread = threading.Thread(target=self._look, args=[ended], name="evenstep doctor", daemon=True)
        thread.start()
        patches.later(thread.join)
        patches.later(ended.set)

    def _look(self, ended: threading.Event) -> None:
        while not ended.wait(_QUIET_S / 2):
            if time.monotonic() - self._last > _QUIET_S:
                self._note_idleness()

    def _note_idleness(self) -> None:
        # In a function: a frame that this thread kept would keep the script's model, which then ended here, in a thread
        # in which torch's wrapper and process group may wait for each other.
        frame = sys._current_frames().get(self._main or 0)
        if frame is not None:
            self.write("idle", self.places(frame), {"function": frame.f_code.co_name})
