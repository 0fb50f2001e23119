"""What a rank of a measured run leaves behind, and its steps in parts. Pure.

[Note: a step in parts]

Marks are pairs of what happened and when, as in `ground/health/telemetry.py`, and a few more. At every instant a rank
is in one *phase*; a mark changes it. So the phases of a step add up to the step, whatever is missing or doubled.

    phase       from              to
    data        DATA              DATA_END: what it was before
    wait        COLLECTIVE        COLLECTIVE_END: what it was before. FSDP2's, in the middle of a pass
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
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
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

VERSION = 1
DATA, DATA_END, SYNC = -22, -21, -20
COLLECTIVE, COLLECTIVE_END = -24, -23

PHASES = ("data", "sync", "forward", "backward", "wait", "engine", "optimizer", "script")
_BEGINS = {
    DATA: "data",
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


@dataclass(frozen=True)
class Usage:
    """What the processor did while steps were counted.

    Attributes:
        wall_s: How long that was.
        process_s: Seconds of all threads of the rank.
        workers_s: Seconds of its loader's processes; None without psutil.
        cores: Busy share of every core of the host, 0 to 1; empty without psutil.
    """

    wall_s: float = 0.0
    process_s: float = 0.0
    workers_s: float | None = None
    cores: tuple[float, ...] = ()


@dataclass(frozen=True)
class Facts:
    """What doesn't change from step to step.

    Attributes:
        device: "cpu" or "cuda".
        wrapper: What averages the gradients: "evenstep", "torch" (its DistributedDataParallel), "fsdp", or "" if
            nothing was found.
        backend: Of the process group; "" without one.
        num_threads: Of the rank's operations on the CPU.
        num_cores: That the rank may use; all ranks of a host share them.
        num_workers: Of the loader that training reads from.
        has_loader: Whether a loader was seen at all.
        gradient_bytes: Of all gradients.
        num_tensors: Parameters that are trained.
        largest: Name and bytes of the largest of them.
        loss_dtype: Such as "float32"; "" where losses aren't recorded, or none was seen.
    """

    device: str = "cpu"
    wrapper: str = ""
    num_threads: int = 1
    num_cores: int = 1
    num_workers: int = 0
    has_loader: bool = True
    gradient_bytes: int = 0
    num_tensors: int = 0
    largest: tuple[str, int] = ("", 0)
    backend: str = ""
    loss_dtype: str = ""


@dataclass(frozen=True)
class RankRecord:
    """One rank's account of a run.

    Attributes:
        rank: Of how many: `world_size`.
        num_warmup: Steps that aren't counted.
        steps_ns: When each optimizer step ended, on the clock of `time.perf_counter_ns`: the first entry is the end of
            the first step.
        rows: Samples that the model was given, by step.
        marks: [what, when in ns, ...], in order of time.
        facts: See there.
        usage: See there.
        syncs: On a GPU: lines of the script that made the host wait for it, and how often in a step.
        device_busy_s: On a GPU: how long in a step it computed; None elsewhere.
        saved: Files that the script wanted to write and that were kept out of its way.
        batches: By step, samples of the newest batch of a loader: fewer than `rows` where a step takes several, or
            where a model is called twice with the same.
        blocks: Of FSDP2: (name, seconds in all-gathers, in reduce-scatters) of a step, on average; see `fsdp`.
        losses: By step, also of the warm-up, (losses times their weights, weights) of its backward passes, each summed.
            Plain passes add up, and weigh 1 together. Weights of 0: none was seen. Empty where nobody asked for them.
    """

    rank: int
    world_size: int
    num_warmup: int
    steps_ns: tuple[int, ...]
    rows: tuple[int, ...]
    marks: tuple[int, ...]
    facts: Facts = field(default_factory=Facts)
    usage: Usage = field(default_factory=Usage)
    syncs: tuple[tuple[str, float], ...] = ()
    device_busy_s: float | None = None
    saved: tuple[str, ...] = ()
    batches: tuple[int, ...] = ()
    blocks: tuple[tuple[str, float, float], ...] = ()
    losses: tuple[tuple[float, float], ...] = ()

    @property
    def num_steps(self) -> int:
        """Steps that are counted."""
        return max(0, len(self.steps_ns) - self.num_warmup)

    def counted_rows(self) -> tuple[int, ...]:
        """Samples by counted step."""
        return self.rows[self.num_warmup : len(self.steps_ns)]


def write_record(record: RankRecord, path: Path) -> None:
    """Leave it for the others; whole or not at all."""
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps({"version": VERSION, **asdict(record)}))
    draft.rename(path)


def read_record(path: Path) -> RankRecord:
    """What `write_record` wrote.

    Raises:
        UsageError: There is none, or it is of another version.
    """
    if not path.exists():
        raise UsageError(
            f"the run left no {path.name}: the script made no step with a torch optimizer. (One that starts processes "
            f"of its own is seen only where it trains itself: have `evenstep bench` start the ranks.)"
        )
    found: dict[str, Any] = json.loads(path.read_text())
    version = found.pop("version", None)
    if version != VERSION:
        raise UsageError(f"{path.name} is of version {version!r}, and {VERSION} is known. Measure again.")
    facts = found.pop("facts")
    usage = found.pop("usage")
    blocks = found.pop("blocks", [])
    losses = found.pop("losses", [])
    plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in found.items() if k != "syncs"}
    return RankRecord(
        **plain,
        blocks=tuple((name, gathering, scattering) for name, gathering, scattering in blocks),
        losses=tuple((total, weight) for total, weight in losses),
        syncs=tuple((line, count) for line, count in found["syncs"]),
        facts=Facts(**{**facts, "largest": tuple(facts["largest"])}),
        usage=Usage(**{**usage, "cores": tuple(usage["cores"])}),
    )


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
    phase, before_data, before_wait, since = "script", "script", "script", began_ns
    for what, when in zip(marks[::2], marks[1::2], strict=True):
        if what >= 0:
            continue
        if when > ended_ns:
            break
        if what == DATA_END:
            after = before_data
        elif what == DATA:
            before_data, after = phase if phase != "data" else before_data, "data"
        elif what == COLLECTIVE:
            before_wait, after = phase, "wait"
        elif what == COLLECTIVE_END:
            after = before_wait
        else:
            after = _BEGINS.get(what, phase)
        if when > since:
            found.append((phase, since, when))
            since = when
        phase = after
    if ended_ns > since:
        found.append((phase, since, ended_ns))
    return found


def steps_in_parts(record: RankRecord) -> list[dict[str, float]]:
    """Every counted step: seconds by phase, all of `PHASES`; they add up to the step."""
    if record.num_warmup == 0:
        raise ValueError("the first step has no beginning: at least one step of warm-up is needed")
    marks = list(zip(record.marks[::2], record.marks[1::2], strict=True))
    position = 0
    found = []
    for began, ended in pairwise(record.steps_ns[record.num_warmup - 1 :]):
        while position < len(marks) and marks[position][1] < began:
            position += 1
        stop = position
        while stop < len(marks) and marks[stop][1] <= ended:
            stop += 1
        parts = dict.fromkeys(PHASES, 0.0)
        for phase, since, until in spans([n for mark in marks[position:stop] for n in mark], began, ended):
            parts[phase] += (until - since) / 1e9
        found.append(parts)
    return found
