"""Computes efficiency, with its spread over rounds, from runs. Pure.

Efficiency is the throughput on N replicas over N times the throughput on one. With weak scaling, each replica has as
many samples as a single one. With strong scaling, the replicas share the batch of a single one. Numbers of replicas are
compared within a round ([Note: rounds] in plan.py). The median and quartiles are over rounds.
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
    """The median and quartiles of a figure over rounds."""

    median: float
    low: float  # the first quartile
    high: float  # the third quartile

    @classmethod
    def of(cls, values: Sequence[float], median: float | None = None) -> Spread:
        """The median and quartiles of values.

        Args:
            values: By round, the value of the figure.
            median: Another median to use, such as one of the two values in the middle of an even number.
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
        setting: The setting.
        records: By rank, its record.
        cores_elsewhere: The number of cores that other programs kept busy meanwhile; 0.0 if unknown.
    """

    setting: Setting
    records: tuple[RankRecord, ...]
    cores_elsewhere: float = 0.0

    @property
    def step_s(self) -> float:
        """The time of the average counted step, over steps and ranks."""
        return statistics.fmean(record.step_s for record in self.records)

    @property
    def rows_per_step(self) -> float:
        """The average samples of a step on all ranks together; without known samples, one for each rank."""
        return sum(record.rows_per_step for record in self.records) or float(len(self.records))

    @property
    def usual_batch(self) -> int:
        """The samples of most steps on all ranks together. The last batch of an epoch is often shorter."""
        return sum(record.most_often(record.rows) for record in self.records)

    @property
    def loader_batch(self) -> int:
        """The samples of most of the loader's batches on all ranks together."""
        return sum(record.most_often(record.batches) for record in self.records)

    @property
    def samples_per_s(self) -> float:
        """The throughput of all ranks."""
        return self.rows_per_step / self.step_s

    @property
    def is_seen_on_device(self) -> bool:
        """Whether the parts of a step can be measured on the GPUs.

        Ranks that exchange through the host have no kernels for it, so the exchange would look like an idle GPU.
        """
        is_profiled = all(record.facts.device == "cuda" and record.profile for record in self.records)
        return is_profiled and (
            len(self.records) == 1 or all(each.profile and each.profile.collectives for each in self.records)
        )

    def steps(self, *, on_device: bool = True) -> Steps:
        """By rank and step, seconds by phase. Those of GPUs are profiled, and scaled to the step time without profiler.

        Args:
            on_device: Whether to use the GPUs' phases if they are known; False: those of the host.
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
        """The parts of the average step."""
        return decompose(self.steps(on_device=on_device), compute_alone_s=compute_alone_s)


@dataclass(frozen=True)
class Point:
    """The results of one setting of a curve, over all rounds.

    Attributes:
        setting: The setting.
        rows_per_replica: The samples of most steps on one replica.
        step_s: The time of the average step.
        samples_per_s: The throughput of all replicas.
        speedup: The throughput over that on the fewest replicas.
        efficiency: The speed-up, divided by the factor by which there are more replicas.
        decomposition: The parts of the step of `run`.
        run: The run with the median step time.
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
    """The run with the median step time; of the two in the middle, the faster one."""
    return sorted(runs, key=lambda run: run.step_s)[(len(runs) - 1) // 2]


def curve(settings: Sequence[Setting], rounds: Sequence[Mapping[Setting, Run]]) -> list[Point]:
    """The points of a curve, in order.

    Args:
        settings: The settings of the curve; the others are compared with the first.
        rounds: By round, the run of each setting.
    """
    base = settings[0]
    alone = median_run([each[base] for each in rounds])
    # Use GPU times only if all runs have them: the GPU times of one run can't be compared with another's host times.
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
                # The median is that of the decomposed run, so that its parts add up to the step shown.
                Spread.of([each.step_s for each in runs], run.step_s),
                Spread.of([each.samples_per_s for each in runs], run.samples_per_s),
                Spread.of(speedups),
                Spread.of([speedup / times for speedup in speedups]),
                run.decompose(compute_alone_s=alone_s, on_device=on_device),
                run,
            )
        )
    return points
