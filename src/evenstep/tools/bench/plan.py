"""The runs of a measurement and their order. Pure.

[Note: rounds]

The speed of a machine drifts: it warms up, others use it. If all runs on one replica came first and all on four last,
the drift would look like scaling. So every round has each setting once, the order alternates between rounds, and
numbers of replicas are compared within a round.

    round 0    1, 2, 4 replicas
    round 1    4, 2, 1
    round 2    1, 2, 4
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evenstep.errors import ConfigurationError

NUM_WARMUP = 5
"""The number of first steps that aren't counted. The models are found at the end of the first one."""


@dataclass(frozen=True, order=True)
class Setting:
    """One point of a curve.

    Attributes:
        num_replicas: The number of ranks of the run.
        global_batch_size: The samples of a loader's batch on all ranks together; None: as the script says.
        growth: The factor by which the global batch is larger than on the fewest replicas.
    """

    num_replicas: int
    global_batch_size: int | None
    growth: int = 1


def default_replicas(num_places: int) -> tuple[int, ...]:
    """The numbers of replicas by default: 1, 2, 4, ... up to the number of GPUs or cores."""
    return tuple(1 << power for power in range(max(1, num_places.bit_length())))


def validate_replicas(replicas: Sequence[int]) -> tuple[int, ...]:
    """Sort numbers of replicas and remove duplicates.

    Raises:
        ConfigurationError: There are none, or a number isn't positive or no multiple of the smallest.
    """
    chosen, said = tuple(sorted(set(replicas))), f"--nproc-per-node {','.join(map(str, replicas))}"
    if not chosen or chosen[0] < 1:
        raise ConfigurationError(f"{said}: numbers of at least 1, as in 1,2,4.")
    if odd := [number for number in chosen if number % chosen[0]]:
        raise ConfigurationError(
            f"{said}: {odd[0]} is no multiple of {chosen[0]}, the fewest, with which all are compared."
        )
    return chosen


def plan_settings(replicas: Sequence[int], batch: int | None, *, has_strong: bool) -> dict[str, tuple[Setting, ...]]:
    """The settings of each curve, "weak" and perhaps "strong". Both begin with the same setting.

    Args:
        replicas: The numbers of replicas, in order, multiples of the first.
        batch: The samples of a step on the fewest replicas; None: unknown, so the batch size isn't changed.
        has_strong: Whether to measure strong scaling, too: one batch is divided over the replicas.

    Raises:
        ConfigurationError: Strong scaling is wanted, but the batch is unknown or has fewer samples than replicas.
    """
    grown = [(number, number // replicas[0]) for number in replicas]
    curves = {"weak": tuple(Setting(n, None if batch is None else batch * by, by) for n, by in grown)}
    if has_strong:
        if batch is None or batch < replicas[-1]:
            what = "no loader was seen, so there is no batch" if batch is None else f"{batch} samples are too few"
            raise ConfigurationError(f"--strong: {what} to divide over {replicas[-1]} replicas.")
        curves["strong"] = tuple(Setting(number, batch) for number in replicas)
    return curves
