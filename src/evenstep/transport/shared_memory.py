"""CPU ranks of one host exchange tensors through memory that they share.

[Note: who does the work]

The ranks themselves, in the thread that waits. A call announces itself when it is launched; its reduction is done in
`Work.wait()`, or earlier when a later call is launched and everybody has arrived. A thread of its own would compete
with the backward pass for the same core. So that a rank which waits for something else first can't hold the others
up for ever, a helper (`helper.py`) takes over calls that nobody has waited for within some hundredths of a second.
"""

from __future__ import annotations

import collections
import os
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from evenstep.errors import ConfigurationError, EvenstepError, PeerLostError
from evenstep.transport.arrivals import Arrivals, Phase, plan_waiting
from evenstep.transport.base import Op, Transport, Work
from evenstep.transport.collectives import Call, Exchange, Program
from evenstep.transport.header import DTYPES, Fingerprint
from evenstep.transport.helper import helper
from evenstep.transport.peers import PeerProcess, PeerWatch
from evenstep.transport.reduction import plan_arithmetic
from evenstep.transport.segment import NUM_SLOTS, SMALL_BYTES, Segment

_CARRIED = frozenset(DTYPES)
_MAX_FINGERPRINTS = 4096


class _SharedWork:
    """One call, from its launch to its end."""

    __slots__ = ("_back", "_call", "_program", "_transport", "_waits_for", "has_arrived", "is_done")

    def __init__(self, transport: SharedMemoryTransport, call: Call, back: tuple[Tensor, Tensor] | None) -> None:
        self._transport = transport
        self._call = call
        self._back = back
        self._program: Program | None = None
        self._waits_for = (Phase.ARRIVED, call.number + 1)
        self.has_arrived = False
        self.is_done = False

    def wait(self) -> None:
        if not self.is_done:
            self._transport._finish(self)

    def is_completed(self) -> bool:
        return self.is_done or self._transport._look(self)

    def __repr__(self) -> str:
        state = "done" if self.is_done else "arrived" if self.has_arrived else "queued"
        return f"<Work {self._call} {state}>"


class SharedMemoryTransport:
    """Collectives of the ranks of one host. Made by `connect_shared_memory`, not by calling the class.

    Args:
        segment: The shared segment, in which all ranks have signed.
        processes: The rank processes, in order of rank.
        rank: This rank.
        timeout_s: Deadline for peers to arrive.
    """

    name = "shared memory"

    def __init__(self, segment: Segment, processes: Sequence[PeerProcess], *, rank: int, timeout_s: float) -> None:
        self.rank = rank
        self.world_size = len(processes)
        self.timeout_s = timeout_s
        self._segment = segment
        self._watch = PeerWatch([each for each in processes if each.rank != rank])
        arrivals = Arrivals(
            segment.common.address + segment.layout.semaphores,
            rank=rank,
            world_size=self.world_size,
            watch=self._watch,
            policy=plan_waiting(num_ranks=self.world_size, num_cores=len(os.sched_getaffinity(0)), timeout_s=timeout_s),
            has_left=segment.has_left,
        )
        self._exchange = Exchange(segment, arrivals, rank=rank, world_size=self.world_size, name=self.name)
        self._lock = threading.RLock()
        self._queue: collections.deque[_SharedWork] = collections.deque()
        self._fingerprints: dict[Any, bytes] = {}
        self._num_calls = 0
        self._failure: EvenstepError | None = None
        self._is_closed = False
        helper.register(self)

    # ------------------------------------------------------------------ the seam

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Transport.allocate`: memory that the other ranks can reach, so that nothing has to be copied.

        Raises:
            ConfigurationError: There isn't enough memory; the message has the bytes needed and available.
        """
        if device.type != "cpu" or numel * dtype.itemsize <= SMALL_BYTES:  # small ones travel with their announcement
            return torch.zeros(numel, dtype=dtype, device=device)
        with self._lock:
            return self._exchange.arena.allocate(numel, dtype)

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> Work:
        """See `Transport.all_reduce`; also of tensors that aren't contiguous."""
        plan_arithmetic(op, tensor.dtype)  # refuses what has no meaning, before anything is sent
        flat, back = self._flattened(tensor)
        return self._launch("all_reduce", tensor, flat, flat, op=op, back=back)

    def broadcast(self, tensor: Tensor, src: int) -> Work:
        """See `Transport.broadcast`; also of tensors that aren't contiguous."""
        if not 0 <= src < self.world_size:
            raise ConfigurationError(f"broadcast: src={src} on rank {self.rank}; ranks are 0 to {self.world_size - 1}.")
        flat, back = self._flattened(tensor)
        return self._launch("broadcast", tensor, flat, flat, root=src, back=back)

    def all_gather(self, out: Tensor, tensor: Tensor) -> Work:
        """See `Transport.all_gather`."""
        self._check_sizes("all_gather", "out", out, "tensor", tensor)
        flat, _ = self._flattened(tensor)
        into, back = self._flattened(out)
        return self._launch("all_gather", tensor, flat, into, back=back)

    def reduce_scatter(self, out: Tensor, tensor: Tensor, op: Op = "sum") -> Work:
        """See `Transport.reduce_scatter`."""
        plan_arithmetic(op, tensor.dtype)
        self._check_sizes("reduce_scatter", "tensor", tensor, "out", out)
        flat, _ = self._flattened(tensor)
        into, back = self._flattened(out)
        return self._launch("reduce_scatter", tensor, flat, into, op=op, back=back)

    def split(self) -> Transport:
        """See `Transport.split`: a segment of its own."""
        from evenstep.transport.host import connect_shared_memory

        made = connect_shared_memory(self, timeout_s=self.timeout_s)
        if isinstance(made, str):
            raise ConfigurationError(f"rank {self.rank}: no second segment of shared memory could be made: {made}.")
        return made

    def close(self) -> None:
        """See `Transport.close`. Memory from `allocate` lives on until its last tensor has gone."""
        if self._is_closed:
            return
        self._is_closed = True
        self._segment.leave(self.rank)
        helper.forget(self)
        with self._lock:
            self._watch.close()
            self._queue.clear()
            self._failure = PeerLostError(f"rank {self.rank}: this {self.name} transport has been closed.")
            del self._exchange, self._segment

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "failed" if self._failure else f"{len(self._queue)} in flight"
        return f"<SharedMemoryTransport rank {self.rank}/{self.world_size} {self._num_calls} calls, {state}>"

    # ------------------------------------------------------------------ launching

    def _flattened(self, tensor: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """[numel], and where a result has to be copied in the end, if that isn't the tensor itself."""
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.dtype not in _CARRIED:
            raise ConfigurationError(
                f"rank {self.rank}: the {self.name} transport carries dense CPU tensors, and this is a "
                f"{str(tensor.layout)[6:]} {str(tensor.dtype)[6:]} tensor on {tensor.device}. Move or convert it, or "
                f"use transport='gloo'."
            )
        if tensor.requires_grad:
            tensor = tensor.detach()
        if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            return (tensor if tensor.dim() == 1 else tensor.view(-1)), None
        copy = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
        return copy.view(-1), (tensor, copy)

    def _check_sizes(self, what: str, long_name: str, long: Tensor, short_name: str, short: Tensor) -> None:
        if long.numel() != self.world_size * short.numel() or long.dtype is not short.dtype:
            raise ConfigurationError(
                f"{what} on rank {self.rank}: {long_name} is {str(long.dtype)[6:]} {list(long.shape)} and {short_name} "
                f"{str(short.dtype)[6:]} {list(short.shape)}; {long_name} has {self.world_size} times the elements of "
                f"{short_name}, and its dtype."
            )

    def _launch(
        self,
        collective: str,
        tensor: Tensor,
        flat: Tensor,
        out: Tensor,
        *,
        op: Op | None = None,
        root: int = -1,
        back: tuple[Tensor, Tensor] | None = None,
    ) -> Work:
        key = (collective, op, tensor.dtype, tensor.shape, root)
        packed = self._fingerprints.get(key)
        if packed is None:
            packed = Fingerprint(collective, op, tensor.dtype, tuple(tensor.shape), root).pack()
            if len(self._fingerprints) >= _MAX_FINGERPRINTS:
                self._fingerprints.clear()
            self._fingerprints[key] = packed
        with self._lock:
            if self._failure is not None:
                raise self._failure
            place = self._exchange.arena.locate(flat.data_ptr(), flat.nbytes) if flat.nbytes > SMALL_BYTES else None
            call = Call(self._num_calls, collective, op, root, flat, out, packed, place)
            self._num_calls += 1
            work = _SharedWork(self, call, back)
            self._queue.append(work)
            self._arrive()
            if len(self._queue) > 1:
                self._advance()
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

    def _finish(self, work: _SharedWork) -> None:
        """Run programs, waiting where they wait, until this call is done."""
        with self._lock:
            while not work.is_done:
                if self._failure is not None:
                    raise self._failure
                self._step(self._queue[0], blocking=True)

    def _look(self, work: _SharedWork) -> bool:
        """Go on without waiting; whether the call is done."""
        if self._lock.acquire(blocking=False):
            try:
                if self._failure is None:
                    self._advance()
            finally:
                self._lock.release()
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

    def _fail(self, error: BaseException) -> None:
        """No call can be trusted any more: ranks may have come to different points."""
        if isinstance(error, EvenstepError):
            self._failure = error
        else:
            self._failure = PeerLostError(
                f"rank {self.rank}: a collective over {self.name} was interrupted by {type(error).__name__}, so the "
                f"ranks are no longer in step. Start again."
            )
        self._queue.clear()

    def _step(self, work: _SharedWork, *, blocking: bool) -> bool:
        """Run the program of the first call to its next meeting; whether that was possible."""
        exchange = self._exchange
        phase, count = work._waits_for
        try:
            if not work.has_arrived:
                if blocking:
                    earlier = work._call.number - NUM_SLOTS + 1
                    exchange.arrivals.wait(Phase.FINISHED, earlier, lambda: f"{self.name} collective {work._call}")
                self._arrive()
                if not work.has_arrived:
                    return False
            if blocking:
                exchange.arrivals.wait(phase, count, lambda: f"{self.name} collective {work._call}")
            elif not exchange.arrivals.all_here(phase, count):
                return False
            if work._program is None:
                work._program = exchange.program(work._call)
                next(work._program)  # to the meeting that has just taken place
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
        if self._queue:
            self._arrive()
        return True
