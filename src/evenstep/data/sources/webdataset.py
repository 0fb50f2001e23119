"""webdataset's pipelines as streams that are divided by shard, and are the same in every run.

A pipeline is a list of stages: one lists shards, some shuffle, some divide shards over nodes and workers, others open,
decode and map. Its shuffles are seeded from the process and the time, and its dividing stages know neither evenstep's
ranks nor the worker whose turn it is in a resumed run. So the loader iterates a copy of the pipeline, made for one
epoch and part:

    list      a b c d e f
    shuffle   d a f c b e     by (seed, epoch): the same for all parts
    divide    d   f   b       part 0 of 2; in place of split_by_node, split_by_worker, single_node_only
    shuffle   b d f           by (seed, epoch, part)
    open ...

Nothing here imports the package.
"""

from __future__ import annotations

import copy
import inspect
import random
import sys
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

from evenstep.errors import ConfigurationError
from evenstep.ground.computing.randomness import mix

_SPLITTERS = ("split_by_node", "split_by_worker", "single_node_only")
_OPENERS = ("StreamingOpen", "FileCache", "url_opener", "tarfile_samples")
_UNREPEATABLE = ("resampled_", "DirectoryShardList", "DataLoader")  # by entropy, renamed files, other workers


def is_pipeline(dataset: Any) -> bool:
    """Whether a data set is one of webdataset's pipelines, or a mix of them."""
    package = sys.modules.get("webdataset")  # perhaps another file of that name, of the script
    return any(isinstance(dataset, getattr(package, name, ())) for name in ("DataPipeline", "RandomMix", "RoundRobin"))


def count_shards(dataset: Any) -> int:
    """The number of parts into which a pipeline can be divided: its shards; 1 if they aren't known."""
    if is_pipeline(dataset):
        return min(map(count_shards, getattr(dataset, "datasets", None) or dataset.pipeline[:1]))
    # ResampledShards draws endlessly from its list.
    return sys.maxsize if hasattr(dataset, "worker_seed") else len(getattr(dataset, "urls", [None]))


def part_of(dataset: Any, seed: int, epoch: int, num_parts: int, index: int) -> Any:
    """A copy of a pipeline that yields one part of its shards, in the order of an epoch.

    Args:
        dataset: The pipeline; it stays as it is.
        seed: Shuffles are keyed by the seed, the epoch and, after the division of shards, the part.
        epoch: Number of the epoch.
        num_parts: The number of parts: ranks times workers.
        index: The number of the part.

    Raises:
        ConfigurationError: A stage can't be repeated in another run, or may itself divide shards.
    """
    made = copy.copy(dataset)
    if hasattr(dataset, "datasets"):
        made.datasets = [
            part_of(each, mix(seed, number), epoch, num_parts, index) for number, each in enumerate(dataset.datasets)
        ]
        return made
    stages, names = dataset.pipeline, [_name_of(stage) for stage in dataset.pipeline]
    place = next((number for number, name in enumerate(names) if name in _SPLITTERS), 1)
    opener = next((number for number, name in enumerate(names) if name in _OPENERS), 0)
    for stage, name in zip(stages[1:opener], names[1:opener], strict=True):
        if not _function_of(stage).__module__.startswith("webdataset.") and "rng" not in _parameters(stage):
            raise ConfigurationError(
                f"{name}, a stage of the webdataset pipeline before its files are opened, isn't known: if it divides "
                f"shards over ranks, they would be divided twice. Leave it out (nodesplitter=None): the loader divides "
                f"shards. Choose shards in the list that the pipeline begins with."
            )
    made.pipeline = [
        part_of(stage, mix(seed, number), epoch, num_parts, index)
        if is_pipeline(stage)
        else _keyed(stage, name, mix(seed, epoch, number, index if number >= place else 0))
        for number, (stage, name) in enumerate(zip(stages, names, strict=True))
        if name not in _SPLITTERS
    ]
    if not is_pipeline(stages[0]):
        made.pipeline.insert(place, partial(_divided, num_parts=num_parts, index=index))
    return made


def _divided(shards: Iterator[Any], num_parts: int, index: int) -> Iterator[Any]:
    return islice(shards, index, None, num_parts)


def _keyed(stage: Any, name: str, key: int) -> Any:
    """A copy of the stage, with keyed random numbers if it draws any.

    Raises:
        ConfigurationError: The stage shuffles and accepts no generator; or it can't be repeated at all.
    """
    parameters = _parameters(stage)
    if "rng" in parameters and isinstance(getattr(stage, "kw", None), dict):
        own = copy.copy(stage)
        own.args = stage.args[: parameters.index("rng") - 1]  # the first parameter is the stream
        own.kw = {name: value for name, value in stage.kw.items() if name != "seed"} | {"rng": random.Random(key)}
        return own
    if "rng" in parameters:
        return partial(stage, rng=random.Random(key))
    draws = getattr(stage, "rng", None) is not None or getattr(stage, "seed", None) is not None
    if name in _UNREPEATABLE or ("shuffle" in name and not draws):
        raise ConfigurationError(
            f"{name}, a stage of the webdataset pipeline, can't be given random numbers by seed and epoch, so a run "
            f"couldn't be resumed exactly. Use a stage that takes rng=, a random.Random, as webdataset.shuffle does."
        )
    if not hasattr(stage, "__dict__") or inspect.isfunction(stage):
        return stage
    own = copy.copy(stage)  # also of a stage that draws nothing: it may store items, as a cache does
    known = {"rng": random.Random(key), "seed": key, "epoch": -1, "deterministic": True, "worker_seed": int}  # gives 0
    own.__dict__.update({name: value for name, value in known.items() if draws and name in own.__dict__})
    return own


def _function_of(stage: Any) -> Any:
    """The function that a stage applies; the stage itself if it applies no function."""
    return _function_of(stage.func) if isinstance(stage, partial) else getattr(stage, "f", stage)


def _name_of(stage: Any) -> str:
    function = _function_of(stage)
    return str(getattr(function, "__name__", type(function).__name__))


def _parameters(stage: Any) -> list[str]:
    """The parameters of the function that a stage applies; the stream is the first."""
    try:
        return [*inspect.signature(_function_of(stage)).parameters]
    except (TypeError, ValueError):  # not a function, or one in C
        return []
