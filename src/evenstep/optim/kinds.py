"""What is known of torch's optimizers: which of them look at one element at a time, and which have a fused step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, optim

from evenstep import checks
from evenstep.errors import ConfigurationError

# Their step changes an element of a parameter by that element's gradient and state alone.
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
_SCALARS = frozenset({"step", "eta", "mu", "mu_product"})  # state that is one number, also of a parameter of one number


def _nothing(_: Any) -> None:
    """Somebody's step."""


_AROUND: Any = optim.Optimizer.profile_hook_step(_nothing)  # what torch puts around a step


def is_elementwise(kind: type[optim.Optimizer]) -> bool:
    """Whether an optimizer may be given a piece of a parameter. Pure. Not known of a class of the user's own: no."""
    return kind in _ELEMENTWISE


def validate_optimizer(what: str, given: Any) -> None:
    """Refuse what is no optimizer.

    Args:
        what: Who was given which argument.
        given: What was given.

    Raises:
        ConfigurationError: It is none.
    """
    if not isinstance(given, optim.Optimizer):
        raise checks.refuse(what, given, "a torch optimizer")


def validate_kind(kind: type[optim.Optimizer]) -> None:
    """Refuse what can't be divided.

    Raises:
        ConfigurationError: No optimizer class, or one whose step looks at all parameters at once.
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
            "it as it is: gradients are equal on all ranks."
        )
    if issubclass(kind, optim.SparseAdam):
        raise ConfigurationError(
            "SparseAdam is for sparse gradients, which aren't divided over ranks. Use it as it is."
        )


def choose_fused(
    kind: type[optim.Optimizer], options: Mapping[str, Any], parameters: Sequence[Tensor], *, in_lanes: bool
) -> bool:
    """Whether a parameter group's step is to be the fused one: where there is one and the user hasn't chosen. Pure.

    Args:
        kind: Of the optimizer.
        options: Of the group.
        parameters: Of the group. torch's fused steps are for real numbers.
        in_lanes: In reproducible mode: no. torch's fused steps of a CPU (2.13) round the last elements of a tensor
            otherwise than those before them, and where a stretch ends depends on the number of ranks.

    Raises:
        ConfigurationError: The user has chosen it in reproducible mode.
    """
    if in_lanes and options.get("fused"):
        raise ConfigurationError(
            "fused=True in reproducible mode: a fused step rounds the last elements of a stretch otherwise, and where "
            "stretches end depends on the number of ranks. Leave fused out, or use the plain torch optimizer."
        )
    if in_lanes or not all(kind in _FUSED.get(p.device.type, ()) and p.is_floating_point() for p in parameters):
        return False
    # torch's fused SGD of a CPU (2.11 to 2.13) computes new values of 16 bits, and writes but the last few of them.
    if kind is optim.SGD and any(p.device.type == "cpu" and p.dtype.itemsize < 4 for p in parameters):
        return False
    chosen = options.get("fused") is not None or options.get("foreach") is not None
    # A rate that is a tensor is rounded as a tensor by torch's other steps, and read as a number by the fused ones.
    is_tensor = any(isinstance(value, Tensor) for value in (options.get("lr"), *options.get("betas", ())))
    return not (chosen or is_tensor or options.get("differentiable") or options.get("capturable"))


def step_without_hooks(kind: type[optim.Optimizer]) -> Callable[[Any], object]:
    """The step of a class that torch has made an optimizer of, without what torch has put around it.

    That calls hooks, and tells the profiler. An optimizer inside another one would have it twice, for one step.
    """
    step: Any = kind.step
    is_wrapped = getattr(step, "__code__", None) is _AROUND.__code__
    return cast("Callable[[Any], object]", step.__wrapped__ if is_wrapped else step)


def is_divided(key: str, value: Any, parameter: Tensor) -> bool:
    """Whether an entry of a parameter's state has a number per element. Pure."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return False
    return parameter.dim() > 0 or key not in _SCALARS
