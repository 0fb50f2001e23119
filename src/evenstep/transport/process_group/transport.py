"""torch's process groups (Gloo on CPU, NCCL on CUDA) behind evenstep's seam.

Gloo's own reduce-scatter is an all-reduce of which each rank keeps a part, twice the bytes that must travel. Here every
rank sends every other its part, and each adds what it has received: in a tree over ranks, 16 bits in 32. Where two
ranks send to each other, Gloo's collectives use a connection in one direction at a time; `full_duplex` uses both.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from evenstep.errors import CollectiveTimeoutError, EvenstepError, PeerLostError
from evenstep.ground.compat.torch_distributed import keep_groups, make_group_alone, set_gloo_timeout
from evenstep.ground.health import heartbeat
from evenstep.ground.health.first_failure import is_consequence
from evenstep.transport.base import Op, Transport, Work
from evenstep.transport.core.header import Fingerprint
from evenstep.transport.core.last_calls import NUM_CALLS, RecordedGroup, describe_last_calls, record
from evenstep.transport.core.reduction import Scratch, divide, plan_arithmetic, reduce_into
from evenstep.transport.core.validation import Arguments, flat_view, forked_error
from evenstep.transport.process_group.full_duplex import FullDuplex

# torch 2.13 renamed it, and warns of the old name that torch 2.11 knows.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_REDUCE_OPS: dict[Op, Any] = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,  # divided afterwards: Gloo has no average
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}
# Gloo refuses to move other dtypes; as bytes it moves them all.
_MOVED = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
    | {torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64}
)


class _GroupWork:
    """A `torch.distributed` work whose errors name rank and call."""

    __slots__ = ("_finish", "_number", "_transport", "_what", "_work")

    def __init__(
        self, work: Work, transport: ProcessGroupTransport, what: str, finish: Callable[[], object] | None
    ) -> None:
        self._work = work
        self._transport = transport
        self._what = what
        self._number = transport._num_calls
        self._finish = finish  # what remains to be done with what has arrived

    def wait(self) -> None:
        self._transport.check_process()
        heartbeat.mark_waiting(True)
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._transport._explained(error, self._what) from error
        finally:
            heartbeat.mark_waiting(False)
        self._transport.recorded.unfinished.discard(self._number)
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    def is_completed(self) -> bool:
        is_completed = self._work.is_completed()
        if is_completed:
            self._transport.recorded.unfinished.discard(self._number)
        return is_completed


class ProcessGroupTransport:
    """Collectives through one torch process group.

    Args:
        group: The group; all its ranks build a transport on it.
        name: "gloo" or "nccl", for people.
        timeout_s: Deadline of a collective, for the groups that `split` makes.
        owns_group: Destroy the group when closed.
        split_by: Makes what `split` returns; None: with a new group of torch's.
        close_by: Ends a group that torch doesn't know by name.

    Attributes:
        known_as: This rank's number in messages.
        recorded: This transport, as the record of the last calls knows it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        name: str,
        timeout_s: float,
        owns_group: bool = False,
        split_by: Callable[[], Transport] | None = None,
        close_by: Callable[[], object] | None = None,
    ) -> None:
        self.name = name
        self.rank = group.rank()
        self.world_size = group.size()
        self._group: dist.ProcessGroup | None = group
        self._timeout_s = timeout_s
        self._owns_group = owns_group
        self._split_by = split_by
        self._close_by = close_by
        self.known_as = self.rank
        self.recorded = RecordedGroup(_name_of(group) or name, name)
        self._num_calls = 0
        self._arguments = Arguments(name, self.rank, self.world_size)
        self._scratch = Scratch()
        self._is_parents = False
        _transports.add(self)

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Transport.allocate`: ordinary memory."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> Work:
        """See `Transport.all_reduce`."""
        what = self._next_call("all_reduce", tensor)
        return self._start(what, dist.all_reduce, tensor, _REDUCE_OPS[op], finish=self._division(tensor, op))

    def broadcast(self, tensor: Tensor, src: int) -> Work:
        """See `Transport.broadcast`."""
        what = self._next_call("broadcast", tensor)
        return self._start(what, dist.broadcast, _movable(tensor), group_src=src)

    def all_gather(self, out: Tensor, tensor: Tensor) -> Work:
        """See `Transport.all_gather`."""
        self._arguments.check_sizes("all_gather", "out", out, "tensor", tensor)
        what = self._next_call("all_gather", tensor)
        if self.world_size == 2 and self._is_gloo(tensor):
            mine = _as_bytes(tensor)
            return self._exchange(what, self._parts(out), [mine, mine])
        return self._start(what, _all_gather_single, _movable(out), _movable(tensor))

    def reduce_scatter(self, out: Tensor, tensor: Tensor, op: Op = "sum") -> Work:
        """See `Transport.reduce_scatter`."""
        self._arguments.check_sizes("reduce_scatter", "tensor", tensor, "out", out)
        what = self._next_call("reduce_scatter", tensor)
        if self._is_gloo(tensor):
            return self._exchange_and_add(what, out, tensor, op)
        finish = self._division(out, op)
        return self._start(what, _reduce_scatter_single, out, tensor, op=_REDUCE_OPS[op], finish=finish)

    def reduce(self, tensor: Tensor, dst: int, op: Op = "sum") -> Work:
        """See `Transport.reduce`."""
        what = self._next_call("reduce", tensor)
        finish = self._division(tensor, op) if dst == self.rank else None
        return self._start(what, dist.reduce, tensor, op=_REDUCE_OPS[op], group_dst=dst, finish=finish)

    def gather(self, out: Tensor | None, tensor: Tensor, dst: int) -> Work:
        """See `Transport.gather`."""
        what = self._next_call("gather", tensor)
        parts = None if out is None or dst != self.rank else self._parts(out)
        return self._start(what, dist.gather, _as_bytes(tensor), parts, group_dst=dst)

    def scatter(self, out: Tensor, tensor: Tensor | None, src: int) -> Work:
        """See `Transport.scatter`."""
        what = self._next_call("scatter", out)
        parts = None if tensor is None or src != self.rank else self._parts(tensor)
        return self._start(what, dist.scatter, _as_bytes(out), parts, group_src=src)

    def all_to_all(
        self,
        out: Tensor,
        tensor: Tensor,
        out_splits: Sequence[int] | None = None,
        splits: Sequence[int] | None = None,
    ) -> Work:
        """See `Transport.all_to_all`."""
        self._arguments.check_all_to_all(out, tensor, out_splits, splits)
        what = self._next_call("all_to_all", tensor)
        received, sent = _as_bytes(out), _as_bytes(tensor)
        sizes = [None if each is None else [n * tensor.itemsize for n in each] for each in (out_splits, splits)]
        if self._is_gloo(tensor):
            return self._exchange(what, self._parts(received, sizes[0]), self._parts(sent, sizes[1]))
        return self._start(what, dist.all_to_all_single, received, sent, *sizes)

    def barrier(self) -> Work:
        """See `Transport.barrier`."""
        self._record(Fingerprint("barrier", None, torch.uint8, ()))
        heartbeat.mark_collective(self._num_calls)
        devices = [torch.cuda.current_device()] if self.name == "nccl" else None
        return self._start(f"barrier number {self._num_calls}", dist.barrier, device_ids=devices)

    def set_timeout(self, timeout_s: float) -> None:
        """Change the deadline of calls from now on. Over NCCL, torch's own function does it."""
        self._timeout_s = timeout_s
        if self.name == "gloo":
            set_gloo_timeout(self._open_group(), timeout_s)

    def split(self) -> Transport:
        """See `Transport.split`: a new process group over the same ranks."""
        self.check_process()
        if self._split_by is not None:
            return self._split_by()
        members = dist.get_process_group_ranks(self._open_group())
        group = make_group_alone(members, self.name, timedelta(seconds=self._timeout_s))
        return ProcessGroupTransport(group, name=self.name, timeout_s=self._timeout_s, owns_group=True)

    def close(self) -> None:
        """See `Transport.close`."""
        group, self._group = self._group, None
        # Dropped here, too: with the last reference Gloo closes its connections, which the other ranks notice.
        close_by, self._close_by, self._split_by = self._close_by, None, None
        if group is not None and close_by is not None:
            close_by()
        if group is not None and self._owns_group and dist.is_initialized():
            dist.destroy_process_group(group)

    def disown(self) -> None:
        """Note in a forked child that the group is its parent's. Gloo's threads are, too: a call would never end."""
        if self._group is not None:
            keep_groups(self._group)
        self._group, self._close_by, self._is_parents = None, None, True

    def check_process(self) -> None:
        """Refuse calls in a forked child.

        Raises:
            UsageError: This process is one.
        """
        if self._is_parents:
            raise forked_error(self.known_as)

    def _open_group(self) -> dist.ProcessGroup:
        self.check_process()
        if self._group is None:
            raise PeerLostError(f"rank {self.known_as}: this {self.name} transport has been closed.")
        return self._group

    def _start(
        self,
        what: str,
        collective: Callable[..., Any],
        *args: Any,
        finish: Callable[[], object] | None = None,
        **kwargs: Any,
    ) -> Work:
        try:
            work = collective(*args, **kwargs, group=self._open_group(), async_op=True)
        except RuntimeError as error:
            raise self._explained(error, what) from error
        except ValueError as error:  # torch 2.11 logs a failure, and fails at that for groups it doesn't know by name
            failure = error.__context__
            if not isinstance(failure, RuntimeError):
                raise
            raise self._explained(failure, what) from failure
        return _GroupWork(work, self, what, finish)

    def _exchange_and_add(self, what: str, out: Tensor, tensor: Tensor, op: Op) -> Work:
        arithmetic = plan_arithmetic(op, tensor.dtype)
        into, received = out.detach().view(-1), torch.empty_like(tensor).view(-1)

        def add() -> None:
            parts = list(received.view(self.world_size, into.numel()).unbind())
            reduce_into([into], parts, arithmetic, self._scratch)

        return self._exchange(what, self._parts(received), self._parts(tensor), finish=add)

    def _is_gloo(self, tensor: Tensor) -> bool:
        return self.name == "gloo" and tensor.device.type == "cpu"

    def _exchange(
        self,
        what: str,
        received: Sequence[Tensor],
        sent: Sequence[Tensor],
        *,
        finish: Callable[[], object] | None = None,
    ) -> Work:
        try:
            work = FullDuplex(self._open_group(), received, sent, number=self._num_calls, timeout_s=self._timeout_s)
        except RuntimeError as error:
            raise self._explained(error, what) from error
        return _GroupWork(work, self, what, finish)

    def _division(self, total: Tensor, op: Op) -> Callable[[], object] | None:
        """The division that makes a mean of a sum; None for other operators."""
        detached = total.detach()
        return (lambda: divide(detached, self.world_size)) if op == "mean" else None

    def _parts(self, tensor: Tensor, num_bytes: Sequence[int] | None = None) -> list[Tensor]:
        """A share per rank, as bytes: of so many, or all the same."""
        if num_bytes is not None:
            return list(_as_bytes(tensor).split_with_sizes(num_bytes))
        return list(_as_bytes(tensor).view(self.world_size, -1 if tensor.numel() else 0).unbind())

    def _next_call(self, collective: str, tensor: Tensor) -> str:
        self._record(Fingerprint(collective, None, tensor.dtype, tuple(tensor.shape)))
        return f"{collective} number {self._num_calls} ({tensor.numel()} x {str(tensor.dtype)[6:]})"

    def _record(self, call: Fingerprint) -> None:
        self._num_calls += 1
        recorded = self.recorded
        recorded.unfinished.add(self._num_calls)
        recorded.unfinished.discard(self._num_calls - NUM_CALLS)  # of a work that nobody waits for, say
        recorded.num_started = recorded.num_completed = self._num_calls
        record(recorded, self._num_calls, call)

    def _explained(self, error: RuntimeError, what: str) -> Exception:
        """Translate a failure to `evenstep.errors`; an error of another kind stays as it is."""
        if isinstance(error, EvenstepError):
            return error
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        if "timed out" in text.lower() or "timeout" in text.lower():
            return CollectiveTimeoutError(
                f"rank {self.known_as} waited in vain in {what} over {self.name}: {text}.{describe_last_calls()}"
            )
        if is_consequence(error):
            return PeerLostError(f"rank {self.known_as} lost a peer in {what} over {self.name}: {text}")
        return error

    def __repr__(self) -> str:
        state = "closed" if self._group is None else f"{self._num_calls} calls"
        return f"<ProcessGroupTransport {self.name} rank {self.rank}/{self.world_size} {state}>"


_transports: weakref.WeakSet[ProcessGroupTransport] = weakref.WeakSet()


def _disown_all() -> None:
    for transport in list(_transports):
        transport.disown()


os.register_at_fork(after_in_child=_disown_all)


def _name_of(group: dist.ProcessGroup) -> str:
    try:
        return str(group.group_name)
    except RuntimeError:  # one that torch doesn't know
        return ""


def _movable(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in _MOVED else _as_bytes(tensor)


def _as_bytes(tensor: Tensor) -> Tensor:
    return flat_view(tensor.detach()).view(torch.uint8)
