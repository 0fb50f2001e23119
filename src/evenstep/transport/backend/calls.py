"""The collectives of the backend "evenstep": over shared memory, or as a fallback over Gloo.

[Note: two generations of names]

torch 2.13 renamed some methods (`_allgather_base` became `all_gather_single`). It looks for the new name first, and
torch 2.11 knows only the old name. If a subclass lacks the name, C++ silently calls Gloo. So each method has both
names.

[Note: one table]

A collective is a `TorchMethod`: torch's names, and how its arguments are read. `_method` makes a method from it, which
reads the arguments, joins lists of parts, and runs the transport's collective. If shared memory doesn't carry the call,
the method calls Gloo's method with the first of these names that exists. Only `allreduce` is written out, because it is
the most frequent call.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, ProcessGroup, ReduceOp

from evenstep.errors import ConfigurationError, EvenstepError, UsageError
from evenstep.ground.compat.torch_distributed import outside_transforms
from evenstep.ground.compat.torch_dynamo import uncompiled
from evenstep.ground.compat.torch_tensors import has_storage
from evenstep.transport.backend.observers import observed, tensors_in
from evenstep.transport.backend.work import GlooWork, GroupWork, merge
from evenstep.transport.base import Collective, Op
from evenstep.transport.core.fallback import fallback
from evenstep.transport.core.header import OVER_GLOO
from evenstep.transport.core.validation import Arguments, is_carried
from evenstep.transport.shm.lanes import Lanes

_OPS: dict[Any, Op] = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "mean",
    ReduceOp.MAX: "max",
    ReduceOp.MIN: "min",
    ReduceOp.PRODUCT: "product",
    ReduceOp.BAND: "band",
    ReduceOp.BOR: "bor",
    ReduceOp.BXOR: "bxor",
}
_NO_TIME = timedelta()
_NO_WAIT = timedelta(milliseconds=1)  # for ranks that have arrived already; 0 s would mean the group's deadline


def one(tensors: Any) -> list[Tensor]:
    """The tensors of [...], or a single tensor as a list."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def parts(tensors: Any) -> list[Tensor]:
    """The tensors of [[...]], [...] or []: a part for each rank."""
    if len(tensors) == 1 and not isinstance(tensors[0], Tensor):
        return list(tensors[0])
    return list(tensors)


def several(tensors: Any) -> list[Tensor]:
    """The tensors of [...]: each is a separate call."""
    return list(tensors)


@dataclass(frozen=True)
class TorchMethod:
    """A collective of torch's process groups.

    Attributes:
        kind: The transport's collective.
        names: The method's names, the newest first.
        operation: The collective's name in `torch.ops.c10d`, such as "allreduce_".
        outputs: Reads the outputs from the first argument; None: the call is in place.
        inputs: Reads the inputs from the next argument.
        has_op: Whether it combines values.
        has_root: Whether only one rank's input is used, or only one rank gets the output.
        has_splits: Whether two lists follow the tensors: the numbers of rows from each rank, and to each rank; empty
            lists: equal numbers.
    """

    kind: str
    names: tuple[str, ...]
    operation: str
    outputs: Callable[[Any], list[Tensor]] | None
    inputs: Callable[[Any], list[Tensor]]
    has_op: bool = False
    has_root: bool = False
    has_splits: bool = False

    @property
    def gloos(self) -> str | None:
        """The name of Gloo's method; None if Gloo has none."""
        return next((name for name in self.names if hasattr(ProcessGroup, name)), None)


ALL_REDUCE = TorchMethod("all_reduce", ("allreduce",), "allreduce_", None, one, has_op=True)
GATHER_SINGLE = TorchMethod("gather", ("gather_single", "gather_into_tensor"), "gather_", one, one, has_root=True)
METHODS = (
    ALL_REDUCE,
    TorchMethod("all_reduce", ("allreduce_coalesced",), "allreduce_coalesced_", None, several, has_op=True),
    TorchMethod("broadcast", ("broadcast",), "broadcast_", None, one, has_root=True),
    TorchMethod("reduce", ("reduce",), "reduce_", None, one, has_op=True, has_root=True),
    TorchMethod("all_gather", ("allgather",), "allgather_", parts, one),
    TorchMethod("all_gather", ("all_gather_single", "_allgather_base"), "_allgather_base_", one, one),
    TorchMethod(
        "all_gather",
        ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
        "allgather_into_tensor_coalesced_",
        several,
        several,
    ),
    TorchMethod("reduce_scatter", ("reduce_scatter",), "reduce_scatter_", one, parts, has_op=True),
    TorchMethod(
        "reduce_scatter",
        ("reduce_scatter_single", "_reduce_scatter_base"),
        "_reduce_scatter_base_",
        one,
        one,
        has_op=True,
    ),
    TorchMethod(
        "reduce_scatter",
        ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
        "reduce_scatter_tensor_coalesced_",
        several,
        several,
        has_op=True,
    ),
    TorchMethod("gather", ("gather",), "gather_", parts, one, has_root=True),
    GATHER_SINGLE,
    TorchMethod("scatter", ("scatter",), "scatter_", one, parts, has_root=True),
    TorchMethod("all_to_all", ("all_to_all_single", "alltoall_base"), "alltoall_base_", one, one, has_splits=True),
    TorchMethod("all_to_all", ("alltoall",), "alltoall_", parts, parts),
)


def read_options(
    given: Sequence[Any], opts: Any = None, op: Any = None, root: int | None = None, timeout: timedelta | None = None
) -> tuple[Op | None, int, timedelta | None]:
    """Read the arguments after the tensors, an options object or single values: (operator, root, deadline).

    The operator is None if shared memory doesn't implement it.
    """
    for each in (*given, opts):
        if isinstance(each, timedelta):
            timeout = each
        elif isinstance(each, int):
            root = each
        elif isinstance(each, ReduceOp | ReduceOp.RedOpType):
            op = each
        elif each is not None:
            op = getattr(each, "reduceOp", op)
            root = getattr(each, "rootRank", root)
            timeout = timeout or each.timeout
    op = ReduceOp.SUM if op is None else op
    return _OPS.get(getattr(op, "op", op)), root or 0, timeout


def _seconds(timeout: timedelta | None) -> float | None:
    """A call's own deadline, or None."""
    return timeout.total_seconds() if timeout is not None and timeout > _NO_TIME else None


def joined_input(tensors: Sequence[Tensor]) -> Tensor:
    """Join tensors to one flat tensor."""
    return torch.cat([each.detach().reshape(-1) for each in tensors])


def joined_outputs(
    what: str, outputs: Sequence[Tensor], arguments: Arguments
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Make one tensor for all outputs, and the copies (to, from) to make at the end.

    Raises:
        ConfigurationError: An output can't be written to, because its elements share memory.
    """
    for out in outputs:
        if not out.is_contiguous():
            arguments.check_written(what, out)
    joined = torch.empty(sum(each.numel() for each in outputs), dtype=outputs[0].dtype, device="cpu")
    parts = torch.split(joined, [each.numel() for each in outputs])
    return joined, [(out.detach(), part.view(out.shape)) for out, part in zip(outputs, parts, strict=True)]


# torch's stub has overloads that differ between its versions.
_ProcessGroup: Any = ProcessGroup


class GroupCalls(_ProcessGroup):  # type: ignore[misc]
    """A process group that sends CPU tensors through shared memory. torch makes its subclass `backend.EvenstepGroup`.

    Args:
        rank: This rank.
        size: Number of ranks.
        inner: A group of the same backends without this class's methods, for calls that fall back.
        has_nccl: Whether the group has NCCL.

    Attributes:
        num_calls: Number of collectives that shared memory has carried or compared.
    """

    def __init__(self, rank: int, size: int, *, inner: Any, has_nccl: bool) -> None:
        super().__init__(rank, size)  # after the constructor that takes a store, C++ doesn't call methods of a subclass
        self._inner = inner
        self._has_nccl = has_nccl
        # A LocalTransport, SharedMemoryTransport or InternodeTransport; None: Gloo carries everything.
        self._shared: Any = None
        self._coalescing = threading.local()
        self._is_coalescing = False  # whether any thread has ever done so
        self._is_over = False
        self.num_calls = 0
        self._at_gloo: set[Any] = set()  # Gloo's works that may be in flight

    # ------------------------------------------------------------------ collectives: see [Note: one table]

    @observed("all_reduce", "allreduce_")
    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None) -> Any:
        """Combine over the ranks, in place."""
        if type(opts) is not AllreduceOptions or op is not None:
            op_name, _, deadline = read_options((opts, timeout), op=op)
        else:
            op_name, deadline = _OPS.get(getattr(opts.reduceOp, "op", None)), timeout or opts.timeout
        given = [tensors] if isinstance(tensors, Tensor) else tensors
        if (  # `_carries` inlined: this is the most frequent call
            op_name is None
            or len(given) != 1
            or self._shared is None
            or not is_carried(given[0])
            or not has_storage(given[0])
        ):
            options = {"op": op} if op is not None else {}
            return self._fall_back(ALL_REDUCE, given, (tensors, opts, timeout), options, deadline)
        return self._launched(
            [self._shared.run(Collective("all_reduce", given[0], given[0], op_name))], given, deadline
        )

    def _run(self, method: TorchMethod, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Run a call of one of torch's methods."""
        num_tensors = 1 if method.outputs is None else 4 if method.has_splits else 2
        op, root, timeout = read_options(args[num_tensors:], **options)
        given = method.inputs(args[0 if method.outputs is None else 1])
        outs = given if method.outputs is None else method.outputs(args[0])
        sides = ((method.outputs, outs), (method.inputs, given))
        is_one = all(len(tensors) == 1 for form, tensors in sides if form is one)
        if not is_one or (method.has_op and op is None) or not self._carries(*outs, *given):
            return self._fall_back(method, [*outs, *given], args, options, timeout)
        kind, arguments = method.kind, self._shared.arguments
        copies: list[tuple[Tensor, Tensor]] = []
        splits: tuple[list[int], list[int]] | None = None
        to: Sequence[Tensor | None] = outs
        of: Sequence[Tensor | None] = given
        if method.has_splits:
            splits = self._splits(outs[0], given[0], args[2], args[3])
        elif method.outputs is several:
            arguments.check_pairs(kind, outs, given)
        if method.outputs is parts:  # a rank that isn't the root has no outputs
            if outs or not method.has_root:
                arguments.check_parts(kind, "outputs", outs, given[0] if method.inputs is one else None)
                joined, copies = joined_outputs(kind, outs, arguments)
            to = [joined if outs else None]
        if method.inputs is parts:
            if given or not method.has_root:
                arguments.check_parts(kind, "inputs", given, outs[0] if method.outputs is one else None)
            of = [joined_input(given) if given else None]
            if method.outputs is parts:
                splits = [each.numel() for each in outs], [each.numel() for each in given]
        op, root = op if method.has_op else None, root if method.has_root else -1
        calls = [Collective(kind, each, out, op, root, splits) for out, each in zip(to, of, strict=True)]
        return self._launched([self._shared.run(each) for each in calls], outs, timeout, copies)

    def _splits(
        self, out: Tensor, tensor: Tensor, out_splits: list[int], splits: list[int]
    ) -> tuple[list[int], list[int]] | None:
        """The numbers of elements of `out` from each rank, and of `tensor` to each rank; None: equal parts."""
        for each, rows in ((out, out_splits), (tensor, splits)):
            if not rows:
                self._shared.arguments.check_rows("all_to_all", each)
        if not out_splits and not splits:
            return None
        return self._elements(out, out_splits), self._elements(tensor, splits)

    def _elements(self, tensor: Tensor, splits: list[int]) -> list[int]:
        rows = splits or [tensor.size(0) // self.size()] * self.size()
        return [count * math.prod(tensor.shape[1:]) for count in rows]

    @observed("barrier", "barrier")
    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """A call that is done when every rank has made it."""
        device = getattr(opts, "device", None)
        if self._shared is None or (self._has_nccl and device is not None and device.type == "cuda"):
            return self._leave_to_gloo("barrier", [torch.empty(0, device=device or "cpu")], (opts, timeout), {})
        return self._launched([self._shared.barrier()], [], read_options((opts, timeout))[2])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Return when every rank has called this.

        If ranks share memory, every error names all missing ranks, on every rank, for any `wait_all_ranks`.

        Raises:
            CollectiveTimeoutError: Ranks did not arrive before the deadline.
            PeerLostError: A rank died.
            RuntimeError: Either of these, if Gloo carries the call.
        """
        if self._shared is None:
            if self._is_over:
                raise UsageError(f"monitored_barrier on rank {self.rank()}: {self!r} has been destroyed.")
            self._inner.monitored_barrier(timeout, wait_all_ranks)
        else:
            if timeout is not None:
                timeout = max(timeout, _NO_WAIT)
            self._launched([self._shared.barrier()], [], timeout).wait()

    def allgather_coalesced(self, outputs: Any, inputs: Any, *args: Any) -> Any:
        """Call Gloo's method."""
        method = TorchMethod("all_gather", ("allgather_coalesced",), "allgather_coalesced_", parts, parts)
        return self._fall_back(method, list(tensors_in(inputs)), (outputs, inputs, *args), {}, None)

    # ------------------------------------------------------------------ messages

    @observed("send", "send")
    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Any:
        """Send a tensor to one rank."""
        self._check_message("send", "dst", tensors, dst, tag)
        if not isinstance(self._shared, Lanes):
            return self._leave_to_gloo("send", tensors, (tensors, dst, tag), {})
        return self._collected(GroupWork([self._shared.send(tensors[0], dst, tag)], tensors))

    @observed("recv", "recv_")
    def recv(self, tensors: list[Tensor], src: int | None, tag: int = 0) -> Any:
        """Receive a tensor from one rank; None: from the first rank that sends."""
        self._check_message("recv", "src", tensors, src, tag)
        if not isinstance(self._shared, Lanes):
            name, args = ("recv_anysource", (tag,)) if src is None else ("recv", (src, tag))
            return self._leave_to_gloo(name, tensors, (tensors, *args), {})
        message, copies = self._shared.receive(tensors[0], src, tag)
        return self._collected(GroupWork([message], tensors, copies))

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Any:
        """Receive a tensor from the first rank that sends."""
        return self.recv(tensors, None, tag)

    def _check_message(self, what: str, name: str, tensors: Sequence[Tensor], peer: int | None, tag: int) -> None:
        """Refuse an invalid message between two ranks, without informing the other ranks.

        If the number weren't a rank, Gloo would end the process. And Gloo can't be made in a call that one rank makes
        alone.
        """
        rank, size = self.rank(), self.size()
        if self._is_over:
            raise UsageError(f"{what} on rank {rank}: {self!r} has been destroyed.")
        reason = None
        if peer is not None and not 0 <= peer < size:
            reason = f"{name}={peer} on rank {rank}; ranks of the group are 0 to {size - 1}"
        elif peer == rank or size == 1:
            reason = f"rank {rank} can't exchange a message with itself: {name} must be another rank of the group"
        elif not 0 <= tag < 1 << 31:
            reason = f"tag={tag} on rank {rank}; a number of 31 bits, as for Gloo"
        elif isinstance(self._shared, Lanes) and (len(tensors) != 1 or not self._carries(*tensors)):
            kinds = ", ".join(
                f"{str(t.layout)[6:]} {str(t.dtype)[6:]} {type(t).__name__} on {t.device}" for t in tensors
            )
            reason = (
                f"messages between ranks that share memory must be dense CPU tensors, and on rank {rank} this is a "
                f"{kinds}. Send its values as a dense CPU tensor, or use a group from "
                f"torch.distributed.new_group(backend='gloo')"
            )
        if reason is not None:
            raise ConfigurationError(f"{what}: {reason}.")

    # ------------------------------------------------------------------ fallback

    def _need_gloo(self, collective: str, timeout_s: float | None = None) -> None:
        raise NotImplementedError

    def _fall_back(
        self, method: TorchMethod, tensors: Sequence[Tensor], args: Sequence[Any], options: dict[str, Any], timeout: Any
    ) -> Any:
        """Call Gloo's or NCCL's method. The ranks compare over shared memory whether all make this call."""
        if method is GATHER_SINGLE and method.gloos is None:
            output, given, *rest = args
            is_root = self.rank() == read_options(rest, **options)[1]
            outs = list(output.view(self.size(), *given.shape).unbind()) if is_root else None
            return self.gather([outs] if outs else [], [given], *rest, **options)
        assert method.gloos is not None
        compared = f"{method.kind} {OVER_GLOO}"
        if self._shared is None or not self._shared.compares or any(each.device.type != "cpu" for each in tensors):
            return self._leave_to_gloo(method.gloos, tensors, args, options, compared, timeout)
        try:
            gloos = self._leave_to_gloo(method.gloos, tensors, args, options, compared, timeout)
        except EvenstepError:
            raise
        except Exception as error:  # any exception: the other ranks may be making a valid call, and must be informed
            with outside_transforms():
                self._shared.refuse(str(error).partition("\n")[0])
            raise
        self._at_gloo.difference_update([each for each in tuple(self._at_gloo) if each.is_completed()])
        self._at_gloo.add(gloos)
        # Without this, torch.func.grad would also wrap the tensors that ranks compare.
        with outside_transforms():
            work = GlooWork(self._shared.compare_call(compared), gloos, ended=self._at_gloo.discard)
        return self._launched([work], list(tensors_in(args[:1])), timeout)

    def _leave_to_gloo(
        self,
        name: str,
        tensors: Sequence[Tensor],
        args: Sequence[Any],
        options: dict[str, Any],
        compared: str = "",
        timeout: timedelta | None = None,
    ) -> Any:
        if self._is_over:  # else Gloo would be made, and wait for ranks that never come
            raise UsageError(f"{name} on rank {self.rank()}: {self!r} has been destroyed.")
        if not self._has_nccl or any(each.device.type != "cuda" for each in tensors):
            fallback.count(name)
            self._need_gloo(compared, _seconds(timeout))
        return getattr(self._inner, name)(*(each for each in args if each is not None), **options)

    # ------------------------------------------------------------------ coalescing

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type == "cuda" and self._has_nccl:
            self._inner._start_coalescing(device)
        else:
            self._coalescing.works = []
            self._is_coalescing = True

    def _end_coalescing(self, device: torch.device) -> Any:
        if device.type == "cuda" and self._has_nccl:
            return self._inner._end_coalescing(device)
        works: list[GroupWork] = self._coalescing.works
        self._coalescing.works = None
        return merge(works)

    # ------------------------------------------------------------------ helpers

    def _carries(self, *tensors: Tensor) -> bool:
        return self._shared is not None and all(is_carried(tensor) and has_storage(tensor) for tensor in tensors)

    def _launched(
        self,
        works: list[Any],
        result: list[Tensor],
        timeout: timedelta | None,
        copies: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> GroupWork:
        self.num_calls += 1
        work = GroupWork(works, result, copies, _seconds(timeout))
        return self._collected(work) if self._is_coalescing else work

    def _collected(self, work: GroupWork) -> GroupWork:
        if (coalesced := getattr(self._coalescing, "works", None)) is not None:
            coalesced.append(work)
        return work


def _method(described: TorchMethod) -> Callable[..., Any]:
    def method(self: GroupCalls, *args: Any, **options: Any) -> Any:
        return self._run(described, args, options)

    name = described.names[0].replace(described.kind.replace("_", ""), described.kind)
    return observed(name, described.operation)(method)


for _torch_method in METHODS:
    for _name in _torch_method.names:
        if _torch_method is not ALL_REDUCE:
            setattr(GroupCalls, _name, _method(_torch_method))
uncompiled(GroupCalls)
