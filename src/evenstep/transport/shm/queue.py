"""The calls of one rank over shared memory: started in order, advanced by one thread at a time, ended or failed.

    _start_all   queues calls, and shows them to the other ranks as soon as there is a slot (`_arrive`)
    _advance     runs the first call in the queue as far as the other ranks' progress allows
    _finish      the same, and waits for ranks that are not that far yet (`Work.wait`)
    _step        runs the program of a call (`collectives`) to its next sync point, or to its end
    _fail        ends all calls with an error, because the ranks may be at different points

[Note: who does the work]

The ranks' own threads do the work, when they wait. A call signals the other ranks when it is started; its reduction is
done in `Work.wait()`, or earlier, when a later call is started and all ranks have arrived. A separate thread would
compete with the backward pass for the same core. But a rank that first waits for something else must not block the
others for ever. So the process's one thread (`progress.py`) takes over calls for which no thread has waited within some
hundredths of a second. It takes over calls with a callback (`add_done_callback`) at once.

[Note: one driver]

`_lock` is only held for moments: it guards the queue and the identity of the *driver*. Only the driver runs programs,
and only the driver takes signals and counts them: if a thread took a signal for which another thread waits, the other
would continue to sleep. All other threads wait on `_changed`, each until its own deadline. The driver notifies them
whenever a call ends, and when it leaves for any reason; then one of them becomes the driver. The driver doesn't hold
the lock while it runs or sleeps, so starting a call never waits for it; the starting thread shows the call to the other
ranks itself.

If a thread gives up at its own deadline (`wait(timeout_s)`), the calls continue. Any other exception may come between
taking a signal and counting it, so all calls fail, on all ranks.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any, NoReturn

import torch

from evenstep.errors import CollectiveTimeoutError, EvenstepError, PeerLostError
from evenstep.ground.compat.torch_autograd import set_grad_enabled
from evenstep.transport.core.last_calls import describe_last_calls
from evenstep.transport.core.transport import Transport
from evenstep.transport.core.validation import forked_error
from evenstep.transport.shm.collectives import PROGRAMS, SLOTS_AT_ONCE, Call, Program, ProgramContext
from evenstep.transport.shm.peers import PeerProcess, PeerWatch
from evenstep.transport.shm.progress import background
from evenstep.transport.shm.segment import EAGER_BYTES, MAX_BESIDE_BYTES, NUM_SLOTS, Segment
from evenstep.transport.shm.sync import Phase, ProgressCounters, WaitPolicy

_NOBODY = 0  # no thread has this identifier

Callback = Callable[[EvenstepError | None], object]


class Pending:
    """A call or a message, from its start to its end; see `base.Work`.

    Attributes:
        transport: The transport that runs the call.
        is_done: Whether the result is there, or the message is sent.
    """

    transport: CallQueue
    is_done = False

    def wait(self, timeout_s: float | None = None) -> None:
        """See `base.Work.wait`; waits at most `timeout_s`. The call continues after that."""
        try:
            if not self.is_done:
                self._finish(timeout_s)
        except EvenstepError:
            raise
        except (
            BaseException
        ) as error:  # a program that catches an interrupt and calls again would get this call's result
            if self.transport._failure is None:
                self.transport._fail(error)
            raise

    def is_completed(self) -> bool:
        """See `base.Work.is_completed`; advances the call as far as possible without waiting."""
        return self.is_done or self._poll()

    def add_done_callback(self, callback: Callable[[EvenstepError | None], object]) -> None:
        """Call `callback` once, with the error if there was one: at once, or in the thread that ends this call."""
        self.is_completed()
        self.transport._listen(self, callback)

    def _finish(self, timeout_s: float | None) -> None:
        raise NotImplementedError

    def _poll(self) -> bool:
        raise NotImplementedError


class SharedWork(Pending, Call):
    """A call of the shared-memory transport.

    Args:
        checked: The call as it was made, checked.

    Attributes:
        has_arrived: Whether the other ranks can read the call header.
        program: The generator that runs the call, once it has begun.
        waits_for: (phase, count): all other ranks have to pass this phase so often before the program can continue.
    """

    has_arrived = False
    program: Program | None = None
    waits_for = (Phase.ARRIVED, 0)

    def _finish(self, timeout_s: float | None) -> None:
        self.transport._finish(self, timeout_s)

    def _poll(self) -> bool:
        return self.transport._poll(self)

    def __repr__(self) -> str:
        state = "done" if self.is_done else "arrived" if self.has_arrived else "queued"
        return f"<Work {self} {state}>"


class CallQueue(Transport):
    """A transport that runs the calls of one rank in order.

    Args:
        segment: The shared segment, in which all ranks have signed.
        processes: The rank processes, in order of rank.
        rank: This rank.
        policy: How to wait for peers, and the deadline.
        split_by: Makes the result of `split`.

    Attributes:
        counters: The progress of each rank, and the waits of this rank.
    """

    name = "shared memory"
    is_in_tree_order = True
    divides = True
    compares = True
    most_beside_bytes = MAX_BESIDE_BYTES

    def __init__(
        self,
        segment: Segment,
        processes: Sequence[PeerProcess],
        *,
        rank: int,
        policy: WaitPolicy,
        split_by: Callable[[Any], Transport],
    ) -> None:
        super().__init__(rank, len(processes), segment.nonce.hex()[:8])
        self.timeout_s = policy.timeout_s
        self._split_by = split_by
        self._segment = segment
        self.counters = ProgressCounters(
            segment.common.address + segment.layout.semaphores,
            rank=rank,
            watch=PeerWatch(processes),
            policy=policy,
            has_left=segment.has_left,
            known_as=self.known_as,
        )
        self._context = ProgramContext(segment, self.counters, rank=rank, world_size=self.world_size, name=self.name)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._driver = _NOBODY
        self._is_arriving = False
        self._num_waiting = 0  # threads that wait for `_changed`
        self._queue: collections.deque[SharedWork] = collections.deque()
        self._unarrived: collections.deque[SharedWork] = collections.deque()  # calls at its end without a slot
        # The callbacks to run at the end of each call or message.
        self._listened: dict[Pending, collections.deque[Callback]] = {}
        self._callbacks: collections.deque[Callable[[], object]] = collections.deque()  # callbacks that are due
        self._failure: EvenstepError | None = None
        self._is_closed = False

    # ------------------------------------------------------------------ starting

    def _start_all(self, *works: SharedWork) -> SharedWork:
        """Queue calls, one directly after the other, and show them to the other ranks. Returns the last."""
        try:
            with self._lock:
                if self._failure is not None:
                    raise self._failure
                for work in works:
                    if self._compared_as is not None:
                        work.packed, self._compared_as = self._compared_as, None
                    if work.num_bytes > EAGER_BYTES:
                        work.place = self._context.arena.locate(work.address, work.num_bytes)
                    count = self._count(work.packed)
                    work.transport, work.number, work.slot = self, count - 1, (count - 1) % NUM_SLOTS
                    work.waits_for = Phase.ARRIVED, count
                    self._queue.append(work)
                    self._unarrived.append(work)
                self._arrive(takes=self._driver == _NOBODY)
            if len(self._queue) > 1:
                self._drive()
            if self._callbacks:
                self._run_callbacks()
            if background.is_asleep or background.ident == get_ident():
                background.wake()
        except BaseException as error:
            # An interrupt, perhaps between two signals of one arrival. If the call continued, it would send the first
            # signal twice.
            if self._failure is None:
                self._fail(error)
            raise
        return works[-1]

    def _arrive(self, *, takes: bool) -> None:
        """Show started calls to the other ranks, in order, while there are free slots. Under the lock.

        Args:
            takes: Whether to take signals to find free slots. Only the driver may do so, or any thread if there is no
                driver.
        """
        if self._is_arriving:  # inside a signal handler: a call would be shown twice
            self._refuse_inside()
        self._is_arriving = True
        try:
            while self._unarrived:
                work = self._unarrived[0]
                if not self._context.has_slot(work.number, takes=takes):
                    return
                self._context.arrive(work, is_next=work is self._queue[0])
                work.has_arrived = True
                self.recorded.num_started = work.number + 1
                self._unarrived.popleft()
        finally:
            self._is_arriving = False

    def _refuse_inside(self) -> NoReturn:
        raise PeerLostError(f"rank {self.own_number}: a collective over {self.name} was called inside another one.")

    # ------------------------------------------------------------------ driving

    def _drive(self, work: SharedWork | None = None, until: float | None = None) -> bool | None:
        """Run programs as the driver.

        Args:
            work: Run until this call is done, or all calls have failed. None: run as far as possible without waiting.
            until: Wait until then at the latest.

        Returns:
            Whether the call is done or has failed; without a call, whether anything was done. None: another thread
            drives.
        """
        me = get_ident()
        if self._driver == me:  # inside a signal handler, while this thread runs a program
            self._refuse_inside()
        try:
            with self._lock:
                if self._driver == _NOBODY:
                    self._driver = me
            if self._driver != me:
                return None
            if work is None:
                return self._advance(until)
            while not work.is_done and (first := self._first()) is not None:
                if not self._step(first, blocking=True, until=until):
                    return False
            return True
        finally:
            if self._driver == me:
                self._driver = _NOBODY
                self._tell_waiting()

    def _first(self) -> SharedWork | None:
        """The first call in the queue, or None. It may fail at any moment, in another thread."""
        try:
            return self._queue[0]
        except IndexError:
            return None

    def _tell_waiting(self) -> None:
        if self._num_waiting:
            with self._lock:
                self._changed.notify_all()

    def _wait_for_change(self, is_over: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait for a notification. Returns whether `is_over`, or whether there was a notification in time."""
        with self._lock:
            self._num_waiting += 1  # set before `is_over`: the driver reads this number after it has left
            try:
                return is_over() or self._changed.wait(timeout_s)
            finally:
                self._num_waiting -= 1

    def _finish(self, work: SharedWork, timeout_s: float | None) -> None:
        """Drive, or wait for the driver, until this call is done."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while not work.is_done:
                if self._failure is not None:
                    raise self._failure
                is_there = self._drive(work, until)
                if is_there is None:
                    is_there = self._wait_for_change(
                        lambda: self._driver == _NOBODY or work.is_done or self._failure is not None,
                        None if until is None else until - time.monotonic(),
                    )
                if not is_there:
                    self._give_up(work, timeout_s)
        finally:
            if self._callbacks:
                self._run_callbacks()

    def _give_up(self, work: SharedWork, timeout_s: float | None) -> None:
        """Raise in this thread alone, unless the call has just ended, or all calls have failed."""
        assert timeout_s is not None, "without a deadline of its own it waits for the transport's"
        with self._lock:
            if work.is_done or self._failure is not None:
                return
            blocked = self._queue[0]
            first = blocked.waits_for
            if not blocked.has_arrived:
                first = Phase.FINISHED, self._context.count_to_arrive(blocked.number)
        missing = self.counters.missing(*first)
        text = self.counters.late(missing, f"{self.name} collective {work}", timeout_s, timeout_s)
        raise CollectiveTimeoutError(text + describe_last_calls())

    def _poll(self, work: SharedWork) -> bool:
        """Advance without waiting; return whether the call is done."""
        self._drive()
        self._run_callbacks()
        return work.is_done or self._failure is not None

    def _advance(self, until: float | None) -> bool:
        """Advance calls; return whether anything could be done.

        Waits only before the first program, at most until `until`.
        """
        any_step = False
        first = self._first()
        if until is not None and first is not None:
            any_step = self._step(first, blocking=True, until=until)
        while (first := self._first()) is not None and self._step(first, blocking=False):
            any_step = True
        return any_step

    def _step(self, work: SharedWork, *, blocking: bool, until: float | None = None) -> bool:
        """Run the first call's program to its next sync point; return whether that was possible by `until`."""
        if work.is_inference and not torch.is_inference_mode_enabled():
            with torch.inference_mode():
                return self._step(work, blocking=blocking, until=until)
        context = self._context
        # Since the start of the call, torch may have made a result part of a graph, as the functional collectives do.
        # Autograd would then record this write, or refuse it.
        has_grad = torch.is_grad_enabled()
        try:  # begins before gradients are turned off: a signal handler may raise right afterwards
            if has_grad:
                set_grad_enabled(False)
            if not work.has_arrived:
                needed = context.count_to_arrive(work.number)
                if blocking and not self._is_past(work, Phase.FINISHED, needed, until):
                    return False
                self._show_waiting()
                if not work.has_arrived:
                    return False
            phase, count = work.waits_for
            if not context.counters.all_here(phase, count):
                if not blocking:
                    context.counters.look_for_lost(phase, count, lambda: f"{self.name} collective {work}")
                    return False
                if not self._is_past(work, phase, count, until):
                    return False
            following = None
            if work.is_eager:
                context.begin(work)
                PROGRAMS[work.kind][0](context, work)
            else:
                if work.program is None:
                    context.begin(work)
                    work.program = PROGRAMS[work.kind][1](context, work)  # type: ignore[misc]  # None only where it is eager
                following = next(work.program, None)
            if following is not None:
                work.waits_for = following
                return True
            if (work.number + 1) % SLOTS_AT_ONCE == 0:
                context.counters.signal(Phase.FINISHED)
            if work.back is not None:
                work.back[0].copy_(work.back[1])
            self._end(work)
            return True
        except BaseException as error:
            self._fail(error)
            if blocking or not isinstance(error, EvenstepError):
                raise
            return False
        finally:
            if has_grad:
                set_grad_enabled(True)

    def _is_past(self, work: SharedWork, phase: Phase, count: int, until: float | None) -> bool:
        """Wait until all other ranks have passed a phase `count` times; return whether they have by `until`."""
        what, end = lambda: f"{self.name} collective {work}", math.inf if until is None else until
        return self.counters.wait(phase, count, what, end, self._show_waiting)

    def _show_waiting(self) -> None:
        with self._lock:
            self._arrive(takes=True)

    def _end(self, work: SharedWork) -> None:
        """Remove a call whose program has ended from the queue."""
        work.program = None
        with self._lock:
            if self._failure is not None:
                raise self._failure
            work.is_done = True
            self.recorded.num_completed = work.number + 1
            self._queue.popleft()
            if work in self._listened:
                self._call_back(work)
                if background.ident != get_ident():
                    background.wake()  # because this thread may wait for another call
            if self._unarrived:
                self._arrive(takes=True)
            self._tell_waiting()

    # ------------------------------------------------------------------ callbacks

    def _listen(self, work: Pending, callback: Callable[[EvenstepError | None], object]) -> None:
        callbacks = self._listened.setdefault(work, collections.deque())
        callbacks.append(callback)
        if work.is_done or self._failure is not None:  # the call may have ended just now, before it had this callback
            self._listened.pop(work, None)
            self._queue_callbacks(work, callbacks)
        else:
            background.wake()
        self._run_callbacks()

    def _call_back(self, work: Pending) -> None:
        """Queue the callbacks of a call or message that has ended or failed, unless they are queued already."""
        callbacks = self._listened.pop(work, None)
        if callbacks is not None:
            self._queue_callbacks(work, callbacks)

    def _queue_callbacks(self, work: Pending, callbacks: collections.deque[Callback]) -> None:
        # Use no lock: this rank has two locks, and signal handlers may take them. `popleft` gives each callback to one
        # thread.
        while callbacks:
            with contextlib.suppress(IndexError):
                callback = callbacks.popleft()
                self._callbacks.append(functools.partial(callback, None if work.is_done else self._failure))

    def _run_callbacks(self) -> None:
        """Run the callbacks of ended calls, without the lock: they may start calls and wait."""
        while self._callbacks:
            try:
                callback = self._callbacks.popleft()
            except IndexError:  # another thread was quicker
                return
            try:
                callback()
            except Exception as error:  # this thread may wait for another call, so the error must not reach it
                threading.excepthook(
                    threading.ExceptHookArgs((type(error), error, error.__traceback__, threading.current_thread()))
                )

    @property
    def has_callbacks(self) -> bool:
        """See `Attended`."""
        return bool(self._callbacks or self._listened)

    def help(self, seconds: float) -> tuple[bool, bool]:
        """See `Attended`."""
        moved = False
        if self._queue and not self._is_closed:
            with contextlib.suppress(Exception):  # the calls have failed, and their waits raise the error
                drove = self._drive(until=time.monotonic() + seconds if seconds else None)
                if drove is None and seconds:
                    self._wait_for_change(lambda: self._driver == _NOBODY, seconds)
                moved = bool(drove)
        self._run_callbacks()  # the thread that has ended a call may wait for a later call now
        return bool(self._queue), moved

    # ------------------------------------------------------------------ failing and closing

    def _fail(self, error: BaseException) -> None:
        """Fail all calls, because ranks may be at different points. The other ranks see that this rank has left."""
        if isinstance(error, CollectiveTimeoutError) and self._failure is None:
            error.args = (f"{error}{describe_last_calls()}",)
        self._segment.leave(self.rank)
        if isinstance(error, EvenstepError):
            failure = error
        else:
            failure = PeerLostError(
                f"rank {self.own_number}: a collective over {self.name} was interrupted by {type(error).__name__}, so "
                f"the ranks are no longer in step. Start again."
            )
        with self._lock:
            self._failure = self._failure or failure  # the first failure is the cause
            for each in tuple(self._listened):
                self._call_back(each)
            self._queue.clear()
            self._unarrived.clear()
            self._tell_waiting()

    def close(self) -> None:
        """See `Transport.close`. Memory from `allocate` exists until its last tensor has been collected."""
        if self._is_closed:
            return
        self._is_closed = True
        background.forget(self)
        self._fail(PeerLostError(f"rank {self.own_number}: this {self.name} transport has been closed."))
        me = get_ident()
        while self._driver not in (_NOBODY, me):  # the driver notices within some hundredths of a second
            self._wait_for_change(lambda: self._driver in (_NOBODY, me), None)
        if self._driver == _NOBODY:  # else this is inside a signal handler, whose thread runs a program
            del self._context, self._segment, self.counters
        self._run_callbacks()

    def split(self) -> Transport:
        """See `Transport.split`: a transport over another segment."""
        return self._split_by(self)

    def disown(self) -> None:
        """See `Attended`: refuse calls, without informing the other ranks."""
        self._is_closed = True
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._driver = _NOBODY
        self._failure = forked_error(self.own_number)
