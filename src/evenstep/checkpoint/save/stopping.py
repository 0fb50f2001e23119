"""Stopping on request: signals set a flag, and every step reduces the flags of all ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from evenstep.ground.environment import current_placement
from evenstep.ground.health.heartbeat import Note
from evenstep.ground.health.peer_heartbeats import own_page
from evenstep.ground.host.processes import STOP_SIGNALS, stays_ignored
from evenstep.transport.base import Work
from evenstep.world import World


@dataclass(frozen=True)
class Status:
    """Flags of one rank at the end of a step. Reduced over ranks, a flag is set if at least one rank has set it.

    Attributes:
        stops: A stop was requested.
        failed: The save in the background has failed.
        is_due: By rank 0's clock, the time for a save has come.
        is_slow: This rank's steps take so long that a collective costs nothing beside them.
    """

    stops: bool = False
    failed: bool = False
    is_due: bool = False
    is_slow: bool = False


class StatusExchange:
    """Reduces the ranks' `Status` once per step, and waits for it a step later.

        step 7     receives the reduced status of step 6, equal on all ranks; sends its own of step 7
        step 8     receives the reduced status of step 7

    So no step waits for the network. Slow steps wait at once, because one step may take longer than a scheduler's grace
    period.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._in_flight: tuple[Tensor, Work] | None = None
        self._awaits_at_once = world.world_size == 1

    def receive(self, mine: Status) -> Status:
        """Collective: the reduced status of the step before. Call `send` afterwards."""
        if self._in_flight is None:
            if not self._awaits_at_once:
                return Status()
            self._send(mine)
        assert self._in_flight is not None
        values, work = self._in_flight
        self._in_flight = None
        work.wait()
        agreed = Status(*(bool(value) for value in values.tolist()))
        self._awaits_at_once = agreed.is_slow or self._world.world_size == 1
        return agreed

    def send(self, mine: Status) -> None:
        """Collective: send the status that the next step receives."""
        if not self._awaits_at_once:
            self._send(mine)

    def finish(self) -> None:
        """Collective: wait for the reduction in flight."""
        if self._in_flight is not None:
            self._in_flight[1].wait()
            self._in_flight = None

    def _send(self, mine: Status) -> None:
        values = torch.tensor(astuple(mine), dtype=torch.int32, device="cpu")
        assert len(fields(mine)) == values.numel()
        self._in_flight = values, self._world.control.all_reduce(values, "max")


def note(what: Note) -> None:
    """Write a note on this rank's heartbeat page, if it has one, for the launcher."""
    page = own_page(current_placement())
    if page is not None:
        page.words[what] = 1


class StopSignals:
    """Handlers of `STOP_SIGNALS` that request a stop. In a main thread only. SIGHUP stays ignored under nohup.

    A handler that was set before, by the script or submitit, is called once, when the step has been saved. Called at
    once, it could exit in the middle of a step: submitit's handler requeues the job and exits. With several
    Checkpointers, the newest one's handler passes the signal on to the earlier ones.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._pid = os.getpid()
        self._before: dict[signal.Signals, Any] = {}
        self._due: tuple[int, Callable[[int, FrameType | None], object]] | None = None  # the first signal's handler
        if threading.current_thread() is not threading.main_thread():
            return
        # Only under our launcher, where a second Ctrl-C kills, and not if the script has its own handler.
        is_ours = current_placement().launcher == "evenstep run"
        also = {signal.SIGINT} if is_ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler else ()
        for which in (*STOP_SIGNALS, *also):
            if not stays_ignored(which):
                self._before[which] = signal.signal(which, self._handle)
        note(Note.SAVES)

    def replaced(self) -> list[str]:
        """Signals whose handler the script has replaced since the last call; each is listed once."""
        found = [which for which in self._before if self._passed_on_by(which) is None]
        for which in found:
            del self._before[which]
        return [which.name for which in found]

    def call_former(self) -> None:
        """Call the former handler of the first signal, once. It may raise, for example SystemExit."""
        due, self._due = self._due, None
        if due is not None:
            due[1](due[0], None)
        for before in self._before.values():  # handlers of earlier Checkpointers, which have noted the signal
            if (owner := _owner_of(before)) is not None:
                owner.call_former()

    def close(self) -> None:
        """Restore the former handlers, unless the script has set others since."""
        if threading.current_thread() is not threading.main_thread():
            return
        while self._before:
            which, before = self._before.popitem()
            above = self._passed_on_by(which)
            if above is not None and above is not self:
                above._before[which] = before
            if above is self:
                with contextlib.suppress(TypeError, ValueError):  # a handler that python didn't set
                    signal.signal(which, before)

    def _passed_on_by(self, which: signal.Signals) -> StopSignals | None:
        """The `StopSignals` that passes a signal on to this one: itself if it is the newest, else the next newer."""
        above, owner = self, _owner_of(signal.getsignal(which))
        while owner is not None and owner is not self:
            above, owner = owner, _owner_of(owner._before.get(which))
        return above if owner is self else None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked child: the signal has to end it
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._world.request_stop(signal.Signals(number).name)
        before = self._before.get(signal.Signals(number))
        earlier = _owner_of(before)
        if earlier is not None:
            earlier._handle(number, frame)
        elif self._due is None and callable(before) and before is not signal.default_int_handler:
            self._due = number, before


def _owner_of(handler: Any) -> StopSignals | None:
    """The `StopSignals` whose handler this is; None: it is the script's, or the system's."""
    owner = getattr(handler, "__self__", None)
    return owner if isinstance(owner, StopSignals) else None
