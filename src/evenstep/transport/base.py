"""A call as plain data, which every transport accepts (`core.transport.Transport`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

# "mean" accepts all numbers except unsigned integers of more than 8 bits; a mean of integers is rounded towards zero,
# as in NCCL. "max" and "min" need ordered numbers. The last three are for integers and bool. For bool, "sum" and "max"
# are "or", "product" and "min" are "and".
Op = Literal["sum", "max", "min", "mean", "product", "band", "bor", "bxor"]


@dataclass(frozen=True)
class Arithmetic:
    """How values of one dtype are combined by one op.

    Attributes:
        function: Combines two tensors; takes `out`.
        dtype: The tensors' dtype.
        carrier: The dtype as which tensors are viewed.
        accumulator: The dtype to compute in, if it isn't the carrier.
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
        """Bytes of an element during the combination."""
        return (self.accumulator or self.carrier).itemsize


class Row(NamedTuple):
    """A rank's summand of the divisor of a sum of gradients. Zeros for a rank without samples, or a rank that has left.

    Attributes:
        weight: The sum of the weights in the rank's window.
        is_weighted: 1 if the rank's window is weighted.
        is_plain: 1 if the rank's window is plain.
    """

    weight: float = 0.0
    is_weighted: float = 0.0
    is_plain: float = 0.0


@dataclass(eq=False, slots=True)
class Collective:
    """One call of a rank.

    Attributes:
        kind: The collective's name, one of `header.COLLECTIVES`.
        inputs: This rank's input tensors, in order of rank if it has a part for each; None if it has no input.
        outputs: This rank's output tensors, in order of rank if it gets a part from each; the inputs themselves if the
            call is in place; None if it has no output.
        op: How values are combined; None if they aren't.
        root: The only rank whose input is used, or that gets the output; -1 if there is none.
        splits: For an all_to_all: the numbers of elements of `outputs` from each rank, and of `inputs` to each rank;
            None, on all ranks: equal parts.
        beside: [n], a few numbers that are added over the ranks in the same call, in place; on all ranks or none.
        row: For a sum of real or complex floats: this rank's row for the divisor, on all ranks or none. If the
            transport `divides`, the result is the sum divided by `core.reduction.divisor_of` all rows; else it is the
            sum.
        plain: The divisor if no row is weighted, the same on all ranks.
        packed: The fingerprint that ranks compare. This and the following attributes are filled in as the call is
            checked.
        flat: [numel], contiguous: the inputs. If this rank has no input, only the length matters.
        out: [numel], contiguous: the outputs; `flat` if they are the same tensor, or if this rank has no output.
        back: (to, from): a copy to make at the end if the caller's outputs aren't contiguous.
        arithmetic: How values are combined; None if they aren't.
        divisor: The divisor of the result, if it is known before the call; else None.
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
        """Copy the result to the caller's outputs if these aren't contiguous."""
        if self.back is not None:
            self.back[0].copy_(self.back[1])


class Work(Protocol):
    """The handle of a collective in flight."""

    def wait(self) -> None:
        """Wait until the result may be used: on the CPU by all threads, on CUDA by work queued later on this stream.

        Raises:
            PeerLostError: A peer died; the transport can no longer be used.
            CollectiveTimeoutError: A peer did not arrive before the deadline; the transport can no longer be used.
        """

    def is_completed(self) -> bool:
        """Whether `wait` would return or raise at once. Never blocks."""
