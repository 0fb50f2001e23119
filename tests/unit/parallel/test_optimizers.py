"""Optimizers that were made before a model was divided are found among all objects of the process."""

from __future__ import annotations

import pytest
import torch

from evenstep.errors import UsageError
from evenstep.parallel.optimizers import validate_none_yet


def test_an_optimizer_whose_constructor_raised_is_passed_over() -> None:
    """Its exception, which somebody keeps, holds it."""
    module = torch.nn.Linear(2, 2)
    half_made = object.__new__(torch.optim.SGD)
    validate_none_yet(module, "parallelize")
    made = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="SGD was made before the model was divided"):
        validate_none_yet(module, "parallelize")
    assert half_made is not made
