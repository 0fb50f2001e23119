"""Stopping and resuming a `DataLoader`: nothing twice, nothing missing, on whatever ranks. Ranks are stubs here."""

from __future__ import annotations

import contextlib
import json
import random
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import evenstep
from evenstep import DataLoader
from evenstep.data.position import Mark, Progress
from evenstep.errors import ConfigurationError, UsageError
from evenstep.replica.batches import input_watchers
from tests.stub_worlds import stub_world

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # a machine of one core


def _optimizer() -> torch.optim.Optimizer:
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    return torch.optim.SGD([weight], lr=0.1)


def _loaders(size: int, world_size: int, **arguments: Any) -> list[DataLoader]:
    return [
        DataLoader(range(size), collate_fn=list, world=stub_world(r, world_size), **arguments)
        for r in range(world_size)
    ]


def _steps(loaders: list[DataLoader]) -> Iterator[list[int]]:
    """One epoch in global batches: ranks' shares one after the other, every rank with the same number of steps."""
    return (list(chain.from_iterable(shares)) for shares in zip(*loaders, strict=True))


@st.composite
def _divisions(draw: st.DrawFn) -> tuple[int, dict[str, Any]]:
    """A size, and arguments that divide it."""
    size = draw(st.one_of(st.integers(1, 60), st.integers(1, 10_000)))
    arguments: dict[str, Any] = {"shuffle": draw(st.booleans()), "seed": draw(st.integers(0, 3))}
    if draw(st.booleans()):
        lengths = torch.randint(1, 50, (size,), generator=torch.Generator().manual_seed(size))
        return size, arguments | {"max_tokens": max(50, size // 2), "lengths": lengths}
    batch = draw(st.integers(max(7, size // 40), max(7, size)))
    return size, arguments | {"global_batch_size": batch, "drop_last": size >= batch and draw(st.booleans())}


@settings(max_examples=40, deadline=None)
@given(_divisions(), st.integers(0, 3), st.lists(st.tuples(st.integers(1, 7), st.integers(0, 12)), max_size=5))
def test_any_stops_on_any_ranks_give_the_epoch_of_one_rank(
    division: tuple[int, dict[str, Any]], epoch: int, stops: list[tuple[int, int]]
) -> None:
    size, arguments = division
    (alone,) = _loaders(size, 1, **arguments)
    alone.set_epoch(epoch)
    expected = list(_steps([alone]))
    samples = sorted(chain.from_iterable(expected))
    if arguments.get("drop_last"):
        batch = arguments["global_batch_size"]
        assert len(set(samples)) == len(samples) == size // batch * batch
    else:
        assert samples == list(range(size))

    optimizer = _optimizer()
    state = None
    seen: list[list[int]] = []
    for world_size, num_steps in [*stops, (3, len(expected))]:
        loaders = _loaders(size, world_size, **arguments)
        for loader in loaders:
            if state is None:
                loader.set_epoch(epoch)
            else:
                loader.load_state_dict(state)
            assert len(loader) == len(expected) or loader.epoch != epoch
        if loaders[0].epoch != epoch:
            break
        for batch in islice(_steps(loaders), num_steps):
            seen.append(batch)
            optimizer.step()
        states = [loader.state_dict() for loader in loaders]
        assert all(other == states[0] for other in states)
        state = json.loads(json.dumps(states[0]))
    assert seen == expected


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_what_was_fetched_ahead_or_not_used_is_not_consumed(num_workers: int) -> None:
    """Accumulation over two batches: a state between them is that before the first."""
    (loader,) = _loaders(40, 1, global_batch_size=4, shuffle=True, num_workers=num_workers)
    (reference,) = _loaders(40, 1, global_batch_size=4, shuffle=True)
    order = list(_steps([reference]))
    optimizer = _optimizer()
    positions = []
    for step, _ in enumerate(loader):
        before = loader.position
        if step % 2:
            optimizer.step()
        positions.append((before, loader.position))
        if step == 5:
            state = loader.state_dict()
            break
    assert positions == [(0, 0), (0, 8), (8, 8), (8, 16), (16, 16), (16, 24)]
    resumed = _loaders(40, 2, global_batch_size=4, shuffle=True, num_workers=0 if num_workers else 1)
    for each in resumed:
        each.load_state_dict(state)
        assert (each.epoch, each.position) == (0, 24)
    assert list(_steps(resumed)) == order[6:]
    assert [each.epoch for each in resumed] == [1, 1]


def _drawn(index: int) -> tuple[float, ...]:
    """A sample, and a number of each of the three streams."""
    return float(index), random.random(), float(torch.rand(1, dtype=torch.float64)), float(numpy.random.rand())


class _Drawing:
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[float, ...]:
        return _drawn(index)


class _Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(24))


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("persistent_workers", [False, True])
def test_what_workers_draw_for_a_batch_is_the_same_after_a_resume(
    persistent_workers: bool, is_stream: bool, fresh_seed: int
) -> None:
    def loader(num_workers: int) -> DataLoader:
        arguments: dict[str, Any] = {"seed": fresh_seed, "num_workers": num_workers}
        arguments |= {"persistent_workers": persistent_workers}
        if is_stream:
            collate = lambda records: [_drawn(each) for each in records]  # noqa: E731
            return DataLoader(_Stream(), 3, collate_fn=collate, world=stub_world(0, 1), **arguments)
        return DataLoader(_Drawing(), 3, collate_fn=list, world=stub_world(1, 2), **arguments)

    undisturbed = loader(2)
    expected = [batch for _ in undisturbed.epochs(2) for batch in undisturbed]
    assert len({drawn for batch in expected for sample in batch for drawn in sample[1:]}) == 3 * sum(map(len, expected))
    for num_batches in (3, 11):  # in the first epoch, in the second
        stopped = loader(2)
        batches = (batch for _ in stopped.epochs(2) for batch in stopped)
        assert list(islice(batches, num_batches)) == expected[:num_batches]
        stopped.commit()
        state = stopped.state_dict()
        batches.close()
        resumed = loader(1)  # and on another number of workers
        resumed.load_state_dict(state)
        assert [batch for _ in resumed.epochs(2) for batch in resumed] == expected[num_batches:]


def test_a_resumed_script_makes_the_loops_that_it_would_have_made() -> None:
    """Two loops of epochs, stopped everywhere; with code at the end of each epoch, which runs once."""

    def script(loader: DataLoader, stop_after: int) -> tuple[list[Any], dict[str, Any] | None]:
        optimizer, done = _optimizer(), []
        for name, num_epochs in (("warm-up", 1), ("training", 2)):
            for epoch in loader.epochs(num_epochs):
                for batch in loader:
                    optimizer.step()
                    done.append((name, epoch, batch))
                    stop_after -= 1
                    if stop_after == 0:
                        return done, loader.state_dict()
                done.append((name, epoch, "end"))
        return done, None

    whole, _ = script(_loaders(10, 1, global_batch_size=4, shuffle=True)[0], 0)
    assert [entry[:2] for entry in whole if entry[2] == "end"] == [("warm-up", 0), ("training", 1), ("training", 2)]
    for stop_after in range(1, 9):
        first, state = script(_loaders(10, 1, global_batch_size=4, shuffle=True)[0], stop_after)
        assert state is not None
        (loader,) = _loaders(10, 1, global_batch_size=4, shuffle=True)
        loader.load_state_dict(state)
        second, _ = script(loader, 0)
        assert first + second == whole, stop_after


def test_samples_left_of_an_accumulation_come_again() -> None:
    optimizer = _optimizer()
    (loader,) = _loaders(12, 1, global_batch_size=4)
    for step, _ in enumerate(loader):
        if step % 2:
            optimizer.step()
    assert loader.state_dict()["position"] == 8
    optimizer.step()  # the leftover is used after the loop, as many scripts do
    assert (loader.state_dict()["epoch"], loader.position) == (1, 0)


# ---------------------------------------------------------------------- consumers that read ahead


def _read_ahead(loader: DataLoader, num_ahead: int) -> Iterator[Any]:
    """The loader's batches, each handed on when so many more have been read."""
    batches, read = iter(loader), []
    for batch in batches:
        read.append(batch)
        if len(read) > num_ahead:
            yield read.pop(0)
    yield from read


def _numbers_of_two_columns(size: int) -> TensorDataset:
    return TensorDataset(torch.arange(float(2 * size)).reshape(size, 2))


@pytest.mark.parametrize("given", ["the tensor", "a view", "a named argument"])
@pytest.mark.parametrize("num_steppings", [1, 2])
def test_a_step_counts_the_batches_that_the_model_was_given(given: str, num_steppings: int, fresh_seed: int) -> None:
    """Behind consumers that read ahead and accumulate; some loops step two optimizers for each batch."""
    draw = random.Random(fresh_seed)
    num_ahead, num_accumulated = draw.randint(0, 3), draw.randint(1, 3)
    num_batches = num_accumulated * draw.randint(2, 5) + draw.randint(0, num_accumulated - 1)
    world = stub_world()
    loader = DataLoader(_numbers_of_two_columns(4 * num_batches), 4, world=world)
    model = evenstep.DistributedDataParallel(nn.Linear(2, 1), world=world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for epoch in loader.epochs(2):
            for num_used, (x,) in enumerate(_read_ahead(loader, num_ahead), 1):
                is_last = num_used % num_accumulated == 0
                with contextlib.nullcontext() if is_last else model.no_sync():
                    rows = x[:, :] if given == "a view" else x
                    out = model(input=rows) if given == "a named argument" else model(rows)
                    model.backward(out.mean())
                for _ in range(num_steppings if is_last else 0):
                    optimizer.step()
                    expected = (epoch, 4 * num_used) if num_used < num_batches else (epoch + 1, 0)
                    state = loader.state_dict()
                    if num_used < num_batches or num_ahead > 0:
                        assert (state["epoch"], state["position"]) == expected, (num_ahead, num_accumulated)
            if num_batches % num_accumulated:
                optimizer.step()
            assert loader.state_dict()["epoch"] == epoch + 1
        assert not input_watchers, "the model's short way is free again"
    finally:
        world.close()


def test_a_step_before_which_no_batch_was_recognised_is_as_far_behind_as_the_one_before() -> None:
    """The consumer reads one batch ahead, and the model is given a copy in the second step."""
    progress, batches = Progress(), [torch.zeros(4) for _ in range(3)]
    progress.start()
    for number in (1, 2):
        progress.add(Mark(0, 4 * number), batches[number - 1])
    progress.see(batches[0])
    progress.commit()
    assert progress.committed.position == 4
    progress.add(Mark(0, 12), batches[2])
    progress.commit()
    assert progress.committed.position == 8


def test_a_consumer_that_reads_ahead_and_gives_the_model_copies_is_warned_of() -> None:
    world = stub_world()
    loader = DataLoader(_numbers_of_two_columns(24), 4, world=world)
    model = evenstep.DistributedDataParallel(nn.Linear(2, 1), world=world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(num_ahead: int) -> None:
        for (x,) in _read_ahead(loader, num_ahead):
            model.backward(model(x / 255).mean())
            optimizer.step()

    try:
        train(0)
        with pytest.warns(UserWarning, match="reads batches ahead .*convert them in collate_fn"):
            train(1)
    finally:
        world.close()


@pytest.mark.parametrize("is_after_the_epoch", [False, True])
def test_a_rest_of_an_accumulation_is_no_reading_ahead(is_after_the_epoch: bool) -> None:
    """Of a single whole accumulation; warnings are errors in tests. A later step is that of another loop."""
    loader = DataLoader(_numbers_of_two_columns(24), 4, world=stub_world())
    optimizer = _optimizer()
    for number, _ in enumerate(loader, 1):
        if number == 4 or (number == 6 and not is_after_the_epoch):
            optimizer.step()
    for _ in range(2):
        optimizer.step()
    assert loader.state_dict()["epoch"] == 1


def test_training_on_two_iterations_at_once_is_warned_of() -> None:
    (loader,) = _loaders(24, 1, global_batch_size=4, shuffle=True)
    (reference,) = _loaders(24, 1, global_batch_size=4, shuffle=True)
    expected = list(zip(list(reference), list(reference), strict=True))
    assert list(zip(loader, loader, strict=True)) == expected, "nothing trains, so the position doesn't matter"
    optimizer = _optimizer()
    with pytest.warns(UserWarning, match="an iteration of this loader continues after a newer one began"):
        deque((optimizer.step() for _ in zip(loader, loader, strict=True)), maxlen=0)


def test_persistent_workers_serve_one_iteration_at_a_time() -> None:
    (loader,) = _loaders(24, 1, global_batch_size=4, num_workers=1, persistent_workers=True)
    older, newer = iter(loader), iter(loader)
    next(older)
    assert len(list(newer)) == 6
    with pytest.raises(UsageError, match="persistent workers serve one at a time"):
        next(older)


def test_without_an_optimizer_epochs_count_and_commit_counts_batches() -> None:
    (loader,) = _loaders(12, 1, global_batch_size=4)
    for _ in loader:
        assert loader.position == 0
    assert loader.state_dict()["epoch"] == 1
    for step, _ in enumerate(loader):
        loader.commit()
        assert (loader.state_dict()["epoch"], loader.position) == (1, 4 * step + 4)


def test_torchs_own_loops_keep_the_place_and_another_epoch_drops_it() -> None:
    optimizer = _optimizer()
    (loader,) = _loaders(12, 1, global_batch_size=4)
    loader.set_epoch(3)
    next(batches := iter(loader))
    optimizer.step()
    batches.close()
    state = loader.state_dict()
    (resumed,) = _loaders(12, 1, global_batch_size=4)
    resumed.load_state_dict(state)
    lengths = []
    for epoch in range(3, 5):
        resumed.set_epoch(epoch)
        lengths.append(len(list(resumed)))
    assert lengths == [2, 3]
    resumed.load_state_dict(state)
    with pytest.warns(UserWarning, match=r"a state at epoch 3, position 4, was loaded and is dropped"):
        resumed.set_epoch(0)
    assert len(list(resumed)) == 3


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"size": 41}, "the length of the data set was 40 and is 41"),
        ({"seed": 3, "drop_last": True}, "seed was 0 and is 3; drop_last was False and is True"),
        ({"shuffle": False}, "shuffle was True and is False"),
    ],
)
def test_a_state_of_other_data_is_refused(change: dict[str, Any], told: str) -> None:
    arguments = {"size": 40, "world_size": 1, "global_batch_size": 4, "shuffle": True}
    (loader,) = _loaders(**arguments)
    (other,) = _loaders(**(arguments | change))
    with pytest.raises(ConfigurationError, match=told):
        other.load_state_dict(loader.state_dict())
    assert other.epoch == 0


def test_states_that_are_none_are_refused() -> None:
    (loader,) = _loaders(40, 1, global_batch_size=4)
    state = loader.state_dict()
    for wrong, told in (
        ({}, "version 1"),
        ([], "this is 'list'"),
        (state | {"version": 2}, "this is 2"),
        (state | {"position": -1}, "whole numbers"),
        (state | {"epoch": None}, "whole numbers"),
        (state | {"iterations_before": "1"}, "whole numbers"),
        (state | {"position": 41}, "no step begins at position 41"),
    ):
        with pytest.raises(ConfigurationError, match=told):
            loader.load_state_dict(wrong)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_look_at_a_first_batch_after_a_resume_drops_no_rest_of_the_epoch(num_workers: int) -> None:
    """Also twice, and also where the iterator of the look is still held when training begins."""
    arguments = {"size": 20, "world_size": 1, "global_batch_size": 4, "shuffle": True, "num_workers": num_workers}
    (loader,) = _loaders(**arguments)
    expected = list(_steps([loader]))
    loader.set_epoch(0)
    optimizer, iterator = _optimizer(), iter(loader)
    for _ in range(2):
        next(iterator)
        optimizer.step()
    state = loader.state_dict()
    iterator.close()
    (resumed,) = _loaders(**arguments)
    resumed.load_state_dict(state)
    held = iter(resumed)
    assert next(held) == next(iter(resumed)) == expected[2]
    assert list(_steps([resumed])) == expected[2:]
    assert resumed.epoch == 1
    held.close()
    resumed.load_state_dict(state)
    for _ in resumed:
        optimizer.step()
        break
    next(iter(resumed))
    assert resumed.state_dict()["epoch"] == 0, "the step has used a batch; a loop that stops early goes on to the next"
    assert resumed.epoch == 2


def _first_of(loader: DataLoader) -> None:
    next(iter(loader), None)


def _all_of(loader: DataLoader) -> None:
    deque(loader, maxlen=0)


def _before_and_between_loops(loader: DataLoader, look: Callable[[DataLoader], None]) -> Iterator[tuple[int, Any]]:
    look(loader)
    for num_epochs in (1, 2):
        for epoch in loader.epochs(num_epochs):
            for batch in loader:
                yield epoch, batch
        look(loader)


def _in_each_epoch(loader: DataLoader, look: Callable[[DataLoader], None]) -> Iterator[tuple[int, Any]]:
    for epoch in loader.epochs(3):
        look(loader)
        for batch in loader:
            yield epoch, batch


def _in_each_epoch_that_the_script_sets(
    loader: DataLoader, look: Callable[[DataLoader], None]
) -> Iterator[tuple[int, Any]]:
    for epoch in range(loader.epoch, 3):
        loader.set_epoch(epoch)
        look(loader)
        loader.set_epoch(epoch)
        for batch in loader:
            yield epoch, batch


def _after_each_epoch(loader: DataLoader, look: Callable[[DataLoader], None]) -> Iterator[tuple[int, Any]]:
    for epoch in loader.epochs(3):
        for batch in loader:
            yield epoch, batch
        look(loader)
        assert look is _first_of or loader.gather(torch.arange(10)).numel() == 10, "an evaluation of the whole epoch"


@pytest.mark.parametrize("look", [_first_of, _all_of])
@pytest.mark.parametrize(
    "script", [_before_and_between_loops, _in_each_epoch, _in_each_epoch_that_the_script_sets, _after_each_epoch]
)
def test_a_look_at_batches_changes_no_epoch_of_a_resumed_run(script: Any, look: Any) -> None:
    """Stopped everywhere, and then every two steps. At the end of an epoch a look finds nothing."""

    def run(state: dict[str, Any] | None, num_steps: int) -> tuple[list[Any], dict[str, Any] | None]:
        (loader,) = _loaders(10, 1, global_batch_size=4, shuffle=True)
        if state is not None:
            loader.load_state_dict(state)
            (again,) = _loaders(10, 1, global_batch_size=4, shuffle=True)
            again.load_state_dict(json.loads(json.dumps(loader.state_dict())))  # saved anew before its first step
            loader = again
        optimizer, done = _optimizer(), []
        for entry in script(loader, look):
            optimizer.step()
            done.append(entry)
            if len(done) == num_steps:
                return done, loader.state_dict()
        return done, None

    whole, _ = run(None, 0)
    for num_steps in range(1, 1 + len(whole)):
        done, state = run(None, num_steps)
        while state is not None and len(done) <= len(whole):
            more, state = run(state, 2)
            done += more
        assert done == whole, num_steps


def test_a_warm_up_before_epochs_that_was_stopped_after_its_last_batch_is_finished() -> None:
    def script(loader: DataLoader, stop_after: int) -> tuple[list[Any], dict[str, Any]]:
        optimizer, done = _optimizer(), []
        for batch in chain(loader, (batch for _ in loader.epochs(2) for batch in loader)):
            optimizer.step()
            done.append((loader.epoch, batch))
            if len(done) == stop_after:
                break
        return done, loader.state_dict()

    whole, _ = script(_loaders(10, 1, global_batch_size=4, shuffle=True)[0], 0)
    assert [epoch for epoch, _ in whole] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for stop_after in (2, 3):
        first, state = script(_loaders(10, 1, global_batch_size=4, shuffle=True)[0], stop_after)
        (loader,) = _loaders(10, 1, global_batch_size=4, shuffle=True)
        loader.load_state_dict(state)
        assert first + script(loader, 0)[0] == whole, stop_after


def test_after_a_look_the_next_epoch_is_still_the_interrupted_one() -> None:
    """A loop over `range(loader.epoch, n)` would leave out the last epoch otherwise."""
    (loader,) = _loaders(12, 1, global_batch_size=4)
    loader.set_epoch(1)
    next(batches := iter(loader))
    optimizer = _optimizer()
    optimizer.step()
    batches.close()
    (resumed,) = _loaders(12, 1, global_batch_size=4)
    resumed.load_state_dict(loader.state_dict())
    next(iter(resumed))
    assert resumed.epoch == 1
    lengths = []
    for _ in range(resumed.epoch, 3):
        lengths.append(0)
        for _ in resumed:
            optimizer.step()
            lengths[-1] += 1
    assert lengths == [2, 3]


def test_an_epoch_after_the_interrupted_one_is_chosen_without_a_warning() -> None:
    (loader,) = _loaders(12, 1, global_batch_size=4)
    next(batches := iter(loader))
    optimizer = _optimizer()
    optimizer.step()
    batches.close()
    (resumed,) = _loaders(12, 1, global_batch_size=4)
    resumed.load_state_dict(loader.state_dict())
    for _ in resumed:
        optimizer.step()
        break
    resumed.set_epoch(1)
    assert len(list(resumed)) == 3
