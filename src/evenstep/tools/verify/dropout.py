"""Dropout, switched off for a comparison: no two numbers of ranks draw the same masks.

What can be said of the masks without them is where the random stream stood when they would have been drawn: ranks
that share that state would share their masks.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evenstep.tools.observing.patching import Patches

_FUNCTIONS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


def switch_off(patches: Patches, about_to_draw: Callable[[], bool]) -> None:
    """Have no dropout of torch's drop anything from now on.

    Args:
        patches: Undoes it.
        about_to_draw: Called in place of the draw; returns whether to draw all the same.
    """
    for owner, names in ((F, _FUNCTIONS), (torch, ("dropout", "alpha_dropout", "feature_dropout"))):
        for name in names:
            patches.replace(owner, name, lambda original: _without(original, about_to_draw))
    patches.replace(F, "scaled_dot_product_attention", lambda original: _attention(original, about_to_draw))
    for kind in (nn.RNN, nn.LSTM, nn.GRU):
        patches.replace(kind, "forward", lambda original: _recurrent(original, about_to_draw))


def _without(original: Callable[..., Tensor], about_to_draw: Callable[[], bool]) -> Callable[..., Tensor]:
    try:
        defaults = inspect.signature(original).parameters["training"].default
    except ValueError:  # a builtin: (input, p, train), all given
        defaults = True

    @functools.wraps(original)
    def dropout(input: Tensor, p: float = 0.5, training: bool = defaults, *args: Any, **kwargs: Any) -> Tensor:
        training = kwargs.pop("train", training)
        if training and 0 < p < 1 and not about_to_draw():
            training = False
        return original(input, p, training, *args, **kwargs)

    return dropout


def _attention(original: Callable[..., Tensor], about_to_draw: Callable[[], bool]) -> Callable[..., Tensor]:
    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **kw: Any
    ) -> Tensor:
        if dropout_p > 0 and not about_to_draw():
            dropout_p = 0.0
        return original(query, key, value, attn_mask, dropout_p, *args, **kw)

    return attention


def _recurrent(original: Callable[..., Any], about_to_draw: Callable[[], bool]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(module: nn.RNNBase, *args: Any, **kwargs: Any) -> Any:
        asked = module.dropout
        if module.training and asked > 0 and not about_to_draw():
            module.dropout = 0.0
        try:
            return original(module, *args, **kwargs)
        finally:
            module.dropout = asked

    return forward
