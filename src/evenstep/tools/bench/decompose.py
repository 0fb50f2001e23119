"""Decomposes the steps of all ranks into parts that add up to the time of a step. Pure.

[Note: who waits for whom]

Ranks wait for each other in collectives, so all have steps of the same length, and these don't show which rank is slow.
Two times show it, without comparing clocks:

    own     all of a rank's step but waiting: the time until it was ready
    wait    the rest

The rank with the shortest wait came last. Its wait is *communication*. The further wait of a typical rank (the median
by `own`) is *imbalance*: it would vanish if all ranks were equally fast. The other parts are those of the typical rank.

    rank 0   |-- data --|---- compute ----|......... wait .........|- optimizer -|
    rank 1   |-- data --|-------------- compute -------------|.....|- optimizer -|
                                                              exposed
                                          |--- imbalance ----|

That holds for CPUs, where communication that overlaps with computing uses the same cores. On GPUs each collective is
compared with the same one on other ranks ([Note: communication on a GPU] in profile.py), so the steps already have the
time of *exposed* communication.

Computing takes longer beside other ranks that use the same cores and memory. *Contention* is the computing time of the
typical rank, less that of a single replica for as many samples.
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
}  # by phase; "wait" isn't among them, because the rank does nothing itself


@dataclass(frozen=True)
class Parts:
    """The parts of a step, in seconds. They add up to the step.

    Attributes:
        compute_s: Computing, for as long as a single replica needs, with the script's own work between the passes.
        contention_s: The further computing time, beside other ranks.
        data_s: Waiting for data.
        idle_s: The GPU is idle, and the host isn't waiting for data.
        imbalance_s: Waiting for a rank that came later.
        exposed_s: Communication that no computing overlaps.
        engine_s: On CPUs, the wrapper's own work: dividing gradients, sending module buffers.
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
        """The time of the step."""
        return float(sum(getattr(self, field.name) for field in fields(self)))

    def share(self, *names: str) -> float:
        """The fraction of the step that some parts take, from 0 to 1; names without `_s`."""
        total = self.total_s
        return float(sum(getattr(self, f"{name}_s") for name in names)) / total if total else 0.0


@dataclass(frozen=True)
class Late:
    """The rank that held up the others.

    Attributes:
        rank: The rank that came last most often.
        share_of_steps: The fraction of steps in which it came last, from 0 to 1.
        phase: The phase in which it lost most against a typical rank.
        excess_s: How much longer than a typical rank it took to be ready, per step on average.
    """

    rank: int
    share_of_steps: float
    phase: str
    excess_s: float


@dataclass(frozen=True)
class Decomposition:
    """The average step of a run, in parts.

    Attributes:
        parts: The parts of the average step.
        late: The rank that held up the others; None with one rank.
        ready_s: By rank, the time in a step without waiting, on average: until it was ready.
        num_steps: The number of steps counted.
    """

    parts: Parts
    late: Late | None
    ready_s: tuple[float, ...]
    num_steps: int


Steps = Sequence[Sequence[dict[str, float]]]  # by rank, by step: seconds by phase


def decompose(steps: Steps, *, compute_alone_s: float | None = None) -> Decomposition:
    """Decompose the steps of a run, and average over them.

    Args:
        steps: By rank and step, seconds by phase, as `records.steps_in_parts` makes them. As many steps on every rank.
            With "exposed" if that is known; otherwise a rank's whole wait counts as exposed.
        compute_alone_s: The computing time of a single replica for as many samples; None if this is the run that
            others are compared with.
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
    # Clocks are read one after the other, so a part may be microseconds below zero: the next part absorbs them.
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
    """A time as text: "12.5 ms", "1.2 s"."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
