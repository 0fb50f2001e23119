"""What changes between two attempts on several hosts: where the ranks meet, who takes part, what is counted."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import Store, TCPStore

from evenstep import network
from evenstep.launcher.verdict import Standing


def open_store(address: str, port: int, **settings: Any) -> TCPStore:
    """A store that this host keeps.

    It listens on its address alone, so that nobody comes by another network; on all of them only where the address is
    a name that means loopback on this host itself.

    Args:
        address: One of this host, by which all others know it.
        port: Where it listens; 0: the system chooses.
        settings: torch's.

    Raises:
        OSError: The address isn't this host's, or the port is in use.
    """
    # A name that means loopback here, as Debian's own name does (127.0.1.1), can't be reached from elsewhere.
    is_only_here = network.is_loopback(address) and address != "127.0.0.1"
    listener = network.listen("0.0.0.0" if is_only_here else address, port)
    port = listener.getsockname()[1]
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), **settings
    )


@contextlib.contextmanager
def fresh_meeting_place(handler: Any) -> Iterator[None]:
    """Have torch's elastic rendezvous, if that is what it is, open another store for the ranks that meet inside.

    It would show the one that the first meeting had: with the addresses of ranks that are gone, or on a host that no
    longer has rank 0; and who joins later waits in vain to be told of it. Its own listens on all interfaces, too.
    """
    if not (hasattr(handler, "_bootstrap_store_info") and hasattr(handler, "_create_tcp_store_server")):
        yield
        return
    before = handler._shared_tcp_store_server  # to be read until all have come to the next meeting
    handler._bootstrap_store_info = None
    handler._shared_tcp_store_server = None
    handler._create_tcp_store_server = open_store
    try:
        yield
    finally:
        del handler._create_tcp_store_server  # torch's own is the class's
        del before


def compare_standings(store: Store, own: Standing, *, node_rank: int, num_nodes: int) -> Standing:
    """How the run stands, as all hosts together know: one that comes later counts as the others do.

    Args:
        store: Of this meeting alone.
        own: What this host knows.
        node_rank: This host.
        num_nodes: All that meet.
    """
    store.set(f"evenstep/standing-{node_rank}", json.dumps(asdict(own)))
    told = (store.get(f"evenstep/standing-{node}") for node in range(num_nodes))
    return Standing.by_all(Standing(**json.loads(text)) for text in told)


def forget_attempt(run_directory: Path, attempt: int) -> None:
    """Remove what the ranks of an attempt have left, for others go on under its number."""
    for left in run_directory.glob(f"*-{attempt}-*"):
        left.unlink(missing_ok=True)
