"""What a `Checkpointer` was given: checked, and agreed on by the ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from torch import nn

from evenstep import checks
from evenstep.checkpoint.plan import Policy
from evenstep.checkpoint.snapshot import unwrapped
from evenstep.checkpoint.storage import LocalDirectory, Storage
from evenstep.checkpoint.streams import NAME as RANDOM
from evenstep.errors import ConfigurationError, MismatchError, UsageError
from evenstep.replica.distributed import DistributedDataParallel
from evenstep.world import World

LANES = "lanes"
_TAKEN = {RANDOM: "the random streams", LANES: "the lanes of reproducible mode"}
_METHODS = ("list", "write", "open", "rename", "remove", "lock")


def open_storage(directory: Any) -> Storage:
    """Where checkpoints lie.

    Raises:
        ConfigurationError: No path, and nothing that stores.
    """
    if isinstance(directory, str | os.PathLike):
        path = os.fspath(directory)
        if isinstance(path, str) and path and "\0" not in path:
            return LocalDirectory(path)
    elif all(callable(getattr(directory, method, None)) for method in _METHODS):
        storage: Storage = directory
        return storage
    raise checks.refuse("directory", directory, "the path of a directory, or a Storage")


def validate_objects(objects: Mapping[str, Any]) -> None:
    """Refuse what can't be saved.

    Raises:
        ConfigurationError: There is nothing, or something without a state, or under a name that is taken.
    """
    if not objects:
        raise ConfigurationError("there is nothing to save. Pass objects by name: model=model, ...")
    for name, value in objects.items():
        if not name.isidentifier():
            raise ConfigurationError(f"{name!r} names an object; a name is a word, as in model=model.")
        if name in _TAKEN:
            raise ConfigurationError(f"{name}= is the name of {_TAKEN[name]}; use another one.")
        target = unwrapped(value)
        lacks = [method for method in ("state_dict", "load_state_dict") if not callable(getattr(target, method, None))]
        if lacks:
            raise ConfigurationError(f"{name}= is a {type(value).__name__} without {' and '.join(lacks)}.")


def wrapped_models(objects: Mapping[str, Any]) -> Iterator[DistributedDataParallel]:
    """Those of the objects that are replicated, also behind `torch.compile`."""
    for model in objects.values():
        while not isinstance(model, DistributedDataParallel) and isinstance(model, nn.Module):
            model = getattr(model, "_orig_mod", None)
        if isinstance(model, DistributedDataParallel):
            yield model


def validate_local(objects: Mapping[str, Any]) -> None:
    """Refuse to save a run whose ranks' optimizers differ, unless who knows of that is among the objects.

    Raises:
        UsageError: The model has a `LocalUpdates`, and it isn't; or its optimizer is, too.
    """
    for model in wrapped_models(objects):
        local: Any = model.engine.local_by
        if local is None:
            continue
        if not any(each is local for each in objects.values()):
            raise UsageError(
                "the model has a LocalUpdates, whose ranks keep different momenta. Give that to the Checkpointer, in "
                "place of its optimizer: Checkpointer(..., model=model, local=local)."
            )
        name = next((name for name, each in objects.items() if each is local.optimizer), None)
        if name is not None:
            raise UsageError(
                f"{name}= is the optimizer of a LocalUpdates, which saves what it keeps on every rank. Leave it out."
            )


def facts(
    storage: Storage, policy: Policy, world: World, objects: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """What must be equal on all ranks, by what people call it; JSON types."""
    return {
        "the directory": _identity(storage, is_one_host=world.num_nodes == 1),
        **asdict(policy),
        **options,
        "what is saved": ", ".join(sorted(objects)),
    }


def _identity(storage: Storage, *, is_one_host: bool) -> str:
    if not isinstance(storage, LocalDirectory):
        return type(storage).__name__
    # What a link points to may differ between hosts that mount the same file system at different places.
    return os.path.realpath(storage.root) if is_one_host else os.fspath(storage.root)


def agree_on_metrics(world: World, given: Mapping[str, Any]) -> dict[str, float]:
    """Collective: rank 0's metrics, of which every rank gives its own values under the same names.

    Raises:
        ConfigurationError: A value is no number. Raised on all ranks.
        MismatchError: The names differ. Raised on all ranks.
    """
    mine: dict[str, Any] = {
        name: float(value) if checks.is_switch_type(value) else checks.as_float(value) for name, value in given.items()
    }
    wrong = [name for name, value in mine.items() if value is None]
    problem = f"metric {wrong[0]}={checks.shown(given[wrong[0]])} is no number." if wrong else None
    seen = world.exchange({"problem": problem, "metrics": mine})
    for rank, each in enumerate(seen):
        if each["problem"] is not None:
            raise ConfigurationError(f"checkpoint on rank {rank}: {each['problem']}")
        if sorted(each["metrics"]) != sorted(seen[0]["metrics"]):
            raise MismatchError(
                f"checkpoint: the metrics are {', '.join(seen[0]['metrics'])} on rank 0 and "
                f"{', '.join(each['metrics'])} on rank {rank}. Every rank gives the same names; rank 0's values count."
            )
    metrics: dict[str, float] = seen[0]["metrics"]
    return metrics
