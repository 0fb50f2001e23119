"""By what gradients are divided, and that every way to divide them has the same bits."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from evenstep.replica.gradients.division import divide, divide_alone, divisor_on_device
from evenstep.replica.gradients.window import Kind, Window
from evenstep.transport.base import Row
from evenstep.transport.core.reduction import divisor_of


@pytest.mark.parametrize("case", ["weighted", "no weight", "plain", "nobody"])
def test_a_divisor_on_a_device_is_that_of_the_rows(case: str, fresh_seed: int) -> None:
    draw = random.Random(fresh_seed)
    weight = draw.uniform(0.1, 1e6) if case == "weighted" else 0.0
    is_weighted = case in ("weighted", "no weight")
    rows = [Row(weight, float(is_weighted), float(case == "plain")), Row()]
    sums = torch.tensor(rows, dtype=torch.float64).sum(0)
    found = divisor_on_device(sums[0], sums[1], 7.0)
    assert found.shape == ()
    assert float(found) == divisor_of(rows, 7.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_numbers_and_tensors_divide_alike(dtype: torch.dtype, fresh_seed: int) -> None:
    torch.manual_seed(fresh_seed)
    given = [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in ((3, 4), (1,), (0,), (5000,))]
    divisor = random.Random(fresh_seed).uniform(0.1, 300.0)
    by_number, by_tensor = [each.clone() for each in given], [each.clone() for each in given]
    divide(by_number, divisor)
    divide(by_tensor, torch.tensor(divisor, dtype=torch.float64))
    for each, number, tensor in zip(given, by_number, by_tensor, strict=True):
        assert torch.equal(number, each / divisor)
        assert torch.equal(tensor, number)


@pytest.mark.parametrize("is_tensor", [False, True])
@pytest.mark.parametrize(
    ("kind", "weights", "scale", "expected"),
    [
        (Kind.WEIGHTED, [3.0, 5.0], 1.0, 2.0),
        (Kind.WEIGHTED, [3.0, 5.0], 4.0, 8.0),
        (Kind.WEIGHTED, [0.0], 1.0, 0.0),
        (Kind.PLAIN, [], 1.0, 4.0),
    ],
)
def test_a_rank_alone_divides_by_its_own_row(
    kind: Kind, weights: list[float], scale: float, expected: float, is_tensor: bool
) -> None:
    """Two passes; with weights made smaller first; without a weight; plain, by what is named."""
    window, parameter = Window(), nn.Parameter(torch.zeros(3))
    for weight in weights or [0.0]:
        window.add(kind, torch.tensor(weight) if is_tensor and weights else weight)
    parameter.grad = torch.full((3,), 16.0)
    divide_alone([parameter, nn.Parameter(torch.zeros(2))], window, plain=4.0, scale=scale)
    assert parameter.grad.tolist() == [expected] * 3
