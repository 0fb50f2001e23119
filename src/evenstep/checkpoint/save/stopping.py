"""Being asked to stop: signals become requests, and requests of any rank become an agreement of all."""

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

from evenstep.environment import current_placement
from evenstep.health.blame import saves_file
from evenstep.transport.base import Work
from evenstep.world import World

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True)
class Status:
    """What a rank has to say at the end of a step; of all ranks, what at least one says.

    Attributes:
        stops: It was asked to stop.
        failed: The save in the background has failed.
        is_due: The time for a save has come, by rank 0's clock, or its metric is the best so far.
        is_slow: Its steps take so long that a collective costs nothing beside them.
    """

    stops: bool = False
    failed: bool = False
    is_due: bool = False
    is_slow: bool = False


class Agreement:
    """One small reduction per step, awaited a step later so that nobody waits for it.

        step 7     what was said in step 6 is known, the same on all ranks; what is said in step 7 is sent
        step 8     what was said in step 7 is known

    Where steps are slow it is awaited at once: a step may take longer than the grace that a scheduler gives.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._in_flight: tuple[Tensor, Work] | None = None
        self._awaits_at_once = world.world_size == 1

    def hear(self, mine: Status) -> Status:
        """Collective: what all ranks have agreed upon. Follow with `say`."""
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

    def say(self, mine: Status) -> None:
        """Collective: at the end of a step, what is to be heard in the next one."""
        if not self._awaits_at_once:
            self._send(mine)

    def finish(self) -> None:
        """Collective: await what is under way."""
        if self._in_flight is not None:
            self._in_flight[1].wait()
            self._in_flight = None

    def _send(self, mine: Status) -> None:
        values = torch.tensor(astuple(mine), dtype=torch.int32, device="cpu")
        assert len(fields(mine)) == values.numel()
        self._in_flight = values, self._world.control.all_reduce(values, "max")


class StopSignals:
    """SIGTERM and SIGUSR1 ask the world to stop, instead of ending the process. Of a main thread only.

    A handler that the script has set before is called too.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._pid = os.getpid()
        self._before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            return
        for which in STOP_SIGNALS:
            self._before[which] = signal.signal(which, self._handle)
        placement = current_placement()
        if placement.run_directory is not None and placement.run_directory.is_dir():
            saves_file(placement.run_directory, placement.rank, placement.restart_count).touch()

    def close(self) -> None:
        """Put back what was there before, unless somebody else has taken our place."""
        if threading.current_thread() is not threading.main_thread():
            return
        while self._before:
            which, before = self._before.popitem()
            if signal.getsignal(which) == self._handle:
                with contextlib.suppress(TypeError, ValueError):  # a handler that python didn't set
                    signal.signal(which, before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a child that was forked: what ends it must end it
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._world.request_stop(signal.Signals(number).name)
        before: Callable[[int, FrameType | None], object] | Any = self._before.get(signal.Signals(number))
        if callable(before):
            before(number, frame)
