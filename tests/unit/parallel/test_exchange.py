"""How a divided model's window ends, with stubs in place of its ranks."""

from __future__ import annotations

import torch
from torch import nn

from evenstep.parallel.exchange import MeshExchange
from evenstep.replica.gradients.window import Kind, Window
from evenstep.transport.local import LocalTransport


def test_a_weight_of_zero_that_is_not_read_drops_gradients():
    """They are those of a mean over nothing."""
    exchange, parameter = MeshExchange.__new__(MeshExchange), nn.Parameter(torch.ones(3))
    exchange._others, exchange._data = [parameter], LocalTransport()
    for weight, wanted in ((0.0, 0.0), (2.0, 5.0)):
        window = Window()
        window.add(Kind.WEIGHTED, torch.tensor(weight))
        parameter.grad = torch.full((3,), 5.0 if weight else torch.nan)
        exchange._add_others(window)
        assert parameter.grad.tolist() == [wanted] * 3
