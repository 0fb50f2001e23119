"""Runs in, efficiency with its spread out. Pure.

Efficiency is the throughput on N replicas over N times the throughput on one: on a curve of weak scaling each replica
has as many samples as alone, on a curve of strong scaling they share what one had. Replicas are compared within a
round, [Note: rounds] in plan.py; median and quartiles are over rounds.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evenstep.tools.bench.measure.decompose import Decomposition, decompose
from evenstep.tools.bench.measure.plan import Setting
from evenstep.tools.bench.measure.records import RankRecord, steps_in_parts


@dataclass(frozen=True)
class Spread:
    """Of a figure over rounds."""

    median: float
    low: float  # a quarter of the rounds lies below
    high: float  # and a quarter above

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Median and quartiles."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def at(self, value: float) -> Spread:
        """The same around one of two values in the middle, where their number is even."""
        return Spread(value, min(self.low, value), max(self.high, value))


@dataclass(frozen=True)
class Run:
    """One run of one setting: the records of its ranks, in order."""

    setting: Setting
    records: tuple[RankRecord, ...]

    @property
    def step_s(self) -> float:
        """The average counted step, over steps and ranks."""
        lengths = [
            (record.steps_ns[-1] - record.steps_ns[record.num_warmup - 1]) / record.num_steps / 1e9
            for record in self.records
        ]
        return statistics.fmean(lengths)

    @property
    def rows_per_step(self) -> float:
        """Samples of a step on all ranks together, on average; a step of each, if none were seen."""
        rows = sum(sum(record.counted_rows()) / record.num_steps for record in self.records)
        return rows or float(len(self.records))

    @property
    def usual_batch(self) -> int:
        """Samples of most steps on all ranks together: the last batch of an epoch is often shorter."""
        return sum(Counter(record.counted_rows()).most_common(1)[0][0] for record in self.records)

    @property
    def loader_batch(self) -> int:
        """Samples of most batches of the loader on all ranks together: a batch size that a loader can deliver."""
        batches = [record.batches[record.num_warmup : len(record.steps_ns)] for record in self.records]
        return sum(Counter(each).most_common(1)[0][0] for each in batches if each)

    @property
    def samples_per_s(self) -> float:
        """Throughput of all ranks."""
        return self.rows_per_step / self.step_s

    def decompose(self, *, compute_alone_s: float | None = None) -> Decomposition:
        """The average step in parts."""
        return decompose([steps_in_parts(record) for record in self.records], compute_alone_s=compute_alone_s)

    def blocks(self) -> list[tuple[str, float, float]]:
        """Of FSDP2's blocks (name, all-gathers, reduce-scatters): seconds of a step that the rank waits which waits
        least. Others wait longer, for ranks that come late."""
        by_rank = [{name: times for name, *times in record.blocks} for record in self.records]
        names = [name for name, *_ in self.records[0].blocks if all(name in each for each in by_rank)]
        return [
            (name, min(each[name][0] for each in by_rank), min(each[name][1] for each in by_rank)) for name in names
        ]

    def compute_s(self) -> float:
        """What a typical rank computes in a step."""
        parts = self.decompose().parts
        return parts.compute_s + parts.contention_s


@dataclass(frozen=True)
class Point:
    """One setting of a curve, over all rounds.

    Attributes:
        setting: Which.
        rows_per_replica: Samples of most steps on one replica.
        step_s: Of the average step.
        samples_per_s: Throughput of all replicas.
        speedup: Over the fewest replicas.
        efficiency: Speed-up by how many times more replicas.
        decomposition: Of the run that is the median by its step.
        run: That run.
    """

    setting: Setting
    rows_per_replica: float
    step_s: Spread
    samples_per_s: Spread
    speedup: Spread
    efficiency: Spread
    decomposition: Decomposition
    run: Run

    @property
    def num_replicas(self) -> int:
        """Ranks."""
        return self.setting.num_replicas


def median_run(runs: Sequence[Run]) -> Run:
    """The one whose step is in the middle; the shorter of two."""
    return sorted(runs, key=lambda run: run.step_s)[(len(runs) - 1) // 2]


def curve(settings: Sequence[Setting], rounds: Sequence[Mapping[Setting, Run]]) -> list[Point]:
    """A curve's points, in order.

    Args:
        settings: Of the curve; the first is what the others are compared with.
        rounds: What was measured, each setting once per round.
    """
    base = settings[0]
    alone = median_run([each[base] for each in rounds])
    compute_per_row_s = alone.compute_s() / max(alone.rows_per_step / base.num_replicas, 1e-12)
    points = []
    for setting in settings:
        runs = [each[setting] for each in rounds]
        speedups = [each[setting].samples_per_s / each[base].samples_per_s for each in rounds]
        times = setting.num_replicas / base.num_replicas
        run = median_run(runs)
        rows = run.rows_per_step / setting.num_replicas
        alone_s = None if setting == base else compute_per_row_s * rows
        points.append(
            Point(
                setting,
                run.usual_batch / setting.num_replicas,
                # Those of the run that is taken apart: its parts are to add up to the step that is told.
                Spread.of([each.step_s for each in runs]).at(run.step_s),
                Spread.of([each.samples_per_s for each in runs]).at(run.samples_per_s),
                Spread.of(speedups),
                Spread.of([speedup / times for speedup in speedups]),
                run.decompose(compute_alone_s=alone_s),
                run,
            )
        )
    return points


def utilisation(run: Run) -> list[float]:
    """By rank: cores kept busy, 1.0 is one core; with its loader's processes where they are known."""
    return [
        (record.usage.process_s + (record.usage.workers_s or 0.0)) / record.usage.wall_s if record.usage.wall_s else 0.0
        for record in run.records
    ]


def cores_elsewhere(run: Run) -> float:
    """Cores of the host that other programs kept busy; 0.0 where that isn't known."""
    return max(0.0, sum(busy_cores(run)) - sum(utilisation(run))) if busy_cores(run) else 0.0


def busy_cores(run: Run) -> tuple[float, ...]:
    """Busy share of every core of the host while rank 0 counted steps; empty without psutil."""
    return run.records[0].usage.cores
