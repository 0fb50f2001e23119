"""The few numbers that travel with the buckets of one reduction.

To add a statistic, write an `Observer` with `num_numbers`, `header_numbers` and `read_header`, and build it in
`monitors.monitors`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from evenstep.device import Coming, arrived, start_copy
from evenstep.errors import UsageError
from evenstep.replica.gradients.division import divisor_on_device, row_of
from evenstep.replica.gradients.observer import Observer
from evenstep.replica.gradients.window import CALLS, Kind, Window
from evenstep.transport.base import Row
from evenstep.transport.core.reduction import divisor_of

_READ_AT_ONCE = 2  # windows
_LATE_EVERY = 16


class Header:
    """The few numbers that travel with the buckets of one reduction, added over ranks.

    [:3]  the ranks' rows: weights over the scale of the rank's gradients, windows that were WEIGHTED, and PLAIN
    [3:]  for each parameter, on how many ranks it has a gradient; then the numbers of each observer

    Args:
        num_parameters: Of the model.
        device: Of the model.
        observers: Those of the model, the same on all ranks; some have numbers in it.
    """

    def __init__(self, num_parameters: int, device: torch.device, observers: Sequence[Observer] = ()) -> None:
        self._end_of_used = numel = 3 + num_parameters
        self._sections: list[tuple[Observer, int, int]] = []
        for observer in observers:
            if observer.num_numbers:
                self._sections.append((observer, numel, numel + observer.num_numbers))
                numel += observer.num_numbers
        self.tensor = torch.zeros(numel, dtype=torch.float64, device=device)
        # The same memory as numbers: an element of a tensor takes microseconds to read or write, and there are many.
        # So `tensor` is never replaced by another one.
        self._numbers: Any = None
        if device.type == "cpu":
            self._numbers = (ctypes.c_double * numel).from_address(self.tensor.data_ptr())
        self._flags: list[bool] = []  # as in `_filled`
        self._filled: Any = None

    def fill(self, window: Window, used: list[bool], *, scale: float = 1.0) -> None:
        """Write this rank's numbers.

        Args:
            window: The window that ends.
            used: For each parameter, whether it has a gradient.
            scale: What weights were divided by before they multiplied this rank's gradients.
        """
        numbers_sent: list[float] = []
        tensors: list[tuple[int, int, Tensor]] = []
        for observer, begin, end in self._sections:
            each = observer.header_numbers()
            if isinstance(each, Tensor):
                tensors.append((begin, end, each))
                each = (0.0,) * (end - begin)
            numbers_sent += each
        if self._numbers is not None:
            numbers = self._numbers
            if used != self._flags or self._filled is None:
                self._flags, self._filled = used, (ctypes.c_double * len(numbers))(0.0, 0.0, 0.0, *used)
            ctypes.memmove(numbers, self._filled, ctypes.sizeof(numbers))
            numbers[:3] = row_of(window.kind, window.weight, scale)
            numbers[self._end_of_used :] = numbers_sent
        else:
            # Not `tensor[0] = number`: that waits for a GPU.
            weight = window.weight / scale
            kinds = [float(window.kind is Kind.WEIGHTED), float(window.kind is Kind.PLAIN)]
            number = 0.0 if isinstance(weight, Tensor) else weight
            made = torch.tensor([number, *kinds, *map(float, used), *numbers_sent], dtype=torch.float64, device="cpu")
            self.tensor.copy_(made, non_blocking=True)
            if isinstance(weight, Tensor):
                self.tensor[0] = weight
        for begin, end, each in tensors:
            self.tensor[begin:end] = each

    def read_observers(self) -> None:
        """After the sum: let every observer read its numbers. Collective if one of them finds something."""
        for observer, begin, end in self._sections:
            observer.read_header(self.tensor[begin:end] if self._numbers is None else self._numbers[begin:end])

    def kinds(self) -> tuple[int, int]:
        """After the sum: how many ranks' windows were WEIGHTED, and PLAIN.

        Reads the tensor, so on CUDA it waits for the device.

        Raises:
            UsageError: Some ranks called loss.backward(), others model.backward(). Raised on every rank.
        """
        num_weighted, num_plain = map(int, self._read(1, 3))
        if num_weighted and num_plain:
            raise UsageError(
                f"{num_plain} ranks called {CALLS[Kind.PLAIN]} and {num_weighted} called {CALLS[Kind.WEIGHTED]} in "
                f"the same step. All ranks use one of them."
            )
        return num_weighted, num_plain

    def used_anywhere(self) -> list[bool]:
        """After the sum: for each parameter, whether any rank has a gradient. Reads the tensor."""
        return [count > 0 for count in self._read(3, self._end_of_used)]

    def _read(self, begin: int, end: int) -> list[float]:
        numbers: list[float] = self.tensor[begin:end].tolist() if self._numbers is None else self._numbers[begin:end]
        return numbers

    def num_plain(self) -> float | Tensor:
        """After the sum: on how many ranks the window was PLAIN; on a GPU 0-dim, without waiting for it."""
        return self.tensor[2] if self._numbers is None else self._numbers[2]

    def divisor(self, plain: float | Tensor) -> float | Tensor:
        """After the sum: by what gradients are divided; on a GPU 0-dim, without waiting for it.

        Args:
            plain: The divisor of PLAIN windows.
        """
        if self._numbers is None:
            return divisor_on_device(self.tensor[0], self.tensor[1], plain)
        return divisor_of([Row(*self._numbers[:3])], float(plain))


class LateKinds:
    """Raises where ranks mix loss.backward() and model.backward, on a GPU, for which nothing waits.

    The first windows are read at once: a script that mixes them usually does so from the beginning. Then each window
    adds what shows it to a number on the GPU, which is copied in every `_LATE_EVERY`th window and read in the next:
    the same window on all ranks.
    """

    def __init__(self) -> None:
        self._num_windows = 0
        self._mixed: Tensor | None = None
        self._coming: Coming | None = None

    def note(self, header: Header) -> None:
        """A window's header has come.

        Raises:
            UsageError: Ranks have mixed them, in this window or since some windows. Raised on every rank.
        """
        self._num_windows += 1
        if self._num_windows <= _READ_AT_ONCE:
            header.kinds()
            return
        num_weighted, num_plain = header.tensor[1:2], header.tensor[2:3]
        if self._mixed is None:
            self._mixed = torch.zeros_like(num_weighted)
        self._mixed.addcmul_(num_weighted, num_plain)
        coming, self._coming = self._coming, None
        if coming is not None and arrived(coming)[0]:
            raise UsageError(
                f"some ranks called {CALLS[Kind.PLAIN]} and others {CALLS[Kind.WEIGHTED]} in the same step (noticed in "
                f"backward pass {self._num_windows}; it was so in one of the {_LATE_EVERY} before that, and gradients "
                f"were wrong). All ranks use one of them. Resume from a checkpoint."
            )
        if self._num_windows % _LATE_EVERY == 0:
            self._coming = start_copy(self._mixed)
