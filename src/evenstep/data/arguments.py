"""What a `DataLoader` was given: checked, and agreed on by the ranks."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset

from evenstep import checks
from evenstep.data.division import Division, plan_division
from evenstep.data.locality import Weights
from evenstep.data.position import Mark
from evenstep.data.records import Records
from evenstep.data.sampler import DistributedSampler
from evenstep.data.weighted import WeightedSampler
from evenstep.environment import measurement
from evenstep.errors import ConfigurationError
from evenstep.transport.agreement import validate_together
from evenstep.world import World

_VERSION = 1
_ADVICE = "Every rank makes its loaders in the same order, from the same data set and with the same arguments."


_MAY_BE_NONE = {
    "sample_seed": "None for what the mode asks",
    "shuffle": "None for the data set's order, or the sampler's",
    "pin_memory": "None to pin where batches go to a GPU",
    "persistent_workers": "None to keep those that are expensive to start",
}


class OrderAsked(NamedTuple):
    """What decides the order, from arguments and sampler."""

    shuffle: bool
    seed: Any
    weights: Weights | None = None
    num_draws: int | None = None


def validate_refused(
    batch_size: Any, batch_sampler: Any, generator: Any, pin_memory_device: Any, in_order: Any
) -> None:
    """Raise for torch's arguments that this loader doesn't take."""
    if batch_size is not None:
        raise ConfigurationError(
            f"batch_size={batch_size!r}: torch counts it per rank, so the answer would depend on the number of ranks. "
            f"Write global_batch_size={batch_size!r} for that many samples a step on all ranks together, or "
            f"global_batch_size={batch_size!r} * world.world_size for torch's meaning."
        )
    if batch_sampler is not None:
        raise ConfigurationError(_refused("batch_sampler", batch_sampler))
    if generator is not None:
        raise ConfigurationError("generator: order and workers take their random numbers from seed=; pass a number.")
    if pin_memory_device:
        raise ConfigurationError(
            f"pin_memory_device={checks.shown(pin_memory_device)}: batches go to world.device, and are pinned for it."
        )
    if in_order is not True:
        raise ConfigurationError(f"in_order={in_order!r}: the order of batches is part of the answer here.")


def validate_switches(**given: Any) -> None:
    """Raise for a switch that is neither True nor False; None is one of the values of some.

    Raises:
        ConfigurationError: It is something else.
    """
    for name, value in given.items():
        if not (value is None and name in _MAY_BE_NONE):
            checks.switch(name, value, otherwise=_MAY_BE_NONE.get(name, ""))


def validate_workers(collate_fn: Any, worker_init_fn: Any, timeout: Any, prefetch_factor: Any) -> None:
    """Raise for arguments that torch's loader would take as they are.

    Raises:
        ConfigurationError: One of them can't be meant.
    """
    for name, value in (("collate_fn", collate_fn), ("worker_init_fn", worker_init_fn)):
        if value is not None:
            checks.function(name, value, otherwise="None")
    checks.number("timeout", timeout, least=0)
    if prefetch_factor is not None:
        checks.whole("prefetch_factor", prefetch_factor, least=1, otherwise="None")


def _refused(name: str, value: Any) -> str:
    return (
        f"{name}={type(value).__name__}: this loader decides itself which rank sees which sample. Leave it out "
        f"(shuffle=True shuffles, max_tokens= makes batches by length, WeightedSampler draws by weight), or use "
        f"torch.utils.data.DataLoader, with evenstep.DistributedSampler to divide the samples."
    )


def plain(value: Any) -> Any:
    """A whole number of numpy's or of a tensor as python's, which `mix` and JSON know; all else as it is."""
    if value is None or checks.is_switch_type(value):
        return value
    try:
        return operator.index(value)
    except Exception:  # no whole number: refused where it is known what it should be
        return value


def as_measured(global_batch_size: Any, max_tokens: Any) -> tuple[Any, Any]:
    """Both as the script gives them; under `evenstep bench` as that asks for."""
    asked = measurement()
    if asked is None:
        return global_batch_size, max_tokens
    if global_batch_size is not None and asked.global_batch_size is not None:
        global_batch_size = asked.global_batch_size
    if isinstance(max_tokens, int):
        max_tokens *= asked.growth
    return global_batch_size, max_tokens


def order_of(sampler: Any, shuffle: bool | None, seed: Any, world_seed: int | None) -> OrderAsked:
    """Shuffle, seed and weights, from the arguments or from the sampler that stands for them."""
    if sampler is None:
        return OrderAsked(bool(shuffle), (world_seed or 0) if seed is None else seed)
    if not isinstance(sampler, WeightedSampler | DistributedSampler):
        raise ConfigurationError(_refused("sampler", sampler))
    if shuffle is not None or seed is not None:
        raise ConfigurationError(f"sampler={type(sampler).__name__} has shuffle and seed of its own; leave these out.")
    if isinstance(sampler, WeightedSampler):
        return OrderAsked(True, sampler.seed, sampler.weights, sampler.num_draws)
    if sampler.pad or sampler.drop_last:
        raise ConfigurationError(
            "sampler=DistributedSampler: this loader divides every batch exactly and repeats and drops nothing. Make "
            "the sampler with pad=False and without drop_last, or leave it out and pass shuffle=True."
        )
    return OrderAsked(sampler.shuffle, sampler.seed)


def choose_dataset(dataset: Any, shards: Any, on_error: str | None) -> Any:
    """The data set, which `shards` may stand for."""
    if shards is None:
        if dataset is None:
            raise ConfigurationError("there is nothing to load: pass a data set, or shards=.")
        return dataset
    if dataset is not None:
        raise ConfigurationError(
            "dataset and shards exclude each other: shards are files, from which records are read."
        )
    if isinstance(shards, Records):
        return shards
    try:
        return Records(shards, on_error=on_error or "raise")
    except ConfigurationError as error:  # of the loader's argument, and not of a class that the user hasn't named
        raise ConfigurationError(str(error).removeprefix("Records: ")) from None


def choose_sample_seed(given: bool | None, dataset: Any, world: World) -> bool:
    """Whether random numbers in `__getitem__` are keyed by sample."""
    if given is False and world.lanes is not None:
        raise ConfigurationError("sample_seed=False in reproducible mode, which keys random numbers by sample.")
    if given is None:
        return world.lanes is not None and not isinstance(dataset, IterableDataset)
    return bool(given)


def choose_skips(dataset: Any, on_error: str | None, world: World) -> bool:
    """Whether samples that can't be loaded are left out."""
    chosen = getattr(dataset, "on_error", "raise") if on_error is None else on_error
    skips = checks.choice("on_error", chosen, ("raise", "skip")) == "skip"
    if skips and world.lanes is not None:
        raise ConfigurationError(
            "on_error='skip' in reproducible mode: without a sample the others would move to other lanes. Make the "
            "data set whole, or leave the sample out of it (torch.utils.data.Subset)."
        )
    return skips


def validate_stream(
    dataset: Any, order: OrderAsked, global_batch_size: Any, world_size: int, others: dict[str, Any]
) -> None:
    """Raise for arguments that a stream can't have."""
    kind = type(dataset).__name__
    for name, value in {"sampler": order.weights, "shuffle": order.shuffle, **others}.items():
        if value:
            raise ConfigurationError(
                f"{name} doesn't go with {kind}, an IterableDataset: its records come as they come. Shuffle in the "
                f"data set (its set_epoch is called), or pass one with __len__ and __getitem__."
            )
    plan_division(
        max(1, world_size),
        global_batch_size=global_batch_size,
        drop_last=False,
        shuffle=False,
        seed=order.seed,
        locality=None,
        max_tokens=None,
        lengths=None,
        weights=None,
        num_draws=None,
        world_size=world_size,
    )


def divide_dataset(dataset: Any, order: OrderAsked, **given: Any) -> Division:
    """Check the data set and the arguments that divide it.

    Raises:
        ConfigurationError: Something is wrong with them.
    """
    kind = type(dataset).__name__
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ConfigurationError(
            f"{kind} lacks __len__ or __getitem__: the ranks can't divide what can't be counted and numbered. A stream "
            f"derives from torch.utils.data.IterableDataset."
        )
    try:
        num_samples = len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise ConfigurationError(
            f"len() of the data set ({kind}) fails: {error or type(error).__name__}. The ranks can't divide it."
        ) from None
    if num_samples == 0:
        raise ConfigurationError(f"the data set ({kind}) is empty: it has no samples.")
    if isinstance(dataset, Mapping) and not (0 in dataset and num_samples - 1 in dataset):
        raise ConfigurationError(
            f"the data set ({kind}) has keys such as {checks.shown(next(iter(dataset)))}: a data set with __getitem__ "
            f"numbers its samples, dataset[0] to dataset[{num_samples - 1}]. Pass one of its values if these are data "
            f"sets, or list(dataset.values()) if each is a sample."
        )
    return plan_division(num_samples, **order._asdict(), **given)


def agree(world: World, problem: str | None, facts: Callable[[], dict[str, Any]]) -> None:
    """Collective, if there are several ranks: raise on all of them if one has a problem or they differ.

    Args:
        world: The ranks that share the data.
        problem: What is wrong here; None: nothing.
        facts: What must be equal everywhere, by what people call it; asked only if there is no problem.
    """

    def validate() -> dict[str, Any]:
        if problem is not None:
            raise ConfigurationError(problem)
        return facts()

    validate_together(world, "DataLoader", validate, advice=_ADVICE)


def read_state(state: Any, facts: dict[str, Any]) -> tuple[Mark, int]:
    """Where a run was, and with which epoch it began.

    Raises:
        ConfigurationError: It is no state of this loader; all differences are named.
    """
    where = "DataLoader.load_state_dict"
    if not isinstance(state, dict) or state.get("version") != _VERSION:
        found = state.get("version") if isinstance(state, dict) else type(state).__name__
        raise ConfigurationError(f"{where}: version {_VERSION} of a loader's state is known, this is {found!r}.")
    numbers = [state.get(name) for name in ("epoch", "position", "first_epoch")]
    if not all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in numbers):
        raise ConfigurationError(f"{where}: epoch, position and first_epoch are {numbers}; whole numbers, at least 0.")
    saved = state.get("data") or {}
    if not isinstance(saved, dict):
        raise ConfigurationError(f"{where}: data={checks.shown(saved)}; what state_dict() has written.")
    differences = [
        f"{name} was {saved.get(name)!r} and is {facts.get(name)!r}"
        for name in dict.fromkeys((*saved, *facts))
        if saved.get(name) != facts.get(name)
    ]
    if differences:
        raise ConfigurationError(
            f"{where}: the state belongs to other data: {'; '.join(differences)}. A resume is exact or refused; start "
            f"afresh, or make the loader as it was."
        )
    epoch, position, base = (int(number or 0) for number in numbers)
    return Mark(epoch, position), base


def warn_of_jump(mark: Mark, epoch: int) -> None:
    """Say that a resumed run doesn't go on where it was."""
    warnings.warn(
        f"DataLoader.set_epoch({epoch}): a state at epoch {mark.epoch}, position {mark.position}, was loaded and is "
        f"given up. Begin with epoch {mark.epoch}, or use `for epoch in loader.epochs(n)`, which does.",
        stacklevel=3,
    )
