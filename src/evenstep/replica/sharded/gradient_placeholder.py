"""What stands in `p.grad` while the gradient itself is divided over the ranks: it may be dropped, not read."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from evenstep.errors import UsageError
from evenstep.transport.base import Transport

_aten = torch.ops.aten
_UNSCALE = _aten._amp_foreach_non_finite_check_and_unscale_.default


class Divided(Protocol):
    """What a hidden gradient asks of the bucket in which its parts are.

    Attributes:
        names: Of the parameters, slot by slot.
        num_shards: Over how many ranks they are divided.
        transport: Between these ranks.
    """

    names: list[str]
    num_shards: int
    transport: Transport

    def show_zeros(self, index: int) -> None:
        """A gradient is made zero: from now on it is there in full."""

    def receive(self, index: int, gradient: Tensor) -> None:
        """Autograd adds a gradient to the one that is hidden."""

    def local_parts(self, indices: Sequence[int]) -> list[Tensor]:
        """This rank's parts of some gradients, neighbours as one: views, [n] each."""


class HiddenGradient(Tensor):
    """A tensor without memory. Every operation on it raises, but for zeroing it and a GradScaler's unscaling.

    Of its shape, dtype and device a program may ask. So `p.grad is None` says whether there is a gradient, and torch's
    clipping, which would take this rank's part for the whole, is an error and no wrong norm.

    Attributes:
        parameter_name: Of the parameter.
        slot_number: Of its slot in the bucket.
    """

    parameter_name: str
    slot_number: int
    _bucket: weakref.ref[Divided]

    @staticmethod
    def __new__(cls, bucket: Divided, index: int, parameter: Tensor) -> HiddenGradient:
        """Made by the bucket."""
        made: HiddenGradient = Tensor._make_wrapper_subclass(
            cls, parameter.shape, strides=parameter.stride(), dtype=parameter.dtype, device=parameter.device
        )
        return made

    def __init__(self, bucket: Divided, index: int, parameter: Tensor) -> None:
        self.parameter_name = bucket.names[index]
        self.slot_number = index
        # Weakly: the collector doesn't see that a parameter holds its gradient, and would never free the circle.
        self._bucket = weakref.ref(bucket)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse, or do what can be done on shards."""
        if func is _UNSCALE:
            _unscale(*args, **(kwargs or {}))
            return None
        given = _leaves((args, tuple((kwargs or {}).values())))  # `out=`, too
        hidden = next(each for each in given if isinstance(each, HiddenGradient))
        if func is _aten.zero_.default:
            hidden.bucket.show_zeros(hidden.slot_number)
            return hidden
        if func is _aten._foreach_zero_.default:
            for each in args[0]:
                each.zero_()
            return None
        if func is _aten.add_.Tensor and args[0] is hidden and torch._C._current_graph_task_id() != -1:
            hidden.bucket.receive(hidden.slot_number, args[1])  # autograd accumulates
            return hidden
        by = str(func).removeprefix("aten.").partition(".")[0]
        raise hidden.refusal(by)

    def refusal(self, by: str) -> UsageError:
        """The error for somebody who reads it.

        Args:
            by: The operation.
        """
        num_shards = self.bucket.num_shards
        where = f"divided over {num_shards} ranks by a ShardedOptimizer"
        otherwise = "an optimizer that isn't sharded"
        if num_shards == 1:
            where = "kept in the reduce_dtype in which it was added, for an optimizer that steps there"
            otherwise = "an optimizer that is neither fused nor sharded, or no reduce_dtype"
        return UsageError(
            f"the gradient of {self.parameter_name!r} is {where}, and was read by {by}. Clip with "
            f"evenstep.clip_grad_norm_(optimizer, ...) or evenstep.clip_grad_value_; to log norms, "
            f"evenstep.clip_grad_norm_([parameter], math.inf) returns one and changes nothing. What else needs whole "
            f"gradients needs {otherwise}."
        )

    @property
    def bucket(self) -> Divided:
        """Where the gradient is."""
        bucket = self._bucket()
        assert bucket is not None, "buckets live as long as the engine, and longer than what it puts into p.grad"
        return bucket

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """Nothing.

        Raises:
            UsageError: Always.
        """
        raise self.refusal("data")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<HiddenGradient of {self.parameter_name!r} {list(self.shape)}, divided over the ranks>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            f"the gradient of {self.parameter_name!r} is divided over the ranks and can't be copied or saved."
        )


# What looks at memory without an operation that torch would ask about, and finds none: some of it ends the process.
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


def _refuse(name: str) -> Callable[..., Any]:
    def refused(self: HiddenGradient, *_: Any, **__: Any) -> Any:
        raise self.refusal(name)

    return refused


for _name in _BY_MEMORY:
    setattr(HiddenGradient, _name, _refuse(_name))


def local_parts(gradients: Iterable[HiddenGradient]) -> list[Tensor]:
    """This rank's parts of some gradients as few flat tensors: neighbours become one. Views, [n] each."""
    indices: dict[int, tuple[Divided, list[int]]] = {}
    for gradient in gradients:
        bucket = gradient.bucket
        indices.setdefault(id(bucket), (bucket, []))[1].append(gradient.slot_number)
    return [part for bucket, which in indices.values() for part in bucket.local_parts(which)]


def over_ranks(gradients: Iterable[HiddenGradient], value: Tensor, combine: Callable[[Any, Tensor], None]) -> None:
    """Collective: combine a value over the ranks that share some gradients, which are those of one model.

    Args:
        gradients: At least one.
        value: [n], contiguous, changed in place.
        combine: Called with the transport and the value.
    """
    combine(next(iter(gradients)).bucket.transport, value)


def _unscale(gradients: Sequence[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """A GradScaler's unscaling, of this rank's shards; `found_inf` becomes 1 on all ranks if it is 1 on one."""
    hidden = [each for each in gradients if isinstance(each, HiddenGradient)]
    parts = local_parts(hidden) + [each for each in gradients if not isinstance(each, HiddenGradient)]
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for part in parts:
        by_dtype.setdefault(part.dtype, []).append(part)
    for same in by_dtype.values():
        torch._amp_foreach_non_finite_check_and_unscale_(same, found_inf, inverse_scale)
    divided = [each for each in hidden if each.bucket.num_shards > 1]
    if divided:  # else every rank has seen all of it; and one that has left a join isn't there to be asked
        over_ranks(divided, found_inf, lambda transport, value: transport.all_reduce(value, "max").wait())


def _leaves(args: Iterable[Any]) -> Iterable[Any]:
    for each in args:
        if isinstance(each, list | tuple):
            yield from _leaves(each)
        else:
            yield each
