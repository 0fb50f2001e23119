"""When buckets of torch's wrapper set out, seen at the parameters that complete them.

[Note: torch's buckets]

A communication hook would see every bucket, and change what is measured: torch then calls Python where it has called
C++. But torch says by itself which parameters share a bucket (`_get_ddp_logging_data`), and a bucket sets out when the
gradients of all of them are there and the buckets before it have gone. So one hook is enough for each bucket, on the
parameter that was the last of its bucket in the first pass: torch lays its buckets out anew in that order, before the
second pass. With `find_unused_parameters` it doesn't, and they stay in reverse order of registration.

The arrival of a bucket can't be seen: the wrapper waits for all of them at once, and so does the picture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

_NUM_PATIENT = 2  # passes for which new buckets are waited for: what torch says is a pass old


@dataclass(frozen=True)
class TorchBuckets:
    """How gradients share buckets.

    Attributes:
        num_bytes: By bucket, in the order in which they set out.
        completed_by: By bucket: the index of the parameter whose gradient is the last one.
    """

    num_bytes: tuple[int, ...]
    completed_by: tuple[int, ...]


def read_buckets(received: Mapping[str, Any], bytes_of: Sequence[int]) -> TorchBuckets | None:
    """What torch's logging data say; None if they don't fit the model. Pure.

    Args:
        received: The data that `_get_ddp_logging_data` returns.
        bytes_of: Of the gradients of all parameters, in registration order.
    """
    try:
        if received.get("has_rebuilt_buckets"):
            sizes = [int(size) for size in received["rebuilt_bucket_sizes"].split(",")]
            members = [
                [int(index) for index in each.split()]
                for each in received["rebuilt_per_bucket_param_indices"].split(",")
            ]
        else:
            sizes = [int(size) for size in received["bucket_sizes"].split(",")]
            members = _in_reverse(sizes, bytes_of)
        fits = [sum(bytes_of[index] for index in each) for each in members] == sizes
    except (AttributeError, IndexError, KeyError, ValueError):
        return None
    if not fits or sorted(index for each in members for index in each) != list(range(len(bytes_of))):
        return None
    return TorchBuckets(tuple(sizes), tuple(each[-1] for each in members))


def _in_reverse(sizes: Sequence[int], bytes_of: Sequence[int]) -> list[list[int]]:
    """The last parameters are in the first bucket."""
    left = list(range(len(bytes_of)))
    members: list[list[int]] = []
    for size in sizes:
        members.append([])
        while sum(bytes_of[index] for index in members[-1]) < size:
            members[-1].append(left.pop())
    return members


class BucketWatch:
    """Tells when buckets of one wrapped model set out.

    Args:
        model: The wrapper.
        mark: Called with the number of a bucket.

    Attributes:
        num_bytes: By bucket; empty until they are known, and if torch doesn't log them.
    """

    def __init__(self, model: DistributedDataParallel, mark: Callable[[int], None]) -> None:
        self._model, self._mark = model, mark
        self._num_passes = 0
        self._is_complete: list[bool] = []
        self._next = 0
        self._is_attached = False
        self.num_bytes: tuple[int, ...] = ()

    def forward_begins(self) -> None:
        """The module is about to run, and the wrapper has laid out its buckets."""
        if self._is_attached or not self._model.require_backward_grad_sync:
            return  # in a pass without an exchange torch says nothing new
        self._num_passes += 1
        received = _logging_data(self._model)
        if received is None:
            self._is_attached = True  # nobody says it, and nobody will
        elif received.get("has_rebuilt_buckets") or self._num_passes > _NUM_PATIENT:
            self._is_attached = True
            parameters = _reduced(self._model)
            buckets = read_buckets(received, [p.numel() * p.element_size() for p in parameters])
            if buckets is not None:
                self._attach(buckets, parameters)

    def backward_begins(self) -> None:
        """No bucket of this pass has gone."""
        self._is_complete = [False] * len(self.num_bytes)
        self._next = 0

    def gradients_are_there(self) -> None:
        """The pass has ended, and with it the wait for parameters that weren't used."""
        if self._model.require_backward_grad_sync:
            self._is_complete = [True] * len(self.num_bytes)
            self._send()

    def _attach(self, buckets: TorchBuckets, parameters: Sequence[nn.Parameter]) -> None:
        self.num_bytes = buckets.num_bytes
        self.backward_begins()
        for number, index in enumerate(buckets.completed_by):
            hook = self._completes(number)
            parameters[index].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _completes(self, number: int) -> Callable[[Tensor], None]:
        def complete(parameter: Tensor) -> None:
            if self._model.require_backward_grad_sync:
                self._is_complete[number] = True
                self._send()

        return complete

    def _send(self) -> None:
        while self._next < len(self._is_complete) and self._is_complete[self._next]:
            self._mark(self._next)
            self._next += 1


def _logging_data(model: DistributedDataParallel) -> dict[str, Any] | None:
    try:
        received: dict[str, Any] = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    except (AttributeError, AssertionError, RuntimeError):
        return None
    return received


def _reduced(model: DistributedDataParallel) -> list[nn.Parameter]:
    """The parameters that the wrapper knows, in its order."""
    ignored = getattr(model, "parameters_to_ignore", ())
    return [p for name, p in model.module.named_parameters() if p.requires_grad and name not in ignored]
