"""The transport of a world of one: every collective is done at once. One process runs the same code as several."""

from __future__ import annotations

from collections.abc import Callable

import torch

from evenstep.transport.base import Collective, Work
from evenstep.transport.core.reduction import divide, divisor_of
from evenstep.transport.core.transport import Transport


class _Done:
    def wait(self, timeout_s: float | None = None) -> None:
        return

    def is_completed(self) -> bool:
        return True

    def add_done_callback(self, callback: Callable[[None], object]) -> None:
        callback(None)


_DONE = _Done()


class LocalTransport(Transport):
    """The transport of a world of one. It opens no connection and never waits."""

    name = "local"
    is_in_tree_order = True
    divides = True

    def __init__(self) -> None:
        super().__init__(0, 1, "local")

    def _start(self, call: Collective) -> Work:
        if call.out is not call.flat or call.row is not None:
            with torch.no_grad():  # as with more ranks, outputs aren't in the inputs' graph
                if call.out is not call.flat:
                    call.out.copy_(call.flat)
                if call.row is not None:
                    divide(call.out, divisor_of([call.row], call.plain))
                call.copy_back()
        return _DONE

    def split(self) -> Transport:
        """See `Transport.split`."""
        return LocalTransport()

    def close(self) -> None:
        """See `Transport.close`."""

    def __repr__(self) -> str:
        return "<LocalTransport>"
