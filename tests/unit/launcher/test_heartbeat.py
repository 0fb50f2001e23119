"""The heartbeat between the launchers of several nodes, and how they find each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from evenstep.errors import ConfigurationError
from evenstep.ground.host.network import Reservation
from evenstep.launcher.elastic.nodes import Heartbeats, OtherNodes
from evenstep.launcher.elastic.rendezvous import FixedNodesRendezvous
from evenstep.launcher.failure.report import RemoteFailure

STORE = "10.0.0.1:29500"


SILENT_STORE = "the node of the store, 10.0.0.1:29500, has not answered for "


@pytest.mark.parametrize(
    ("peers", "events"),
    [
        pytest.param(
            [1, 2],
            [
                (1.0, {1: "1 b", 2: "1 c"}, None),
                (4.0, {1: "2 b", 2: "1 c"}, None),
                (5.0, None, None),
                (6.5, {1: "3 b", 2: "1 c"}, None),
                (7.5, {1: "4 b", 2: "1 c"}, "node 2 (c) has not been heard of for 6.5 s: it or the way to it is lost"),
            ],
            id="a node's heartbeat stands still",
        ),
        # As of a virtual machine that moves for 25 s: nobody has read the store since.
        pytest.param(
            [0, 2],
            [
                (1.0, {0: "1 a", 2: "1 c"}, None),
                (26.0, None, None),
                (26.3, {0: "99 a", 2: "99 c"}, None),
                (30.0, None, None),
            ],
            id="this node's own stall is forgiven",
        ),
        # Node 1 was silent for less than the limit when the store was last read: it may have sent beats since.
        pytest.param(
            [0, 1],
            [
                (1.0, {0: "1 a", 1: "1 b"}, None),
                (4.0, {0: "2 a", 1: "1 b"}, None),
                *((now, None, None) for now in (6.5, 7.8, 8.9, 9.5)),
                (10.6, None, f"{SILENT_STORE}6.6 s"),
            ],
            id="a silent store: no node is blamed for that",
        ),
        pytest.param([1], [(float(now), {}, None) for now in range(1, 100)], id="a node that hasn't begun"),
        pytest.param(
            [0], [(4.0, None, None), (5.5, None, None), (6.6, None, f"{SILENT_STORE}6.6 s")], id="it never answers"
        ),
    ],
)
def test_which_node_is_lost(peers: list[int], events: list[tuple[float, dict[int, str] | None, str | None]]) -> None:
    """What is read from the store at a time (None: it doesn't answer), and what then is said."""
    beats = Heartbeats(peers, lost_after_s=5, now=0.0)
    for now, read, says in events:
        if read is not None:
            beats.note(now, read)
        lost = beats.lost(now, store_at=STORE)
        assert lost is None if says is None else (lost or "").startswith(says), now


Launcher = Callable[..., OtherNodes]


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    """Makes the launcher of a node, `launcher(node, num_nodes)`; all of them have one store."""
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20), wait_for_workers=False)
    port, made = store.port, list[OtherNodes]()  # the store ends with this frame

    def make(node: int, num_nodes: int, **more: Any) -> OtherNodes:
        made.append(OtherNodes("127.0.0.1", port, session="s", node_rank=node, num_nodes=num_nodes, **more))
        return made[-1]

    yield make
    for each in made:
        each._is_closed.set()
        each._wakes.set()
    for each in made:
        each._thread.join(60)


def wait_for(end: OtherNodes) -> RemoteFailure:
    deadline = time.monotonic() + 20
    while (found := end.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def test_the_first_failure_published_wins_and_all_others_read_it(launcher: Launcher) -> None:
    ends = [launcher(node, 3) for node in range(3)]
    ends[1].publish_failure("rank 5 failed: \x1b[2Jboom", 9, wait_s=20)
    ends[2].publish_failure("rank 6 failed", 3, wait_s=20)
    for node in (0, 2):
        told = wait_for(ends[node])
        assert told.status == 9
        assert told.text.startswith("on node 1 (")
        assert told.text.endswith("): rank 5 failed: \\x1b[2Jboom")
    assert ends[1].poll() is None, "nothing happened elsewhere"


def test_a_node_that_was_asked_to_stop_stays_until_the_others_know(launcher: Launcher) -> None:
    """The store may end with it; who started its ranks again would wait for it."""
    ends = [launcher(node, 2) for node in range(2)]
    assert not ends[1].check_for_new_node(longest_s=20)
    assert not ends[1].is_stopping
    ends[0].announce_stop()
    ends[0].close()
    ends[1].check_for_new_node(longest_s=4)  # which the node that has gone doesn't answer
    assert ends[1].is_stopping
    assert ends[1].poll() is None, "no failure"


def test_what_ranks_of_other_nodes_do_is_known_after_they_are_gone(launcher: Launcher) -> None:
    here, _ = launcher(0, 3), launcher(1, 3)  # the second one never says anything
    there = launcher(2, 3, describe=lambda: "rank 4 \x1b[2Jwaits")
    there.check_for_new_node(longest_s=20)
    there.close()
    there._thread.join(20)
    here.request_states()
    (told,) = here.states(longest_s=20)
    assert told.startswith("on node 2 (")
    assert told.endswith("): rank 4 \\x1b[2Jwaits")


@pytest.mark.parametrize("late", [0, 2])
def test_a_node_that_starts_late_stops_nobody(launcher: Launcher, late: int) -> None:
    """A store waits for a key that isn't there. Neither the store's own launcher nor another one need be in time."""
    ends = {node: launcher(node, 3, lost_after_s=1000.0) for node in range(3) if node != late}
    time.sleep(1.0)
    assert all(end._num_beats >= 2 for end in ends.values())
    assert [end.poll() for end in ends.values()] == [None, None]
    ends[late] = launcher(late, 3, lost_after_s=1000.0)
    assert not ends[late].check_for_new_node(longest_s=20)
    ends[1].announce_new_node(wait_s=20)
    assert all(end.check_for_new_node(longest_s=20) for end in ends.values())


def test_a_launcher_that_stops_its_heartbeat_is_noticed(launcher: Launcher) -> None:
    here, there = (launcher(node, 2, lost_after_s=1.5) for node in range(2))
    time.sleep(1.0)
    there.close()
    lost = wait_for(here)
    assert lost.status == 76
    assert "node 1 (" in lost.text


_kept: list[FixedNodesRendezvous] = []


def meet(port: int, node_rank: int, num_nodes: int = 2, run_id: str = "none") -> str:
    handler = FixedNodesRendezvous(
        "127.0.0.1", port, node_rank=node_rank, num_nodes=num_nodes, run_id=run_id, timeout_s=20
    )
    _kept.append(handler)  # with it the store would go, before the other has read what it came for
    try:
        found = handler.next_rendezvous()
    except ConfigurationError as error:
        return str(error)
    return f"{found.rank} of {found.world_size}"


@pytest.mark.parametrize(
    ("second", "says"),
    [
        ({"node_rank": 1}, None),
        ({"node_rank": 1, "num_nodes": 3}, "--nnodes 3 --rdzv-id none"),
        ({"node_rank": 1, "run_id": "other"}, "--nnodes 2 --rdzv-id other"),
    ],
)
def test_nodes_given_different_commands_end_at_once(second: dict[str, Any], says: str | None) -> None:
    """They would wait for each other for minutes."""
    reservation = Reservation()
    started = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        meetings = [pool.submit(meet, reservation.port, **given) for given in ({"node_rank": 0}, second)]
    told = [each.result() for each in meetings]
    reservation.close()
    _kept.clear()
    if says is None:
        assert told == ["0 of 2", "1 of 2"]
        return
    assert "the nodes were given different commands: --nnodes 2 --rdzv-id none on node 0" in told[0]
    assert says in told[0]
    assert f"{says} on node 1, --nnodes 2 --rdzv-id none on node 0" in told[1]
    assert time.monotonic() - started < 10  # 2 s on a quiet machine


@pytest.mark.parametrize("may_restart", [True, False])
def test_who_comes_while_the_run_goes_on_takes_a_lost_nodes_place_if_the_run_may_restart(
    may_restart: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A launcher that is started anew knows nothing of the rounds before."""
    reservation = Reservation()
    made: dict[str, Any] = {"num_nodes": 2, "run_id": "none", "timeout_s": 20, "may_restart": may_restart}
    kept, lost, new = (
        FixedNodesRendezvous("127.0.0.1", reservation.port, node_rank=node, **made) for node in (0, 1, 1)
    )

    def come(handler: FixedNodesRendezvous) -> str:
        try:
            info = handler.next_rendezvous()
        except ConfigurationError as error:
            return str(error)
        return f"{info.rank} at {info.bootstrap_store_info.master_port}"

    with ThreadPoolExecutor(2) as pool:
        first = [*pool.map(come, (kept, lost))]
        newcomer = pool.submit(come, new)
        if not may_restart:
            assert "two nodes have --node-rank 1" in newcomer.result(20)
        else:
            time.sleep(0.5)
            assert not newcomer.done()
            rank, _, port = come(kept).partition(" at ")
            assert (rank, newcomer.result(20)) == ("0", f"1 at {port}")
            assert f"0 at {port}" not in first
            assert "waits for the next attempt" in capsys.readouterr().err
    reservation.close()


def test_an_address_of_another_node_cannot_be_listened_on() -> None:
    handler = FixedNodesRendezvous("192.0.2.77", 29500, node_rank=0, num_nodes=2, run_id="none", timeout_s=9)
    with pytest.raises(
        ConfigurationError, match=r"can't listen at 192.0.2.77:29500: .*--master-addr must be an address of the node"
    ):
        handler.next_rendezvous()
