"""Are the models the same on every rank? Asked once, when a model is wrapped, and answered on all ranks alike."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence

from torch import Tensor

from evenstep.errors import MismatchError
from evenstep.world import World

Description = tuple[str, str, str, bool]  # name, shape, dtype, requires_grad


def describe(tensors: Iterable[tuple[str, Tensor]]) -> list[Description]:
    """Every parameter or module buffer, in the order given."""
    return [(name, str(list(t.shape)), str(t.dtype).removeprefix("torch."), t.requires_grad) for name, t in tensors]


def validate_same_model(
    parameters: Iterable[tuple[str, Tensor]], buffers: Iterable[tuple[str, Tensor]], world: World
) -> None:
    """Collective: compare the named parameters and module buffers of all ranks, in registration order.

    Raises:
        MismatchError: Number, names, order, shapes, dtypes or what is trained differ. Raised on every rank, with the
            first difference.
    """
    mine = {"parameter": describe(parameters), "module buffer": describe(buffers)}
    digest = hashlib.sha256(json.dumps(mine).encode()).hexdigest()
    if len(set(world.exchange(digest))) == 1:
        return
    everybody = world.exchange({kind: [list(entry) for entry in entries] for kind, entries in mine.items()})
    findings = [check_same_model([list(map(_as_description, each[kind])) for each in everybody], kind) for kind in mine]
    finding = next((finding for finding in findings if finding is not None), None)
    assert finding is not None, "equal descriptions have equal digests"
    raise MismatchError(f"the ranks don't have the same model: {finding}")


def check_same_model(descriptions: Sequence[Sequence[Description]], kind: str = "parameter") -> str | None:
    """The first difference between rank 0 and another rank, in words; None if there is none. Pure."""
    first = descriptions[0]
    for rank, other in enumerate(descriptions[1:], start=1):
        for index, (a, b) in enumerate(zip(first, other, strict=False)):
            if a != b:
                return _difference(kind, index, a, b, rank, {entry[0] for entry in other})
        if len(first) != len(other):
            longer, holder = (first, 0) if len(first) > len(other) else (other, rank)
            extra = longer[min(len(first), len(other))]
            return (
                f"rank 0 has {len(first)} {kind}s, rank {rank} has {len(other)}; the first that only rank "
                f"{holder} has is {extra[0]!r} {extra[1]}."
            )
    return None


def _difference(kind: str, index: int, a: Description, b: Description, rank: int, names_there: set[str]) -> str:
    if a[0] != b[0]:
        why = "registered in another order" if a[0] in names_there else "named otherwise or missing"
        return f"{kind} {index} is {a[0]!r} on rank 0 but {b[0]!r} on rank {rank} ({why})."
    for what, position in (("shape", 1), ("dtype", 2), ("requires_grad", 3)):
        if a[position] != b[position]:
            return f"{kind} {a[0]!r} has {what} {a[position]} on rank 0 but {b[position]} on rank {rank}."
    raise AssertionError("descriptions that differ differ somewhere")


def _as_description(entry: Sequence[object]) -> Description:
    name, shape, dtype, requires_grad = entry
    return str(name), str(shape), str(dtype), bool(requires_grad)
