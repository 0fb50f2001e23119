"""`WeightedOrder`: an epoch of draws by weight, with replacement. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from evenstep.data.order.permutation import scramble
from evenstep.errors import ConfigurationError
from evenstep.ground.computing.randomness import mix

_DRAW_TAG = 0x64726177  # "draw"
_MASK_32 = 0xFFFF_FFFF


class Weights:
    """The weight of each sample. Holds 8 bytes per sample.

    Args:
        weights: [num_samples], at least 0 and finite, not all of them 0.

    Raises:
        ConfigurationError: A weight is negative, infinite or NaN (the message names the first), or the shape or the sum
            is wrong.
    """

    def __init__(self, weights: Tensor) -> None:
        if weights.dim() != 1 or weights.numel() == 0 or weights.is_complex():
            raise ConfigurationError(f"weights of shape {list(weights.shape)}; one number for each sample.")
        weights = weights.detach().to("cpu", torch.float64)
        wrong = torch.nonzero(~(weights.isfinite() & (weights >= 0)))
        if wrong.numel():
            first = int(wrong[0])
            raise ConfigurationError(f"weights[{first}] is {float(weights[first])}; weights are finite and at least 0.")
        self.cumulative = weights.cumsum(0)  # [num_samples], float64
        self.total = float(self.cumulative[-1])
        if not 0 < self.total < float("inf"):
            raise ConfigurationError(f"the weights add up to {self.total}, so nothing can be drawn.")
        self.last = int(torch.nonzero(weights)[-1])
        self.digest = digest(self.cumulative.view(torch.int64))

    def __len__(self) -> int:
        return len(self.cumulative)


@dataclass(frozen=True)
class WeightedOrder:
    """Draws with replacement: each position is drawn independently, so positions can be computed in any order.

    Attributes:
        weights: The weight of each sample.
        num_samples: Draws of one epoch.
        seed: Together with `epoch` it decides the draws.
        epoch: Together with `seed` it decides the draws.
    """

    weights: Weights
    num_samples: int
    seed: int = 0
    epoch: int = 0

    def at(self, positions: Tensor) -> Tensor:
        """Sample indices drawn at `positions`, any shape, int64."""
        keys = _draw_keys(self.seed, self.epoch)
        low, high = positions & _MASK_32, positions >> 32
        words = [scramble(scramble(low ^ keys[i]) ^ high ^ keys[i + 1]) for i in (0, 2)]
        uniform = ((words[0] << 21) | (words[1] >> 11)).double() * 2.0**-53
        drawn = torch.searchsorted(self.weights.cumulative, uniform * self.weights.total, right=True)
        # The product may round up to the total, which is after the last sample.
        return drawn.clamp_(max=self.weights.last)


@lru_cache(maxsize=16)
def _draw_keys(seed: int, epoch: int) -> list[int]:
    return [mix(_DRAW_TAG, seed, epoch, number) & _MASK_32 for number in range(4)]


def digest(values: Tensor) -> int:
    """A digest of int64 values: their products with odd multipliers, added up and wrapping. Pure."""
    multipliers = torch.arange(1, 2 * len(values), 2, device="cpu")
    return mix(int((values * multipliers * 0x2545F4914F6CDD1D).sum()), len(values)) >> 1
