"""What a rank has of a tensor that is divided over ranks: what checkpoints are made of."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

STATE_DICT = "a state_dict of an optimizer"  # what ranks are at, for those of them that aren't


@dataclass(frozen=True)
class Shard:
    """A piece of one tensor of a state dict. The pieces of all ranks cover every whole exactly once.

    Attributes:
        path: Where in the state dict the whole tensor belongs, such as ("state", 3, "exp_avg").
        shape: Of the whole tensor.
        offset_numel: Where the piece begins in the flattened whole.
        values: The piece: [numel], contiguous.
    """

    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    offset_numel: int
    values: Tensor
