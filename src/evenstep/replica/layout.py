"""Which gradient lies where: flat buckets per device and dtype. Pure data, computed once, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from evenstep.errors import ConfigurationError

_ALIGNMENT_BYTES = 64  # a cache line, and what vectorised copies like

DEFAULT_FIRST_BUCKET_BYTES = 1 << 20  # small: the first exchange should begin soon after the backward pass has
DEFAULT_BUCKET_BYTES = 25 << 20


@dataclass(frozen=True)
class ParameterSpec:
    """What a layout has to know of a parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class BucketPolicy:
    """How large buckets are.

    Attributes:
        caps_bytes: Cap of the first bucket of each device and dtype, of the second, and so on; the last holds for all
            that follow. A larger parameter has a bucket to itself.
    """

    caps_bytes: tuple[int, ...] = (DEFAULT_FIRST_BUCKET_BYTES, DEFAULT_BUCKET_BYTES)

    def __post_init__(self) -> None:
        if not self.caps_bytes or min(self.caps_bytes) <= 0:
            raise ConfigurationError(f"buckets of {self.caps_bytes} bytes: caps are greater than 0.")

    def cap_bytes(self, turn: int) -> int:
        """Cap of a bucket, by its turn among those of its device and dtype."""
        return self.caps_bytes[min(turn, len(self.caps_bytes) - 1)]


@dataclass(frozen=True)
class Slot:
    """Where one parameter's gradient lies in its bucket.

    Attributes:
        parameter: Index of the parameter in registration order.
        offset_numel: First element, in elements from the beginning of the bucket.
        numel: Number of elements.
    """

    parameter: int
    offset_numel: int
    numel: int


@dataclass(frozen=True)
class BucketLayout:
    """One flat tensor that travels as a whole: [numel], padding included."""

    index: int
    dtype: torch.dtype
    device: torch.device
    slots: tuple[Slot, ...]
    numel: int


@dataclass(frozen=True)
class Layout:
    """All buckets in the order in which they are sent.

    Attributes:
        buckets: The buckets.
        bucket_of: For each parameter, the index of its bucket.
    """

    buckets: tuple[BucketLayout, ...]
    bucket_of: tuple[int, ...]


def plan_layout(specs: Sequence[ParameterSpec], order: Sequence[int], policy: BucketPolicy) -> Layout:
    """Lay parameters out in buckets, in the order in which their gradients are expected. Pure.

    Buckets are sent in the order in which they are expected to fill, whatever their dtype: the order in which their
    last parameters come.

    Args:
        specs: The parameters in registration order.
        order: A permutation of their indices, earliest gradient first.
        policy: Sizes.
    """
    assert sorted(order) == list(range(len(specs))), "an order names every parameter once"
    open_buckets: dict[tuple[torch.device, torch.dtype], _OpenBucket] = {}
    closed: list[_OpenBucket] = []
    for turn, index in enumerate(order):
        spec = specs[index]
        key = (spec.device, spec.dtype)
        bucket = open_buckets.get(key)
        padded = _padded_numel(spec)
        if bucket is not None and bucket.slots and (bucket.numel + padded) * spec.dtype.itemsize > bucket.cap_bytes:
            closed.append(bucket)
            bucket = open_buckets[key] = _OpenBucket(policy, bucket.turn + 1)
        elif bucket is None:
            bucket = open_buckets[key] = _OpenBucket(policy, 0)
        bucket.slots.append(Slot(index, bucket.numel, spec.numel))
        bucket.numel += padded
        bucket.last_turn = turn
    closed.extend(open_buckets.values())
    closed.sort(key=lambda bucket: bucket.last_turn)
    bucket_of = [0] * len(specs)
    buckets = []
    for index, bucket in enumerate(closed):
        first = specs[bucket.slots[0].parameter]
        buckets.append(BucketLayout(index, first.dtype, first.device, tuple(bucket.slots), bucket.numel))
        for slot in bucket.slots:
            bucket_of[slot.parameter] = index
    return Layout(tuple(buckets), tuple(bucket_of))


class _OpenBucket:
    def __init__(self, policy: BucketPolicy, turn: int) -> None:
        self.turn = turn
        self.cap_bytes = policy.cap_bytes(turn)
        self.slots: list[Slot] = []
        self.numel = 0
        self.last_turn = 0


def _padded_numel(spec: ParameterSpec) -> int:
    per_line = max(1, _ALIGNMENT_BYTES // spec.dtype.itemsize)
    return -(-spec.numel // per_line) * per_line
