"""Communication hooks: torch's protocol for replacing the all-reduce of a bucket.

torch's `GradBucket` can't be constructed outside torch's reducer, so `HookBucket` has the same methods.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from evenstep.errors import ConfigurationError, UsageError
from evenstep.ground.compat.torch_ddp import Future
from evenstep.replica.gradients.buckets.bucket import Bucket
from evenstep.replica.gradients.buckets.layout import DEFAULT_FIRST_BUCKET_BYTES, BucketPolicy
from evenstep.world import World

# torch's hooks that make exactly one collective per bucket. Afterwards all ranks have the same gradients, even if the
# hook's state differs between ranks.
AVERAGING = (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook)


@dataclass(frozen=True)
class CommHook:
    """A hook and its state.

    Attributes:
        state: The hook's state between buckets; often a process group, or None for the default group.
        function: Called with the state and a bucket; returns a future of the averaged tensor.
    """

    state: object
    function: Callable[[Any, Any], torch.futures.Future[Tensor]]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ConfigurationError(f"register_comm_hook: {self.function!r}. Communication hook must be callable.")
        try:
            inspect.signature(self.function).bind(None, None)
        except TypeError:
            raise ConfigurationError(
                f"register_comm_hook: {getattr(self.function, '__name__', self.function)!s} can't be called with "
                f"(state, bucket)."
            ) from None
        except ValueError:
            pass  # a builtin without a signature

    def runs_one_by_one(self, device: torch.device) -> bool:
        """Whether the hook handles one bucket at a time: see `HookOrder`."""
        return device.type == "cpu" and self.function not in AVERAGING

    def suit(self, policy: BucketPolicy, device: torch.device) -> BucketPolicy:
        """The policy by which the buckets for this hook are laid out. Pure.

        A small first bucket lets the exchange begin early. But if buckets are sent one at a time, with several round
        trips each, it only delays the buckets after it.
        """
        first, *others = policy.caps_bytes
        if not self.runs_one_by_one(device) or not others or first != DEFAULT_FIRST_BUCKET_BYTES:
            return policy
        return replace(policy, caps_bytes=tuple(others))

    def start(self, bucket: Bucket, *, is_last: bool) -> torch.futures.Future[Tensor]:
        """Call the hook on a bucket that is complete."""
        future = self.function(self.state, HookBucket(bucket, is_last=is_last))
        if not isinstance(future, Future):  # the base class, which c10d returns; torch.futures.Future derives from it
            raise ConfigurationError(
                f"the communication hook returned a {type(future).__name__}; it must return a torch.futures.Future of "
                f"the averaged tensor."
            )
        return future


class HookOrder:
    """Runs hooks on one bucket after another, in one order for all models of a world.

    A hook such as PowerSGD continues in the callbacks of its own collectives. On a CPU the backend's threads run these
    callbacks. With two buckets in flight, two ranks may start the second collectives of the two buckets in different
    orders, and then wait for each other for ever. So a bucket's hook is called only when the hook of the bucket before
    it has its result. On a GPU the stream queues callbacks in order, so all hooks are called at once. torch's hooks
    that make exactly one collective are called at once, too: their collectives have the buckets' order.

    The time at which a bucket is done differs between ranks. If each model had its own order, one rank would start
    model A's next bucket before model B's, and another rank after it. So all models share one order. Models that two
    threads run have no common order: on one rank a bucket of A would wait for a bucket of B, on another rank B's for
    A's, for ever. So hooks that two threads run at the same time are an error. On a GPU autograd's own threads call
    hooks, so the program's thread isn't known and can't be checked.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lock = threading.RLock()
        self._waiting: deque[HookWork] = deque()
        self._running: HookWork | None = None

    def submit(self, hook: CommHook, bucket: Bucket, *, is_last: bool) -> HookWork:
        """Run a hook on a bucket when its turn comes.

        Raises:
            UsageError: A hook that another thread has started isn't done. The bucket is not queued.
        """
        work = HookWork(self, hook, bucket, is_last=is_last)
        with self._lock:
            running = self._running
            if running is not None and running.thread != work.thread and not running.is_completed():
                raise UsageError(
                    f"rank {self._rank}: communication hooks of models in two threads run at the same time, and ranks "
                    f"would begin their collectives in different orders. Train the models with hooks in one thread."
                )
            self._waiting.append(work)
            self.advance()
        work.raise_if_failed()
        return work

    def advance(self) -> None:
        """Call the hooks whose turn has come."""
        with self._lock:
            while self._waiting:
                running = self._running
                if running is not None and running.goes_alone and not running.is_completed():
                    return
                self._running = self._waiting.popleft()
                self._running.begin()

    def advance_to(self, work: HookWork) -> None:
        """Start a work, after waiting for the works before it, which may be another model's."""
        self.advance()
        while not work.has_begun:
            running = self._running
            if running is not None:
                running.await_hook()
            self.advance()

    def forget(self, work: HookWork) -> None:
        """Drop a finished work, which holds its bucket's memory."""
        with self._lock:
            if self._running is work:
                self._running = None


_orders: weakref.WeakKeyDictionary[World, HookOrder] = weakref.WeakKeyDictionary()


def hook_order(world: World) -> HookOrder:
    """The order that the hooks of all models of a world share."""
    return _orders.setdefault(world, HookOrder(world.rank))


class HookWork:
    """The call of a hook on one bucket, running or waiting for its turn; has the interface of a transport's `Work`."""

    def __init__(self, order: HookOrder, hook: CommHook, bucket: Bucket, *, is_last: bool) -> None:
        self.bucket = bucket
        self.goes_alone = hook.runs_one_by_one(bucket.flat.device)
        self.thread = threading.get_ident() if bucket.flat.device.type == "cpu" else 0  # see `HookOrder`
        self._order = order
        self._hook = hook
        self._is_last = is_last
        self._future: torch.futures.Future[Tensor] | None = None
        self._error: Exception | None = None

    def begin(self) -> None:
        """Call the hook, and keep its error for the thread that waits for this work."""
        try:
            self._future = self._hook.start(self.bucket, is_last=self._is_last)
        except Exception as error:
            self._error = error

    def raise_if_failed(self) -> None:
        """Raise what the hook has raised."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Wait until the bucket's memory holds the hook's result."""
        self._order.advance_to(self)
        try:
            self.raise_if_failed()
            assert self._future is not None
            result: Any = self._future.wait()
        finally:
            self._order.forget(self)
        if isinstance(result, list | tuple) and result:
            result = result[0]
        flat = self.bucket.flat
        self._validate(result, flat)
        if result.data_ptr() != flat.data_ptr() or result.dtype != flat.dtype or not result.is_contiguous():
            flat.copy_(result.reshape(flat.shape))

    @property
    def has_begun(self) -> bool:
        """Whether the hook was called."""
        return self._future is not None or self._error is not None

    def await_hook(self) -> None:
        """Wait until the hook has its result or has failed."""
        if self._future is not None:
            with contextlib.suppress(Exception):  # as in `begin`
                self._future.wait()

    def _validate(self, result: Any, flat: Tensor) -> None:
        is_tensor = isinstance(result, Tensor)
        # A tensor that is too short may begin at the bucket's first element: the elements after its end would stay this
        # rank's own gradients.
        if is_tensor and result.numel() == flat.numel() and torch.can_cast(result.dtype, flat.dtype):
            return
        found = f"{str(result.dtype)[6:]} {list(result.shape)}" if is_tensor else f"a {type(result).__name__}"
        raise ConfigurationError(
            f"the communication hook's future gave {found} for bucket {self.bucket.layout.index}; it must give the "
            f"average of bucket.buffer(): {str(flat.dtype)[6:]} {list(flat.shape)}."
        )

    def is_completed(self) -> bool:
        """Whether the hook has its result."""
        return self._error is not None or (self._future is not None and bool(self._future.done()))


class HookBucket:
    """A bucket with the methods of `torch.distributed.GradBucket`, for hooks."""

    def __init__(self, bucket: Bucket, *, is_last: bool) -> None:
        self._bucket = bucket
        self._buffer = bucket.flat
        self._is_last = is_last

    def index(self) -> int:
        """Number of the bucket, in the order of sending."""
        return self._bucket.layout.index

    def buffer(self) -> Tensor:
        """All gradients of the bucket: [numel], padding included."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the buffer by another tensor of the same length, such as a compressed tensor."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """One view of the buffer per parameter."""
        return [
            self._buffer.as_strided(view.shape, view.stride(), self._buffer.storage_offset() + slot.offset_numel)
            for slot, view in zip(self._bucket.layout.slots, self._bucket.views, strict=True)
        ]

    def parameters(self) -> list[nn.Parameter]:
        """The parameters, in the order of `gradients`."""
        return list(self._bucket.parameters)

    def is_last(self) -> bool:
        """Whether no bucket comes after this one in this backward pass."""
        return self._is_last
