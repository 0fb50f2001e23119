"""Runs in, efficiency with its spread out. Pure.

Efficiency is the throughput on N replicas over N times the throughput on one: on a curve of weak scaling each replica
has as many samples as alone, on a curve of strong scaling they share what one had. Replicas are compared within a
round, [Note: rounds] in plan.py; median and quartiles are over rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evenstep.tools.bench.decompose import Decomposition, Steps, decompose
from evenstep.tools.bench.plan import Setting
from evenstep.tools.bench.profile import device_steps
from evenstep.tools.bench.records import RankRecord, steps_in_parts


@dataclass(frozen=True)
class Spread:
    """A figure's median and quartiles over rounds."""

    median: float
    low: float  # a quarter of the rounds lies below
    high: float  # and a quarter above

    @classmethod
    def of(cls, values: Sequence[float], median: float | None = None) -> Spread:
        """Median and quartiles.

        Args:
            values: By round.
            median: One of the two values in the middle, where their number is even.
        """
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
        median = middle if median is None else median
        return cls(median, min(low, median), max(high, median))


@dataclass(frozen=True)
class Run:
    """One run of one setting.

    Attributes:
        setting: Which.
        records: Its ranks', in order.
        cores_elsewhere: Cores of the host that other programs kept busy meanwhile; 0.0 where that isn't known.
    """

    setting: Setting
    records: tuple[RankRecord, ...]
    cores_elsewhere: float = 0.0

    @property
    def step_s(self) -> float:
        """The average counted step, over steps and ranks."""
        return statistics.fmean(record.step_s for record in self.records)

    @property
    def rows_per_step(self) -> float:
        """Samples of a step on all ranks together, on average; a step of each, if none were seen."""
        return sum(record.rows_per_step for record in self.records) or float(len(self.records))

    @property
    def usual_batch(self) -> int:
        """Samples of most steps on all ranks together: the last batch of an epoch is often shorter."""
        return sum(record.most_often(record.rows) for record in self.records)

    @property
    def loader_batch(self) -> int:
        """Samples of most batches of the loader on all ranks together: a batch size that a loader can deliver."""
        return sum(record.most_often(record.batches) for record in self.records)

    @property
    def samples_per_s(self) -> float:
        """Throughput of all ranks."""
        return self.rows_per_step / self.step_s

    @property
    def is_seen_on_device(self) -> bool:
        """Whether the parts of a step are those of GPUs. Ranks that exchange through the host have no kernels for it,
        which can't be told from a GPU with nothing to do."""
        is_profiled = all(record.facts.device == "cuda" and record.profile for record in self.records)
        return is_profiled and (
            len(self.records) == 1 or all(each.profile and each.profile.collectives for each in self.records)
        )

    def steps(self, *, on_device: bool = True) -> Steps:
        """By rank, by step: seconds by phase. Of GPUs, shares of the profiled steps, of the time that a step took.

        Args:
            on_device: Else those of the host, as they are where GPUs weren't seen.
        """
        hosts = [steps_in_parts(record) for record in self.records]
        if not (on_device and self.is_seen_on_device):
            return hosts
        found = device_steps([record.profile for record in self.records if record.profile])
        for record, its_steps, host in zip(self.records, found, hosts, strict=True):
            pace = record.step_s * len(its_steps) / sum(sum(step.values()) for step in its_steps)
            data_s = statistics.fmean(step["data"] for step in host)
            for step in its_steps:
                step.update({phase: seconds * pace for phase, seconds in step.items()})
                step["data"] = min(data_s, step["idle"])
                step["idle"] -= step["data"]
        return found

    def decompose(self, *, compute_alone_s: float | None = None, on_device: bool = True) -> Decomposition:
        """The average step in parts."""
        return decompose(self.steps(on_device=on_device), compute_alone_s=compute_alone_s)


@dataclass(frozen=True)
class Point:
    """One setting of a curve, over all rounds.

    Attributes:
        setting: Which.
        rows_per_replica: Samples of most steps on one replica.
        step_s: How long the average step takes.
        samples_per_s: Throughput of all replicas.
        speedup: Over the fewest replicas.
        efficiency: Speed-up by how many times more replicas.
        decomposition: The parts of `run`'s step.
        run: The run that is the median by its step.
    """

    setting: Setting
    rows_per_replica: float
    step_s: Spread
    samples_per_s: Spread
    speedup: Spread
    efficiency: Spread
    decomposition: Decomposition
    run: Run


def median_run(runs: Sequence[Run]) -> Run:
    """The one whose step is in the middle; the shorter of two."""
    return sorted(runs, key=lambda run: run.step_s)[(len(runs) - 1) // 2]


def curve(settings: Sequence[Setting], rounds: Sequence[Mapping[Setting, Run]]) -> list[Point]:
    """A curve's points, in order.

    Args:
        settings: The points of the curve; the first is what the others are compared with.
        rounds: What was measured, each setting once per round.
    """
    base = settings[0]
    alone = median_run([each[base] for each in rounds])
    # One rank is always seen on its GPU: its kernels aren't what others compute as their hosts see it.
    on_device = all(each[setting].is_seen_on_device for each in rounds for setting in settings)
    compute_per_row_s = alone.decompose(on_device=on_device).parts.compute_s / max(
        alone.rows_per_step / base.num_replicas, 1e-12
    )
    points = []
    for setting in settings:
        runs = [each[setting] for each in rounds]
        speedups = [each[setting].samples_per_s / each[base].samples_per_s for each in rounds]
        times = setting.num_replicas / base.num_replicas
        run = median_run(runs)
        alone_s = None if setting == base else compute_per_row_s * run.rows_per_step / setting.num_replicas
        points.append(
            Point(
                setting,
                run.usual_batch / setting.num_replicas,
                # Those of the run that is taken apart: its parts are to add up to the step that is told.
                Spread.of([each.step_s for each in runs], run.step_s),
                Spread.of([each.samples_per_s for each in runs], run.samples_per_s),
                Spread.of(speedups),
                Spread.of([speedup / times for speedup in speedups]),
                run.decompose(compute_alone_s=alone_s, on_device=on_device),
                run,
            )
        )
    return points
