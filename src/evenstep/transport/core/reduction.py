"""Combines the ranks' vectors: plans which rank computes which part, in which order and precision.

The order is a fixed binary tree over ranks, so the result has the same bits on every rank and in every run:

    rank   0   1   2   3   4
            \\ /     \\ /    |
             +       +     |
              \\_____/      |
                 +________/
                 +
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from evenstep.errors import ConfigurationError
from evenstep.ground.compat.torch_autograd import outside_inference_mode
from evenstep.transport.base import Arithmetic, Op, Row
from evenstep.transport.core.nonfinite_monitor import SumMonitor, check_sum

# A block of every rank's vector and of the result fit into a core's cache together, so that memory read for the sum is
# still cached when the sum is written back.
_BLOCK_BYTES = 512 << 10
_ALIGN_BYTES = 64

HALF = (torch.float16, torch.bfloat16)
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_FUNCTIONS: dict[Op, Callable[..., Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
_BOOL_OPS: dict[Op, Op] = {"sum": "bor", "max": "bor", "product": "band", "min": "band"}


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`. Pure."""
    return -(-value // multiple) * multiple


def padded(flat: Tensor, num_parts: int) -> Tensor:
    """A vector that can be divided into equal parts: the given vector, or a longer copy."""
    short = -flat.numel() % num_parts
    return torch.cat([flat, flat.new_zeros(short)]) if short else flat


def copy_unpadded(flat: Tensor, whole: Tensor) -> None:
    """The inverse of `padded`: copy the beginning of the longer vector back, if it is a copy."""
    if whole is not flat:
        flat.copy_(whole[: flat.numel()])


@functools.lru_cache(maxsize=1024)
def plan_slices(numel: int, num_slices: int, itemsize: int) -> tuple[tuple[int, int], ...]:
    """Plan which elements each rank reduces: (begin, end) in order of rank, covering each element once. Pure.

    Slices begin at multiples of a cache line, so that no two ranks write to the same line. The last slices may be
    empty.
    """
    align = max(1, _ALIGN_BYTES // itemsize)
    length = round_up(round_up(numel, num_slices) // num_slices, align)
    return tuple((min(numel, i * length), min(numel, (i + 1) * length)) for i in range(num_slices))


@functools.cache
def plan_tree(num_ranks: int) -> tuple[tuple[int, int], ...]:
    """The additions in order: (a, b) means that b is added to a. The result is at index 0. Pure."""
    steps = []
    distance = 1
    while distance < num_ranks:
        steps += [(a, a + distance) for a in range(0, num_ranks - distance, 2 * distance)]
        distance *= 2
    return tuple(steps)


@functools.cache
def plan_arithmetic(op: Op, dtype: torch.dtype) -> Arithmetic:
    """Plan how values of a dtype are combined. Pure.

    Raises:
        ConfigurationError: There is no such op, or it has no meaning for the dtype.
    """
    if op not in _FUNCTIONS:
        raise ConfigurationError(f"all_reduce: op={op!r}; there are {', '.join(_FUNCTIONS)}.")
    is_float = dtype.is_floating_point or dtype.is_complex
    problem = None
    if dtype.is_floating_point and dtype.itemsize == 1:
        problem = "8-bit floats have no arithmetic; convert them first"
    elif dtype.is_complex and op in ("max", "min"):
        problem = "complex numbers have no order"
    elif is_float and op in ("band", "bor", "bxor"):
        problem = "bitwise operations are for integers and bool"
    elif dtype is torch.bool and op == "mean":
        problem = "it is neither true nor false; use a float tensor"
    elif dtype in _SIGNED and op == "mean":
        problem = f"torch divides no {str(dtype)[6:]}; use another dtype"
    if problem is not None:
        raise ConfigurationError(f"all_reduce: op={op!r} of a {str(dtype)[6:]} tensor: {problem}.")
    if dtype is torch.bool:
        return Arithmetic(_FUNCTIONS[_BOOL_OPS.get(op, op)], dtype, dtype)
    if dtype in HALF and op in ("sum", "mean", "product"):
        return Arithmetic(_FUNCTIONS[op], dtype, dtype, accumulator=torch.float32)
    if dtype.is_complex and dtype.itemsize == 4:  # complex32, and from torch 2.15 on bcomplex32
        return Arithmetic(_FUNCTIONS[op], dtype, dtype, accumulator=torch.complex64)
    if dtype in _SIGNED:
        carrier = _SIGNED[dtype]
        flip = torch.iinfo(carrier).min if op in ("max", "min") else None
        return Arithmetic(_FUNCTIONS[op], dtype, carrier, flip=flip)
    return Arithmetic(_FUNCTIONS[op], dtype, dtype)


def reduce_into(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    arithmetic: Arithmetic,
    scratch: Scratch,
    monitor: SumMonitor | None = None,
    begin: int = 0,
    divisor: float | None = None,
) -> None:
    """Combine `inputs` and write the result to all `outputs`.

    Args:
        outputs: At least one, [n]; may be the inputs themselves, but not overlap them in part.
        inputs: One per rank, in order of rank, [n].
        arithmetic: How to combine values; planned for the tensors' dtype.
        scratch: Memory to compute in.
        monitor: Checks the result after it is written to the first output, and before it is written to others.
        begin: Number of the first element, for `monitor`.
        divisor: Divides the result before it is rounded to the tensors' dtype; None: it isn't divided.
    """
    numel = inputs[0].numel()
    block = _BLOCK_BYTES // arithmetic.itemsize
    if len(inputs) == 2 and 0 < numel <= block and arithmetic.is_unconverted:
        # A fast path for the most frequent case. The code below gives the same result, but takes longer.
        arithmetic.function(inputs[0], inputs[1], out=outputs[0])
        _store(outputs[0], outputs[1:], inputs, monitor, begin, divisor)
        return
    if arithmetic.carrier is not arithmetic.dtype:
        outputs = [each.view(arithmetic.carrier) for each in outputs]
        inputs = [each.view(arithmetic.carrier) for each in inputs]
    # A single sum of two 16-bit numbers is rounded once in any case: torch computes it in 32 bits.
    is_half_sum = arithmetic.function is torch.add and arithmetic.carrier in HALF and divisor is None
    combine = _combine_direct if arithmetic.is_direct or (is_half_sum and len(inputs) == 2) else _combine_converted
    for first in range(0, numel, block):
        end = min(numel, first + block)
        into, given = [each[first:end] for each in outputs], [each[first:end] for each in inputs]
        total = combine(into[0], given, arithmetic, scratch)
        _store(total, [each for each in into if each is not total], given, monitor, begin + first, divisor)


def _store(
    total: Tensor,
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    monitor: SumMonitor | None,
    begin: int,
    divisor: float | None,
) -> None:
    """Divide and check the combined values, and write them to `outputs`."""
    if divisor is not None:
        divide(total, divisor)
    if monitor is not None:
        check_sum(monitor, begin, total, inputs)
    for output in outputs:
        output.copy_(total)


def divide(total: Tensor, divisor: float) -> None:
    """Divide a sum over ranks, in place. A quotient of integers is rounded towards zero, as in NCCL."""
    if total.dtype.is_floating_point or total.dtype.is_complex:
        total.div_(divisor)
    else:
        # In 64 bits: the number of ranks may not fit the tensor's dtype.
        total.copy_(total.to(torch.int64).div_(divisor, rounding_mode="trunc"))


_is_weighted = operator.attrgetter("is_weighted")  # a generator would need a frame for each rank and step


def divisor_of(rows: Sequence[Row], plain: float) -> float:
    """The divisor of a sum of gradients. Pure, and the same on all ranks.

    Args:
        rows: All ranks' rows, in order of rank; or a single row, their sum.
        plain: The divisor if no rank's window is weighted.

    Returns:
        If some rank's window is weighted, the sum of weights, or infinity if that sum is 0; else `plain`.
    """
    if not any(map(_is_weighted, rows)):
        return plain
    weights = [row.weight for row in rows]
    for a, b in plan_tree(len(weights)):  # tree order: reproducible mode has the same sum on any number of ranks
        weights[a] += weights[b]
    return weights[0] or math.inf


class Scratch:
    """Memory for partial results, reused for every block so that it stays in the cache."""

    def __init__(self) -> None:
        self._memory: dict[tuple[torch.dtype, int], Tensor] = {}

    def get(self, dtype: torch.dtype, index: int, numel: int) -> Tensor:
        """Uninitialised memory number `index`: [numel]."""
        key = (dtype, index)
        memory = self._memory.get(key)
        if memory is None or memory.numel() < numel:
            with outside_inference_mode():  # later calls outside of inference mode reuse the memory
                memory = self._memory[key] = torch.empty(numel, dtype=dtype, device="cpu")
        return memory if memory.numel() == numel else memory[:numel]


def _combine_direct(result: Tensor, inputs: Sequence[Tensor], arithmetic: Arithmetic, scratch: Scratch) -> Tensor:
    numel = inputs[0].numel()
    steps = plan_tree(len(inputs))
    if not steps:
        result.copy_(inputs[0])
    # Inputs are never overwritten before they have been read: partial results go to scratch, the last result to the
    # output.
    partial = list(inputs)
    for position, (a, b) in enumerate(steps):
        is_last = position == len(steps) - 1
        out = result if is_last else scratch.get(arithmetic.carrier, a, numel)
        arithmetic.function(partial[a], partial[b], out=out)
        partial[a] = out
    return result


def _combine_converted(_: Tensor, inputs: Sequence[Tensor], arithmetic: Arithmetic, scratch: Scratch) -> Tensor:
    num_ranks, numel = len(inputs), inputs[0].numel()
    dtype = arithmetic.accumulator or arithmetic.carrier
    loaded = [scratch.get(dtype, rank, numel) for rank in range(num_ranks)]
    for into, each in zip(loaded, inputs, strict=True):
        into.copy_(each)
        if arithmetic.flip is not None:
            into.bitwise_xor_(arithmetic.flip)
    for a, b in plan_tree(num_ranks):
        arithmetic.function(loaded[a], loaded[b], out=loaded[a])
    if arithmetic.flip is not None:  # only for "max" and "min", which are never divided
        loaded[0].bitwise_xor_(arithmetic.flip)
    return loaded[0]
