"""torch's `mixed_precision=` argument: compute in low precision, keep parameters and gradients in full precision.

The module is called with low-precision copies of its parameters, which autograd knows to be copies: gradients arrive
at the parameters in full precision, and nothing else has to know.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.func import functional_call

from evenstep import checks
from evenstep.compat import torch_pytree as pytree
from evenstep.compat.torch_ddp import MixedPrecision

_HOOKS = {torch.float16: default_hooks.fp16_compress_hook, torch.bfloat16: default_hooks.bf16_compress_hook}


def describe_precision(config: Any) -> str:
    """Describe a `mixed_precision` argument, for messages and to compare. Pure.

    Raises:
        ConfigurationError: It is no `MixedPrecision`, or names a dtype that can't be meant.
    """
    if config is None:
        return "None"
    if not isinstance(config, MixedPrecision):
        raise checks.refuse("mixed_precision", config, "torch's MixedPrecision, or None")
    for name in ("param_dtype", "buffer_dtype"):
        dtype = getattr(config, name)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise checks.refuse(f"mixed_precision: {name}", dtype, "a floating-point dtype, or None")
    if config.reduce_dtype not in (None, torch.float32, *_HOOKS):
        raise checks.refuse(
            "mixed_precision: reduce_dtype", config.reduce_dtype, "torch.float16, torch.bfloat16, torch.float32 or None"
        )
    return f"{config.param_dtype}, reduced in {config.reduce_dtype}, buffers in {config.buffer_dtype}"


class LowPrecision:
    """Runs a module in low precision.

    Args:
        module: Its floating-point buffers are cast to `config.buffer_dtype` now, as torch does it.
        config: torch's `MixedPrecision`. Without a `reduce_dtype` gradients travel in the parameters' own precision
            (torch's class sends them in `param_dtype`).
    """

    def __init__(self, module: nn.Module, config: MixedPrecision) -> None:
        self._dtype = config.param_dtype
        self.comm_hook = None if config.reduce_dtype is None else _HOOKS.get(config.reduce_dtype)
        if config.buffer_dtype is not None:
            for buffer in module.buffers():
                if buffer.is_floating_point():
                    buffer.data = buffer.to(config.buffer_dtype)

    def run(self, module: nn.Module, inputs: Any, kwargs: Any) -> Any:
        """`module(*inputs, **kwargs)` in low precision."""
        if self._dtype is None:
            return module(*inputs, **kwargs)
        parameters = {name: self._cast(parameter) for name, parameter in module.named_parameters()}
        inputs, kwargs = pytree.tree_map_only(Tensor, self._cast, (inputs, kwargs))
        return functional_call(module, parameters, inputs, kwargs)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor
