"""The place of each gradient, in flat buckets per device and dtype. Pure data, computed once, equal on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from evenstep.errors import ConfigurationError

_ALIGNMENT_BYTES = 64  # a cache line, and the alignment of vectorised copies

DEFAULT_FIRST_BUCKET_BYTES = 1 << 20  # small, so that the first exchange begins early in the backward pass
DEFAULT_BUCKET_BYTES = 25 << 20


@dataclass(frozen=True)
class Sharding:
    """How an optimizer's parameters and their gradients are laid out and divided over ranks.

    Attributes:
        owner: Number of the optimizer, unique within a model; parameters of two optimizers share no bucket.
        frees_gradients: Whether a bucket has its memory only during the exchange, so that only the shard stays.
        reduce_dtype: The dtype in which gradients of real numbers are added; None: the parameters' own.
    """

    owner: int
    frees_gradients: bool = False
    reduce_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class ParameterSpec:
    """The properties of a parameter that a layout depends on.

    Attributes:
        name: The parameter's name in the module.
        shape: The parameter's shape.
        dtype: The parameter's dtype.
        device: The device of the parameter and its gradient.
        sharding: How the gradient is divided over ranks; None: it isn't.
        group: Number of the parameter group; parameters of one group are neighbours within a bucket.
        added_in: The dtype in which gradients are added over ranks if `sharding` sets none; None: `dtype`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    sharding: Sharding | None = None
    group: int = 0
    added_in: torch.dtype | None = None

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype in which gradients are added over ranks."""
        own = None if self.sharding is None or not self.dtype.is_floating_point else self.sharding.reduce_dtype
        return own or self.added_in or self.dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class BucketPolicy:
    """The sizes of buckets, and the dtype in which they are added.

    Attributes:
        caps_bytes: The size limits of the first bucket of each device and dtype, of the second, and so on; the last
            limit applies to all further buckets. Only the last parameter of a bucket may exceed the limit, and only if
            it begins in the bucket's first half.
        reduce_dtype: The dtype in which gradients of real floating-point parameters are added over ranks; None: the
            parameters' own.
    """

    caps_bytes: tuple[int, ...] = (DEFAULT_FIRST_BUCKET_BYTES, DEFAULT_BUCKET_BYTES)
    reduce_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if not self.caps_bytes or min(self.caps_bytes) <= 0:
            raise ConfigurationError(f"buckets of {self.caps_bytes} bytes: caps must be greater than 0.")

    def cap_bytes(self, turn: int) -> int:
        """The size limit of a bucket, by its number among the buckets of its device and dtype."""
        return self.caps_bytes[min(turn, len(self.caps_bytes) - 1)]


@dataclass(frozen=True)
class Slot:
    """The place of one parameter's gradient in its bucket.

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
    """One flat tensor that travels as a whole: [numel], padding included.

    The length of a bucket with a `sharding` is a multiple of the number of ranks.
    """

    index: int
    dtype: torch.dtype
    device: torch.device
    slots: tuple[Slot, ...]
    numel: int
    sharding: Sharding | None = None


@dataclass(frozen=True)
class Layout:
    """All buckets in the order in which they are sent.

    Attributes:
        buckets: The buckets.
        bucket_of: For each parameter, the index of its bucket.
    """

    buckets: tuple[BucketLayout, ...]
    bucket_of: tuple[int, ...]


def plan_layout(
    specs: Sequence[ParameterSpec], order: Sequence[int], policy: BucketPolicy, num_shards: int = 1
) -> Layout:
    """Lay parameters out in buckets, in the order in which their gradients are expected. Pure.

    Buckets of all dtypes are sent in the order in which they are expected to fill: the order of their last parameters.

    Args:
        specs: The parameters in registration order.
        order: A permutation of the parameters' indices, earliest gradient first.
        policy: Sizes and dtype of buckets.
        num_shards: Number of equal shards into which buckets with a `sharding` are divided.
    """
    assert sorted(order) == list(range(len(specs))), "an order names every parameter once"
    open_buckets: dict[tuple[object, ...], _OpenBucket] = {}
    closed: list[_OpenBucket] = []
    for turn, index in enumerate(order):
        spec = specs[index]
        key = (spec.device, spec.dtype, spec.sharding)
        padded = _padded(spec.numel, spec.dtype)
        bucket = open_buckets.setdefault(key, _OpenBucket(policy, 0))
        if not bucket.has_room(padded, spec.reduce_dtype.itemsize):
            closed.append(bucket)
            bucket = open_buckets[key] = _OpenBucket(policy, bucket.turn + 1)
        bucket.parameters.append(index)
        bucket.numel += padded
        bucket.last_turn = turn
    closed.extend(open_buckets.values())
    closed.sort(key=lambda bucket: bucket.last_turn)
    bucket_of = [0] * len(specs)
    buckets = []
    for index, bucket in enumerate(closed):
        slots, numel = _place(sorted(bucket.parameters, key=lambda parameter: specs[parameter].group), specs)
        first = specs[bucket.parameters[0]]
        if first.sharding is not None:
            numel = _padded(numel, first.dtype, num_shards)
        buckets.append(BucketLayout(index, first.reduce_dtype, first.device, slots, numel, first.sharding))
        for slot in slots:
            bucket_of[slot.parameter] = index
    return Layout(tuple(buckets), tuple(bucket_of))


def _place(parameters: Sequence[int], specs: Sequence[ParameterSpec]) -> tuple[tuple[Slot, ...], int]:
    """(slots, number of elements) of parameters one after the other."""
    slots, numel = [], 0
    for parameter in parameters:
        slots.append(Slot(parameter, numel, specs[parameter].numel))
        numel += _padded(specs[parameter].numel, specs[parameter].dtype)
    return tuple(slots), numel


class _OpenBucket:
    def __init__(self, policy: BucketPolicy, turn: int) -> None:
        self.turn = turn
        self.cap_bytes = policy.cap_bytes(turn)
        self.parameters: list[int] = []
        self.numel = 0
        self.last_turn = 0

    def has_room(self, numel: int, itemsize: int) -> bool:
        """Whether another parameter fits in this bucket. All parameters of a bucket are added in one dtype.

        A bucket that is at least half empty also accepts a parameter that exceeds its cap. Otherwise a bias that is
        followed by a large weight would be sent in its own bucket, and the weight would wait for the parameters after
        it.
        """
        is_half_empty = 2 * self.numel * itemsize < self.cap_bytes
        return not self.parameters or is_half_empty or (self.numel + numel) * itemsize <= self.cap_bytes


def _padded(numel: int, dtype: torch.dtype, num_shards: int = 1) -> int:
    """A length padded so that each shard fills whole cache lines."""
    per_line = max(1, _ALIGNMENT_BYTES // dtype.itemsize) * num_shards
    return -(-numel // per_line) * per_line
