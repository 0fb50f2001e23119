"""Information that a run's launchers exchange: heartbeats, the rank that failed first, what was saved.

[Note: one row of beats]

Several times a second every launcher writes to the rendezvous store: its beat (a number, and the version of its facts),
a line about its ranks' activity and, if they have changed, its facts. Facts are the node's name, where its ranks are if
they haven't stepped for a while, whether a new node waits, whether the node was asked to stop and, at the end, how its
attempt has ended and what it has saved. The store's node reads all beats in one call, and publishes them in one row.
The others read the row, facts only if their version is new, and lines only when an attempt has failed. That is at most
four calls per node and beat for any number of nodes. A key must exist before any node reads it, because the store would
wait for it: so the store's node creates all beats, and facts are written before the beat with their version.

A node whose beat no longer changes is lost: its power or its network is gone. There is also one slot for the first
failure. The first node to fail fills it by compare-and-swap; nodes that only lost a peer then report that failure as
the cause. At the end of an attempt the nodes exchange what each has saved, so that all decide in the same way whether
the run is restarted (`Standing`). A run of one node needs no exchange. A node that notices a waiting new node announces
it; otherwise its peers would mistake the end of its ranks for a failure.

A thread talks to the store, because a store that is unreachable never answers, and no deadline of torch's ends that.
`Heartbeats`, which decides, is pure, and is called from outside the thread.
"""

from __future__ import annotations

import contextlib
import enum
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore

from evenstep.console import printable
from evenstep.ground.environment import NODE_TIMEOUT_S
from evenstep.launcher.failure.report import Failure, RemoteFailure, state_of, status_of, summary_of

_BEAT_S = 0.25
_HURRY_S = 0.02  # time between two reads of the store when the attempt has ended
_PARTING_S = 1.0
_CONNECT_S = 60.0
_SURE_S = 1.0
_LOOKS_S = 1.0  # time between two updates, for other nodes, of where this node's ranks are
_MAX_TEXT = 500
_NOTHING = "-"
_ROW, _FIRST = "row", "first-failure"


class Heartbeats:
    """Decides from heartbeats which nodes are alive. Pure.

    Args:
        others: Node ranks of the other nodes.
        lost_after_s: Seconds of silence after which a node is lost.
        now: Seconds on a clock that doesn't stop.
    """

    def __init__(self, others: Iterable[int], *, lost_after_s: float, now: float) -> None:
        self._lost_after_s = lost_after_s
        self._last: dict[int, tuple[str, float]] = dict.fromkeys(others, ("", now))
        self._answered = now
        self._suspected: float | None = None  # time at which `lost` first found a node silent

    def note(self, now: float, beats: Mapping[int, str]) -> None:
        """Record the heartbeats that the store has answered, by node."""
        self._answered = now
        for node, beat in beats.items():
            if beat != self._last[node][0]:
                self._last[node] = (beat, now)

    def lost(self, now: float, *, store_at: str) -> str | None:
        """A sentence about a lost node; None while all are alive or haven't sent their first heartbeat.

        A node counts as lost only if it stays silent while this process runs for some more time: this process may have
        been frozen itself, as a virtual machine is during migration, and read the others' heartbeats a moment later.
        """
        found = self._silent(now, store_at)
        self._suspected = None if found is None else now if self._suspected is None else self._suspected
        return found if self._suspected is not None and now - self._suspected >= _SURE_S else None

    def _silent(self, now: float, store_at: str) -> str | None:
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
        """Whether the store hasn't answered for too long."""
        return now - self._answered > self._lost_after_s

    def lost_nodes(self, now: float) -> list[int]:
        """The nodes that have been silent for too long, according to the store's last answer."""
        # Measure until the store's last answer, not until now: a silent store doesn't make nodes silent. A node without
        # a first heartbeat is still starting.
        known = min(now, self._answered)
        return [node for node, (beat, since) in self._last.items() if beat and known - since > self._lost_after_s]


class Parting(enum.Enum):
    """How an attempt has ended on a node that hasn't failed itself."""

    WELL = "all ranks have ended as they should"
    SAVED = "ranks were asked to stop, have saved, and ended"
    LOST = "ranks have only lost others"


class OtherNodes:
    """Exchanges heartbeats and facts with the other nodes, while ranks run.

    Args:
        address: The store's address.
        port: The store's port.
        session: Name of this session, different for every rendezvous.
        node_rank: This node's rank; node 0 has the store.
        num_nodes: Number of nodes.
        lost_after_s: See `Heartbeats`.
        describe: Returns a line about the activity of this node's ranks; called several times a second, by the thread.
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
        lost_after_s: float = NODE_TIMEOUT_S,
        describe: Callable[[], str] = lambda: "",
    ) -> None:
        self._address, self._port = address, port
        self._node_rank, self._num_nodes = node_rank, num_nodes
        self._prefix = f"evenstep/nodes/{session}"
        self._others = [node for node in range(num_nodes) if node != node_rank]
        self._heartbeats = Heartbeats(self._others, lost_after_s=lost_after_s, now=time.monotonic())
        self._describe = describe
        # The main thread alone writes this, and replaces the whole dictionary.
        self._mine: dict[str, Any] = {"version": "0", "host": socket.gethostname()}
        self._facts: dict[int, dict[str, Any]] = {}  # the other nodes' facts at the last beat
        self._own_failure = ""
        self._remote_failure: RemoteFailure | None = None
        self._requests_states = False
        self._states: list[str] | None = None
        self._num_beats = self._num_in_row = 0
        self._looks_at = -math.inf
        self._wakes, self._has_ended, self._is_closed = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="evenstep nodes", daemon=True)
        self._thread.start()

    @property
    def new_node_waits(self) -> bool:
        """Whether a node has announced a new node that waits to join."""
        return any("new_node" in record for record in (self._mine, *self._facts.values()))

    def poll(self) -> RemoteFailure | None:
        """A failure on another node, if one is known. Never blocks."""
        if self._remote_failure is not None:
            return self._remote_failure
        lost = self._heartbeats.lost(time.monotonic(), store_at=f"{self._address}:{self._port}")
        return None if lost is None else RemoteFailure(lost, self.LOST_STATUS)

    def publish_failure(self, text: str, status: int, *, state: str = "", wait_s: float = 1.0) -> None:
        """Publish this node's failure as the first one, unless another node has published one.

        Waits a moment until it is published.
        """
        where = f"node {self._node_rank} ({socket.gethostname()})"
        failure = RemoteFailure(f"on {where}: {text}"[:_MAX_TEXT], status, state[:_MAX_TEXT])
        self._own_failure = json.dumps(asdict(failure))
        enough = self._num_beats + 2  # one beat may be in flight
        self._await(lambda: self._num_beats >= enough, wait_s)

    def announce_new_node(self, *, wait_s: float = 1.0) -> None:
        """Announce that a new node waits, so that all nodes stop their ranks. Waits until it is announced."""
        self._publish(new_node=True)
        self._await_beats(wait_s)

    def check_for_new_node(self, *, longest_s: float = 1.0) -> bool:
        """Like `new_node_waits`, after reading the store once more."""
        self._await_beats(longest_s)
        return self.new_node_waits

    def announce_stop(self) -> None:
        """Announce that this node was asked to stop. Never blocks."""
        self._publish(stops=True)

    @property
    def is_stopping(self) -> bool:
        """Whether another node was asked to stop: nodes that start again would wait for it."""
        return any("stops" in facts for facts in self._facts.values())

    def publish_views(self, text: str) -> None:
        """Publish where this node's ranks are; "": this isn't known. Never blocks."""
        now = time.monotonic()
        if now - self._looks_at > _LOOKS_S or not text:
            self._looks_at = now
            self._publish(views=text)

    def views(self) -> list[tuple[str, str]]:
        """(Description of a node, its published text) for all other nodes that have published one. Never blocks."""
        return self._of_all("views")

    def request_states(self) -> None:
        """Make the thread read the other nodes' lines about their ranks."""
        self._requests_states = True
        self._wakes.set()

    def states(self, *, longest_s: float = 0.3) -> list[str]:
        """A line about the ranks of each other node, read since `request_states`."""
        self._await(lambda: self._states is not None, longest_s)
        return self._states or []

    def exchange(self, text: str, *, longest_s: float) -> list[str]:
        """The texts that other nodes have passed at the end of this attempt, without nodes that are lost or too late.

        Collective over nodes. Each node passes one text, once.
        """
        self._publish(given=text)
        self._await(lambda: self._have_all("given"), longest_s)
        return [text for _, text in self._of_all("given")]

    def publish_leaving(self) -> None:
        """Publish that a rank of this node has left its world without an error. Never blocks."""
        self._publish(leaving=True)

    def publish_end(self, how: Parting) -> None:
        """Publish how the attempt has ended on this node. Never blocks."""
        self._publish(ended=how.name)

    def await_ends(self, longest_s: float) -> set[Parting]:
        """Wait until the attempt has ended on the other nodes, a failure is known, or time is up. Returns how it ended.

        Nodes that start again with a new node publish no end, and aren't awaited.
        """
        began = time.monotonic()
        while not self._have_all("ended") and self.poll() is None and not self._has_ended.is_set():
            waited_s = time.monotonic() - began
            if waited_s > longest_s or self.new_node_waits:
                break
            if waited_s < _PARTING_S:
                self._wakes.set()
            time.sleep(_HURRY_S if waited_s < _PARTING_S else _BEAT_S)
        return {Parting[str(facts["ended"])] for facts in self._facts.values() if "ended" in facts}

    @property
    def somebody_leaves(self) -> bool:
        """Whether ranks of another node have left their world without an error."""
        return any("leaving" in facts for facts in self._facts.values())

    def close(self) -> None:
        """Wait a moment until the others have read what they need, because the store ends with its node; then stop.

        Doesn't wait for a silent store.
        """
        self._publish(has_read=True)
        self._await(lambda: self._have_all("has_read"), _PARTING_S)
        self._is_closed.set()
        self._wakes.set()
        self._thread.join(2 * _BEAT_S)

    def _publish(self, **changes: object) -> None:
        if not changes.items() <= self._mine.items():
            self._mine = {**self._mine, **changes, "version": str(int(self._mine["version"]) + 1)}

    def _of_all(self, what: str) -> list[tuple[str, str]]:
        return [
            (f"on node {node} ({of['host']})", str(of[what]))
            for node, of in sorted(self._facts.items())
            if of.get(what)
        ]

    def _await(self, is_true: Callable[[], bool], longest_s: float) -> None:
        """Wait until a condition is true, with frequent beats, while the store can be reached."""
        deadline = time.monotonic() + longest_s
        while not is_true() and time.monotonic() < deadline:
            if self._has_ended.is_set() or self._heartbeats.is_cut_off(time.monotonic()):
                return
            self._wakes.set()
            time.sleep(_HURRY_S)

    def _await_beats(self, longest_s: float) -> None:
        """Wait for a row with a later beat of this node: then this node and the others have read each other's facts."""
        enough = self._num_beats + 1  # one beat may be in flight
        self._await(lambda: self._num_in_row >= enough, longest_s)

    def _have_all(self, what: str) -> bool:
        """Whether the facts of all nodes have an entry, except those of nodes that send nothing any more."""
        have_it = {node for node, facts in self._facts.items() if what in facts}
        return set(self._others) <= have_it | {*self._heartbeats.lost_nodes(time.monotonic())}

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone: `poll` reports it if that lasts
            store = TCPStore(
                self._address,
                self._port,
                is_master=False,
                timeout=timedelta(seconds=_CONNECT_S),
                wait_for_workers=False,
            )
            self._beat(PrefixStore(self._prefix, store))
        self._has_ended.set()

    def _beat(self, store: Any) -> None:  # a `Store`, whose stub lacks `multi_set`
        here, sent, told = self._node_rank, "", ""
        beats = [f"beat-{node}" for node in range(self._num_nodes)]
        for key in (_FIRST, *(beats if here == 0 else ())):
            store.compare_set(key, "", _NOTHING)  # doesn't overwrite an existing value
        while not self._is_closed.is_set():
            mine, state = self._mine, self._describe()[:_MAX_TEXT] or " "
            values = {f"state-{here}": state, f"beat-{here}": f"{self._num_beats}.{mine['version']}"}
            if mine["version"] != sent:
                sent = mine["version"]
                values = {f"facts-{here}": json.dumps(mine), **values}
            store.multi_set([*values], [*values.values()])
            if self._own_failure != told:
                told = self._own_failure
                store.compare_set(_FIRST, _NOTHING, told)
            if here == 0:
                *row, first = store.multi_get([*beats, _FIRST])
                store.set(_ROW, b",".join(row).decode())
                self._note(store, row, first)
            elif store.check([_ROW]):  # its node may start later
                text, first = store.multi_get([_ROW, _FIRST])
                self._note(store, text.split(b","), first)
            self._num_beats += 1
            self._wakes.wait(_BEAT_S)
            self._wakes.clear()

    def _note(self, store: Store, row: Sequence[bytes], first: bytes) -> None:
        beats = {node: beat.decode() for node, beat in enumerate(row) if beat.decode() != _NOTHING}
        self._num_in_row = int(beats.pop(self._node_rank, "0").partition(".")[0])
        versions = {node: beat.partition(".")[2] for node, beat in beats.items()}
        new = [node for node, version in versions.items() if version != self._facts.get(node, {}).get("version")]
        found = store.multi_get([f"facts-{node}" for node in new]) if new else ()
        facts = {**self._facts, **{node: json.loads(text) for node, text in zip(new, found, strict=True)}}
        self._facts = facts
        self._heartbeats.note(time.monotonic(), {node: f"{beat} {facts[node]['host']}" for node, beat in beats.items()})
        if self._requests_states and self._states is None:
            lines = store.multi_get([f"state-{node}" for node in beats]) if beats else ()
            texts = {node: line.decode(errors="replace").strip() for node, line in zip(beats, lines, strict=True)}
            shown = (f"on node {node} ({facts[node]['host']}): {text}" for node, text in texts.items() if text)
            self._states = [printable(each)[:_MAX_TEXT].replace("\n", " ") for each in shown]
        if self._remote_failure is None and first.decode() not in (_NOTHING, self._own_failure):
            with contextlib.suppress(ValueError, TypeError):
                failure = RemoteFailure(**json.loads(first))
                text, state = (printable(str(text))[:_MAX_TEXT] for text in (failure.text, failure.state))
                self._remote_failure = RemoteFailure(text, int(failure.status), state)


@dataclass(frozen=True)
class Standing:
    """Restarts and checkpoints of a run or of one attempt, as known to one node or to all nodes together.

    Attributes:
        num_restarts: Number of restarts.
        num_in_vain: Number of restarts since the last checkpoint was committed.
        saves: Whether there was a `Checkpointer`. Without checkpoints a run's progress isn't known.
        saved_step: Step of the newest checkpoint; None: none yet.
        has_saved: Whether a checkpoint was committed since the last restart, perhaps before nodes joined or left
            without a restart.
    """

    num_restarts: int = 0
    num_in_vain: int = 0
    saves: bool = False
    saved_step: int | None = None
    has_saved: bool = False

    MOST_IN_VAIN = 3

    @staticmethod
    def of_all_nodes(each: Iterable[Standing]) -> Standing:
        """The run's standing, combined from its nodes' standings; nodes that joined later know less. Pure."""
        nodes = list(each)
        most, has_saved = max(node.num_restarts for node in nodes), any(node.has_saved for node in nodes)
        return Standing(
            most,
            0 if has_saved else min(node.num_in_vain for node in nodes if node.num_restarts == most),
            any(node.saves for node in nodes),
            max((node.saved_step for node in nodes if node.saved_step is not None), default=None),
            has_saved,
        )

    def after(self, attempt: Standing) -> Standing:
        """The standing after an attempt that has ended without a failure."""
        if attempt.saved_step is None:
            return self
        return replace(self, num_in_vain=0, saved_step=attempt.saved_step, has_saved=True)

    def after_failure(self, attempt: Standing) -> Standing:
        """The standing after a failed attempt: unless a checkpoint was committed, the restart before it was in vain."""
        now = self.after(attempt)
        is_in_vain = attempt.saves and self.num_restarts > 0 and not now.has_saved
        return replace(now, num_in_vain=now.num_in_vain + is_in_vain, has_saved=False)

    @property
    def is_in_vain(self) -> bool:
        """Whether so many restarts were in vain that another is useless."""
        return self.num_in_vain >= self.MOST_IN_VAIN


def agree_on_saved(others: OtherNodes, own: Standing, *, longest_s: float) -> Standing:
    """What an attempt has saved on all nodes, once it has ended on all; without nodes that are lost or too late.

    Args:
        others: The other nodes.
        own: What the attempt has saved on this node.
        longest_s: Seconds to wait for the others.
    """
    nodes = [own]
    for text in others.exchange(json.dumps(asdict(own)), longest_s=longest_s):
        with contextlib.suppress(ValueError, TypeError):
            nodes.append(Standing(**json.loads(text)))
    return Standing.of_all_nodes(nodes)


def agree_on_cause(
    others: OtherNodes, failure: Failure | None, remote: RemoteFailure | None, *, grace_s: float, patience_s: float
) -> RemoteFailure | None:
    """Publish a failure that began here. If all failures here are secondary, wait for another node's published failure.

    If no failure is published, ranks of this node that have left early are the cause.

    Args:
        others: The other nodes.
        failure: The failure of this node's ranks, all of which have ended; None: none failed.
        remote: Another node's failure that was known when this node's failure was noticed, or None.
        grace_s: Seconds to wait for another node's failure.
        patience_s: Seconds to wait if ranks of another node are leaving, because their end decides.

    Returns:
        The failure on another node that is the cause; None: the cause isn't known, or happened here.
    """
    if remote is not None or failure is None:
        return remote
    published, began = None, time.monotonic()
    if failure.only_secondary and not failure.left:
        others.publish_end(Parting.LOST)
    while failure.only_secondary and (published := others.poll()) is None:
        is_leaving = others.somebody_leaves and not failure.left
        if others.new_node_waits or time.monotonic() - began > (patience_s if is_leaving else grace_s):
            break
        time.sleep(_HURRY_S)
    if not failure.only_secondary or (failure.left and published is None and not others.new_node_waits):
        others.publish_failure(summary_of(failure), status_of(failure), state=state_of(failure))
    return published


def compare_standings(store: Store, own: Standing, *, node_rank: int, num_nodes: int) -> Standing:
    """Combine the standings of all nodes. Collective over nodes; returns the same on all.

    Args:
        store: A store for this rendezvous only.
        own: This node's standing.
        node_rank: This node's rank.
        num_nodes: Number of nodes in this rendezvous.
    """
    store.set(f"evenstep/standing-{node_rank}", json.dumps(asdict(own)))
    standings = (store.get(f"evenstep/standing-{node}") for node in range(num_nodes))
    return Standing.of_all_nodes(Standing(**json.loads(text)) for text in standings)
