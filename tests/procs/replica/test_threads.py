"""Wrapped models that are used from several threads at once: each exchanges with itself on the other ranks.

Threads come to their collectives in another order on every rank. `in_another_order` makes sure of that: on even ranks
one thread goes first, on odd ranks the other.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from torch import nn

import evenstep
from evenstep.errors import UsageError
from evenstep.replica.gradients.exchange import all_reduce
from evenstep.replica.gradients.exchange.all_reduce import AllReduceExchange
from evenstep.replica.monitors.checks import NonFinite
from evenstep.replica.normalization.sync_batchnorm import SyncLayers
from evenstep.transport.core import staged

NAMES = ("one", "other")
DELAY_S = 0.05
MEETINGS = [
    (AllReduceExchange, "learn_order"),
    (all_reduce, "sum_over_ranks"),
    (SyncLayers, "exchange_gradients"),
    (SyncLayers, "exchange_statistics"),
]


def in_both_threads(function):
    """Run `function(number)` in two threads at once, for number 0 and 1; what they returned."""
    with ThreadPoolExecutor(2) as pool:
        tasks = [pool.submit(function, number) for number in range(2)]
        return [task.result() for task in tasks]


def wait_for_the_other(number, rank):
    """Sleep where this thread is to come second on this rank."""
    if (number + rank) % 2:
        time.sleep(DELAY_S)


@contextlib.contextmanager
def in_another_order(owner, name, rank):
    """Let calls of a function begin in another order on every rank; threads are named by `NAMES`.

    Args:
        owner: What has the function.
        name: Of the function.
        rank: This rank.
    """
    usual = getattr(owner, name)

    def delayed(*args, **kwargs):
        wait_for_the_other(NAMES.index(threading.current_thread().name), rank)
        return usual(*args, **kwargs)

    setattr(owner, name, delayed)
    try:
        yield
    finally:
        setattr(owner, name, usual)


class Crossed(nn.Module):
    """Four layers of one shape, which two models use in opposite order: so the orders differ that they learn."""

    def __init__(self, number):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.number = number

    def forward(self, x):
        for layer in reversed(self.layers) if self.number else self.layers:
            x = torch.tanh(layer(x))
        return x


def dense(number):
    return Crossed(number), torch.randn


def with_an_embedding(number):
    layer = nn.EmbeddingBag(11, 3, sparse=True)
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(3, 1)), lambda n, *_, **__: torch.randint(11, (n, 2 + number))


def with_statistics(number):
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)), torch.randn


def train(kind, seed, step_with, num_steps):
    """Two models in two threads, beside each of them alone on all rows."""
    world = evenstep.init(quiet=True)
    torch.manual_seed(seed)
    made = [kind(number) for number in range(2)]
    networks = [module.double() for module, _ in made]
    counts = torch.randint(1, 5, (2, num_steps, world.world_size)).tolist()
    counts = [[[n + 1 for n in step] for step in each] for each in counts]
    inputs = [
        [torch.split(make(sum(n), 4, dtype=torch.float64), n) for n in counts[i]] for i, (_, make) in enumerate(made)
    ]
    expected = [copy.deepcopy(each) for each in networks]
    networks = [evenstep.SyncBatchNorm.convert_sync_batchnorm(each) for each in networks]
    models = [evenstep.DistributedDataParallel(each, world=world, bucket_cap_mb=1e-4) for each in networks]
    optimizers = [step_with(model) for model in models]

    def step(number):
        threading.current_thread().name = NAMES[number]
        model, optimizer = models[number], optimizers[number]
        for parts in inputs[number]:
            x = parts[world.rank]
            wait_for_the_other(number, world.rank)
            optimizer.zero_grad()
            model.backward(model(x).square().mean(), weight=len(x))
            wait_for_the_other(number, world.rank)
            optimizer.step()

    with contextlib.ExitStack() as stack:
        for owner, name in MEETINGS:
            stack.enter_context(in_another_order(owner, name, world.rank))
        in_both_threads(step)
    for number, network in enumerate(expected):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        for parts in inputs[number]:
            optimizer.zero_grad()
            network(torch.cat(parts)).square().mean().backward()
            optimizer.step()
        for got, wanted in zip(models[number].parameters(), network.parameters(), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


def plain(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def sharded(model):
    return evenstep.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)


def whole(model):
    return evenstep.ShardedOptimizer(model, torch.optim.SGD, elementwise=False, lr=0.1)


@pytest.mark.parametrize(
    ("kind", "step_with"),
    [
        (dense, plain),
        pytest.param(dense, sharded, marks=pytest.mark.extended),
        pytest.param(dense, whole, marks=pytest.mark.extended),
        pytest.param(with_an_embedding, plain, marks=pytest.mark.extended),
        pytest.param(with_statistics, plain, marks=pytest.mark.extended),
    ],
)
def test_models_in_two_threads_exchange_each_with_itself(ranks, fresh_seed, kind, step_with):
    ranks.run(train, 2, kind, fresh_seed, step_with, 2)


def train_as_on_gpus(seed):
    """NCCL carries no messages on the CPU; here a copy on the CPU stands for one on a GPU."""
    with mock.patch.object(staged, "_ONLY_GPU", (evenstep.init(quiet=True).transport.name,)):
        train(with_an_embedding, seed, plain, 2)
        train(dense, seed, plain, 2)


def test_messages_of_a_model_on_a_gpu_go_with_its_other_calls(ranks, fresh_seed):
    ranks.run(train_as_on_gpus, 2, fresh_seed)


def skipped():
    """Each model skips its own steps: the first those of rank 0, the second those of rank 1."""
    world = evenstep.init(quiet=True)
    models = [
        evenstep.DistributedDataParallel(Crossed(number), world=world, on_nonfinite="skip") for number in range(2)
    ]
    told = [[], []]

    def step(number):
        threading.current_thread().name = NAMES[number]
        for index in range(2 + number):
            x = torch.ones(1, 4)
            if world.rank == number and index:
                x /= 0
            wait_for_the_other(number, world.rank)
            models[number].backward(models[number](x).sum())
            told[number].append(all(p.grad is None for p in models[number].parameters()))

    staggered = in_another_order(NonFinite, "act", world.rank)
    with warnings.catch_warnings(record=True) as caught, staggered:
        warnings.simplefilter("always")
        in_both_threads(step)
    assert told == [[False, True], [False, True, True]]
    return sorted(str(each.message).partition(" All ranks")[0] for each in caught)


def test_models_in_two_threads_skip_each_its_own_steps(ranks):
    first, second = ranks.run(skipped, 2)
    assert second == []
    assert sum("on rank 0:" in text for text in first) == 1
    assert sum("on rank 1:" in text for text in first) == 2


def wrapped_in_two_threads():
    """Two models of one kind, each wrapped by its own thread: which of them is first depends on the rank."""
    evenstep.init(quiet=True).close()  # a model that an earlier test has left in this thread would count
    world = evenstep.init(quiet=True)
    first_has_wrapped, second_has_tried = threading.Event(), threading.Event()

    def wrap(number):
        is_second = (number + world.rank) % 2
        if is_second:
            assert first_has_wrapped.wait(60)
            with pytest.raises(UsageError) as told:
                evenstep.DistributedDataParallel(nn.Linear(3, 3), world=world)
            second_has_tried.set()
            return str(told.value)
        model = evenstep.DistributedDataParallel(nn.Linear(3, 3), world=world)
        first_has_wrapped.set()
        assert second_has_tried.wait(60)
        del model
        return ""

    told = "".join(in_both_threads(wrap))
    evenstep.DistributedDataParallel(nn.Linear(3, 3), world=world)  # both threads have ended
    return told


def test_models_are_wrapped_in_one_thread(ranks):
    for rank, told in enumerate(ranks.run(wrapped_in_two_threads, 2)):
        assert told.startswith(f"DistributedDataParallel on rank {rank}: a model is being wrapped in thread ")
        assert "Wrap all models in one thread before you start the others" in told
