"""What the launchers of a run tell each other while their ranks run: that they are there, and who failed first.

Every launcher writes a beat to the store where the ranks met, several times a second, and reads those of the others.
A host whose beat stands still is lost: its plug was pulled, its power is gone. The store has a *blame* slot too, which
the first to fail wins by compare-and-swap; so the hosts that only lost somebody can say whom, and why. At the end of an
attempt that may be followed by another, they tell each other what was saved in it: the one that makes the checkpoints
of all ranks' files knows that, and all must come to the same conclusion. One that sees another host wait to take part
says so, or its peers would take the end of its ranks for a failure.

With every beat goes a line on what the host's ranks are doing. Who has to tell of a failure reads those of the others.

A thread does the talking, because a store that can't be reached any more answers nothing, and no deadline of torch's
ends that. `Beats`, which judges, is pure, and is asked from outside the thread.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from evenstep.health.blame import printable

_BEAT_S = 0.25
_HURRY_S = 0.02  # between two looks at the store when the attempt has ended
_PARTING_S = 1.0
_CONNECT_S = 60.0
_MAX_TEXT = 500


@dataclass(frozen=True)
class Elsewhere:
    """What happened on another host, as far as this one knows.

    Attributes:
        text: For people.
        status: The status with which the run ends because of it.
        state: Where the culprit was, and who waited; "" where nobody knows.
    """

    text: str
    status: int
    state: str = ""


@dataclass(frozen=True)
class Saved:
    """What an attempt has saved, as far as one host knows, or all together.

    Attributes:
        has_checkpointer: There was a `Checkpointer`.
        step: Of the last checkpoint that was committed; None: none.
    """

    has_checkpointer: bool
    step: int | None

    @staticmethod
    def by_all(each: Iterable[Saved]) -> Saved:
        """All together. Pure."""
        hosts = list(each)
        steps = [host.step for host in hosts if host.step is not None]
        return Saved(any(host.has_checkpointer for host in hosts), max(steps, default=None))


class Beats:
    """Which hosts are heard of. Pure.

    Args:
        others: Node ranks of the other hosts.
        lost_after_s: Silence after which a host is lost.
        now: Seconds on a clock that doesn't stop.
    """

    def __init__(self, others: Iterable[int], *, lost_after_s: float, now: float) -> None:
        self._lost_after_s = lost_after_s
        self._last: dict[int, tuple[str, float]] = dict.fromkeys(others, ("", now))
        self._answered = now
        self._has_begun = False

    def hear(self, now: float, beats: Mapping[int, str]) -> None:
        """The store has answered; these were the hosts' beats."""
        self._answered = now
        self._has_begun = True
        for node, beat in beats.items():
            if beat != self._last[node][0]:
                self._last[node] = (beat, now)

    def lost(self, now: float, *, store_at: str) -> str | None:
        """Which host is lost, in words; None while all are heard of, or have yet to be heard of for the first time."""
        if not self._has_begun:
            return None  # the ranks' own meeting has its own deadline
        silent_s = now - self._answered
        if silent_s > self._lost_after_s:
            return (
                f"the host of the store, {store_at}, has not answered for {silent_s:.1f} s: it or the way to it is lost"
            )
        for node, (beat, since) in self._last.items():
            # Who hasn't beaten yet still starts.
            if beat and now - since > self._lost_after_s:
                name = beat.partition(" ")[2]
                return (
                    f"host {node} ({name}) has not been heard of for {now - since:.1f} s: it or the way to it is lost"
                )
        return None


class OtherHosts:
    """This host's part in the talk. Made when the ranks have been started, closed when they have ended.

    Args:
        address: Where the store is.
        port: Its port.
        talk: Name of this talk: another one for every meeting of the hosts.
        node_rank: This host.
        num_nodes: All hosts.
        lost_after_s: See `Beats`.
        describe: What the ranks of this host are doing, in a line; called several times a second, by the thread.

    Attributes:
        room_is_wanted: Some host sees one more wait to take part.
    """

    LOST_STATUS = 76

    def __init__(
        self,
        address: str,
        port: int,
        *,
        talk: str,
        node_rank: int,
        num_nodes: int,
        lost_after_s: float = 4.0,  # so that it is named within 5
        describe: Callable[[], str] = lambda: "",
    ) -> None:
        self._address, self._port = address, port
        self._node_rank = node_rank
        self._prefix = f"evenstep/hosts/{talk}"
        self._others = [node for node in range(num_nodes) if node != node_rank]
        self._beats = Beats(self._others, lost_after_s=lost_after_s, now=time.monotonic())
        self._blame: Elsewhere | None = None
        self._to_say: str | None = None
        self._said = threading.Event()
        self.room_is_wanted = False
        self._asks_for_room = False
        self._has_asked = threading.Event()
        self._describe = describe
        self._asks_for_states = False
        self._states: list[str] = []
        self._has_states = threading.Event()
        self._num_looks = 0
        self._wakes = threading.Event()
        self._saved: dict[int, Saved] = {}  # by node, this one's included
        self._num_agreed = 0
        self._has_ended = threading.Event()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._talk, name="evenstep hosts", daemon=True)
        self._thread.start()

    def look(self) -> Elsewhere | None:
        """What is known to have happened on another host. Never blocks."""
        if self._blame is not None:
            return self._blame
        lost = self._beats.lost(time.monotonic(), store_at=f"{self._address}:{self._port}")
        return None if lost is None else Elsewhere(lost, self.LOST_STATUS)

    def blame(self, text: str, status: int, *, state: str = "", wait_s: float = 1.0) -> None:
        """Tell the others who failed here, unless somebody told before. Waits a moment until that is done."""
        where = f"host {self._node_rank} ({socket.gethostname()})"
        self._to_say = json.dumps(asdict(Elsewhere(f"on {where}: {text}"[:_MAX_TEXT], status, state[:_MAX_TEXT])))
        self._wakes.set()
        self._said.wait(wait_s)

    def make_room(self, *, wait_s: float = 1.0) -> None:
        """Tell the others that one more host waits, so that they stop their ranks too. Waits until that is done."""
        self._asks_for_room = True
        self._wakes.set()
        self._has_asked.wait(wait_s)

    def hear_of_room(self, *, longest_s: float = 1.0) -> bool:
        """`room_is_wanted`, after one more look at what the others had said by now."""
        deadline = time.monotonic() + longest_s
        enough = self._num_looks + 2  # one may be under way
        while self._num_looks < enough and time.monotonic() < deadline and not self._has_ended.is_set():
            self._wakes.set()
            time.sleep(_HURRY_S)
        return self.room_is_wanted

    def ask_for_states(self) -> None:
        """Have the thread read what the other hosts have told of their ranks by now."""
        self._asks_for_states = True
        self._wakes.set()

    def states(self, *, longest_s: float = 0.3) -> list[str]:
        """A line for each other host that has told of its ranks: what they did when `ask_for_states` was called.

        That is, at its last beat before.
        """
        self._has_states.wait(longest_s)
        return self._states

    def agree_on_saved(self, own: Saved, *, longest_s: float) -> Saved:
        """What was saved by all hosts, once their attempts have ended too; without those that are lost or too late."""
        self._saved[self._node_rank] = own
        deadline = time.monotonic() + longest_s
        while len(self._saved) <= len(self._others) and time.monotonic() < deadline and not self._is_cut_off():
            time.sleep(_HURRY_S)
        # The store goes with its host, so that one stays until the others have read it.
        deadline = time.monotonic() + _PARTING_S
        while self._num_agreed < len(self._others) and time.monotonic() < deadline and not self._is_cut_off():
            time.sleep(_HURRY_S)
        return Saved.by_all(self._saved.values())

    def _is_cut_off(self) -> bool:
        lost = self._beats.lost(time.monotonic(), store_at="")
        return lost is not None or self._has_ended.is_set()

    def close(self) -> None:
        """Stop beating. Doesn't wait for a store that is silent."""
        self._is_closed.set()
        self._wakes.set()
        self._thread.join(2 * _BEAT_S)

    def _talk(self) -> None:
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
        mine = ""
        while not self._is_closed.is_set():
            number += 1
            store.set(f"state-{self._node_rank}", self._describe()[:_MAX_TEXT])
            store.set(f"beat-{self._node_rank}", f"{number} {socket.gethostname()}")
            if self._to_say is not None and not mine:
                mine = self._to_say
                store.compare_set("blame", "", mine)
                self._said.set()
            if self._asks_for_room and not self._has_asked.is_set():
                store.set("room", "wanted")
                self._has_asked.set()
            heard = {node: store.get(f"beat-{node}").decode() for node in self._others if store.check([f"beat-{node}"])}
            self._beats.hear(time.monotonic(), heard)
            self.room_is_wanted = self.room_is_wanted or store.check(["room"])
            if self._asks_for_states and not self._has_states.is_set():
                self._states = self._read_states(store, heard)
                self._has_states.set()
            if self._blame is None and store.check(["blame"]):
                told = store.get("blame").decode()
                if told != mine:
                    with contextlib.suppress(ValueError, TypeError):
                        found = Elsewhere(**json.loads(told))
                        texts = (printable(str(text))[:_MAX_TEXT] for text in (found.text, found.state))
                        self._blame = Elsewhere(next(texts), int(found.status), next(texts))
            if self._node_rank in self._saved:
                self._compare_saved(store)
            self._num_looks += 1
            self._wakes.wait(_HURRY_S if self._node_rank in self._saved else _BEAT_S)
            self._wakes.clear()

    def _read_states(self, store: Store, beats: Mapping[int, str]) -> list[str]:
        told = {node: store.get(f"state-{node}").decode(errors="replace") for node in beats}
        return [
            printable(f"on host {node} ({beats[node].partition(' ')[2]}): {text}")[:_MAX_TEXT].replace("\n", " ")
            for node, text in sorted(told.items())
            if text
        ]

    def _compare_saved(self, store: Store) -> None:
        store.set(f"saved-{self._node_rank}", json.dumps(asdict(self._saved[self._node_rank])))
        for node in self._others:
            if node not in self._saved and store.check([f"saved-{node}"]):
                with contextlib.suppress(ValueError, TypeError):
                    self._saved[node] = Saved(**json.loads(store.get(f"saved-{node}")))
        if len(self._saved) > len(self._others):
            store.set(f"agreed-{self._node_rank}", "yes")
            self._num_agreed = sum(store.check([f"agreed-{node}"]) for node in self._others)
