"""Private parts of `torch.nn` and of compiled modules (torch 2.11 and later)."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase

from evenstep.ground.compat.private_names import PrivateName

__all__ = ["BatchNorm", "compiled_module", "loads_by_copy"]

# These do nothing with a tensor that is the module's own already.
_COPYING_LOADERS = (nn.Module._load_from_state_dict, _NormBase._load_from_state_dict)


def compiled_module(module: nn.Module) -> nn.Module | None:
    """The module inside one that `torch.compile` has made; None for any other module."""
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else None


def loads_by_copy(model: nn.Module) -> bool:
    """Whether `load_state_dict` of a model only copies each tensor to its place: no hooks, no methods of its own."""
    return type(model).load_state_dict is nn.Module.load_state_dict and all(
        type(module)._load_from_state_dict in _COPYING_LOADERS
        and not module._load_state_dict_pre_hooks
        and not {"load_state_dict", "_load_from_state_dict"} & vars(module).keys()
        for module in model.modules()
    )


# What isn't looked for when evenstep is imported.
NAMES = (
    PrivateName(
        "torch.nn:Module.__init__~_load_state_dict_pre_hooks",
        "hooks of a module's load_state_dict",
        "an AttributeError when a checkpoint is loaded",
    ),
    PrivateName(
        "torch._dynamo.eval_frame:OptimizedModule.__init__~_orig_mod",
        "the module inside a compiled one",
        "compiled modules are saved under other names",
    ),
)
