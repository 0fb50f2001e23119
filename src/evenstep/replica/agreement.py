"""Are the models the same on every rank? Asked once, when a model is wrapped, and answered on all ranks alike."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence

from torch import nn

from evenstep.errors import MismatchError
from evenstep.world import World

Description = tuple[str, str, str, bool]  # name, shape, dtype, requires_grad


def describe(parameters: Iterable[tuple[str, nn.Parameter]]) -> list[Description]:
    """Every parameter, in the order given."""
    return [(name, str(list(p.shape)), str(p.dtype).removeprefix("torch."), p.requires_grad) for name, p in parameters]


def validate_same_model(parameters: Iterable[tuple[str, nn.Parameter]], world: World) -> None:
    """Collective: compare the named parameters of all ranks, in registration order.

    Raises:
        MismatchError: Number, names, order, shapes, dtypes or what is trained differ. Raised on every rank, with the
            first difference.
    """
    mine = describe(parameters)
    digest = hashlib.sha256(json.dumps(mine).encode()).hexdigest()
    if len(set(world.exchange(digest))) == 1:
        return
    everybody = world.exchange([list(entry) for entry in mine])
    finding = check_same_model([[_as_description(entry) for entry in theirs] for theirs in everybody])
    assert finding is not None, "equal descriptions have equal digests"
    raise MismatchError(f"the ranks don't have the same model: {finding}")


def check_same_model(descriptions: Sequence[Sequence[Description]]) -> str | None:
    """The first difference between rank 0 and another rank, in words; None if there is none. Pure."""
    first = descriptions[0]
    for rank, other in enumerate(descriptions[1:], start=1):
        for index, (a, b) in enumerate(zip(first, other, strict=False)):
            if a != b:
                return _difference(index, a, b, rank, {entry[0] for entry in other})
        if len(first) != len(other):
            longer, holder = (first, 0) if len(first) > len(other) else (other, rank)
            extra = longer[min(len(first), len(other))]
            return (
                f"rank 0 has {len(first)} parameters, rank {rank} has {len(other)}; the first that only rank "
                f"{holder} has is {extra[0]!r} {extra[1]}."
            )
    return None


def _difference(index: int, a: Description, b: Description, rank: int, names_there: set[str]) -> str:
    if a[0] != b[0]:
        why = "registered in another order" if a[0] in names_there else "named otherwise or missing"
        return f"parameter {index} is {a[0]!r} on rank 0 but {b[0]!r} on rank {rank} ({why})."
    for what, position in (("shape", 1), ("dtype", 2), ("requires_grad", 3)):
        if a[position] != b[position]:
            return f"parameter {a[0]!r} has {what} {a[position]} on rank 0 but {b[position]} on rank {rank}."
    raise AssertionError("descriptions that differ differ somewhere")


def _as_description(entry: Sequence[object]) -> Description:
    name, shape, dtype, requires_grad = entry
    return str(name), str(shape), str(dtype), bool(requires_grad)
