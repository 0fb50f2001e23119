"""The exchange of a window's gradients: the interface between `engine` and the code that averages gradients.

`Exchange` itself serves a world of one. There gradients stay where autograd has stored them: packing buckets that are
never sent would cost a copy and a call per parameter. `all_reduce.AllReduceExchange` sends buckets to the other ranks,
and `replica/sharded` shards them over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from evenstep.ground.health.telemetry import Recorder
from evenstep.replica.gradients.buckets.bucket import Bucket
from evenstep.replica.gradients.buckets.comm_hooks import CommHook
from evenstep.replica.gradients.buckets.layout import BucketPolicy, Layout
from evenstep.replica.gradients.division import divide_alone
from evenstep.replica.gradients.exchange.weights import Scale, rescale
from evenstep.replica.gradients.observer import Observer
from evenstep.replica.gradients.strategies import WindowEnd
from evenstep.replica.gradients.window import Kind, SavedGradients, Turn, Window
from evenstep.replica.join import Uneven
from evenstep.replica.module_buffers import BufferExchange
from evenstep.transport.core.transport import Transport
from evenstep.world import World


@dataclass(frozen=True)
class Trained:
    """The trained parameters of a model, and everything that an exchange of their gradients needs.

    Attributes:
        names: Names of the parameters, for messages.
        parameters: Parameters with dense gradients in registration order, then parameters with sparse gradients.
        num_dense: Number of parameters with dense gradients, which are in buckets.
        world: The ranks that take part.
        policy: Sizes and dtype of buckets.
        module_buffers: The module buffers that are sent with the gradients.
        recorder: Records when passes begin, buckets are sent and waits end.
        transport: Carries buckets, headers, and the other tensors of the same pass.
        control: Carries messages on the CPU, in order with `transport`'s: see [Note: several wrapped models] in
            `channels`.
        observers: The observers of the model's steps.
        ending: How the model's windows end, except in local SGD.
    """

    names: list[str]
    parameters: list[nn.Parameter]
    num_dense: int
    world: World
    policy: BucketPolicy
    module_buffers: BufferExchange
    recorder: Recorder
    transport: Transport
    control: Transport
    observers: tuple[Observer, ...]
    ending: WindowEnd


class Exchange:
    """The exchange of gradients over ranks. This base class serves a world of one.

    Args:
        parameters: The trained parameters.
        ending: How windows end.

    Attributes:
        travels: Whether gradients are sent, and leave the place where autograd stores them.
        layout: Each gradient's place in the buckets; without buckets if nothing is sent.
        buckets: The layout's buckets.
        order: The order of the parameters in the buckets.
        hook: The communication hook that averages buckets instead of the transport, or None.
        scale: The scale of weights, applied before they multiply gradients.
        turn: The model's turn in the running pass.
        uneven: The model's part in a `Join` while ranks may leave one by one; else None.
        takes_every_pass: Whether every pass of this rank has to take part, because torch's FSDP2 adds gradients over
            ranks while autograd runs. Then a pass that contributes nothing is muted instead of dropped, and every pass
            that reaches the module's outputs counts.
    """

    travels = False
    takes_every_pass = False

    def __init__(self, parameters: Sequence[nn.Parameter], ending: WindowEnd) -> None:
        self.layout = Layout((), (0,) * len(parameters))
        self.buckets: Sequence[Bucket] = ()
        self.order: Sequence[int] = ()
        self.hook: CommHook | None = None
        self.turn = Turn.ALONE
        self.uneven: Uneven | None = None
        self._parameters = parameters
        self._ending = ending
        self.scale = Scale(partial(rescale, parameters), is_one=ending.sums_first)

    # ------------------------------------------------------------------ while a window runs

    def begin_pass(self, kind: Kind, *, travels: bool) -> None:
        """Called when a pass begins.

        Args:
            kind: The pass's kind.
            travels: Whether the pass's gradients are added over ranks; else they stay on this rank for now.
        """

    def when_added(self, then: Callable[[], None]) -> None:
        """Call `then` as soon as the gradients of the pass that autograd has just ended are in their places."""
        then()

    def open_window(self, saved: SavedGradients, *, is_running: bool) -> None:
        """Before the first pass of a window: save gradients in `p.grad` to which autograd can't add.

        Args:
            saved: The window's saved gradients.
            is_running: Whether the backward pass has begun, so that parameters that the loss uses directly may have new
                gradients.
        """

    def last_pass_begins(self, window: Window) -> None:
        """Called when the weights of a window are complete on this rank. Collective if weights are needed early."""

    def complete(self, bucket: int, window: Window) -> None:
        """Send a complete bucket when its turn comes."""

    def was_weighted(self) -> bool:
        """Whether the last window in which any rank had a pass was WEIGHTED. On a GPU this waits for that window."""
        return False

    # ------------------------------------------------------------------ when it ends

    def finish(self, window: Window) -> None:
        """End the window. Collective: afterwards `p.grad` is the global mean on every rank."""
        divide_alone(self._parameters, window, plain=self._ending.num_shares, scale=self.scale.of_window)

    def learn_order(self, ready_order: Sequence[int]) -> None:
        """Lay the buckets out in the order in which rank 0's gradients were ready. Collective, once."""

    def reset(self) -> None:
        """Forget a window that failed."""

    def unused(self) -> list[int]:
        """The parameters that had no gradient on any rank when the last window ended."""
        return [index for index, parameter in enumerate(self._parameters) if parameter.grad is None]

    # ------------------------------------------------------------------ settings

    def set_hook(self, hook: CommHook) -> None:
        """Average complete buckets over ranks by a communication hook."""

    def set_uneven(self, uneven: Uneven | None) -> None:
        """Allow ranks to leave one by one from now on; None: no longer."""

    def announce(self) -> None:
        """Make the ranks that have left take part in this window; once per window."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self._parameters)} parameters>"
