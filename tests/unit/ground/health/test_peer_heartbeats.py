"""Heartbeat pages that ranks of a node share."""

from __future__ import annotations

import os
from pathlib import Path

from evenstep.ground.health import heartbeat, peer_heartbeats
from evenstep.ground.health.heartbeat import Phase


def test_pages_are_shared_between_processes_of_a_host_and_leave_no_file(tmp_path: Path) -> None:
    told: list[object] = []

    def exchange(value: object) -> list[object]:
        told.append(value)
        return [value]

    end = peer_heartbeats.share_pages(exchange, rank=0)
    try:
        path = Path(told[0]["page"])  # type: ignore[index]
        assert not path.exists()
        heartbeat.mark(Phase.SAVING, step=3)
        heartbeat.mark_waiting(True)
        heartbeat.mark_waiting(False)
        found = peer_heartbeats.read(os.getpid())
        assert found is not None
        assert (found.phase, found.step, found.is_waiting, found.waited_ns > 0) == (Phase.SAVING, 3, False, True)
        assert peer_heartbeats.read_all() == {0: peer_heartbeats.read(os.getpid())}
        assert peer_heartbeats.read(1) is None
        line = f"{__file__}:"
        assert line in peer_heartbeats.exchange_sites("call 1", {0: os.getpid()})
        before = peer_heartbeats.exchange_sites("call 2", {0: os.getpid()})
        for number in range(3, 6):  # three more disagreements, before another rank has read of the first
            heartbeat.write_site(f"call {number}\nelsewhere")
        assert peer_heartbeats._said_of("call 2", os.getpid()) in before
        heartbeat.write_site("call 6\n" + "é" * 5000)
        assert set(peer_heartbeats._said_of("call 6", os.getpid()) or "") <= {"é", "\N{REPLACEMENT CHARACTER}"}
        assert peer_heartbeats._said_of("call 2", os.getpid()) is None
        assert peer_heartbeats.exchange_sites("call 1", {0: os.getpid(), 1: 1}) == ""
    finally:
        end()
    assert heartbeat.own_path() is None
    assert peer_heartbeats.read(os.getpid()) is None


def test_a_forked_child_writes_nothing_to_the_page_of_its_parent(tmp_path: Path) -> None:
    heartbeat.open_page(tmp_path / "page")
    try:
        heartbeat.mark(Phase.FORWARD, step=1)
        pid = os.fork()
        if pid == 0:
            heartbeat.mark(Phase.OPTIMIZER, step=9)
            os._exit(0)
        os.waitpid(pid, 0)
        found = heartbeat.read_page(tmp_path / "page")
        assert found is not None
        assert (found.phase, found.step) == (Phase.FORWARD, 1)
    finally:
        heartbeat.close_page()
