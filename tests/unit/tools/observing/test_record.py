"""The one recorder: what subscribers are told, and what holds for all moments."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import TensorDataset

import evenstep
from evenstep.tools.observing.changes import replace_batch_sizes
from evenstep.tools.observing.patching import Patches
from evenstep.tools.observing.record import Ended, Loop, Recorder, Subscriber


@pytest.fixture
def patches() -> Iterator[Patches]:
    with Patches() as made:
        yield made


class Watch(Subscriber):
    """Writes down what it is told of a step, in words."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def module(self, module: nn.Module, args: Any, kwargs: Any, depth: int) -> Ended:
        self.told.append(("module", type(module).__name__, depth))
        return lambda: self.told.append("module ended")

    def backward(self, root: Any, weight: Any, scale: float) -> Ended:
        self.told.append(("backward", root, weight, scale))
        return lambda: self.told.append("backward ended")


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_pass_that_is_computed_again_is_told_once(reentrant: bool, patches: Patches) -> None:
    watch, layer = Watch(), nn.Linear(2, 2)
    Recorder(watch).install(patches)
    x = torch.ones(1, 2, requires_grad=True)
    loss = checkpoint(layer, x, use_reentrant=reentrant).sum()
    loss.backward()
    assert [told[0] for told in watch.told if isinstance(told, tuple)] == ["module", "backward"]
    assert watch.told.count("backward ended") == 1
    layer(x).sum().backward()
    assert [told[0] for told in watch.told if isinstance(told, tuple)] == ["module", "backward"] * 2


def test_a_backward_pass_is_told_with_its_root_its_weight_and_the_scale_of_its_loss(patches: Patches) -> None:
    watch, scaler = Watch(), torch.amp.GradScaler("cpu", init_scale=8.0)
    Recorder(watch).install(patches)
    x = torch.ones(3, requires_grad=True)
    loss = (2 * x).sum()
    scaled = scaler.scale(loss)
    scaled.backward(retain_graph=True)
    weight = torch.tensor(0.5)
    torch.autograd.backward([loss], [weight], retain_graph=True)
    passes = [told for told in watch.told if isinstance(told, tuple)]
    assert [(root is each, scale) for (_, root, _, scale), each in zip(passes, (scaled, loss), strict=True)] == [
        (True, 8.0),
        (True, 1.0),
    ]
    assert [told[2] for told in passes] == [None, weight]
    with pytest.raises(RuntimeError):
        (2 * x).backward()  # no scalar
    assert watch.told[-1] == "backward ended"
    watch.told.clear()
    loss.backward()
    assert watch.told[0][0] == "backward"


class Steps(Subscriber):
    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def step_begins(self, optimizer: Any) -> None:
        self.told.append((type(optimizer).__name__, "begins"))

    def step_ended(self, optimizer: Any, *, is_counted: bool) -> None:
        self.told.append((type(optimizer).__name__, self.recorder.num_steps, is_counted))


def test_steps_of_the_busiest_optimizer_count(patches: Patches) -> None:
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    first, other = torch.optim.SGD([p], lr=0.1), torch.optim.Adam([p])
    steps = Steps()
    Recorder(steps).install(patches)
    for optimizer in (first, other, other, first):
        optimizer.step()
    ended = [told for told in steps.told if len(told) == 3]
    assert ended == [("SGD", 1, True), ("Adam", 1, False), ("Adam", 2, True), ("SGD", 2, False)]
    assert steps.told[0] == ("SGD", "begins")
    patches.restore()
    first.step()
    assert len(steps.told) == 8


class Calls(Subscriber):
    def __init__(self) -> None:
        self.told: list[Any] = []

    def collective(self, op: str, args: Any, kwargs: Any) -> Ended:
        self.told.append((op, args, kwargs))
        return lambda: self.told.append(f"{op} ended")


def test_a_collective_inside_another_one_is_not_told(patches: Patches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "broadcast", lambda *args, **kwargs: "sent")
    monkeypatch.setattr(dist, "all_gather_object", lambda *args, **kwargs: dist.broadcast(1))
    calls = Calls()
    Recorder(calls).install(patches)
    assert dist.all_gather_object([], 3, group=None) == "sent"
    assert calls.told == [("all_gather_object", ([], 3), {"group": None}), "all_gather_object ended"]
    assert dist.broadcast(2) == "sent"
    assert calls.told[2:] == [("broadcast", (2,), {}), "broadcast ended"]
    named = {"op": "max", "original": 1, "moment": 2, "module": 3}
    assert dist.broadcast(3, **named) == "sent", "names of a call's own arguments are the script's"
    assert calls.told[4:] == [("broadcast", (3,), named), "broadcast ended"]


# ---------------------------------------------------------------------- loops over loaders


class Reader(Subscriber):
    """Counts what is read; loops end and go on as it is told."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.waits: list[tuple[int, int]] = []
        self.ended: list[tuple[int, bool]] = []
        self.cut: Callable[[Loop], bool] = lambda loop: False
        self.repeat: Callable[[Loop], bool] = lambda loop: False

    def cuts(self, loop: Loop) -> bool:
        return self.cut(loop)

    def repeats(self, loop: Loop) -> bool:
        return self.repeat(loop)

    def batch(self, loop: Loop, batch: Any) -> None:
        self.batches.append(batch)

    def loop_ended(self, loop: Loop, *, is_cut: bool) -> None:
        self.ended.append((loop.num_batches, is_cut))

    def waited(self, began_ns: int, ended_ns: int) -> None:
        self.waits.append((began_ns, ended_ns))


@pytest.fixture
def reader(patches: Patches) -> Reader:
    made = Reader()
    Recorder(made).install(patches)
    return made


def test_loaders_of_both_kinds_are_seen_once(reader: Reader, patches: Patches) -> None:
    """evenstep's loader with workers stands on torch's, which nobody waits for a second time."""
    replace_batch_sizes(patches, lambda size: 4 if size > 1 else size)
    data = TensorDataset(torch.arange(20.0), torch.arange(20))
    world = evenstep.World.alone()
    for loader in (
        TorchDataLoader(data, batch_size=10, shuffle=True),
        TorchDataLoader(data, 10),
        evenstep.DataLoader(data, global_batch_size=4, world=world),
        evenstep.DataLoader(data, global_batch_size=4, num_workers=1, world=world),
    ):
        reader.waits.clear()
        reader.batches.clear()
        sizes = [len(x) for x, _ in loader]
        assert sizes == [4] * 5, "torch's loaders have the batch that was asked for"
        assert [len(x) for x, _ in reader.batches] == sizes
        assert len(reader.waits) == 1 + 5 + 1, "making the iterator, five batches, and the end"
        assert all(began <= ended for began, ended in reader.waits)
    assert reader.ended == [(5, False)] * 4


def test_a_loader_that_another_thread_reads_is_left_alone(reader: Reader) -> None:
    loader = TorchDataLoader(TensorDataset(torch.arange(20.0)), batch_size=4)
    begun = iter(loader)
    counts: list[int] = []
    for read in (lambda: counts.append(sum(1 for _ in loader)), lambda: counts.append(sum(1 for _ in begun))):
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
    assert counts == [5, 5]
    assert (reader.batches, reader.ended) == ([], [])
