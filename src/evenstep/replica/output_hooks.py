"""Hooks on what a module returned: they say when a backward pass has reached it.

torch's `Tensor.register_hook` makes an ordered dict of hooks and a handle to remove one by; together they take 10
microseconds, and nobody removes these. What is done here is the rest of it, in half the time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

Hook = Callable[[Tensor], Tensor | None]

_OURS = -1  # the key of our hook among those of a tensor; torch counts its own from 0


class _Hooks(dict[int, Hook]):
    """A tensor's hooks, to which handles of the user's hooks can refer weakly."""

    __slots__ = ("__weakref__",)


class OutputHooks:
    """Puts one function on outputs, again and again.

    Args:
        function: Called with the gradient that reaches an output; may return another one in its place.
    """

    def __init__(self, function: Hook) -> None:
        self._function: Hook = functools.partial(function)
        setattr(self._function, "__torch_unserializable__", True)  # noqa: B010  # outputs are saved without a warning
        self._hooks = {_OURS: self._function}

    def put_on(self, outputs: Any) -> None:
        """Have the function called once for each tensor of a nest that a backward pass reaches."""
        for leaf in (outputs,) if isinstance(outputs, Tensor) else pytree.tree_leaves(outputs):
            if isinstance(leaf, Tensor) and leaf.requires_grad and (node := leaf.grad_fn) is not None:
                if leaf._backward_hooks is None:
                    leaf._backward_hooks = _Hooks(self._hooks)
                    node._register_hook_dict(leaf)
                else:
                    leaf.register_hook(self._function)  # type: ignore[no-untyped-call]
