"""Which runs are measured, and in which order. Pure.

[Note: rounds]

A machine drifts: it warms up, others use it. If all runs on one replica came first and all on four last, the drift
would look like scaling. So every round has each setting once, one round goes up and the next one down, and replicas are
compared within a round.

    round 0    1, 2, 4 replicas
    round 1    4, 2, 1
    round 2    1, 2, 4
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evenstep.errors import ConfigurationError

NUM_WARMUP = 5
"""Steps that are made first and not counted. In the first one the models are looked for."""


@dataclass(frozen=True, order=True)
class Setting:
    """One point of a curve.

    Attributes:
        num_replicas: Ranks of the run.
        global_batch_size: Samples of a loader's batch on all ranks together; None: as the script says.
        growth: By how much larger than on the fewest replicas the global batch is.
    """

    num_replicas: int
    global_batch_size: int | None
    growth: int = 1


def default_replicas(num_places: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to the number of GPUs, or of cores."""
    return tuple(1 << power for power in range(max(1, num_places.bit_length())))


def validate_replicas(replicas: Sequence[int]) -> tuple[int, ...]:
    """In order and once each.

    Raises:
        ConfigurationError: There are none, or one isn't positive, or not a multiple of the smallest.
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
    """The settings of each curve, "weak" and perhaps "strong"; both begin with the same one.

    Args:
        replicas: In order, multiples of the first.
        batch: Samples of a step on the fewest replicas; None: it is unknown, and stays as it is.
        has_strong: Whether one batch is also divided over the replicas.

    Raises:
        ConfigurationError: The batch has no sample for every replica, or is unknown, and is to be divided.
    """
    grown = [(number, number // replicas[0]) for number in replicas]
    curves = {"weak": tuple(Setting(n, None if batch is None else batch * by, by) for n, by in grown)}
    if has_strong:
        if batch is None or batch < replicas[-1]:
            what = "no loader was seen, so there is no batch" if batch is None else f"{batch} samples are too few"
            raise ConfigurationError(f"--strong: {what} to divide over {replicas[-1]} replicas.")
        curves["strong"] = tuple(Setting(number, batch) for number in replicas)
    return curves
