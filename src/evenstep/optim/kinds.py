"""Properties of torch's optimizers: which are element-wise, and which have a fused step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn, optim

from evenstep import checks
from evenstep import world as worlds
from evenstep.errors import ConfigurationError

# Optimizers whose step changes an element of a parameter only by that element's gradient and state.
_ELEMENTWISE: tuple[type[optim.Optimizer], ...] = (
    optim.ASGD,
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
)
_FUSED: dict[str, tuple[type[optim.Optimizer], ...]] = {
    "cpu": (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad),
    "cuda": (optim.SGD, optim.Adam, optim.AdamW),
}
_SCALARS = frozenset({"step", "eta", "mu", "mu_product"})  # state of one number, even for one-element parameters


def _nothing(_: Any) -> None:
    """A dummy step, to find torch's wrapper around steps."""


_AROUND: Any = optim.Optimizer.profile_hook_step(_nothing)  # torch's wrapper around a step


def is_elementwise(kind: type[optim.Optimizer]) -> bool:
    """Whether a class is known to step each element independently. Pure. False for the user's own classes."""
    return kind in _ELEMENTWISE


def validate_optimizer(what: str, given: Any) -> None:
    """Refuse an argument that isn't an optimizer.

    Args:
        what: The function and argument, for the message.
        given: The argument.

    Raises:
        ConfigurationError: `given` isn't an optimizer."""
    if not isinstance(given, optim.Optimizer):
        raise checks.refuse(what, given, "a torch optimizer")


def validate_kind(kind: type[optim.Optimizer]) -> None:
    """Refuse classes whose steps can't be divided.

    Raises:
        ConfigurationError: `kind` isn't an optimizer class, or its step needs all parameters at once.
    """
    if isinstance(kind, optim.Optimizer):
        made = type(kind).__name__
        raise ConfigurationError(
            f"kind is an optimizer that has been made already ({made}). Pass the class and its arguments, and groups "
            f"of parameters as params: ShardedOptimizer(model, {made}, lr=...)."
        )
    if not (isinstance(kind, type) and issubclass(kind, optim.Optimizer)):
        raise checks.refuse("kind", kind, "a class of optimizers, such as torch.optim.AdamW, whose arguments follow it")
    if issubclass(kind, optim.LBFGS):
        raise ConfigurationError(
            "LBFGS searches along a line through all parameters at once, so its step can't be divided over ranks. Use "
            "it without ShardedOptimizer: gradients are equal on all ranks."
        )
    if issubclass(kind, optim.SparseAdam):
        raise ConfigurationError(
            "SparseAdam is for sparse gradients, which aren't divided over ranks. Use it without ShardedOptimizer."
        )


def choose_fused(
    kind: type[optim.Optimizer], options: Mapping[str, Any], parameters: Sequence[Tensor], *, in_virtual_ranks: bool
) -> bool:
    """Whether to use the fused step for a parameter group: if there is one and the user hasn't chosen. Pure.

    Args:
        kind: The optimizer's class.
        options: The group's options.
        parameters: The group's parameters. torch has no fused steps for complex numbers.
        in_virtual_ranks: The world is in reproducible mode: never fused. torch's fused steps on CPUs (2.13) round the
            last elements of a tensor differently, and the number of ranks decides which elements are last in a segment.

    Raises:
        ConfigurationError: The user has chosen the fused step in reproducible mode.
    """
    if in_virtual_ranks and options.get("fused"):
        raise ConfigurationError(
            "fused=True in reproducible mode: a fused step rounds the last elements of a segment differently, and "
            "segments depend on the number of ranks. Leave fused out, or use the plain torch optimizer."
        )
    if in_virtual_ranks or not all(kind in _FUSED.get(p.device.type, ()) and p.is_floating_point() for p in parameters):
        return False
    # torch's fused SGD on CPUs (2.11 to 2.13) computes 16-bit values, but writes only the last few of them.
    if kind is optim.SGD and any(p.device.type == "cpu" and p.dtype.itemsize < 4 for p in parameters):
        return False
    chosen = options.get("fused") is not None or options.get("foreach") is not None
    # If the rate is a tensor, torch's other steps use it in the tensor's precision, but fused steps read it as a
    # number.
    is_tensor = any(isinstance(value, Tensor) for value in (options.get("lr"), *options.get("betas", ())))
    return not (chosen or is_tensor or options.get("differentiable") or options.get("capturable"))


def step_without_hooks(kind: type[optim.Optimizer]) -> Callable[[Any], object]:
    """The step of an optimizer class, without the wrapper that torch puts around it.

    torch's wrapper calls hooks and the profiler. An optimizer inside another one would run the wrapper twice per step.
    """
    step: Any = kind.step
    is_wrapped = getattr(step, "__code__", None) is _AROUND.__code__
    return cast("Callable[[Any], object]", step.__wrapped__ if is_wrapped else step)


def is_divided(key: str, value: Any, parameter: Tensor) -> bool:
    """Whether an entry of a parameter's state has a number for each element. Pure."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return False
    return parameter.dim() > 0 or key not in _SCALARS


def copy_options(kind: type[optim.Optimizer], group: Mapping[str, Any], own: dict[str, Any]) -> None:
    """Copy the options of the user's group to the inner optimizer's group; uses the fused step if the user chose none.

    Args:
        kind: The inner optimizer's class.
        group: The user's group.
        own: The inner optimizer's group; it already has its own `params`.
    """
    own.update((key, value) for key, value in group.items() if key not in ("params", "param_names"))
    world = worlds.initialised()
    in_virtual_ranks = world is not None and world.virtual_ranks is not None
    if own["params"] and choose_fused(kind, group, own["params"], in_virtual_ranks=in_virtual_ranks):
        own["fused"], own["foreach"] = True, False


@contextlib.contextmanager
def options_of_users(groups: Sequence[dict[str, Any]], inner: optim.Optimizer) -> Iterator[None]:
    """Context of a step: copies options from the user's groups to the inner optimizer's, and afterwards back.

    Some classes write counts or adapted values into their groups: schedule-free optimizers write `k` and `weight_sum`.
    """
    _update_options(groups, inner)
    before = [dict(own) for own in inner.param_groups]
    try:
        yield
    finally:
        for group, given, own in zip(groups, before, inner.param_groups, strict=True):
            group.update((key, value) for key, value in own.items() if value is not given.get(key) and key != "params")


def _update_options(groups: Sequence[Mapping[str, Any]], inner: optim.Optimizer) -> None:
    for group, own in zip(groups, inner.param_groups, strict=True):
        copy_options(type(inner), group, own)
        if own.get("fused") and own.get("momentum") and not group.get("fused") and _begins_in_part(own, inner):
            own["fused"] = False  # torch's fused SGD needs momenta for all parameters or for none


def _begins_in_part(own: Mapping[str, Any], inner: optim.Optimizer) -> bool:
    """Whether some tensors of a group have a momentum already, and others get their first momentum in this step."""
    has = {inner.state[p].get("momentum_buffer") is not None for p in own["params"] if p.grad is not None}
    return len(has) > 1


def defaults_of(kind: type[optim.Optimizer], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The options that an optimizer class makes from its arguments, read from a temporary instance."""
    return try_out(kind, arguments).defaults


def try_out(kind: type[optim.Optimizer], arguments: Mapping[str, Any]) -> optim.Optimizer:
    """Make an optimizer of a class, over one small parameter outside of any model."""
    return kind([nn.Parameter(torch.zeros(2, 2, device="cpu"))], **arguments)
