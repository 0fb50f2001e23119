"""Hooks on what a module returned: they say when a backward pass has reached it.

torch's `Tensor.register_hook` makes an ordered dict of hooks and a handle to remove one by, for each tensor anew;
together they take 10 microseconds, and nobody removes these. A node of the graph can be given the hooks of any tensor
that has the same place among its outputs, so here one tensor has them for all: what a module returned stays as it was.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Hook = Callable[[Tensor], Tensor | None]


class OutputHooks:
    """Puts one function on outputs, again and again.

    Args:
        function: Called with the gradient that reaches an output; may return another one in its place.
    """

    def __init__(self, function: Hook) -> None:
        self._function: Hook = functools.partial(function)
        # Outputs that have the hook themselves can be saved without a warning.
        setattr(self._function, "__torch_unserializable__", True)  # noqa: B010
        self._carrier = torch.empty(0, device="cpu")
        self._carrier._backward_hooks = {0: function}

    def put_on(self, outputs: Any) -> None:
        """Have the function called once for each tensor of a nest that a backward pass reaches."""
        if isinstance(outputs, Tensor):
            self._put_on_one(outputs)
        else:
            for leaf in pytree.tree_leaves(outputs):
                if isinstance(leaf, Tensor):
                    self._put_on_one(leaf)

    def _put_on_one(self, output: Tensor) -> None:
        if (node := output.grad_fn) is not None:
            if output.output_nr == 0:
                node._register_hook_dict(self._carrier)
            else:
                output.register_hook(self._function)  # type: ignore[no-untyped-call]
