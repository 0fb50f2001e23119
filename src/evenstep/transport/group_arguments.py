"""What torch hands to a process group's methods: options or plain arguments, tensors in lists or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, ReduceOp, ReduceOptions, ReduceScatterOptions

from evenstep.transport.arguments import Arguments
from evenstep.transport.base import Op

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
    """How to combine; None: not over shared memory."""
    if op is None and isinstance(opts, _OPTIONS):
        return _OPS.get(getattr(opts.reduceOp, "op", None))
    given = op if op is not None else getattr(opts, "reduceOp", opts if not hasattr(opts, "timeout") else None)
    if given is None or isinstance(given, int):  # nothing, or a root
        given = ReduceOp.SUM
    return _OPS.get(getattr(given, "op", given))


def root_of(opts: Any, root: Any) -> int:
    """The rank that gives or gets what no other does."""
    given = root if root is not None else getattr(opts, "rootRank", opts)
    return int(given or 0)


def unless_none(*values: Any) -> list[Any]:
    """What was given."""
    return [value for value in values if value is not None]


def joined_input(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor with the elements of all."""
    return torch.cat([each.detach().reshape(-1) for each in tensors])


def joined_outputs(
    what: str, outputs: Sequence[Tensor], arguments: Arguments
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """One tensor for all outputs, and what has to be copied in the end; refused where there is no place for that."""
    for out in outputs:
        if not out.is_contiguous():
            arguments.check_written(what, out)
    joined = torch.empty(sum(each.numel() for each in outputs), dtype=outputs[0].dtype, device="cpu")
    parts = torch.split(joined, [each.numel() for each in outputs])
    return joined, [(out.detach(), part.view(out.shape)) for out, part in zip(outputs, parts, strict=True)]
