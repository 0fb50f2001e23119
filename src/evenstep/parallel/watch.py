"""Gradients that aren't finite, in a model that is divided over ranks: each rank inspects its parts of the sums."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

from torch import Tensor

from evenstep.replica.gradients.window import Window
from evenstep.replica.monitors.nonfinite import NonFiniteGuard, Policy, has_scaler, listed
from evenstep.transport.core.object_collectives import exchange
from evenstep.transport.core.transport import Transport
from evenstep.world import World


class PartsGuard(NonFiniteGuard):
    """Skips steps, or raises; FSDP2 has added gradients over ranks when they are inspected."""

    found_on = "a gradient was infinite or not a number, in the parts of its sum that are on"


class PartsWatch(PartsGuard):
    """Warns once, and changes nothing. Costs no collective of its own: the header carries the finding.

    Args:
        world: The ranks that take part.
        transport: Carries what belongs to the model's passes.
        control: Carries messages on the CPU, in order with that.
    """

    num_numbers = 1

    def __init__(self, world: World, transport: Transport, control: Transport) -> None:
        super().__init__("raise", world, transport, control)
        self._is_off = False

    def header_numbers(self) -> Sequence[float]:
        """See `Observer`: whether this rank has found something."""
        return (float(not self._is_off and any(not math.isfinite(each) for each in self._sums)),)

    def read_header(self, sums: Sequence[float] | Tensor) -> None:
        """See `Observer`. Where any rank has found something, rank 0 warns, unless a GradScaler handles it."""
        mine = self.own_findings()
        if not sums[0] > 0:
            return
        self._is_off = True
        received = exchange(self._control, {"names": mine, "has_scaler": has_scaler()})
        if self._world.is_main and not any(each["has_scaler"] for each in received):
            text = "; ".join(f"rank {n}: {listed(each['names'])}" for n, each in enumerate(received) if each["names"])
            warnings.warn(
                f"{self.found_on} {text}. It is now in the parameters, unless the step was left out. This warning "
                f"comes once; on_nonfinite='skip' leaves such steps out, 'raise' ends the run, None looks at nothing.",
                stacklevel=2,
            )

    def look_at_gradients(self, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
        """See `NonFiniteGuard`; nothing once it has warned."""
        if not self._is_off:
            super().look_at_gradients(names, parameters)

    def rejects(self, window: Window) -> bool:
        """See `Observer`: never."""
        return False


def build_watch(policy: Policy | None, world: World, transport: Transport, control: Transport) -> PartsGuard | None:
    """Build the monitor of a policy; None: none. "warn" inspects on CPUs only, because it would wait for a GPU."""
    if policy in ("skip", "raise"):
        return PartsGuard(policy, world, transport, control)
    is_watched = policy == "warn" and world.device.type == "cpu"
    return PartsWatch(world, transport, control) if is_watched else None
