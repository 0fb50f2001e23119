"""A simulated data-parallel step on ranks that one doesn't have: what overlaps with what. Pure.

[Note: the simulated step]

    compute   forward │ backward                     │        │ other, optimizer
                           ^ ready  ^ ready     ^ ready
    wire                   │ bucket 0  │ bucket 1 │ bucket 2 │ header
                                                     └ exposed ┘

- Buckets travel one after the other, in order, each when it is ready and the wire is free, while the backward pass
  runs: one stream of NCCL's, one thread of evenstep's transports. A collective takes what `cost.collective_s` says.
- `sharded`: buckets are reduce-scattered; a rank steps its share of each bucket and gathers it, while it steps the
  next.
- `sharded, stage 2`: the same, but only two buckets have memory at a time: the backward pass waits for the one before
  the last.
- Ranks are never equally fast. All wait for the slowest, which of n ranks whose times spread by sigma is later than the
  mean by about the expected maximum of n normal numbers (Blom, "Statistical Estimates and Transformed Beta-Variables",
  1958); all its times are longer by that.

Not simulated: contention of the ranks of one node for memory and cores, loaders that can't keep up, a network that is
shared with others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any, Literal, get_args

from evenstep.bench.predict.cost import Network, Topology, collective_s
from evenstep.errors import ConfigurationError

Variant = Literal["all-reduce", "sharded", "sharded, stage 2"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)

PROFILE_VERSION = 1
_NUM_LENT = 2  # buckets that have memory at once in stage 2
_HEADER_BYTES = 1024  # what follows the buckets: weights, which parameters were used


@dataclass(frozen=True)
class Bucket:
    """What travels as a whole.

    Attributes:
        num_bytes: Of gradients.
        ready_s: When they are there, after the backward pass has begun.
    """

    num_bytes: int
    ready_s: float


@dataclass(frozen=True)
class Profile:
    """What a step is made of on one rank, measured where nothing travels.

    Attributes:
        num_samples: Of the batch that was measured.
        forward_s: The forward pass.
        backward_s: The backward pass.
        optimizer_s: The optimizer's step over all parameters.
        other_s: What else a step takes, and doesn't depend on the batch.
        buckets: In the order in which they are sent.
        parameter_bytes: What a sharded optimizer gathers; as much as the buckets if 0.
        spread_s: Standard deviation of a rank's forward and backward pass, over steps and ranks.
    """

    num_samples: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    buckets: tuple[Bucket, ...]
    other_s: float = 0.0
    parameter_bytes: int = 0
    spread_s: float = 0.0

    def __post_init__(self) -> None:
        times = {name: value for name, value in vars(self).items() if name.endswith("_s")}
        for name, value in times.items():
            if not (value >= 0 and math.isfinite(value)):
                raise ConfigurationError(f"a profile with {name} = {value}: times are at least 0.")
        if not self.num_samples > 0:
            raise ConfigurationError(f"a profile of {self.num_samples} samples: more than 0.")
        for index, bucket in enumerate(self.buckets):
            if bucket.num_bytes <= 0 or not 0 <= bucket.ready_s < math.inf:
                raise ConfigurationError(
                    f"bucket {index} of {bucket.num_bytes} bytes, ready after {bucket.ready_s} s: bytes are more than "
                    f"0, times at least 0."
                )

    @property
    def bucket_bytes(self) -> int:
        """Of all buckets."""
        return sum(bucket.num_bytes for bucket in self.buckets)

    @property
    def compute_s(self) -> float:
        """One rank's step, alone."""
        return self.forward_s + self.backward_s + self.optimizer_s + self.other_s

    def at(self, num_samples: float) -> Profile:
        """The same with another batch: passes take as much longer as there are more samples."""
        by = num_samples / self.num_samples
        return self._slower(by, num_samples=num_samples)

    def _slower(self, by: float, *, num_samples: float | None = None) -> Profile:
        return Profile(
            num_samples=self.num_samples if num_samples is None else num_samples,
            forward_s=self.forward_s * by,
            backward_s=self.backward_s * by,
            optimizer_s=self.optimizer_s,
            buckets=tuple(Bucket(bucket.num_bytes, bucket.ready_s * by) for bucket in self.buckets),
            other_s=self.other_s,
            parameter_bytes=self.parameter_bytes,
            spread_s=self.spread_s * by,
        )

    def delayed(self, delay_s: float) -> Profile:
        """The slowest rank's: its passes take so much longer in all."""
        passes = self.forward_s + self.backward_s
        return self if passes == 0 else self._slower(1 + delay_s / passes)

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        return {"version": PROFILE_VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, read: Mapping[str, Any]) -> Profile:
        """A profile that was written by `to_json`.

        Raises:
            ConfigurationError: It is none, or of another version.
        """
        fields = dict(read)
        if fields.pop("version", None) != PROFILE_VERSION:
            raise ConfigurationError(
                f"a profile of version {read.get('version')}: this program reads {PROFILE_VERSION}."
            )
        try:
            buckets = tuple(Bucket(**bucket) for bucket in fields.pop("buckets"))
            return cls(buckets=buckets, **fields)
        except (KeyError, TypeError) as error:
            raise ConfigurationError(f"this is no profile of a step: {error}.") from error


@dataclass(frozen=True)
class SimulatedStep:
    """What a step takes on some ranks.

    Attributes:
        topology: The ranks.
        variant: What happens to gradients.
        num_samples: Of each rank.
        step_s: The whole step.
        compute_s: The part in which a rank computes: passes, optimizer, other.
        imbalance_s: By how much the slowest rank's passes are longer than the mean.
        exposed_s: Communication that nothing hides.
        communication_s: All communication, hidden or not.
        bucket_times: By bucket, when its collective begins and ends, after the backward pass has begun.
    """

    topology: Topology
    variant: Variant
    num_samples: float
    step_s: float
    compute_s: float
    imbalance_s: float
    exposed_s: float
    communication_s: float
    bucket_times: tuple[tuple[float, float], ...]

    @property
    def samples_per_s(self) -> float:
        """Of all ranks."""
        return self.num_samples * self.topology.num_ranks / self.step_s


def simulate_step(
    profile: Profile, topology: Topology, network: Network, variant: Variant = "all-reduce"
) -> SimulatedStep:
    """One step on some ranks; see [Note: the simulated step].

    Args:
        profile: What a rank's step is made of.
        topology: The ranks.
        network: What they talk through.
        variant: What happens to gradients.

    Raises:
        ConfigurationError: There is no such variant.
    """
    if variant not in VARIANTS:
        raise ConfigurationError(f"variant {variant!r}: use one of {', '.join(map(repr, VARIANTS))}.")
    n = topology.num_ranks
    delay_s = expected_maximum(n) * profile.spread_s
    slowest = profile.delayed(delay_s)
    is_sharded = variant != "all-reduce"
    scatter: Literal["reduce_scatter", "all_reduce"] = "reduce_scatter" if is_sharded else "all_reduce"

    wire_free = stalled_s = communication_s = 0.0
    times: list[tuple[float, float]] = []
    for index, bucket in enumerate(slowest.buckets):
        ready = bucket.ready_s + stalled_s
        if variant == "sharded, stage 2" and index >= _NUM_LENT and times[index - _NUM_LENT][1] > ready:
            stalled_s += times[index - _NUM_LENT][1] - ready
            ready = times[index - _NUM_LENT][1]
        takes = collective_s(scatter, bucket.num_bytes, topology, network)
        communication_s += takes
        begins = max(ready, wire_free)
        wire_free = begins + takes
        times.append((begins, wire_free))
    # Between ranks of one node the header is piggybacked on the last bucket.
    has_header = n > 1 and not (topology.num_nodes == 1 and network.algorithm == "hierarchical")
    header_s = collective_s("all_reduce", _HEADER_BYTES, topology, network) if has_header else 0.0
    communication_s += header_s
    backward_s = slowest.backward_s + stalled_s
    reduced = max(backward_s, wire_free) + header_s

    optimizer_s, gathered_s, gathering_s = slowest.optimizer_s, 0.0, 0.0
    if is_sharded:
        optimizer_s /= n
        gathered_s, gathering_s = _step_and_gather(slowest, optimizer_s, topology, network)
        communication_s += gathering_s
    after_s = max(optimizer_s, gathered_s)
    compute_s = profile.forward_s + profile.backward_s + optimizer_s + profile.other_s
    step_s = slowest.forward_s + reduced + after_s + slowest.other_s
    return SimulatedStep(
        topology=topology,
        variant=variant,
        num_samples=profile.num_samples,
        step_s=step_s,
        compute_s=compute_s,
        imbalance_s=delay_s,
        exposed_s=max(0.0, step_s - compute_s - delay_s),
        communication_s=communication_s,
        bucket_times=tuple(times),
    )


def _step_and_gather(profile: Profile, optimizer_s: float, topology: Topology, network: Network) -> tuple[float, float]:
    """(when the last bucket has been gathered, the sum of the gathers), from the beginning of the optimizer's step."""
    total = profile.bucket_bytes
    parameter_bytes = profile.parameter_bytes or total
    stepped = gathered = gathering = 0.0
    for bucket in profile.buckets:
        share = bucket.num_bytes / total
        stepped += optimizer_s * share
        takes = collective_s("all_gather", parameter_bytes * share, topology, network)
        gathered = max(stepped, gathered) + takes
        gathering += takes
    return gathered, gathering


def expected_maximum(count: int) -> float:
    """Of so many normal numbers of mean 0 and deviation 1 (Blom's approximation)."""
    return 0.0 if count <= 1 else NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


@dataclass(frozen=True)
class Prediction:
    """A simulated step beside one rank alone.

    Attributes:
        step: What was simulated.
        speed_up: Samples a second over those of one rank.
        efficiency: Speed-up over the number of ranks.
    """

    step: SimulatedStep
    speed_up: float
    efficiency: float

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        received = asdict(self.step)
        del received["bucket_times"]
        return {**received, "samples_per_s": self.step.samples_per_s, "speed_up": self.speed_up} | {
            "efficiency": self.efficiency
        }


def predict(
    profile: Profile,
    network: Network,
    num_ranks: Sequence[int],
    *,
    ranks_per_node: int,
    variants: Sequence[Variant] = ("all-reduce",),
    global_batch: float | None = None,
) -> list[Prediction]:
    """Steps on several numbers of ranks, beside one rank alone.

    Args:
        profile: What a rank's step is made of.
        network: What ranks talk through.
        num_ranks: Numbers of ranks.
        ranks_per_node: How many ranks a node has.
        variants: What happens to gradients.
        global_batch: Samples of all ranks together (strong scaling); None: each rank has the profile's (weak
            scaling).

    Raises:
        ConfigurationError: A number makes no sense.
    """
    if not num_ranks or min(num_ranks) < 1 or ranks_per_node < 1:
        raise ConfigurationError(f"ranks {list(num_ranks)} on nodes of {ranks_per_node}: numbers from 1 on.")
    if global_batch is not None and not global_batch > 0:
        raise ConfigurationError(f"a global batch of {global_batch} samples: more than 0.")
    predictions = []
    for variant in variants:
        for count in num_ranks:
            mine = profile if global_batch is None else profile.at(global_batch / count)
            alone = profile if global_batch is None else profile.at(global_batch)
            step = simulate_step(mine, Topology.of(count, ranks_per_node), network, variant)
            speed_up = step.samples_per_s / (alone.num_samples / alone.compute_s)
            predictions.append(Prediction(step, speed_up, speed_up / count))
    return predictions


def prediction_table(predictions: Sequence[Prediction]) -> str:
    """For people, and for the documentation."""
    lines = [
        "| variant | ranks | nodes | step, ms | computing | slowest rank | exposed communication "
        "| samples/s | speed-up | efficiency |",
        "| --- |" + " ---: |" * 9,
    ]
    for each in predictions:
        step, on = each.step, each.step.topology
        shares = [f"{part / step.step_s:.1%}" for part in (step.compute_s, step.imbalance_s, step.exposed_s)]
        lines.append(
            f"| {step.variant} | {on.num_ranks:,} | {on.num_nodes:,} | {step.step_s * 1e3:,.1f} | "
            + " | ".join(shares)
            + f" | {step.samples_per_s:,.0f} | {each.speed_up:,.1f} | {each.efficiency:.1%} |"
        )
    return "\n".join(lines)
