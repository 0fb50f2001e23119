"""What a rank of a measured run leaves behind, and its steps in parts. Pure.

[Note: a step in parts]

Marks are pairs of what happened and when, as in `ground/health/telemetry.py`, and a few more. At every instant a rank
is in one *phase*; a mark changes it. So the phases of a step add up to the step, whatever is missing or doubled.

    phase       from              to
    data        DATA              DATA_END: what it was before
    wait        COLLECTIVE        COLLECTIVE_END: what it was before. One that the script calls, or FSDP2 in a pass
    sync        SYNC              the wrapper's own work before the module runs: module buffers are sent
    forward     FORWARD           FORWARD_END
    backward    BACKWARD          WAITING: the gradients of this rank are there, and on their way
    wait        WAITING           REDUCED: they are the mean
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
    """What doesn't change from step to step.

    Attributes:
        device: "cpu" or "cuda".
        wrapper: What averages the gradients: "evenstep", "torch" (its DistributedDataParallel), "fsdp", or "" if
            nothing was found.
        backend: The process group's; "" without one.
        num_threads: How many the rank's operations have on the CPU.
        num_cores: That the rank may use; all ranks of a host share them.
        num_workers: How many the loader has that training reads from.
        has_loader: Whether a loader was seen at all.
        keeps_workers: Whether its workers live on from one epoch to the next.
        starting_s: How long the average counted step waits for the first batch of an epoch; part of its waits for data.
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
    """One rank's account of a run.

    Attributes:
        rank: This one, among `world_size`.
        num_warmup: Steps that aren't counted.
        steps_ns: When each optimizer step ended, on the clock of `time.perf_counter_ns`: the first entry is the end of
            the first step.
        rows: Samples that the model was given, by step.
        marks: [what, when in ns, ...], in order of time.
        facts: See there.
        saved: Files that the script wanted to write and that were kept out of its way.
        batches: By step, samples of the newest batch of a loader: fewer than `rows` where a step takes several, or
            where a model is called twice with the same.
        losses: By step, also of the warm-up, (losses times their weights, weights) of its backward passes, each summed.
            Plain passes add up, and weigh 1 together. Weights of 0: none was seen. Empty where nobody asked for them.
        profile: What torch's profiler saw in a few steps after those that count; None: it didn't run.
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
        """Steps that are counted."""
        return max(0, len(self.steps_ns) - self.num_warmup)

    @property
    def step_s(self) -> float:
        """The average counted step."""
        return (self.steps_ns[-1] - self.steps_ns[self.num_warmup - 1]) / self.num_steps / 1e9

    @property
    def rows_per_step(self) -> float:
        """Samples of a counted step, on average."""
        return sum(self.rows[self.num_warmup :]) / self.num_steps

    def most_often(self, counts: Sequence[int]) -> int:
        """The number of samples that most counted steps have, by `rows` or `batches`; 0 without a counted step."""
        usual = Counter(counts[self.num_warmup :]).most_common(1)
        return usual[0][0] if usual else 0


def write_record(record: RankRecord, path: Path) -> None:
    """Leave it for the others; whole or not at all."""
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(asdict(record)))
    draft.rename(path)


def read_record(path: Path) -> RankRecord:
    """What `write_record` wrote.

    Raises:
        UsageError: There is none.
    """
    if not path.exists():
        raise UsageError(
            f"the run left no {path.name}: the script made no step with a torch optimizer. (One that starts processes "
            f"of its own is seen only where it trains itself: have `evenstep bench` start the ranks.)"
        )
    found = json.loads(path.read_text(), object_hook=lambda each: {key: _tuples(value) for key, value in each.items()})
    profile = found["profile"] and Profile(**found["profile"])
    return RankRecord(**{**found, "facts": Facts(**found["facts"]), "profile": profile})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def sorted_marks(marks: Sequence[int]) -> list[int]:
    """In order of time; what happened at the same instant stays in its order."""
    pairs = sorted(zip(marks[::2], marks[1::2], strict=True), key=lambda pair: pair[1])
    return [number for pair in pairs for number in pair]


def spans(marks: Sequence[int], began_ns: int, ended_ns: int) -> list[tuple[str, int, int]]:
    """The phases of a stretch of time, one after the other without a gap: (phase, from, to).

    Args:
        marks: In order of time; those outside the stretch are passed over, except that the ones before say in which
            phase it begins.
        began_ns: Where the stretch begins.
        ended_ns: And ends.
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
    """Every counted step: seconds by phase, all of `PHASES`; they add up to the step."""
    if record.num_warmup == 0:
        raise ValueError("the first step has no beginning: at least one step of warm-up is needed")
    ends = record.steps_ns[record.num_warmup - 1 :]
    found = [dict.fromkeys(PHASES, 0.0) for _ in ends[1:]]
    # A mark that begins no phase cuts the one in which a step ends.
    marks = sorted_marks([*record.marks, *(number for end in ends for number in (_STEP_END, end))])
    for phase, since, until in spans(marks, ends[0], ends[-1]):
        found[bisect(ends, since) - 1][phase] += (until - since) / 1e9
    return found
