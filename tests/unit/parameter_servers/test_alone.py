"""A world of one, and what is refused: no processes, no ports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import evenstep
from evenstep.errors import ConfigurationError, NonFiniteError, UsageError


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(("mode", "bound"), [("sync", None), ("async", None), ("bounded", 2)])
def test_one_process_trains_as_without(mode: str, bound: int | None, fresh_seed: int):
    torch.manual_seed(fresh_seed)
    plain = model()
    optimizer = sgd(plain.parameters())
    with evenstep.parameter_server(model, sgd, mode=mode, max_staleness=bound) as ps:
        ps.model.load_state_dict(plain.state_dict())
        # The servers' values count, so begin from theirs.
        ps.pull()
        plain.load_state_dict(ps.model.state_dict())
        for _ in range(5):
            x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(3, (6,))
            F.cross_entropy(plain(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            for part in (slice(0, 2), slice(2, 6)):  # accumulated
                ps.backward(F.cross_entropy(ps.model(x[part]), y[part]), weight=len(x[part]))
            ps.backward(torch.tensor(float("nan"), requires_grad=True), weight=0)
            ps.step()
        assert ps.staleness() == [{0: 5}]
    for a, b in zip(plain.parameters(), ps.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_parameters_without_gradient_stay(fresh_seed: int):
    """An optimizer with weight decay would change them, given zeros."""
    torch.manual_seed(fresh_seed)
    with evenstep.parameter_server(model, lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.5)) as ps:
        before = ps.model[2].weight.detach().clone()  # type: ignore[index]
        ps.backward(ps.model[0](torch.randn(2, 4, dtype=torch.float64)).sum())  # type: ignore[index, operator]
        ps.step()
        assert torch.equal(before, ps.model[2].weight)  # type: ignore[index]


class _Batchwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.SyncBatchNorm(3)


REFUSED: list[tuple[Callable[[], Any], Callable[..., Any], dict[str, Any], str]] = [
    (model, lambda p: torch.optim.LBFGS([each for _, each in p]), {}, "LBFGS evaluates the loss"),
    (_Batchwise, sgd, {}, r"SyncBatchNorm \(norm\)"),
    (lambda: evenstep.SyncBatchNorm(3), sgd, {}, "SyncBatchNorm"),
    (lambda: nn.DataParallel(model()), sgd, {}, "Return the plain model"),
    (lambda: nn.LazyLinear(3), sgd, {}, "has no shape yet"),
    (nn.ReLU, sgd, {}, "no parameter"),
    (lambda: None, sgd, {}, "returned a NoneType"),
    (model, lambda p: None, {}, "return a torch.optim.Optimizer"),
    (model, lambda p: torch.optim.SGD(model().parameters(), lr=1), {}, "other parameters"),
    (model, sgd, {"mode": "hogwild"}, "mode='hogwild'"),
    (model, sgd, {"mode": "bounded"}, "max_staleness=None"),
    (model, sgd, {"mode": "bounded", "max_staleness": -1}, "max_staleness=-1"),
    (model, sgd, {"mode": "async", "max_staleness": 4}, "only with mode='bounded'"),
    (model, sgd, {"delay_compensation": -1}, "delay_compensation=-1"),
    (model, sgd, {"mode": "sync", "delay_compensation": 0.1}, "no gradient is late"),
    (model, sgd, {"device": "toaster"}, "device='toaster'"),
    (model, sgd, {"timeout_s": 0}, "timeout_s=0"),
    (3, sgd, {}, "model_fn=3"),  # type: ignore[list-item]
]


@pytest.mark.parametrize(("model_fn", "optimizer_fn", "options", "text"), REFUSED)
def test_what_is_refused(model_fn: Any, optimizer_fn: Any, options: dict[str, Any], text: str):
    with pytest.raises(ConfigurationError, match=text), evenstep.parameter_server(model_fn, optimizer_fn, **options):
        pass


def test_the_handle_says_what_is_wrong():
    with evenstep.parameter_server(model, sgd) as ps:
        with pytest.raises(ConfigurationError, match="a tensor of one number"):
            ps.backward(torch.zeros(2))
        for weight in (-1, float("nan"), "many"):
            with pytest.raises(ConfigurationError, match="weight"):
                ps.backward(ps.model(torch.zeros(1, 4, dtype=torch.float64)).sum(), weight=weight)  # type: ignore[arg-type]
        ps.backward(ps.model(torch.full((1, 4), float("inf"), dtype=torch.float64)).sum())
        with pytest.raises(NonFiniteError, match=r"worker 0, step 0: the gradient of '0.weight'"):
            ps.step()
    for call in (ps.step, ps.pull, ps.staleness):
        with pytest.raises(UsageError, match="inside"):
            call()
    with pytest.raises(UsageError, match="used before"):
        ps.__enter__()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_batches_from_a_queue(mode: str):
    data = list(range(10))
    with evenstep.parameter_server(model, sgd, mode=mode) as ps:
        loader = evenstep.DataLoader(data, global_batch_size=4, shuffle=True, seed=3, queue=ps.queue())
        plain = evenstep.DataLoader(data, global_batch_size=4, shuffle=True, seed=3, world=evenstep.World.alone())
        for _ in range(2):
            seen = []
            for batch in loader:
                ps.step()
                seen.append(batch.tolist())
            assert seen == [batch.tolist() for batch in plain]
        for call in (loader.state_dict, lambda: loader.gather(torch.zeros(1))):
            with pytest.raises(UsageError, match="queue="):
                call()
        for options, text in (
            ({"num_workers": 2}, "num_workers=2 with queue="),
            ({"world": evenstep.World.alone()}, "world and queue exclude each other"),
            ({"queue": 3}, r"queue=3; ps.queue\(\)"),
        ):
            with pytest.raises(ConfigurationError, match=text):
                evenstep.DataLoader(data, 4, **({"queue": ps.queue()} | options))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="inside"):
        next(iter(loader))


def test_sparse_gradients_are_refused():
    with evenstep.parameter_server(lambda: nn.Embedding(4, 2, sparse=True), sgd) as ps:
        ps.backward(ps.model(torch.tensor([1])).sum())
        with pytest.raises(UsageError, match="'weight' is sparse"):
            ps.step()
