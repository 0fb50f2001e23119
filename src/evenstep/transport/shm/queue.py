"""The calls of one rank over shared memory: launched in order, advanced, ended or failed.

    _launch   queues a call
    _arrive   shows it to the other ranks as soon as there is a slot
    _advance  takes steps of the first call in the queue, as far as the other ranks have come
    _finish   the same, and waits where a step needs ranks that have not come so far (`Work.wait`)
    _step     runs the program of a call (`collectives`) to its next sync point, or to its end
    _fail     ends all calls with an error, for the ranks may be at different points

[Note: who does the work]

The ranks themselves, in the thread that waits. A call signals the others when it is launched; its reduction is done in
`Work.wait()`, or earlier when a later call is launched and all ranks have arrived. A thread of its own would compete
with the backward pass for the same core. So that a rank which waits for something else first can't block the others
for ever, a helper (`progress.py`) takes over calls that no thread has waited for within some hundredths of a second.
A call with a callback (`add_done_callback`) needs no thread that waits: one of this transport (`progress.py`, too) ends
it as soon as possible.

[Note: two locks]

`_stepping` is held by the thread that runs programs, also while it sleeps until other ranks have come: each signal must
be counted by the thread that sleeps for it. `_launching` guards the queue, and is held for moments. So a launch never
waits for a thread that waits, which may need what its own thread does after the launch. Where `_stepping` is taken, the
thread that has it shows the new call to the other ranks, or the helper does. `_stepping` is taken first; a thread
that has `_launching` only tries for it.
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

from evenstep.errors import CollectiveTimeoutError, EvenstepError, PeerLostError
from evenstep.ground.compat.torch_autograd import set_grad_enabled
from evenstep.ground.health import heartbeat
from evenstep.transport.base import Op
from evenstep.transport.core.codec import to_tensor
from evenstep.transport.core.header import REFUSED, pack_text
from evenstep.transport.core.last_calls import RecordedGroup, describe_last_calls, record
from evenstep.transport.core.validation import Arguments, Fingerprints, forked_error
from evenstep.transport.shm.collectives import PROGRAMS, Call, Program, ProgramContext
from evenstep.transport.shm.peers import PeerProcess, PeerWatch
from evenstep.transport.shm.progress import RETRY_LATER, Progress, WaitTimer, helper
from evenstep.transport.shm.requests import Requests
from evenstep.transport.shm.segment import EAGER_BYTES, MAX_PIGGYBACK_BYTES, NUM_SLOTS, Segment
from evenstep.transport.shm.sync import Phase, ProgressCounters, WaitPolicy, request_semaphores


class SharedWork:
    """A call of the shared-memory transport, from its launch to its end; see `base.Work`.

    Args:
        transport: Runs it.
        call: The collective.
        back: (into, from): copied at the end, where the caller's tensor isn't contiguous.

    Attributes:
        has_arrived: The other ranks can read the header.
        is_done: The result is there.
        is_inference: The result may be written in torch's inference mode only, whichever thread does that.
    """

    __slots__ = (
        "_back",
        "_call",
        "_callback",
        "_program",
        "_transport",
        "_waits_for",
        "has_arrived",
        "is_done",
        "is_inference",
    )

    def __init__(self, transport: CallQueue, call: Call, back: tuple[Tensor, Tensor] | None) -> None:
        self._transport = transport
        self._call = call
        self._back = back
        self._program: Program | None = None
        self._callback: Callable[[EvenstepError | None], object] | None = None
        self._waits_for = (Phase.ARRIVED, call.number + 1)
        self.has_arrived = False
        self.is_done = False
        self.is_inference = call.out.is_inference() or (back is not None and back[0].is_inference())

    def wait(self, timeout_s: float | None = None) -> None:
        """See `base.Work.wait`; no longer than `timeout_s`."""
        if not self.is_done:
            self._transport._finish(self, timeout_s)

    def is_completed(self) -> bool:
        """See `base.Work.is_completed`; advances the call as far as it needs no waiting."""
        return self.is_done or self._transport._poll(self)

    def add_done_callback(self, callback: Callable[[EvenstepError | None], object]) -> None:
        """Call `callback` once, with the error if there was one: at once, or in the thread that ends the call."""
        self._transport._add_done_callback(self, callback)

    def __repr__(self) -> str:
        state = "done" if self.is_done else "arrived" if self.has_arrived else "queued"
        return f"<Work {self._call} {state}>"


class CallQueue:
    """Runs the calls of one rank. A base class of `SharedMemoryTransport`, which saves a Python call for each.

    Args:
        segment: The shared segment, in which all ranks have signed.
        processes: The rank processes, in order of rank.
        rank: This rank.
        policy: How to wait for peers, and until when.

    Attributes:
        counters: How far each rank has come, and how long this one waits.
        recorded: This transport, as the record of the last calls knows it.
    """

    name = "shared memory"

    def __init__(self, segment: Segment, processes: Sequence[PeerProcess], *, rank: int, policy: WaitPolicy) -> None:
        self.rank = rank
        self.world_size = len(processes)
        self._segment = segment
        self._arguments = Arguments(self.name, rank, self.world_size, refused=weakref.WeakMethod(self.refuse))
        self._watch = PeerWatch([each for each in processes if each.rank != rank])
        self.counters = ProgressCounters(
            segment.common.address + segment.layout.semaphores,
            rank=rank,
            world_size=self.world_size,
            watch=self._watch,
            policy=policy,
            has_left=segment.has_left,
        )
        self._context = ProgramContext(
            segment, self.counters, PROGRAMS, rank=rank, world_size=self.world_size, name=self.name
        )
        self._stepping = threading.RLock()
        self._launching = threading.RLock()
        self._queue: collections.deque[SharedWork] = collections.deque()
        self._unarrived: collections.deque[SharedWork] = collections.deque()  # the last of them
        self._callbacks: collections.deque[Callable[[], object]] = collections.deque()
        self._progress = Progress(self.progress, policy.check_every_s, keep=segment)
        self._wait_timer = WaitTimer()
        self._fingerprints = Fingerprints(self._arguments)
        self._known_as = rank
        self.recorded = RecordedGroup(segment.nonce.hex()[:8], self.name)
        self._compared_as: bytes | None = None  # the fingerprint as which the next call is compared
        self._piggyback: Tensor | None = None  # numbers that travel with the next call
        self._num_calls = 0
        self._failure: EvenstepError | None = None
        self._requests: Requests | None = None
        self._is_closed = False
        helper.register(self)

    # ------------------------------------------------------------------ calls of other transports

    def compare_call(self, collective: str, text: bytes = b"") -> SharedWork:
        """Compare a call that something else carries. The work is done when all ranks make the same one.

        Args:
            collective: One of `header.COLLECTIVES`.
            text: The text of a refusal or a report (`header.pack_text`).
        """
        nothing = to_tensor(text) if text else torch.empty(0, device="cpu")
        return self._launch(collective, nothing, nothing, nothing)

    def refuse(self, reason: str) -> None:
        """Report that this rank doesn't make its next call, for which the others would wait."""
        with contextlib.suppress(EvenstepError):  # they know of a transport that has failed, or been closed
            self.compare_call(REFUSED, pack_text(reason))

    def name_ranks(self, known_as: Sequence[int]) -> None:
        """Set the ranks' numbers in messages: those that they have in a larger world."""
        self.counters.known_as, self._known_as = known_as, known_as[self.rank]

    def compare_as(self, number: int, name: str, packed: bytes) -> None:
        """Have the next call compared as a call over another transport, for which it is made.

        Args:
            number: Of that call.
            name: Of that transport.
            packed: That call's fingerprint.
        """
        self._context.part_of, self._compared_as = (number, name), packed

    def piggyback(self, numbers: Tensor) -> None:
        """Have the next call add these numbers over the ranks, too, in place.

        One sync point instead of two. Every rank does so before the same call.

        Args:
            numbers: [n], contiguous, not more than `MAX_PIGGYBACK_BYTES`.
        """
        assert numbers.nbytes <= MAX_PIGGYBACK_BYTES, numbers.shape
        self._piggyback = numbers

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
        """Queue a call, and show it to the other ranks. See `Call` for the arguments, `SharedWork` for `back`."""
        if back is not None:
            self._arguments.check_written(collective, back[0])
        piggyback, self._piggyback = self._piggyback, None
        num_piggyback = 0 if piggyback is None else piggyback.numel()
        packed = self._fingerprints[collective, op, tensor.dtype, tensor.shape, source, receiver, num_piggyback]
        try:
            address = flat.data_ptr()
        except RuntimeError:
            self._arguments.refuse_without_memory(collective)
        try:
            with self._launching:
                if self._failure is not None:
                    raise self._failure
                if self._compared_as is not None:
                    packed, self._compared_as = self._compared_as, None
                place = self._context.arena.locate(address, flat.nbytes) if flat.nbytes > EAGER_BYTES else None
                number = self._num_calls
                call = Call(
                    number, collective, op, source, flat, address, out, packed, place, receiver, splits, piggyback
                )
                self._num_calls += 1
                heartbeat.mark_collective(self._num_calls)
                record(self.recorded, self._num_calls, packed)
                work = SharedWork(self, call, back)
                self._queue.append(work)
                # Second: another thread may show it at once, and looks for it in the queue.
                self._unarrived.append(work)
            if self._stepping.acquire(blocking=False):
                try:
                    self._arrive()
                    if len(self._queue) > 1:
                        self._advance()
                finally:
                    self._stepping.release()
        except BaseException as error:
            # An interrupt, perhaps between two signals of one arrival: to go on would send the first one twice.
            if self._failure is None:
                self._fail(error)
            raise
        if self._callbacks:
            self._run_callbacks()
        if helper.is_asleep:
            helper.wake()
        return work

    def _arrive(self) -> None:
        """Show the others the calls that are launched, in order, as far as there are slots."""
        while self._unarrived:
            work = self._unarrived[0]
            if not self._context.has_slot(work._call.number):
                return
            self._context.arrive(work._call, is_next=work is self._queue[0])
            work.has_arrived = True
            self.recorded.num_started = work._call.number + 1
            self._unarrived.popleft()

    # ------------------------------------------------------------------ advancing

    def _finish(self, work: SharedWork, timeout_s: float | None) -> None:
        """Run programs, waiting where they wait, until this call is done."""
        try:
            with self._stepping:
                while not work.is_done:
                    if self._failure is not None:
                        raise self._failure
                    self._step(self._queue[0], blocking=True, timeout_s=timeout_s)
        finally:
            if self._callbacks:
                self._run_callbacks()

    def _poll(self, work: SharedWork) -> bool:
        """Advance without waiting; return whether the call is done."""
        self._try_to_advance()
        if self._callbacks:
            self._run_callbacks()
        return work.is_done or self._failure is not None

    def _try_to_advance(self) -> bool:
        """Advance without waiting, unless another thread does; return whether anything could be done."""
        if not self._stepping.acquire(blocking=False):
            return False
        try:
            return self._advance()
        finally:
            self._stepping.release()

    def _advance(self) -> bool:
        """Advance without waiting; return whether anything could be done."""
        if self._failure is None:
            self._arrive()
        any_step = False
        while self._queue and self._failure is None and self._step(self._queue[0], blocking=False):
            any_step = True
        return any_step

    def help(self) -> tuple[bool, bool]:
        """See `Helped.help`. Calls are in flight also where another thread advances them, as it may soon stop."""
        moved = False
        if self._queue and not self._is_closed:
            with contextlib.suppress(Exception):  # the calls have failed, and their waits raise the error
                moved = self._try_to_advance()
        self._run_callbacks()  # also those of calls that a thread has ended which now waits for a later one
        return bool(self._queue), moved

    def _step(self, work: SharedWork, *, blocking: bool, timeout_s: float | None = None) -> bool:
        """Run the program of the first call to its next sync point; return whether that was possible."""
        if torch.is_grad_enabled():
            # Torch may have attached a gradient's history to a result since the call was launched (the functional
            # collectives do): autograd would record this write, or refuse it.
            set_grad_enabled(False)
            try:
                return self._step(work, blocking=blocking, timeout_s=timeout_s)
            finally:
                set_grad_enabled(True)
        if work.is_inference and not torch.is_inference_mode_enabled():
            with torch.inference_mode():
                return self._step(work, blocking=blocking, timeout_s=timeout_s)
        context = self._context
        phase, count = work._waits_for
        try:
            if not work.has_arrived:
                if blocking:
                    earlier = work._call.number - NUM_SLOTS + 1
                    context.counters.wait(
                        Phase.FINISHED, earlier, lambda: f"{self.name} collective {work._call}", timeout_s, self._arrive
                    )
                self._arrive()
                if not work.has_arrived:
                    return False
            if blocking:
                context.counters.wait(
                    phase, count, lambda: f"{self.name} collective {work._call}", timeout_s, self._arrive
                )
            elif not context.counters.all_here(phase, count):
                return False
            following = None
            if work._call.is_eager:
                context.run_eager(work._call)
            else:
                if work._program is None:
                    work._program = context.program(work._call)
                following = next(work._program, None)
            if following is not None:
                work._waits_for = following
                return True
            if work._back is not None:
                work._back[0].copy_(work._back[1])
            work._program = None
            with self._launching:
                work.is_done = True
                self.recorded.num_completed = work._call.number + 1
                self._queue.popleft()
                if work._callback is not None:
                    self._callbacks.append(functools.partial(work._callback, None))
                    work._callback = None
            if self._unarrived:
                self._arrive()
            return True
        except BaseException as error:
            self._fail(error)
            if blocking or not isinstance(error, EvenstepError):
                raise
            return False

    # ------------------------------------------------------------------ callbacks

    def _add_done_callback(self, work: SharedWork, callback: Callable[[EvenstepError | None], object]) -> None:
        if not work.is_done:
            self._try_to_advance()
        with self._launching:
            is_open = not work.is_done and self._failure is None
            if is_open:
                work._callback = callback
        self._run_callbacks()
        if is_open:
            self._progress.wake()
        else:
            callback(None if work.is_done else self._failure)

    def _run_callbacks(self) -> None:
        """Run the callbacks of ended calls, without the lock: they may do anything, also launch and wait."""
        while self._callbacks:
            try:
                callback = self._callbacks.popleft()
            except IndexError:  # another thread was quicker
                return
            callback()

    def progress(self) -> int | None:
        """Advance; return the semaphore to sleep on: see `Progress`."""
        semaphore = None
        with self._stepping:
            if not self._is_closed and self._failure is None:
                with contextlib.suppress(Exception):  # the calls have failed, and their callbacks get the error
                    self._advance()
            with self._launching:
                has_callback = any(work._callback is not None for work in self._queue)
            if self._failure is None and has_callback:
                semaphore = self._sleep_on(self._queue[0])
        self._run_callbacks()
        return semaphore

    def _sleep_on(self, work: SharedWork) -> int | None:
        """The semaphore that the first call waits for. Fails the call where its rank is lost, as a wait would."""
        counters = self._context.counters
        phase, count = work._waits_for
        if not work.has_arrived:
            phase, count = Phase.FINISHED, work._call.number - NUM_SLOTS + 1
        waited_s = self._wait_timer.seconds_for((work._call.number, phase, count))
        if waited_s > counters.policy.check_every_s:
            try:
                counters.check_missing(phase, count, lambda: f"{self.name} collective {work._call}", waited_s)
            except EvenstepError as error:
                self._fail(error)
                return None
        return counters.missing_semaphore(phase, count) or RETRY_LATER

    # ------------------------------------------------------------------ requests

    def serve_requests(self, serve: Callable[[], object]) -> None:
        """Call `serve` in a thread as soon as another rank calls `request`; once. It never raises."""
        segment = self._segment
        semaphores = request_semaphores(segment.common.address + segment.layout.semaphores, self.world_size)
        self._requests = Requests(semaphores, self.rank, serve, keep=segment)

    def request(self) -> None:
        """Have all other ranks call what they gave to `serve_requests`, whatever they are doing. Waits for none."""
        if self._requests is not None and not self._is_closed:
            self._requests.send()

    # ------------------------------------------------------------------ failing and closing

    def _fail(self, error: BaseException) -> None:
        """Fail all calls, for ranks may be at different points; the other ranks see that this one has left."""
        if isinstance(error, CollectiveTimeoutError) and self._failure is None:
            error.args = (f"{error}{describe_last_calls()}",)
        self._segment.leave(self.rank)
        if isinstance(error, EvenstepError):
            failure = error
        else:
            failure = PeerLostError(
                f"rank {self._known_as}: a collective over {self.name} was interrupted by {type(error).__name__}, so "
                f"the ranks are no longer in step. Start again."
            )
        with self._launching:
            self._failure = failure
            self._callbacks += [functools.partial(each._callback, failure) for each in self._queue if each._callback]
            self._queue.clear()
            self._unarrived.clear()

    def close(self) -> None:
        """See `Transport.close`. Memory from `allocate` lives on until its last tensor has gone."""
        if self._is_closed:
            return
        self._is_closed = True
        self._segment.leave(self.rank)
        helper.forget(self)
        self._progress.stop()
        if self._requests is not None:
            self._requests.stop()
        with self._stepping:
            self._watch.close()
            self._fail(PeerLostError(f"rank {self._known_as}: this {self.name} transport has been closed."))
            del self._context, self._segment, self.counters
        self._run_callbacks()

    def disown(self) -> None:
        """See `Helped.disown`: refuse calls, and leave the other ranks alone."""
        self._is_closed = True
        self._stepping, self._launching = threading.RLock(), threading.RLock()
        self._requests = None
        self._failure = forked_error(self._known_as)
