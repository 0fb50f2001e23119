"""Decides which pushes make an update, and which workers may continue. The first server decides for all. Pure.

[Note: one order of updates]

Every server has a different part of each gradient. If each decided by itself, one server could apply the last push of a
killed worker and another not, and workers would get parameters of different versions. So a worker sends the other
servers their parts first, and then requests its step from the first server. The first server's `Coordinator` decides,
and every server executes the same numbered `Decision`s in their order. Hence a push is applied on all servers or on
none, and a worker gets one version of all parameters.

| mode | gradients are applied | a worker continues |
| --- | --- | --- |
| "sync" | once a step, of all workers together | after the update |
| "async" | each push separately, at once | at once |
| "bounded" | each push separately, at once | when the slowest worker is at most `max_staleness` steps behind |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from evenstep.parameter_servers.deciding.batch_queue import Batch, BatchQueue

Key = tuple[int, int]  # (worker, number of its call)


@dataclass(frozen=True)
class Mode:
    """When gradients are applied, and which workers wait.

    Attributes:
        name: "sync", "async" or "bounded".
        max_staleness: For "bounded": number of steps by which a worker may be ahead of the slowest.
    """

    name: str
    max_staleness: int = 0


class Push(NamedTuple):
    """The coordinator's record of a push.

    Attributes:
        weight: Sum of the worker's weights; 0: it had no samples, and no server has gradients.
        version: The version, as number of updates, of the parameters with which the push was computed.
        batches: The batches whose gradients the push has.
    """

    weight: float
    version: int
    batches: Sequence[Batch] = ()


class Decision(NamedTuple):
    """The next actions of all servers.

    Attributes:
        number: The decision's number, from 1, without gaps.
        applied: Pushes that make one update, in the order of summation.
        released: Calls that are answered after the update, with the new parameters.
        gone: Workers that were lost.
        saves: The queue's state, to save with the servers' state; None: nothing is saved.
        is_last: Whether the run ends after this save, which therefore has to be complete first.
        stops: Whether a stop was requested.
        failure: Why the run can't continue, as answer to waiting and later calls; "": it can continue.
        has_ended: Whether all workers have left.
    """

    number: int
    applied: Sequence[Key] = ()
    released: Sequence[Key] = ()
    gone: Sequence[int] = ()
    saves: Mapping[str, Any] | None = None
    is_last: bool = False
    stops: bool = False
    failure: str = ""
    has_ended: bool = False


def decoded(values: Sequence[Any]) -> Decision:
    """Decode a decision from JSON."""
    number, applied, released, *rest = values
    return Decision(number, [(w, n) for w, n in applied], [(w, n) for w, n in released], *rest)


@dataclass
class _Member:
    """A worker that trains.

    Attributes:
        clock: Steps that the worker has pushed.
        call: The worker's call that waits for its release; None: no call waits.
        push: The worker's push that isn't in an update yet; None: there is none.
    """

    clock: int
    call: Key | None = None
    push: Push | None = None


class Coordinator:
    """Decides for all servers and workers: see [Note: one order of updates]. Not for several threads at once.

    Args:
        mode: When gradients are applied, and which workers wait.
        workers: Numbers of the workers that will join; those that have joined wait for them.
        queue: The queue of batches; each batch is finished when its push is applied.
        version: Number of updates so far.
        saves_at_end: Whether to save the state when all workers have left, before they are answered.
    """

    def __init__(
        self, mode: Mode, workers: Iterable[int], queue: BatchQueue, *, version: int = 0, saves_at_end: bool = False
    ) -> None:
        self._mode, self._queue, self._saves_at_end = mode, queue, saves_at_end
        self._expected = set(workers)
        self._members: dict[int, _Member] = {}  # by worker, without workers that have left
        self._leaving: dict[int, Key] = {}  # the waiting call of each worker that has left
        self._has_left = False  # whether any worker has left; it may have been lost since
        self._lost: list[tuple[int, Batch]] = []  # batches that lost workers held
        self._number = 0
        self._failure = ""
        self.has_ended = False
        self.version = version
        self.staleness: dict[int, Counter[int]] = {}  # by worker

    def __repr__(self) -> str:
        return f"<Coordinator {self._mode.name}, {len(self._members)} workers, version {self.version}>"

    # ------------------------------------------------------------------ members

    @property
    def members(self) -> set[int]:
        """Numbers of the workers that train."""
        return set(self._members)

    @property
    def expected(self) -> set[int]:
        """Numbers of the workers that have not joined yet."""
        return set(self._expected)

    def join(self, worker: int) -> None:
        """Let a worker join.

        An expected worker begins at its first step: the others are ahead by at most the bound. A worker that joins
        later begins at the step of the slowest member, so it delays nobody more than that member does.
        """
        here = [0] if worker in self._expected else [member.clock for member in self._members.values()]
        self._expected.discard(worker)
        self._members[worker] = _Member(min(here, default=0))

    def lose(self, worker: int) -> list[Decision]:
        """Remove a worker whose process has ended. If it had not left, its batches go to others."""
        left, lost = self._leaving.pop(worker, None), self._members.pop(worker, None)
        if left is None and lost is None:
            return self.give_up([worker]) if worker in self._expected else []
        self._lost += [(worker, batch) for batch in self._queue.give_back(worker)]
        return [self._decide(gone=[worker]), *self._advance()]

    def give_up(self, workers: Iterable[int]) -> list[Decision]:
        """Stop waiting for workers that have never joined."""
        self._expected -= set(workers)
        return self._advance()

    def leave(self, key: Key, failure: str = "") -> list[Decision]:
        """Let a worker leave, without an error or with a failure that ends the run."""
        if self._members.pop(key[0], None) is not None:
            self._leaving[key[0]], self._has_left = key, True
        self._queue.give_back(key[0])
        return self.fail(failure) if failure else self._advance()

    def fail(self, failure: str) -> list[Decision]:
        """End the run, because it can't continue."""
        self._failure = self._failure or failure
        return self._advance()

    @property
    def untrained(self) -> list[tuple[int, Batch]]:
        """(worker, batch) for each batch that a lost worker held and that nobody has taken since."""
        return [each for each in self._lost if self._queue.is_returned(each[1])]

    def lagging(self) -> list[tuple[int, int]]:
        """Workers for which others may wait, with the steps that they have pushed."""
        here = [(worker, member.clock) for worker, member in self._members.items() if member.call is None]
        return sorted(here + [(worker, 0) for worker in self._expected])

    # ------------------------------------------------------------------ requests

    def pull(self, key: Key) -> list[Decision]:
        """Answer a worker's request for the present parameters."""
        return [] if self._failure else [self._decide(released=[key])]

    def push(self, key: Key, push: Push) -> list[Decision]:
        """Record a worker's push. All servers have its gradients."""
        member = self._members.get(key[0])
        if member is None or self._failure:
            return []
        member.clock += 1
        member.call, member.push = key, push
        applied = [] if self._mode.name == "sync" else self._apply([member])
        return [*applied, *self._advance()]

    def save(self, *, is_last: bool = False, stops: bool = False) -> list[Decision]:
        """Make all servers save their state, between the same two updates."""
        return [self._decide(saves=self._queue.state(), is_last=is_last, stops=stops)]

    # ------------------------------------------------------------------ decisions

    def _decide(self, **what: Any) -> Decision:
        self._number += 1
        return Decision(self._number, **what)

    def _advance(self) -> list[Decision]:
        if not (self._members or self._expected or self._has_left):
            self._failure = self._failure or "no worker is left"
        if self._failure:
            return [self._decide(failure=self._failure, has_ended=True)]
        decisions = []
        # In order of workers, so that the sum doesn't depend on the order of arrival.
        if not self._expected and all(member.push is not None for member in self._members.values()):
            decisions += self._apply([member for _, member in sorted(self._members.items())])
        released = self._release()
        if released:
            decisions.append(self._decide(released=released))
        if self._has_left and not (self._members or self._expected or self.has_ended):
            self.has_ended = True
            decisions += self.save(is_last=True) if self._saves_at_end else []
            decisions.append(self._decide(released=list(self._leaving.values()), has_ended=True))
        return decisions

    def _apply(self, members: Sequence[_Member]) -> list[Decision]:
        full = []
        for member in members:
            key, push = member.call, member.push
            assert key is not None
            assert push is not None
            member.push = None
            self._queue.finish(key[0], push.batches)
            if push.weight:
                full.append(key)
                self.staleness.setdefault(key[0], Counter())[self.version - push.version] += 1
        if not full:
            return []
        self.version += 1
        return [self._decide(applied=full)]

    def _release(self) -> list[Key]:
        clocks = [member.clock for member in self._members.values()] + [0] * len(self._expected)
        released = []
        for member in self._members.values():
            if member.call is None or member.push is not None:
                continue
            if self._mode.name != "bounded" or member.clock - min(clocks) <= self._mode.max_staleness:
                released.append(member.call)
                member.call = None
        return released
