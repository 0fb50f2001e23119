"""What `benchmarks/backend.py` compares, and the limit of `benchmarks/step.py`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests import modules


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    folder = modules.ROOT / "benchmarks"

    def load_one(name: str) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of torch's, when its optimizers are imported
            return modules.load(folder / f"{name}.py", monkeypatch)

    for name in ("measuring", "models"):  # which they import
        monkeypatch.setitem(sys.modules, name, load_one(name))
    return load_one


def test_results_have_the_same_bits_on_two_ranks_and_are_close_on_more(load: Callable[[str], Any]) -> None:
    explain = load("backend").explain_difference
    one, close = [torch.ones(3), torch.ones(2)], [torch.ones(3), torch.tensor([1.0, 1.0001])]
    assert explain(one, one, num_ranks=2) is None
    assert explain(one, close, num_ranks=2).startswith("tensor 1 differs by 0.0001")
    assert explain(one, close, num_ranks=3) is None
    assert explain(one, [torch.ones(3), torch.tensor([1.0, float("nan")])], num_ranks=3) is not None
    assert explain(one, one[:1], num_ranks=3) == "2 tensors over Gloo, 1 over evenstep"


def test_a_row_has_the_most_that_a_backend_could_gain(load: Callable[[str], Any]) -> None:
    backend = load("backend")
    measured = {"bare": [1.0, 1.0, 1.0], "DDP": [3.0, 3.0, 3.0], "tensor": [2.0, 2.0, 2.0]}
    seconds = {name: {"gloo": each, "evenstep": [each[0] / 2] * 3} for name, each in measured.items()}
    rows = backend.table(2, {"GPT": seconds}).splitlines()[4:]
    assert rows[1] == "| GPT | DDP | 3000.00 | 1500.00 | 2.00 (2.00 to 2.00) | 3.00 |"
    assert rows[2] == "| GPT | tensor | 2000.00 | 1000.00 | 2.00 (2.00 to 2.00) |  |"


def test_the_limit_is_bare_and_copies_and_a_barrier(load: Callable[[str], Any]) -> None:
    step = load("step")
    seconds = {"bare": [10.0] * 3, "evenstep": [14.0] * 3, "sharded": [16.0] * 3}
    parts = {step.COPIES: [3.0] * 3, step.SHARDED_COPIES: [5.0] * 3, step.BARRIER: [1.0] * 3}
    found = step.summarise({**seconds, **parts})
    assert list(found) == list(seconds)
    assert found["evenstep"]["over_limit"] == found["sharded"]["over_limit"] == [1.0] * 3
    assert step.over_limit({"one": found, "two": found}) == {"evenstep": 1.0, "sharded": 1.0}
    assert "over_limit" not in step.summarise(seconds)["evenstep"], "where the parts weren't measured"
    assert step.over_limit({"one": step.summarise(seconds)}) == {}
