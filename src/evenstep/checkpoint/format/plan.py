"""Decides which rank writes which file, when to save, and which checkpoints to delete. Pure.

Every rank knows the tensors of the replicated state, in the same order, so each computes the same plan without
communication:

    object       size      3 ranks
    model        600 MB    model-00001-of-00003.safetensors on rank 0, ...-00002-... on rank 1, ...-00003-... on rank 2
    scheduler      1 kB    scheduler.safetensors on the rank that has the least to write
    random                 random.safetensors, gathered, on rank 0
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from evenstep import checks
from evenstep.checkpoint.format.payload import Entry
from evenstep.errors import ConfigurationError

# Smaller objects aren't split into a file per rank: a synced file costs milliseconds.
_MIN_SPLIT_BYTES = 8 << 20


@dataclass(frozen=True)
class FilePlan:
    """One payload file and the rank that writes it.

    Attributes:
        name: The file's name.
        owner: The object that has the tensors.
        rank: The rank that writes it.
        entries: The file's tensors.
    """

    name: str
    owner: str
    rank: int
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Policy:
    """When to save, and what to keep.

    Attributes:
        every_steps: Save after every this many steps; None: not by steps.
        every_minutes: Save when this many minutes have passed since the last save; None: not by time.
        keep: Number of newest checkpoints to keep.
        keep_every: Keep checkpoints of multiples of this many steps for good; None: of none.
        best: The metric whose best checkpoint is kept; None: none.
        best_is: "lowest" or "highest".
        local_every_steps: Save to the nodes' own disks after every this many steps; None: never.
    """

    every_steps: int | None = None
    every_minutes: float | None = 10.0
    keep: int = 3
    keep_every: int | None = None
    best: str | None = None
    best_is: str = "lowest"
    local_every_steps: int | None = None

    def __post_init__(self) -> None:
        found: dict[str, float] = {}
        for name in ("every_steps", "keep", "keep_every", "local_every_steps"):
            value = getattr(self, name)
            if value is not None or name == "keep":
                found[name] = checks.whole(name, value, least=1)
        if self.every_minutes is not None:
            found["every_minutes"] = checks.number(
                "every_minutes", self.every_minutes, above=0, finite=False, otherwise="None"
            )
        for name, number in found.items():  # convert to python's own number types
            object.__setattr__(self, name, number)
        if self.best is not None:
            checks.text("best", self.best, wanted="the name of a metric: best='loss'")
        checks.choice("best_is", self.best_is, ("lowest", "highest"))
        if self.every_steps is not None and (self.local_every_steps or 0) > self.every_steps:
            raise ConfigurationError(
                f"local_every_steps={self.local_every_steps} has no effect with every_steps={self.every_steps}: local "
                f"copies are for the steps between two checkpoints. Make it smaller, or leave local out."
            )


def plan_files(objects: Mapping[str, Sequence[Entry]], world_size: int, suffix: str = "") -> list[FilePlan]:
    """Split the replicated tensors into files, and the files over the ranks.

    Args:
        objects: The tensors of each object, equal on all ranks.
        world_size: Number of ranks.
        suffix: Added to the objects' names in file names.
    """
    load = [0] * world_size
    plans: list[FilePlan] = []
    sizes = {owner: sum(entry.num_bytes for entry in entries) for owner, entries in objects.items()}
    for owner in sorted(objects, key=lambda owner: (-sizes[owner], owner)):
        entries = objects[owner]
        if not entries:
            continue
        if sizes[owner] < _MIN_SPLIT_BYTES or world_size == 1:
            rank = load.index(min(load))
            load[rank] += sizes[owner]
            plans.append(FilePlan(f"{owner}{suffix}.safetensors", owner, rank, tuple(entries)))
            continue
        shares: dict[int, list[Entry]] = {}
        for entry in sorted(entries, key=lambda entry: (-entry.num_bytes, entry.key)):
            rank = load.index(min(load))
            load[rank] += entry.num_bytes
            shares.setdefault(rank, []).append(entry)
        for number, (rank, share) in enumerate(sorted(shares.items()), start=1):
            name = f"{owner}{suffix}-{number:05d}-of-{len(shares):05d}.safetensors"
            plans.append(FilePlan(name, owner, rank, tuple(share)))
    return plans


def shard_file(owner: str, rank: int, world_size: int) -> str:
    """Name of the file with a rank's shards of an object that is divided over the ranks."""
    return f"{owner}-shards-{rank + 1:05d}-of-{world_size:05d}.safetensors"


def is_shard_file(name: str) -> bool:
    """Whether a name is a result of `shard_file`."""
    return "-shards-" in name


def is_better(value: float, than: float | None, policy: Policy) -> bool:
    """Whether a metric beats the best so far; a NaN never does."""
    if value != value:
        return False
    if than is None:
        return True
    return value < than if policy.best_is == "lowest" else value > than


def best_step(metrics: Mapping[int, Mapping[str, float]], policy: Policy) -> int | None:
    """The step with the best metric; the earliest one if several are equal.

    Args:
        metrics: The metrics of each saved step.
        policy: Names the metric.
    """
    found: int | None = None
    for step in sorted(metrics):
        value = metrics[step].get(policy.best or "")
        before = None if found is None else metrics[found][policy.best or ""]
        if value is not None and is_better(value, before, policy):
            found = step
    return found


def plan_removals(metrics: Mapping[int, Mapping[str, float]], policy: Policy) -> list[int]:
    """The steps whose checkpoints have to be removed.

    Args:
        metrics: The metrics of each saved step.
        policy: The policy, which says which checkpoints to keep.
    """
    steps: Iterable[int] = sorted(metrics)
    kept = set(sorted(metrics)[-policy.keep :])
    if policy.keep_every is not None:
        kept |= {step for step in steps if step % policy.keep_every == 0}
    best = best_step(metrics, policy) if policy.best is not None else None
    return [step for step in steps if step not in kept and step != best]
