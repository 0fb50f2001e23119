"""Sums that don't depend on the order: the same bits for every division over tensors, devices and ranks.

[Note: fixed point]

Squares of float32 are exact in float64. Divided by a power of two near the largest square they are numbers from 0 to 1.
The first 30 binary places are summed as one integer, and the next 30 as another. Sums of integers aren't rounded, so
the order doesn't matter (the idea of Kulisch's long accumulator, "Computer Arithmetic and Validity", 2008, with two
words). Places below the 60th are cut off from each element: an error of less than 2 ** -60 of the largest square for
each element, far below the rounding of a sum in float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_PLACES = 30.0  # 2 ** 33 elements fit in 63 bits
_BLOCK = 1 << 18  # elements per pass, so that intermediate results stay in the cache


def largest(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The largest absolute value; 0 without elements, NaN if an element is NaN. 0-dim, float64."""
    peaks = [tensor.detach().abs().amax().to(device, torch.float64) for tensor in tensors if tensor.numel()]
    return torch.stack(peaks).amax() if peaks else torch.zeros((), dtype=torch.float64, device=device)


def words_of(tensors: Sequence[Tensor], peak: Tensor, norm_type: float) -> Tensor:
    """The sum of (|x| / scale) ** norm_type in fixed point: [2], int64. `value_of` converts it.

    Args:
        tensors: float32 or float64. Squares of float64 are rounded, each by itself.
        peak: 0-dim, float64: the largest |x| of all tensors of all ranks.
        norm_type: 1 or 2.
    """
    scale, words = _scale(peak), torch.zeros(2, dtype=torch.int64, device=peak.device)
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        for begin in range(0, flat.numel(), _BLOCK):
            block = flat[begin : begin + _BLOCK]
            shares = block.to(torch.float64).div_(scale.to(block.device)).abs_()
            shares = (shares.square_() if norm_type == 2 else shares).mul_(2.0**_PLACES)
            high = shares.floor()
            low = shares.sub_(high).mul_(2.0**_PLACES).floor_()
            words += torch.stack([each.to(torch.int64).sum() for each in (high, low)]).to(words.device)
    return words


def value_of(words: Tensor, peak: Tensor, norm_type: float) -> Tensor:
    """The sum of |x| ** norm_type, from the sum of all tensors' words: 0-dim, float64."""
    high, low = words.to(torch.float64).unbind()
    total = (high + low * 2.0**-_PLACES) * 2.0**-_PLACES * _scale(peak).pow(norm_type)
    return torch.where(torch.isfinite(peak), total, peak)


def _scale(peak: Tensor) -> Tensor:
    """A power of two that is at least `peak`, and large enough that a quotient can't overflow."""
    usable = torch.isfinite(peak) & (peak > 0)
    exponent = torch.frexp(torch.where(usable, peak, 1.0)).exponent
    return torch.ldexp(torch.ones_like(peak), exponent.clamp(min=-1000))
