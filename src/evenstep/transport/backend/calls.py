"""The calls of a process group of the backend "evenstep": which go over shared memory, and which fall through to Gloo.

[Note: two generations of names]

torch 2.13 renamed some methods (`_allgather_base` is `all_gather_single` there). It looks for the new name first, torch
2.11 knows only the old one, and where a subclass has neither, C++ calls Gloo silently. So each has both.
"""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup

from evenstep.transport.arguments import Arguments, has_memory, is_carried
from evenstep.transport.fall_through import fall_through
from evenstep.transport.group_arguments import (
    flat_list,
    inner_list,
    joined_input,
    joined_outputs,
    listed,
    op_of,
    root_of,
    unless_none,
)
from evenstep.transport.group_work import GloosWork, GroupWork, merge
from evenstep.transport.method_names import (
    ALL_GATHER_COALESCED,
    ALL_GATHER_SINGLE,
    ALL_TO_ALL_SINGLE,
    COMPARED,
    REDUCE_SCATTER_COALESCED,
    REDUCE_SCATTER_SINGLE,
)
from evenstep.transport.several_hosts import SeveralHostsTransport
from evenstep.transport.shared_memory import SharedMemoryTransport
from evenstep.transport.uncompiled import uncompiled

# torch's stub has overloads that differ between its versions.
_ProcessGroup: Any = ProcessGroup

_NO_TIME = timedelta()

_COMPARE = (SharedMemoryTransport, SeveralHostsTransport)  # what has other ranks, and tells them what is called


@uncompiled
class GroupCalls(_ProcessGroup):  # type: ignore[misc]
    """A process group whose CPU tensors travel through shared memory; `backend.EvenstepGroup` is what torch makes.

    Args:
        name: Of the backend, in messages.
        rank: This rank.
        size: Number of ranks.
        inner: The same backends once more, without this class's methods: through it calls fall.
        has_nccl: Whether it has NCCL.
    """

    def __init__(self, name: str, rank: int, size: int, *, inner: Any, has_nccl: bool) -> None:
        super().__init__(rank, size)  # the constructor with a store makes an object that C++ doesn't call back
        self._inner = inner
        self._has_nccl = has_nccl
        # A LocalTransport, SharedMemoryTransport or SeveralHostsTransport; None: everything falls through.
        self._shared: Any = None
        self._arguments = Arguments(name, rank, size, refused=weakref.WeakMethod(self._refuse))
        self._coalescing = threading.local()
        self._is_coalescing = False  # whether any thread ever has
        self._at_gloo: set[Any] = set()  # works that may be under way there

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None) -> Any:
        """Combine over the ranks, in place."""
        given, how = listed(tensors), op_of(opts, op)
        if (  # as `_carries`, in line: of all calls this is the most frequent
            how is None
            or len(given) != 1
            or self._shared is None
            or not is_carried(given[0])
            or not has_memory(given[0])
        ):
            return self._fall("allreduce", given, tensors, *unless_none(opts, timeout))
        return self._made([self._shared.all_reduce(given[0], how)], given, opts, timeout=timeout)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Combine several tensors, in one work."""
        how = op_of(opts, None)
        if how is None or not self._carries(*tensors):
            return self._fall("allreduce_coalesced", tensors, tensors, *unless_none(opts))
        return self._made([self._shared.all_reduce(each, how) for each in tensors], tensors, opts)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, root: Any = None) -> Any:
        """Make equal to the root's."""
        given, src = listed(tensors), root_of(opts, root)
        if len(given) != 1 or not self._carries(*given):
            return self._fall("broadcast", given, tensors, *unless_none(opts if root is None else root, timeout))
        return self._made([self._shared.broadcast(given[0], src)], given, opts, timeout=timeout)

    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None, *, root: Any = None
    ) -> Any:
        """Combine on the root."""
        given, dst, how = listed(tensors), root_of(opts, root), op_of(opts, op)
        if how is None or len(given) != 1 or not self._carries(*given):
            return self._fall("reduce", given, tensors, *unless_none(opts if root is None else root, op, timeout))
        return self._made([self._shared.reduce(given[0], dst, how)], given, opts, timeout=timeout)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """Put every rank's tensor into one tensor per rank."""
        given, outs = listed(inputs), inner_list(outputs)
        if len(given) != 1 or not self._carries(*given, *outs):
            return self._fall("allgather", given, outputs, inputs, *unless_none(opts, timeout))
        self._arguments.check_parts("all_gather", "outputs", outs, given[0])
        joined, copies = joined_outputs("all_gather", outs, self._arguments)
        return self._made([self._shared.all_gather(joined, given[0])], outs, opts, copies, timeout)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Put every rank's tensor one after the other into one."""
        if not self._carries(output, input):
            return self._fall(ALL_GATHER_SINGLE, [input], output, input, *unless_none(opts))
        return self._made([self._shared.all_gather(output, input)], [output], opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Several times `all_gather_single`, in one work."""
        if not self._carries(*outputs, *inputs):
            return self._fall(ALL_GATHER_COALESCED, inputs, outputs, inputs, *unless_none(opts))
        self._arguments.check_pairs("all_gather", outputs, inputs)
        works = [self._shared.all_gather(out, each) for out, each in zip(outputs, inputs, strict=True)]
        return self._made(works, outputs, opts)

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> Any:
        """Combine lists of one tensor per rank; each rank gets its own."""
        outs, given, how = listed(outputs), inner_list(inputs), op_of(opts, op)
        if how is None or len(outs) != 1 or not self._carries(*outs, *given):
            return self._fall("reduce_scatter", given, outputs, inputs, *unless_none(opts, timeout))
        self._arguments.check_parts("reduce_scatter", "inputs", given, outs[0])
        return self._made([self._shared.reduce_scatter(outs[0], joined_input(given), how)], outs, opts, timeout=timeout)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Combine tensors that hold a part per rank; each rank gets its own."""
        how = op_of(opts, None)
        if how is None or not self._carries(output, input):
            return self._fall(REDUCE_SCATTER_SINGLE, [input], output, input, *unless_none(opts))
        return self._made([self._shared.reduce_scatter(output, input, how)], [output], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Several times `reduce_scatter_single`, in one work."""
        how = op_of(opts, None)
        if how is None or not self._carries(*outputs, *inputs):
            return self._fall(REDUCE_SCATTER_COALESCED, inputs, outputs, inputs, *unless_none(opts))
        self._arguments.check_pairs("reduce_scatter", outputs, inputs)
        works = [self._shared.reduce_scatter(out, each, how) for out, each in zip(outputs, inputs, strict=True)]
        return self._made(works, outputs, opts)

    def gather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None, *, root: Any = None
    ) -> Any:
        """Put every rank's tensor into one tensor per rank, on the root."""
        given, outs, dst = listed(inputs), inner_list(outputs), root_of(opts, root)
        if len(given) != 1 or not self._carries(*given, *outs):
            return self._fall("gather", given, outputs, inputs, *unless_none(opts if root is None else root, timeout))
        joined: Tensor | None = None
        copies: list[tuple[Tensor, Tensor]] = []
        if outs:
            self._arguments.check_parts("gather", "outputs", outs, given[0])
            joined, copies = joined_outputs("gather", outs, self._arguments)
        return self._made([self._shared.gather(joined, given[0], dst)], outs, opts, copies, timeout)

    def scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None, *, root: Any = None
    ) -> Any:
        """Give every rank one of the root's tensors."""
        outs, given, src = listed(outputs), inner_list(inputs), root_of(opts, root)
        if len(outs) != 1 or not self._carries(*outs, *given):
            return self._fall("scatter", outs, outputs, inputs, *unless_none(opts if root is None else root, timeout))
        tensor: Tensor | None = None
        if given:
            self._arguments.check_parts("scatter", "inputs", given, outs[0])
            tensor = joined_input(given)
        return self._made([self._shared.scatter(outs[0], tensor, src)], outs, opts, timeout=timeout)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> Any:
        """Send a part of a tensor to every rank; splits count rows, and empty ones mean equal parts."""
        if not self._carries(output, input):
            given = (output, input, output_splits, input_splits)
            return self._fall(ALL_TO_ALL_SINGLE, [input], *given, *unless_none(opts))
        for tensor, given_splits in ((output, output_splits), (input, input_splits)):
            if not given_splits:
                self._arguments.check_rows("all_to_all", tensor)
        splits: tuple[list[int] | None, list[int] | None] = (None, None)
        if output_splits or input_splits:
            splits = self._elements(output, output_splits), self._elements(input, input_splits)
        return self._made([self._shared.all_to_all(output, input, *splits)], [output], opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Send a tensor to every rank."""
        if not self._carries(*outputs, *inputs):
            return self._fall("alltoall", inputs, outputs, inputs, *unless_none(opts))
        self._arguments.check_parts("all_to_all", "outputs", outputs, None)
        self._arguments.check_parts("all_to_all", "inputs", inputs, None)
        joined, copies = joined_outputs("all_to_all", outputs, self._arguments)
        sizes = [each.numel() for each in outputs], [each.numel() for each in inputs]
        return self._made([self._shared.all_to_all(joined, joined_input(inputs), *sizes)], outputs, opts, copies)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """Done when every rank has called it."""
        device = getattr(opts, "device", None)
        if self._shared is None or (self._has_nccl and device is not None and device.type == "cuda"):
            return self._fall("barrier", [torch.empty(0, device=device or "cpu")], *unless_none(opts, timeout))
        return self._made([self._shared.barrier()], [], opts, timeout=timeout)

    # The names of torch 2.11: see [Note: two generations of names].
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # ------------------------------------------------------------------ what falls through

    def allgather_coalesced(self, outputs: Any, inputs: Any, *args: Any) -> Any:
        """Gloo's."""
        return self._fall("allgather_coalesced", inputs, outputs, inputs, *args)

    def send(self, tensors: list[Tensor], *args: Any) -> Any:
        """Gloo's."""
        return self._fall("send", tensors, tensors, *args)

    def recv(self, tensors: list[Tensor], *args: Any) -> Any:
        """Gloo's."""
        return self._fall("recv", tensors, tensors, *args)

    def recv_anysource(self, tensors: list[Tensor], *args: Any) -> Any:
        """Gloo's."""
        return self._fall("recv_anysource", tensors, tensors, *args)

    def _refuse(self, reason: str) -> None:
        if isinstance(self._shared, _COMPARE):
            self._shared.refuse(reason)

    def _fall(self, method: str, tensors: Sequence[Tensor], *args: Any) -> Any:
        if not self._has_nccl or any(each.device.type != "cuda" for each in tensors):
            fall_through.count(method)
        launch = getattr(self._inner, method)
        collective = COMPARED.get(method)
        if collective is None or not isinstance(self._shared, _COMPARE) or not _all_on_cpu(tensors):
            return launch(*args)
        try:
            carried = launch(*args)
        except Exception as error:  # whatever it is: the other ranks may be at a call that can be made
            with _outside_transforms():
                self._refuse(str(error).partition("\n")[0])
            raise
        self._at_gloo.difference_update([each for each in tuple(self._at_gloo) if each.is_completed()])
        self._at_gloo.add(carried)
        with _outside_transforms():
            compared = self._shared.announce(collective)
        work = GloosWork(compared, carried, ended=self._at_gloo.discard)
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
        return self._shared is not None and all(is_carried(tensor) and has_memory(tensor) for tensor in tensors)

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
        work = GroupWork(works, result, copies, timeout_s)
        if self._is_coalescing and (coalesced := getattr(self._coalescing, "works", None)) is not None:
            coalesced.append(work)
        return work


def _all_on_cpu(tensors: Sequence[Any]) -> bool:
    return all(each.device.type == "cpu" for each in flat_list(tensors))


def _outside_transforms() -> contextlib.AbstractContextManager[Any]:
    """Under torch.func.grad every new tensor stands for another, also those with which ranks compare a call."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return contextlib.nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack  # imported already

    return temporarily_clear_interpreter_stack()
