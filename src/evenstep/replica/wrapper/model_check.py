"""Checks of a model that is wrapped: whether it is the same on every rank, and suits reproducible mode."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from evenstep.errors import ConfigurationError, MismatchError
from evenstep.replica.normalization.sync_batchnorm import SyncBatchNorm
from evenstep.replica.wrapper.settings import Settings

Description = tuple[str, str, str, bool]  # name, shape, dtype, requires_grad


def describe(tensors: Iterable[tuple[str, Tensor]]) -> list[Description]:
    """Describe every parameter or module buffer, in the given order."""
    return [(name, str(list(t.shape)), str(t.dtype).removeprefix("torch."), t.requires_grad) for name, t in tensors]


def validate_same_model(
    parameters: Iterable[tuple[str, Tensor]],
    buffers: Iterable[tuple[str, Tensor]],
    exchange: Callable[[Any], list[Any]],
) -> None:
    """Collective: compare the named parameters and module buffers of all ranks, in registration order.

    Args:
        parameters: This rank's parameters, by name.
        buffers: This rank's module buffers, by name.
        exchange: Gathers a value from all ranks.

    Raises:
        MismatchError: Number, names, order, shapes, dtypes or `requires_grad` differ. Raised on every rank, with the
            first difference.
    """
    mine = {"parameter": describe(parameters), "module buffer": describe(buffers)}
    digest = hashlib.sha256(json.dumps(mine).encode()).hexdigest()
    if len(set(exchange(digest))) == 1:
        return
    everybody = exchange(mine)
    findings = [check_same_model([each[kind] for each in everybody], kind) for kind in mine]
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


def validate_for_virtual_ranks(
    module: nn.Module, settings: Settings, *, is_of_group: bool, virtual_ranks_per_rank: int
) -> None:
    """Refuse a model whose bits would depend on the number of ranks in reproducible mode.

    Args:
        module: The model.
        settings: The wrapper's settings.
        is_of_group: Whether the model is wrapped for only some of the ranks.
        virtual_ranks_per_rank: Number of virtual ranks that a rank computes one after the other.

    Raises:
        ConfigurationError: The bits would depend on the number of ranks; the message names the cause and the remedy.
    """
    where = "reproducible mode"
    if is_of_group:
        raise ConfigurationError(
            f"{where} divides virtual ranks over all ranks: leave process_group and device_mesh out."
        )
    for name, layer in module.named_modules():
        if isinstance(layer, SyncBatchNorm | nn.SyncBatchNorm) and virtual_ranks_per_rank > 1:
            raise ConfigurationError(
                f"{where}: {name!r} is a SyncBatchNorm, which needs the rows of all virtual ranks at once, and a rank "
                f"computes "
                f"its {virtual_ranks_per_rank} virtual ranks one after the other. Start as many ranks as virtual "
                f"ranks, or use BatchNorm, "
                f"which then normalises each virtual rank by itself, or GroupNorm or LayerNorm."
            )
    for name, parameter in settings.trained(module):
        if parameter.dtype.itemsize < 4:
            raise ConfigurationError(
                f"{where}: parameter {name!r} is {str(parameter.dtype)[6:]}, whose sums would be rounded differently "
                f"on another number of ranks. Keep parameters in float32 and compute in low precision with "
                f"torch.autocast."
            )
        if settings.policy.reduce_dtype not in (None, parameter.dtype):
            raise ConfigurationError(
                f"{where}: reduce_dtype={settings.policy.reduce_dtype} with parameter {name!r} in "
                f"{str(parameter.dtype)[6:]}. Sums inside a rank and between ranks have one dtype there: leave it out."
            )
        if name in settings.sparse:
            raise ConfigurationError(
                f"{where}: parameter {name!r} has sparse gradients, which aren't added virtual rank by virtual rank. "
                f"Build the "
                f"embedding with sparse=False."
            )
    if settings.buffer_rules:
        raise ConfigurationError(f"{where}: buffers= would add over ranks, and not over virtual ranks. Leave it out.")
    if not settings.sync_buffers and any(True for _ in settings.kept_buffers(module)):
        raise ConfigurationError(
            f"{where}: with broadcast_buffers=False every rank has module buffers of its own. Leave it out."
        )
