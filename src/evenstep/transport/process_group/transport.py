"""torch's process groups (Gloo on CPU, NCCL on CUDA) as transports.

Gloo's own reduce-scatter is an all-reduce from which each rank keeps a part: it sends twice the necessary bytes. Here
every rank sends each other rank its part, and adds the parts that it receives: in a tree over ranks, 16-bit numbers in
32 bits. If two ranks send to each other, Gloo's collectives use a connection in one direction at a time; `full_duplex`
uses both.
"""

from __future__ import annotations

import atexit
import functools
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
from evenstep.transport.base import Collective, Op, Work
from evenstep.transport.core.last_calls import NUM_CALLS, describe_last_calls
from evenstep.transport.core.reduction import Scratch, divide, reduce_into
from evenstep.transport.core.transport import Transport
from evenstep.transport.core.validation import forked_error
from evenstep.transport.process_group.full_duplex import FullDuplex, join_threads

# torch 2.13 renamed this function, and warns of the old name, the only one that torch 2.11 knows.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_REDUCE_OPS: dict[Op, Any] = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,  # divided afterwards, because Gloo has no average
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}
# Gloo refuses to send other dtypes; they are sent as bytes.
_MOVED = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
    | {torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64}
)

_DIRECT_BYTES = 1 << 15  # in an all-gather: up to this size a part is sent to all ranks at once, not around a ring


class _GroupWork:
    """A `torch.distributed` work whose errors name rank and call."""

    __slots__ = ("_call", "_finish", "_number", "_transport", "_what", "_work")

    def __init__(
        self, work: Work, transport: ProcessGroupTransport, call: Collective, finish: Callable[[], object] | None
    ) -> None:
        self._work = work
        self._transport = transport
        self._call: Collective | None = call
        self._what = transport._describe(call)
        self._number = transport.num_calls
        self._finish = finish  # processes the received data

    def wait(self) -> None:
        self._transport.check_process()
        try:
            with heartbeat.waiting():
                self._work.wait()
        except RuntimeError as error:
            raise self._transport._explained(error, self._what) from error
        self._transport.recorded.unfinished.discard(self._number)
        call, self._call = self._call, None
        if call is None:
            return
        if self._finish is not None:
            self._finish()
        call.copy_back()

    def is_completed(self) -> bool:
        is_completed = self._work.is_completed()
        if is_completed:
            self._transport.recorded.unfinished.discard(self._number)
        return is_completed


class ProcessGroupTransport(Transport):
    """Collectives through one torch process group.

    Args:
        group: The group; all its ranks build a transport on it.
        name: "gloo" or "nccl", for messages.
        timeout_s: Deadline of a collective, for the groups that `split` makes.
        owns_group: Whether `close` destroys the group.
        split_by: Makes the result of `split`; None: `split` makes a new torch group.
        close_by: Ends the calls of a group that torch doesn't know by name, and closes it.
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
        super().__init__(group.rank(), group.size(), _name_of(group) or name)
        self._group: dist.ProcessGroup | None = group
        self.timeout_s = timeout_s
        self._owns_group = owns_group
        self._split_by = split_by
        self._close_by = close_by
        self._scratch = Scratch()
        self._is_parents = False
        _transports.add(self)

    def _start(self, call: Collective) -> Work:
        number = self._count(call.packed)
        recorded = self.recorded
        recorded.unfinished.add(number)
        recorded.unfinished.discard(number - NUM_CALLS)  # may be the number of a work for which nobody waits
        recorded.num_started = recorded.num_completed = number
        flat, out, root, op = call.flat, call.out, call.root, _REDUCE_OPS[call.op or "sum"]
        is_gloo = self.name == "gloo" and flat.device.type == "cpu"
        match call.kind:
            case "all_reduce":
                return self._launch(call, dist.all_reduce, flat, op)
            case "reduce":
                return self._launch(call, dist.reduce, flat, op=op, group_dst=root)
            case "reduce_scatter" if is_gloo:
                return self._exchange_and_add(call)
            case "reduce_scatter":
                return self._launch(call, _reduce_scatter_single, out, flat, op=op)
            case "broadcast":
                return self._launch(call, dist.broadcast, _movable(flat), group_src=root)
            case "all_gather" if is_gloo and (self.world_size == 2 or flat.nbytes <= _DIRECT_BYTES):
                mine = flat.view(torch.uint8)
                return self._exchange(call, self._parts(out), [mine] * self.world_size)
            case "all_gather":
                return self._launch(call, _all_gather_single, _movable(out), _movable(flat))
            case "gather":
                parts = self._parts(out) if root == self.rank else None
                return self._launch(call, dist.gather, flat.view(torch.uint8), parts, group_dst=root)
            case "scatter":
                parts = self._parts(flat) if root == self.rank else None
                return self._launch(call, dist.scatter, out.view(torch.uint8), parts, group_src=root)
            case "all_to_all":
                sizes = [each and [n * flat.itemsize for n in each] for each in call.splits or (None, None)]
                if is_gloo:
                    return self._exchange(call, self._parts(out, sizes[0]), self._parts(flat, sizes[1]))
                return self._launch(call, dist.all_to_all_single, out.view(torch.uint8), flat.view(torch.uint8), *sizes)
            case _:
                devices = [torch.cuda.current_device()] if self.name == "nccl" else None
                return self._launch(call, dist.barrier, device_ids=devices)

    def set_timeout(self, timeout_s: float) -> None:
        """Change the deadline of calls from now on. For NCCL, torch's own function does this."""
        super().set_timeout(timeout_s)
        if self.name == "gloo":
            set_gloo_timeout(self._open_group(), timeout_s)

    def split(self) -> Transport:
        """See `Transport.split`: a new process group over the same ranks."""
        self.check_process()
        if self._split_by is not None:
            return self._split_by()
        members = dist.get_process_group_ranks(self._open_group())
        group = make_group_alone(members, self.name, timedelta(seconds=self.timeout_s))
        return ProcessGroupTransport(group, name=self.name, timeout_s=self.timeout_s, owns_group=True)

    def close(self) -> None:
        """See `Transport.close`."""
        group, self._group = self._group, None
        # Drop this reference, too: with the last reference Gloo closes its connections, which the other ranks notice.
        close_by, self._close_by, self._split_by = self._close_by, None, None
        if group is not None and close_by is not None:
            close_by()
        if group is not None and self._owns_group and dist.is_initialized():
            dist.destroy_process_group(group)

    def disown(self) -> None:
        """Mark the group in a forked child as its parent's.

        Gloo's threads don't run here, so a call would never end.
        """
        if self._group is not None:
            keep_groups(self._group)
        self._group, self._close_by, self._is_parents = None, None, True

    def check_process(self) -> None:
        """Refuse calls in a forked child.

        Raises:
            UsageError: This process is a forked child.
        """
        if self._is_parents:
            raise forked_error(self.own_number)

    def _open_group(self) -> dist.ProcessGroup:
        self.check_process()
        if self._group is None:
            raise PeerLostError(f"rank {self.own_number}: this {self.name} transport has been closed.")
        return self._group

    def _launch(self, call: Collective, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Work:
        try:
            work = collective(*args, **kwargs, group=self._open_group(), async_op=True)
        except RuntimeError as error:
            raise self._explained(error, self._describe(call)) from error
        except ValueError as error:  # torch 2.11 raises this while it logs a failure, for groups without a name
            failure = error.__context__
            if not isinstance(failure, RuntimeError):
                raise
            raise self._explained(failure, self._describe(call)) from failure
        finish = None
        if call.divisor is not None and call.root in (-1, self.rank):
            finish = functools.partial(divide, call.out, call.divisor)
        return _GroupWork(work, self, call, finish)

    def _exchange_and_add(self, call: Collective) -> Work:
        arithmetic = call.arithmetic
        assert arithmetic is not None
        received = torch.empty_like(call.flat)

        def add() -> None:
            parts = list(received.view(self.world_size, call.out.numel()).unbind())
            reduce_into([call.out], parts, arithmetic, self._scratch, divisor=call.divisor)

        return self._exchange(call, self._parts(received), self._parts(call.flat), add)

    def _exchange(
        self,
        call: Collective,
        received: Sequence[Tensor],
        sent: Sequence[Tensor],
        arrived: Callable[[], object] | None = None,
    ) -> Work:
        try:
            work = FullDuplex(self._open_group(), received, sent, number=self.num_calls, timeout_s=self.timeout_s)
        except RuntimeError as error:
            raise self._explained(error, self._describe(call)) from error
        return _GroupWork(work, self, call, arrived)

    def _parts(self, tensor: Tensor, num_bytes: Sequence[int] | None = None) -> list[Tensor]:
        """The parts for all ranks, as bytes: of given lengths, or of equal length."""
        raw = tensor.view(torch.uint8)
        if num_bytes is not None:
            return list(raw.split_with_sizes(num_bytes))
        return list(raw.view(self.world_size, -1 if tensor.numel() else 0).unbind())

    def _describe(self, call: Collective) -> str:
        if call.kind == "barrier":
            return f"barrier number {self.num_calls}"
        return f"{call.kind} number {self.num_calls} ({call.flat.numel()} x {str(call.flat.dtype)[6:]})"

    def _explained(self, error: RuntimeError, what: str) -> Exception:
        """Translate a failure to `evenstep.errors`. An error of another kind is returned unchanged."""
        if isinstance(error, EvenstepError):
            return error
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        if "timed out" in text.lower() or "timeout" in text.lower():
            return CollectiveTimeoutError(
                f"rank {self.own_number} waited too long in {what} over {self.name}: {text}.{describe_last_calls()}"
            )
        if is_consequence(error):
            return PeerLostError(f"rank {self.own_number} lost a peer in {what} over {self.name}: {text}")
        return error

    def __repr__(self) -> str:
        state = "closed" if self._group is None else f"{self.num_calls} calls"
        return f"<ProcessGroupTransport {self.name} rank {self.rank}/{self.world_size} {state}>"


_transports: weakref.WeakSet[ProcessGroupTransport] = weakref.WeakSet()


def _disown_all() -> None:
    for transport in list(_transports):
        transport.disown()


def _end_all() -> None:
    for transport in list(_transports):
        if transport._close_by is not None:
            transport.close()
    join_threads()


os.register_at_fork(after_in_child=_disown_all)
atexit.register(_end_all)


def _name_of(group: dist.ProcessGroup) -> str:
    try:
        return str(group.group_name)
    except RuntimeError:  # a group that torch doesn't know
        return ""


def _movable(flat: Tensor) -> Tensor:
    return flat if flat.dtype in _MOVED else flat.view(torch.uint8)
