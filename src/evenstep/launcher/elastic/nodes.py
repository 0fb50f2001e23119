"""What a run's launchers know of each other: that each node is alive, which rank failed first, what was saved.

Every launcher writes a heartbeat to the store of the rendezvous several times a second, and reads those of the others.
A node whose heartbeat stands still is lost: its power or its network is gone. The store also holds one slot for the
first failure, which the first node to fail wins by compare-and-swap; nodes that only lost a peer then report that
failure as the cause. At the end of an attempt that may be followed by another, the nodes exchange what each has saved
(`Saved`), so that each decides by itself, and all alike, whether the run is restarted (`RestartLimit`). A run of one
node has the answers without asking anybody. A node that sees a new one wait announces it; otherwise its peers would
take the end of its ranks for a failure.

Launchers also publish where their ranks are when these haven't stepped for a while (`launcher.failure.hangs`).

With every heartbeat goes a line on what the node's ranks are doing. The node that reports a failure reads the others'.

A thread talks to the store, because a store that is unreachable never answers, and no deadline of torch's ends that.
`Heartbeats`, which decides, is pure, and is called from outside the thread.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from evenstep.ground.health.first_failure import printable
from evenstep.launcher.failure.report import Failure, RemoteFailure, state_of, status_of, summary_of

_BEAT_S = 0.25
_HURRY_S = 0.02  # between two looks at the store when the attempt has ended
_PARTING_S = 1.0
_CONNECT_S = 60.0
_MAX_TEXT = 500


class Heartbeats:
    """Which nodes are alive, judged by their heartbeats. Pure.

    Args:
        others: Node ranks of the other nodes.
        lost_after_s: Silence after which a node is lost.
        now: Seconds on a clock that doesn't stop.
    """

    def __init__(self, others: Iterable[int], *, lost_after_s: float, now: float) -> None:
        self._lost_after_s = lost_after_s
        self._last: dict[int, tuple[str, float]] = dict.fromkeys(others, ("", now))
        self._answered = now
        self._has_begun = False

    def note(self, now: float, beats: Mapping[int, str]) -> None:
        """Note that the store has answered with these heartbeats, by node."""
        self._answered = now
        self._has_begun = True
        for node, beat in beats.items():
            if beat != self._last[node][0]:
                self._last[node] = (beat, now)

    def lost(self, now: float, *, store_at: str) -> str | None:
        """A sentence on a node that is lost; None while all are alive or haven't sent their first heartbeat."""
        if self.is_cut_off(now):
            silent_s = now - self._answered
            return (
                f"the node of the store, {store_at}, has not answered for {silent_s:.1f} s: it or the way to it is lost"
            )
        for node in self.lost_nodes(now):
            beat, since = self._last[node]
            name = beat.partition(" ")[2]
            return f"node {node} ({name}) has not been heard of for {now - since:.1f} s: it or the way to it is lost"
        return None

    def is_cut_off(self, now: float) -> bool:
        """Whether the store has not answered for too long."""
        # Before the first answer the ranks' own rendezvous has its own deadline.
        return self._has_begun and now - self._answered > self._lost_after_s

    def lost_nodes(self, now: float) -> list[int]:
        """The nodes that have not been heard of for too long, as far as the store has answered."""
        if not self._has_begun:
            return []
        # Not until now: a store that doesn't answer says nothing of a node. One without a first heartbeat still starts.
        known = min(now, self._answered)
        return [node for node, (beat, since) in self._last.items() if beat and known - since > self._lost_after_s]


class OtherNodes:
    """This node's end of the heartbeat. Made when the ranks have been started, closed when they have ended.

    Args:
        address: Where the store is.
        port: Its port.
        session: Name of this session: another one for every rendezvous.
        node_rank: This node.
        num_nodes: All nodes.
        lost_after_s: See `Heartbeats`.
        describe: Returns a line on what this node's ranks are doing; called several times a second, by the thread.

    Attributes:
        new_node_waits: Some node has announced a new one that waits to join.
    """

    LOST_STATUS = 76

    def __init__(
        self,
        address: str,
        port: int,
        *,
        session: str,
        node_rank: int,
        num_nodes: int,
        lost_after_s: float = 4.0,  # so that it is named within 5
        describe: Callable[[], str] = lambda: "",
    ) -> None:
        self._address, self._port = address, port
        self._node_rank = node_rank
        self._prefix = f"evenstep/nodes/{session}"
        self._others = [node for node in range(num_nodes) if node != node_rank]
        self._heartbeats = Heartbeats(self._others, lost_after_s=lost_after_s, now=time.monotonic())
        self._remote_failure: RemoteFailure | None = None
        self._own_failure: str | None = None
        self._is_published = threading.Event()
        self.new_node_waits = False
        self._announces_new_node = False
        self._is_announced = threading.Event()
        self._describe = describe
        self._requests_states = False
        self._states: list[str] = []
        self._has_states = threading.Event()
        self._num_looks = 0
        self._own_looks = ""
        self._looks: list[tuple[str, str]] = []
        self._wakes = threading.Event()
        self._given: dict[int, str] = {}  # by node, this one's included: see `exchange`
        self._complete: set[int] = set()  # nodes that have what all have given
        self._has_ended = threading.Event()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="evenstep nodes", daemon=True)
        self._thread.start()

    def look(self) -> RemoteFailure | None:
        """A failure on another node, as far as it is known. Never blocks."""
        if self._remote_failure is not None:
            return self._remote_failure
        lost = self._heartbeats.lost(time.monotonic(), store_at=f"{self._address}:{self._port}")
        return None if lost is None else RemoteFailure(lost, self.LOST_STATUS)

    def publish_failure(self, text: str, status: int, *, state: str = "", wait_s: float = 1.0) -> None:
        """Publish this node's failure as the first, unless another node's was. Waits a moment until that is done."""
        where = f"node {self._node_rank} ({socket.gethostname()})"
        failure = RemoteFailure(f"on {where}: {text}"[:_MAX_TEXT], status, state[:_MAX_TEXT])
        self._own_failure = json.dumps(asdict(failure))
        self._wakes.set()
        self._is_published.wait(wait_s)

    def announce_new_node(self, *, wait_s: float = 1.0) -> None:
        """Announce that a new node waits, so that all nodes stop their ranks. Waits until that is done."""
        self._announces_new_node = True
        self._wakes.set()
        self._is_announced.wait(wait_s)

    def check_for_new_node(self, *, longest_s: float = 1.0) -> bool:
        """`new_node_waits`, after one more look at the store."""
        deadline = time.monotonic() + longest_s
        enough = self._num_looks + 2  # one may be under way
        while self._num_looks < enough and time.monotonic() < deadline and not self._has_ended.is_set():
            self._wakes.set()
            time.sleep(_HURRY_S)
        return self.new_node_waits

    def publish_looks(self, text: str) -> None:
        """Have the other nodes know where this node's ranks are; "": nothing is known. Never blocks."""
        self._own_looks = text

    def looks(self) -> list[tuple[str, str]]:
        """(A node, in words; what it has published), of all other nodes that have. Never blocks."""
        return self._looks

    def request_states(self) -> None:
        """Have the thread read the other nodes' lines on their ranks."""
        self._requests_states = True
        self._wakes.set()

    def states(self, *, longest_s: float = 0.3) -> list[str]:
        """A line for each other node: what its ranks did at its last heartbeat before `request_states`."""
        self._has_states.wait(longest_s)
        return self._states

    def exchange(self, text: str, *, longest_s: float) -> list[str]:
        """What the other nodes have given here at the end of this attempt; without those that are lost or too late.

        Collective over nodes. Each gives one text, once.
        """
        self._given[self._node_rank] = text
        deadline = time.monotonic() + longest_s
        while self._lack(self._given) and time.monotonic() < deadline:
            time.sleep(_HURRY_S)
        # The store ends with its node, which therefore stays until the others have read it.
        deadline = time.monotonic() + _PARTING_S
        while self._lack(self._complete) and time.monotonic() < deadline:
            time.sleep(_HURRY_S)
        return [self._given[node] for node in self._others if node in self._given]

    def _lack(self, heard: Collection[int]) -> bool:
        """Whether a node is missing here that may still be heard of."""
        now = time.monotonic()
        if self._has_ended.is_set() or self._heartbeats.is_cut_off(now):
            return False  # the store can't be reached, or not any more
        return not set(self._others) <= {*heard, *self._heartbeats.lost_nodes(now)}

    def close(self) -> None:
        """Stop the heartbeat. Doesn't wait for a store that is silent."""
        self._is_closed.set()
        self._wakes.set()
        self._thread.join(2 * _BEAT_S)

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store has gone: `look` says so when that has lasted
            store = TCPStore(
                self._address,
                self._port,
                is_master=False,
                timeout=timedelta(seconds=_CONNECT_S),
                wait_for_workers=False,
            )
            self._beat(PrefixStore(self._prefix, store))
        self._has_ended.set()

    def _beat(self, store: Store) -> None:
        number = 0
        mine = published_looks = ""
        while not self._is_closed.is_set():
            number += 1
            store.set(f"state-{self._node_rank}", self._describe()[:_MAX_TEXT])
            store.set(f"beat-{self._node_rank}", f"{number} {socket.gethostname()}")
            if self._own_failure is not None and not mine:
                mine = self._own_failure
                store.compare_set("first-failure", "", mine)
                self._is_published.set()
            if self._announces_new_node and not self._is_announced.is_set():
                store.set("new-node", "waits")
                self._is_announced.set()
            heard = {node: store.get(f"beat-{node}").decode() for node in self._others if store.check([f"beat-{node}"])}
            self._heartbeats.note(time.monotonic(), heard)
            self.new_node_waits = self.new_node_waits or store.check(["new-node"])
            if self._own_looks != published_looks:
                published_looks = self._own_looks
                store.set(f"looks-{self._node_rank}", published_looks or "[]")
            self._looks = [
                (f"on node {node} ({beat.partition(' ')[2]})", store.get(f"looks-{node}").decode(errors="replace"))
                for node, beat in heard.items()
                if store.check([f"looks-{node}"])
            ]
            if self._requests_states and not self._has_states.is_set():
                self._states = self._read_states(store, heard)
                self._has_states.set()
            if self._remote_failure is None and store.check(["first-failure"]):
                published = store.get("first-failure").decode()
                if published != mine:
                    with contextlib.suppress(ValueError, TypeError):
                        found = RemoteFailure(**json.loads(published))
                        texts = (printable(str(text))[:_MAX_TEXT] for text in (found.text, found.state))
                        self._remote_failure = RemoteFailure(next(texts), int(found.status), next(texts))
            if self._node_rank in self._given:
                self._exchange(store)
            self._num_looks += 1
            self._wakes.wait(_HURRY_S if self._node_rank in self._given else _BEAT_S)
            self._wakes.clear()

    def _read_states(self, store: Store, beats: Mapping[int, str]) -> list[str]:
        lines = {node: store.get(f"state-{node}").decode(errors="replace") for node in beats}
        return [
            printable(f"on node {node} ({beats[node].partition(' ')[2]}): {text}")[:_MAX_TEXT].replace("\n", " ")
            for node, text in sorted(lines.items())
            if text
        ]

    def _exchange(self, store: Store) -> None:
        store.set(f"given-{self._node_rank}", self._given[self._node_rank])
        for node in self._others:
            if node not in self._given and store.check([f"given-{node}"]):
                self._given[node] = store.get(f"given-{node}").decode(errors="replace")
        if not self._lack(self._given):
            store.set(f"complete-{self._node_rank}", "yes")
            self._complete = {node for node in self._others if store.check([f"complete-{node}"])}


@dataclass(frozen=True)
class Saved:
    """What an attempt has saved, as far as one node knows, or all nodes together.

    Attributes:
        has_checkpointer: There was a `Checkpointer`.
        step: Of the last checkpoint that was committed; None: none.
    """

    has_checkpointer: bool
    step: int | None

    @staticmethod
    def of_all_nodes(each: Iterable[Saved]) -> Saved:
        """What all nodes together have saved. Pure."""
        nodes = list(each)
        steps = [node.step for node in nodes if node.step is not None]
        return Saved(any(node.has_checkpointer for node in nodes), max(steps, default=None))


def agree_on_saved(others: OtherNodes, own: Saved, *, longest_s: float) -> Saved:
    """What all nodes have saved, once their attempts have ended too; without nodes that are lost or too late.

    Args:
        others: The other nodes.
        own: What this one has saved.
        longest_s: How long to wait for them.
    """
    nodes = [own]
    for text in others.exchange(json.dumps(asdict(own)), longest_s=longest_s):
        with contextlib.suppress(ValueError, TypeError):
            nodes.append(Saved(**json.loads(text)))
    return Saved.of_all_nodes(nodes)


def agree_on_cause(
    others: OtherNodes, failure: Failure | None, remote: RemoteFailure | None, *, grace_s: float
) -> RemoteFailure | None:
    """Publish a failure that began here; else, after secondary failures only, wait for one published elsewhere.

    Args:
        others: The other nodes.
        failure: Of this node's ranks, all of which have ended; None: none failed.
        remote: What was known of the other nodes when it was noticed; None: nothing.
        grace_s: How long to wait.

    Returns:
        The failure on another node that is the cause; None: it isn't known, or happened here.
    """
    if remote is not None or failure is None:
        return remote
    if not failure.only_secondary:
        others.publish_failure(summary_of(failure), status_of(failure), state=state_of(failure))
        return None
    deadline = time.monotonic() + grace_s
    while (published := others.look()) is None and time.monotonic() < deadline:
        if others.new_node_waits:
            return None
        time.sleep(_HURRY_S)
    return published


@dataclass(frozen=True)
class Standing:
    """What a node knows of a run's restarts.

    Attributes:
        num_restarts: How many there were.
        num_in_vain: As of `RestartLimit`.
        saved_step: Of the newest checkpoint of this run; None: none yet.
        has_saved: A checkpoint was committed since the last restart, before nodes came or went without one.
    """

    num_restarts: int
    num_in_vain: int
    saved_step: int | None
    has_saved: bool

    @staticmethod
    def of_all_nodes(each: Iterable[Standing]) -> Standing:
        """The standing of the run, from those of its nodes; nodes that joined later know less. Pure."""
        nodes = list(each)
        most = max(node.num_restarts for node in nodes)
        steps = [node.saved_step for node in nodes if node.saved_step is not None]
        return Standing(
            most,
            min(node.num_in_vain for node in nodes if node.num_restarts == most),
            max(steps, default=None),
            any(node.has_saved for node in nodes),
        )


class RestartLimit:
    """Ends a run whose restarts make no progress. Pure.

    Only for runs with a `Checkpointer`: without checkpoints nothing shows whether a run makes progress.

    Attributes:
        num_in_vain: Restarts since the last checkpoint was committed.
        saved_step: Of the newest checkpoint of this run; None: none yet.
    """

    MOST_IN_VAIN = 3

    def __init__(self) -> None:
        self.num_in_vain = 0
        self.saved_step: int | None = None
        self._has_saved = False  # since the last restart

    def note(self, *, attempt: int, saves: bool, saved_step: int | None) -> None:
        """Count an attempt that has failed.

        Args:
            attempt: 0 for the first.
            saves: It had a `Checkpointer`.
            saved_step: Of the last checkpoint that it has committed; None: none.
        """
        self.note_saved(saved_step)
        if saves and attempt > 0 and not self._has_saved:
            self.num_in_vain += 1
        self._has_saved = False

    def note_saved(self, saved_step: int | None) -> None:
        """Remember what an attempt has committed, if anything, before it goes on with other nodes."""
        if saved_step is not None:
            self.num_in_vain, self.saved_step, self._has_saved = 0, saved_step, True

    def standing(self, *, num_restarts: int) -> Standing:
        """What this node knows, for the others."""
        return Standing(num_restarts, self.num_in_vain, self.saved_step, self._has_saved)

    def adopt(self, standing: Standing) -> None:
        """Continue from the standing of all nodes."""
        self.saved_step, self._has_saved = standing.saved_step, standing.has_saved
        self.num_in_vain = 0 if standing.has_saved else standing.num_in_vain

    @property
    def is_reached(self) -> bool:
        """Whether one more restart would be one too many."""
        return self.num_in_vain >= self.MOST_IN_VAIN


def compare_standings(store: Store, own: Standing, *, node_rank: int, num_nodes: int) -> Standing:
    """How the run stands as all nodes together know. Collective over nodes; all return the same.

    Args:
        store: Of this rendezvous alone.
        own: What this node knows.
        node_rank: This node.
        num_nodes: All nodes of this rendezvous.
    """
    store.set(f"evenstep/standing-{node_rank}", json.dumps(asdict(own)))
    standings = (store.get(f"evenstep/standing-{node}") for node in range(num_nodes))
    return Standing.of_all_nodes(Standing(**json.loads(text)) for text in standings)
