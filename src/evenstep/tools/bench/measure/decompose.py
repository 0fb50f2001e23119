"""Where the time of a step went: steps of all ranks in, parts that add up to the step out. Pure.

[Note: who waits for whom]

Ranks wait for each other in collectives, so all have steps of the same length, and who is slow doesn't show in them.
Two things tell it apart, without comparing clocks:

    own     what a rank did by itself: all of its step but waiting. This is the time until it was ready
    wait    the rest

The rank with the shortest wait came last; what even that one waited is *communication*. What a typical rank (the median
by `own`) waited longer than that is *imbalance*: it would go if all were as fast. The other parts are those of the
typical rank.

    rank 0   |-- data --|---- compute ----|......... wait .........|- optimizer -|
    rank 1   |-- data --|-------------- compute -------------|.....|- optimizer -|
                                                              exposed
                                          |--- imbalance ----|

What a rank computes takes longer beside others that want the same cores and memory. *Contention* is what the typical
rank computes, less what one replica alone needs for as many samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

from evenstep.tools.bench.measure.records import PHASES

COMPUTE = ("forward", "backward", "script")
ENGINE = ("sync", "engine")
_OWN = tuple(phase for phase in PHASES if phase != "wait")


@dataclass(frozen=True)
class Parts:
    """A step in parts, in seconds. They add up to it.

    Attributes:
        data_s: Waiting for data.
        imbalance_s: Waiting for a rank that came later.
        exposed_s: Communication that nothing hid.
        engine_s: The wrapper's own work: dividing, module buffers.
        optimizer_s: The optimizer's step.
        contention_s: Computing, longer than alone.
        compute_s: Computing, as long as alone; with the script's own work between the passes.
    """

    data_s: float = 0.0
    imbalance_s: float = 0.0
    exposed_s: float = 0.0
    engine_s: float = 0.0
    optimizer_s: float = 0.0
    contention_s: float = 0.0
    compute_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The step."""
        return float(sum(getattr(self, field.name) for field in fields(self)))

    def share(self, *names: str) -> float:
        """What parts are of the step, 0 to 1. Names without `_s`."""
        total = self.total_s
        return float(sum(getattr(self, f"{name}_s") for name in names)) / total if total else 0.0


@dataclass(frozen=True)
class Late:
    """Who held the others up.

    Attributes:
        rank: The one that came last most often.
        share_of_steps: In how many of the steps it did, 0 to 1.
        phase: In which phase it lost most against a typical rank.
        excess_s: How much longer it was on its own per step, on average, than a typical rank.
    """

    rank: int
    share_of_steps: float
    phase: str
    excess_s: float


@dataclass(frozen=True)
class Decomposition:
    """A run's average step.

    Attributes:
        parts: See `Parts`.
        late: Who held the others up; None with one rank.
        ready_s: By rank: how long it was on its own in a step, on average: the time until it was ready.
        num_steps: Steps that were counted.
    """

    parts: Parts
    late: Late | None
    ready_s: tuple[float, ...]
    num_steps: int


Steps = Sequence[Sequence[dict[str, float]]]  # by rank, by step: seconds by phase


def decompose(steps: Steps, *, compute_alone_s: float | None = None) -> Decomposition:
    """Average over a run's steps.

    Args:
        steps: By rank, by step: seconds by phase, as `records.steps_in_parts` makes them. As many steps on every rank.
        compute_alone_s: What one replica alone computes for as many samples; None: this is the run that others are
            compared with.
    """
    num_steps = min(map(len, steps), default=0)
    if num_steps == 0:
        raise ValueError("there is no step to take apart")
    world_size = len(steps)
    sums = dict.fromkeys(("data", "imbalance", "exposed", "engine", "optimizer", "compute", "total"), 0.0)
    last: Counter[int] = Counter()
    lost = [dict.fromkeys(_OWN, 0.0) for _ in range(world_size)]
    own_sums = [0.0] * world_size
    for number in range(num_steps):
        each = [ranks_steps[number] for ranks_steps in steps]
        own = [sum(step[phase] for phase in _OWN) for step in each]
        order = sorted(range(world_size), key=own.__getitem__)
        typical = each[order[(world_size - 1) // 2]]
        total = sum(sum(step.values()) for step in each) / world_size
        exposed = min(step["wait"] for step in each)
        sums["total"] += total
        sums["exposed"] += exposed
        sums["imbalance"] += total - own[order[(world_size - 1) // 2]] - exposed
        sums["data"] += typical["data"]
        sums["engine"] += sum(typical[phase] for phase in ENGINE)
        sums["optimizer"] += typical["optimizer"]
        sums["compute"] += sum(typical[phase] for phase in COMPUTE)
        last[order[-1]] += 1
        for rank, step in enumerate(each):
            own_sums[rank] += own[rank]
            for phase in _OWN:
                lost[rank][phase] += step[phase] - typical[phase]
    mean = {name: value / num_steps for name, value in sums.items()}
    if mean["imbalance"] < 0:  # clocks are read one after the other: microseconds
        mean["exposed"] += mean["imbalance"]
        mean["imbalance"] = 0.0
    if mean["exposed"] < 0:
        mean["compute"] += mean["exposed"]
        mean["exposed"] = 0.0
    contention = 0.0 if compute_alone_s is None else max(0.0, mean["compute"] - compute_alone_s)
    parts = Parts(
        data_s=mean["data"],
        imbalance_s=mean["imbalance"],
        exposed_s=mean["exposed"],
        engine_s=mean["engine"],
        optimizer_s=mean["optimizer"],
        contention_s=contention,
        compute_s=mean["compute"] - contention,
    )
    return Decomposition(
        parts=parts,
        late=_late(last, lost, num_steps) if world_size > 1 else None,
        ready_s=tuple(value / num_steps for value in own_sums),
        num_steps=num_steps,
    )


def _late(last: Counter[int], lost: list[dict[str, float]], count: int) -> Late:
    rank, times = max(last.items(), key=lambda item: (item[1], -item[0]))
    phase = max(lost[rank], key=lost[rank].__getitem__)
    return Late(rank, times / count, phase, max(0.0, sum(lost[rank].values()) / count))
