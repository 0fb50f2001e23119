"""Ranks that share a GPU exchange tensors through the memory of their host.

NCCL takes one rank a GPU, and Gloo would send what lies there through TCP.

[Note: a call]

    caller    has the tensors copied to the host, on another stream behind what is queued on its own; goes on
    thread    waits for that copy, makes the call of the transport there, has the result copied back on a third stream
    wait      until the thread is done; work that is queued later on the caller's stream runs behind that copy

Calls run one after the other, in the order in which they were made, so ranks can't meet in different ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from evenstep.errors import PeerLostError
from evenstep.transport.base import Op, Transport, Work
from evenstep.transport.call_thread import CallThread, QueuedWork
from evenstep.transport.segment import SMALL_BYTES

_MAX_FREE = 512  # pieces of the host's memory that are kept


class HostMemory:
    """Memory of the host for tensors of a GPU, kept for later calls.

    Args:
        allocator: Makes what is large, where the other ranks reach it. Pages are locked, so that copies are quick and
            nobody waits for them.
    """

    def __init__(self, allocator: Transport) -> None:
        self._allocator = allocator
        self._lock = threading.Lock()
        self._free: list[tuple[Tensor, torch.cuda.Event]] = []  # with the end of the last copy from there
        self._locked: dict[int, tuple[Tensor, torch.device]] = {}  # by address; kept, for it mustn't be unmapped so

    def take(self, like: Tensor, stream: torch.cuda.Stream) -> Tensor | None:
        """[numel] for a tensor, until it is given back; None: it has to be made.

        Args:
            like: The tensor.
            stream: What is queued there from now on may write to it.
        """
        with self._lock:
            for index in reversed(range(len(self._free))):  # what was used last is in the cache
                host, copied = self._free[index]
                if host.dtype is like.dtype and host.numel() == like.numel():
                    del self._free[index]
                    stream.wait_event(copied)
                    return host
        if like.nbytes > SMALL_BYTES:
            return None
        with torch.inference_mode(False):
            return torch.empty(like.numel(), dtype=like.dtype, device="cpu", pin_memory=True)

    def make(self, like: Tensor) -> Tensor:
        """[numel] for a large tensor. Waits for the calls that run, so not for the caller's thread."""
        host = self._allocator.allocate(like.numel(), dtype=like.dtype, device=torch.device("cpu"))
        self._lock_pages(host, like.device)
        return host

    def give_back(self, hosts: Sequence[Tensor], copied: torch.cuda.Event) -> None:
        """Others may have it behind an event."""
        with self._lock:
            self._free += [(host, copied) for host in hosts]
            forgotten, self._free = self._free[:-_MAX_FREE], self._free[-_MAX_FREE:]
        for host, event in forgotten:
            event.synchronize()
            self._unlock(host)

    def _lock_pages(self, host: Tensor, device: torch.device) -> None:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if int(runtime.cudaHostRegister(host.data_ptr(), host.nbytes, 0)) == 0:
            self._locked[host.data_ptr()] = host, device
            return
        try:  # CUDA tells of a refusal once more, where something is asked of it next
            torch.zeros(1, device=device)
        except RuntimeError:
            torch.zeros(1, device=device)

    def _unlock(self, host: Tensor) -> None:
        if self._locked.pop(host.data_ptr(), None) is not None:
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(host.data_ptr())

    def close(self) -> None:
        """Let go of it, also of what a call that has failed did not give back."""
        for device in {device for _, device in self._locked.values()}:
            torch.cuda.synchronize(device)
        for host, _ in list(self._locked.values()):
            self._unlock(host)
        self._free = []


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
        self._streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}

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
        self.barrier().wait()  # behind the calls that are queued: the transport behind is asked in this thread
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
        out, back = self._streams_of(device)
        ready, there, copied = (torch.cuda.Event() for _ in range(3))  # type: ignore[no-untyped-call]

        def copy_to(hosts: Sequence[Tensor]) -> None:
            with torch.cuda.stream(out), torch.no_grad():
                out.wait_event(ready)
                for tensor, host in zip(reads, hosts, strict=False):
                    host.view(tensor.shape).copy_(tensor, non_blocking=True)
                there.record(out)

        def prepare(_: int) -> Callable[[], object]:
            ready.record(torch.cuda.current_stream(device))
            for tensor in tensors:
                tensor.record_stream(out)
                tensor.record_stream(back)
            taken = [self._memory.take(tensor, out) for tensor in tensors]
            at_once = [host for host in taken if host is not None]
            is_all_there = len(at_once) == len(taken)
            if is_all_there:
                copy_to(at_once)

            def run() -> None:
                hosts = at_once
                if not is_all_there:
                    hosts = [
                        self._memory.make(tensor) if host is None else host
                        for tensor, host in zip(tensors, taken, strict=True)
                    ]
                    copy_to(hosts)
                there.synchronize()
                call(*(host.view(tensor.shape) for tensor, host in zip(tensors, hosts, strict=True))).wait()
                with torch.cuda.stream(back):
                    back.wait_event(there)
                    for tensor, host in zip(tensors, hosts, strict=True):
                        if any(tensor is each for each in writes):
                            tensor.copy_(host.view(tensor.shape), non_blocking=True)
                    copied.record(back)
                self._memory.give_back(hosts, copied)

            return run

        return _HostWork(self._thread.submit(what, prepare), copied, device)

    def _streams_of(self, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """For copies to the host, and for those from there."""
        if device not in self._streams:
            made = torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._streams[device] = made
        return self._streams[device]

    def __repr__(self) -> str:
        return f"<ThroughHostTransport rank {self.rank}/{self.world_size} over {self._behind!r}>"
