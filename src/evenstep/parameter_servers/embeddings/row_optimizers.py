"""Optimizers of single rows: a row that isn't in a step is left alone, with its state. Pure but for their arguments.

| name | state of a row | computes |
| --- | --- | --- |
| "sgd" | none | what `torch.optim.SGD` does without momentum |
| "adagrad" | dim numbers | what `torch.optim.Adagrad` does (1) |
| "rowwise_adagrad" | 1 number | the same with one accumulator for a row, of the mean of its squares (2) |
| "rowwise_adam" | dim + 2 numbers | Adam (3) with one second moment for a row, of the mean of its squares (4) |

(1) Duchi, Hazan and Singer, "Adaptive Subgradient Methods for Online Learning and Stochastic Optimization", 2011.
(2) Mudigere et al., "Software-Hardware Co-design for Fast and Scalable Training of Deep Learning Recommendation
Models", 2022. (3) Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015. (4) FBGEMM's "partial row-wise
Adam".

To "sgd", "adagrad" and "rowwise_adagrad" a row without a gradient is the same as one with a gradient of zeros, so they
compute what the dense optimizer computes. Adam would move rows by their first moment also when they are in no batch;
here it doesn't. Its bias correction counts a row's own steps (FBGEMM and `torch.optim.SparseAdam` count everybody's):
so a row's values depend on its own gradients alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

State = dict[str, Tensor]

ROW_OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "rowwise_adam")
_EPS = {"sgd": 0.0, "adagrad": 1e-10, "rowwise_adagrad": 1e-10, "rowwise_adam": 1e-8}


@dataclass(frozen=True)
class RowOptimizer:
    """How rows change.

    Attributes:
        name: One of `ROW_OPTIMIZERS`.
        betas: Of "rowwise_adam": decay of the first and the second moment.
        eps: Added to the root in the denominator.
    """

    name: str
    betas: tuple[float, float]
    eps: float

    def state_sizes(self, dim: int) -> dict[str, int]:
        """For each tensor of the state its numbers for a row."""
        return {
            "sgd": {},
            "adagrad": {"sum": dim},
            "rowwise_adagrad": {"sum": 1},
            "rowwise_adam": {"exp_avg": dim, "exp_avg_sq": 1, "step": 1},
        }[self.name]

    def step(self, rows: Tensor, gradients: Tensor, state: State, lr: float) -> None:
        """Change rows and their state.

        Args:
            rows: [n, dim], changed in place.
            gradients: [n, dim].
            state: [n, size] each, changed in place.
            lr: Rate.
        """
        if self.name == "sgd":
            rows.add_(gradients, alpha=-lr)
        elif self.name == "rowwise_adam":
            first, second = self.betas
            state["step"].add_(1)
            state["exp_avg"].lerp_(gradients, 1 - first)
            squares = gradients.square().mean(1, keepdim=True)
            state["exp_avg_sq"].mul_(second).add_(squares, alpha=1 - second)
            root = (state["exp_avg_sq"] / (1 - second ** state["step"])).sqrt_().add_(self.eps)
            rows.sub_(lr * (state["exp_avg"] / (1 - first ** state["step"])) / root)
        else:
            squares = gradients.square()
            state["sum"].add_(squares if self.name == "adagrad" else squares.mean(1, keepdim=True))
            rows.addcdiv_(gradients, state["sum"].sqrt().add_(self.eps).expand_as(rows), value=-lr)


def default_eps(name: str) -> float:
    """torch's."""
    return _EPS[name]


def optimizer_bytes(name: str, dim: int, dtype: torch.dtype) -> int:
    """Bytes of a row's state."""
    return sum(RowOptimizer(name, (0, 0), 0).state_sizes(dim).values()) * dtype.itemsize
