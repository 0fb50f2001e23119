"""Which pushes make an update, and who may go on: decided by the first server, for all servers. Pure.

[Note: one order of updates]

Every server has another part of each gradient. If each decided by itself, two servers could apply the pushes of a
worker that was killed differently, and pull different versions. So servers keep what is pushed and report it to the
first one. When it knows that all servers have a push, its `Coordinator` decides, and every server executes the same
numbered `Decision`s in their order. Hence a push is applied on all servers or on none, and what a worker gets is one
version of all parameters.

| mode | gradients are applied | a worker goes on |
| --- | --- | --- |
| "sync" | once a step, those of all workers together | after that |
| "async" | each push by itself, at once | at once |
| "bounded" | each push by itself, at once | when the slowest worker is at most `max_staleness` steps behind |
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from evenstep.parameter_servers.server.batch_queue import BatchQueue, Key, Pass


@dataclass(frozen=True)
class Mode:
    """When gradients are applied, and who waits for whom.

    Attributes:
        name: "sync", "async" or "bounded".
        max_staleness: Of "bounded": how many steps a worker may be ahead of the slowest.
        max_norm: Of the mean gradient of an update, over all servers; None: not clipped.
    """

    name: str
    max_staleness: int = 0
    max_norm: float | None = None


class Facts(NamedTuple):
    """What a server reports of a push.

    Attributes:
        weight: Sum of the worker's weights; 0: it had no samples.
        version: Number of updates that its parameters had seen.
        square: Squared norm of this server's part of its sum of gradients; 0 unless the mode clips.
    """

    weight: float
    version: int
    square: float = 0.0


class Decision(NamedTuple):
    """What all servers do next.

    Attributes:
        number: From 1, without a gap.
        measured: Pushes whose mean's squared norm is wanted before they are applied.
        applied: Pushes that make one update, in the order of their sum.
        factor: What their mean is multiplied by: below 1 where it is clipped.
        dropped: Pushes that are never applied.
        released: Calls that are answered now, with the parameters as they are then.
        gone: Workers that were lost.
        saves: A copy of the state is taken here.
        failure: Why the run can't go on: waiting and later calls are answered with it; "": it can.
        has_ended: All workers have left.
    """

    number: int
    measured: Sequence[Key] = ()
    applied: Sequence[Key] = ()
    factor: float = 1.0
    dropped: Sequence[Key] = ()
    released: Sequence[Key] = ()
    gone: Sequence[int] = ()
    saves: bool = False
    failure: str = ""
    has_ended: bool = False


@dataclass
class _Member:
    """A worker that trains.

    Attributes:
        clock: Steps that it has pushed.
        call: Its push that waits for its release; None: none does.
    """

    clock: int
    call: Key | None = None


class Coordinator:
    """See the top of the file. Not for several threads at once.

    Args:
        mode: See the table.
        num_servers: How many have to have a push.
        workers: Numbers of those that will join; they are waited for.
        queue: Batches; each is finished when its push is applied.
        version: Number of updates so far.
        ends_itself: When all workers have left; False: then `end` ends the run.
    """

    def __init__(
        self,
        mode: Mode,
        num_servers: int,
        workers: Iterable[int],
        queue: BatchQueue,
        *,
        version: int = 0,
        ends_itself: bool = True,
    ) -> None:
        self._mode, self._num_servers, self._queue = mode, num_servers, queue
        self._ends_itself = ends_itself
        self._expected = set(workers)
        self._members: dict[int, _Member] = {}  # by worker, without those that have left
        self._leaving: dict[int, Key] = {}  # the call of each worker that has left and waits
        self._has_left = False  # one of them, which may have been lost since
        self._lost: list[tuple[int, Pass, int]] = []  # (worker, where, batch) that lost workers held
        self._arriving: dict[Key, list[Facts]] = {}  # what some servers have
        self._held: dict[Key, Facts] = {}  # what all servers have, and no update yet
        self._measured: list[float] = []
        self._measuring: list[Key] = []
        self._number = 0
        self._failure = ""
        self._has_ended = False
        self.version = version
        self.staleness: dict[int, Counter[int]] = {}  # by worker

    def __repr__(self) -> str:
        return f"<Coordinator {self._mode.name}, {len(self._members)} workers, version {self.version}>"

    # ------------------------------------------------------------------ who is there

    @property
    def members(self) -> set[int]:
        """Workers that train."""
        return set(self._members)

    @property
    def expected(self) -> set[int]:
        """Workers that have not joined yet."""
        return set(self._expected)

    def join(self, worker: int) -> None:
        """A worker begins.

        Workers that are waited for begin at their first step, and others have gone ahead of that by the bound at most.
        A later one begins at the step of the slowest that is there, so it holds nobody back more than that one does.
        """
        here = [0] if worker in self._expected else [member.clock for member in self._members.values()]
        self._expected.discard(worker)
        self._members[worker] = _Member(min(here, default=0))

    def lose(self, worker: int) -> list[Decision]:
        """A worker's process has ended: what it holds, if it had not left, goes to others."""
        left, lost = self._leaving.pop(worker, None), self._members.pop(worker, None)
        if left is None and lost is None:
            return []
        if lost is not None:
            for pushed in (self._arriving, self._held):
                for key in [key for key in pushed if key[0] == worker and key not in self._measuring]:
                    del pushed[key]
            returned = self._queue.give_back(worker, but=self._measuring)
            self._lost += [(worker, *batch) for batch in returned]
        return [self._decide(gone=[worker]), *self._advance()]

    def give_up(self, workers: Iterable[int]) -> list[Decision]:
        """Workers that have never joined aren't waited for any more."""
        self._expected -= set(workers)
        return self._advance()

    def leave(self, key: Key, failure: str = "") -> list[Decision]:
        """A worker has ended: done, or with a failure, with which the run can't go on.

        Args:
            key: Of its call.
            failure: "": none.
        """
        if self._members.pop(key[0], None) is not None:  # else it was lost, or asks again
            self._leaving[key[0]], self._has_left = key, True
        self._queue.give_back(key[0])
        return self.fail(failure) if failure else self._advance()

    def fail(self, failure: str) -> list[Decision]:
        """The run can't go on."""
        self._failure = self._failure or failure
        return self._advance()

    @property
    def is_done(self) -> bool:
        """All workers have left."""
        return self._has_left and not (self._members or self._expected or self._has_ended)

    def end(self) -> list[Decision]:
        """Answer the workers that have left, if all have."""
        if not self.is_done:
            return []
        self._has_ended = True
        return [self._decide(released=list(self._leaving.values()), has_ended=True)]

    @property
    def untrained(self) -> list[tuple[int, Pass, int]]:
        """(worker, where, batch) of what lost workers held, and nobody has taken since."""
        return [each for each in self._lost if self._queue.is_returned(*each[1:])]

    def lagging(self) -> list[tuple[int, int]]:
        """Workers for which others may wait, with the steps that they have pushed."""
        here = [(worker, member.clock) for worker, member in self._members.items() if member.call is None]
        return sorted(here + [(worker, 0) for worker in self._expected])

    # ------------------------------------------------------------------ what comes

    def pull(self, key: Key) -> list[Decision]:
        """A worker wants the parameters as they are."""
        return [] if self._failure else [self._decide(released=[key])]

    def push(self, key: Key, facts: Facts) -> list[Decision]:
        """One more server has a push."""
        member = self._members.get(key[0])
        if member is None or self._failure:
            return []
        seen = self._arriving.setdefault(key, [])
        seen.append(facts)
        if len(seen) < self._num_servers:
            return []
        del self._arriving[key]
        facts = facts._replace(square=sum(each.square for each in seen))
        member.clock += 1
        member.call = key
        self._held[key] = facts
        if self._mode.name == "sync":
            return self._advance()
        square = facts.square / facts.weight**2 if facts.weight else 0.0
        return [self._apply([key], square), *self._advance()]

    def measured(self, square: float) -> list[Decision]:
        """One more server has added up the pushes of the last `Decision.measured`: the squared norm of their mean."""
        self._measured.append(square)
        if len(self._measured) < self._num_servers:
            return []
        keys, self._measuring = self._measuring, []
        return [self._apply(keys, sum(self._measured)), *self._advance()]

    def save(self) -> Decision:
        """Have all servers copy their state, between the same two updates."""
        return self._decide(saves=True)

    # ------------------------------------------------------------------ what follows

    def _decide(
        self,
        *,
        measured: Sequence[Key] = (),
        applied: Sequence[Key] = (),
        factor: float = 1.0,
        dropped: Sequence[Key] = (),
        released: Sequence[Key] = (),
        gone: Sequence[int] = (),
        saves: bool = False,
        failure: str = "",
        has_ended: bool = False,
    ) -> Decision:
        self._number += 1
        return Decision(self._number, measured, applied, factor, dropped, released, gone, saves, failure, has_ended)

    def _advance(self) -> list[Decision]:
        decisions = []
        if self._failure:
            return [self._decide(failure=self._failure, has_ended=True)]
        if self._mode.name == "sync" and not self._measuring and self._is_step_complete():
            keys = sorted(self._held)  # by worker, so that the sum doesn't depend on who came first
            if self._mode.max_norm is not None and any(self._held[key].weight for key in keys):
                self._measuring, self._measured = keys, []
                decisions.append(self._decide(measured=keys))
            else:
                decisions.append(self._apply(keys, 0.0))
        released = self._release()
        if released:
            decisions.append(self._decide(released=released))
        if self.is_done and self._ends_itself:
            decisions += self.end()
        return decisions

    def _is_step_complete(self) -> bool:
        return bool(self._held) and len(self._held) == len(self._members) + len(self._expected)

    def _apply(self, keys: Sequence[Key], square: float) -> Decision:
        facts = {key: self._held.pop(key) for key in keys}
        for key in keys:
            self._queue.finish(key)
            if key[0] in self._members and facts[key].weight:
                late = self.version - facts[key].version
                self.staleness.setdefault(key[0], Counter())[late] += 1
        full = [key for key in keys if facts[key].weight > 0]
        if not full:
            return self._decide(dropped=keys)
        self.version += 1
        factor = 1.0
        if self._mode.max_norm is not None:
            factor = min(1.0, self._mode.max_norm / (math.sqrt(square) + 1e-6))  # as torch's clip_grad_norm_
        return self._decide(applied=full, factor=factor, dropped=[key for key in keys if key not in full])

    def _release(self) -> list[Key]:
        slowest = min((member.clock for member in self._members.values()), default=0)
        if self._expected:
            slowest = 0

        def may_go_on(member: _Member, key: Key) -> bool:
            if self._mode.name == "sync":
                return key not in self._held
            return self._mode.name == "async" or member.clock - slowest <= self._mode.max_staleness

        released = []
        for member in self._members.values():
            if member.call is not None and may_go_on(member, member.call):
                released.append(member.call)
                member.call = None
        return released
