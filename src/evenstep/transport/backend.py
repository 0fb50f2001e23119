"""The `torch.distributed` backend "evenstep": any torch program's CPU ranks of one host exchange through shared memory.

[Note: the whole group]

torch replaces the whole process group by what a Python backend returns, also in "cpu:evenstep,cuda:nccl", and makes no
other backend then. So a group makes and registers its own Gloo and NCCL. Collectives of CPU tensors go over shared
memory; GPU tensors are NCCL's; whatever else there is falls through to Gloo and is counted (`fall_through`).

[Note: two generations of names]

torch 2.13 renamed some methods (`_allgather_base` is `all_gather_single` there). It looks for the new name first, torch
2.11 knows only the old one, and where a subclass has neither, C++ calls Gloo silently. So each has both.
"""

from __future__ import annotations

import math
import sys
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    PrefixStore,
    ProcessGroup,
    Store,
)

from evenstep.transport.arguments import Arguments, is_carried
from evenstep.transport.base import Transport
from evenstep.transport.deadline import TellingGloo, set_timeout
from evenstep.transport.fall_through import fall_through
from evenstep.transport.gloo import connect_gloo
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
from evenstep.transport.hosts import connect_ranks
from evenstep.transport.local import LocalTransport
from evenstep.transport.method_names import (
    ALL_GATHER_COALESCED,
    ALL_GATHER_SINGLE,
    ALL_TO_ALL_SINGLE,
    COMPARED,
    REDUCE_SCATTER_COALESCED,
    REDUCE_SCATTER_SINGLE,
)
from evenstep.transport.process_group import ProcessGroupTransport
from evenstep.transport.shared_memory import SharedMemoryTransport

# torch's stub has overloads that differ between its versions.
_ProcessGroup: Any = ProcessGroup

NAME = "evenstep"
_NO_TIME = timedelta()


def register_backend() -> None:
    """Let `init_process_group("evenstep")` find the backend. Nothing is started. Twice is once."""
    if dist.is_available() and NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _make_group, extended_api=True, devices=["cpu", "cuda"])


def _make_group(made_for: Any, options: Any) -> EvenstepGroup:
    return EvenstepGroup(
        made_for.store,
        made_for.group_rank,
        made_for.group_size,
        timeout=made_for.timeout,
        name=made_for.group_id,
        global_ranks=list(made_for.global_ranks_in_group),
        nccl_options=options,
    )


class EvenstepGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group whose CPU tensors travel through shared memory. torch makes it.

    Collective: every rank of the group makes it, and makes the same calls in the same order.

    Args:
        store: Where the ranks meet.
        rank: This rank.
        size: Number of ranks.
        timeout: Deadline of a call.
        name: Of the group.
        global_ranks: The ranks' numbers in the default group; empty for that one.
        nccl_options: What the script gave as `pg_options`, if it is for NCCL.

    Attributes:
        why_gloo: Why there is no shared memory, where there is none: then everything falls through.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        timeout: timedelta,
        name: str,
        global_ranks: list[int],
        nccl_options: Any = None,
    ) -> None:
        super().__init__(rank, size)  # the constructor with a store makes an object that C++ doesn't call back
        self._store = store
        self._timeout = timeout
        self._coalescing = threading.local()
        self._is_coalescing = False  # whether any thread ever has
        # The same backends once more, without this class's methods: through it calls fall.
        self._inner = ProcessGroup(store, rank, size)
        # Held: python's part of it, which hears of deadlines, would be gone with the last reference from python.
        self._gloo = gloo = TellingGloo(PrefixStore("gloo/", store), rank, size, timeout=timeout)
        gloo.options.global_ranks_in_group = global_ranks
        gloo.options.group_name = name  # type: ignore[assignment]
        gloo._set_sequence_number_for_group()
        self._register("cpu", ProcessGroup.BackendType.GLOO, gloo)
        self._has_nccl = dist.is_nccl_available() and torch.cuda.is_available()
        if self._has_nccl:
            nccl = _make_nccl(store, rank, size, timeout, name, global_ranks, nccl_options)
            self._register("cuda", ProcessGroup.BackendType.NCCL, nccl)
        for group in (self._inner, self):
            group._set_default_backend(ProcessGroup.BackendType.GLOO)
        self.why_gloo: str | None = None
        self._arguments = Arguments(NAME, rank, size, refused=weakref.WeakMethod(self._refuse))
        self._shared: Any = None  # a LocalTransport, SharedMemoryTransport or SeveralHostsTransport
        self._connect(is_default=not global_ranks)
        hears = weakref.WeakMethod(self._set_timeout)
        gloo.told = lambda timeout: (hear := hears()) and hear(timeout)

    def _set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        set_timeout(self._shared, timeout.total_seconds())

    def _register(self, device: str, kind: ProcessGroup.BackendType, backend: Any) -> None:
        for group in (self._inner, self):
            group._register_backend(torch.device(device), kind, backend)

    def _connect(self, *, is_default: bool) -> None:
        if self.size() == 1:
            self._shared = LocalTransport()
            return
        timeout_s = self._timeout.total_seconds()
        control = ProcessGroupTransport(self._inner, name="gloo", timeout_s=timeout_s)
        made = connect_ranks(control, self._gloo_among, timeout_s=timeout_s)
        if not isinstance(made, str):
            self._shared = made
            return
        self.why_gloo = made
        if is_default and self.rank() == 0:
            print(f"evenstep: Gloo, for want of shared memory: {made}", file=sys.stderr, flush=True)  # noqa: T201

    def _gloo_among(self, ranks: Sequence[int]) -> Transport:
        """Gloo between some ranks, who alone call this."""
        store = PrefixStore(f"among {','.join(map(str, ranks))}/", self._store)
        timeout_s = self._timeout.total_seconds()
        return connect_gloo(store, ranks.index(self.rank()), len(ranks), timeout_s=timeout_s)

    # ------------------------------------------------------------------ what torch asks

    def getBackendName(self) -> str:
        """What `name()` says. The name in C++."""
        return NAME

    def get_group_store(self) -> Store:
        """Where the ranks met."""
        return self._store

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: Any = None,
        group_desc: str | None = None,
        device_types: list[torch.device] | None = None,
    ) -> EvenstepGroup | None:
        """A group of some of these ranks. Collective: every rank of `new_ranks` calls this; None on others."""
        if self.rank() not in new_ranks:
            return None
        name = group_name or f"{self.group_name}/{','.join(map(str, new_ranks))}"
        group = EvenstepGroup(
            PrefixStore(f"{name}/", self._store),
            new_ranks.index(self.rank()),
            len(new_ranks),
            timeout=timeout or self._timeout,
            name=name,
            global_ranks=new_ranks,
        )
        group._set_group_name(name)
        group._set_group_desc(group_desc or "undefined")
        return group

    def shutdown(self) -> None:
        """Let go of shared memory and sockets."""
        self._close()
        self._inner.shutdown()

    def abort(self) -> None:
        """Let go of shared memory and sockets, whatever is in flight."""
        self._close()
        self._inner.abort()

    def _close(self) -> None:
        shared, self._shared = self._shared, None
        if shared is not None:
            shared.close()

    def __repr__(self) -> str:
        carrier = self._shared if self._shared is not None else self.why_gloo or "closed"
        return f"<EvenstepGroup rank {self.rank()}/{self.size()} {carrier}>"

    # ------------------------------------------------------------------ collectives

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None) -> Any:
        """Combine over the ranks, in place."""
        given, how = listed(tensors), op_of(opts, op)
        if how is None or len(given) != 1 or self._shared is None or not is_carried(given[0]):
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
        works = [self._shared.all_gather(out, each) for out, each in zip(outputs, inputs, strict=True)]
        return self._made(works, outputs, opts)

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> Any:
        """Combine lists of one tensor per rank; each rank gets its own."""
        outs, given, how = listed(outputs), inner_list(inputs), op_of(opts, op)
        if how is None or len(outs) != 1 or not self._carries(*outs, *given):
            return self._fall("reduce_scatter", given, outputs, inputs, *unless_none(opts, timeout))
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
        works = [self._shared.reduce_scatter(out, each, how) for out, each in zip(outputs, inputs, strict=True)]
        return self._made(works, outputs, opts)

    def gather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None, *, root: Any = None
    ) -> Any:
        """Put every rank's tensor into one tensor per rank, on the root."""
        given, outs, dst = listed(inputs), inner_list(outputs), root_of(opts, root)
        if len(given) != 1 or not self._carries(*given, *outs):
            return self._fall("gather", given, outputs, inputs, *unless_none(opts if root is None else root, timeout))
        joined, copies = joined_outputs("gather", outs, self._arguments) if outs else (None, [])
        return self._made([self._shared.gather(joined, given[0], dst)], outs, opts, copies, timeout)

    def scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None, *, root: Any = None
    ) -> Any:
        """Give every rank one of the root's tensors."""
        outs, given, src = listed(outputs), inner_list(inputs), root_of(opts, root)
        if len(outs) != 1 or not self._carries(*outs, *given):
            return self._fall("scatter", outs, outputs, inputs, *unless_none(opts if root is None else root, timeout))
        tensor = joined_input(given) if given else None
        return self._made([self._shared.scatter(outs[0], tensor, src)], outs, opts, timeout=timeout)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> Any:
        """Send a part of a tensor to every rank; splits count rows, and empty ones mean equal parts."""
        if not self._carries(output, input):
            given = (output, input, output_splits, input_splits)
            return self._fall(ALL_TO_ALL_SINGLE, [input], *given, *unless_none(opts))
        splits: tuple[list[int] | None, list[int] | None] = (None, None)
        if output_splits or input_splits:
            splits = self._elements(output, output_splits), self._elements(input, input_splits)
        return self._made([self._shared.all_to_all(output, input, *splits)], [output], opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Send a tensor to every rank."""
        if not self._carries(*outputs, *inputs):
            return self._fall("alltoall", inputs, outputs, inputs, *unless_none(opts))
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
        if isinstance(self._shared, SharedMemoryTransport):
            self._shared.refuse(reason)

    def _fall(self, method: str, tensors: Sequence[Tensor], *args: Any) -> Any:
        if not self._has_nccl or any(each.device.type != "cuda" for each in tensors):
            fall_through.count(method)
        launch = getattr(self._inner, method)
        collective = COMPARED.get(method)
        if collective is None or not isinstance(self._shared, SharedMemoryTransport) or not _all_on_cpu(tensors):
            return launch(*args)
        try:
            carried = launch(*args)
        except Exception as error:  # whatever it is: the other ranks may be at a call that can be made
            self._refuse(str(error).partition("\n")[0])
            raise
        work = GloosWork(self._shared.announce(collective), carried)
        return self._made([work], flat_list(args[0]), None)

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
        return self._shared is not None and all(is_carried(tensor) for tensor in tensors)

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


def _make_nccl(
    store: Store, rank: int, size: int, timeout: timedelta, name: str, global_ranks: list[int], options: Any
) -> Any:
    from torch._C._distributed_c10d import ProcessGroupNCCL  # not in every build

    options = options if isinstance(options, ProcessGroupNCCL.Options) else ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.global_ranks_in_group = global_ranks
    options.group_name = name
    nccl = ProcessGroupNCCL(PrefixStore("nccl/", store), rank, size, options)
    nccl._set_sequence_number_for_group()
    return nccl


def _all_on_cpu(tensors: Sequence[Any]) -> bool:
    return all(each.device.type == "cpu" for each in flat_list(tensors))
