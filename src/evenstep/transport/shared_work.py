"""A call of the shared-memory transport, from its launch to its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from evenstep.errors import EvenstepError
from evenstep.transport.arrivals import Phase
from evenstep.transport.call import Call
from evenstep.transport.collectives import Program


class Runner(Protocol):
    """What a call asks of the transport that runs it."""

    def _finish(self, work: SharedWork, timeout_s: float | None) -> None: ...
    def _look(self, work: SharedWork) -> bool: ...
    def _tell(self, work: SharedWork, told: Callable[[EvenstepError | None], object]) -> None: ...


class SharedWork:
    """See above, and `base.Work`.

    Args:
        transport: Runs it.
        call: What is called.
        back: (into, from): copied at the end, where the caller's tensor isn't contiguous.

    Attributes:
        has_arrived: The other ranks have been told what is called.
        is_done: The result is there.
        is_inference: The result may be written in torch's inference mode only, whichever thread does that.
    """

    __slots__ = (
        "_back",
        "_call",
        "_program",
        "_told",
        "_transport",
        "_waits_for",
        "has_arrived",
        "is_done",
        "is_inference",
    )

    def __init__(self, transport: Runner, call: Call, back: tuple[Tensor, Tensor] | None) -> None:
        self._transport = transport
        self._call = call
        self._back = back
        self._program: Program | None = None
        self._told: Callable[[EvenstepError | None], object] | None = None
        self._waits_for = (Phase.ARRIVED, call.number + 1)
        self.has_arrived = False
        self.is_done = False
        self.is_inference = call.out.is_inference() or (back is not None and back[0].is_inference())

    def wait(self, timeout_s: float | None = None) -> None:
        """See `base.Work.wait`; no longer than `timeout_s`."""
        if not self.is_done:
            self._transport._finish(self, timeout_s)

    def is_completed(self) -> bool:
        """See `base.Work.is_completed`; goes on as far as nobody has to be waited for."""
        return self.is_done or self._transport._look(self)

    def when_done(self, told: Callable[[EvenstepError | None], object]) -> None:
        """Call `told` once, with the error if there was one: at once, or in the thread that ends the call."""
        self._transport._tell(self, told)

    def __repr__(self) -> str:
        state = "done" if self.is_done else "arrived" if self.has_arrived else "queued"
        return f"<Work {self._call} {state}>"
