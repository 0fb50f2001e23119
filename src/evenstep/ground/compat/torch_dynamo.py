"""Private parts of torch.compile (torch 2.11 and later), used without importing it, which takes seconds."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping
from typing import TypeVar

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._compile import _disable_dynamo as outside_graphs

from evenstep.ground.compat.private_names import PrivateName

__all__ = ["any_compiled", "compiled_backends", "keep_out_of_graphs", "outside_graphs", "uncompiled", "untraced"]

_SKIPPED = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
_Class = TypeVar("_Class", bound=type)
_Function = TypeVar("_Function", bound=Callable[..., object])


def uncompiled(kind: _Class) -> _Class:
    """A class decorator: neither the class's own methods nor functions called by them are traced.

    C++ also calls a process group's methods while an unrelated function is compiled (as the reducer of torch's DDP
    does). Dynamo would trace the methods, and fail, because it treats a group as opaque. Marking each function
    (`torch.compiler.disable`) would import dynamo, which takes seconds in every rank.
    """
    for member in vars(kind).values():
        if isinstance(member, types.FunctionType):
            set_code_exec_strategy(member.__code__, _SKIPPED)
    return kind


def untraced(function: _Function) -> _Function:
    """A decorator: torch.compile calls the function and doesn't trace it.

    `torch.compiler.disable` would import dynamo.
    """
    setattr(function, "_torchdynamo_disable", True)  # noqa: B010
    return function


_state = {"is_known": False, "has_compiled": False}


@untraced
def compiled_backends() -> Mapping[int, object]:
    """The backends of torch.compile, in use or not; the mapping grows with every new backend."""
    compiling = sys.modules.get("torch._dynamo.eval_frame")
    backends: Mapping[int, object] = {} if compiling is None else compiling.cached_backends
    return backends


@untraced
def keep_out_of_graphs() -> bool:
    """Make torch.compile skip evenstep's own code, but trace the functions that it calls.

    Returns True in the first call after dynamo's import, else False.
    """
    rules = sys.modules.get("torch._dynamo.trace_rules")
    if rules is None or _state["is_known"]:
        return False
    _state["is_known"] = True
    rules.add("evenstep")
    return True


@untraced
def any_compiled() -> bool:
    """Return whether torch.compile has compiled anything in this process, or is about to."""
    if not _state["has_compiled"]:
        _state["has_compiled"] = any(compiled_backends().values())
    return _state["has_compiled"]


# Names that aren't looked up when evenstep is imported.
NAMES = (
    PrivateName(
        "torch._dynamo.trace_rules:add",
        "keeps torch.compile out of a package",
        "an AttributeError with torch.compile",
    ),
    PrivateName(
        "torch._dynamo.eval_frame:cached_backends",
        "whether anything was compiled",
        "an AttributeError as soon as an optimizer was made",
    ),
    PrivateName(
        "torch._dynamo.symbolic_convert:InliningInstructionTranslator.check_inlineable~_torchdynamo_disable",
        "marks a function that isn't traced",
        "torch.compile traces it, and recompiles more often",
    ),
)
