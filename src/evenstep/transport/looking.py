"""Looking at sums over ranks while they are made in shared memory: each rank at the part that it makes.

That is when it costs least: the sum is still in the cache, each element is looked at by one rank, and what the ranks
have given is still there, to tell whose it was.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# Called with the number of the first element, the sum of some elements, and what each rank gave. One of those may be
# the sum itself by now, which then lies at the same address.
Look = Callable[[int, Tensor, Sequence[Tensor]], None]

_looks: dict[int, Look] = {}


def look_at_sums(memory: Tensor, look: Look) -> None:
    """Have sums of a tensor looked at as long as it lives: called where one isn't finite, or is very large.

    Called while the transport is busy, in whatever thread; it must call no collective.

    Args:
        memory: [numel], real floating-point numbers; passed to `all_reduce` as it is, or to `reduce_scatter`.
        look: See above.
    """
    address = memory.data_ptr()
    _looks[address] = look
    weakref.finalize(memory, _forget, address, look).atexit = False


def look_for(memory: Tensor) -> Look | None:
    """Who wants to look at sums of this tensor."""
    return _looks.get(memory.data_ptr()) if _looks else None


def check_sum(look: Look, begin: int, result: Tensor, inputs: Sequence[Tensor]) -> None:
    """Call `look` if not all of a sum is finite, or its total overflows."""
    total = result.sum(dtype=torch.float32) if result.dtype.itemsize < 4 else result.sum()
    if not math.isfinite(total.item()):
        look(begin, result, inputs)


def _forget(address: int, look: Look) -> None:
    if _looks.get(address) is look:
        del _looks[address]
