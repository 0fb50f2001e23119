"""What happens to the gradients of a window when it ends: they are added over ranks and divided once.

`BucketExchange` sends buckets while the backward pass runs, a header behind them, and rank 0's module buffers behind
that. `NoExchange` is the same seam for a world of one, where gradients stay where autograd put them: packing buckets
that travel nowhere would cost a copy and a call per parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from evenstep.replica.bucket import Bucket
from evenstep.replica.comm_hook import CommHook, HookQueue
from evenstep.replica.layout import BucketPolicy, Layout, ParameterSpec, plan_layout
from evenstep.replica.module_buffers import BufferBroadcast
from evenstep.replica.reducer import BucketState, LaunchReduce, Reducer
from evenstep.replica.weighting import Header, Kind, Window, nearest_power_of_two
from evenstep.transport.base import Transport
from evenstep.transport.local import LocalTransport
from evenstep.world import World


class Exchange(Protocol):
    """The seam between passes and windows (`engine`) and the exchange of gradients.

    Attributes:
        layout: Which gradient lies in which bucket; without buckets where nothing travels.
        buckets: Those buckets.
    """

    layout: Layout
    buckets: Sequence[Bucket]

    def weight_scale(self, weight: float | Tensor, *, opens_window: bool) -> float:
        """By what weights are divided before they multiply gradients; the same in all passes of a window."""

    def is_clear(self, bucket: Bucket) -> bool:
        """Whether a bucket's gradients are its views and all zero, as far as that can be seen without waiting."""

    def complete(self, bucket: int, kind: Kind | None) -> None:
        """A bucket has all its gradients: send it when its turn comes."""

    def finish(self, window: Window) -> None:
        """Collective: end the window. Afterwards `p.grad` is the global mean on every rank."""

    def learn_order(self, ready_order: Sequence[int]) -> None:
        """Collective, once: lay the buckets out again in the order in which rank 0's gradients were ready."""

    def set_hook(self, hook: CommHook) -> None:
        """Hand complete buckets to a communication hook, which averages them over ranks."""

    def in_flight(self) -> list[int]:
        """Indices of the buckets that are travelling at this moment."""

    def reset(self) -> None:
        """Forget a window that failed."""


def build_exchange(
    module: nn.Module,
    names: Sequence[str],
    parameters: Sequence[nn.Parameter],
    world: World,
    policy: BucketPolicy,
    *,
    broadcast_buffers: bool,
) -> Exchange:
    """The exchange that suits a world."""
    if world.world_size == 1:
        return NoExchange(parameters)
    buffers = BufferBroadcast(module, world.transport) if broadcast_buffers else None
    return BucketExchange(names, parameters, world, policy, buffers)


class NoExchange:
    """The exchange of a world of one. Only weights are left to divide by."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.layout = Layout((), (0,) * len(parameters))
        self.buckets: Sequence[Bucket] = ()
        self._parameters = parameters
        self._scale = 1.0

    def weight_scale(self, weight: float | Tensor, *, opens_window: bool) -> float:
        """The window's first weight: a window of one pass then has nothing to divide by."""
        if opens_window:
            self._scale = weight if isinstance(weight, float) and weight > 0 else 1.0
        return self._scale

    def is_clear(self, bucket: Bucket) -> bool:
        """See `Exchange.is_clear`; there are no buckets."""
        return False

    def complete(self, bucket: int, kind: Kind | None) -> None:
        """See `Exchange.complete`; there are no buckets."""

    def finish(self, window: Window) -> None:
        """Divide by the window's weight."""
        if window.kind is not Kind.WEIGHTED:
            return
        divisor = window.weight / self._scale
        if isinstance(divisor, float) and divisor == 1.0:
            return
        grads = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if isinstance(divisor, Tensor):
            _zero_where(divisor == 0, grads)
            divisor = torch.where(divisor > 0, divisor, torch.inf)
        elif divisor == 0.0:
            divisor = float("inf")
        for grad in grads:
            grad.div_(divisor)

    def learn_order(self, ready_order: Sequence[int]) -> None:
        """See `Exchange.learn_order`; there are no buckets."""

    def set_hook(self, hook: CommHook) -> None:
        """See `Exchange.set_hook`; there is no bucket to hand over."""

    def in_flight(self) -> list[int]:
        """See `Exchange.in_flight`: nothing."""
        return []

    def reset(self) -> None:
        """See `Exchange.reset`; there is nothing to forget."""


class BucketExchange:
    """Adds gradients over ranks in buckets, in order, while the backward pass runs.

    Args:
        names: Of the parameters, for messages.
        parameters: In registration order.
        world: Who takes part.
        policy: Sizes of buckets.
        module_buffers: Sent along, or None.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        world: World,
        policy: BucketPolicy,
        module_buffers: BufferBroadcast | None,
    ) -> None:
        self._names = names
        self._parameters = parameters
        self._world = world
        self._policy = policy
        self._module_buffers = module_buffers
        self._specs = [
            ParameterSpec(name, tuple(parameter.shape), parameter.dtype, parameter.device)
            for name, parameter in zip(names, parameters, strict=True)
        ]
        self._header = Header(len(parameters), parameters[0].device)
        self._half_scale: float | None = None
        self._hooks: HookQueue | None = None
        # A backward pass reaches the last layers first; the second layout knows better.
        self._build(plan_layout(self._specs, range(len(parameters) - 1, -1, -1), policy))
        self._has_half_precision = any(bucket.has_half_precision for bucket in self.buckets)

    def _build(self, layout: Layout) -> None:
        self.layout = layout
        self.reducer = Reducer(len(layout.buckets))
        # A hook may resize the memory that it is given, which a transport's own may not allow.
        allocator: Transport = self._world.transport if self._hooks is None else LocalTransport()
        self.buckets: Sequence[Bucket] = [
            Bucket(bucket, self._parameters, self._names, self._world.transport, allocator=allocator)
            for bucket in layout.buckets
        ]

    def weight_scale(self, weight: float | Tensor, *, opens_window: bool) -> float:
        """1, or about the sum of the weights where gradients have 16 bits.

        A power of two, so that nothing is rounded; agreed by all ranks in the first window (collective), and kept.
        """
        if not self._has_half_precision:
            return 1.0
        if self._half_scale is None:
            total = torch.zeros(1, dtype=torch.float64, device=self._header.tensor.device)
            total[0] = weight
            self._world.transport.all_reduce(total).wait()
            self._half_scale = nearest_power_of_two(float(total))
        return self._half_scale

    def is_clear(self, bucket: Bucket) -> bool:
        """See `Exchange.is_clear`."""
        all_views = all(p.grad is view for p, view in zip(bucket.parameters, bucket.views, strict=True))
        return all_views and bucket.flat.device.type == "cpu" and not bucket.flat.any()

    def complete(self, bucket: int, kind: Kind | None) -> None:
        """See `Exchange.complete`."""
        self._execute(self.reducer.complete(bucket), kind)

    def finish(self, window: Window) -> None:
        """See `Exchange.finish`."""
        if isinstance(window.weight, Tensor):
            # On a GPU a weight isn't read, so a window of weight 0 hasn't been recognised: contribute zeros.
            _zero_where(window.weight == 0, [p.grad for p in self._parameters if p.grad is not None])
        self._execute(self.reducer.finish(), window.kind)
        used = [parameter.grad is not None for parameter in self._parameters]
        self._header.fill(window, used)
        header_work = self._world.transport.all_reduce(self._header.tensor)
        sent_buffers = self._module_buffers.start() if self._module_buffers is not None else []
        for index, bucket in enumerate(self.buckets):
            bucket.wait()
            self.reducer.arrived(index)
        header_work.wait()
        self.reducer.reset()
        if self._header.tensor.device.type == "cpu":
            self._header.check_kinds()
        self._divide(window)
        if not all(used):
            used_anywhere = self._header.used_anywhere()
            for bucket in self.buckets:
                bucket.publish(used_anywhere.__getitem__)
        if self._module_buffers is not None:
            self._module_buffers.finish(sent_buffers)

    def learn_order(self, ready_order: Sequence[int]) -> None:
        """See `Exchange.learn_order`."""
        seen = set(ready_order)
        order = [*ready_order, *(i for i in range(len(self._parameters) - 1, -1, -1) if i not in seen)]
        agreed = torch.tensor(order)
        self._world.control.broadcast(agreed, 0).wait()
        layout = plan_layout(self._specs, agreed.tolist(), self._policy)
        if layout == self.layout:
            return
        reduced = [parameter.grad for parameter in self._parameters]
        self._build(layout)
        for bucket in self.buckets:
            for slot, parameter, view in zip(bucket.layout.slots, bucket.parameters, bucket.views, strict=True):
                grad = reduced[slot.parameter]
                if grad is not None:
                    view.copy_(grad)
                    parameter.grad = view

    def set_hook(self, hook: CommHook) -> None:
        """See `Exchange.set_hook`."""
        self._hooks = HookQueue(hook)
        self._build(self.layout)

    def in_flight(self) -> list[int]:
        """See `Exchange.in_flight`."""
        return [i for i in range(len(self.buckets)) if self.reducer.state(i) is BucketState.REDUCING]

    def reset(self) -> None:
        """See `Exchange.reset`."""
        self.reducer = Reducer(len(self.buckets))

    def _execute(self, actions: Iterable[LaunchReduce], kind: Kind | None) -> None:
        for action in actions:
            bucket = self.buckets[action.bucket]
            bucket.pack()
            if self._hooks is None and kind is not Kind.WEIGHTED and bucket.has_half_precision:
                bucket.flat.div_(self._world.world_size)  # before the sum, which could overflow
            bucket.launch(self._hooks, is_last=action.bucket == len(self.buckets) - 1)

    def _divide(self, window: Window) -> None:
        # A rank whose share was empty knows only from the header which kind the others had.
        weighted = window.kind is Kind.WEIGHTED
        if window.kind is None:
            weighted = bool(self._header.tensor[1] > 0)
        if weighted:
            # A hook has divided by the number of ranks already.
            divided_by = 1.0 if self._hooks is None else float(self._world.world_size)
            divisor = self._header.divisor((self._half_scale or 1.0) * divided_by)
            for bucket in self.buckets:
                bucket.flat.div_(divisor.to(bucket.flat.device))
        elif self._hooks is None:
            for bucket in self.buckets:
                if not bucket.has_half_precision:
                    bucket.flat.div_(self._world.world_size)

    def __repr__(self) -> str:
        return f"<BucketExchange of {len(self._parameters)} parameters, {self.reducer!r}>"


def _zero_where(condition: Tensor, grads: Iterable[Tensor]) -> None:
    for grad in grads:
        grad.masked_fill_(condition.to(grad.device), 0)
