"""Communication hooks: torch's protocol for doing something else with a bucket than adding it over ranks.

torch's `GradBucket` can't be made outside its own reducer, so `HookBucket` answers to the same methods.
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

# Those of torch's hooks that make one collective and no more, after which all ranks have the same gradients, whatever
# they keep for themselves.
AVERAGING = (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook)


@dataclass(frozen=True)
class CommHook:
    """A hook and the state that it is called with.

    Attributes:
        state: Whatever the hook keeps between buckets; often a process group, or None for the default one.
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
        """Whether the hook has one bucket at a time: see `HookOrder`."""
        return device.type == "cpu" and self.function not in AVERAGING

    def suit(self, policy: BucketPolicy, device: torch.device) -> BucketPolicy:
        """The policy for buckets that are handed to this hook, when they are next laid out. Pure.

        A small first bucket lets the exchange begin early. Where buckets go one by one, each of them several round
        trips, it holds up those behind it.
        """
        first, *others = policy.caps_bytes
        if not self.runs_one_by_one(device) or not others or first != DEFAULT_FIRST_BUCKET_BYTES:
            return policy
        return replace(policy, caps_bytes=tuple(others))

    def start(self, bucket: Bucket, *, is_last: bool) -> torch.futures.Future[Tensor]:
        """Call the hook on a bucket that is complete."""
        future = self.function(self.state, HookBucket(bucket, is_last=is_last))
        if not isinstance(future, Future):  # what c10d makes; torch.futures.Future derives from it
            raise ConfigurationError(
                f"the communication hook returned a {type(future).__name__}; it returns a torch.futures.Future of the "
                f"averaged tensor."
            )
        return future


class HookOrder:
    """Begins hooks on one bucket after another, whichever of a world's models it is of.

    A hook such as PowerSGD goes on in the callbacks of its own collectives. On a CPU these run in the backend's
    threads, and with two buckets under way two ranks may begin the next collectives of the two in a different order,
    and wait for each other for ever. So the next bucket's turn comes when the one before has its result. On a GPU
    callbacks are queued in order by the stream, and all buckets are begun at once; so are those of hooks of torch's
    that make one collective and no more, whose order is that of the buckets.

    When a bucket is done depends on the rank. With an order of its own each model would begin its next bucket before or
    behind another model's, here this way and there that way. Models that two threads run have no common order: one
    rank's first bucket would wait for another model's, and on the next rank the other way round, for ever. So hooks
    that two threads run at the same time are an error. On a GPU autograd's own threads call hooks, and which thread of
    the program has begun the pass isn't known.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lock = threading.RLock()
        self._waiting: deque[HookWork] = deque()
        self._running: HookWork | None = None

    def submit(self, hook: CommHook, bucket: Bucket, *, is_last: bool) -> HookWork:
        """Run a hook on a bucket when its turn comes.

        Raises:
            UsageError: A hook that another thread has begun isn't done. The bucket isn't taken.
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
        """Begin what may begin now."""
        with self._lock:
            while self._waiting:
                running = self._running
                if running is not None and running.goes_alone and not running.is_completed():
                    return
                self._running = self._waiting.popleft()
                self._running.begin()

    def advance_to(self, work: HookWork) -> None:
        """Begin a work; works before it may be another model's, and are awaited first."""
        self.advance()
        while not work.has_begun:
            running = self._running
            if running is not None:
                running.settle()
            self.advance()

    def forget(self, work: HookWork) -> None:
        """Release the bucket's memory of a work that is over."""
        with self._lock:
            if self._running is work:
                self._running = None


_orders: weakref.WeakKeyDictionary[World, HookOrder] = weakref.WeakKeyDictionary()


def hook_order(world: World) -> HookOrder:
    """The one order of the hooks of a world's models."""
    return _orders.setdefault(world, HookOrder(world.rank))


class HookWork:
    """A hook on one bucket, under way or waiting for its turn (see `transport.base.Work`)."""

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
        """Return when the bucket's memory holds what the hook gave."""
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

    def settle(self) -> None:
        """Return when the hook has given its result, whatever it is."""
        if self._future is not None:
            with contextlib.suppress(Exception):  # as in `begin`
                self._future.wait()

    def _validate(self, result: Any, flat: Tensor) -> None:
        is_tensor = isinstance(result, Tensor)
        # One that is too short may begin where the bucket does: what is behind it would stay this rank's own.
        if is_tensor and result.numel() == flat.numel() and torch.can_cast(result.dtype, flat.dtype):
            return
        found = f"{str(result.dtype)[6:]} {list(result.shape)}" if is_tensor else f"a {type(result).__name__}"
        raise ConfigurationError(
            f"the communication hook's future gave {found} for bucket {self.bucket.layout.index}; it gives the average "
            f"of what bucket.buffer() had: {str(flat.dtype)[6:]} {list(flat.shape)}."
        )

    def is_completed(self) -> bool:
        """Whether the hook has given its result."""
        return self._error is not None or (self._future is not None and bool(self._future.done()))


class HookBucket:
    """A bucket as torch's hooks see it: the duck-typed equal of `torch.distributed.GradBucket`."""

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
        """Go on with another tensor of the same length, such as a compressed one."""
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
