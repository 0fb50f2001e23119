"""One run of autograd, as the engine follows it.

[Note: passes that contribute nothing]

A pass with weight 0, or over an empty share, runs for its side effects (hooks, collectives of the user's), but NaN in
it must not reach the sum. The gradients of the window so far are set aside before it and put back after it; what it
produced is dropped.

Where rows of this rank have a part in other ranks' outputs (`shares_statistics`: a SyncBatchNorm), a pass with weight 0
over real rows is not dropped, because the others' losses have a gradient in them. It is *muted* instead: what reaches
the module's outputs is replaced by zeros, so only what comes from the others is left.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from evenstep.replica.weighting import Kind


@dataclass
class Pass:
    """One run of autograd.

    Attributes:
        kind: What it means.
        weight: Its share in the window's sum.
        discards: What it produces is dropped.
        mutes: The gradient that reaches the module's outputs is replaced by zeros; where it is a tensor, if that is
            true.
        is_scaled: The loss was scaled by a GradScaler.
        confirmed: A parameter has received a gradient, so this is no `torch.autograd.grad`.
        set_aside: Gradients of the window so far, while a discarding pass runs.
        synchronised: It ends the window, and gradients travel; known when it begins.
    """

    kind: Kind
    weight: float | Tensor
    discards: bool = False
    mutes: bool | Tensor = False
    is_scaled: bool = False
    confirmed: bool = False
    set_aside: list[Tensor | None] | None = None
    synchronised: bool = False

    @property
    def fills_buckets(self) -> bool:
        """Whether gradients travel as soon as they are there."""
        return self.synchronised and not self.discards


# A pass of `model.backward` over real samples that is a window of its own, where nothing travels and nothing is looked
# at: its weight is what it is divided by, there is nothing to follow in it, and nobody writes to it.
WHOLE_WINDOW = Pass(Kind.WEIGHTED, 1.0, confirmed=True)
