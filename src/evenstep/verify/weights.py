"""How the backward passes of all ranks make up a gradient: with which weights, and whether at all. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from evenstep.verify.evidence import Run

_MOST_PASSES = 64  # of all ranks in a step, whose weights are looked for


@dataclass(frozen=True)
class Weights:
    """How the backward passes of all ranks make up two gradients.

    Attributes:
        right: Of each pass, ranks after each other, its weight in the gradient of the run on fewer ranks.
        applied: Its weight in the gradient that the optimizer got.
        unexplained: What of the first is no sum of the passes, relatively.
    """

    right: list[float]
    applied: list[float]
    unexplained: float


def find_weights(base: Run, run: Run, step: int) -> Weights | None:
    """The weights of the backward passes, by least squares over probes of the gradients; None if they aren't known."""
    target = base.probes(0, step).get("applied")
    probes = [run.probes(rank, step) for rank in range(run.num_ranks)]
    applied = probes[0].get("applied")
    columns = [
        given[key] for given in probes for key in sorted((key for key in given if key.isdigit()), key=int)
    ]  # ranks after each other
    if target is None or applied is None or not 0 < len(columns) <= _MOST_PASSES:
        return None
    if any(column.shape != target.shape for column in [applied, *columns]):
        return None
    matrix = torch.stack([column.double() for column in columns], dim=1)
    right, unexplained = _solve(matrix, target)
    return Weights(right, _solve(matrix, applied)[0], unexplained)


def _solve(matrix: Tensor, target: Tensor) -> tuple[list[float], float]:
    scales = matrix.norm(dim=0).clamp_min(torch.finfo(torch.float64).tiny)
    scaled = matrix / scales
    solution = torch.linalg.lstsq(scaled, target.double().unsqueeze(1), driver="gelsd").solution.squeeze(1)
    left = (target - scaled @ solution).norm() / target.norm().clamp_min(torch.finfo(torch.float64).tiny)
    return (solution / scales).tolist(), float(left)
