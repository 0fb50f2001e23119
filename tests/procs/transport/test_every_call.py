"""Every public call of `torch.distributed` on the backend "evenstep" and on Gloo: one result, or one kind of error.

A call that torch adds makes `test_every_name_has_a_case` fail until it has one here, or a word why it needs none.
"""

# ruff: noqa: E501  # tables with a case a line

from __future__ import annotations

import contextlib
import itertools
import types
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

import evenstep
from evenstep.errors import ConfigurationError
from evenstep.testing import RankPool
from evenstep.transport.shm.transport import SharedMemoryTransport

# No call to a backend: by why.
NO_CALLS = {
    "classes and types": """
        AllToAllOptions AllreduceCoalescedOptions AllreduceOptions AsyncCollectiveTensor Backend BackendConfig
        BarrierOptions BroadcastOptions
        BuiltinCommHookType DebugLevel DeviceMesh DistBackendError DistError DistNetworkError DistStoreError FileStore
        GatherOptions GradBucket GroupMember GroupName HashStore Logger PrefixStore ProcessGroup ProcessGroupGloo
        ProcessGroupNCCL ProcessGroupNCCL2 ProcessGroupNCCLLazy QueueEmptyError RankType ReduceOp ReduceOptions
        ReduceScatterOptions Reducer ScatterOptions Store TCPStore Work group reduce_op timedelta""",
    "of the process or the installation": """
        breakpoint default_pg_timeout get_debug_level get_default_backend_for_device get_node_local_rank get_pg_count
        is_available is_backend_available is_gloo_available is_initialized is_mpi_available is_nccl_available
        is_torchelastic_launched is_ucc_available is_xccl_available log record_comm register_rendezvous_handler
        rendezvous set_debug_level set_debug_level_from_env supports_complex
        allow_inflight_collective_as_graph_input_ctx""",
    "made and ended by every test on ranks": "destroy_process_group init_process_group init_device_mesh",
    "parts of an autograd function, called by torch": """
        all_gather_into_tensor_backward all_gather_into_tensor_coalesced_backward
        all_gather_into_tensor_coalesced_setup_context all_gather_into_tensor_setup_context all_reduce_backward
        all_reduce_coalesced_backward all_reduce_coalesced_setup_context all_reduce_setup_context
        all_to_all_single_backward all_to_all_single_setup_context reduce_scatter_tensor_backward
        reduce_scatter_tensor_coalesced_backward reduce_scatter_tensor_coalesced_setup_context
        reduce_scatter_tensor_setup_context wait_tensor_backward wait_tensor_setup_context wait_tensors_backward""",
    "what torch.compile puts in the place of a call of torch.distributed": """
        all_gather_inplace all_gather_tensor_inplace all_reduce_inplace all_to_all_inplace reduce_scatter_inplace
        reduce_scatter_tensor_inplace batch_p2p_ops_inplace irecv_inplace isend_inplace""",
}

# What docs/reference/backend.md says of calls that differ. Gloo's reasons where evenstep has a result:
MORE_THAN_GLOO = (
    "Invalid scalar type",  # dtypes that Gloo doesn't have
    "result type Float can't be cast to the desired output type",  # averages of integers
    "\"div_cpu\" not implemented for 'ComplexHalf'",  # averages of these
    "on complex tensors",  # products of these
    "invalid tensor size at index",  # as many elements, in another shape
    "There were no tensor arguments to this function",  # all_reduce_coalesced of no tensor
)
# and the cases where evenstep refuses what Gloo does:
STRICTER_THAN_GLOO = (
    "mistakes: all_reduce of an expanded tensor",
    "mistakes: all_to_all_single of rows that can't be divided",
    *(
        f'messages: around float8_{kind}: ConfigurationError("send: messages between'
        for kind in ("e4m3fnuz", "e5m2fnuz", "e8m0fnu")
    ),
    "groups: monitored_barrier of torch's: ValueError('monitored_barrier is only implemented for GLOO",  # before 2.15
)


def public_names() -> set[str]:
    """What this torch has."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {
            name
            for name in dir(dist)
            if not name.startswith("_") and not isinstance(getattr(dist, name), types.ModuleType)
        }
    own = vars(functional).items()
    return found | {
        name
        for name, value in own
        if not name.startswith("_") and callable(value) and value.__module__ == functional.__name__
    }


@dataclass
class Ranks:
    """One group of a backend, as a case sees it."""

    group: Any
    backend: str
    seed: int

    def __post_init__(self) -> None:
        """Inputs are the same for both backends, and differ between ranks."""
        self.rank, self.size = self.group.rank(), self.group.size()
        self.generator = torch.Generator().manual_seed(self.seed * 8 + self.rank)

    def draw(self, dtype: torch.dtype, shape: tuple[int, ...], kind: str = "plain") -> Tensor:
        """Whole numbers, so that every order of summation gives the same."""
        wide = torch.randint(0, 4, (*shape, 2), generator=self.generator)
        if dtype.is_complex:
            wide = torch.complex(wide.float(), wide.flip(-1).float())
        wide = wide.to(dtype)
        # Gloo's own all_reduce and reduce take a tensor with gaps for one without, and give something else.
        return wide[..., 0] if kind == "gaps" and self.backend == "evenstep" else wide[..., 0].clone()


Call = Callable[[Ranks], Any]
CASES: dict[str, Callable[[], Iterator[tuple[str, Call]]]] = {}
COVERED: set[str] = set()


def case(*names: str) -> Callable[[Callable[[], Iterator[tuple[str, Call]]]], None]:
    """Register calls of some names of torch's."""

    def register(calls: Callable[[], Iterator[tuple[str, Call]]]) -> None:
        CASES[calls.__name__] = calls
        COVERED.update(names)

    return register


def _dtypes() -> list[torch.dtype]:
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    usable = []
    for dtype in sorted(found, key=str):
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ComplexHalf is experimental
            torch.arange(3).to(dtype)[1].item()
            torch.zeros(2, dtype=dtype).fill_(1)  # not bcomplex32 of torch 2.15, of which only one number can be filled
            usable.append(dtype)
    return usable


DTYPES = _dtypes()
OPS = [op for name, op in dist.ReduceOp.RedOpType.__members__.items() if name not in ("UNUSED", "PREMUL_SUM")]
SHAPES = {"plain": (5,), "scalar": (), "empty": (0, 3), "gaps": (4, 3)}


def over(*axes: Any) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(name, values) for every combination."""
    for values in itertools.product(*axes):
        yield " ".join(str(each).removeprefix("torch.").removeprefix("RedOpType.") for each in values), values


# ---------------------------------------------------------------------- reductions


@case("all_reduce")
def all_reduce() -> Iterator[tuple[str, Call]]:
    for name, (op, dtype, kind) in over(OPS, DTYPES, SHAPES):

        def call(ranks: Ranks, op: Any = op, dtype: Any = dtype, kind: str = kind) -> Tensor:
            tensor = ranks.draw(dtype, SHAPES[kind], kind)
            dist.all_reduce(tensor, op, group=ranks.group)
            return tensor

        yield name, call


@case("reduce")
def reduce() -> Iterator[tuple[str, Call]]:
    for name, (op, dtype, kind) in over(OPS, DTYPES, SHAPES):

        def call(ranks: Ranks, op: Any = op, dtype: Any = dtype, kind: str = kind) -> Tensor | None:
            tensor = ranks.draw(dtype, SHAPES[kind], kind)
            dist.reduce(tensor, group_dst=1, op=op, group=ranks.group)
            return tensor if ranks.rank == 1 else None

        yield name, call


@case("reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor")
def reduce_scatter() -> Iterator[tuple[str, Call]]:
    for name, (op, dtype, kind) in over(OPS, DTYPES, SHAPES):

        def in_lists(ranks: Ranks, op: Any = op, dtype: Any = dtype, kind: str = kind) -> Tensor:
            given = [ranks.draw(dtype, SHAPES[kind], kind) for _ in range(ranks.size)]
            out = torch.zeros_like(given[0])
            dist.reduce_scatter(out, given, op, group=ranks.group)
            return out

        def in_one(ranks: Ranks, op: Any = op, dtype: Any = dtype) -> Tensor:
            out = torch.zeros(3, 2).to(dtype)
            given = ranks.draw(dtype, (ranks.size * 3, 2))
            getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(out, given, op, group=ranks.group)
            return out

        yield f"lists {name}", in_lists
        if kind == "plain":
            yield f"one {name}", in_one


@case("all_reduce_coalesced")
def coalesced() -> Iterator[tuple[str, Call]]:
    def all_reduce_coalesced(ranks: Ranks) -> Any:
        tensors = [ranks.draw(torch.float32, (n,)) for n in (3, 1, 7)]
        dist.all_reduce_coalesced(tensors, group=ranks.group)
        return tensors

    def of_two_dtypes(ranks: Ranks) -> Any:
        tensors = [ranks.draw(dtype, (3,)) for dtype in (torch.float32, torch.int64)]
        dist.all_reduce_coalesced(tensors, group=ranks.group)
        return tensors

    yield "all_reduce_coalesced", all_reduce_coalesced
    yield "of two dtypes", of_two_dtypes


# ---------------------------------------------------------------------- what moves tensors


@case(
    *("broadcast", "all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_coalesced"),
    *("gather", "gather_single", "gather_into_tensor", "scatter", "all_to_all", "all_to_all_single"),
)
def moves() -> Iterator[tuple[str, Call]]:
    def broadcast(ranks: Ranks, tensor: Tensor) -> Any:
        dist.broadcast(tensor, group_src=1, group=ranks.group)
        return tensor

    def all_gather(ranks: Ranks, tensor: Tensor) -> Any:
        outs = [torch.zeros_like(tensor) for _ in range(ranks.size)]
        dist.all_gather(outs, tensor, group=ranks.group)
        return outs

    def all_gather_single(ranks: Ranks, tensor: Tensor) -> Any:
        out = torch.zeros((ranks.size * (*tensor.shape, 1)[0], *tensor.shape[1:])).to(tensor.dtype)
        getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(out, tensor, group=ranks.group)
        return out

    def all_gather_coalesced(ranks: Ranks, tensor: Tensor) -> Any:
        outs = [[torch.zeros_like(tensor) for _ in range(2)] for _ in range(ranks.size)]
        dist.all_gather_coalesced(outs, [tensor, tensor.clone()], group=ranks.group)
        return outs

    def gather(ranks: Ranks, tensor: Tensor) -> Any:
        outs = [torch.zeros_like(tensor) for _ in range(ranks.size)] if ranks.rank == 1 else None
        dist.gather(tensor, outs, group_dst=1, group=ranks.group)
        return outs

    def gather_single(ranks: Ranks, tensor: Tensor) -> Any:
        if ranks.backend == "gloo":  # which has none
            outs = gather(ranks, tensor)
            return outs and torch.cat([out.reshape(out.shape or (1,)) for out in outs])
        shape = (ranks.size * (*tensor.shape, 1)[0], *tensor.shape[1:])
        out = torch.zeros(shape).to(tensor.dtype) if ranks.rank == 1 else None
        dist.gather_single(tensor, out, group_dst=1, group=ranks.group)
        return out

    def scatter(ranks: Ranks, tensor: Tensor) -> Any:
        out = torch.zeros_like(tensor)
        given = [tensor + number if tensor.dtype is torch.float32 else tensor for number in range(ranks.size)]
        dist.scatter(out, given if ranks.rank == 1 else None, group_src=1, group=ranks.group)
        return out

    def all_to_all(ranks: Ranks, tensor: Tensor) -> Any:
        outs = [torch.zeros_like(tensor) for _ in range(ranks.size)]
        dist.all_to_all(outs, [tensor.clone() for _ in range(ranks.size)], group=ranks.group)
        return outs

    def all_to_all_single(ranks: Ranks, tensor: Tensor) -> Any:
        given = torch.stack([tensor] * ranks.size)
        out = torch.zeros(given.shape).to(tensor.dtype)
        dist.all_to_all_single(out, given, group=ranks.group)
        return out

    movers = [broadcast, all_gather, all_gather_single, all_gather_coalesced, gather, scatter, all_to_all]
    movers += [all_to_all_single, *([gather_single] if hasattr(dist, "gather_single") else [])]
    for move, dtype, kind in itertools.product(movers, DTYPES, SHAPES):

        def call(ranks: Ranks, move: Any = move, dtype: Any = dtype, kind: str = kind) -> Any:
            return move(ranks, ranks.draw(dtype, SHAPES[kind], kind))

        yield f"{move.__name__} {str(dtype)[6:]} {kind}", call

    def uneven(ranks: Ranks, num_columns: int = 3) -> Any:
        """Rank r sends r + k rows to rank k: nothing from rank 0 to itself."""
        counts = [ranks.rank + other for other in range(ranks.size)]
        out = torch.zeros(sum(counts), num_columns)
        dist.all_to_all_single(
            out, ranks.draw(torch.float32, (sum(counts), num_columns)), counts, counts, group=ranks.group
        )
        return out

    def uneven_lists(ranks: Ranks) -> Any:
        outs = [torch.zeros(ranks.rank + other) for other in range(ranks.size)]
        dist.all_to_all(outs, [ranks.draw(torch.float32, tuple(out.shape)) for out in outs], group=ranks.group)
        return outs

    yield "uneven all_to_all_single", uneven
    yield "uneven all_to_all", uneven_lists
    yield "uneven all_to_all_single without columns", lambda ranks: uneven(ranks, 0)


# ---------------------------------------------------------------------- messages and objects


@case("send", "recv", "isend", "irecv", "batch_isend_irecv", "P2POp")
def messages() -> Iterator[tuple[str, Call]]:
    for dtype in DTYPES:

        def around(ranks: Ranks, dtype: Any = dtype) -> Any:
            tensor = ranks.draw(dtype, (4,))
            out = torch.zeros(4).to(dtype)
            to, source = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size
            sent = dist.isend(tensor, group=ranks.group, group_dst=to, tag=3)
            arrived = dist.irecv(out, group=ranks.group, group_src=source, tag=3)
            assert sent is not None
            assert arrived is not None
            arrived.wait()
            sent.wait()
            return out

        yield f"around {str(dtype)[6:]}", around

    def in_a_batch(ranks: Ranks) -> Any:
        out = torch.zeros(3)
        to, source = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size
        operations = [
            dist.P2POp(dist.isend, ranks.draw(torch.float32, (3,)), group=ranks.group, group_peer=to),
            dist.P2POp(dist.irecv, out, group=ranks.group, group_peer=source),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return out

    def to_nobody(ranks: Ranks) -> Any:
        for call in (dist.send, dist.recv):
            with pytest.raises(ConfigurationError, match=f"{ranks.size} on rank {ranks.rank}"):
                call(
                    torch.zeros(1), group=ranks.group, **{f"group_{'dst' if call is dist.send else 'src'}": ranks.size}
                )

    yield "in a batch", in_a_batch
    yield "to itself", lambda ranks: dist.send(torch.zeros(1), group=ranks.group, group_dst=ranks.rank)
    yield "to nobody", lambda ranks: to_nobody(ranks) if ranks.backend == "evenstep" else None  # Gloo: SIGSEGV
    yield "an empty batch", lambda ranks: dist.batch_isend_irecv([])
    yield "no tensor", lambda ranks: dist.send([1], group=ranks.group, group_dst=0)


@case(
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
)
def objects() -> Iterator[tuple[str, Call]]:
    def mine(ranks: Ranks) -> Any:
        return {"rank": ranks.rank, "of": ranks.draw(torch.float32, (2,)), "text": "x" * ranks.rank * 50}

    def all_gather_object(ranks: Ranks) -> Any:
        got: list[Any] = [None] * ranks.size
        dist.all_gather_object(got, mine(ranks), group=ranks.group)
        return got

    def gather_object(ranks: Ranks) -> Any:
        got: list[Any] | None = [None] * ranks.size if ranks.rank == 1 else None
        dist.gather_object(mine(ranks), got, group_dst=1, group=ranks.group)
        return got

    def broadcast_object_list(ranks: Ranks) -> Any:
        got = [mine(ranks), 3, None]
        dist.broadcast_object_list(got, group_src=1, group=ranks.group)
        return got

    def scatter_object_list(ranks: Ranks) -> Any:
        got: list[Any] = [None]
        dist.scatter_object_list(got, [mine(ranks)] * ranks.size, group_src=1, group=ranks.group)
        return got

    def send_object_list(ranks: Ranks) -> Any:
        got: list[Any] = [None, None]
        if ranks.rank == 0:
            dist.send_object_list([mine(ranks), "two"], group_dst=1, group=ranks.group)
        elif ranks.rank == 1:
            dist.recv_object_list(got, group_src=0, group=ranks.group)
        return got

    for call in (all_gather_object, gather_object, broadcast_object_list, scatter_object_list, send_object_list):
        yield call.__name__, call
    yield (
        "what can't be pickled",
        lambda ranks: dist.all_gather_object([None] * ranks.size, lambda: 0, group=ranks.group),
    )
    yield "nothing to scatter to", lambda ranks: dist.scatter_object_list([], [1] * ranks.size, group=ranks.group)


# ---------------------------------------------------------------------- groups


@case(
    *("barrier", "monitored_barrier", "new_group", "new_subgroups", "new_subgroups_by_enumeration", "get_rank"),
    *("get_world_size", "get_group_rank", "get_global_rank", "get_process_group_ranks", "get_backend"),
    *("get_backend_config", "split_group", "shrink_group", "set_timeout", "get_backend_impl"),
)
def groups() -> Iterator[tuple[str, Call]]:
    def told(ranks: Ranks) -> Any:
        group = ranks.group
        assert dist.get_backend(group) == ranks.backend
        assert ranks.backend in dist.get_backend_config(group)
        return [
            dist.get_rank(group),
            dist.get_world_size(group),
            dist.get_process_group_ranks(group),
            [dist.get_group_rank(group, rank) for rank in range(ranks.size)],
            [dist.get_global_rank(group, rank) for rank in range(ranks.size)],
        ]

    def sum_of(group: Any) -> Any:
        """What a rank of the group gets; None for one that isn't in it."""
        if group is None or group == dist.GroupMember.NON_GROUP_MEMBER:
            return None
        tensor = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(tensor, group=group)
        found = [float(tensor), group.rank(), group.size(), dist.get_process_group_ranks(group)]
        dist.destroy_process_group(group)
        return found

    def made(ranks: Ranks, members: list[int], **given: Any) -> Any:
        return sum_of(dist.new_group(members, backend=ranks.backend, **given))

    def enumerated(ranks: Ranks) -> Any:
        mine, _ = dist.new_subgroups_by_enumeration([[1], [0, *range(2, ranks.size)]], backend=ranks.backend)
        return sum_of(mine)

    def barriers(ranks: Ranks) -> Any:
        dist.barrier(group=ranks.group)
        work = dist.barrier(group=ranks.group, async_op=True)
        assert work is not None
        return work.wait(timedelta(seconds=40))

    def monitored_barrier(ranks: Ranks) -> Any:
        return ranks.group.monitored_barrier(timedelta(seconds=40), wait_all_ranks=True)

    def monitored_barrier_of_torchs(ranks: Ranks) -> Any:
        return dist.monitored_barrier(ranks.group, timedelta(seconds=40))

    yield "told", told
    yield "made of one rank", lambda ranks: made(ranks, [1])
    yield "made of all, turned round", lambda ranks: made(ranks, list(range(ranks.size))[::-1], sort_ranks=False)
    yield "enumerated", enumerated
    yield "no rank", lambda ranks: dist.new_group([ranks.size], backend=ranks.backend)
    yield "one rank twice", lambda ranks: dist.new_subgroups_by_enumeration([[0], [0]], backend=ranks.backend)
    yield "subgroups that don't add up", lambda ranks: dist.new_subgroups(ranks.size + 1, backend=ranks.backend)
    yield "barriers", barriers
    yield "monitored_barrier", monitored_barrier
    yield "monitored_barrier of torch's", monitored_barrier_of_torchs
    yield "shrink_group", lambda ranks: dist.shrink_group([ranks.size - 1], group=ranks.group)
    yield "split_group", lambda ranks: sum_of(dist.split_group(ranks.group, [[0], list(range(1, ranks.size))]))


# ---------------------------------------------------------------------- functional collectives


@case(
    *("all_reduce_coalesced", "all_gather_tensor", "all_gather_tensor_autograd", "all_gather_into_tensor_coalesced"),
    *("all_gather_single_autograd", "all_gather_single_coalesced", "all_to_all_single_autograd", "permute_tensor"),
    *("reduce_scatter_tensor_autograd", "reduce_scatter_tensor_coalesced", "reduce_scatter_single_autograd"),
    *("reduce_scatter_single_coalesced", "wait_tensor", "wait_tensors"),
)
def functionals() -> Iterator[tuple[str, Call]]:
    def named(*names: str) -> Any:
        return next(getattr(functional, name) for name in names if hasattr(functional, name))

    gather = named("all_gather_single", "all_gather_tensor")
    scatter = named("reduce_scatter_single", "reduce_scatter_tensor")
    simple: dict[str, Callable[[Ranks, Tensor], Any]] = {
        "broadcast": lambda ranks, tensor: functional.broadcast(tensor, 1, ranks.group),
        "all_gather 0": lambda ranks, tensor: gather(tensor, 0, ranks.group),
        "all_gather 1": lambda ranks, tensor: gather(tensor, 1, ranks.group),
        "all_to_all": lambda ranks, tensor: functional.all_to_all_single(tensor, None, None, ranks.group),
        "permute": lambda ranks, tensor: functional.permute_tensor(tensor, [*range(1, ranks.size), 0], ranks.group),
        "all_reduce_coalesced": lambda ranks, tensor: functional.all_reduce_coalesced([tensor, tensor + 1], "sum", ranks.group),
        "all_gather_coalesced": lambda ranks, tensor: named(
            "all_gather_single_coalesced", "all_gather_into_tensor_coalesced"
        )([tensor, tensor + 1], ranks.group),
        "reduce_scatter_coalesced": lambda ranks, tensor: named(
            "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"
        )([tensor, tensor + 1], "sum", [0, 1], ranks.group),
        **{f"all_reduce {op}": lambda ranks, tensor, op=op: functional.all_reduce(tensor, op, ranks.group) for op in ("sum", "avg", "min", "max", "product", "band", "nothing")},
        **{f"reduce_scatter {op}": lambda ranks, tensor, op=op: scatter(tensor, op, 0, ranks.group) for op in ("sum", "avg", "max")},
    }  # fmt: skip
    for name, function in simple.items():
        for dtype in (torch.float32, torch.int64, torch.bfloat16):

            def call(ranks: Ranks, function: Any = function, dtype: Any = dtype) -> Any:
                got = function(ranks, ranks.draw(dtype, (6, 6)))
                listed = got if isinstance(got, list) else [got]
                return [functional.wait_tensor(each) for each in listed]

            yield f"{name} {str(dtype)[6:]}", call

    differentiable: dict[str, Callable[[Ranks, Tensor], Tensor]] = {
        "all_gather": lambda ranks, tensor: named("all_gather_single_autograd", "all_gather_tensor_autograd")(
            tensor, 0, ranks.group
        ),
        "reduce_scatter": lambda ranks, tensor: named(
            "reduce_scatter_single_autograd", "reduce_scatter_tensor_autograd"
        )(tensor, "sum", 0, ranks.group),
        "all_to_all": lambda ranks, tensor: functional.all_to_all_single_autograd(
            tensor, [6 // ranks.size] * ranks.size, [6 // ranks.size] * ranks.size, ranks.group
        ),
    }
    for name, function in differentiable.items():

        def differentiated(ranks: Ranks, function: Any = function) -> Any:
            tensor = ranks.draw(torch.float32, (6, 2)).requires_grad_()
            out = functional.wait_tensor(function(ranks, tensor))
            (out * out).sum().backward()
            return [out.detach(), tensor.grad]

        yield f"differentiated {name}", differentiated


# ---------------------------------------------------------------------- mistakes that every rank makes


@case()
def mistakes() -> Iterator[tuple[str, Call]]:
    def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.ones(shape, dtype=dtype)

    gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    wrong: dict[str, Callable[[Ranks, Any], Any]] = {
        "all_reduce of a list": lambda ranks, group: dist.all_reduce([ones(1)], group=group),
        "all_reduce of none": lambda ranks, group: dist.all_reduce(None, group=group),
        "all_reduce with a word": lambda ranks, group: dist.all_reduce(ones(1), "sum", group=group),
        "all_reduce_coalesced of nothing": lambda ranks, group: dist.all_reduce_coalesced([], group=group),
        "all_reduce of an expanded tensor": lambda ranks, group: dist.all_reduce(ones(1).expand(3), group=group),
        "broadcast from nobody": lambda ranks, group: dist.broadcast(ones(1), group_src=ranks.size, group=group),
        "broadcast from two": lambda ranks, group: dist.broadcast(ones(1), 0, group_src=0, group=group),
        "reduce to nobody": lambda ranks, group: dist.reduce(ones(1), group_dst=-1, group=group),
        "all_gather into too few": lambda ranks, group: dist.all_gather([ones(1)], ones(1), group=group),
        "all_gather into nothing": lambda ranks, group: dist.all_gather([], ones(1), group=group),
        "all_gather of another size": lambda ranks, group: dist.all_gather([ones(2)] * ranks.size, ones(1), group=group),
        "all_gather of another dtype": lambda ranks, group: dist.all_gather([ones(2, dtype=torch.int64)] * ranks.size, ones(2), group=group),
        "all_gather_single of another size": lambda ranks, group: gather_single(ones(3 * ranks.size + 1), ones(3), group=group),
        "all_gather_single of another dtype": lambda ranks, group: gather_single(ones(3 * ranks.size, dtype=torch.int64), ones(3), group=group),
        "gather without a list": lambda ranks, group: dist.gather(ones(1), None, group_dst=ranks.rank, group=group),
        "gather into too few": lambda ranks, group: dist.gather(ones(1), [ones(1)], group_dst=ranks.rank, group=group),
        "scatter of too few": lambda ranks, group: dist.scatter(ones(1), [ones(1)], group_src=ranks.rank, group=group),
        "scatter of another size": lambda ranks, group: dist.scatter(ones(1), [ones(2)] * ranks.size, group_src=ranks.rank, group=group),
        "reduce_scatter of too few": lambda ranks, group: dist.reduce_scatter(ones(1), [ones(1)], group=group),
        "reduce_scatter of another size": lambda ranks, group: dist.reduce_scatter(ones(1), [ones(2)] * ranks.size, group=group),
        "reduce_scatter_single of another size": lambda ranks, group: scatter_single(ones(3), ones(3 * ranks.size + 1), group=group),
        "all_to_all_single of rows that can't be divided": lambda ranks, group: dist.all_to_all_single(ones(ranks.size + 1), ones(ranks.size + 1), group=group),
        "all_to_all_single of splits that don't add up": lambda ranks, group: dist.all_to_all_single(ones(6), ones(6), [1] * ranks.size, [1] * ranks.size, group=group),
        "all_to_all_single of too few splits": lambda ranks, group: dist.all_to_all_single(ones(6), ones(6), [6], [6], group=group),
        "all_to_all_single of two dtypes": lambda ranks, group: dist.all_to_all_single(ones(6, dtype=torch.int64), ones(6), group=group),
        "all_to_all of too few": lambda ranks, group: dist.all_to_all([ones(1)], [ones(1)], group=group),
        "barrier of a device": lambda ranks, group: dist.barrier(group=group, device_ids=0),
        "a premultiplied sum": lambda ranks, group: dist.all_reduce(ones(1), dist._make_nccl_premul_sum(2.0), group=group),
        "a sparse sum": lambda ranks, group: dist.all_reduce(ones(4).to_sparse(), group=group),
        "a sparse maximum": lambda ranks, group: dist.all_reduce(ones(4).to_sparse(), dist.ReduceOp.MAX, group=group),
        "a tensor without memory": lambda ranks, group: dist.all_reduce(torch.ones(2, device="meta"), group=group),
    }  # fmt: skip
    for name, function in wrong.items():
        yield name, lambda ranks, function=function: function(ranks, ranks.group)


# ---------------------------------------------------------------------- the tests


def attempt(call: Call, ranks: Ranks) -> tuple[Any, BaseException | None]:
    """(result, error)"""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return call(ranks), None
        except Exception as error:
            return None, error


def equal(one: Any, other: Any) -> bool:
    """Whether two results are the same, bit for bit."""
    if isinstance(one, Tensor):
        same = isinstance(other, Tensor) and one.dtype is other.dtype and one.shape == other.shape
        return same and flat_bytes(one).equal(flat_bytes(other))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return bool(one == other)


def flat_bytes(tensor: Tensor) -> Tensor:
    """The memory of a copy: a tensor of one element counts as contiguous with any stride."""
    return torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().reshape(-1)).view(torch.uint8)


def compare(name: str, seed: int) -> dict[str, list[str]]:
    """Run the calls of one case on both backends: which differ, and how."""
    evenstep.init(quiet=True)
    pair = new_pair()
    found: dict[str, list[str]] = {"more": [], "stricter": [], "different": []}
    for number, (label, call) in enumerate(CASES[name]()):
        if name == "mistakes" and number:  # Gloo may hang in the next call after one that it has refused
            end_pair(pair)
            pair = new_pair()
        own_seed = zlib.crc32(f"{label} {seed}".encode())
        (expected, refused), (got, error) = [
            attempt(call, Ranks(group, backend, own_seed)) for backend, group in pair.items()
        ]
        what = f"{name}: {label}"
        if refused is not None and error is None:
            found["more"].append(f"{what}: Gloo {type(refused).__name__}: {refused!s:.150}")
        elif refused is None and error is not None:
            found["stricter"].append(f"{what}: {error!r:.250}")
        elif refused is not None and not isinstance(error, type(refused)):
            found["different"].append(f"{what}: Gloo {refused!r:.200}, evenstep {error!r:.250}")
        elif refused is None and not equal(expected, got):
            found["different"].append(f"{what}: Gloo {expected}, evenstep {got}")
    end_pair(pair)
    return found


def new_pair() -> dict[str, Any]:
    """A group of all ranks on each backend."""
    pair = {backend: dist.new_group(backend=backend) for backend in ("gloo", "evenstep")}
    assert isinstance(pair["evenstep"]._shared, SharedMemoryTransport), pair["evenstep"].why_gloo
    return pair


def end_pair(pair: dict[str, Any]) -> None:
    """Destroy both groups."""
    dist.barrier()  # a rank that isn't in the last message may be needed to connect the others
    for group in pair.values():
        dist.destroy_process_group(group)


def test_every_name_has_a_case() -> None:
    known = COVERED | {name for names in NO_CALLS.values() for name in names.split()}
    unknown = sorted(public_names() - known)
    assert not unknown, (
        f"torch {torch.__version__} has {', '.join(unknown)}, which nobody has tried on the backend evenstep: add a case "
        f"to {__file__}, or a word to NO_CALLS."
    )


@pytest.mark.extended
@pytest.mark.parametrize("nproc", [2, 3])
@pytest.mark.parametrize("name", list(CASES))
def test_every_call_is_gloos(ranks: RankPool, name: str, nproc: int, fresh_seed: int) -> None:
    for found in ranks.run(compare, nproc, name, fresh_seed, timeout_s=170):
        more = [each for each in found["more"] if not any(reason in each for reason in MORE_THAN_GLOO)]
        stricter = [each for each in found["stricter"] if not each.startswith(STRICTER_THAN_GLOO)]
        told = [f"only evenstep: {each}" for each in more] + [f"refused: {each}" for each in stricter]
        assert not told + found["different"], "\n".join([*told, *found["different"]])
