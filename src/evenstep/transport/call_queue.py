"""The calls of one rank over shared memory: launched in order, gone on with, ended or failed.

[Note: who does the work]

The ranks themselves, in the thread that waits. A call announces itself when it is launched; its reduction is done in
`Work.wait()`, or earlier when a later call is launched and everybody has arrived. A thread of its own would compete
with the backward pass for the same core. So that a rank which waits for something else first can't hold the others
up for ever, a helper (`helper.py`) takes over calls that nobody has waited for within some hundredths of a second.
Who asks to be told of the end of a call (`when_done`) needn't wait at all: then a thread of this transport
(`progress.py`) sees to it at once.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from evenstep.errors import EvenstepError, PeerLostError, UsageError
from evenstep.health import page
from evenstep.transport.arguments import Arguments, Fingerprints
from evenstep.transport.arrivals import Arrivals, Phase, WaitPolicy
from evenstep.transport.base import Op
from evenstep.transport.call import Call
from evenstep.transport.codec import to_tensor
from evenstep.transport.collectives import Exchange
from evenstep.transport.header import REFUSED, pack_text
from evenstep.transport.helper import helper
from evenstep.transport.peers import PeerProcess, PeerWatch
from evenstep.transport.personal import ALL_PROGRAMS
from evenstep.transport.progress import LOOK_AGAIN, Progress, Waiting
from evenstep.transport.segment import MAX_BESIDE_BYTES, NUM_SLOTS, SMALL_BYTES, Segment
from evenstep.transport.shared_work import SharedWork

_set_grad_enabled = torch._C._set_grad_enabled  # `torch.no_grad` costs microseconds


class CallQueue:
    """See above. `SharedMemoryTransport` says which calls there are; it is a base class so that a call costs no more.

    Args:
        segment: The shared segment, in which all ranks have signed.
        processes: The rank processes, in order of rank.
        rank: This rank.
        policy: How to wait for peers, and until when.

    Attributes:
        arrivals: Who has come how far, and how long is waited for them.
    """

    name = "shared memory"

    def __init__(self, segment: Segment, processes: Sequence[PeerProcess], *, rank: int, policy: WaitPolicy) -> None:
        self.rank = rank
        self.world_size = len(processes)
        self._segment = segment
        self._arguments = Arguments(self.name, rank, self.world_size, refused=weakref.WeakMethod(self.refuse))
        self._watch = PeerWatch([each for each in processes if each.rank != rank])
        self.arrivals = Arrivals(
            segment.common.address + segment.layout.semaphores,
            rank=rank,
            world_size=self.world_size,
            watch=self._watch,
            policy=policy,
            has_left=segment.has_left,
        )
        self._exchange = Exchange(
            segment, self.arrivals, ALL_PROGRAMS, rank=rank, world_size=self.world_size, name=self.name
        )
        self._lock = threading.RLock()
        self._queue: collections.deque[SharedWork] = collections.deque()
        self._to_tell: collections.deque[Callable[[], object]] = collections.deque()
        self._progress = Progress(self.progress, policy.look_every_s, keep=segment)
        self._waiting = Waiting()
        self._fingerprints = Fingerprints(self._arguments)
        self._known_as = rank
        self._begun: bytes | None = None  # what the next call is compared as
        self._beside: Tensor | None = None  # what travels with the next call
        self._num_calls = 0
        self._failure: EvenstepError | None = None
        self._is_closed = False
        helper.register(self)

    # ------------------------------------------------------------------ what is called, and for whom

    def announce(self, collective: str, text: bytes = b"") -> SharedWork:
        """Have the ranks compare a call that something else carries. The work is done when all make the same one.

        Args:
            collective: One of `header.COLLECTIVES`.
            text: What comes with it, for those that have one (`header.pack_text`).
        """
        nothing = to_tensor(text) if text else torch.empty(0, device="cpu")
        return self._launch(collective, nothing, nothing, nothing)

    def refuse(self, reason: str) -> None:
        """Tell the others that this rank doesn't make its next call; they'd wait for it. Nothing, where all refuse."""
        with contextlib.suppress(EvenstepError):  # of a transport that has failed, or been closed, they know
            self.announce(REFUSED, pack_text(reason))

    def serve(self, known_as: Sequence[int]) -> None:
        """From now on the ranks are named so in messages: by the numbers they have in a larger world."""
        self.arrivals.known_as, self._known_as = known_as, known_as[self.rank]

    def begin(self, number: int, name: str, packed: bytes) -> None:
        """What follows is made for a call over another transport: the ranks compare that, in the first call from now.

        Args:
            number: Of that call.
            name: Of that transport.
            packed: That call's fingerprint.
        """
        self._exchange.part_of, self._begun = (number, name), packed

    def take_along(self, numbers: Tensor) -> None:
        """Have the next call add these over the ranks, too; they are there when that call has ended.

        One meeting of the ranks instead of two. Every rank does so before the same call.

        Args:
            numbers: [n], contiguous, not more than `MAX_BESIDE_BYTES`.
        """
        assert numbers.nbytes <= MAX_BESIDE_BYTES, numbers.shape
        self._beside = numbers

    # ------------------------------------------------------------------ launching

    def _launch(
        self,
        collective: str,
        tensor: Tensor,
        flat: Tensor,
        out: Tensor,
        *,
        op: Op | None = None,
        source: int = -1,
        receiver: int = -1,
        splits: Tensor | None = None,
        back: tuple[Tensor, Tensor] | None = None,
    ) -> SharedWork:
        if back is not None:
            self._arguments.check_written(collective, back[0])
        beside, self._beside = self._beside, None
        num_beside = 0 if beside is None else beside.numel()
        packed = self._fingerprints[collective, op, tensor.dtype, tensor.shape, source, receiver, num_beside]
        try:
            address = flat.data_ptr()
        except RuntimeError:
            self._arguments.refuse_without_memory(collective)
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._begun is not None:
                packed, self._begun = self._begun, None
            place = self._exchange.arena.locate(address, flat.nbytes) if flat.nbytes > SMALL_BYTES else None
            call = Call(
                self._num_calls, collective, op, source, flat, address, out, packed, place, receiver, splits, beside
            )
            self._num_calls += 1
            page.mark_collective(self._num_calls)
            work = SharedWork(self, call, back)
            self._queue.append(work)
            self._arrive()
            if len(self._queue) > 1:
                self._advance()
        if self._to_tell:
            self._tell_ended()
        if helper.is_asleep:
            helper.wake()
        return work

    def _arrive(self) -> None:
        """Announce the calls that are launched, in order, as far as there are slots."""
        for work in self._queue:
            if not work.has_arrived:
                if not self._exchange.has_slot(work._call.number):
                    return
                self._exchange.arrive(work._call)
                work.has_arrived = True

    # ------------------------------------------------------------------ going on

    def _finish(self, work: SharedWork, timeout_s: float | None) -> None:
        """Run programs, waiting where they wait, until this call is done."""
        try:
            with self._lock:
                while not work.is_done:
                    if self._failure is not None:
                        raise self._failure
                    self._step(self._queue[0], blocking=True, timeout_s=timeout_s)
        finally:
            if self._to_tell:
                self._tell_ended()

    def _look(self, work: SharedWork) -> bool:
        """Go on without waiting; whether the call is done."""
        if self._lock.acquire(blocking=False):
            try:
                if self._failure is None:
                    self._advance()
            finally:
                self._lock.release()
        if self._to_tell:
            self._tell_ended()
        return work.is_done or self._failure is not None

    def _advance(self) -> bool:
        """Go on as far as nobody has to be waited for; whether anything could be done."""
        any_step = False
        while self._queue and self._failure is None and self._step(self._queue[0], blocking=False):
            any_step = True
        return any_step

    def help(self) -> tuple[bool, bool]:
        """What the helper calls: see `Helped.help`."""
        if not self._queue or not self._lock.acquire(blocking=False):
            return False, False
        try:
            moved = not self._is_closed and self._advance()
            return bool(self._queue), moved
        finally:
            self._lock.release()
            self._tell_ended()

    def _step(self, work: SharedWork, *, blocking: bool, timeout_s: float | None = None) -> bool:
        """Run the program of the first call to its next meeting; whether that was possible."""
        if torch.is_grad_enabled():
            # Torch may have hung a gradient's history on a result since the call was launched (the functional
            # collectives do): what is written here would be recorded in it, or refused.
            _set_grad_enabled(False)
            try:
                return self._step(work, blocking=blocking, timeout_s=timeout_s)
            finally:
                _set_grad_enabled(True)
        if work.is_inference and not torch.is_inference_mode_enabled():
            with torch.inference_mode():
                return self._step(work, blocking=blocking, timeout_s=timeout_s)
        exchange = self._exchange
        phase, count = work._waits_for
        try:
            if not work.has_arrived:
                if blocking:
                    earlier = work._call.number - NUM_SLOTS + 1
                    exchange.arrivals.wait(
                        Phase.FINISHED, earlier, lambda: f"{self.name} collective {work._call}", timeout_s
                    )
                self._arrive()
                if not work.has_arrived:
                    return False
            if blocking:
                exchange.arrivals.wait(phase, count, lambda: f"{self.name} collective {work._call}", timeout_s)
            elif not exchange.arrivals.all_here(phase, count):
                return False
            following = None
            if work._call.is_small:
                exchange.run_small(work._call)
            else:
                if work._program is None:
                    work._program = exchange.program(work._call)
                following = next(work._program, None)
        except BaseException as error:
            self._fail(error)
            if blocking or not isinstance(error, EvenstepError):
                raise
            return False
        if following is not None:
            work._waits_for = following
            return True
        if work._back is not None:
            work._back[0].copy_(work._back[1])
        work.is_done = True
        work._program = None
        self._queue.popleft()
        if work._told is not None:
            self._to_tell.append(functools.partial(work._told, None))
            work._told = None
        if self._queue:
            self._arrive()
        return True

    # ------------------------------------------------------------------ telling

    def _tell(self, work: SharedWork, told: Callable[[EvenstepError | None], object]) -> None:
        with self._lock:
            if not work.is_done and self._failure is None:
                self._advance()
            is_open = not work.is_done and self._failure is None
            if is_open:
                work._told = told
        self._tell_ended()
        if is_open:
            self._progress.wake()
        else:
            told(None if work.is_done else self._failure)

    def _tell_ended(self) -> None:
        """Call back whoever wanted it. Without the lock: they may do anything, also launch and wait."""
        while self._to_tell:
            try:
                tell = self._to_tell.popleft()
            except IndexError:  # another thread was quicker
                return
            tell()

    def progress(self) -> int | None:
        """What the progress thread calls: see `Progress`."""
        semaphore = None
        with self._lock:
            if not self._is_closed and self._failure is None:
                with contextlib.suppress(Exception):  # the calls have failed, and whoever waits for them is told
                    self._advance()
            if self._failure is None and any(work._told is not None for work in self._queue):
                semaphore = self._sleep_on(self._queue[0])
        self._tell_ended()
        return semaphore

    def _sleep_on(self, work: SharedWork) -> int | None:
        """What the first call waits for. Fails it where that can't come any more, as a blocking wait would."""
        arrivals = self._exchange.arrivals
        phase, count = work._waits_for
        if not work.has_arrived:
            phase, count = Phase.FINISHED, work._call.number - NUM_SLOTS + 1
        waited_s = self._waiting.seconds_for((work._call.number, phase, count))
        if waited_s > arrivals.policy.look_every_s:
            try:
                arrivals.check_missing(phase, count, lambda: f"{self.name} collective {work._call}", waited_s)
            except EvenstepError as error:
                self._fail(error)
                return None
        return arrivals.missing_semaphore(phase, count) or LOOK_AGAIN

    # ------------------------------------------------------------------ failing and closing

    def _fail(self, error: BaseException) -> None:
        """No call can be trusted any more: ranks may have come to different points. The others hear of it."""
        self._segment.leave(self.rank)
        if isinstance(error, EvenstepError):
            self._failure = error
        else:
            self._failure = PeerLostError(
                f"rank {self._known_as}: a collective over {self.name} was interrupted by {type(error).__name__}, so "
                f"the ranks are no longer in step. Start again."
            )
        self._to_tell += [functools.partial(each._told, self._failure) for each in self._queue if each._told]
        self._queue.clear()

    def close(self) -> None:
        """See `Transport.close`. Memory from `allocate` lives on until its last tensor has gone."""
        if self._is_closed:
            return
        self._is_closed = True
        self._segment.leave(self.rank)
        helper.forget(self)
        self._progress.stop()
        with self._lock:
            self._watch.close()
            self._fail(PeerLostError(f"rank {self._known_as}: this {self.name} transport has been closed."))
            del self._exchange, self._segment, self.arrivals
        self._tell_ended()

    def disown(self) -> None:
        """See `Helped.disown`: refuse calls, and end without a word to the other ranks."""
        self._is_closed = True
        self._lock = threading.RLock()
        self._failure = UsageError(f"this process was forked from rank {self.rank}; only ranks can call collectives.")
