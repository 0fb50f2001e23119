"""What a step is made of, taken from what a wrapped model has recorded: the input of `simulate`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from evenstep.bench.simulate import Bucket, Profile
from evenstep.errors import UsageError
from evenstep.health.telemetry import StepTimes
from evenstep.replica.distributed import DistributedDataParallel

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
        return statistics.median(getattr(step, name) for step in steps)

    passes = [step.forward_s + step.backward_s for step in steps]
    spread = 0.0
    if len(passes) > 3:
        low, _, high = statistics.quantiles(passes, n=4, method="inclusive")
        spread = (high - low) / _QUARTILES_PER_DEVIATION
    ready = [statistics.median(step.ready_s[index] for step in steps) for index in range(len(bucket_bytes))]
    return Profile(
        num_samples=num_samples,
        forward_s=median("forward_s"),
        backward_s=median("backward_s"),
        optimizer_s=median("optimizer_s"),
        other_s=median("finish_s"),
        buckets=tuple(Bucket(size, when) for size, when in zip(bucket_bytes, ready, strict=True)),
        spread_s=spread,
    )


def combine(alone: Profile, together: Profile) -> Profile:
    """The times of a rank alone, with the buckets of several. Pure.

    Args:
        alone: Measured in a world of one, where nothing disturbs.
        together: Measured on two ranks, where there are buckets.
    """
    by = alone.backward_s / together.backward_s if together.backward_s > 0 else 1.0
    buckets = tuple(Bucket(bucket.num_bytes, bucket.ready_s * by) for bucket in together.buckets)
    return replace(alone, buckets=buckets, parameter_bytes=together.parameter_bytes)
