"""When a bucket may travel: a state machine that decides and returns actions. It touches no tensor.

    FILLING ──complete──> READY ──launch──> REDUCING ──arrive──> REDUCED ──reset──> FILLING

Buckets are launched in order of their index on every rank, because collectives are matched by order: a bucket that
is complete before its turn stays READY until those before it have been launched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto


class BucketState(Enum):
    """Where a bucket stands within one synchronised backward pass."""

    FILLING = auto()  # gradients are still to come
    READY = auto()  # all gradients are there; waits for its turn
    REDUCING = auto()  # in flight
    REDUCED = auto()  # holds the sum over ranks


class Event(Enum):
    """What happens to a bucket."""

    COMPLETE = auto()
    LAUNCH = auto()
    ARRIVE = auto()
    RESET = auto()


_TRANSITIONS = {
    (BucketState.FILLING, Event.COMPLETE): BucketState.READY,
    (BucketState.READY, Event.LAUNCH): BucketState.REDUCING,
    (BucketState.REDUCING, Event.ARRIVE): BucketState.REDUCED,
    (BucketState.REDUCED, Event.RESET): BucketState.FILLING,
    (BucketState.FILLING, Event.RESET): BucketState.FILLING,
}


class ReducerStateError(AssertionError):
    """An event that the table of transitions doesn't know: a bug of evenstep's own."""


@dataclass(frozen=True)
class LaunchReduce:
    """Send this bucket now."""

    bucket: int


class Reducer:
    """Follows the buckets through one backward pass after another and says which to launch.

    Args:
        num_buckets: How many there are.
        keeps_last: Launch the last one when the pass has ended: something is to travel with it.
    """

    def __init__(self, num_buckets: int, *, keeps_last: bool = False) -> None:
        self._num_early = num_buckets - keeps_last
        self._states = [BucketState.FILLING] * num_buckets
        self._next_launch = 0

    def complete(self, bucket: int) -> Sequence[LaunchReduce]:
        """A bucket has all its gradients. Returns what can be launched now, in order."""
        self._move(bucket, Event.COMPLETE)
        return self._launchable(self._num_early)

    def finish(self) -> Sequence[LaunchReduce]:
        """The backward pass has ended: what has no gradient now was not used. Returns the rest of the launches."""
        for bucket, state in enumerate(self._states):
            if state is BucketState.FILLING:
                self._move(bucket, Event.COMPLETE)
        return self._launchable(len(self._states))

    def arrived(self, bucket: int) -> None:
        """A bucket holds the sum over ranks."""
        self._move(bucket, Event.ARRIVE)

    def reset(self) -> None:
        """Be ready for the next synchronised backward pass."""
        for bucket in range(len(self._states)):
            self._move(bucket, Event.RESET)
        self._next_launch = 0

    def state(self, bucket: int) -> BucketState:
        """Where a bucket stands."""
        return self._states[bucket]

    def _launchable(self, end: int) -> list[LaunchReduce]:
        actions = []
        while self._next_launch < end and self._states[self._next_launch] is BucketState.READY:
            self._move(self._next_launch, Event.LAUNCH)
            actions.append(LaunchReduce(self._next_launch))
            self._next_launch += 1
        return actions

    def _move(self, bucket: int, event: Event) -> None:
        state = self._states[bucket]
        try:
            self._states[bucket] = _TRANSITIONS[state, event]
        except KeyError:
            raise ReducerStateError(f"bucket {bucket}: {event.name} while {state.name}") from None

    def __repr__(self) -> str:
        states = " ".join(state.name for state in self._states)
        return f"<Reducer next {self._next_launch}/{len(self._states)}: {states}>"
