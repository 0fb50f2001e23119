"""Runs an unchanged script in float64, as the reference.

Parameters are initialised in their own dtype and converted when a model is wrapped or first called, so both runs begin
with the same numbers. From then on, an operation with one float64 tensor gets its other floating-point tensors in
float64. A float64 tensor with a gradient stays float64, even if the script casts it. Autocast leaves float64 alone.
Losses aren't scaled. Steps that a GradScaler skipped in the compared run are skipped here, too.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from evenstep.ground.compat import torch_pytree as pytree
from evenstep.ground.compat.torch_autograd import without_torch_function
from evenstep.tools.observing.patching import Patches
from evenstep.tools.observing.record import Ended, Subscriber

_NARROWER = (torch.float32, torch.float16, torch.bfloat16)
_TO = Tensor.to
_CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)


class InDouble(Subscriber):
    """Converts models to float64 from now on, with all that they compute.

    Args:
        patches: Undoes the changes.
        is_sharded: Whether the script uses `fully_shard`, whose mixed precision is then ignored.
    """

    def __init__(self, patches: Patches, *, is_sharded: bool = False) -> None:
        entered = contextlib.ExitStack()
        entered.enter_context(_Widening())
        patches.later(entered.close)
        if is_sharded:
            patches.around(importlib.import_module("torch.distributed.fsdp"), "fully_shard", _divide)
        patches.around(nn.RNNBase, "check_input", _check_input)
        patches.around(torch.amp.GradScaler, "__init__", _scale_nothing)
        for name in ("parallelize", "attach"):
            patches.around(sys.modules["evenstep"], name, _divide)

    def wrap(self, wrapper: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Ended:
        """Convert a model before it is wrapped, because the wrapper lays out its buckets by the parameters' dtype."""
        widen(module)
        return lambda: _keep_group_longer(wrapper)


def _divide(original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
    kwargs.pop("mp_policy", None)
    for each in module if isinstance(module, list) else [module]:
        widen(each)
    return original(module, *args, **kwargs)


def _check_input(original: Callable[..., None], self: nn.RNNBase, input: Tensor, *arguments: Any) -> None:
    """Convert the input of a recurrent layer early: it checks the input's dtype before its first operation."""
    is_wide = next(self.parameters()).dtype == torch.float64
    original(self, _widened(input) if is_wide else input, *arguments)


def _scale_nothing(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Disable a GradScaler: float64 doesn't overflow, and scaled losses couldn't be compared."""
    given = inspect.signature(original).bind(*args, **kwargs)
    given.arguments["enabled"] = False
    original(*given.args, **given.kwargs)


def _keep_group_longer(replica: Any) -> None:
    """Keep the process group of torch's wrapper alive longer than the wrapper's reducer.

    The reducer is destroyed while python's global lock (GIL) is held. With the last reference to Gloo, it would join
    Gloo's threads. Such a thread waits for the GIL to release a call made under our `TorchFunctionMode`: a deadlock.
    Python itself releases the GIL before it destroys a group.
    """
    reducer = getattr(replica, "reducer", None)
    if reducer is not None:
        weakref.finalize(reducer, _let_go, replica.process_group).atexit = False


def _let_go(group: object) -> None:
    """Drop the last reference to a group. Called by the finalizer, which holds the group until then."""


def widen(module: nn.Module) -> nn.Module:
    """Convert a module's parameters and buffers to float64 in place, so that optimizers keep them."""
    with torch.no_grad(), without_torch_function():
        return module.double()


class _Widening(TorchFunctionMode):
    """Gives each operation with a float64 tensor its other floating-point tensors in float64, too."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        first = args[0] if args else None
        if isinstance(first, Tensor) and first.dtype == torch.float64 and first.requires_grad:
            if func in _CASTS:
                return first
            if func is _TO:
                args, kwargs = pytree.tree_map(_kept_wide, (args, kwargs))
                return func(*args, **kwargs)
        changes_in_place = (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__set__")
        if not changes_in_place and "out" not in kwargs:
            tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
            if torch.float64 in dtypes and len(dtypes) > 1:
                args, kwargs = pytree.tree_map_only(Tensor, _widened, (args, kwargs))
        return func(*args, **kwargs)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.dtype in _NARROWER else tensor


def _kept_wide(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return _widened(argument)
    return torch.float64 if isinstance(argument, torch.dtype) and argument in _NARROWER else argument
