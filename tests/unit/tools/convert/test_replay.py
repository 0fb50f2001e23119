"""What a replay has left of two scripts is compared: no processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from evenstep.tools.convert.replay import _differences

LOOPS: list[object] = []


def leave(root: Path, mode: str, grads: list[Tensor | None]) -> None:
    """One step of a script."""
    ones = [torch.ones(3)] * len(grads)
    torch.save(LOOPS, root / mode)
    torch.save({"grads": grads, "weights": ones, "changes": ones, "is_half": False}, root / f"{mode}-step-0")


@pytest.mark.parametrize("lacks", ["record", "replay"])
def test_a_gradient_that_one_script_lacks_is_told(lacks: str, tmp_path: Path) -> None:
    """Also where no weight shows it, as with a rate of 0."""
    for mode in ("record", "replay"):
        leave(tmp_path, mode, [torch.ones(3), None if mode == lacks else torch.ones(3)])
    (difference,) = _differences(tmp_path, (1, 1))
    assert difference.startswith("step 1: the gradient differs by inf")


def test_a_gradient_that_both_scripts_lack_is_no_difference(tmp_path: Path) -> None:
    for mode in ("record", "replay"):
        leave(tmp_path, mode, [torch.ones(3), None])
    assert not list(_differences(tmp_path, (1, 1)))
