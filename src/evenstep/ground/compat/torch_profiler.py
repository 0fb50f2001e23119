"""Private parts of torch's profiler, and of the modes that watch calls (torch 2.11 and later)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch._C._profiler import _ExperimentalConfig, _RecordFunctionFast
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import profiler
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from evenstep.ground.compat.private_names import NOTHING, PrivateName

__all__ = ["FakeTensor", "FakeTensorMode", "TorchDispatchMode"]

_COMM_MODE = "torch.distributed.tensor.debug._comm_mode"  # imported by those who use it


def is_profiled() -> bool:
    """Whether a profiler runs."""
    return profiler._is_profiler_enabled


def is_watched() -> bool:
    """Whether a profiler runs, or a mode that sees each operation. Costs a tenth of a microsecond."""
    return profiler._is_profiler_enabled or _len_torch_dispatch_stack() > 0


def profile_all_threads() -> torch.profiler.profile:
    """A profiler of this process: its GPU, and all threads of the CPU, such as those of Gloo that carry gradients."""
    return torch.profiler.profile(experimental_config=_ExperimentalConfig(profile_all_threads=True))


def begin_event(name: str, tensors: Sequence[Tensor], details: dict[str, Any]) -> Callable[[], None] | None:
    """Begin an event of the running profile.

    Args:
        name: What the profile calls it.
        tensors: Whose shapes and dtypes are shown where the profile records shapes.
        details: Numbers and texts that are shown there, too.

    Returns:
        Ends the event, on any thread; None: no profiler runs.
    """
    if not profiler._is_profiler_enabled:
        return None
    event = _RecordFunctionFast(name, list(tensors), details)
    event.__enter__()
    return lambda: event.__exit__(None, None, None)


def count_call(operation: str, tensors: Sequence[Tensor]) -> None:
    """Let torch's `CommDebugMode` count a collective, where one is active.

    torch's own groups pass through an operation of the dispatcher, which the mode sees; a group whose methods are
    python's doesn't.

    Args:
        operation: Its name in `torch.ops.c10d`, such as "allreduce_".
        tensors: Its tensors.
    """
    if (module := sys.modules.get(_COMM_MODE)) is None:
        return
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, module.CommDebugMode):
            mode.__torch_dispatch__(_Counted(getattr(torch.ops.c10d, operation)), (), tuple(tensors))


class _Counted:
    """Stands for an operation, and does nothing.

    Args:
        packet: What the mode counts it as.
    """

    def __init__(self, packet: Any) -> None:
        self._overloadpacket = packet

    def __call__(self, *_: object, **__: object) -> None:
        """The group makes the call by itself."""

    def __repr__(self) -> str:
        return str(self._overloadpacket)


# What isn't looked for when evenstep is imported.
NAMES = (
    PrivateName(
        "torch.autograd.profiler:_is_profiler_enabled", "whether a profiler runs", "an AttributeError in every step"
    ),
    PrivateName(
        "torch._ops:OpOverload.__init__~_overloadpacket",
        "what CommDebugMode counts an operation as",
        "it counts none of ours",
    ),
    PrivateName(
        "torch.distributed.tensor.debug._comm_mode:CommDebugMode.__torch_dispatch__", "counts collectives", NOTHING
    ),
)
