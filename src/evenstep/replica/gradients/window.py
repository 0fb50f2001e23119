"""The accumulation window: its sums, its divisor, and the effect of each of its passes.

A window begins with the first backward pass after a reduction and ends with the next reduction. Within it, either
every pass is PLAIN (`loss.backward()`: summed over micro-batches, averaged over ranks) or every pass is WEIGHTED
(`model.backward`: the sum of weight * gradient over micro-batches and ranks, divided once by the sum of weights).

[Note: passes that contribute nothing]

A pass with weight 0, or over an empty share, runs for its side effects (hooks, the user's collectives), but its NaNs
must not reach the sum. The gradients of the window so far are saved before the pass and put back after it; the
gradients of the pass itself are dropped. A PLAIN pass that reaches outputs over a dummy batch first may reach outputs
over samples later: its gradients are kept separate until it ends, and added then.

If other ranks' outputs depend on this rank's rows (`shares_statistics`: a SyncBatchNorm), a pass with weight 0 over
real rows is not dropped, because the other ranks' losses have a gradient with respect to those rows. The pass is
*muted* instead: zeros replace the gradients that reach the module's outputs, so only the gradients from other ranks'
losses remain.

A weight on a GPU isn't read, so such a pass is muted, too: zeros replace the gradients where the weight is 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

import torch
from torch import Tensor, nn

from evenstep.errors import ConfigurationError, UsageError
from evenstep.ground.compat.torch_tensors import local_part


class Kind(Enum):
    """The meaning of a backward pass."""

    PLAIN = auto()
    WEIGHTED = auto()


class State(Enum):
    """The state of a model between two steps of its optimizer."""

    IDLE = auto()  # no pass runs; a pass that doesn't reach the wrapper's outputs is this rank's own
    FORWARD = auto()  # a forward pass of the wrapper has run outside of `no_sync`: the next pass is the wrapper's own
    STARTED = auto()  # a pass has reached an output of the wrapper; perhaps it is `torch.autograd.grad`
    COUNTED = auto()  # a pass has given a parameter a gradient, or will: it counts in its window
    SINGLE = auto()  # a pass of `model.backward` on one rank that is a whole window: nothing in it needs to be followed
    FAILED = auto()  # a pass has raised, so that gradients weren't averaged


class Event(Enum):
    """An event that changes the state."""

    FORWARD = auto()  # a forward pass outside of `no_sync` has ended
    START = auto()  # a pass has begun
    COUNT = auto()  # a parameter has received a gradient, or will
    SINGLE = auto()  # a pass that is a whole window has begun
    END = auto()  # a pass that counts, or the window of a rank without a pass, has ended
    RESET = auto()  # the gradients of a failed pass are dropped


# A transition that isn't in this table is a bug in evenstep, with two exceptions: a pass that ends without a gradient
# restores the state in which it began, and an exception leads to FAILED.
TRANSITIONS = {
    State.IDLE: {
        Event.FORWARD: State.FORWARD,
        Event.START: State.STARTED,
        Event.SINGLE: State.SINGLE,
        Event.END: State.IDLE,
    },
    State.FORWARD: {
        Event.FORWARD: State.FORWARD,
        Event.START: State.STARTED,
        Event.SINGLE: State.SINGLE,
        Event.END: State.IDLE,
    },
    # Forward passes within a pass are those of a reentrant checkpoint.
    State.STARTED: {Event.FORWARD: State.STARTED, Event.COUNT: State.COUNTED},
    State.COUNTED: {Event.FORWARD: State.COUNTED, Event.END: State.IDLE},
    State.SINGLE: {Event.FORWARD: State.SINGLE, Event.END: State.IDLE},
    State.FAILED: {Event.FORWARD: State.FAILED, Event.RESET: State.IDLE},
}

CALLS = {Kind.PLAIN: "loss.backward()", Kind.WEIGHTED: "model.backward(loss, ...)"}


class SavedShard(Protocol):
    """Reduced gradients of a sharded bucket, kept separate from a window's gradients."""

    def give_back(self, *, add: bool) -> None:
        """Return the gradients to the shard; with `add`, add them to the gradients that were reduced since."""


class SavedGradients:
    """Gradients kept separate from those of a window, or of one of its passes, until it ends.

    [Note: saved gradients]

    *Of a window.* Without `zero_grad` between two synchronised passes, the second adds to the reduced gradient R. A
    PLAIN pass may leave R where it is: averaging equal values changes nothing. A WEIGHTED pass would multiply R by the
    number of ranks over the sum of weights, so R is saved and added back. A rank without a pass treats R as the kind of
    the last window requires. R must not enter the sums of virtual ranks either. It is saved before the loop over them,
    because autograd may already have added gradients to R when a PLAIN pass is noticed. R of a sharded bucket is its
    shard. Autograd can't add to a shard, so R is always saved there.

    *Of a pass that contributes nothing.* The window's gradients so far are saved before it and put back after it.

    If a window is dropped, after an error or because `zero_grad` has dropped its gradients, its saved gradients are
    dropped, too.
    """

    def __init__(self) -> None:
        self.shards: list[SavedShard] = []
        self._gradients: list[tuple[nn.Parameter, Tensor | None]] = []

    def save(self, parameters: Iterable[nn.Parameter], *, is_copied: bool) -> None:
        """Save the gradients in `p.grad`, and set `p.grad` to None.

        Args:
            parameters: The parameters.
            is_copied: Save copies, because the gradients' memory will be written to.
        """
        for parameter in parameters:
            grad = parameter.grad
            self._gradients.append((parameter, grad.detach().clone() if is_copied and grad is not None else grad))
            parameter.grad = None

    def put_back(self) -> None:
        """Restore `p.grad`, and drop the gradients that autograd has stored there since."""
        for parameter, grad in self._gradients:
            parameter.grad = grad
        self._gradients = []

    def add_back(self, *, to_shards: bool = False) -> None:
        """Add the saved gradients to `p.grad`, when a window ends or is closed without a pass.

        Args:
            to_shards: Whether the window has been reduced; see `SavedShard.give_back`.
        """
        for parameter, grad in self._gradients:
            if grad is not None:
                parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
        for shard in self.shards:
            shard.give_back(add=to_shards)
        self._gradients, self.shards = [], []


class Window:
    """An accumulation window: the passes since the last reduction, on this rank.

    Attributes:
        kind: The kind of the passes; None before the first pass, and on a rank whose share was empty.
        weight: Sum of the weights so far; a 0-dim tensor if a weight was a tensor.
        weight_held: The weight of the gradients in `p.grad`. Equal to `weight`, except in reproducible mode, where
            `p.grad` holds only the last virtual rank's gradients.
        is_scaled: Whether the loss of a pass was scaled by a GradScaler, so that gradients may overflow.
        has_leftovers: Whether the window has no pass, and `p.grad` holds gradients of an earlier reduction.
        saved: Gradients that this window doesn't reduce.
    """

    def __init__(self) -> None:
        self.saved = SavedGradients()
        self.kind: Kind | None = None
        self.weight: float | Tensor = 0.0
        self.weight_held: float | Tensor = 0.0
        self.is_scaled = self.has_leftovers = False
        self._noted: tuple[nn.Parameter, Tensor, int] | None = None

    def add(self, kind: Kind, weight: float | Tensor, *, is_scaled: bool = False) -> None:
        """Count one more backward pass.

        Raises:
            UsageError: The window has passes of the other kind.
        """
        if self.kind is not None and self.kind is not kind:
            raise UsageError(
                f"{CALLS[kind]} after {CALLS[self.kind]} in the same accumulation window: one divides by the number of "
                f"ranks, the other by the sum of the weights. Use only one of them until the optimizer's step."
            )
        self.kind = kind
        self.weight = self.weight_held = self.weight + weight
        self.is_scaled |= is_scaled

    def note_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Record one of the gradients that a pass has left, so that `has_changed` has to check only this gradient.

        Args:
            parameters: The parameters with gradients from the pass; empty: the gradients are stored elsewhere.
        """
        held = ((parameter, parameter.grad) for parameter in parameters)
        self._noted = next(((parameter, grad, grad._version) for parameter, grad in held if grad is not None), None)

    def has_changed(self) -> bool:
        """Whether the recorded gradient was written to or replaced since the last pass."""
        if self._noted is None:
            return False
        parameter, grad, version = self._noted
        return parameter.grad is not grad or grad._version != version


class Turn(Enum):
    """A model's turn in a pass through several models: see [Note: one order] in `exchange.all_reduce`."""

    ALONE = auto()  # no other model is known to take part
    FIRST = auto()
    BEHIND = auto()  # another model's buckets travel first


class Effect(Enum):
    """The effect of a pass on the sum of its window: see [Note: passes that contribute nothing]."""

    ADDED = auto()  # its gradients are added
    DROPPED = auto()  # its gradients are dropped at its end
    MUTED = auto()  # where its weight is 0, zeros reach the module's outputs


@dataclass
class Pass:
    """One run of autograd, and its effect on its window.

    Attributes:
        kind: The pass's kind.
        weight: The pass's weight in the window's sum.
        effect: The pass's effect, as far as it is known.
        is_scaled: The loss was scaled by a GradScaler.
        before: The state in which the pass began.
        opens_window: Whether no window was open when the pass began.
        ends_window: Whether the pass ends the window; decided when it begins.
        fills_buckets: Whether gradients are sent as soon as autograd has produced them.
        has_raised: Whether autograd has raised an exception in the pass, and so doesn't report its end.
        saved: Gradients of the window before this pass, if the pass began with the effect DROPPED.
        task: Autograd's number of the run that ends the pass of `loss.backward()`; -1: no run does.
        place: The pass's place among those of `loss.backward()`, when autograd has reached an output.
    """

    kind: Kind
    weight: float | Tensor
    effect: Effect = Effect.ADDED
    is_scaled: bool = False
    before: State = State.IDLE
    opens_window: bool = False
    ends_window: bool = False
    fills_buckets: bool = False
    has_raised: bool = False
    saved: SavedGradients | None = None
    task: int = -1
    place: float = math.inf

    def end_apart(self) -> None:
        """End a dropped pass: drop its gradients, or, if it has reached samples after all, add them to the window's."""
        if self.saved is not None and self.effect is Effect.DROPPED:
            self.saved.put_back()
        elif self.saved is not None:
            self.saved.add_back()

    @property
    def contribution(self) -> float | Tensor:
        """The weight with which gradients are added: 0.0 if the pass's gradients are dropped, else another number.

        A weight tensor is returned unread, so it may be 0.
        """
        if self.effect is Effect.DROPPED:
            return 0.0
        return self.weight if isinstance(self.weight, Tensor) else 1.0

    def at_outputs(self, grad: Tensor) -> Tensor | None:
        """Return the replacement for a gradient that reaches the module's outputs; None: it isn't replaced."""
        if self.effect is not Effect.MUTED:
            return None
        if isinstance(self.weight, Tensor):
            return torch.where(self.weight.to(grad.device) == 0, 0.0, grad)
        return torch.zeros_like(grad)


def effect_of(weight: float | Tensor, *, only_dummies: bool, shares_statistics: bool) -> Effect:
    """The effect of a pass of `model.backward`: see [Note: passes that contribute nothing]. Pure.

    Args:
        weight: The pass's weight; a tensor isn't read.
        only_dummies: The loss goes through outputs over dummy batches, and through no outputs over samples.
        shares_statistics: Other ranks' outputs depend on this rank's rows.
    """
    if only_dummies:
        return Effect.DROPPED
    if isinstance(weight, Tensor):
        return Effect.MUTED  # the weight may be 0, and NaNs mustn't reach the sum of the window's other passes
    if weight > 0:
        return Effect.ADDED
    return Effect.MUTED if shares_statistics else Effect.DROPPED


def as_multiplied(weight: float | Tensor, scale: float, dtype: torch.dtype) -> float | Tensor:
    """The weight that a pass adds to the sum of weights: its weight rounded to a 16-bit loss's dtype.

    In bfloat16, 20,001 times a gradient is computed as 19,968 times the gradient. With the rounded weight the mean of
    equal gradients is that gradient.

    Args:
        weight: The pass's weight.
        scale: The scale by which the weight is divided first.
        dtype: The loss's dtype.
    """
    if dtype.itemsize > 2:
        return weight
    if isinstance(weight, Tensor):
        return (weight / scale).to(dtype).double() * scale
    return torch.tensor(weight / scale, dtype=dtype, device="cpu").item() * scale


def validate_weight(weight: float | Tensor, *, rank: int) -> float | Tensor:
    """Return a weight as a float, or as a 0-dim tensor if reading it would wait for a device.

    Raises:
        ConfigurationError: The weight is negative, infinite, NaN, or no single number.
    """
    if isinstance(weight, Tensor):
        if weight.numel() != 1 or weight.is_complex():
            raise ConfigurationError(
                f"backward on rank {rank}: weight is a {str(weight.dtype)[6:]} tensor of shape {list(weight.shape)}; "
                f"pass one number, such as mask.sum()."
            )
        if weight.device.type != "cpu":
            return weight.detach().reshape(()).double()  # reading it would wait for the device
        weight = weight.item()
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        try:
            weight = float("none" if isinstance(weight, str) else weight)  # numpy's scalars and the like
        except (TypeError, ValueError):
            raise ConfigurationError(
                f"backward on rank {rank}: weight={weight!r} isn't a number. Pass the number of samples or tokens that "
                f"the loss was averaged over."
            ) from None
    if not (weight >= 0 and math.isfinite(weight)):
        raise ConfigurationError(
            f"backward on rank {rank}: weight={weight!r}, but a weight must be finite and at least 0. Pass the number "
            f"of samples or tokens that the loss was averaged over."
        )
    return float(weight)


def drop_grads(parameters: Iterable[Tensor]) -> None:
    """Set the gradients of some parameters to None."""
    for parameter in parameters:
        parameter.grad = None


def all_zero(parameters: Iterable[Tensor]) -> bool:
    """Whether there are no gradients, or only zeros. On a GPU this waits for the first existing gradient."""
    grads = (parameter.grad for parameter in parameters)
    return not any((grad._values() if grad.is_sparse else local_part(grad)).any() for grad in grads if grad is not None)
