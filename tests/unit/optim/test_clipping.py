"""Clipping in one process."""

from __future__ import annotations

import pytest
import torch

import evenstep


@pytest.mark.parametrize("limit", [1e3, torch.tensor(1e3)], ids=["number", "tensor"])
def test_gradients_below_the_limit_are_not_written(fresh_seed, limit):
    torch.manual_seed(fresh_seed)
    parameter = torch.nn.Parameter(torch.randn(7))
    parameter.grad = torch.randn(7)
    before, version = parameter.grad.clone(), parameter.grad._version
    norm = evenstep.clip_grad_norm_([parameter], limit)
    assert torch.equal(parameter.grad, before)
    assert parameter.grad._version == version
    torch.testing.assert_close(norm, before.double().norm())


@pytest.mark.parametrize(("dtype", "value"), [(torch.float16, 200.0), (torch.bfloat16, 0.011)])
def test_the_norm_of_16_bit_gradients_has_more_bits(dtype, value):
    """In float16 this one overflows, and clipping by it would make every gradient zero."""
    parameter = torch.nn.Parameter(torch.zeros(200_000, dtype=dtype))
    parameter.grad = torch.full_like(parameter, value)
    wanted = parameter.grad.double().norm()
    torch.testing.assert_close(evenstep.clip_grad_norm_(parameter, float("inf")), wanted, rtol=1e-3, atol=0)
    evenstep.clip_grad_norm_(parameter, float(wanted) / 2)
    torch.testing.assert_close(parameter.grad.double().norm(), wanted / 2, rtol=1e-2, atol=0)
