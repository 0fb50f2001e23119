"""Heartbeat pages that ranks of a node share."""

from __future__ import annotations

import os

from evenstep.ground.environment import Placement
from evenstep.ground.health import heartbeat, peer_heartbeats
from evenstep.ground.health.heartbeat import Phase
from evenstep.ground.health.peer_heartbeats import NodePages


def test_a_forked_child_writes_nothing_to_the_page_of_its_parent() -> None:
    pages = NodePages(1)
    peer_heartbeats.write_page(Placement(pages=tuple(pages.files)))
    try:
        heartbeat.mark(Phase.FORWARD, step=1)
        pid = os.fork()
        if pid == 0:
            heartbeat.mark(Phase.OPTIMIZER, step=9)
            os._exit(0 if peer_heartbeats.read_all() == {} else 1)
        assert os.waitpid(pid, 0)[1] == 0
        found = pages.pages[0].read()
        assert found is not None
        assert (found.phase, found.step) == (Phase.FORWARD, 1)
    finally:
        heartbeat.write_to(None)
        peer_heartbeats._pages.clear()
        pages.close()
