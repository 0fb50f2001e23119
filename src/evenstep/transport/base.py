"""What a call is: plain data, which every transport takes (`core.transport.Transport`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

# "mean" is of all numbers but unsigned ones of more than 8 bits, and that of integers is rounded towards zero, as NCCL
# does; "max" and "min" are of ordered ones, the last three of integers and bool. Of bool, "sum" and "max" are "or",
# "product" and "min" are "and".
Op = Literal["sum", "max", "min", "mean", "product", "band", "bor", "bxor"]


@dataclass(frozen=True)
class Arithmetic:
    """How values of one dtype are combined by one op.

    Attributes:
        function: Combines two tensors; takes `out`.
        dtype: Of the tensors.
        carrier: The dtype as which tensors are viewed.
        accumulator: The dtype to compute in, where it isn't the carrier.
        flip: XORed before and after, so that signed comparison orders unsigned numbers.
    """

    function: Callable[..., Any]
    dtype: torch.dtype
    carrier: torch.dtype
    accumulator: torch.dtype | None = None
    flip: int | None = None

    @functools.cached_property
    def is_direct(self) -> bool:
        """Whether values can be combined without conversion."""
        return self.accumulator is None and self.flip is None

    @functools.cached_property
    def is_unconverted(self) -> bool:
        """Whether the function combines two tensors as they are."""
        return self.is_direct and self.carrier is self.dtype

    @functools.cached_property
    def itemsize(self) -> int:
        """Bytes of an element as it is combined."""
        return (self.accumulator or self.carrier).itemsize


class Row(NamedTuple):
    """What one rank adds to the divisor of a sum of gradients. A rank without samples, or one that has left: zeros.

    Attributes:
        weight: The sum of its window's weights.
        is_weighted: 1 if its window is weighted.
        is_plain: 1 if its window is plain.
    """

    weight: float = 0.0
    is_weighted: float = 0.0
    is_plain: float = 0.0


@dataclass(eq=False, slots=True)
class Collective:
    """One call, as a rank makes it.

    Attributes:
        kind: Its name, one of `header.COLLECTIVES`.
        inputs: What this rank gives, in order of rank where it has a part for each; None where it gives nothing.
        outputs: What it gets, in order of rank where it gets a part from each; the inputs themselves: in place; None
            where it gets nothing.
        op: How values are combined; None where they aren't.
        root: The rank that gives or gets what no other does; -1 where there is none.
        splits: Of an all_to_all: how many elements of `outputs` come from, and of `inputs` go to each rank; None, on
            all ranks: equal parts.
        beside: [n], a few numbers that are added over the ranks in the same call, in place; on all ranks or none.
        row: Of a sum of real or complex floats: this rank's part of the divisor, on all ranks or none. The result is
            the sum over `core.reduction.divisor_of` of all rows where the transport `divides`, else the sum.
        plain: The divisor where no row is weighted, the same on all ranks.
        packed: The fingerprint that ranks compare. This and what follows is filled in as the call is checked.
        flat: [numel], contiguous: the inputs; what only counts by its length where this rank gives nothing.
        out: [numel], contiguous: the outputs; `flat` where they are one, or where this rank gets nothing.
        back: (to, from): what is copied in the end, where the caller's outputs aren't contiguous.
        arithmetic: How values are combined; None where they aren't.
        divisor: What divides the result, as far as it is known before the call; None: nothing does.
    """

    kind: str
    inputs: Tensor | None
    outputs: Tensor | None
    op: Op | None = None
    root: int = -1
    splits: tuple[Sequence[int], Sequence[int]] | None = None
    beside: Tensor | None = None
    row: Row | None = None
    plain: float = 0.0
    packed: bytes = b""
    flat: Tensor = None  # type: ignore[assignment]
    out: Tensor = None  # type: ignore[assignment]
    back: tuple[Tensor, Tensor] | None = None
    arithmetic: Arithmetic | None = None
    divisor: float | None = None

    def copy_back(self) -> None:
        """Copy the result to the caller's outputs, where these aren't contiguous."""
        if self.back is not None:
            self.back[0].copy_(self.back[1])


class Work(Protocol):
    """The handle of a collective in flight."""

    def wait(self) -> None:
        """Return when the result may be used: on CPU by all threads, on CUDA by work queued later on this stream.

        Raises:
            PeerLostError: A peer died; the transport can no longer be used.
            CollectiveTimeoutError: A peer did not arrive before the deadline; the transport can no longer be used.
        """

    def is_completed(self) -> bool:
        """Whether `wait` would return or raise at once. Never blocks."""
