"""What is summed and by what it is divided: the bookkeeping of one accumulation window.

A window begins with the first backward pass after a reduction and ends with the next reduction. Within it, either
every pass is PLAIN (`loss.backward()`: summed over micro-batches, averaged over ranks) or every pass is WEIGHTED
(`model.backward`: the sum of weight * gradient over micro-batches and ranks, divided once by the sum of weights).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from evenstep.errors import ConfigurationError, UsageError
from evenstep.replica import options as compared
from evenstep.replica.drift import NOTHING, NUM_TOLD


class Kind(Enum):
    """Which of the two meanings a backward pass has."""

    PLAIN = auto()
    WEIGHTED = auto()


_CALLS = {Kind.PLAIN: "loss.backward()", Kind.WEIGHTED: "model.backward(loss, ...)"}


class Window:
    """The passes since the last reduction, on this rank.

    Attributes:
        kind: What the passes meant; None before the first, and for a rank whose share was empty.
        weight: Sum of the weights so far; a 0-dim tensor as soon as one of them was.
        weight_held: That of the gradients in `p.grad`; the same, but for lanes, of which these hold the last alone.
        is_scaled: The loss of a pass was scaled by a GradScaler, so gradients may overflow.
        has_leftovers: There is no pass, and `p.grad` has what an earlier reduction left.
    """

    def __init__(self) -> None:
        self.kind: Kind | None = None
        self.weight: float | Tensor = 0.0
        self.weight_held: float | Tensor = 0.0
        self.is_scaled = self.has_leftovers = False

    def add(self, kind: Kind, weight: float | Tensor, *, is_scaled: bool = False) -> None:
        """Count one more backward pass.

        Raises:
            UsageError: The window has passes of the other kind.
        """
        if self.kind is not None and self.kind is not kind:
            raise UsageError(
                f"{_CALLS[kind]} after {_CALLS[self.kind]} in the same accumulation window: the one divides by the "
                f"number of ranks, the other by the sum of the weights. Use one of them until the optimizer's step."
            )
        self.kind = kind
        self.weight = self.weight_held = self.weight + weight
        self.is_scaled |= is_scaled


def validate_weight(weight: float | Tensor, *, rank: int) -> float | Tensor:
    """A weight as the engine uses it: a float where that is free, else the 0-dim tensor on its device.

    Raises:
        ConfigurationError: Negative, infinite, NaN, or no single number.
    """
    if isinstance(weight, Tensor):
        if weight.numel() != 1 or weight.is_complex():
            raise ConfigurationError(
                f"backward on rank {rank}: weight is a {str(weight.dtype)[6:]} tensor of shape {list(weight.shape)}; "
                f"it is one number, such as mask.sum()."
            )
        if weight.device.type != "cpu":
            return weight.detach().reshape(())  # reading it would wait for the device
        weight = weight.item()
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        try:
            weight = float("none" if isinstance(weight, str) else weight)  # numpy's scalars and the like
        except (TypeError, ValueError):
            raise ConfigurationError(
                f"backward on rank {rank}: weight={weight!r} is no number. Pass the number of samples or tokens that "
                f"the loss was averaged over."
            ) from None
    if not (weight >= 0 and math.isfinite(weight)):
        raise ConfigurationError(
            f"backward on rank {rank}: weight={weight!r}; a weight is finite and at least 0: the number of samples "
            f"or tokens that the loss was averaged over."
        )
    return float(weight)


class Header:
    """The few numbers that travel with the buckets of one reduction, added over ranks.

    [0]   sum of the weights, each over the unit in which its rank's gradients are
    [1]   number of ranks whose window was WEIGHTED
    [2]   number of ranks whose window was PLAIN
    [3:]  for each parameter, on how many ranks it has a gradient; then what `drift` tells of parameters themselves,
          what `options` tells of optimizers, and the number of ranks that have found something in the sums of the
          window before
    """

    def __init__(self, num_parameters: int, device: torch.device) -> None:
        self._behind = 3 + num_parameters
        self._options = self._behind + NUM_TOLD
        numel = self._options + compared.NUM_NUMBERS + 1
        self.tensor = torch.zeros(numel, dtype=torch.float64, device=device)
        # The same memory as numbers: to read or write an element of a tensor takes microseconds, and there are many. So
        # `tensor` is never replaced by another one.
        self._numbers: Any = None
        if device.type == "cpu":
            self._numbers = (ctypes.c_double * numel).from_address(self.tensor.data_ptr())
        self._flags: list[bool] = []  # as in `_filled`
        self._filled: Any = None

    def fill(
        self,
        window: Window,
        used: list[bool],
        told: Sequence[float] | Tensor = NOTHING,
        found: bool = False,
        *,
        options: Sequence[float] = compared.NOTHING,
        unit: float = 1.0,
    ) -> None:
        """Write this rank's numbers.

        Args:
            window: The window that ends.
            used: For each parameter, whether it has a gradient.
            told: [NUM_TOLD], see `drift`.
            found: See `nonfinite.SumWatch`.
            options: [4], see `options`.
            unit: What weights were divided by before they multiplied this rank's gradients.
        """
        kinds = [float(window.kind is Kind.WEIGHTED), float(window.kind is Kind.PLAIN)]
        behind = [*(NOTHING if isinstance(told, Tensor) else told), *options, float(found)]
        if self._numbers is not None:
            numbers = self._numbers
            if used != self._flags or self._filled is None:
                self._flags, self._filled = used, (ctypes.c_double * len(numbers))(0.0, 0.0, 0.0, *used)
            ctypes.memmove(numbers, self._filled, ctypes.sizeof(numbers))
            numbers[0], numbers[1:3] = float(window.weight) / unit, kinds
            numbers[self._behind :] = behind
        else:
            # Not `tensor[0] = number`: that waits for a GPU.
            weight = window.weight / unit
            number = 0.0 if isinstance(weight, Tensor) else weight
            made = torch.tensor([number, *kinds, *map(float, used), *behind], dtype=torch.float64, device="cpu")
            self.tensor.copy_(made, non_blocking=True)
            if isinstance(weight, Tensor):
                self.tensor[0] = weight
        if isinstance(told, Tensor):
            self.tensor[self._behind : self._options] = told

    def kinds(self) -> tuple[int, int]:
        """After the sum: how many ranks' windows were WEIGHTED, and PLAIN.

        Reads the tensor, so on CUDA it waits for the device.

        Raises:
            UsageError: Some ranks called loss.backward(), others model.backward(). Raised on every rank.
        """
        num_weighted, num_plain = map(int, self._read(1, 3))
        if num_weighted and num_plain:
            raise UsageError(
                f"{num_plain} ranks called {_CALLS[Kind.PLAIN]} and {num_weighted} called {_CALLS[Kind.WEIGHTED]} in "
                f"the same step. All ranks use one of them."
            )
        return num_weighted, num_plain

    def used_anywhere(self) -> list[bool]:
        """After the sum: for each parameter, whether any rank has a gradient. Reads the tensor."""
        return [count > 0 for count in self._read(3, self._behind)]

    def told(self) -> Tensor:
        """After the sum: [NUM_TOLD], see `drift`. A view."""
        return self.tensor[self._behind : self._options]

    def options(self) -> Sequence[float] | Tensor:
        """After the sum: [4], see `options`. On a GPU a view."""
        numbers: Sequence[float] | None = None if self._numbers is None else self._numbers[self._options : -1]
        return self.tensor[self._options : -1] if numbers is None else numbers

    def any_found(self) -> bool:
        """After the sum: whether a rank has found something. Reads the tensor."""
        return self._read(len(self.tensor) - 1, len(self.tensor))[0] > 0.0

    def _read(self, begin: int, end: int) -> list[float]:
        numbers: list[float] = self.tensor[begin:end].tolist() if self._numbers is None else self._numbers[begin:end]
        return numbers

    def num_plain(self) -> Tensor:
        """After the sum: on how many ranks the window was PLAIN. 0-dim, on the device, without waiting for it."""
        return self.tensor[2]

    def divisor(self) -> Tensor:
        """After the sum: the total weight in units; infinite where there was no weight, so that gradients become 0.

        0-dim, on the device, without waiting for it.
        """
        total = self.tensor[0]
        return torch.where(total > 0, total, torch.inf)


def divide_by_weight(parameters: Iterable[Tensor], window: Window, scale: float) -> None:
    """Divide the gradients of one rank by its window's weight; of PLAIN passes they are what they are.

    Args:
        parameters: Whose gradients.
        window: With the weight.
        scale: What the weights were divided by already.
    """
    if window.kind is not Kind.WEIGHTED:
        return
    divisor = window.weight / scale
    if isinstance(divisor, float) and divisor == 1.0:
        return
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if isinstance(divisor, Tensor):
        zero_where(divisor == 0, grads)
        divisor = torch.where(divisor > 0, divisor, torch.inf)
    elif divisor == 0.0:
        divisor = float("inf")
    for grad in grads:
        grad.div_(divisor)


def drop_grads(parameters: Iterable[Tensor]) -> None:
    """Forget the gradients of some parameters."""
    for parameter in parameters:
        parameter.grad = None


def zero_where(condition: Tensor, grads: Iterable[Tensor]) -> None:
    """Make gradients zero where a condition holds that isn't read, on whichever device they are."""
    for grad in grads:
        values = grad._values() if grad.is_sparse else grad
        values.masked_fill_(condition.to(grad.device), 0)
