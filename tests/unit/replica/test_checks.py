"""How gradients that aren't finite and facts that differ are found and named. With ranks: `tests/procs`."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from evenstep.errors import NonFiniteError
from evenstep.replica.gradients.window import Kind, Window
from evenstep.replica.monitors.checks import Finder, NonFinite, find_difference
from evenstep.transport.local import LocalTransport

GRADIENTS = {
    "plain": torch.ones(3, 2),
    "empty": torch.ones(0, 5),
    "large": torch.full((4,), 3e38),
    "small": torch.ones(()).to(torch.bfloat16),
    "complex": torch.ones(2, dtype=torch.complex64),
    "wide": torch.ones(20_000).double(),
    "columns": torch.ones(200, 301).t(),
}


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_finder_names_what_isnt_finite(bad):
    finder = Finder()
    finder.check([*GRADIENTS], [*GRADIENTS.values()])
    assert finder.count() == 0, "large numbers whose sum is infinite are finite"
    assert finder.take() == []
    for name in GRADIENTS:
        changed = {each: value.clone() for each, value in GRADIENTS.items()}
        if name == "empty":
            continue
        changed[name][(-1,) * changed[name].dim()] = bad
        finder.check([*changed], [*changed.values()])
        assert finder.count() > 0
        assert finder.take() == [name]
        assert finder.take() == []


def test_a_finder_looks_at_sparse_gradients_and_at_none():
    dense, sparse, unused = (nn.Parameter(torch.zeros(4, 2)) for _ in range(3))
    dense.grad = torch.ones(4, 2)
    sparse.grad = torch.tensor([[0, 0], [1, 2], [0, 0], [math.nan, 1]]).to_sparse(1)
    finder = Finder()
    finder.check_grads(["dense", "sparse", "unused"], [dense, sparse, unused])
    assert finder.take() == ["sparse"]
    finder.check_grads(["unused"], [unused])
    assert finder.take() == []


def window_of(*, is_scaled: bool) -> Window:
    window = Window()
    window.add(Kind.PLAIN, 0.0, is_scaled=is_scaled)
    return window


def test_what_a_scaler_has_handled_is_not_told_later():
    """Its overflow belongs to another step than the gradient that ends the run."""
    world: Any = SimpleNamespace(world_size=1, rank=0, is_main=True)
    check = NonFinite("raise", world, LocalTransport())
    first, second = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    for parameter, is_scaled in ((first, True), (second, False)):
        first.grad, second.grad = torch.ones(2), torch.ones(2)
        parameter.grad[1] = math.inf
        check.end_window(["first", "second"], [first, second])
        if is_scaled:
            assert not check.act(window_of(is_scaled=True))
        else:
            with pytest.raises(NonFiniteError, match=r"on rank 0: 'second'\."):
                check.act(window_of(is_scaled=False))


@pytest.mark.parametrize(
    ("received", "difference"),
    [
        ([[("", {"lr": 0.1})], [("", {"lr": 0.1})]], None),
        ([[("", {"lr": 0.1})], [("", {"lr": 0.10000000001})]], None),
        ([[("", {"lr": 0.1})], [("", {"lr": 0.1000001})]], "lr is 0.1 on rank 0 and 0.1000001 on rank 1"),
        ([[("", {"lr": 0.0})], [("", {"lr": 6e-17})]], None),
        ([[("", {"b": (0.9, 1)})], [("", {"b": (0.9, 1.0)})]], "b is (0.9, 1) on rank 0 and (0.9, 1.0) on rank 1"),
        ([[("", {"b": (0.9, 1)})], [("", {"b": (0.9,)})]], "b is (0.9, 1) on rank 0 and (0.9,) on rank 1"),
        ([[("", {"rule": "a"})], [("", {"rule": "b"})]], "rule is 'a' on rank 0 and 'b' on rank 1"),
        ([[("", {"lr": math.nan})], [("", {"lr": math.nan})]], None),
        ([[("", {"lr": math.inf})], [("", {"lr": math.nan})]], "lr is inf on rank 0 and nan on rank 1"),
        ([[("", {})], [("", {"lr": 1})]], "lr is None on rank 0 and 1 on rank 1"),
        ([[("f", {"a": 1})], [("f", {"a": 1})], [("f", {"a": 2})]], "f: a is 1 on rank 0 and 2 on rank 2"),
        ([[("f", {})], [("f", {}), ("g", {})]], "g was called on rank 1 and not on rank 0"),
        ([[("f", {}), ("g", {})], [("g", {}), ("f", {})]], "rank 0 called f where rank 1 called g"),
    ],
)
def test_the_first_fact_that_differs_is_named(received, difference):
    assert find_difference(received) == difference
