"""The header: the few numbers that are sent with the buckets of one reduction.

To add a statistic, write an `Observer` with `num_numbers`, `header_numbers`, `judge` and `conclude`, and add it to
`Monitors`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from evenstep.errors import UsageError
from evenstep.ground.computing.device import Coming, arrived, start_copy
from evenstep.replica.gradients.division import divisor_on_device, row_of
from evenstep.replica.gradients.observer import Observer
from evenstep.replica.gradients.window import CALLS, Kind, Window
from evenstep.transport.base import Row
from evenstep.transport.core.reduction import divisor_of

_READ_AT_ONCE = 2  # windows
_Late = tuple[Observer, Any, int, int]  # observer, its `sent`, and begin and end of its numbers


class Header:
    """The few numbers that are sent with the buckets of one reduction, added over ranks.

    [:3]  the ranks' rows: weights divided by the scale of the rank's gradients, WEIGHTED windows, PLAIN windows
    [3:n] the numbers of each observer
    [n:]  for each parameter, the number of ranks on which it has a gradient

    [Note: reading late]

    Nothing waits for a GPU. If the header is on a GPU, [:n] is copied to the host at the end of each window, and read
    at the end of the next window, when the copy is complete: a rank is at most a window ahead of its GPU. Findings are
    reported a window late, by all ranks in the same window. All ranks wait for the header only in the first windows, to
    check the kinds: a script that mixes loss.backward() and model.backward usually does so from the beginning.

    Numbers are written on the host; for a GPU's header this costs one copy, for which nothing waits. There are two host
    buffers, used in turns: when the second window after this one is filled, this window's sums have been read, so its
    copy is over.

    Args:
        num_parameters: Number of the model's parameters.
        device: The model's device.
        observers: The model's observers, the same on all ranks; some have numbers in the header.

    Attributes:
        is_late: Whether the header is read a window late: see [Note: reading late].
    """

    def __init__(self, num_parameters: int, device: torch.device, observers: Sequence[Observer] = ()) -> None:
        self._sections: list[tuple[Observer, int, int]] = []
        begin = 3
        for observer in observers:
            self._sections.append((observer, begin, begin + observer.num_numbers))
            begin += observer.num_numbers
        self._begin_of_used, numel = begin, begin + num_parameters
        self.tensor = torch.zeros(numel, dtype=torch.float64, device=device)
        self.is_late = device.type != "cpu"
        self._hosts = [self.tensor]
        if self.is_late:
            self._hosts = [torch.zeros_like(self.tensor, device="cpu", pin_memory=True) for _ in range(2)]
        # The same memory as an array of C doubles, because reading or writing one element of a tensor takes
        # microseconds, and there are many. The array points into the tensors, so they must never be replaced.
        self._written: list[Any] = [(ctypes.c_double * numel).from_address(host.data_ptr()) for host in self._hosts]
        self._numbers: Any = None if self.is_late else self._written[0]
        self._coming: tuple[Coming, list[_Late]] | None = None  # the previous window's numbers
        self._num_windows = 0
        self._flags: list[bool] = []  # used flags, as written in `_filled`
        self._filled: Any = None

    def fill(self, window: Window, used: list[bool], *, scale: float = 1.0) -> None:
        """Write this rank's numbers to the header.

        Args:
            window: The window that ends.
            used: For each parameter, whether it has a gradient.
            scale: The scale by which weights were divided before they multiplied this rank's gradients.
        """
        numbers_sent: list[float] = []
        tensors: list[tuple[int, int, Tensor]] = []
        for observer, begin, end in self._sections:
            each = observer.header_numbers(window)
            if isinstance(each, Tensor):
                tensors.append((begin, end, each))
                each = (0.0,) * (end - begin)
            numbers_sent += each
        turn = self._num_windows % len(self._hosts)
        numbers, weight = self._written[turn], window.weight
        if used != self._flags or self._filled is None:
            unsent = (0.0,) * self._begin_of_used
            self._flags, self._filled = used, (ctypes.c_double * len(numbers))(*unsent, *used)
        ctypes.memmove(numbers, self._filled, ctypes.sizeof(numbers))
        is_unread = self.is_late and isinstance(weight, Tensor)
        numbers[:3] = row_of(window.kind, 0.0 if is_unread else weight, scale)
        numbers[3 : self._begin_of_used] = numbers_sent
        if self.is_late:
            self.tensor.copy_(self._hosts[turn], non_blocking=True)
        if is_unread:
            self.tensor[0] = weight / scale
        for begin, end, each in tensors:
            self.tensor[begin:end] = each

    def read(self) -> None:
        """After the sum: let observers judge their numbers: see [Note: reading late].

        Raises:
            UsageError: In the previous window ranks mixed loss.backward() and model.backward. Raised on every rank.
        """
        self._num_windows += 1
        late = []
        for observer, begin, end in self._sections:
            if observer.sent is None:
                continue
            if self.is_late and not observer.is_read_at_once:
                late.append((observer, observer.sent, begin, end))
            else:
                observer.judge(observer.sent, self._read(begin, end))
        if not self.is_late:
            return
        if self._num_windows <= _READ_AT_ONCE:
            self.kinds()
        before, self._coming = self._coming, (start_copy(self.tensor[: self._begin_of_used]), late)
        if before is None:
            return
        sums = arrived(before[0])
        if sums[1] and sums[2]:
            raise UsageError(
                f"some ranks called {CALLS[Kind.PLAIN]} and others {CALLS[Kind.WEIGHTED]} in the same step (noticed in "
                f"backward pass {self._num_windows}, for the pass before it, whose gradients were wrong). Call the "
                f"same one on all ranks. Resume from a checkpoint."
            )
        for observer, sent, begin, end in before[1]:
            observer.judge(sent, sums[begin:end])

    def kinds(self) -> tuple[int, int]:
        """After the sum: the number of ranks with a WEIGHTED window, and with a PLAIN window.

        Reads the tensor, so on CUDA it waits for the device.

        Raises:
            UsageError: Some ranks called loss.backward(), others model.backward(). Raised on every rank.
        """
        num_weighted, num_plain = map(int, self._read(1, 3))
        if num_weighted and num_plain:
            raise UsageError(
                f"{num_plain} ranks called {CALLS[Kind.PLAIN]} and {num_weighted} called {CALLS[Kind.WEIGHTED]} in "
                f"the same step. Call the same one on all ranks."
            )
        return num_weighted, num_plain

    def used_anywhere(self) -> list[bool]:
        """After the sum: for each parameter, whether any rank has a gradient. Reads the tensor."""
        return [count > 0 for count in self._read(self._begin_of_used, len(self.tensor))]

    def _read(self, begin: int, end: int) -> list[float]:
        numbers: list[float] = self.tensor[begin:end].tolist() if self._numbers is None else self._numbers[begin:end]
        return numbers

    def num_plain(self) -> float | Tensor:
        """After the sum: the number of ranks with a PLAIN window; on a GPU 0-dim, without waiting for it."""
        return self.tensor[2] if self._numbers is None else self._numbers[2]

    def divisor(self, plain: float | Tensor) -> float | Tensor:
        """After the sum: the divisor of gradients; on a GPU a 0-dim tensor, without waiting for it.

        Args:
            plain: The divisor of PLAIN windows.
        """
        if self._numbers is None:
            return divisor_on_device(self.tensor[0], self.tensor[1], plain)
        return divisor_of([Row(*self._numbers[:3])], float(plain))
