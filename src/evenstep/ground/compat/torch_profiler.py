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

_COMM_MODE = "torch.distributed.tensor.debug._comm_mode"  # imported by its users


def is_profiled() -> bool:
    """Whether a profiler runs."""
    return profiler._is_profiler_enabled


def is_watched() -> bool:
    """Whether a profiler or a dispatch mode, which sees each operation, is active. Costs a tenth of a microsecond."""
    return profiler._is_profiler_enabled or _len_torch_dispatch_stack() > 0


def profile_all_threads() -> torch.profiler.profile:
    """A profiler of this process: its GPU, and all CPU threads, including Gloo's, which carry gradients."""
    # acc_events: without it, torch until 2.12 warns of a profile of one cycle.
    return torch.profiler.profile(experimental_config=_ExperimentalConfig(profile_all_threads=True), acc_events=True)


def begin_event(name: str, tensors: Sequence[Tensor], details: dict[str, Any]) -> Callable[[], None] | None:
    """Begin an event of the running profile.

    Args:
        name: The event's name in the profile.
        tensors: Tensors whose shapes and dtypes are shown if the profile records shapes.
        details: Numbers and texts that are shown, too.

    Returns:
        A function that ends the event, on any thread; None: no profiler runs.
    """
    if not profiler._is_profiler_enabled:
        return None
    event = _RecordFunctionFast(name, list(tensors), details)
    event.__enter__()
    return lambda: event.__exit__(None, None, None)


def count_call(operation: str, tensors: Sequence[Tensor]) -> None:
    """Make torch's `CommDebugMode`, if it is active, count a collective.

    The mode sees operations of torch's dispatcher. torch's own groups use these; a group with python methods doesn't.

    Args:
        operation: The collective's name in `torch.ops.c10d`, such as "allreduce_".
        tensors: The collective's tensors.
    """
    if (module := sys.modules.get(_COMM_MODE)) is None:
        return
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, module.CommDebugMode):
            mode.__torch_dispatch__(_Counted(getattr(torch.ops.c10d, operation)), (), tuple(tensors))


class _Counted:
    """A stand-in for an operation, which does nothing.

    Args:
        packet: The operation for which the mode counts it.
    """

    def __init__(self, packet: Any) -> None:
        self._overloadpacket = packet

    def __call__(self, *_: object, **__: object) -> None:
        """Do nothing: the process group itself makes the call."""

    def __repr__(self) -> str:
        return str(self._overloadpacket)


# Names that aren't looked up when evenstep is imported.
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
