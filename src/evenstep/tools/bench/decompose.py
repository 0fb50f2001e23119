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

That is for CPUs, where whoever overlaps communication uses the same cores. On GPUs each collective is compared with the
same one on other ranks, [Note: communication on a GPU] in profile.py: steps come with what is *exposed*.

What a rank computes takes longer beside others that want the same cores and memory. *Contention* is what the typical
rank computes, less what one replica alone needs for as many samples.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields

_PART_OF = {
    "data": "data",
    "sync": "engine",
    "engine": "engine",
    "optimizer": "optimizer",
    "forward": "compute",
    "backward": "compute",
    "script": "compute",
    "compute": "compute",
    "idle": "idle",
}  # by phase; those of a rank on its own


@dataclass(frozen=True)
class Parts:
    """A step in parts, in seconds. They add up to it.

    Attributes:
        compute_s: Computing, as long as alone; with the script's own work between the passes.
        contention_s: Computing, longer than alone.
        data_s: Waiting for data.
        idle_s: A GPU has nothing to do, and the host isn't waiting for data.
        imbalance_s: Waiting for a rank that came later.
        exposed_s: Communication that nothing hid.
        engine_s: On CPUs, the wrapper's own work: dividing, module buffers.
        optimizer_s: On CPUs, the optimizer's step.
    """

    compute_s: float = 0.0
    contention_s: float = 0.0
    data_s: float = 0.0
    idle_s: float = 0.0
    imbalance_s: float = 0.0
    exposed_s: float = 0.0
    engine_s: float = 0.0
    optimizer_s: float = 0.0

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
            With "exposed" where that is known; else a rank exposes what it waits.
        compute_alone_s: What one replica alone computes for as many samples; None: this is the run that others are
            compared with.
    """
    num_steps = min(map(len, steps), default=0)
    if num_steps == 0:
        raise ValueError("there is no step to take apart")
    sums, last = defaultdict[str, float](float), Counter[int]()
    lost = [defaultdict[str, float](float) for _ in steps]
    own_sums = [0.0] * len(steps)
    for each in zip(*steps, strict=False):
        own = [sum(seconds for phase, seconds in step.items() if phase in _PART_OF) for step in each]
        order = sorted(range(len(each)), key=own.__getitem__)
        middle = order[(len(each) - 1) // 2]
        typical, total = each[middle], sum(sum(step.values()) for step in each) / len(each)
        exposed = min(step.get("exposed", step["wait"]) for step in each)
        sums["exposed"] += exposed
        sums["imbalance"] += total - own[middle] - exposed
        last[order[-1]] += 1
        for phase, part in _PART_OF.items():
            sums[part] += typical.get(phase, 0.0)
            for rank, step in enumerate(each):
                lost[rank][phase] += step.get(phase, 0.0) - typical.get(phase, 0.0)
        own_sums = [before + more for before, more in zip(own_sums, own, strict=True)]
    mean = {name: value / num_steps for name, value in sums.items()}
    # Clocks are read one after the other: microseconds below zero go to the next part.
    for part, rest in (("imbalance", "exposed"), ("exposed", "compute")):
        mean[rest] += min(0.0, mean[part])
        mean[part] = max(0.0, mean[part])
    contention_s = 0.0 if compute_alone_s is None else max(0.0, mean["compute"] - compute_alone_s)
    mean |= {"contention": contention_s, "compute": mean["compute"] - contention_s}
    late = None
    if len(steps) > 1:
        rank, times = max(last.items(), key=lambda item: (item[1], -item[0]))
        phase = max(lost[rank], key=lost[rank].__getitem__)
        late = Late(rank, times / num_steps, phase, max(0.0, sum(lost[rank].values()) / num_steps))
    return Decomposition(
        Parts(**{field.name: mean[field.name.removesuffix("_s")] for field in fields(Parts)}),
        late,
        tuple(value / num_steps for value in own_sums),
        num_steps,
    )


def in_ms(seconds: float) -> str:
    """For people: "12.5 ms", "1.2 s"."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
