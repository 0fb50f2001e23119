"""Ranks that run out of data before the others: torch's `Join` protocol.

[Note: counting active ranks]

torch's `Join` counts the ranks that are still in their loop: ranks that have left it call a collective again and again,
and each active rank calls it once per step. torch's class does so at forward. This one does so right before the first
collective of a window's end, so that forward passes without a reduction (accumulation, evaluation) need no counterpart.
A rank that has left takes part in each window's end, with weight zero.

[Note: several joinables]

`Join([a, b])` has the ranks that have left run a's hook and then b's, once per step, and only a is counted. Whether a's
window ends first depends on the program, and even on whether it calls `loss.backward()` or `model.backward`. So with
several of our models each active rank names, at the end of every window, the model whose window it is
(`JoinCoordinator.begin`), and a hook of ours on a rank that has left takes part in that window, whichever it is. The
first window that ends is counted for the first model that is listed.

Joinables that aren't ours name nothing. `Join` counts the one that is listed first, so that has to be a model of ours.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, JoinHook

from evenstep.errors import UsageError
from evenstep.ground.compat.torch_ddp import JoinConfig
from evenstep.replica.module_buffers import finish_broadcast, start_broadcast
from evenstep.transport.core.transport import Transport
from evenstep.world import World


class Joining(Protocol):
    """A wrapped module, as its join hook sees it."""

    module: nn.Module
    world: World
    _join_config: JoinConfig
    _authoritative_rank: int

    def _take_part_without_data(self) -> None: ...
    def _drop_gradients(self) -> None: ...
    def _set_uneven(self, uneven: Uneven | None) -> None: ...
    def _kept_tensors(self) -> list[Tensor]: ...


class Uneven:
    """The state of one model's exchange while ranks may leave one by one.

    Args:
        model: The wrapped module.
        coordinator: Of the `Join` that it is in.
        divide_by_initial_world_size: Average plain gradients over all ranks, also over those that have left.

    Attributes:
        divide_by_initial_world_size: As given.
        has_joined: This rank has left its loop.
    """

    def __init__(self, model: Joining, coordinator: JoinCoordinator, divide_by_initial_world_size: bool) -> None:
        self.divide_by_initial_world_size = divide_by_initial_world_size
        self.has_joined = False
        self._model = weakref.proxy(model)
        self._coordinator = coordinator
        self._number = coordinator.add(model, self)
        self._has_begun = False
        self._answer: Any = None

    def announce(self) -> None:
        """Collective, before the first collective of a window: have the ranks that have left take part in it.

        Raises:
            UsageError: See `JoinCoordinator.begin`.
            RuntimeError: A rank has left, and the `Join` is to end all loops with the first.
        """
        if self._has_begun or self.has_joined or not self._model._join_config.enable:
            return
        self._answer = self._coordinator.begin(self._number)
        self._has_begun = True

    def announce_bucket(self) -> None:
        """As `announce`, before a bucket is sent. With several models that can wait for the window's end."""
        if self._coordinator.is_of_one:
            self.announce()

    def end_window(self) -> None:
        """End the window that was announced."""
        if self._has_begun:
            self._has_begun = False
            answer, self._answer = self._answer, None
            if answer is not None:
                answer.wait()
            self._coordinator.end(self._number)

    def lowest_active(self, control: Transport) -> int:
        """Collective: the first active rank, whose module buffers all ranks take."""
        lowest = torch.tensor([control.world_size if self.has_joined else control.rank], device="cpu")
        control.all_reduce(lowest, "min").wait()
        return int(lowest)


class JoinCoordinator:
    """Which of the models of one `Join` has its window's end, step by step: see [Note: several joinables]."""

    def __init__(self, first: Joining) -> None:
        self._models: list[weakref.ref[Joining]] = []
        self._unevens: list[Uneven] = []
        self._world = first.world
        self._ended: set[int] = set()  # in this step
        self._open: int | None = None  # whose window's end has begun
        self._is_waiting = JoinConfig.construct_disabled_join_config()  # type: ignore[no-untyped-call]

    @property
    def is_of_one(self) -> bool:
        """Whether there is only one model."""
        return len(self._models) == 1

    def takes(self, model: Joining) -> bool:
        """Whether a model that makes its hook now makes it for the same `Join` as those before it."""
        models = [each() for each in self._models]
        # `Join` has all hooks made before it tells the first joinable what it is.
        return all(each is not None and each._join_config is self._is_waiting for each in models) and not any(
            each is model for each in models
        )

    def add(self, model: Joining, uneven: Uneven) -> int:
        """Another model of the same `Join`. Returns its number."""
        model._join_config = self._is_waiting
        self._models.append(weakref.ref(model))
        self._unevens.append(uneven)
        return len(self._models) - 1

    def begin(self, number: int) -> Any:
        """Collective: a model's window ends; the ranks that have left take part in it.

        Returns:
            Something to `wait` for at its end, or None.

        Raises:
            UsageError: A joinable that isn't ours is listed first, or this model has had its window in this step.
            RuntimeError: A rank has left, and the `Join` is to end all loops with the first.
        """
        if self._open is not None:  # nobody listens: ranks that have left take part in that window
            raise self._out_of_turn(f"number {number + 1} while that of number {self._open + 1} wasn't over")
        answer = None if self._ended else self._answer()
        if not self.is_of_one:
            self._agree_on_window(number, is_again=number in self._ended)
        self._open = number
        return answer

    def end(self, number: int) -> None:
        """The window of a model is over."""
        self._open = None
        self._ended.add(number)
        if len(self._ended) == len(self._models):
            self._ended.clear()

    def take_part(self) -> None:
        """Collective, on a rank that has left: take part in the window that the active ranks name.

        Raises:
            UsageError: They disagree, or don't have each model's window once per step. Raised on every rank.
        """
        for uneven in self._unevens:
            uneven.has_joined = True
        number = 0 if self.is_of_one else self._agree_on_window(-1)
        model = self._models[number]()
        assert model is not None
        model._take_part_without_data()

    def _answer(self) -> Any:
        """Count this rank as active in torch's `Join`."""
        first = self._models[0]()
        assert first is not None
        if not first._join_config.is_first_joinable:
            raise UsageError(
                f"rank {self._world.rank}: a Join counts the steps of the joinable that is listed first, and that has "
                f"to be a wrapped model of evenstep's. List models first: Join([model, optimizer])."
            )
        return Join.notify_join_context(first)  # type: ignore[arg-type]

    def _agree_on_window(self, number: int, *, is_again: bool = False) -> int:
        """Collective: agree on whose window ends; ranks that have left pass -1."""
        last = len(self._models) - 1
        said = torch.tensor([number, -1 if number < 0 else last - number, int(is_again)], device="cpu")
        self._world.control.all_reduce(said, "max").wait()
        highest, lowest = int(said[0]), last - int(said[1])
        if highest != lowest:
            raise self._out_of_turn(f"number {lowest + 1} on some ranks and of number {highest + 1} on others")
        if said[2]:
            raise self._out_of_turn(f"number {highest + 1} twice before those of another one")
        return highest

    def _out_of_turn(self, what: str) -> UsageError:
        return UsageError(
            f"rank {self._world.rank}: {len(self._models)} models are in one Join, and gradients were averaged of "
            f"{what}. Within a Join those of every model are averaged once per step, one model after the other, in the "
            f"same order on all ranks. Hold back the others with no_sync, or have ranks with equally many batches "
            f"(evenstep.DataLoader), which need no Join."
        )


_latest: weakref.WeakKeyDictionary[World, weakref.ref[JoinCoordinator]] = weakref.WeakKeyDictionary()


def coordinator_of(model: Joining) -> JoinCoordinator:
    """Return the coordinator of the `Join` that is making a model's hook at this moment."""
    known = _latest.get(model.world)
    coordinator = None if known is None else known()
    if coordinator is None or not coordinator.takes(model):
        coordinator = JoinCoordinator(model)
        _latest[model.world] = weakref.ref(coordinator)
    return coordinator


class UnevenJoinHook(JoinHook):
    """What a rank does for the others after it has left its loop, and what all do when the last has left.

    Args:
        model: The wrapped module.
        divide_by_initial_world_size: See `Uneven`.
    """

    def __init__(self, model: Joining, divide_by_initial_world_size: bool) -> None:
        self._model = model
        self._coordinator = coordinator_of(model)
        self._uneven = Uneven(model, self._coordinator, divide_by_initial_world_size)
        model._set_uneven(self._uneven)

    def main_hook(self) -> None:
        """Take part in one reduction of the active ranks, of this model or of another one in the same `Join`."""
        self._coordinator.take_part()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Collective: parameters and module buffers become those of a rank that left last."""
        world = self._model.world
        left_last = world.exchange(is_last_joiner)
        src = max(rank for rank, is_last in enumerate(left_last) if is_last)  # torch's choice, under torch's name
        self._model._authoritative_rank = src
        finish_broadcast(start_broadcast(self._model._kept_tensors(), world.transport, src=src))
        if self._uneven.has_joined:
            self._model._drop_gradients()
        leave(self._model)


def leave(model: Joining) -> None:
    """Take a model out of its `Join`."""
    model._set_uneven(None)
    disabled: JoinConfig = JoinConfig.construct_disabled_join_config()  # type: ignore[no-untyped-call]
    model._join_config = disabled


_entered: weakref.WeakKeyDictionary[World, Any] = weakref.WeakKeyDictionary()


class JoinOfOne(Join):
    """torch's `Join` of one of our models, which is left also by way of an exception.

    Args:
        model: The wrapped module.
        throw_on_early_termination: As torch's.
        divide_by_initial_world_size: See `Uneven`.
    """

    def __init__(self, model: Joining, *, throw_on_early_termination: bool, divide_by_initial_world_size: bool) -> None:
        self._model = model
        super().__init__(
            [model],  # type: ignore[list-item]
            throw_on_early_termination=throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def __enter__(self) -> None:
        """As torch's.

        Raises:
            UsageError: Another model's is entered.
        """
        if self._model.world in _entered:
            leave(self._model)
            raise UsageError(
                f"rank {self._model.world.rank}: join of one model inside that of another: a rank that leaves the "
                f"inner one would be missing in the outer one's exchanges. Put them into one: "
                f"torch.distributed.algorithms.join.Join([first, second])."
            )
        _entered[self._model.world] = self

    def __exit__(self, *raised: Any) -> None:
        """As torch's."""
        try:
            super().__exit__(*raised)
        finally:
            _entered.pop(self._model.world, None)
            leave(self._model)
