"""The gradient placeholder: the tensor in `p.grad` while the gradient is sharded. It may be dropped, but not read."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partialmethod
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from evenstep.errors import UsageError
from evenstep.ground.compat.torch_autograd import graph_task_id
from evenstep.ground.compat.torch_pytree import tree_leaves
from evenstep.ground.compat.torch_tensors import disabled_function, make_wrapper_subclass, unscale
from evenstep.transport.core.transport import Transport

_aten = torch.ops.aten
_UNSCALE = _aten._amp_foreach_non_finite_check_and_unscale_.default


class PlaceholderBucket(Protocol):
    """The part of a bucket's interface that a placeholder uses.

    Attributes:
        names: Names of the parameters, by slot.
        transport: Connects the ranks over which the gradients are divided.
    """

    names: list[str]
    transport: Transport

    def show_zeros(self, index: int) -> None:
        """Replace a placeholder by a full tensor of zeros, because the gradient was zeroed."""

    def receive(self, index: int, gradient: Tensor) -> None:
        """Called when autograd adds a gradient to the sharded gradient."""

    def local_parts(self, indices: Sequence[int]) -> list[Tensor]:
        """This rank's parts of some gradients, with neighbours joined: views, [n] each."""


class GradientPlaceholder(Tensor):
    """A tensor without memory. Every operation on it raises, except zeroing it and a GradScaler's unscaling.

    A program may read its shape, dtype and device. So `p.grad is None` still shows whether there is a gradient, and
    torch's clipping raises an error instead of computing the norm of this rank's shard.

    Attributes:
        parameter_name: Name of the parameter.
        slot_number: Number of the slot in the bucket.
    """

    parameter_name: str
    slot_number: int
    _bucket: weakref.ref[PlaceholderBucket]

    @staticmethod
    def __new__(cls, bucket: PlaceholderBucket, index: int, parameter: Tensor) -> GradientPlaceholder:
        """Make a placeholder; called by the bucket."""
        made: GradientPlaceholder = make_wrapper_subclass(
            cls, parameter.shape, strides=parameter.stride(), dtype=parameter.dtype, device=parameter.device
        )
        return made

    def __init__(self, bucket: PlaceholderBucket, index: int, parameter: Tensor) -> None:
        self.parameter_name = bucket.names[index]
        self.slot_number = index
        # Use a weak reference: the garbage collector doesn't see that a parameter references its gradient, and could
        # never free the cycle.
        self._bucket = weakref.ref(bucket)

    __torch_function__ = disabled_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Do the operations that are possible on shards, and refuse all others."""
        if func is _UNSCALE:
            _unscale(*args, **(kwargs or {}))
            return None
        leaves = tree_leaves((args, kwargs))  # including `out`
        hidden = next(each for each in leaves if isinstance(each, GradientPlaceholder))
        if func is _aten.zero_.default:
            hidden.bucket.show_zeros(hidden.slot_number)
            return hidden
        if func is _aten._foreach_zero_.default:
            for each in args[0]:
                each.zero_()
            return None
        if func is _aten.add_.Tensor and args[0] is hidden and graph_task_id() != -1:
            hidden.bucket.receive(hidden.slot_number, args[1])  # autograd accumulates
            return hidden
        return hidden.refuse(str(func).removeprefix("aten.").partition(".")[0])

    def refuse(self, by: str, *_: Any, **__: Any) -> NoReturn:
        """Raise an error, because the gradient can't be read.

        Args:
            by: The operation.

        Raises:
            UsageError: Always.
        """
        num_shards = self.bucket.transport.world_size
        where = f"divided over {num_shards} ranks by a ShardedOptimizer"
        otherwise = "an optimizer that isn't sharded"
        if num_shards == 1:
            where = "kept in the reduce_dtype in which it was added, for an optimizer that steps there"
            otherwise = "an optimizer that isn't sharded, or no reduce_dtype"
        raise UsageError(
            f"the gradient of {self.parameter_name!r} is {where}, and was read by {by}. To clip use "
            f"evenstep.clip_grad_norm_(optimizer, ...) or evenstep.clip_grad_value_. To log a norm use "
            f"evenstep.clip_grad_norm_([parameter], math.inf), which changes nothing. Other code that needs whole "
            f"gradients needs {otherwise}."
        )

    @property
    def bucket(self) -> PlaceholderBucket:
        """The bucket that holds the gradient."""
        bucket = self._bucket()
        assert bucket is not None, "buckets live as long as the engine, and longer than what it puts into p.grad"
        return bucket

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """Always raises: the placeholder has no data.

        Raises:
            UsageError: Always.
        """
        self.refuse("data")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<GradientPlaceholder of {self.parameter_name!r} {list(self.shape)}, divided over the ranks>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            f"the gradient of {self.parameter_name!r} is divided over the ranks and can't be copied or saved."
        )


# Methods that read a tensor's memory without a dispatched operation. Without memory, some of them crash the process.
_BY_MEMORY = (
    "__array__",
    "__dlpack__",
    "apply_",
    "data_ptr",
    "map2_",
    "map_",
    "numpy",
    "share_memory_",
    "storage",
    "tolist",
    "untyped_storage",
)


for _name in _BY_MEMORY:
    setattr(GradientPlaceholder, _name, partialmethod(GradientPlaceholder.refuse, _name))


def local_parts(gradients: Iterable[GradientPlaceholder]) -> list[Tensor]:
    """This rank's parts of some gradients, with neighbours joined into one flat tensor. Views, [n] each."""
    by_bucket: dict[PlaceholderBucket, list[int]] = {}
    for gradient in gradients:
        by_bucket.setdefault(gradient.bucket, []).append(gradient.slot_number)
    return [part for bucket, indices in by_bucket.items() for part in bucket.local_parts(indices)]


def _unscale(gradients: Sequence[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """Unscale this rank's shards, for a GradScaler. `found_inf` becomes 1 on all ranks if it is 1 on one."""
    hidden = [each for each in gradients if isinstance(each, GradientPlaceholder)]
    parts = local_parts(hidden) + [each for each in gradients if not isinstance(each, GradientPlaceholder)]
    for part in parts:  # one by one: they may have different dtypes
        unscale([part], found_inf, inverse_scale)
    if hidden:  # all placeholders are of one model, so they share its transport
        hidden[0].bucket.transport.all_reduce(found_inf, "max").wait()
