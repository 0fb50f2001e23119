"""Chooses modules that are sharded by themselves, and checks that a tensor plan fits a model. Pure."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from evenstep import checks
from evenstep.errors import ConfigurationError

Blocks = str | type[nn.Module] | Iterable[str | type[nn.Module]] | int | Callable[[str, nn.Module], bool] | None
_WANTED = "class names, classes, a number of parameters, a function of (name, module), or None"


def choose_blocks(module: nn.Module, blocks: Any) -> list[nn.Module]:
    """The modules that are sharded by themselves, inner modules before outer modules; never the whole model.

    Args:
        module: The whole model.
        blocks: Class names or classes; a whole number: modules with at least this many parameters that aren't in a
            smaller block; a function that is called with (name, module); None: the members of every `nn.ModuleList`.

    Raises:
        ConfigurationError: `blocks` is none of these, or the model has no module of a class.
    """
    named = [(name, each) for name, each in module.named_modules() if each is not module and _has_parameters(each)]
    wrapped = {id(inner) for _, each in named if (inner := _inside(each)) is not each}  # the wrapper represents them
    named = [(name, each) for name, each in reversed(named) if id(each) not in wrapped]  # inner modules first
    if blocks is None:
        lists = [each for each in module.modules() if isinstance(each, nn.ModuleList)]
        members = {id(member) for each in lists for member in each}
        return [each for _, each in named if id(each) in members and not isinstance(each, nn.ModuleList)]
    if isinstance(blocks, int) and not isinstance(blocks, bool):
        return _by_size(module, named, checks.whole("parallelize: blocks", blocks, least=1))
    if callable(blocks) and not isinstance(blocks, type | nn.Module):
        return [each for name, each in named if blocks(name, each)]
    given = [blocks] if isinstance(blocks, str | type) else blocks
    if not isinstance(given, Iterable) or isinstance(given, Mapping | nn.Module):
        raise checks.refuse("parallelize: blocks", blocks, _WANTED)
    chosen: set[int] = set()
    for wanted in given:
        if not (isinstance(wanted, str) or (isinstance(wanted, type) and issubclass(wanted, nn.Module))):
            raise checks.refuse("parallelize: blocks", wanted, _WANTED)
        found = [each for _, each in named if _is_a(each, wanted)]
        if not found:
            text = wanted if isinstance(wanted, str) else wanted.__name__
            present = ", ".join(sorted({type(_inside(each)).__name__ for _, each in named}))
            raise ConfigurationError(f"parallelize: blocks={text!r}: the model has no such module; it has {present}.")
        chosen.update(map(id, found))
    return [each for _, each in named if id(each) in chosen]


def _by_size(module: nn.Module, named: Iterable[tuple[str, nn.Module]], least: int) -> list[nn.Module]:
    chosen: list[nn.Module] = []
    taken: set[int] = set()
    for _, each in named:
        # A list is never called, so nothing would gather its parameters.
        free = {id(p): p.numel() for p in each.parameters() if id(p) not in taken}
        if sum(free.values()) >= least and not isinstance(each, nn.ModuleList | nn.ModuleDict):
            chosen.append(each)
            taken |= free.keys()
    return chosen


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _inside(module: nn.Module) -> nn.Module:
    """The module inside a wrapper of torch.compile or of activation checkpointing."""
    for name in ("_orig_mod", "_checkpoint_wrapped_module"):
        inner = module._modules.get(name)
        if inner is not None:
            return _inside(inner)
    return module


def _is_a(module: nn.Module, wanted: str | type) -> bool:
    inner = _inside(module)
    return isinstance(inner, wanted) if isinstance(wanted, type) else type(inner).__name__ == wanted


def validate_plan(module: nn.Module, plan: Any) -> None:
    """Refuse a tensor plan if a name in it matches no module.

    torch only warns, and the intended modules would stay undivided.

    Args:
        module: The whole model.
        plan: The plan for `torch.distributed.tensor.parallel.parallelize_module`.

    Raises:
        ConfigurationError: A name in the plan matches no module.
    """
    if not isinstance(plan, Mapping):
        return  # one style, for the module itself; torch checks it
    names = [name.split(".") for name, _ in module.named_modules() if name]
    for pattern in plan:
        if not isinstance(pattern, str):
            raise checks.refuse("parallelize: a name in tensor_plan", pattern, "the name of a module, such as 'mlp.up'")
        parts = pattern.split(".")
        fits = (len(name) == len(parts) and all(map(fnmatch.fnmatchcase, name, parts)) for name in names)
        if pattern and not any(fits):
            last = [name for name in names if fnmatch.fnmatchcase(name[-1], parts[-1])]
            hint = f" Is {'.'.join(last[0])!r} meant?" if last else ""
            raise ConfigurationError(
                f"parallelize: tensor_plan names {pattern!r}, but the model has no such module.{hint}"
            )
