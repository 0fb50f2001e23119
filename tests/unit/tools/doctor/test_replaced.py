"""Optimizers and modules that are looked for among all objects of a process."""

from __future__ import annotations

import torch

from evenstep.tools.doctor.run.notes import replaced


def test_an_optimizer_whose_constructor_raised_is_passed_over() -> None:
    """Its exception, which somebody keeps, holds it; it has no parameters."""
    half_made = object.__new__(torch.optim.SGD)
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    assert replaced(optimizer)["stale"] == 0
    assert not hasattr(half_made, "param_groups")
