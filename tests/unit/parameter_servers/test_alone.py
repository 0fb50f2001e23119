"""A world of one, and what is refused: no processes, no ports."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import evenstep
from evenstep.checkpoint.format.plan import Policy
from evenstep.errors import ConfigurationError, NonFiniteError, UsageError
from evenstep.parameter_servers.checkpoint import Checkpoints, loader_state, queue_state
from evenstep.parameter_servers.deciding.batch_queue import BatchQueue


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
        assert ps.staleness() == {0: 5}
        assert ps.staleness(by_worker=True) == {0: {0: 5}}
    for a, b in zip(plain.parameters(), ps.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


class _Batchwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.SyncBatchNorm(3)


REFUSED: list[tuple[Callable[[], Any], Callable[..., Any], dict[str, Any], str]] = [
    (model, lambda p: torch.optim.LBFGS([each for _, each in p]), {}, "LBFGS evaluates the loss"),
    (_Batchwise, sgd, {}, r"SyncBatchNorm \(norm\)"),
    (lambda: nn.DataParallel(model()), sgd, {}, "Return the plain model"),
    (lambda: nn.LazyLinear(3), sgd, {}, "has no shape yet"),
    (model, lambda p: None, {}, "return a torch.optim.Optimizer"),
    (model, lambda p: torch.optim.SGD(model().parameters(), lr=1), {}, "other parameters"),
    (model, sgd, {"mode": "hogwild"}, "mode='hogwild'"),
    (model, sgd, {"mode": "bounded"}, "max_staleness=None"),
    (model, sgd, {"mode": "async", "max_staleness": 4}, "only with mode='bounded'"),
    (model, sgd, {"scheduler_fn": lambda optimizer: None}, "return a schedule of the optimizer"),
    (model, sgd, {"scheduler_fn": torch.optim.lr_scheduler.ReduceLROnPlateau}, "needs a metric"),
    (model, sgd, {"every_steps": 3}, "only with checkpoint="),
    (model, sgd, {"checkpoint": ""}, "the path of a directory"),
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
        assert all(each.grad is None for each in ps.model.parameters()), "the step is forgotten"
    for call in (ps.step, ps.pull, ps.staleness):
        with pytest.raises(UsageError, match="inside"):
            call()
    with pytest.raises(UsageError, match="used before"):
        ps.__enter__()


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_batches_of_a_queue_that_loaders_workers_load(mode: str, num_workers: int):
    """In the order of the queue, each once, also where the loop is left with batches taken ahead."""
    with evenstep.parameter_server(model, sgd, mode=mode) as ps:
        options: dict[str, Any] = {"global_batch_size": 4, "shuffle": True, "seed": 3}
        loader = evenstep.DataLoader(list(range(30)), queue=ps.queue(), num_workers=num_workers, **options)
        plain = evenstep.DataLoader(list(range(30)), world=evenstep.World.alone(), **options)
        expected = [[batch.tolist() for batch in plain] for _ in range(3)]
        seen = []
        for batch in loader:
            ps.step()
            seen.append(batch.tolist())
        assert seen == expected[0]
        seen = []
        for batch in loader:
            ps.step()
            seen.append(batch.tolist())
            if len(seen) == 2:
                break
        for batch in loader:
            ps.step()
            seen.append(batch.tolist())
        assert sorted(seen) == sorted(expected[1] + expected[2]), "what was left comes in the epoch behind it"


def test_clipping_before_the_step_clips_the_mean(fresh_seed: int):
    """`p.grad` is the mean by weight at any time: torch's own function sees its norm."""
    torch.manual_seed(fresh_seed)
    with evenstep.parameter_server(model, lambda p: torch.optim.SGD(p, lr=1.0)) as ps:
        before = [each.detach().clone() for each in ps.model.parameters()]
        x = torch.randn(6, 4, dtype=torch.float64)
        for part in (slice(0, 2), slice(2, 6)):
            ps.backward(100 * ps.model(x[part]).square().mean(), weight=32 * len(x[part]))
        norm = torch.nn.utils.clip_grad_norm_(ps.model.parameters(), 0.5)
        ps.step()
        plain = model()
        plain.load_state_dict(dict(zip(plain.state_dict(), before, strict=True)))
        (100 * plain(x).square().mean()).backward()
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
        change = sum((a - b.detach()).square().sum() for a, b in zip(before, ps.model.parameters(), strict=True))
        assert float(change) ** 0.5 == pytest.approx(0.5, rel=1e-5)


def test_batches_that_are_taken_ahead():
    """`prefetch` sees each batch before the loop has the one before it; batches and their order stay the same."""
    calls: list[str] = []
    with evenstep.parameter_server(model, sgd, mode="async") as ps:
        queue = ps.queue(prefetch=lambda batch: calls.append(f"prefetch {batch.tolist()}"))
        loader = evenstep.DataLoader(list(range(10)), global_batch_size=4, queue=queue)
        for batch in loader:
            calls.append(f"loop {batch.tolist()}")
            ps.step()
        first, second, third = [0, 1, 2, 3], [4, 5, 6, 7], [8, 9]
        told = [("prefetch", second), ("loop", first), ("prefetch", third), ("loop", second), ("loop", third)]
        assert calls == [f"{what} {batch}" for what, batch in told]
        with pytest.raises(UsageError, match=r"call ps.step once for each batch"):
            for _ in loader:
                pass
        with pytest.raises(ConfigurationError, match=r"prefetch=3"):
            ps.queue(prefetch=3)  # type: ignore[arg-type]


def test_a_loader_with_other_batches_does_not_go_on_in_the_middle_of_an_epoch():
    """It would leave samples out, or train on them twice."""
    facts = {"global_batch_size": 4, "num_samples": 24}
    queue = BatchQueue()
    queue.load_state(queue_state({"epoch": 2, "position": 12, "data": facts}))
    assert "has another loader" in queue.take(0, (1, 2, 0), 3, json.dumps(facts | {"global_batch_size": 8})).failure
    assert queue.take(0, (1, 2, 0), 6, json.dumps(facts | {"weights": 7})).batch == ((1, 2, 0), 3)
    assert "has another loader" in queue.take(1, (1, 2, 0), 6, json.dumps(facts)).failure
    other = json.dumps(facts | {"global_batch_size": 8})
    assert queue.take(0, (1, 3, 0), 3, other).batch == ((1, 2, 0), 4)
    queue.load_state(queue_state({"epoch": 2, "position": 0, "data": facts}))
    assert queue.take(0, (1, 2, 0), 3, other).batch == ((1, 2, 0), 0)


def train_from_queue(folder: Path, num_epochs: int, *, leaves_at: int = -1) -> tuple[dict[str, Tensor], list[int]]:
    """(the parameters, the samples that were pushed); momentum and schedule make the order of steps matter."""
    torch.manual_seed(1)
    seen: list[int] = []
    with (
        contextlib.suppress(KeyboardInterrupt),
        evenstep.parameter_server(
            model, sgd, mode="sync", scheduler_fn=schedule, checkpoint=folder, every_steps=2
        ) as ps,
    ):
        loader = evenstep.DataLoader(list(range(10)), global_batch_size=3, shuffle=True, seed=3, queue=ps.queue())
        for _ in loader.epochs(num_epochs):
            for batch in loader:
                if len(seen) >= leaves_at >= 0:
                    raise KeyboardInterrupt
                ps.backward(loss_of(ps.model, batch), weight=len(batch))
                ps.step()
                seen += batch.tolist()
    return {name: each.detach().clone() for name, each in ps.model.state_dict().items()}, seen


@pytest.mark.parametrize("prefetches", [False, True])
def test_a_look_at_a_first_batch_is_no_epoch_of_the_queue(prefetches: bool):
    """Every sample once: what was looked at comes again, and nothing else does."""
    with evenstep.parameter_server(model, sgd, mode="sync") as ps:
        queue = ps.queue(prefetch=lambda batch: None) if prefetches else ps.queue()
        loader = evenstep.DataLoader(list(range(10)), global_batch_size=3, shuffle=True, seed=3, queue=queue)
        next(iter(loader))
        seen = []
        for _ in loader.epochs(2):
            for batch in loader:
                ps.backward(loss_of(ps.model, batch), weight=len(batch))
                ps.step()
                seen += batch.tolist()
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def loss_of(trained: nn.Module, batch: Tensor) -> Tensor:
    x = torch.stack([torch.linspace(0, 1, 4, dtype=torch.float64) * (1 + each) for each in batch.tolist()])
    return F.cross_entropy(trained(x), batch % 3)


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path):
    """Interrupted in the middle of an epoch: the same parameters, every sample once."""
    expected, all_samples = train_from_queue(tmp_path / "through", 3)
    _, before = train_from_queue(tmp_path / "parts", 3, leaves_at=12)
    assert len(before) == 13
    found, after = train_from_queue(tmp_path / "parts", 3)
    first = 30 - len(after)  # with the newest checkpoint: that of step 2, or of step 4 if it was written by then
    assert first in (6, 10)
    assert all_samples == before[:first] + after
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name


@pytest.mark.parametrize(("since_s", "version", "is_due"), [(50, 1, False), (70, 1, True), (70, 0, False)])
def test_a_save_by_time_is_due_after_so_many_minutes_if_there_was_an_update(since_s: int, version: int, is_due: bool):
    saved: Any = SimpleNamespace(_last=0, _saved_at=time.monotonic() - since_s, _policy=Policy(every_minutes=1.0))
    assert Checkpoints.is_due(saved, version) is is_due


def plain_run(folder: Path, num_epochs: int) -> tuple[dict[str, Tensor], list[int]]:
    """A script without servers, whose checkpoints have the same objects."""
    torch.manual_seed(1)
    world = evenstep.World.alone(device="cpu")
    trained = model()
    optimizer = sgd(list(trained.named_parameters()))
    loader = evenstep.DataLoader(list(range(10)), global_batch_size=3, shuffle=True, seed=3, world=world)
    seen: list[int] = []
    with evenstep.Checkpointer(
        folder,
        every_steps=2,
        world=world,
        model=trained,
        optimizer=optimizer,
        loader=loader,
        scheduler=schedule(optimizer),
    ) as checkpoint:
        rate = checkpoint.objects["scheduler"]
        checkpoint.resume()
        for _ in loader.epochs(num_epochs):
            for batch in loader:
                loss_of(trained, batch).backward()
                optimizer.step()
                rate.step()
                optimizer.zero_grad()
                seen += batch.tolist()
                checkpoint.step()
    return {name: each.detach().clone() for name, each in trained.state_dict().items()}, seen


@pytest.mark.parametrize("first", ["servers", "plain"])
def test_a_plain_run_goes_on_from_servers_and_the_reverse(first: str, tmp_path: Path):
    expected, samples = plain_run(tmp_path / "through", 3)
    if first == "servers":
        _, before = train_from_queue(tmp_path / "parts", 2)
        found, after = plain_run(tmp_path / "parts", 3)
    else:
        _, before = plain_run(tmp_path / "parts", 2)
        found, after = train_from_queue(tmp_path / "parts", 3)
    assert before + after == samples
    for name, value in expected.items():
        torch.testing.assert_close(value, found[name], rtol=0, atol=1e-12)


def test_batches_that_were_done_out_of_order_are_left_out():
    """As a checkpoint of several workers has them, by a loader without a queue; its own state goes on saying so."""
    data, world = list(range(25)), evenstep.World.alone(device="cpu")
    loader = evenstep.DataLoader(data, global_batch_size=3, shuffle=True, seed=3, world=world)
    epochs = [[batch.tolist() for batch in loader] for _ in range(3)]
    queue = BatchQueue()
    facts = json.dumps(loader._source.facts(), sort_keys=True)
    for number in range(14):  # 9 batches of epoch 0, 5 of epoch 1
        batch = queue.take(number, (1, number // 9, 0), 9, facts).batch
        assert batch is not None
        if number not in (4, 11):
            queue.finish(number, [batch])
    state = json.loads(json.dumps(loader_state(queue.state())))
    for stop in (0, 1):
        fresh = evenstep.DataLoader(data, global_batch_size=3, shuffle=True, seed=3, world=world)
        fresh.load_state_dict(state)
        if stop:  # in between
            next(iter(fresh.epochs(1)))
            fresh.load_state_dict(json.loads(json.dumps(fresh.state_dict())))
        found = [[batch.tolist() for batch in fresh] for _ in fresh.epochs(3)]
        assert found == [[epochs[0][4]], [epochs[1][2], *epochs[1][5:]], epochs[2]]
    again = BatchQueue()
    again.load_state(queue_state(state))
    assert again.take(0, (1, 0, 0), 9, facts).batch == ((1, 0, 0), 4)
    assert again.take(0, (1, 0, 0), 9, facts).batch is None
    found = [again.take(0, (1, 1, 0), 9, facts).batch for _ in range(6)]
    assert [each and each[1] for each in found] == [2, 5, 6, 7, 8, None]


def test_a_loop_that_is_left_behind_a_backward_pass():
    """The batch counts with the step that comes. Never twice."""
    with evenstep.parameter_server(model, sgd, mode="async") as ps:
        loader = evenstep.DataLoader(list(range(12)), global_batch_size=4, queue=ps.queue())
        done = []
        for stop in (4, 12):
            loader.set_epoch(0)
            for batch in loader:
                ps.backward(loss_of(ps.model, batch), weight=4)
                done += batch.tolist()
                if batch[0] == stop:
                    break
                ps.step()
            ps.step()
        assert sorted(done) == list(range(12))
