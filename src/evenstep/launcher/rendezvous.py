"""How the ranks of one host meet: they are told, and nobody listens.

torchelastic wants a rendezvous even where there is nobody to wait for. Its own opens a store that listens on every
interface. This one holds a dictionary, and reserves a port on which rank 0 of a script that calls torch's own
`init_process_group` may listen. `evenstep.init` doesn't need even that: it meets through a file of the run directory.
"""

from __future__ import annotations

from typing import Any

from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from evenstep.network import Reservation

NAME = "evenstep"


class OneHostRendezvous(RendezvousHandler):
    """A rendezvous of one host with itself.

    Args:
        run_id: Name of the run.
        port: The port that scripts are told; 0: a free one, another for every attempt.
    """

    def __init__(self, run_id: str, port: int = 0) -> None:
        self._run_id = run_id
        self._fixed_port = port
        self._reservation: Reservation | None = None
        self._num_rounds = 0
        self._store = HashStore()

    use_agent_store = False  # rank 0 hosts torch's store, if the script wants one

    def get_backend(self) -> str:
        """See base class."""
        return NAME

    def next_rendezvous(self) -> RendezvousInfo:
        """See base class."""
        self.shutdown()
        port = self._fixed_port
        if not port:
            self._reservation = Reservation()
            port = self._reservation.port
        self._num_rounds += 1
        store = PrefixStore(f"round-{self._num_rounds}", self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo("127.0.0.1", port))

    def is_closed(self) -> bool:
        """See base class."""
        return False

    def set_closed(self) -> None:
        """See base class."""

    def num_nodes_waiting(self) -> int:
        """See base class."""
        return 0

    def get_run_id(self) -> str:
        """See base class."""
        return self._run_id

    def shutdown(self) -> bool:
        """See base class."""
        if self._reservation is not None:
            self._reservation.close()
            self._reservation = None
        return True


def _create(parameters: RendezvousParameters) -> Any:
    port = parameters.endpoint.rpartition(":")[2]
    return OneHostRendezvous(parameters.run_id, int(port or 0))


def register() -> None:
    """Make the rendezvous known to torchelastic under `NAME`. Twice is once."""
    rendezvous_handler_registry.register(NAME, _create)
