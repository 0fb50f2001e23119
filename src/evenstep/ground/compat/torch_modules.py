"""Private parts of `torch.nn` and of compiled modules (torch 2.11 and later)."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

from evenstep.ground.compat.private_names import PrivateName

__all__ = ["BatchNorm", "compiled_module"]


def compiled_module(module: nn.Module) -> nn.Module | None:
    """The module inside a compiled module; None for any other module."""
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else None


# Names that aren't looked up when evenstep is imported.
NAMES = (
    PrivateName(
        "torch._dynamo.eval_frame:OptimizedModule.__init__~_orig_mod",
        "the module inside a compiled one",
        "compiled modules are saved under other names",
    ),
)
