"""Batches as pytrees: moving their tensors, and cutting them to length 0.

A batch is a tensor, or a list, tuple, named tuple, mapping or dataclass of batches, or anything else (which is
passed through). An object with its own `to` method (`PackedSequence`, the batches of other libraries) moves itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from evenstep.errors import UsageError
from evenstep.ground.computing.pytrees import children_of


def move(batch: Any, device: torch.device, *, non_blocking: bool) -> Any:
    """The batch with its tensors on `device`; tensors already there aren't copied."""
    return _mapped(batch, lambda tensor: tensor.to(device, non_blocking=non_blocking), "to", device)


def pinned(batch: Any) -> Any:
    """The batch with its CPU tensors in pinned memory."""
    return _mapped(batch, lambda tensor: tensor.pin_memory() if tensor.device.type == "cpu" else tensor, "pin_memory")


def _mapped(batch: Any, change: Callable[[Tensor], Tensor], own: str, *arguments: Any) -> Any:
    """The batch with its tensors changed; an object that has a method named `own` is changed by that method."""
    if isinstance(batch, Tensor):
        return change(batch)
    if hasattr(batch, own) and not isinstance(batch, type):
        return getattr(batch, own)(*arguments)
    parts = children_of(batch)
    if parts is None:
        return batch
    children, rebuild = parts
    return rebuild([_mapped(child, change, own, *arguments) for child in children])


def used_on(batch: Any, stream: torch.cuda.Stream) -> None:
    """Record for the allocator that `stream` reads the batch's CUDA tensors."""
    if isinstance(batch, Tensor):
        if batch.device.type == "cuda":
            batch.record_stream(stream)
        return
    parts = children_of(batch)
    if parts is not None:
        for child in parts[0]:
            used_on(child, stream)
    elif hasattr(batch, "__dict__"):
        for child in vars(batch).values():
            used_on(child, stream)


def emptied(one: Any, two: Any, path: str = "the batch") -> Any:
    """A batch without samples, made by comparing a batch of one sample with a batch of two. Pure.

    Parts that grow with the number of samples become empty or zero, and the rest stays as it is:

        tensor          the first dimension whose size differs is cut to 0; dtype and the other sizes stay
        number          0 if it differs (a count of tokens, say)
        list, tuple     empty if the lengths differ (one entry per sample), else entry by entry

    Args:
        one: Result of `collate_fn` for one sample.
        two: Result of `collate_fn` for the same sample twice.
        path: The name of this part in error messages.

    Raises:
        UsageError: The batch holds an object that can't be taken apart.
    """
    if isinstance(one, Tensor) or hasattr(one, "shape"):
        if len(one.shape) != len(getattr(two, "shape", ())):
            shapes = [f"of shape {list(getattr(each, 'shape', []))}" for each in (one, two)]
            raise _unlike(path, *shapes)
        return _cut(one, two)
    if isinstance(one, list | tuple) and not isinstance(two, list | tuple):
        raise _unlike(path, f"a {type(one).__qualname__}", f"a {type(two).__qualname__}")
    if isinstance(one, list | tuple) and len(one) != len(two):
        return type(one)()
    # An object that moves itself may hold more than its entries (`PackedSequence`). A mapping doesn't (a tokenizer's
    # batch).
    is_whole = hasattr(one, "to") and not isinstance(one, Mapping)
    parts, others = (None, None) if is_whole else (children_of(one), children_of(two))
    if parts is not None and others is not None:
        children, rebuild = parts
        if len(children) != len(others[0]):
            raise _unlike(path, f"of {len(children)} entries", f"of {len(others[0])}")
        pairs = zip(children, others[0], strict=True)
        return rebuild([emptied(mine, other, f"{path}[{i}]") for i, (mine, other) in enumerate(pairs)])
    if isinstance(one, Number):
        return one if one == two else type(one)()
    if one is None or isinstance(one, str | bytes | torch.device | torch.dtype):
        return one
    raise UsageError(
        f"this rank has no sample in the last global batch, and {path} is a {type(one).__qualname__}, of which "
        f"evenstep can't make an empty one. Return tensors, lists, dictionaries or dataclasses from collate_fn, pass "
        f"drop_last=True, or choose a global_batch_size whose last batch has a sample for every rank."
    )


def _unlike(path: str, one: str, two: str) -> UsageError:
    return UsageError(
        f"this rank has no sample in the last global batch, and what collate_fn makes can't be emptied: {path} is "
        f"{one} for one sample and {two} for two. Make collate_fn return the same form for any number of samples (no "
        f"squeeze of the batch dimension), or pass drop_last=True."
    )


def _cut(one: Any, two: Any) -> Any:
    """`one` (a tensor, or an array of another library) without its samples."""
    for dimension, (size, other) in enumerate(zip(one.shape, two.shape, strict=True)):
        if size != other:
            return one[(slice(None),) * dimension + (slice(0, 0),)]
    if len(one.shape) == 0 and bool(one != two):
        return one * 0
    return one
