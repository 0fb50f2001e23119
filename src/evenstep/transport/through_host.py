"""Ranks that share a GPU exchange tensors through the memory of their host.

NCCL takes one rank a GPU, and Gloo would send what lies there through TCP.

[Note: a call]

    caller    notes on its stream when the tensors are ready; goes on
    thread    has them copied to the host behind that, makes the call of the transport there, has the result copied back
    wait      until the thread is done; work that is queued later on the caller's stream runs behind the copy

Calls run one after the other, in the order in which they were made, so ranks can't meet in different ones.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from evenstep.errors import PeerLostError
from evenstep.transport.base import Op, Transport, Work
from evenstep.transport.call_thread import CallThread, QueuedWork

_MAX_KEPT = 32  # sizes of tensors for which memory of the host is kept
_LOCKED_BYTES = 64 << 10  # from here on it is worth locking pages


class HostMemory:
    """Memory of the host for tensors of a GPU, kept for the next call of the same size.

    Args:
        allocator: Makes it. Its pages are locked, where CUDA does that, so that copies are quick.
    """

    def __init__(self, allocator: Transport) -> None:
        self._allocator = allocator
        self._kept: collections.OrderedDict[tuple[int, torch.dtype, int], Tensor] = collections.OrderedDict()
        self._locked: set[int] = set()

    def of(self, place: int, tensor: Tensor) -> Tensor:
        """[numel] for a tensor; for the one with another number in the same call it is other memory."""
        key = (place, tensor.dtype, tensor.numel())
        host = self._kept.get(key)
        if host is None:
            if len(self._kept) >= _MAX_KEPT:
                self._forget(self._kept.popitem(last=False)[1])
            host = self._allocator.allocate(tensor.numel(), dtype=tensor.dtype, device=torch.device("cpu"))
            self._kept[key] = host
            if host.nbytes >= _LOCKED_BYTES:
                self._lock_pages(host, tensor.device)
        else:
            self._kept.move_to_end(key)
        return host

    def _lock_pages(self, host: Tensor, device: torch.device) -> None:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if int(runtime.cudaHostRegister(host.data_ptr(), host.nbytes, 0)) == 0:
            self._locked.add(host.data_ptr())
            return
        try:  # CUDA tells of a refusal once more, where something is asked of it next
            torch.zeros(1, device=device)
        except RuntimeError:
            torch.zeros(1, device=device)

    def _forget(self, host: Tensor) -> None:
        if host.data_ptr() in self._locked:
            self._locked.remove(host.data_ptr())
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(host.data_ptr())

    def close(self) -> None:
        """Let go of it."""
        while self._kept:
            self._forget(self._kept.popitem()[1])


class _HostWork:
    """A call whose results are copied back to a GPU."""

    def __init__(self, queued: QueuedWork, copied: torch.cuda.Event | None, device: torch.device) -> None:
        self._queued = queued
        self._copied = copied
        self._device = device

    def wait(self) -> None:
        self._queued.wait()
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)

    def is_completed(self) -> bool:
        return self._queued.is_completed()

    def __repr__(self) -> str:
        return f"{self._queued!r} through the host"


class ThroughHostTransport:
    """See above; tensors on the CPU are the transport's behind it.

    Args:
        behind: Carries tensors of the CPU between the same ranks. This one's: it is closed with it.
    """

    name = "host memory"

    def __init__(self, behind: Transport) -> None:
        self.rank = behind.rank
        self.world_size = behind.world_size
        self._behind = behind
        self._memory = HostMemory(behind)
        self._thread = CallThread("evenstep through the host", let_go=behind.close)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Transport.allocate`: ordinary memory."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> Work:
        """See `Transport.all_reduce`."""
        return self._start("all_reduce", lambda host: self._behind.all_reduce(host, op), [tensor], [tensor])

    def broadcast(self, tensor: Tensor, src: int) -> Work:
        """See `Transport.broadcast`."""
        reads, writes = ([tensor], []) if src == self.rank else ([], [tensor])
        return self._start("broadcast", lambda host: self._behind.broadcast(host, src), reads, writes)

    def all_gather(self, out: Tensor, tensor: Tensor) -> Work:
        """See `Transport.all_gather`."""
        return self._start("all_gather", lambda mine, all_: self._behind.all_gather(all_, mine), [tensor], [out])

    def reduce_scatter(self, out: Tensor, tensor: Tensor, op: Op = "sum") -> Work:
        """See `Transport.reduce_scatter`."""

        def call(whole: Tensor, mine: Tensor) -> Work:
            return self._behind.reduce_scatter(mine, whole, op)

        return self._start("reduce_scatter", call, [tensor], [out])

    def reduce(self, tensor: Tensor, dst: int, op: Op = "sum") -> Work:
        """See `Transport.reduce`."""
        writes = [tensor] if dst == self.rank else []
        return self._start("reduce", lambda host: self._behind.reduce(host, dst, op), [tensor], writes)

    def gather(self, out: Tensor | None, tensor: Tensor, dst: int) -> Work:
        """See `Transport.gather`."""
        if dst != self.rank or out is None:
            return self._start("gather", lambda mine: self._behind.gather(None, mine, dst), [tensor], [])
        return self._start("gather", lambda mine, all_: self._behind.gather(all_, mine, dst), [tensor], [out])

    def scatter(self, out: Tensor, tensor: Tensor | None, src: int) -> Work:
        """See `Transport.scatter`."""
        if src != self.rank or tensor is None:
            return self._start("scatter", lambda mine: self._behind.scatter(mine, None, src), [], [out])
        return self._start("scatter", lambda all_, mine: self._behind.scatter(mine, all_, src), [tensor], [out])

    def all_to_all(
        self,
        out: Tensor,
        tensor: Tensor,
        out_splits: Sequence[int] | None = None,
        splits: Sequence[int] | None = None,
    ) -> Work:
        """See `Transport.all_to_all`."""

        def call(sent: Tensor, received: Tensor) -> Work:
            return self._behind.all_to_all(received, sent, out_splits, splits)

        return self._start("all_to_all", call, [tensor], [out])

    def barrier(self) -> Work:
        """See `Transport.barrier`."""
        return self._start("barrier", self._behind.barrier, [], [])

    def split(self) -> Transport:
        """See `Transport.split`."""
        return ThroughHostTransport(self._behind.split())

    def close(self) -> None:
        """See `Transport.close`."""
        self._thread.close(PeerLostError(f"rank {self.rank}: this {self.name} transport has been closed."))
        self._memory.close()

    # ------------------------------------------------------------------ a call

    def _start(
        self, what: str, call: Callable[..., Work], reads: Sequence[Tensor], writes: Sequence[Tensor]
    ) -> _HostWork:
        """See [Note: a call].

        Args:
            what: For messages.
            call: Given what stands for each tensor on the host, one that is read and written once, starts it there.
            reads: What this rank gives.
            writes: What it gets.
        """
        tensors = [*reads, *(tensor for tensor in writes if not any(tensor is each for each in reads))]
        device = next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
        if device is None:
            queued = self._thread.submit(what, lambda _: lambda: call(*tensors).wait())
            return _HostWork(queued, None, torch.device("cpu"))
        stream = self._stream_of(device)
        ready = torch.cuda.current_stream(device).record_event()
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        for tensor in tensors:
            tensor.record_stream(stream)

        def run() -> None:
            hosts = [self._memory.of(place, tensor) for place, tensor in enumerate(tensors)]
            with torch.cuda.stream(stream):
                stream.wait_event(ready)
                for tensor, host in zip(reads, hosts, strict=False):
                    host.view(tensor.shape).copy_(tensor, non_blocking=True)
                stream.synchronize()
                call(*hosts).wait()
                for tensor, host in zip(tensors, hosts, strict=True):
                    if any(tensor is each for each in writes):
                        tensor.copy_(host.view(tensor.shape), non_blocking=True)
                copied.record(stream)

        return _HostWork(self._thread.submit(what, lambda _: run), copied, device)

    def _stream_of(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]

    def __repr__(self) -> str:
        return f"<ThroughHostTransport rank {self.rank}/{self.world_size} over {self._behind!r}>"
