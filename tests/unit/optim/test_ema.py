"""`ExponentialMovingAverage` in one process."""

from __future__ import annotations

import torch
from torch import nn

import evenstep


class Caching(nn.Module):
    """Statistics, and a cache that grows with its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("positions", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.positions) < len(x):
            self.positions = torch.arange(len(x))
        self.count += 1
        return self.layer(x)


def test_caches_are_no_part_of_an_average():
    model = Caching()
    average = evenstep.ExponentialMovingAverage(model)
    model(torch.ones(5, 3))
    average.update()
    with average.applied():
        assert len(model.positions) == 5
        model(torch.ones(7, 3))
    assert len(model.positions) == 7
    Caching().load_state_dict(average.state_dict()["averages"])
