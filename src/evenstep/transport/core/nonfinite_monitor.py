"""Checks sums over ranks for NaN and infinity while shared memory computes them. Each rank checks its own part.

The check is cheapest at this point: the sum is still in the cache, each element is checked by the rank that adds it,
and the inputs still show which rank had the non-finite value.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# Called with the number of the first element, the sum of some elements, and each rank's input. The sum may have
# overwritten one of the inputs: that input then has the sum's address.
SumMonitor = Callable[[int, Tensor, Sequence[Tensor]], None]

_monitors: dict[int, SumMonitor] = {}


def monitor_sums(memory: Tensor, monitor: SumMonitor) -> None:
    """Check the sums of a tensor as long as it exists. Calls `monitor` if a sum isn't finite or is very large.

    `monitor` runs inside the collective, in any thread. It must call no collective.

    Args:
        memory: [numel], real floating-point numbers; passed to `all_reduce` as it is, or to `reduce_scatter`.
        monitor: See `SumMonitor`.
    """
    address = memory.data_ptr()
    _monitors[address] = monitor
    weakref.finalize(memory, _forget, address, monitor).atexit = False


def monitor_of(memory: Tensor) -> SumMonitor | None:
    """The `monitor` of this tensor's sums; None if they aren't checked."""
    return _monitors.get(memory.data_ptr()) if _monitors else None


def check_sum(monitor: SumMonitor, begin: int, result: Tensor, inputs: Sequence[Tensor]) -> None:
    """Call `monitor` if an element of a sum isn't finite, or the sum's total overflows."""
    total = result.sum(dtype=torch.float32) if result.dtype.itemsize < 4 else result.sum()
    if not math.isfinite(total.item()):
        monitor(begin, result, inputs)


def _forget(address: int, monitor: SumMonitor) -> None:
    if _monitors.get(address) is monitor:
        del _monitors[address]
