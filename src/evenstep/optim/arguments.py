"""Checks the arguments of an optimizer over a wrapped model, and reduces them to facts that ranks compare."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim

from evenstep import checks
from evenstep.errors import ConfigurationError
from evenstep.optim.kinds import defaults_of, step_without_hooks

Groups = list[Any]


def validate_switches(*, elementwise: Any, **switches: Any) -> None:
    """Raise for a switch that isn't True or False.

    Raises:
        ConfigurationError: A switch has another value.
    """
    checks.switches("", **switches)
    checks.switches("", otherwise="None for torch's own classes", elementwise=elementwise)


def listed(params: Any) -> Groups:
    """Return parameters, or groups of them, as lists, because an iterator can be read only once.

    Raises:
        ConfigurationError: `params` are neither.
    """
    if isinstance(params, Tensor | str | bytes | Mapping) or not isinstance(params, Iterable):
        raise checks.refuse("params", params, "parameters of the model, groups of them, or None for all")
    made: Groups = []
    for each in params:
        if isinstance(each, dict):
            group = each.get("params")
            is_many = isinstance(group, Iterable) and not isinstance(group, Tensor)
            made.append({**each, "params": list(group) if is_many and group is not None else group})
        else:
            made.append(each)
    return made


def try_out(kind: type[optim.Optimizer], params: Groups, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Make a temporary optimizer; returns its parameter groups.

    Raises:
        ConfigurationError: torch refuses the parameters or the arguments.
    """
    with torchs_refusals(kind):
        defaults = defaults_of(kind, arguments)
        tried = optim.Optimizer([dict(each) if isinstance(each, dict) else each for each in params], defaults)
    return tried.param_groups


def try_whole(kind: type[optim.Optimizer], groups: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> None:
    """Make a temporary optimizer, because its class may refuse a shape, and only that parameter's owner would see it.

        Parameters without elements are stepped, too, which changes nothing: some classes divide by the number of
        elements.

    Raises:
        ConfigurationError: The class refuses a shape, or can't step a parameter without elements.
    """
    with torchs_refusals(kind):
        kind([dict(group) for group in groups], **arguments)
    for group in groups:
        for shape in {tuple(parameter.shape) for parameter in group["params"] if not parameter.numel()}:
            nobodys = nn.Parameter(torch.empty(shape, device="cpu"))
            nobodys.grad = torch.empty_like(nobodys)
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            try:
                step_without_hooks(kind)(kind([{**options, "params": [nobodys]}], **arguments))
            except Exception as error:
                raise ConfigurationError(
                    f"{kind.__name__} doesn't step a parameter of shape {list(shape)}, which has no elements "
                    f"({type(error).__name__}: {error}). Leave it out of the optimizer's parameters."
                ) from None


@contextlib.contextmanager
def torchs_refusals(kind: type[optim.Optimizer]) -> Iterator[None]:
    """Context for a call of torch, whose errors become ConfigurationErrors.

    Raises:
        ConfigurationError: torch has raised an error; has torch's text.
    """
    try:
        yield
    except (TypeError, ValueError, KeyError, RuntimeError, AssertionError) as error:
        raise ConfigurationError(f"{kind.__name__}: {error}") from None


def facts_of(groups: Sequence[Mapping[str, Any]], index_of: Callable[[Tensor], int]) -> dict[str, Any]:
    """Return the facts about parameter groups that must be equal on all ranks, by readable name, as JSON types."""
    facts: dict[str, Any] = {"the number of parameter groups": len(groups)}
    for number, group in enumerate(groups):
        indices = torch.tensor([index_of(parameter) for parameter in group["params"]], dtype=torch.int64, device="cpu")
        of = f" of parameter group {number}"
        facts[f"the number of parameters{of}"] = len(indices)
        facts[f"the checksum of the parameters{of}"] = zlib.crc32(repr(indices.tolist()).encode())
        facts |= {f"{name}{of}": repr(value) for name, value in group.items() if name != "params" and _is_plain(value)}
    return facts


def _is_plain(value: Any) -> bool:
    """Whether equal values of this type have equal texts."""
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, int | float | str) or (isinstance(value, Tensor) and value.numel() == 1)
