"""Changes that make observed runs comparable: no dropout, other batch sizes, random numbers keyed by sample."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import data
from torch.utils.data import DataLoader as TorchDataLoader

from evenstep.data.loader import DataLoader
from evenstep.data.loading.fetch import gives_batches
from evenstep.ground.compat.torch_data import MapDatasetFetcher
from evenstep.ground.computing import randomness
from evenstep.ground.computing.randomness import mix, seed_streams
from evenstep.tools.observing.patching import Patches

_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_SAMPLE_TAG = 0x766572696679  # "verify": other streams from the same seed stay unrelated


def replace_batch_sizes(patches: Patches, choose: Callable[[int], int]) -> None:
    """Change the batch sizes of torch's loaders, except of those with a batch sampler.

    Args:
        patches: Undoes the change.
        choose: Returns the batch size to use for the one that the script passes.
    """

    def init(
        original: Callable[..., None], self: Any, dataset: Any, batch_size: int | None = 1, *args: Any, **kwargs: Any
    ) -> None:
        has_batches = kwargs.get("batch_sampler") is not None or (len(args) > 2 and args[2] is not None)
        if isinstance(batch_size, int) and not has_batches:
            batch_size = choose(batch_size)
        original(self, dataset, batch_size, *args, **kwargs)

    patches.around(TorchDataLoader, "__init__", init)


def same_samples(patches: Patches) -> None:
    """Seed the random numbers that a data set draws by the index of the sample, in torch's and evenstep's loaders."""

    def fetch(original: Callable[..., Any], self: Any, index: Any) -> Any:
        # evenstep's own loader passes requests to torch's loader instead of indices.
        if not (self.auto_collation and isinstance(index, list) and all(isinstance(each, int) for each in index)):
            return original(self, index)
        samples = []
        with randomness.preserved():
            for each in index:
                seed_streams(mix(_SAMPLE_TAG, each))
                samples.append(self.dataset[each])
        return self.collate_fn(samples)

    def init(original: Callable[..., None], self: Any, dataset: Any = None, *args: Any, **kwargs: Any) -> None:
        collate = kwargs.get("collate_fn") or data.default_collate
        is_map = dataset is not None and not isinstance(dataset, data.IterableDataset)
        if is_map and not gives_batches(dataset, collate):
            kwargs.setdefault("sample_seed", True)
        original(self, dataset, *args, **kwargs)

    patches.around(MapDatasetFetcher, "fetch", fetch)
    patches.around(DataLoader, "__init__", init)


def switch_off_dropout(patches: Patches, about_to_draw: Callable[[], bool]) -> None:
    """Switch off all dropout of torch, since runs on different numbers of ranks draw different masks.

    Without masks, the state of the random stream when they would have been drawn can still be compared: ranks that
    share that state would share their masks.

    Args:
        patches: Undoes the change.
        about_to_draw: Called before each mask would be drawn; returns whether to draw it nevertheless.
    """

    def drop(
        default: bool,
        original: Callable[..., Tensor],
        input: Tensor,
        p: float = 0.5,
        training: bool | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        training = kwargs.pop("train", default if training is None else training)
        is_on = bool(training) and (not 0 < p < 1 or about_to_draw())
        return original(input, p, is_on, *args, **kwargs)

    def attend(
        original: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        kept = dropout_p if dropout_p > 0 and about_to_draw() else 0.0
        return original(query, key, value, attn_mask, kept, *args, **kwargs)

    def recur(original: Callable[..., Any], module: nn.RNNBase, *args: Any, **kwargs: Any) -> Any:
        asked = module.dropout
        if module.training and asked > 0 and not about_to_draw():
            module.dropout = 0.0
        try:
            return original(module, *args, **kwargs)
        finally:
            module.dropout = asked

    for name in _DROPOUTS:
        default = inspect.signature(getattr(F, name)).parameters["training"].default
        patches.around(F, name, functools.partial(drop, default))
    for name in ("dropout", "alpha_dropout", "feature_dropout"):  # builtins: (input, p, train), without defaults
        patches.around(torch, name, functools.partial(drop, True))
    patches.around(F, "scaled_dot_product_attention", attend)
    for kind in (nn.RNN, nn.LSTM, nn.GRU):
        patches.around(kind, "forward", recur)
