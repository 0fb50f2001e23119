"""Messages between two ranks: each ordered pair has its own lane, separate from the queue of collectives.

A lane is a ring of records, numbered from 0, which the sender writes and the receiver reads in order. A record is a
message, or the answer to a message on the lane of the other direction.

    send       A short message is stored in its record. A long one is copied into the sender's zone, unless it is there
               already, and the record has its offset. If the ring is full the record waits in `_outbox`.
    receive    The receiver reads all records that have come, and stores messages that no `receive` matches (`_unread`).
               So messages can be received by source and tag, in any order.
    answer     The receiver copies a long message to its tensor and answers TAKEN; then the sender's memory is free. It
               answers REFUSED, with the text of an error, if dtype or number of elements differ. Before it leaves, it
               waits some seconds for room in the ring for its answers.

A short message is sent once its record is in the ring, a long one once the receiver has answered TAKEN. Short messages
that no `receive` matches stay in the receiver's memory, in any number: the receiver has to continue reading, because an
answer to its own long message may come after them. A long message stays in its sender's zone. All of this takes little
time and happens in the threads that call or wait, or in the process's one thread (`progress`). No collective in the
queue waits for it.

[Note: signals of a lane]

Each lane has two semaphores: records written, and records read. Both are taken and counted under `_lanes_lock`, the
lock of all lanes of this rank, so that no thread takes a signal that another thread should count. A rank that has
nothing to do sleeps on its doorbell, which every other rank rings after each record that it has written or read. Rings
aren't counted, so it doesn't matter which thread they wake. An exception in the middle of these actions may leave a
signal uncounted, or a record half written, and so it fails the transport on all ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import get_ident
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from evenstep.console import say
from evenstep.errors import CollectiveTimeoutError, EvenstepError, MismatchError, PeerLostError
from evenstep.ground.compat.torch_distributed import outside_transforms
from evenstep.ground.health import heartbeat
from evenstep.transport.core.codec import to_bytes, to_tensor
from evenstep.transport.core.header import DTYPES, unpack_text
from evenstep.transport.core.last_calls import describe_last_calls
from evenstep.transport.core.transport import Transport
from evenstep.transport.core.validation import Arguments
from evenstep.transport.shm.peers import PeerProcess
from evenstep.transport.shm.progress import background
from evenstep.transport.shm.queue import CallQueue, Pending
from evenstep.transport.shm.segment import (
    LANE_BYTES,
    NUM_RECORDS,
    RECORD_BYTES,
    Mapping,
    Segment,
    allocate_range,
)
from evenstep.transport.shm.sync import (
    ProgressCounters,
    Waiting,
    WaitPolicy,
    adapt_spin,
    doorbell,
    lane_semaphores,
    sem_post,
    sem_trywait,
    spin,
    take,
)

_RECORD = struct.Struct("<QqQQBB")  # record number, tag, number of elements, place, kind, dtype; then the data
_DATA_OFFSET = 64
SHORT_BYTES = RECORD_BYTES - _DATA_OFFSET
_IN_RECORD = (1 << 64) - 1  # the place of a short message
_MESSAGE, _TAKEN, _REFUSED = range(3)
_NUM_NAMED = 4
_LONGEST_FLUSH_S = 5.0
_FLUSH_EVERY_S = 0.005
_TURN_S = 0.001  # turn of messages, and then of collectives, if both have callbacks
_SPARE_BYTES = 64 << 20  # of memory kept for reuse: allocating memory for a message takes longer than copying it
_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")

_memmove = ctypes.memmove
_Result = TypeVar("_Result")


class _Incoming(NamedTuple):
    """A message that has arrived.

    Attributes:
        sender: The rank that has sent it.
        number: The number of the message's record.
        tag: The message's tag.
        place: The message's offset in the sender's zone, or `_IN_RECORD`.
        data: [numel]: the message in the zone or in the record, or a copy of it.
    """

    sender: int
    number: int
    tag: int
    place: int
    data: Tensor


@dataclass(eq=False)
class Message(Pending):
    """A message that this rank sends or receives, from its start to its end.

    Attributes:
        transport: The transport that carries the message.
        flat: [numel], contiguous: the data to send, or memory for the received data.
        peer: The other rank; None: the first rank that sends.
        tag: The tag by which the message is matched.
        is_sent: Whether this rank sends the message.
        source: The rank that has sent the message, once it has arrived.
        memory: Memory of the copy of a long message that is sent.
        waiting: The state of the wait; set at the first check of the other rank.
        checked_at: The time of the last check.
    """

    transport: Lanes
    flat: Tensor
    peer: int | None
    tag: int
    is_sent: bool
    source: int = -1
    memory: Tensor | None = None
    waiting: Waiting | None = None
    checked_at: float = 0.0

    def _finish(self, timeout_s: float | None) -> None:
        self.transport._finish_message(self, timeout_s)

    def _poll(self) -> bool:
        return self.transport._poll_message(self)

    def __str__(self) -> str:
        peer = "any rank" if self.peer is None else f"rank {self.transport.known_as[self.peer]}"
        what, way = ("send", "to") if self.is_sent else ("recv", "from")
        return f"{what} of {_shown(self.flat)} {way} {peer}, tag {self.tag}"

    def __repr__(self) -> str:
        return f"<Message {self}: {'done' if self.is_done else 'under way'}>"


class Lanes(CallQueue):
    """A `CallQueue` that also has lanes.

    Args:
        segment: The shared segment, in which all ranks have signed.
        processes: The rank processes, in order of rank.
        rank: This rank.
        policy: How to wait for peers, and the deadline.
        split_by: Makes the result of `split`.
    """

    def __init__(
        self,
        segment: Segment,
        processes: Sequence[PeerProcess],
        *,
        rank: int,
        policy: WaitPolicy,
        split_by: Callable[[Any], Transport],
    ) -> None:
        super().__init__(segment, processes, rank=rank, policy=policy, split_by=split_by)
        size = self.world_size
        first = segment.common.address + segment.layout.semaphores
        self._peers = [peer for peer in range(size) if peer != rank]
        self._written_out, self._read_out = zip(
            *(lane_semaphores(first, size, rank, r) for r in range(size)), strict=True
        )
        self._written_in, self._read_in = zip(
            *(lane_semaphores(first, size, r, rank) for r in range(size)), strict=True
        )
        self._doorbells = [doorbell(first, size, r) for r in range(size)]
        self._num_written = [0] * size  # records to each rank
        self._num_freed = [0] * size  # records to each rank that are known to be read
        self._num_read = [0] * size  # records from each rank
        # The arguments of `_write` for records for which there was no room, by rank.
        self._outbox: dict[int, deque[tuple[Any, ...]]] = {peer: deque() for peer in self._peers}
        self._not_taken: dict[tuple[int, int], Message] = {}  # long messages in flight, by receiver and number
        self._receives: list[weakref.ref[Message]] = []  # in order; receives that the caller has dropped are skipped
        self._unread: list[_Incoming] = []  # messages that no `receive` matches yet, in order
        self._spare: list[Tensor] = []  # [bytes]: memory of delivered long messages, for reuse
        self._mapped: dict[tuple[int, int], Mapping] = {}
        self._own_arguments = Arguments(self.name, rank, size)  # its refusals aren't sent to other ranks
        self._lanes_lock = threading.RLock()
        self._lanes_changed = threading.Condition(self._lanes_lock)
        self._is_moving = False
        self._is_asleep = False
        self._spin_message_s = policy.spin_s
        background.register(self)  # register last: the background thread may call `help` at once

    # ------------------------------------------------------------------ starting

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> Message:
        """Send a tensor to a rank, which has to receive the same number of elements of the same dtype.

        Raises:
            ConfigurationError: There isn't enough memory for a copy; nothing was sent.
            PeerLostError: The rank has left; nothing was sent. Or all calls and messages have failed.
        """
        flat, _ = self._own_arguments.flatten(tensor)
        message = Message(self, flat, dst, tag, is_sent=True)
        place = self._stage(message) if flat.nbytes > SHORT_BYTES else _IN_RECORD
        if not self._guarded(self._send, dst, message, place):
            raise PeerLostError(
                f"rank {self.own_number} can't start a {message}: rank {self.known_as[dst]} has given up, or closed "
                f"its end of the group."
            )
        return self._started(message)

    def receive(self, tensor: Tensor, src: int | None, tag: int = 0) -> tuple[Message, list[tuple[Tensor, Tensor]]]:
        """Receive a tensor from a rank, or (None) from the first rank that sends.

        Returns:
            The message, and the copies (to, from) to make once it has arrived.
        """
        flat, back = self._own_arguments.flatten(tensor)
        if back is not None:
            self._own_arguments.check_written("recv", tensor)
        message = Message(self, flat, src, tag, is_sent=False)
        self._guarded(self._receive, message)
        return self._started(message), [] if back is None else [back]

    def _started(self, message: Message) -> Message:
        self._run_callbacks()
        if not message.is_done and (background.is_asleep or background.ident == get_ident()):
            background.wake()
        return message

    def _stage(self, message: Message) -> int:
        """The offset of a long message in this rank's zone. The message is copied there unless it is there already."""
        address, num_bytes = message.flat.data_ptr(), message.flat.nbytes
        with self._lanes_lock, self._lock:
            if self._failure is not None:
                raise self._failure
            arena = self._context.arena
            place = arena.locate(address, num_bytes)
            if place is not None:
                return place
            fitting = (each for each, spare in enumerate(self._spare) if num_bytes <= spare.nbytes <= 4 * num_bytes)
            index = next(fitting, None)
            memory = arena.allocate(num_bytes, torch.uint8) if index is None else self._spare.pop(index)
            message.memory, place = memory, arena.locate(memory.data_ptr(), num_bytes)
        assert place is not None
        _memmove(memory.data_ptr(), address, num_bytes)
        return place

    def _send(self, peer: int, message: Message, place: int) -> bool:
        """Queue a message. Returns whether the receiving rank still exists."""
        is_there = not self._segment.has_left(peer)
        if is_there:
            self._outbox[peer].append((_MESSAGE, message.tag, message.flat, place, message))
        self._advance_lanes()  # even if the rank has left: it may have refused a message
        return is_there

    def _receive(self, message: Message) -> None:
        self._advance_lanes()
        arrived = next((each for each in self._unread if _fits(each, message)), None)
        if arrived is None:
            self._receives.append(weakref.ref(message))
        else:
            self._unread.remove(arrived)
            self._deliver(arrived, message)

    # ------------------------------------------------------------------ moving, under the lock

    def _guarded(self, action: Callable[..., _Result], *arguments: Any) -> _Result:
        """Run an action that moves records, under the lock. If it raises, all calls and messages fail."""
        with self._lanes_lock, outside_transforms():
            try:
                if self._failure is not None:
                    raise self._failure
                if self._is_moving:
                    raise PeerLostError(f"rank {self.own_number}: a message was sent or received inside another one.")
                self._is_moving = True
                return action(*arguments)
            except BaseException as error:
                if self._failure is None:
                    self._fail(error)
                raise
            finally:
                self._is_moving = False

    def _is_over(self, message: Message) -> bool:
        return message.is_done or (self._advance_lanes() and message.is_done)

    def _advance_lanes(self) -> bool:
        """Read all records that have come, and write records while there is room. Returns whether any record moved."""
        has_moved = False
        for peer in self._peers:
            while sem_trywait(self._written_in[peer]) == 0:
                self._read(peer)
                has_moved = True
            has_moved = self._write_all(peer) or has_moved
        if has_moved:
            self._lanes_changed.notify_all()
            while not self._is_asleep and sem_trywait(self._doorbells[self.rank]) == 0:
                pass  # a rank that only sends never sleeps, so rings for read records would accumulate
        return has_moved

    def _write_all(self, peer: int) -> bool:
        """Write records to a rank while there is room; return whether any was written."""
        outbox, num_before = self._outbox[peer], self._num_written[peer]
        while outbox:
            while self._num_written[peer] - self._num_freed[peer] >= NUM_RECORDS:
                if sem_trywait(self._read_out[peer]) != 0:
                    return self._num_written[peer] > num_before
                self._num_freed[peer] += 1
            self._write(peer, *outbox.popleft())
        return self._num_written[peer] > num_before

    def _write(self, peer: int, kind: int, tag: int, data: Tensor, place: int, message: Message | None) -> None:
        """Write the next record to a rank.

        Args:
            peer: The rank.
            kind: The record's kind.
            tag: The message's tag.
            data: [numel]: the message, or the text of a refusal.
            place: For a message, its offset in the zone, or `_IN_RECORD`. For an answer, the message's number.
            message: The record's message; None for an answer.
        """
        number, is_short = self._num_written[peer], kind != _MESSAGE or place == _IN_RECORD
        lane, offset = self._lane(self.rank, peer), number % NUM_RECORDS * RECORD_BYTES
        dtype = DTYPES.index(data.dtype)
        _RECORD.pack_into(lane.raw, offset, number, tag, data.numel(), place, kind, dtype)
        if is_short and data.nbytes:
            _memmove(lane.address + offset + _DATA_OFFSET, data.data_ptr(), data.nbytes)
        self._num_written[peer] = number + 1
        sem_post(self._written_out[peer])
        sem_post(self._doorbells[peer])
        if message is not None and is_short:
            self._end_message(message)
        elif message is not None:
            self._not_taken[peer, number] = message

    def _read(self, peer: int) -> None:
        """Read the next record of a rank. Its signal has been taken already."""
        expected = self._num_read[peer]
        lane, offset = self._lane(peer, self.rank), expected % NUM_RECORDS * RECORD_BYTES
        number, tag, numel, place, kind, dtype = _RECORD.unpack_from(lane.raw, offset)
        if number != expected:
            raise PeerLostError(
                f"rank {self.own_number} and rank {self.known_as[peer]} have counted different numbers of messages: an "
                f"exception interrupted one of them. Start again."
            )
        if kind == _TAKEN:
            self._end_message(self._not_taken.pop((peer, place)))
        elif kind == _MESSAGE and place != _IN_RECORD:
            data = self._context.views.zone(peer, place, DTYPES[dtype], numel)
            self._accept(_Incoming(peer, number, tag, place, data))
        else:
            data = lane.tensor(offset + _DATA_OFFSET, DTYPES[dtype], numel)
            if kind == _REFUSED:
                raise MismatchError(unpack_text(to_bytes(data)))
            self._accept(_Incoming(peer, number, tag, place, data))
        self._num_read[peer] = expected + 1
        sem_post(self._read_in[peer])
        sem_post(self._doorbells[peer])

    def _accept(self, arrived: _Incoming) -> None:
        """Deliver a message to the first `receive` that matches it, or store it."""
        receives = [each for ref in self._receives if (each := ref()) is not None]
        message = next((each for each in receives if _fits(arrived, each)), None)
        if message is not None:
            self._receives = [weakref.ref(each) for each in receives if each is not message]
            self._deliver(arrived, message)
        elif arrived.place == _IN_RECORD:  # copy it: a later record will overwrite this one
            self._unread.append(arrived._replace(data=arrived.data.clone()))
        else:
            self._unread.append(arrived)

    def _deliver(self, arrived: _Incoming, message: Message) -> None:
        """Copy a message to the memory of a `receive`, and answer the sender."""
        flat, data, me, sender = message.flat, arrived.data, self.own_number, self.known_as[arrived.sender]
        if (data.dtype, data.numel()) != (flat.dtype, flat.numel()):
            text = (
                f"rank {sender} sends {_shown(data)} to rank {me}, tag {arrived.tag}, which receives {_shown(flat)}. "
                f"Both must have the same number of elements and the same dtype."
            )
            self._answer(arrived, _REFUSED, to_tensor(text.encode()))
            self._flush_answers(lambda: [self._write_all(peer) for peer in self._peers])
            raise MismatchError(text)
        _memmove(flat.data_ptr(), data.data_ptr(), flat.nbytes)
        if arrived.place != _IN_RECORD:
            if self._segment.has_left(arrived.sender):  # the sender's memory may have been freed before it was read
                raise PeerLostError(
                    f"rank {me} lost rank {sender}, which has given up or closed its end, in {message}."
                )
            self._answer(arrived, _TAKEN, _NOTHING)
        message.source = arrived.sender
        self._end_message(message)

    def _answer(self, arrived: _Incoming, kind: int, data: Tensor) -> None:
        self._outbox[arrived.sender].append((kind, 0, data, arrived.number, None))
        self._write_all(arrived.sender)

    def _flush_answers(self, advance: Callable[[], object]) -> None:
        """Write the answers that wait for room, for some seconds at most.

        Without these answers, the ranks that wait for them would report that this rank is lost.
        """
        until = time.monotonic() + _LONGEST_FLUSH_S
        while self._has_answers() and time.monotonic() < until:
            advance()
            time.sleep(_FLUSH_EVERY_S)

    def _has_answers(self) -> bool:
        """Whether an answer waits for room in the ring of a rank that can still read it."""
        with self._lanes_lock:
            return any(
                any(kind != _MESSAGE for kind, *_ in outbox) and not self._is_lost(peer, self.counters)
                for peer, outbox in self._outbox.items()
            )

    def _end_message(self, message: Message) -> None:
        message.is_done = True
        self._call_back(message)
        if message.memory is not None:
            self._spare.append(message.memory)
            while sum(spare.nbytes for spare in self._spare) > _SPARE_BYTES:
                self._spare.pop(0)
            message.memory = None

    def _lane(self, sender: int, receiver: int) -> Mapping:
        """The ring of a lane. It is mapped for its first record, and allocated by the sender."""
        lane = self._mapped.get((sender, receiver))
        if lane is None:
            fd, offset = self._segment.fd, self._segment.layout.lane(sender, receiver)
            if sender == self.rank:
                allocate_range(fd, offset, LANE_BYTES, what=f"messages to rank {self.known_as[receiver]}")
            lane = self._mapped[sender, receiver] = Mapping(fd, offset=offset, num_bytes=LANE_BYTES)
        return lane

    # ------------------------------------------------------------------ waiting

    def _finish_message(self, message: Message, timeout_s: float | None) -> None:
        """Wait for a message: move records until it is done."""
        try:
            counters = self._guarded(lambda: self.counters)  # this reference keeps the memory mapped
            policy = counters.policy
            began = time.monotonic()
            until = began + (math.inf if timeout_s is None else timeout_s)
            is_over = functools.partial(self._guarded, self._is_over, message)
            if not spin(is_over, min(until, began + self._spin_message_s), policy):
                while not is_over():
                    now = time.monotonic()
                    if now >= until:
                        late = counters.late(self._missing(message, counters), str(message), now - began, now - began)
                        raise CollectiveTimeoutError(late + describe_last_calls())
                    self._sleep(message, min(policy.check_every_s, until - now))
                    self._check(message, counters)
            self._spin_message_s = adapt_spin(self._spin_message_s, time.monotonic() - began, policy)
        finally:
            self._run_callbacks()

    def _sleep(self, message: Message, timeout_s: float) -> None:
        """Sleep until something happens or this message is done.

        One thread sleeps on the doorbell, the other threads wait for this thread.
        """
        with self._lanes_lock:
            if message.is_done or self._failure is not None:
                return
            if self._is_asleep:
                self._lanes_changed.wait(timeout_s)
                return
            self._is_asleep = True
        bell = self._doorbells[self.rank]
        try:
            with heartbeat.waiting():
                while sem_trywait(bell) == 0:
                    pass
                if not self._guarded(self._is_over, message):  # the rings taken above may have been for this message
                    take(bell, timeout_s)
        finally:
            with self._lanes_lock:
                self._is_asleep = False
                self._lanes_changed.notify_all()

    def _missing(self, message: Message, counters: ProgressCounters) -> list[int]:
        """The ranks for which a message waits. If it may come from any rank: the ranks that can still send."""
        if message.peer is not None:
            return [message.peer]
        return [peer for peer in self._peers if not self._is_lost(peer, counters)] or self._peers

    def _is_lost(self, peer: int, counters: ProgressCounters) -> bool:
        return counters.has_left(peer) or counters.watch.is_gone(peer)

    def _check(self, message: Message, counters: ProgressCounters) -> None:
        """Raise if the other rank is lost or too late. Then all calls and messages have failed.

        Checks only once in `check_every_s`, even if it is called more often.
        """
        now = time.monotonic()
        if message.waiting is None:
            message.waiting, message.checked_at = Waiting(now), now
        if now < message.checked_at + counters.policy.check_every_s:
            return
        message.checked_at = now
        missing = self._missing(message, counters)
        try:
            counters.check(
                message.waiting,
                missing,
                message.__str__,
                lambda: [] if self._guarded(self._is_over, message) else missing,
            )
        except EvenstepError as error:
            if self._failure is None:
                self._fail(error)
            raise

    def _poll_message(self, message: Message) -> bool:
        """Move records without waiting; return whether the message is done or has failed."""
        try:
            if self._guarded(self._is_over, message):
                return True
            self._check(message, self._guarded(lambda: self.counters))
            return False
        except EvenstepError:
            return True
        finally:
            self._run_callbacks()

    # ------------------------------------------------------------------ called by the process's one thread

    def help(self, seconds: float) -> tuple[bool, bool]:
        """See `Attended`."""
        with_callback = tuple(self._listened)
        listened = [each for each in with_callback if isinstance(each, Message)]
        has_others = len(listened) < len(with_callback) or bool(self._callbacks)
        with self._lanes_lock:
            has_receives = any(ref() is not None for ref in self._receives)
            is_in_flight = has_receives or bool(self._not_taken) or any(self._outbox.values())
        if not is_in_flight:
            return super().help(seconds)
        is_shared = bool(listened) and has_others
        turn_s = min(seconds, _TURN_S) if is_shared else seconds
        has_moved = super().help(turn_s if is_shared or not listened else 0.0)[1]
        with contextlib.suppress(Exception):  # all messages have failed, and their waits raise the error
            counters = self._guarded(lambda: self.counters)
            has_moved = self._guarded(self._advance_lanes) or has_moved
            if listened and seconds and not has_moved:
                self._sleep(listened[0], turn_s)
            elif not seconds:
                for message in listened:
                    self._check(message, counters)
        self._run_callbacks()
        return True, has_moved

    # ------------------------------------------------------------------ failing and closing

    def _fail(self, error: BaseException) -> None:
        """See `CallQueue._fail`; all messages fail, too."""
        if isinstance(error, PeerLostError) and self._failure is None and not self._is_moving and not self._is_closed:
            try:
                self._guarded(self._advance_lanes)
            except MismatchError as refusal:  # the reason why the other rank has left
                error.args = (f"{error} {refusal}",)
            except EvenstepError:
                pass
        super()._fail(error)
        with self._lanes_lock:
            self._not_taken.clear()
            self._receives.clear()
            for outbox in self._outbox.values():
                outbox.clear()
            self._lanes_changed.notify_all()
        if self._is_asleep:
            sem_post(self._doorbells[self.rank])

    def close(self) -> None:
        """See `CallQueue.close`. Names the messages that nobody has received."""
        if self._is_closed:
            return
        try:
            self._guarded(self._advance_lanes)
            self._flush_answers(lambda: self._guarded(self._advance_lanes))
            self._name_unread()
        except MismatchError as refusal:
            say(f"evenstep: {refusal}")
        except EvenstepError:  # calls and messages have failed with an error that matters more than unread messages
            pass
        super().close()
        with self._lanes_lock:
            self._mapped.clear()
            self._unread.clear()
            self._spare.clear()

    def _name_unread(self) -> None:
        """Warn of messages to this rank that were not received, and of messages that this rank couldn't send."""
        known_as = self.known_as
        with self._lanes_lock:
            named = [(each.tag, each.data, known_as[each.sender], self.own_number) for each in self._unread]
            for to, outbox in self._outbox.items():
                named += [
                    (tag, data, self.own_number, known_as[to]) for kind, tag, data, *_ in outbox if kind == _MESSAGE
                ]
        if not named:
            return
        texts = [
            f"{_shown(data)} from rank {sender} to rank {receiver}, tag {tag}"
            for tag, data, sender, receiver in named[:_NUM_NAMED]
        ]
        more = f"; and {len(named) - _NUM_NAMED} more" if len(named) > _NUM_NAMED else ""
        say(f"evenstep: group {self.recorded.name} ends, and nobody has received {'; '.join(texts)}{more}.")

    def disown(self) -> None:
        """See `CallQueue.disown`."""
        super().disown()
        self._lanes_lock = threading.RLock()
        self._lanes_changed = threading.Condition(self._lanes_lock)
        self._is_moving = self._is_asleep = False
        self._receives = []
        self._listened = {}


def _fits(arrived: _Incoming, message: Message) -> bool:
    return arrived.tag == message.tag and message.peer in (None, arrived.sender)


def _shown(flat: Tensor) -> str:
    return f"{flat.numel()} {str(flat.dtype)[6:]}"
