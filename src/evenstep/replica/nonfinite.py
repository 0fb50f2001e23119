"""Gradients that are infinite or not a number: found before they are added, so that one can say whose they are.

One pass over a bucket that is about to travel adds it up: a sum is finite unless something in it isn't (or it is very
large, which a second look tells apart). What the ranks found is agreed once per window, with one small all-reduce. On
a GPU reading that waits for the device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from evenstep.errors import ConfigurationError, NonFiniteError
from evenstep.replica.bucket import Bucket
from evenstep.transport.base import Transport
from evenstep.world import World

Policy = Literal["skip", "raise"]
_MAX_NAMED = 5


def validate_policy(policy: str | None) -> None:
    """Refuse an unknown policy.

    Raises:
        ConfigurationError: It is none of "skip", "raise" and None.
    """
    if policy not in ("skip", "raise", None):
        raise ConfigurationError(f"on_nonfinite={policy!r}; 'skip', 'raise', or None.")


class NonFiniteGuard:
    """Looks at this rank's gradients, and decides with the other ranks.

    Args:
        policy: What happens to the step.
        world: Who takes part.
        transport: Carries what belongs to the model's passes.

    Attributes:
        num_skipped: Steps that were skipped so far.
    """

    def __init__(self, policy: Policy, world: World, transport: Transport) -> None:
        self.num_skipped = 0
        self._policy = policy
        self._world = world
        self._transport = transport
        self._sums: list[Tensor] = []  # 0-dim: finite if everything is
        self._peaks: list[tuple[Sequence[str], Tensor]] = []  # (names, [n] largest absolute values)

    def look(self, bucket: Bucket) -> None:
        """At a bucket that holds this rank's gradients, before it travels."""
        self._look([bucket.flat], lambda: (bucket.names, bucket.sent_views))

    def look_at(self, names: Sequence[str], grads: Sequence[Tensor]) -> None:
        """At gradients that travel in no bucket."""
        if grads:
            self._look(grads, lambda: (names, grads))

    def _look(self, tensors: Sequence[Tensor], parts: Callable[[], tuple[Sequence[str], Sequence[Tensor]]]) -> None:
        with torch.no_grad():
            total = torch.stack([tensor.sum(dtype=_wide(tensor)).abs().double() for tensor in tensors]).sum()
            if total.device.type == "cpu" and bool(torch.isfinite(total)):
                return
            names, views = parts()
            filled = [(name, view) for name, view in zip(names, views, strict=True) if view.numel()]
            peaks = torch.stack([view.abs().amax().double() for _, view in filled])
            self._sums.append(peaks.amax())
            self._peaks.append(([name for name, _ in filled], peaks))

    def is_fault(self, *, is_scaled: bool) -> bool:
        """Collective, at the end of a window: whether a gradient was not finite on some rank, and nobody scaled it.

        Args:
            is_scaled: The loss was scaled, so that an overflow is the scaler's business.
        """
        numbers = torch.zeros(2, dtype=torch.float64, device=self._sums[0].device if self._sums else self._world.device)
        numbers[1] = float(is_scaled)
        for total in self._sums:
            numbers[0] += (~torch.isfinite(total)).to(torch.float64)
        self._transport.all_reduce(numbers).wait()
        found, scaled = numbers.tolist()
        peaks, self._peaks, self._sums = self._peaks, [], []
        if not found or scaled:
            return False
        mine = [name for names, values in peaks for name in _not_finite(names, values)]
        told = {str(rank): names for rank, names in enumerate(self._world.exchange(mine)) if names}
        text = "; ".join(f"rank {rank}: {_listed(names)}" for rank, names in told.items())
        message = f"a gradient was infinite or not a number before gradients were averaged, on {text}."
        if self._policy == "raise":
            raise NonFiniteError(f"{message} The model is as before this step.")
        self.num_skipped += 1
        if self._world.is_main:
            warnings.warn(f"{message} All ranks skip this step (number {self.num_skipped}).", stacklevel=2)
        return True


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.dtype.itemsize < 4 else tensor.dtype


def _not_finite(names: Sequence[str], peaks: Tensor) -> list[str]:
    return [name for name, finite in zip(names, torch.isfinite(peaks).tolist(), strict=True) if not finite]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(map(repr, names[:_MAX_NAMED])) + more
