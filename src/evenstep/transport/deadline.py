"""Another deadline for a transport that is in use, and how torch tells of one.

torch's `distributed_c10d._set_pg_timeout` asks a group for the backend of each device, and tells those that it knows:
Gloo and NCCL. What travels through shared memory has to hear of it from the group's Gloo.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import ProcessGroupGloo

from evenstep.transport.process_group import ProcessGroupTransport
from evenstep.transport.several_hosts import SeveralHostsTransport
from evenstep.transport.shared_memory import SharedMemoryTransport


class TellingGloo(ProcessGroupGloo):
    """Gloo that passes on what torch tells it.

    Attributes:
        told: Called with every new deadline; None: nobody.
    """

    told: Callable[[timedelta], object] | None = None

    def _set_default_timeout(self, timeout: timedelta) -> None:
        super()._set_default_timeout(timeout)
        told, self.told = self.told, None  # it may come back here: transports between hosts use this very Gloo
        try:
            if told is not None:
                told(timeout)
        finally:
            self.told = told


def set_timeout(transport: object, timeout_s: float) -> None:
    """From now on give up on peers after so long, also in calls that are under way. Local.

    Args:
        transport: One that waits; nothing happens to another one.
        timeout_s: Seconds.
    """
    if isinstance(transport, SharedMemoryTransport):
        transport.arrivals.set_timeout(timeout_s)
    elif isinstance(transport, SeveralHostsTransport):
        transport.timeout_s = timeout_s
        for part in transport.parts:
            set_timeout(part, timeout_s)
    elif isinstance(transport, ProcessGroupTransport):
        transport.set_timeout(timeout_s)
