"""What this torch calls the methods of a process group. See [Note: two generations of names] in `group_calls`."""

from __future__ import annotations

from torch._C._distributed_c10d import ProcessGroup

from evenstep.transport.header import OVER_GLOO


def _first_name(*names: str) -> str:
    return next(name for name in names if hasattr(ProcessGroup, name))


ALL_GATHER_SINGLE = _first_name("all_gather_single", "_allgather_base")
ALL_GATHER_COALESCED = _first_name("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
REDUCE_SCATTER_SINGLE = _first_name("reduce_scatter_single", "_reduce_scatter_base")
REDUCE_SCATTER_COALESCED = _first_name("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
ALL_TO_ALL_SINGLE = _first_name("all_to_all_single", "alltoall_base")

# What ranks compare of a method that Gloo carries. A message between two ranks isn't the others' business.
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
