"""The collectives of the backend "evenstep": over shared memory, or as a fallback over Gloo.

[Note: two generations of names]

torch 2.13 renamed some methods (`_allgather_base` is `all_gather_single` there). It looks for the new name first, torch
2.11 knows only the old one, and where a subclass has neither, C++ calls Gloo silently. So each has both.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, ProcessGroup, ReduceOp, ReduceOptions, ReduceScatterOptions

from evenstep.errors import ConfigurationError, UsageError
from evenstep.ground.compat.torch_distributed import outside_transforms
from evenstep.ground.compat.torch_dynamo import uncompiled
from evenstep.ground.compat.torch_tensors import has_storage
from evenstep.transport.backend.observers import observed
from evenstep.transport.backend.work import GlooWork, GroupWork, merge
from evenstep.transport.base import Op
from evenstep.transport.core.fallback import fallback
from evenstep.transport.core.header import OVER_GLOO
from evenstep.transport.core.validation import Arguments, is_carried


def _first_name(*names: str) -> str:
    return next(name for name in names if hasattr(ProcessGroup, name))


ALL_GATHER_SINGLE = _first_name("all_gather_single", "_allgather_base")
ALL_GATHER_COALESCED = _first_name("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
REDUCE_SCATTER_SINGLE = _first_name("reduce_scatter_single", "_reduce_scatter_base")
REDUCE_SCATTER_COALESCED = _first_name("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
ALL_TO_ALL_SINGLE = _first_name("all_to_all_single", "alltoall_base")

# The collective that ranks compare, by method that Gloo carries. `send` and `recv` concern two ranks only.

COMPARED = {
    method: f"{collective} {OVER_GLOO}"
    for collective, methods in {
        "all_reduce": ("allreduce", "allreduce_coalesced"),
        "broadcast": ("broadcast",),
        "all_gather": ("allgather", "allgather_coalesced", ALL_GATHER_SINGLE, ALL_GATHER_COALESCED),
        "reduce_scatter": ("reduce_scatter", REDUCE_SCATTER_SINGLE, REDUCE_SCATTER_COALESCED),
        "reduce": ("reduce",),
        "gather": ("gather",),
        "scatter": ("scatter",),
        "all_to_all": ("alltoall", ALL_TO_ALL_SINGLE),
    }.items()
    for method in methods
}

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
_OPTIONS = (AllreduceOptions, ReduceScatterOptions, ReduceOptions)


def listed(tensors: Any) -> list[Tensor]:
    """The tensors of [...], or the one."""
    return [tensors] if isinstance(tensors, Tensor) else tensors


def inner_list(tensors: Any) -> list[Tensor]:
    """The tensors of [[...]], [...] or []."""
    if len(tensors) == 1 and not isinstance(tensors[0], Tensor):
        return list(tensors[0])
    return list(tensors)


def flat_list(tensors: Any) -> list[Tensor]:
    """The tensors in lists of lists, or the one."""
    return [tensors] if isinstance(tensors, Tensor) else [each for inner in tensors for each in flat_list(inner)]


def op_of(opts: Any, op: Any) -> Op | None:
    """The operator that torch passed; None: shared memory doesn't have it."""
    if op is None and isinstance(opts, _OPTIONS):
        return _OPS.get(getattr(opts.reduceOp, "op", None))
    given = op if op is not None else getattr(opts, "reduceOp", opts if not hasattr(opts, "timeout") else None)
    if given is None or isinstance(given, int):  # nothing, or a root
        given = ReduceOp.SUM
    return _OPS.get(getattr(given, "op", given))


def root_of(opts: Any, root: Any) -> int:
    """The root that torch passed."""
    given = root if root is not None else getattr(opts, "rootRank", opts)
    return int(given or 0)


def unless_none(*values: Any) -> list[Any]:
    """The values that aren't None."""
    return [value for value in values if value is not None]


def joined_input(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor with the elements of all."""
    return torch.cat([each.detach().reshape(-1) for each in tensors])


def joined_outputs(
    what: str, outputs: Sequence[Tensor], arguments: Arguments
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """One tensor for all outputs, and the copies (to, from) to make in the end.

    Raises:
        ConfigurationError: An output can't be written to, as its elements share memory.
    """
    for out in outputs:
        if not out.is_contiguous():
            arguments.check_written(what, out)
    joined = torch.empty(sum(each.numel() for each in outputs), dtype=outputs[0].dtype, device="cpu")
    parts = torch.split(joined, [each.numel() for each in outputs])
    return joined, [(out.detach(), part.view(out.shape)) for out, part in zip(outputs, parts, strict=True)]


# torch's stub has overloads that differ between its versions.
_ProcessGroup: Any = ProcessGroup

_NO_TIME = timedelta()
_NO_WAIT = timedelta(milliseconds=1)  # for ranks that have arrived: a deadline of 0 s would mean the group's


@uncompiled
class GroupCalls(_ProcessGroup):  # type: ignore[misc]
    """A process group whose CPU tensors travel through shared memory; `backend.EvenstepGroup` is what torch makes.

    Args:
        name: The backend's name in messages.
        rank: This rank.
        size: Number of ranks.
        inner: A group of the same backends without this class's methods, for calls that fall back.
        has_nccl: Whether it has NCCL.

    Attributes:
        num_calls: Calls so far that shared memory has carried or compared.
    """

    def __init__(self, name: str, rank: int, size: int, *, inner: Any, has_nccl: bool) -> None:
        super().__init__(rank, size)  # the constructor with a store makes an object that C++ doesn't call back
        self._inner = inner
        self._has_nccl = has_nccl
        # A LocalTransport, SharedMemoryTransport or InternodeTransport; None: Gloo carries everything.
        self._shared: Any = None
        self._arguments = Arguments(name, rank, size, refused=weakref.WeakMethod(self._refuse))
        self._coalescing = threading.local()
        self._is_coalescing = False  # whether any thread ever has
        self._is_over = False
        self.num_calls = 0
        self._at_gloo: set[Any] = set()  # works that may be under way there

    @observed("all_reduce", "allreduce_")
    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None) -> Any:
        """Combine over the ranks, in place."""
        given, how = listed(tensors), op_of(opts, op)
        if (  # as `_carries`, in line: of all calls this is the most frequent
            how is None
            or len(given) != 1
            or self._shared is None
            or not is_carried(given[0])
            or not has_storage(given[0])
        ):
            return self._fall_back("allreduce", given, tensors, *unless_none(opts, timeout))
        return self._made([self._shared.all_reduce(given[0], how)], given, opts, timeout=timeout)

    @observed("all_reduce_coalesced", "allreduce_coalesced_")
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Combine several tensors, in one work."""
        how = op_of(opts, None)
        if how is None or not self._carries(*tensors):
            return self._fall_back("allreduce_coalesced", tensors, tensors, *unless_none(opts))
        return self._made([self._shared.all_reduce(each, how) for each in tensors], tensors, opts)

    @observed("broadcast", "broadcast_")
    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, root: Any = None) -> Any:
        """Make equal to the root's."""
        given, src = listed(tensors), root_of(opts, root)
        if len(given) != 1 or not self._carries(*given):
            return self._fall_back("broadcast", given, tensors, *unless_none(opts if root is None else root, timeout))
        return self._made([self._shared.broadcast(given[0], src)], given, opts, timeout=timeout)

    @observed("reduce", "reduce_")
    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None, *, root: Any = None
    ) -> Any:
        """Combine on the root."""
        given, dst, how = listed(tensors), root_of(opts, root), op_of(opts, op)
        if how is None or len(given) != 1 or not self._carries(*given):
            return self._fall_back("reduce", given, tensors, *unless_none(opts if root is None else root, op, timeout))
        return self._made([self._shared.reduce(given[0], dst, how)], given, opts, timeout=timeout)

    @observed("all_gather", "allgather_")
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """Put every rank's tensor into one tensor per rank."""
        given, outs = listed(inputs), inner_list(outputs)
        if len(given) != 1 or not self._carries(*given, *outs):
            return self._fall_back("allgather", given, outputs, inputs, *unless_none(opts, timeout))
        self._arguments.check_parts("all_gather", "outputs", outs, given[0])
        joined, copies = joined_outputs("all_gather", outs, self._arguments)
        return self._made([self._shared.all_gather(joined, given[0])], outs, opts, copies, timeout)

    @observed("all_gather_single", "_allgather_base_")
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Put every rank's tensor one after the other into one."""
        if not self._carries(output, input):
            return self._fall_back(ALL_GATHER_SINGLE, [input], output, input, *unless_none(opts))
        return self._made([self._shared.all_gather(output, input)], [output], opts)

    @observed("all_gather_single_coalesced", "allgather_into_tensor_coalesced_")
    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Several times `all_gather_single`, in one work."""
        if not self._carries(*outputs, *inputs):
            return self._fall_back(ALL_GATHER_COALESCED, inputs, outputs, inputs, *unless_none(opts))
        self._arguments.check_pairs("all_gather", outputs, inputs)
        works = [self._shared.all_gather(out, each) for out, each in zip(outputs, inputs, strict=True)]
        return self._made(works, outputs, opts)

    @observed("reduce_scatter", "reduce_scatter_")
    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> Any:
        """Combine lists of one tensor per rank; each rank gets its own."""
        outs, given, how = listed(outputs), inner_list(inputs), op_of(opts, op)
        if how is None or len(outs) != 1 or not self._carries(*outs, *given):
            return self._fall_back("reduce_scatter", given, outputs, inputs, *unless_none(opts, timeout))
        self._arguments.check_parts("reduce_scatter", "inputs", given, outs[0])
        return self._made([self._shared.reduce_scatter(outs[0], joined_input(given), how)], outs, opts, timeout=timeout)

    @observed("reduce_scatter_single", "_reduce_scatter_base_")
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Combine tensors that hold a part per rank; each rank gets its own."""
        how = op_of(opts, None)
        if how is None or not self._carries(output, input):
            return self._fall_back(REDUCE_SCATTER_SINGLE, [input], output, input, *unless_none(opts))
        return self._made([self._shared.reduce_scatter(output, input, how)], [output], opts)

    @observed("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced_")
    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Several times `reduce_scatter_single`, in one work."""
        how = op_of(opts, None)
        if how is None or not self._carries(*outputs, *inputs):
            return self._fall_back(REDUCE_SCATTER_COALESCED, inputs, outputs, inputs, *unless_none(opts))
        self._arguments.check_pairs("reduce_scatter", outputs, inputs)
        works = [self._shared.reduce_scatter(out, each, how) for out, each in zip(outputs, inputs, strict=True)]
        return self._made(works, outputs, opts)

    @observed("gather", "gather_")
    def gather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None, *, root: Any = None
    ) -> Any:
        """Put every rank's tensor into one tensor per rank, on the root."""
        given, outs, dst = listed(inputs), inner_list(outputs), root_of(opts, root)
        if len(given) != 1 or not self._carries(*given, *outs):
            return self._fall_back(
                "gather", given, outputs, inputs, *unless_none(opts if root is None else root, timeout)
            )
        joined: Tensor | None = None
        copies: list[tuple[Tensor, Tensor]] = []
        if outs:
            self._arguments.check_parts("gather", "outputs", outs, given[0])
            joined, copies = joined_outputs("gather", outs, self._arguments)
        return self._made([self._shared.gather(joined, given[0], dst)], outs, opts, copies, timeout)

    def gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Put every rank's tensor one after the other into one, on the root. torch 2.15 calls it."""
        dst = root_of(opts, None)
        if not self._carries(output, input):  # Gloo has none of these
            parts = output.view(self.size(), *input.shape).unbind() if self.rank() == dst else None
            return self.gather([list(parts)] if parts else [], [input], opts)
        joined = output if self.rank() == dst else None
        return self._made([self._shared.gather(joined, input, dst)], [output], opts)

    @observed("scatter", "scatter_")
    def scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None, *, root: Any = None
    ) -> Any:
        """Give every rank one of the root's tensors."""
        outs, given, src = listed(outputs), inner_list(inputs), root_of(opts, root)
        if len(outs) != 1 or not self._carries(*outs, *given):
            return self._fall_back(
                "scatter", outs, outputs, inputs, *unless_none(opts if root is None else root, timeout)
            )
        tensor: Tensor | None = None
        if given:
            self._arguments.check_parts("scatter", "inputs", given, outs[0])
            tensor = joined_input(given)
        return self._made([self._shared.scatter(outs[0], tensor, src)], outs, opts, timeout=timeout)

    @observed("all_to_all_single", "alltoall_base_")
    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> Any:
        """Send a part of a tensor to every rank.

        Splits count rows; empty ones mean equal parts.
        """
        if not self._carries(output, input):
            given = (output, input, output_splits, input_splits)
            return self._fall_back(ALL_TO_ALL_SINGLE, [input], *given, *unless_none(opts))
        for tensor, given_splits in ((output, output_splits), (input, input_splits)):
            if not given_splits:
                self._arguments.check_rows("all_to_all", tensor)
        splits: tuple[list[int] | None, list[int] | None] = (None, None)
        if output_splits or input_splits:
            splits = self._elements(output, output_splits), self._elements(input, input_splits)
        return self._made([self._shared.all_to_all(output, input, *splits)], [output], opts)

    @observed("all_to_all", "alltoall_")
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Send a tensor to every rank."""
        if not self._carries(*outputs, *inputs):
            return self._fall_back("alltoall", inputs, outputs, inputs, *unless_none(opts))
        self._arguments.check_parts("all_to_all", "outputs", outputs, None)
        self._arguments.check_parts("all_to_all", "inputs", inputs, None)
        joined, copies = joined_outputs("all_to_all", outputs, self._arguments)
        sizes = [each.numel() for each in outputs], [each.numel() for each in inputs]
        return self._made([self._shared.all_to_all(joined, joined_input(inputs), *sizes)], outputs, opts, copies)

    @observed("barrier", "barrier")
    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """Done when every rank has called it."""
        device = getattr(opts, "device", None)
        if self._shared is None or (self._has_nccl and device is not None and device.type == "cuda"):
            return self._fall_back("barrier", [torch.empty(0, device=device or "cpu")], *unless_none(opts, timeout))
        return self._made([self._shared.barrier()], [], opts, timeout=timeout)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Return when every rank has called it.

        Where ranks share memory every error names all missing ranks, on every rank, whatever `wait_all_ranks` is.

        Raises:
            CollectiveTimeoutError: Ranks did not arrive before the deadline.
            PeerLostError: A rank died.
            RuntimeError: Either, over Gloo.
        """
        if self._shared is None:
            self._inner.monitored_barrier(timeout, wait_all_ranks)
        else:
            if timeout is not None:
                timeout = max(timeout, _NO_WAIT)
            self._made([self._shared.barrier()], [], None, timeout=timeout).wait()

    # The names of torch 2.11: see [Note: two generations of names].
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
    gather_into_tensor = gather_single

    # ------------------------------------------------------------------ fallback

    def allgather_coalesced(self, outputs: Any, inputs: Any, *args: Any) -> Any:
        """Gloo's."""
        return self._fall_back("allgather_coalesced", inputs, outputs, inputs, *args)

    def send(self, tensors: list[Tensor], dst: int, *args: Any) -> Any:
        """Gloo's."""
        self._check_peer("send", "dst", dst)
        return self._fall_back("send", tensors, tensors, dst, *args)

    def recv(self, tensors: list[Tensor], src: int, *args: Any) -> Any:
        """Gloo's."""
        self._check_peer("recv", "src", src)
        return self._fall_back("recv", tensors, tensors, src, *args)

    def recv_anysource(self, tensors: list[Tensor], *args: Any) -> Any:
        """Gloo's."""
        return self._fall_back("recv_anysource", tensors, tensors, *args)

    def _check_peer(self, what: str, name: str, peer: int) -> None:
        """Refuse a number that is no rank, with which Gloo ends the process. The other ranks needn't know of it."""
        if not 0 <= peer < self.size():
            raise ConfigurationError(
                f"{what}: {name}={peer} on rank {self.rank()}; ranks of the group are 0 to {self.size() - 1}."
            )

    def _need_gloo(self) -> None:
        raise NotImplementedError

    def _refuse(self, reason: str) -> None:
        if self._shared is not None:
            self._shared.refuse(reason)

    def _fall_back(self, method: str, tensors: Sequence[Tensor], *args: Any) -> Any:
        if self._is_over:  # else Gloo would be made, and wait for ranks that don't come
            raise UsageError(f"{method} on rank {self.rank()}: {self!r} has been destroyed.")
        if not self._has_nccl or any(each.device.type != "cuda" for each in tensors):
            fallback.count(method)
            self._need_gloo()
        launch = getattr(self._inner, method)
        collective = COMPARED.get(method)
        if collective is None or self._shared is None or not self._shared.compares or not _all_on_cpu(tensors):
            return launch(*args)
        try:
            gloos = launch(*args)
        except Exception as error:  # of any kind: the other ranks may be at a call that can be made
            with outside_transforms():
                self._refuse(str(error).partition("\n")[0])
            raise
        self._at_gloo.difference_update([each for each in tuple(self._at_gloo) if each.is_completed()])
        self._at_gloo.add(gloos)
        # Else the tensors that ranks compare would be wrapped under torch.func.grad, too.
        with outside_transforms():
            compared = self._shared.compare_call(collective)
        work = GlooWork(compared, gloos, ended=self._at_gloo.discard)
        last = args[-1]  # the call's options or its timeout, where it has one
        timeout = last if isinstance(last, timedelta) else None
        return self._made([work], flat_list(args[0]), last, timeout=timeout)

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

    def _elements(self, tensor: Tensor, splits: list[int]) -> list[int]:
        rows = splits or [tensor.size(0) // self.size()] * self.size()
        return [count * math.prod(tensor.shape[1:]) for count in rows]

    def _made(
        self,
        works: list[Any],
        result: list[Tensor],
        opts: Any,
        copies: Sequence[tuple[Tensor, Tensor]] = (),
        timeout: timedelta | None = None,
    ) -> GroupWork:
        if timeout is None:
            timeout = getattr(opts, "timeout", None)
        timeout_s = timeout.total_seconds() if timeout is not None and timeout > _NO_TIME else None
        self.num_calls += 1
        work = GroupWork(works, result, copies, timeout_s)
        if self._is_coalescing and (coalesced := getattr(self._coalescing, "works", None)) is not None:
            coalesced.append(work)
        return work


def _all_on_cpu(tensors: Sequence[Any]) -> bool:
    return all(each.device.type == "cpu" for each in flat_list(tensors))
