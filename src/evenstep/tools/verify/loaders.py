"""torch's loaders while runs are compared: one global batch, and samples that are the same whoever loads them.

A batch size of torch's loader is one rank's. The run on the most ranks loads what the script says; on fewer ranks each
loads so much more that all together load the same, unless the script has seen to that itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils import data

from evenstep import randomness
from evenstep.data.loader import DataLoader
from evenstep.data.loading.fetch import gives_batches
from evenstep.ground.compat.torch_data import MapDatasetFetcher
from evenstep.randomness import mix, seed_streams
from evenstep.tools.observing.loaders import replace_batch_sizes
from evenstep.tools.observing.patching import Patches

_SAMPLE_TAG = 0x766572696679  # "verify": other streams from the same seed stay unrelated


def same_global_batches(patches: Patches, sizes: Sequence[Sequence[int]], seen: list[int]) -> None:
    """Have torch's loaders load the batches of another number of ranks.

    Args:
        patches: Undoes it.
        sizes: See `Plan.batch_sizes`.
        seen: Gets the batch size of every loader, as the script passes it.
    """

    def choose(size: int) -> int:
        seen.append(size)
        others = (instead for passed, instead in sizes[len(seen) - 1 : len(seen)] if passed == size)
        return next(others, size)  # another size than in that run: the script has seen to it itself

    replace_batch_sizes(patches, choose)


def sizes_for(seen: Sequence[int], *, seen_on: int, num_ranks: int) -> list[tuple[int, int]] | None:
    """`Plan.batch_sizes` for a run on another number of ranks; None if a global batch can't be divided. Pure.

    Args:
        seen: Batch sizes of one rank in the run on the most ranks.
        seen_on: How many these were.
        num_ranks: Of the run to come.
    """
    if any(size * seen_on % num_ranks for size in seen):
        return None
    return [(size, size * seen_on // num_ranks) for size in seen]


def same_samples(patches: Patches) -> None:
    """Key what a data set draws at random by the number of the sample, in torch's loader and in evenstep's."""

    def fetched(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def fetch_batch(self: Any, index: Any) -> Any:
            # evenstep's own loader gives torch's requests, and no numbers.
            if not (self.auto_collation and isinstance(index, list) and all(isinstance(each, int) for each in index)):
                return original(self, index)
            samples = []
            with randomness.preserved():
                for each in index:
                    seed_streams(mix(_SAMPLE_TAG, each))
                    samples.append(self.dataset[each])
            return self.collate_fn(samples)

        return fetch_batch

    def made(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def init(self: Any, dataset: Any = None, *args: Any, **kwargs: Any) -> None:
            collate = kwargs.get("collate_fn") or data.default_collate
            is_map = dataset is not None and not isinstance(dataset, data.IterableDataset)
            if is_map and not gives_batches(dataset, collate):
                kwargs.setdefault("sample_seed", True)
            original(self, dataset, *args, **kwargs)

        return init

    patches.replace(MapDatasetFetcher, "fetch", fetched)
    patches.replace(DataLoader, "__init__", made)
