"""The first difference between two models is found and said."""

from __future__ import annotations

import pytest
from torch import nn

from evenstep.replica.wrapper.model_check import check_same_model, describe


def named(**layers: nn.Module) -> nn.Module:
    module = nn.Module()
    for name, layer in layers.items():
        module.add_module(name, layer)
    return module


SAME = nn.Linear(2, 3)
FROZEN = nn.Linear(2, 3)
FROZEN.weight.requires_grad_(False)


@pytest.mark.parametrize(
    ("models", "finding"),
    [
        ([SAME, nn.Linear(2, 3)], None),
        ([SAME, SAME, nn.Linear(4, 3)], "parameter 'weight' has shape [3, 2] on rank 0 but [3, 4] on rank 2."),
        ([SAME, nn.Linear(2, 3).double()], "parameter 'weight' has dtype float32 on rank 0 but float64 on rank 1."),
        (
            [SAME, nn.Linear(2, 3, bias=False)],
            "rank 0 has 2 parameters, rank 1 has 1; the first that only rank 0 has is 'bias' [3].",
        ),
        (
            [named(one=nn.Linear(2, 2), two=nn.Linear(2, 2)), named(two=nn.Linear(2, 2), one=nn.Linear(2, 2))],
            "parameter 0 is 'one.weight' on rank 0 but 'two.weight' on rank 1 (registered in another order).",
        ),
        ([SAME, FROZEN], "parameter 'weight' has requires_grad True on rank 0 but False on rank 1."),
    ],
)
def test_the_first_difference_is_named_with_its_parameter_and_ranks(models: list[nn.Module], finding: str | None):
    assert check_same_model([describe(model.named_parameters()) for model in models]) == finding
