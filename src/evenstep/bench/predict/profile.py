"""The parts of a step, from a wrapped model's records or a report: the input of `simulate`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from evenstep.bench.predict.simulate import Bucket, Profile
from evenstep.errors import ConfigurationError, UsageError
from evenstep.health.telemetry import StepTimes
from evenstep.replica.wrapper.distributed import DistributedDataParallel

_NUM_WARM_UP = 3  # the first passes only count; the second layout is that of all later steps
_QUARTILES_PER_DEVIATION = 1.349  # of normal numbers


def profile_of(model: DistributedDataParallel, num_samples: float, *, num_warm_up: int = _NUM_WARM_UP) -> Profile:
    """The medians of what a model's steps have spent their time on, on this rank.

    In a world of one there are no buckets: measure it there, and on two ranks, and `combine` both.

    Args:
        model: It has trained some steps, all with the same batch.
        num_samples: Of this rank's batch.
        num_warm_up: Steps at the beginning that don't count.

    Raises:
        UsageError: It hasn't made more steps than that.
    """
    steps = model.engine.recorder.steps()[num_warm_up:]
    sizes = [bucket.flat.nbytes for bucket in model.engine.buckets]
    return summarise(steps, sizes, num_samples)


def summarise(steps: Sequence[StepTimes], bucket_bytes: Sequence[int], num_samples: float) -> Profile:
    """The medians of some steps. Pure.

    Args:
        steps: Without those of the warm-up.
        bucket_bytes: By bucket.
        num_samples: Of each step.

    Raises:
        UsageError: There is no step in which all buckets were seen.
    """
    steps = [step for step in steps if len(step.ready_s) == len(bucket_bytes)]
    if not steps:
        raise UsageError("a profile needs more steps of training than those of the warm-up; train some more first.")

    def median(name: str) -> float:
        return float(statistics.median(getattr(step, name) for step in steps))

    passes = [step.forward_s + step.backward_s for step in steps]
    ready = [statistics.median(step.ready_s[index] for step in steps) for index in range(len(bucket_bytes))]
    return Profile(
        num_samples=num_samples,
        forward_s=median("forward_s"),
        backward_s=median("backward_s"),
        optimizer_s=median("optimizer_s"),
        other_s=median("finish_s"),
        buckets=tuple(Bucket(size, when) for size, when in zip(bucket_bytes, ready, strict=True)),
        spread_s=deviation_of(passes),
    )


def deviation_of(values: Sequence[float]) -> float:
    """The standard deviation by quartiles: a few values far off don't count. 0.0 if there are too few. Pure."""
    if len(values) < 4:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / _QUARTILES_PER_DEVIATION


def combine(alone: Profile, together: Profile) -> Profile:
    """The times of a rank alone, with the buckets of several. Pure.

    Args:
        alone: Measured in a world of one, where nothing disturbs.
        together: Measured on two ranks, where there are buckets.
    """
    by = alone.backward_s / together.backward_s if together.backward_s > 0 else 1.0
    buckets = tuple(Bucket(bucket.num_bytes, bucket.ready_s * by) for bucket in together.buckets)
    return replace(alone, buckets=buckets, parameter_bytes=together.parameter_bytes)


def profile_of_report(report: Mapping[str, Any]) -> Profile:
    """The profile of a script, out of the report that `evenstep bench script.py` wrote. Pure.

    Times are those of the fewest replicas of the weak curve, the buckets and when they are ready those of the most.

    Raises:
        ConfigurationError: It is no such report, or one of a script whose gradients don't travel in buckets.
    """
    try:
        curves = report["curves"]
        points = curves.get("weak") or next(iter(curves.values()))
        alone, together = points[0], points[-1]
        parts, rows = alone["parts"], float(alone["rows_per_replica"])
        backward_s = min(float(alone["backward_s"]), float(parts["compute"]))
        slower = backward_s / together["backward_s"] if together["backward_s"] else 1.0
        spread_s = float(alone["passes_spread_s"])
        buckets = tuple(Bucket(each["num_bytes"], each["ready_s"] * slower) for each in together["buckets"])
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, StopIteration) as error:
        raise ConfigurationError(f"this is no report of `evenstep bench script.py` ({error!r}).") from error
    if not buckets:
        raise ConfigurationError("the report tells of no buckets: measure two replicas or more, with evenstep or DDP.")
    return Profile(
        num_samples=rows,
        forward_s=parts["compute"] - backward_s,
        backward_s=backward_s,
        optimizer_s=parts["optimizer"],
        other_s=parts["data"] + parts["engine"],
        buckets=buckets,
        spread_s=spread_s,
    )
