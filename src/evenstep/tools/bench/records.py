"""The record that a rank of a measured run writes, and its steps in parts. Pure.

[Note: a step in parts]

Marks are pairs (event, time) as in `ground/health/telemetry.py`, with a few more events. At every instant a rank is in
one *phase*, which a mark changes. So the phases of a step add up to the step, even if marks are missing or doubled.

    phase       from              to
    data        DATA              DATA_END: back to the phase before
    wait        COLLECTIVE        COLLECTIVE_END: back to the phase before. Called by the script, or by FSDP2 in a pass
    sync        SYNC              the wrapper's own work before the module runs: module buffers are sent
    forward     FORWARD           FORWARD_END
    backward    BACKWARD          WAITING: the gradients of this rank are computed, and their exchange is launched
    wait        WAITING           REDUCED: the gradients are averaged
    engine      REDUCED           END, or the end of the backward pass
    optimizer   OPTIMIZER         OPTIMIZER_END
    script      everything else: the loss, metrics, `.item()`, logging, zero_grad

A step lasts from the end of one optimizer step to the end of the next.
"""

from __future__ import annotations

import json
from bisect import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from evenstep.errors import UsageError
from evenstep.ground.health.telemetry import (
    BACKWARD,
    END,
    FORWARD,
    FORWARD_END,
    OPTIMIZER,
    OPTIMIZER_END,
    REDUCED,
    WAITING,
)
from evenstep.tools.bench.profile import Profile

DATA, DATA_END, SYNC = -22, -21, -20
COLLECTIVE, COLLECTIVE_END = -24, -23
_STEP_END = -19

PHASES = ("data", "sync", "forward", "backward", "wait", "engine", "optimizer", "script")
_BEGINS = {
    SYNC: "sync",
    FORWARD: "forward",
    FORWARD_END: "script",
    BACKWARD: "backward",
    WAITING: "wait",
    REDUCED: "engine",
    END: "script",
    OPTIMIZER: "optimizer",
    OPTIMIZER_END: "script",
}
_INTERRUPTS = {DATA: "data", COLLECTIVE: "wait"}


@dataclass(frozen=True)
class Facts:
    """Facts that don't change from step to step.

    Attributes:
        device: "cpu" or "cuda".
        wrapper: The wrapper that averages gradients: "evenstep", "torch" (its DistributedDataParallel), "fsdp", or ""
            if none was found.
        backend: The backend of the process group; "" without a group.
        num_threads: The number of threads of the rank's operations on the CPU.
        num_cores: The number of cores that the rank may use. All ranks of a host share them.
        num_workers: The number of workers of the loader.
        has_loader: Whether a loader was seen.
        keeps_workers: Whether the loader's workers live on from one epoch to the next.
        starting_s: The wait of the average counted step for first batches of epochs; part of its waits for data.
    """

    device: str = "cpu"
    wrapper: str = ""
    num_threads: int = 1
    num_cores: int = 1
    num_workers: int = 0
    has_loader: bool = True
    backend: str = ""
    keeps_workers: bool = False
    starting_s: float = 0.0


@dataclass(frozen=True)
class RankRecord:
    """The measurements of one rank of a run.

    Attributes:
        rank: The rank.
        world_size: The number of ranks.
        num_warmup: The number of first steps that aren't counted.
        steps_ns: The time when each optimizer step ended, on the clock of `time.perf_counter_ns`.
        rows: By step, the samples that the model was called with.
        marks: [event, time in ns, ...], in order of time.
        facts: Facts that don't change from step to step.
        saved: The paths of files that the script wanted to write, and that were redirected.
        batches: By step, the samples of the loader's newest batch: fewer than `rows` if a step takes several batches,
            or if the model is called twice with the same batch.
        losses: By step, also of the warm-up, (sum of losses times their weights, sum of weights) of the backward
            passes. Losses of plain passes are added up, with the weight 1 together. The weight is 0 if no loss was
            seen. Empty if losses weren't requested.
        profile: The profile of a few steps after the counted ones; None if there was no profiler.
    """

    rank: int
    world_size: int
    num_warmup: int
    steps_ns: tuple[int, ...]
    rows: tuple[int, ...]
    marks: tuple[int, ...]
    facts: Facts = field(default_factory=Facts)
    saved: tuple[str, ...] = ()
    batches: tuple[int, ...] = ()
    losses: tuple[tuple[float, float], ...] = ()
    profile: Profile | None = None

    @property
    def num_steps(self) -> int:
        """The number of counted steps."""
        return max(0, len(self.steps_ns) - self.num_warmup)

    @property
    def step_s(self) -> float:
        """The time of the average counted step."""
        return (self.steps_ns[-1] - self.steps_ns[self.num_warmup - 1]) / self.num_steps / 1e9

    @property
    def rows_per_step(self) -> float:
        """The average number of samples of a counted step."""
        return sum(self.rows[self.num_warmup :]) / self.num_steps

    def most_often(self, counts: Sequence[int]) -> int:
        """The most frequent number of samples in counted steps, from `rows` or `batches`; 0 without counted steps."""
        usual = Counter(counts[self.num_warmup :]).most_common(1)
        return usual[0][0] if usual else 0


def write_record(record: RankRecord, path: Path) -> None:
    """Write a record to a file, atomically."""
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(asdict(record)))
    draft.rename(path)


def read_record(path: Path) -> RankRecord:
    """Read a record that `write_record` wrote.

    Raises:
        UsageError: There is no record.
    """
    if not path.exists():
        raise UsageError(
            f"the run left no {path.name}: the script made no step with a torch optimizer. (In a script that starts "
            f"processes, only the first process is measured: let `evenstep bench` start the ranks.)"
        )
    found = json.loads(path.read_text(), object_hook=lambda each: {key: _tuples(value) for key, value in each.items()})
    profile = found["profile"] and Profile(**found["profile"])
    return RankRecord(**{**found, "facts": Facts(**found["facts"]), "profile": profile})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def sorted_marks(marks: Sequence[int]) -> list[int]:
    """Marks in order of time. Marks with equal times keep their order."""
    pairs = sorted(zip(marks[::2], marks[1::2], strict=True), key=lambda pair: pair[1])
    return [number for pair in pairs for number in pair]


def spans(marks: Sequence[int], began_ns: int, ended_ns: int) -> list[tuple[str, int, int]]:
    """(phase, from, to) for each phase of an interval, one after the other without gaps.

    Args:
        marks: The marks in order of time. Those before the interval decide the phase in which it begins.
        began_ns: The begin of the interval.
        ended_ns: The end of the interval.
    """
    found: list[tuple[str, int, int]] = []
    phase, since, interrupted = "script", began_ns, dict.fromkeys(_INTERRUPTS.values(), "script")
    for what, when in zip(marks[::2], marks[1::2], strict=True):
        if what >= 0:  # a bucket is complete
            continue
        if when > ended_ns:
            break
        if what in _INTERRUPTS:
            after = _INTERRUPTS[what]
            interrupted[after] = phase if phase != after else interrupted[after]
        elif what in (DATA_END, COLLECTIVE_END):
            after = interrupted["data" if what == DATA_END else "wait"]
        else:
            after = _BEGINS.get(what, phase)
        if when > since:
            found.append((phase, since, when))
            since = when
        phase = after
    return [*found, (phase, since, ended_ns)] if ended_ns > since else found


def steps_in_parts(record: RankRecord) -> list[dict[str, float]]:
    """For every counted step, seconds by phase, for all `PHASES`. They add up to the step."""
    if record.num_warmup == 0:
        raise ValueError("the first step has no beginning: at least one step of warm-up is needed")
    ends = record.steps_ns[record.num_warmup - 1 :]
    found = [dict.fromkeys(PHASES, 0.0) for _ in ends[1:]]
    # `_STEP_END` begins no phase, but cuts the phase in which a step ends into two spans.
    marks = sorted_marks([*record.marks, *(number for end in ends for number in (_STEP_END, end))])
    for phase, since, until in spans(marks, ends[0], ends[-1]):
        found[bisect(ends, since) - 1][phase] += (until - since) / 1e9
    return found
