"""Signals between the ranks of one node, counted in shared semaphores, and waiting for them.

Every rank signals to every other rank each time it passes a *phase* of a call. Signals of one phase are counted, so
waiting for "every rank has passed phase p n times" needs no reset and tolerates ranks that are ahead.

A wait spins for a moment, then sleeps on the semaphore of one missing rank. Asleep, it wakes forty times a second to
check whether a missing rank has died, has left, or is stopped.

[Note: memory ordering]

Data in the segment is written with plain stores and signalled with `sem_post`; it is read after `sem_trywait` or
`sem_clockwait` has taken that signal. POSIX makes these calls synchronise memory on every architecture, so the code
doesn't depend on the strong ordering of x86 and also runs on arm64. No flag is ever read with a plain load to decide
that data is there.
"""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import functools
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from evenstep.console import say
from evenstep.errors import CollectiveTimeoutError, PeerLostError
from evenstep.ground.compat.c_library.libc import c_library
from evenstep.ground.health import heartbeat
from evenstep.ground.health.phase_timeouts import PhaseTimeouts, describe, patience
from evenstep.transport.shm.peers import PeerWatch

# glibc's and musl's sem_t has 32 bytes. Each gets its own cache line, so that two ranks never compete for a line.
SEMAPHORE_BYTES = 64

_CLOCK_MONOTONIC = 1
_POLL_EVERY_S = 1.0  # between checks of missing ranks without waiting: with many ranks, a check takes a millisecond


class _TimeSpec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


# Calls that can't block keep the interpreter lock: releasing and acquiring it costs more than the call itself.
_quick = c_library(keeps_gil=True)
_slow = c_library()

sem_post = _quick.sem_post
sem_post.argtypes = [ctypes.c_void_p]
sem_trywait = _quick.sem_trywait
sem_trywait.argtypes = [ctypes.c_void_p]
_sem_init = _quick.sem_init
_sem_init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
# Prefer this: a deadline on the wall clock would move whenever that clock is set.
_HAS_CLOCKWAIT = hasattr(_slow, "sem_clockwait")
if _HAS_CLOCKWAIT:
    _sem_clockwait = _slow.sem_clockwait
    _sem_clockwait.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_TimeSpec)]
else:
    _sem_timedwait = _slow.sem_timedwait
    _sem_timedwait.argtypes = [ctypes.c_void_p, ctypes.POINTER(_TimeSpec)]


def make_semaphores(address: int, count: int) -> None:
    """Initialise `count` semaphores of value 0, one after the other from `address` on. One process does it."""
    for each in range(address, address + count * SEMAPHORE_BYTES, SEMAPHORE_BYTES):
        if _sem_init(each, 1, 0) != 0:
            raise OSError(f"sem_init refused a semaphore shared between processes at address {each:#x}")


def take(address: int, timeout_s: float) -> bool:
    """Take one count, sleeping up to `timeout_s` for it. Returns whether it was taken; may return False early."""
    now = time.monotonic() if _HAS_CLOCKWAIT else time.time()
    end_ns = int((now + timeout_s) * 1e9)
    until = _TimeSpec(end_ns // 1_000_000_000, end_ns % 1_000_000_000)
    if _HAS_CLOCKWAIT:
        return bool(_sem_clockwait(address, _CLOCK_MONOTONIC, ctypes.byref(until)) == 0)
    return bool(_sem_timedwait(address, ctypes.byref(until)) == 0)


class Phase(enum.IntEnum):
    """A point of a call that a rank signals when it has passed it."""

    ARRIVED = 0  # the rank's call has begun: the header, and the data of an eager call, can be read
    FILLED = 1  # the rank's next chunk of a chunked call can be read
    REDUCED = 2  # the rank has written its slice of the result and staged its next chunk; or has read its data
    FINISHED = 3  # the rank reads no more data of this call


@dataclass(frozen=True)
class WaitPolicy:
    """How a rank waits for others: how long it spins, when it checks the missing ranks, when it gives up.

    Attributes:
        timeout_s: Deadline of one wait.
        spin_s: The longest time to spin before sleeping.
        min_spin_s: The shortest time to spin.
        num_tries_before_yield: Number of tries before the core is yielded between tries.
        check_every_s: Time between two checks of the missing ranks during sleep.
        report_stopped_after_s: Time after which to report that a missing rank is stopped.
        report_missing_after_s: Time after which to report missing ranks, in any state.
    """

    timeout_s: float
    spin_s: float = 200e-6
    min_spin_s: float = 10e-6
    num_tries_before_yield: int = 20
    check_every_s: float = 0.025
    report_stopped_after_s: float = 2.0
    report_missing_after_s: float = 30.0


@dataclass
class Waiting:
    """The state of a wait.

    Attributes:
        since: Beginning of the wait (`time.monotonic`).
        is_reported: Whether the missing ranks have been reported.
        until: The extended deadline of a rank that was in a long phase, such as an evaluation (`time.monotonic`).
    """

    since: float
    is_reported: bool = False
    until: float = 0.0


def plan_waiting(num_threads: int, *, num_cores: int, timeout_s: float) -> WaitPolicy:
    """Plan to spin if every thread has its own core; else to yield at once, and soon sleep. Pure.

    Args:
        num_threads: Number of threads of all ranks together.
        num_cores: Number of cores that all ranks together may use.
        timeout_s: Deadline for peers to arrive.
    """
    if num_threads <= num_cores:
        return WaitPolicy(timeout_s=timeout_s)
    return WaitPolicy(timeout_s=timeout_s, spin_s=50e-6, num_tries_before_yield=0)


def adapt_spin(spin_s: float, waited_s: float, policy: WaitPolicy) -> float:
    """Time to spin in the next wait: longer if spinning was enough this time, shorter if it wasn't. Pure.

    If cores are shared (more ranks than cores, a busy machine) waits are long, so spinning becomes short.

    Args:
        spin_s: Time to spin in this wait.
        waited_s: Length of this wait.
        policy: The limits.
    """
    if waited_s <= policy.spin_s:
        return min(policy.spin_s, spin_s * 2)
    return max(policy.min_spin_s, spin_s / 2)


def spin(is_over: Callable[[], bool], until: float, policy: WaitPolicy) -> bool:
    """Poll a condition until a time (`time.monotonic`). Returns whether it has become true."""
    num_tries = 0
    while not is_over():
        if time.monotonic() >= until:
            return False
        num_tries += 1
        if num_tries > policy.num_tries_before_yield:
            os.sched_yield()
    return True


def num_semaphores(world_size: int) -> int:
    """Number of semaphores that the ranks of one group need. Pure.

    For each ordered pair of ranks: one per phase, and two for their lane (`lanes`). And a doorbell for each rank.
    """
    return (len(Phase) + 2) * world_size * world_size + world_size


def lane_semaphores(address: int, world_size: int, sender: int, receiver: int) -> tuple[int, int]:
    """The addresses of a lane's semaphores: counts of written records, and of read records. Pure."""
    first = len(Phase) * world_size * world_size + 2 * (sender * world_size + receiver)
    return address + SEMAPHORE_BYTES * first, address + SEMAPHORE_BYTES * (first + 1)


def doorbell(address: int, world_size: int, rank: int) -> int:
    """The address of the semaphore on which a rank sleeps while it waits for messages. Pure."""
    return address + SEMAPHORE_BYTES * ((len(Phase) + 2) * world_size * world_size + rank)


class ProgressCounters:
    """Counts this rank's signals and the other ranks' signals by phase, and waits for the latter.

    Args:
        address: Address of the first semaphore, in this process.
        rank: This rank.
        watch: The ranks' processes.
        policy: How to wait.
        has_left: Returns whether a rank has failed, or closed its transport.
        known_as: The ranks' numbers in messages.

    Attributes:
        policy: How to wait.
        known_as: The ranks' numbers in messages.
        watch: The ranks' processes.
        has_left: Returns whether a rank has failed, or closed its transport.
        num_signals: Number of times that this rank has passed each phase.
    """

    def __init__(
        self,
        address: int,
        *,
        rank: int,
        watch: PeerWatch,
        policy: WaitPolicy,
        has_left: Callable[[int], bool],
        known_as: Sequence[int],
    ) -> None:
        self.policy = policy
        self.known_as = known_as
        world_size = len(known_as)
        self._rank = rank
        self.watch = watch
        self.has_left = has_left
        self._others = others = [peer for peer in range(world_size) if peer != rank]

        def address_of(phase: Phase, sender: int, receiver: int) -> int:
            return address + SEMAPHORE_BYTES * ((phase * world_size + receiver) * world_size + sender)

        self._outgoing = [[address_of(phase, rank, peer) for peer in others] for phase in Phase]
        self._incoming = [[(peer, address_of(phase, peer, rank)) for peer in others] for phase in Phase]
        self._seen = [[0] * world_size for _ in Phase]
        self.num_signals = [0] * len(Phase)
        self._spin_s = policy.spin_s
        self._waits_for: tuple[Phase, int] | None = None  # phase and count of the last wait
        self._waiting = Waiting(0.0)
        self._next_poll = 0.0

    def set_timeout(self, timeout_s: float) -> None:
        """Set the deadline of waits, including waits that have begun."""
        self.policy = dataclasses.replace(self.policy, timeout_s=timeout_s)

    def signal(self, phase: Phase) -> int:
        """Signal that this rank has passed `phase` once more; return its number of passes."""
        for semaphore in self._outgoing[phase]:
            sem_post(semaphore)
        self.num_signals[phase] += 1
        return self.num_signals[phase]

    def all_here(self, phase: Phase, count: int) -> bool:
        """Whether every other rank has passed `phase` at least `count` times. Never blocks."""
        seen = self._seen[phase]
        is_complete = True
        for peer, semaphore in self._incoming[phase]:
            while seen[peer] < count:
                if sem_trywait(semaphore) != 0:
                    is_complete = False
                    break
                seen[peer] += 1
        return is_complete

    def wait(
        self,
        phase: Phase,
        count: int,
        what: Callable[[], str],
        until: float = math.inf,
        meanwhile: Callable[[], object] | None = None,
    ) -> bool:
        """Wait until every other rank has passed `phase` at least `count` times, or until the time `until`.

        Args:
            phase: The phase.
            count: The number of times that the others must have passed it.
            what: Describes the call, for errors.
            until: The latest time to return (`time.monotonic`). The policy's deadline, at which this raises, is counted
                from the first wait for the same phase and count.
            meanwhile: Called whenever the missing ranks are checked during sleep.

        Returns:
            Whether all have passed.

        Raises:
            PeerLostError: A missing rank has died or left.
            CollectiveTimeoutError: The policy's deadline passed.
        """
        if self.all_here(phase, count):
            return True
        started = time.monotonic()
        if not spin(functools.partial(self.all_here, phase, count), started + self._spin_s, self.policy):
            if self._waits_for != (phase, count):
                self._waits_for, self._waiting = (phase, count), Waiting(started)
            with heartbeat.waiting():
                if not self._sleep(phase, count, what, until, meanwhile):
                    return False
        self._spin_s = adapt_spin(self._spin_s, time.monotonic() - started, self.policy)
        return True

    def look_for_lost(self, phase: Phase, count: int, what: Callable[[], str]) -> None:
        """Raise if a rank that has passed `phase` fewer than `count` times is lost. Checks at most once a second.

        For a caller that doesn't wait; the deadline is only for callers that wait.

        Raises:
            PeerLostError: A missing rank has died or left.
        """
        now = time.monotonic()
        if now < self._next_poll:
            return
        self._next_poll = now + _POLL_EVERY_S
        self.check(Waiting(now), self.missing(phase, count), what, lambda: self._still_missing(phase, count))

    def _sleep(
        self,
        phase: Phase,
        count: int,
        what: Callable[[], str],
        until: float,
        meanwhile: Callable[[], object] | None,
    ) -> bool:
        while not self.all_here(phase, count):
            peer, semaphore = next(each for each in self._incoming[phase] if self._seen[phase][each[0]] < count)
            now = time.monotonic()
            if now >= until:
                return False
            if take(semaphore, min(self.policy.check_every_s, until - now)):
                self._seen[phase][peer] += 1
                continue
            if meanwhile is not None:
                meanwhile()
            if self.has_left(self._rank):  # another thread has closed this transport, and waits for this thread
                raise PeerLostError(f"{self._named(self._rank)} has closed its end in {what()}.")
            self.check(self._waiting, self.missing(phase, count), what, lambda: self._still_missing(phase, count))
        return True

    def missing(self, phase: Phase, count: int) -> list[int]:
        """The ranks that have passed `phase` fewer than `count` times, by the signals taken so far."""
        return [peer for peer in self._others if self._seen[phase][peer] < count]

    def _still_missing(self, phase: Phase, count: int) -> list[int]:
        """Like `missing`, after taking new signals."""
        self.all_here(phase, count)
        return self.missing(phase, count)

    def check(
        self,
        waiting: Waiting,
        missing: Sequence[int],
        what: Callable[[], str],
        still_missing: Callable[[], Sequence[int]],
    ) -> None:
        """Raise if one of these ranks is lost or too late; report once that they are missing.

        Args:
            waiting: The state of the wait for these ranks.
            missing: The ranks.
            what: Describes the call that waits for them, for errors.
            still_missing: Returns the ranks that are still missing. Called before anything is raised: a lost rank may
                have sent its signal just before it ended, and late ranks may just have sent theirs.
        """
        now = time.monotonic()
        waited_s = now - waiting.since
        lost = [rank for rank in missing if self.has_left(rank) or self.watch.is_gone(rank)]
        if lost:
            again = still_missing()
            lost = [rank for rank in lost if rank in again]
        if lost:
            raise PeerLostError(
                f"{self._named(self._rank)} lost {self._described(lost)} in {what()}. If that rank raised an error, it "
                f"is in that rank's output."
            )
        if waited_s > self.policy.timeout_s:
            patience_s = self._patience(missing)
            if waited_s <= patience_s:
                waiting.until = now + self.policy.timeout_s
            elif now > waiting.until and (again := still_missing()):
                raise CollectiveTimeoutError(self.late(again, what(), waited_s, patience_s))
        if not waiting.is_reported and waited_s > self.policy.report_stopped_after_s:
            waiting.is_reported = self._report(missing, what, waited_s)

    def _patience(self, missing: Sequence[int]) -> float:
        """Seconds to wait for ranks that evaluate, compile or save, according to their heartbeat pages."""
        timeouts = PhaseTimeouts.of_this_run(self.policy.timeout_s)
        pages = [self.watch.seen(rank) for rank in missing]
        # A rank that waits for others is in another call, so it isn't in a long phase.
        known = (self.policy.timeout_s if p is None or p.is_waiting else timeouts.of(p) for p in pages)
        return min(known, default=0.0)

    def _described(self, ranks: Sequence[int]) -> str:
        """Describe lost ranks, for an error."""
        left = [r for r in ranks if self.has_left(r)]
        # The rank that gave up may have lost a peer for which this rank isn't waiting. If any rank is dead, name that
        # one.
        dead = [r for r in (self._others if left else ranks) if self.watch.is_gone(r)]
        state = "whose process has ended" if dead else "which has given up or closed its end"
        return ", and ".join(f"{self._named(r)} ({self._pid(r)}), {state}" for r in dead or left)

    def late(self, missing: Sequence[int], what: str, waited_s: float, timeout_s: float) -> str:
        """The message for a rank that has waited too long for some ranks."""
        names = ", ".join(
            f"{self._named(r)} ({self._pid(r)}{', stopped' if self.watch.is_stopped(r) else ''}{self._where(r)})"
            for r in missing
        )
        missed = f" Missing: {names}." if names else ""
        return (
            f"{self._named(self._rank)} waited {waited_s:.1f} s in {what}.{missed} "
            f"Check what they are doing, or allow more than timeout_s={timeout_s:g}."
        )

    def _named(self, rank: int) -> str:
        return f"rank {self.known_as[rank]}"

    def _pid(self, rank: int) -> str:
        return f"pid {self.watch.pid(rank)}"

    def _where(self, rank: int) -> str:
        seen = self.watch.seen(rank)
        return "" if seen is None else f", {describe(seen)}"

    def _report(self, missing: Sequence[int], what: Callable[[], str], waited_s: float) -> bool:
        """Report the missing ranks if it is time to; return whether they were reported."""
        stopped = [rank for rank in missing if self.watch.is_stopped(rank)]
        pages = [self.watch.seen(rank) for rank in missing]
        longest = min((1.0 if p is None or p.is_waiting else patience(p) for p in pages), default=1.0)
        if not stopped and waited_s <= self.policy.report_missing_after_s * longest:
            return False
        names = ", ".join(f"{self._named(r)} ({self._pid(r)}{self._where(r)})" for r in stopped or missing)
        verb = "is" if len(stopped or missing) == 1 else "are"
        state = "stopped (state T). Continue with SIGCONT" if stopped else "not there. Check what they are doing"
        say(
            f"evenstep: {self._named(self._rank)} has waited {waited_s:.1f} s in {what()}: {names} {verb} {state}; "
            f"waiting up to {self.policy.timeout_s:g} s."
        )
        return True
