"""Ranks that run out of data before the others: torch's `Join` protocol.

[Note: counting active ranks]

torch's `Join` counts the ranks that are still in their loop: a rank that has left its loop calls a collective again and
again, and each active rank calls it once per step. torch's class does so at forward. This class does so right before
the first collective of a window's end, so that forward passes without a reduction (accumulation, evaluation) need no
counterpart. A rank that has left takes part in each window's end like a rank with an empty share, with weight zero.

[Note: several joinables]

With `Join([a, b])` the ranks that have left run a's hook and then b's, once per step, and only a's calls are counted.
Whether a's window ends first depends on the program, and even on whether it calls `loss.backward()` or
`model.backward`. So with several evenstep models, each active rank sends, at the end of every window, the number of the
window's model (`Uneven.announce`), and a hook on a rank that has left takes part in the window of that model. The first
window that ends in a step is counted for the first listed model.

Joinables of other classes send no number. `Join` counts the calls of the first listed joinable, which therefore has to
be an evenstep model.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.algorithms.join import Join, JoinHook

from evenstep.errors import UsageError
from evenstep.ground.compat.torch_ddp import JoinConfig
from evenstep.replica.module_buffers import broadcast
from evenstep.transport.core.transport import Transport
from evenstep.world import World


class Joining(Protocol):
    """A wrapped module: the part of its interface that the join hook uses."""

    world: World
    _join_config: JoinConfig
    _authoritative_rank: int
    _was_uneven: bool

    def _take_part_without_data(self) -> None: ...
    def _drop_gradients(self) -> None: ...
    def _set_uneven(self, uneven: Uneven | None) -> None: ...
    def _kept_tensors(self) -> list[Tensor]: ...


# The models of one `Join`, in its order: see [Note: several joinables].
Joined = weakref.WeakKeyDictionary[Joining, "Uneven"]

_joined_last: weakref.WeakKeyDictionary[World, Joined] = weakref.WeakKeyDictionary()
_OUTSIDE: JoinConfig = JoinConfig.construct_disabled_join_config()  # type: ignore[no-untyped-call]
_BEFORE: JoinConfig = JoinConfig.construct_disabled_join_config()  # type: ignore[no-untyped-call]


class Uneven(JoinHook):
    """One model in a `Join`. On active ranks the model's exchange calls it; on ranks that have left, torch does.

    Args:
        model: The wrapped module.
        divide_by_initial_world_size: Whether plain gradients are averaged over all ranks, including those that have
            left.

    Attributes:
        divide_by_initial_world_size: The given argument.
        has_joined: Whether this rank has left its loop.
    """

    def __init__(self, model: Joining, divide_by_initial_world_size: bool) -> None:
        self.divide_by_initial_world_size = divide_by_initial_world_size
        self.has_joined = False
        self._model = weakref.proxy(model)
        self._num_windows = 0  # windows that have ended; every model has one window per step
        self._is_open = False
        self._counted: Any = None  # torch's pending count of this rank for the open window
        joined = _joined_last.get(model.world)
        # `Join` makes all hooks before it marks the first joinable as the first.
        if joined is None or model in joined or any(each._join_config is not _BEFORE for each in joined):
            joined = _joined_last[model.world] = weakref.WeakKeyDictionary()
        joined[model] = self
        self._joined = joined
        model._join_config = _BEFORE
        model._set_uneven(self)

    def announce(self) -> None:
        """Collective, before the first collective of a window: make the ranks that have left take part in it.

        Raises:
            UsageError: A joinable of another class is listed first, ranks are in different models' windows, or this
                model has had its window in this step.
            RuntimeError: A rank has left, and the `Join` ends all loops when the first one ends.
        """
        if not self._model._join_config.enable:
            leave(self._model)  # a `Join` that is disabled, or could not be made, ends without hooks
            return
        if self._is_open or self.has_joined:
            return
        hooks = list(self._joined.values())
        number = hooks.index(self)
        for other, each in enumerate(hooks):
            if each._is_open:  # ranks that have left take part in that window, and can't answer
                raise self._out_of_turn(f"number {number + 1} while that of number {other + 1} wasn't over")
        ended = {each._num_windows for each in hooks}
        if len(ended) == 1:
            self._counted = self._count()
        self._agree_on_window(number, is_again=self._num_windows > min(ended))
        self._is_open = True

    def announce_bucket(self) -> None:
        """Like `announce`, before a bucket is sent. With several models it is announced at the window's end."""
        if len(self._joined) == 1 or not self._model._join_config.enable:
            self.announce()

    def end_window(self) -> None:
        """End the announced window."""
        if self._is_open:
            counted, self._counted, self._is_open = self._counted, None, False
            if counted is not None:
                counted.wait()
            self._num_windows += 1

    def lowest_active(self, control: Transport) -> int:
        """Collective: the lowest active rank, whose module buffers all ranks get."""
        lowest = torch.tensor([control.world_size if self.has_joined else control.rank], device="cpu")
        control.all_reduce(lowest, "min").wait()
        return int(lowest)

    def main_hook(self) -> None:
        """Collective, on a rank that has left: take part in the announced window, of any of the models.

        Raises:
            UsageError: Active ranks disagree on the model, or don't have each model's window once per step. Raised on
                every rank.
        """
        for each in self._joined.values():
            each.has_joined = True
        list(self._joined)[self._agree_on_window(-1)]._take_part_without_data()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Collective: all ranks get the parameters and module buffers of a rank that left last."""
        world = self._model.world
        told = world.exchange([is_last_joiner, self._num_windows])
        left_last = [is_last for is_last, _ in told]
        self._model._was_uneven |= len({num_windows for _, num_windows in told}) > 1
        src = max(rank for rank, is_last in enumerate(left_last) if is_last)  # the same choice as torch's
        self._model._authoritative_rank = src
        broadcast(self._model._kept_tensors(), world.transport, src=src)
        if self.has_joined:
            self._model._drop_gradients()
        leave(self._model)

    def _count(self) -> Any:
        """Count this rank as active in torch's `Join`. Returns something to `wait` for at the window's end, or None."""
        first = next(iter(self._joined))
        if not first._join_config.is_first_joinable:
            raise UsageError(
                f"rank {first.world.rank}: a Join counts the steps of the first listed joinable, which has to be an "
                f"evenstep model. List models first: Join([model, optimizer])."
            )
        return Join.notify_join_context(first)  # type: ignore[arg-type]

    def _agree_on_window(self, number: int, *, is_again: bool = False) -> int:
        """Collective: agree on the model whose window ends; ranks that have left pass -1."""
        last = len(self._joined) - 1
        if last == 0:
            return 0
        said = torch.tensor([number, -1 if number < 0 else last - number, int(is_again)], device="cpu")
        self._model.world.control.all_reduce(said, "max").wait()
        highest, lowest = int(said[0]), last - int(said[1])
        if highest != lowest:
            raise self._out_of_turn(f"number {lowest + 1} on some ranks and of number {highest + 1} on others")
        if said[2]:
            raise self._out_of_turn(f"number {highest + 1} twice before those of another one")
        return highest

    def _out_of_turn(self, what: str) -> UsageError:
        return UsageError(
            f"rank {self._model.world.rank}: {len(self._joined)} models are in one Join, and gradients were averaged "
            f"of {what}. Within a Join each model's gradients are averaged once per step, one model after the other, "
            f"in the same order on all ranks. Hold back additional averages with no_sync, or give all ranks equally "
            f"many batches (evenstep.DataLoader), so that you need no Join."
        )


def leave(model: Joining) -> None:
    """Take a model out of its `Join`."""
    model._set_uneven(None)
    model._join_config = _OUTSIDE


_entered: weakref.WeakSet[World] = weakref.WeakSet()


@contextlib.contextmanager
def join_of_one(
    model: Joining, *, throw_on_early_termination: bool, divide_by_initial_world_size: bool
) -> Iterator[None]:
    """torch's `Join` of one evenstep model, which is also left when an exception is raised.

    Args:
        model: The wrapped module.
        throw_on_early_termination: As in torch.
        divide_by_initial_world_size: See `Uneven`.

    Raises:
        UsageError: Another model's `Join` is active.
    """
    if model.world in _entered:
        raise UsageError(
            f"rank {model.world.rank}: join of one model inside that of another: a rank that leaves the inner one "
            f"would be missing in the outer one's exchanges. Use one Join for both: "
            f"torch.distributed.algorithms.join.Join([first, second])."
        )
    _entered.add(model.world)
    try:
        with Join(
            [model],  # type: ignore[list-item]
            throw_on_early_termination=throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        ):
            yield
    finally:
        _entered.discard(model.world)
        leave(model)
