"""Who has come how far: announcements between ranks of one host, and waiting for them.

Every rank announces to every other that it has passed a *phase* once more. Announcements of one phase are counted, so
waiting for "everybody has passed phase p n times" needs no reset and tolerates ranks that are ahead.

A wait spins for a moment, then sleeps on the semaphore of one missing rank. Asleep, it wakes forty times a second to
look whether a missing rank has died, has left, or is stopped.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from evenstep.errors import CollectiveTimeoutError, PeerLostError
from evenstep.health import page
from evenstep.health.budgets import Budgets, describe, patience
from evenstep.transport.peers import PeerWatch
from evenstep.transport.semaphores import SEMAPHORE_BYTES, sem_post, sem_trywait, take


class Phase(enum.IntEnum):
    """What a rank announces."""

    ARRIVED = 0  # its call has begun: the header, and the data of a small call, can be read
    FILLED = 1  # its next piece of a call in pieces can be read
    REDUCED = 2  # it has written its slice of the result, or read what it needed of others' tensors
    FINISHED = 3  # it reads nothing more of this call


@dataclass(frozen=True)
class WaitPolicy:
    """How to wait.

    Attributes:
        timeout_s: Deadline of one wait.
        spin_s: How long to spin at most before sleeping.
        min_spin_s: How long to spin at least.
        num_eager_tries: How often to look before the core is offered to others between two looks.
        look_every_s: Asleep, how often to look at the missing ranks.
        report_stopped_after_s: When to tell that a missing rank is stopped.
        report_missing_after_s: When to tell who is missing, whatever it does.
    """

    timeout_s: float
    spin_s: float = 200e-6
    min_spin_s: float = 10e-6
    num_eager_tries: int = 20
    look_every_s: float = 0.025
    report_stopped_after_s: float = 2.0
    report_missing_after_s: float = 30.0


def plan_waiting(num_threads: int, *, timeout_s: float, num_cores: int | None = None) -> WaitPolicy:
    """Spin where every thread has a core of its own; else let the others run at once, and soon sleep.

    Args:
        num_threads: Of all ranks together.
        timeout_s: Deadline for peers to arrive.
        num_cores: That they share; None: those that this process may use.
    """
    if num_threads <= (num_cores or len(os.sched_getaffinity(0))):
        return WaitPolicy(timeout_s=timeout_s)
    return WaitPolicy(timeout_s=timeout_s, spin_s=50e-6, num_eager_tries=0)


def adapt_spin(spin_s: float, waited_s: float, policy: WaitPolicy) -> float:
    """How long to spin next time: longer where spinning would have met the others, shorter where it was in vain. Pure.

    A core that others need as well (more ranks than cores, a busy machine) makes waits long, and so spinning rare.

    Args:
        spin_s: How long to spin this time.
        waited_s: How long this wait took.
        policy: The limits.
    """
    if waited_s <= policy.spin_s:
        return min(policy.spin_s, spin_s * 2)
    return max(policy.min_spin_s, spin_s / 2)


def num_semaphores(world_size: int) -> int:
    """How many semaphores the ranks of one group need. Pure."""
    return len(Phase) * world_size * world_size


class Arrivals:
    """This rank's end of the announcements.

    Args:
        address: Of the first semaphore, in this process.
        rank: This rank.
        world_size: Number of ranks.
        watch: The other ranks' processes.
        policy: How to wait.
        has_left: Whether a rank has given up, or closed its end.

    Attributes:
        policy: How to wait.
        known_as: The ranks' numbers in messages.
    """

    def __init__(
        self,
        address: int,
        *,
        rank: int,
        world_size: int,
        watch: PeerWatch,
        policy: WaitPolicy,
        has_left: Callable[[int], bool],
    ) -> None:
        self.policy = policy
        self.known_as: Sequence[int] = range(world_size)
        self._rank = rank
        self._watch = watch
        self._has_left = has_left
        self._others = others = [peer for peer in range(world_size) if peer != rank]

        def place(phase: Phase, sender: int, receiver: int) -> int:
            return address + SEMAPHORE_BYTES * ((phase * world_size + receiver) * world_size + sender)

        self._outgoing = [[place(phase, rank, peer) for peer in others] for phase in Phase]
        self._incoming = [[(peer, place(phase, peer, rank)) for peer in others] for phase in Phase]
        self._peer_of = {semaphore: peer for incoming in self._incoming for peer, semaphore in incoming}
        self._seen = [[0] * world_size for _ in Phase]
        self._announced = [0] * len(Phase)
        self._spin_s = policy.spin_s

    def pid(self, rank: int) -> int:
        """The process of a rank, also of this one."""
        return os.getpid() if rank == self._rank else self._watch.pid(rank)

    def set_timeout(self, timeout_s: float) -> None:
        """From now on wait so long at most, also where somebody is waiting already."""
        self.policy = dataclasses.replace(self.policy, timeout_s=timeout_s)

    def announce(self, phase: Phase) -> int:
        """Tell everybody that this rank has passed `phase` once more; returns how often by now."""
        for semaphore in self._outgoing[phase]:
            sem_post(semaphore)
        self._announced[phase] += 1
        return self._announced[phase]

    def announced(self, phase: Phase) -> int:
        """How often this rank has passed `phase`."""
        return self._announced[phase]

    def all_here(self, phase: Phase, count: int) -> bool:
        """Whether every other rank has passed `phase` at least `count` times. Never blocks."""
        seen = self._seen[phase]
        everybody = True
        for peer, semaphore in self._incoming[phase]:
            while seen[peer] < count:
                if sem_trywait(semaphore) != 0:
                    everybody = False
                    break
                seen[peer] += 1
        return everybody

    def wait(self, phase: Phase, count: int, what: Callable[[], str], timeout_s: float | None = None) -> None:
        """Return when every other rank has passed `phase` at least `count` times.

        Args:
            phase: What is waited for.
            count: How often.
            what: Describes the call, for errors.
            timeout_s: Deadline; None: the policy's.

        Raises:
            PeerLostError: A missing rank has died or left.
            CollectiveTimeoutError: The deadline passed.
        """
        if self.all_here(phase, count):
            return
        started = now = time.monotonic()
        end_of_spin = started + self._spin_s
        num_tries = 0
        while now < end_of_spin:
            num_tries += 1
            if num_tries > self.policy.num_eager_tries:
                os.sched_yield()
            if self.all_here(phase, count):
                break
            now = time.monotonic()
        else:
            page.mark_waiting(True)
            try:
                self._sleep(phase, count, what, started, timeout_s)
            finally:
                page.mark_waiting(False)
            now = time.monotonic()
        self._spin_s = adapt_spin(self._spin_s, now - started, self.policy)

    def missing_semaphore(self, phase: Phase, count: int) -> int | None:
        """The semaphore that a rank which has not yet passed `phase` so often will post; None if all have."""
        if self.all_here(phase, count):
            return None
        return next(semaphore for peer, semaphore in self._incoming[phase] if self._seen[phase][peer] < count)

    def check_missing(
        self, phase: Phase, count: int, what: Callable[[], str], waited_s: float, timeout_s: float | None = None
    ) -> None:
        """Raise if a rank that has not yet passed `phase` so often is lost, or has been waited for too long.

        Raises:
            PeerLostError: A missing rank has died or left.
            CollectiveTimeoutError: The deadline passed.
        """
        missing = [p for p, _ in self._incoming[phase] if self._seen[phase][p] < count]
        lost = self._lost(missing)
        # It may have announced its part just before it ended: then nothing is lost yet.
        if lost and not self.all_here(phase, count):
            raise PeerLostError(
                f"{self._named(self._rank)} lost {lost} in {what()}. Its own error, if it had one, is elsewhere."
            )
        if timeout_s is None:
            timeout_s = self._patience(missing) if waited_s > self.policy.timeout_s else self.policy.timeout_s
        if waited_s > timeout_s and not self.all_here(phase, count):
            raise CollectiveTimeoutError(self._too_late(missing, what(), waited_s, timeout_s))

    def _sleep(
        self, phase: Phase, count: int, what: Callable[[], str], started: float, timeout_s: float | None
    ) -> None:
        reported = False
        while (semaphore := self.missing_semaphore(phase, count)) is not None:
            if take(semaphore, self.policy.look_every_s):
                self._seen[phase][self._peer_of[semaphore]] += 1
                continue
            if self._has_left(self._rank):  # another thread has closed this end: it waits for this one
                raise PeerLostError(f"{self._named(self._rank)} has closed its end in {what()}.")
            waited_s = time.monotonic() - started
            self.check_missing(phase, count, what, waited_s, timeout_s)
            if not reported and waited_s > self.policy.report_stopped_after_s:
                missing = [p for p, _ in self._incoming[phase] if self._seen[phase][p] < count]
                reported = self._report(missing, what, waited_s)

    def _patience(self, missing: list[int]) -> float:
        """How long to wait for ranks that evaluate, compile or save, if their pages say that they do."""
        budgets = Budgets.of_this_run(self.policy.timeout_s)
        pages = [self._watch.seen(rank) for rank in missing]
        # Who waits itself, and for others, is in another call: nothing long goes on there.
        known = (self.policy.timeout_s if p is None or p.is_waiting else budgets.of(p) for p in pages)
        return min(known, default=0.0)

    def _lost(self, ranks: list[int]) -> str:
        """Whom of these ranks nobody has to wait for any more; "" if there is none."""
        left = [r for r in ranks if self._has_left(r)]
        # Who has given up had a reason, which may be the death of somebody who isn't missing here.
        dead = [r for r in (self._others if left else ranks) if self._watch.is_gone(r)]
        how = "whose process has ended" if dead else "which has given up or closed its end"
        return ", and ".join(f"{self._named(r)} ({self._pid(r)}), {how}" for r in dead or left)

    def _too_late(self, missing: list[int], what: str, waited_s: float, timeout_s: float) -> str:
        names = ", ".join(
            f"{self._named(r)} ({self._pid(r)}{', stopped' if self._watch.is_stopped(r) else ''}{self._where(r)})"
            for r in missing
        )
        return (
            f"{self._named(self._rank)} waited {waited_s:.1f} s in {what}. Missing: {names}. "
            f"Look what they are doing, or allow more than timeout_s={timeout_s:g}."
        )

    def _named(self, rank: int) -> str:
        return f"rank {self.known_as[rank]}"

    def _pid(self, rank: int) -> str:
        return f"pid {self._watch.pid(rank)}"

    def _where(self, rank: int) -> str:
        seen = self._watch.seen(rank)
        return "" if seen is None else f", {describe(seen)}"

    def _report(self, missing: list[int], what: Callable[[], str], waited_s: float) -> bool:
        """Say who is missing, if that is worth saying by now; returns whether it was."""
        stopped = [rank for rank in missing if self._watch.is_stopped(rank)]
        pages = [self._watch.seen(rank) for rank in missing]
        longest = min((1.0 if p is None or p.is_waiting else patience(p) for p in pages), default=1.0)
        if not stopped and waited_s <= self.policy.report_missing_after_s * longest:
            return False
        names = ", ".join(f"{self._named(r)} ({self._pid(r)}{self._where(r)})" for r in stopped or missing)
        verb = "is" if len(stopped or missing) == 1 else "are"
        state = "stopped (state T). Continue with SIGCONT" if stopped else "not there. Look what they are doing"
        print(  # noqa: T201
            f"evenstep: {self._named(self._rank)} has waited {waited_s:.1f} s in {what()}: {names} {verb} {state}; "
            f"waiting up to {self.policy.timeout_s:g} s.",
            file=sys.stderr,
            flush=True,
        )
        return True
