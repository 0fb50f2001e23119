"""Optimizers of single rows: a row that isn't in a step is left alone, with its state. Pure but for their arguments.

| name | state of a row | computes |
| --- | --- | --- |
| "sgd" | none | what `torch.optim.SGD` does without momentum |
| "adagrad" | dim numbers | what `torch.optim.Adagrad` does (1) |
| "rowwise_adagrad" | 1 number | the same with one accumulator for a row, of the mean of its squares (2) |

(1) Duchi, Hazan and Singer, "Adaptive Subgradient Methods for Online Learning and Stochastic Optimization", 2011.
(2) Mudigere et al., "Software-Hardware Co-design for Fast and Scalable Training of Deep Learning Recommendation
Models", 2022.

To all of them a row without a gradient is the same as one with a gradient of zeros, so they compute what the dense
optimizer computes. Adam isn't among them: it would move rows by their first moment also when they are in no batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

State = dict[str, Tensor]

ROW_OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad")
DEFAULT_EPS = 1e-10  # torch's, of Adagrad


@dataclass(frozen=True)
class RowOptimizer:
    """How rows change.

    Attributes:
        name: One of `ROW_OPTIMIZERS`.
        eps: Added to the root in the denominator.
    """

    name: str
    eps: float = DEFAULT_EPS

    def state_sizes(self, dim: int) -> dict[str, int]:
        """For each tensor of the state its numbers for a row."""
        return {"sgd": {}, "adagrad": {"sum": dim}, "rowwise_adagrad": {"sum": 1}}[self.name]

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
        else:
            squares = gradients.square()
            state["sum"].add_(squares if self.name == "adagrad" else squares.mean(1, keepdim=True))
            rows.addcdiv_(gradients, state["sum"].sqrt().add_(self.eps).expand_as(rows), value=-lr)
