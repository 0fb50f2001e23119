"""What torch.compile is to leave alone, wherever it is called from, without importing torch.compile."""

from __future__ import annotations

import types
from typing import TypeVar

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

_Class = TypeVar("_Class", bound=type)


def uncompiled(kind: _Class) -> _Class:
    """A class decorator: neither the class's own methods nor what they call is traced.

    C++ calls a process group's methods also while a function is being compiled that knows nothing of them (torch's DDP
    has a reducer that does). Dynamo would look into them, and fail: to it a group is a closed box. To say so on each
    function (`torch.compiler.disable`) imports dynamo: seconds, in every rank.
    """
    strategy = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    for member in vars(kind).values():
        if isinstance(member, types.FunctionType):
            set_code_exec_strategy(member.__code__, strategy)
    return kind
