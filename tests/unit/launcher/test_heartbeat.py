"""What launchers on several hosts tell each other."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from evenstep.errors import ConfigurationError
from evenstep.launcher.hosts_rendezvous import HostsRendezvous
from evenstep.launcher.other_hosts import Beats, Elsewhere, OtherHosts
from evenstep.network import Reservation

STORE = "10.0.0.1:29500"


def test_a_host_whose_beat_stands_still_is_lost() -> None:
    beats = Beats([1, 2], lost_after_s=5, now=0.0)
    beats.hear(1.0, {1: "1 b", 2: "1 c"})
    beats.hear(4.0, {1: "2 b", 2: "1 c"})
    assert beats.lost(5.0, store_at=STORE) is None
    beats.hear(6.5, {1: "3 b", 2: "1 c"})
    lost = beats.lost(6.5, store_at=STORE)
    assert lost == "host 2 (c) has not been heard of for 5.5 s: it or the way to it is lost"


def test_a_silent_store_is_its_host_lost() -> None:
    beats = Beats([0], lost_after_s=5, now=0.0)
    beats.hear(1.0, {0: "1 a"})
    assert beats.lost(6.0, store_at=STORE) is None
    lost = beats.lost(6.1, store_at=STORE)
    assert lost is not None
    assert lost.startswith("the host of the store, 10.0.0.1:29500, has not answered for 5.1 s")


def test_who_has_not_begun_is_not_lost() -> None:
    beats = Beats([1], lost_after_s=5, now=0.0)
    assert beats.lost(100.0, store_at=STORE) is None
    beats.hear(100.0, {})
    assert beats.lost(104.0, store_at=STORE) is None


def wait_for(talk: OtherHosts) -> Elsewhere:
    deadline = time.monotonic() + 20
    while (found := talk.look()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def test_the_first_blame_wins_and_everybody_else_hears_it() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20), wait_for_workers=False)
    talks = [OtherHosts("127.0.0.1", store.port, talk="a", node_rank=node, num_nodes=3) for node in range(3)]
    try:
        talks[1].blame("rank 5 failed: \x1b[2Jboom", 9, wait_s=20)
        talks[2].blame("rank 6 failed", 3, wait_s=20)
        for node in (0, 2):
            told = wait_for(talks[node])
            assert told.status == 9
            assert told.text.startswith("on host 1 (")
            assert told.text.endswith("): rank 5 failed: \\x1b[2Jboom")
        assert talks[1].look() is None, "nothing happened elsewhere"
    finally:
        for talk in talks:
            talk.close()
            talk._thread.join(20)


def test_who_sees_another_host_wait_tells_the_others() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20), wait_for_workers=False)
    talks = [OtherHosts("127.0.0.1", store.port, talk="r", node_rank=node, num_nodes=2) for node in range(2)]
    try:
        assert not talks[1].hear_of_room(longest_s=20)
        talks[0].make_room(wait_s=20)
        assert talks[1].hear_of_room(longest_s=20), "told before it was asked"
        assert talks[1].look() is None, "no failure"
    finally:
        for talk in talks:
            talk.close()
            talk._thread.join(20)


def test_what_ranks_of_other_hosts_do_is_known_after_they_are_gone() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20), wait_for_workers=False)
    made = {"talk": "s", "num_nodes": 3}
    here = OtherHosts("127.0.0.1", store.port, node_rank=0, **made)  # type: ignore[arg-type]
    silent = OtherHosts("127.0.0.1", store.port, node_rank=1, **made)  # type: ignore[arg-type]
    there = OtherHosts("127.0.0.1", store.port, node_rank=2, describe=lambda: "rank 4 \x1b[2Jwaits", **made)  # type: ignore[arg-type]
    try:
        there.hear_of_room(longest_s=20)
        there.close()
        there._thread.join(20)
        here.ask_for_states()
        (told,) = here.states(longest_s=20)
        assert told.startswith("on host 2 (")
        assert told.endswith("): rank 4 \\x1b[2Jwaits")
    finally:
        for talk in (here, silent, there):
            talk.close()
            talk._thread.join(20)


def test_a_launcher_that_stops_beating_is_noticed() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20), wait_for_workers=False)
    made = {"talk": "b", "num_nodes": 2, "lost_after_s": 1.5}
    here = OtherHosts("127.0.0.1", store.port, node_rank=0, **made)  # type: ignore[arg-type]
    there = OtherHosts("127.0.0.1", store.port, node_rank=1, **made)  # type: ignore[arg-type]
    try:
        time.sleep(1.0)
        there.close()
        lost = wait_for(here)
        assert lost.status == 76
        assert "host 1 (" in lost.text
    finally:
        for talk in (here, there):
            talk.close()
            talk._thread.join(20)


_kept: list[HostsRendezvous] = []


def meet(port: int, node_rank: int, told: dict[int, str], num_nodes: int = 2, run_id: str = "none") -> None:
    handler = HostsRendezvous("127.0.0.1", port, node_rank=node_rank, num_nodes=num_nodes, run_id=run_id, timeout_s=20)
    _kept.append(handler)  # with it the store would go, before the other has read what it came for
    try:
        found = handler.next_rendezvous()
    except ConfigurationError as error:
        told[node_rank] = str(error)
    else:
        told[node_rank] = f"{found.rank} of {found.world_size}"


@pytest.mark.parametrize(
    ("second", "says"),
    [
        ({"node_rank": 1}, None),
        ({"node_rank": 1, "num_nodes": 3}, "--nnodes 3 --rdzv-id none"),
        ({"node_rank": 1, "run_id": "other"}, "--nnodes 2 --rdzv-id other"),
    ],
)
def test_hosts_that_were_told_different_things_hear_it_at_once(second: dict[str, Any], says: str | None) -> None:
    """FAULTS.md, 38."""
    reservation = Reservation()
    port = reservation.port
    told: dict[int, str] = {}
    started = time.monotonic()
    threads = [threading.Thread(target=meet, args=(port, 0, told))]
    threads.append(threading.Thread(target=meet, kwargs={"port": port, "told": told, **second}))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    reservation.close()
    _kept.clear()
    if says is None:
        assert told == {0: "0 of 2", 1: "1 of 2"}
        return
    assert "the hosts were given different commands: --nnodes 2 --rdzv-id none on node 0" in told[0]
    assert says in told[0]
    assert f"{says} on node 1, --nnodes 2 --rdzv-id none on node 0" in told[1]
    assert time.monotonic() - started < 10  # 2 s on a quiet machine


def test_every_meeting_has_a_store_of_its_own() -> None:
    """What ranks of the first attempt have left there is not found by those of the next, under whatever name."""
    reservation = Reservation()
    made = {"num_nodes": 2, "run_id": "none", "timeout_s": 20}
    handlers = [HostsRendezvous("127.0.0.1", reservation.port, node_rank=node, **made) for node in range(2)]  # type: ignore[arg-type]
    ports: list[set[int]] = []
    for attempt in range(3):
        with ThreadPoolExecutor(2) as pool:
            found = [*pool.map(HostsRendezvous.next_rendezvous, handlers)]
        ports.append({info.bootstrap_store_info.master_port for info in found})
        (port,) = ports[-1]
        ranks_store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
        assert not ranks_store.check(["address of rank 0"])
        ranks_store.set("address of rank 0", str(attempt))
    assert ports[0] == {reservation.port}
    assert len(set.union(*ports)) == 3
    reservation.close()


def test_an_address_of_another_host_cannot_be_listened_on() -> None:
    handler = HostsRendezvous("192.0.2.77", 29500, node_rank=0, num_nodes=2, run_id="none")
    with pytest.raises(ConfigurationError, match=r"can't listen at 192.0.2.77:29500: .*--master-addr names the host"):
        handler.next_rendezvous()
