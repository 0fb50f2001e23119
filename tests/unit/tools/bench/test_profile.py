"""Traces of ranks on GPUs, as torch's profiler writes them: who communicates, who waits, and who has nothing to do."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evenstep.tools.bench.plan import Setting
from evenstep.tools.bench.profile import NUM_STEPS, WINDOW, Profile, device_steps, read_trace
from evenstep.tools.bench.records import Facts, RankRecord
from evenstep.tools.bench.scaling import Run
from tests.bench_runs import CALM, make_run

FORWARD, BACKWARD, TRANSFER, OPTIMIZER = 10.0, 20.0, 6.0, 4.0  # milliseconds
HIDDEN = 4.0  # of the first of two all-reduces, behind the rest of the backward pass
STEP = FORWARD + BACKWARD + TRANSFER + OPTIMIZER


class Trace:
    """The trace of one rank, whose clock begins anywhere."""

    def __init__(self, began_ms: float) -> None:
        self.events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "args": {"name": "python"}}]
        self.began = began_ms

    def add(self, category: str, name: str, since: float, until: float, **args: Any) -> None:
        times = {"ts": (self.began + since) * 1e3, "dur": (until - since) * 1e3}
        self.events.append({"ph": "X", "cat": category, "name": name, "args": args, **times})

    def nccl(self, since: float, until: float, group: str = "0", kind: str = "allreduce") -> None:
        args = {"Process Group Name": group, "Collective name": kind}
        self.add("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage)", since, until, **args)

    def profile(self, path: Path) -> Profile:
        random.Random(1).shuffle(self.events)
        with gzip.open(path, "wt") as file:
            json.dump({"traceEvents": self.events}, file)
        return read_trace(path)


def traces(tmp_path: Path, late: list[float], begins: list[float]) -> list[Profile]:
    """Ranks that all compute alike, and whose hosts are late by so much before each backward pass.

    Two all-reduces a step: one begins in the backward pass, on a stream of its own, and one after it.
    """
    made = [Trace(began) for began in begins]
    now = 0.0
    for _ in range(NUM_STEPS):
        ready = [now + FORWARD + each + BACKWARD for each in late]
        last = max(ready)
        for trace, its_ready in zip(made, ready, strict=True):
            trace.add("kernel", "gemm", now, now + FORWARD)
            trace.add("gpu_memcpy", "Memcpy HtoD", now + 1, now + FORWARD - 1)
            trace.add("kernel", "gemm", its_ready - BACKWARD, its_ready)
            trace.nccl(its_ready - HIDDEN, last)
            trace.nccl(its_ready, last + TRANSFER)
            trace.add("kernel", "adamw", last + TRANSFER, last + TRANSFER + OPTIMIZER)
            trace.add("cpu_op", "aten::mm", now, now + 1)
            trace.add("gpu_user_annotation", WINDOW, now, now + 1)  # the device's view of the range
        now = last + TRANSFER + OPTIMIZER
    for trace in made:
        trace.add("user_annotation", WINDOW, 0, now)
    return [trace.profile(tmp_path / f"trace-{rank}.json.gz") for rank, trace in enumerate(made)]


def parts(profiles: list[Profile]) -> list[dict[str, float]]:
    """The average step of each rank, in milliseconds."""
    by_rank = device_steps(profiles)
    return [{name: 1e3 * sum(step[name] for step in each) / len(each) for name in each[0]} for each in by_rank]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_communication_that_computing_hides_is_not_exposed(size: int, tmp_path: Path) -> None:
    found = parts(traces(tmp_path, [0.0] * size, [100.0 + 17 * rank for rank in range(size)]))
    for each in found:
        assert each == pytest.approx(
            {"compute": FORWARD + BACKWARD + OPTIMIZER, "exposed": TRANSFER, "wait": 0.0, "idle": 0.0}, abs=1e-6
        )


@pytest.mark.parametrize("late", [[0.0, 20.0], [20.0, 0.0], [0.0, 0.0, 20.0, 0.0]])
def test_a_late_rank_is_waited_for_and_communication_is_as_before(late: list[float], tmp_path: Path) -> None:
    """Whatever the ranks' clocks say; the late one's GPU has nothing to do while its host sleeps."""
    profiles = traces(tmp_path, late, [1e6 * rank for rank in range(len(late))])
    for its, each in zip(late, parts(profiles), strict=True):
        # Of the one that is hidden a rank that waits hides nothing: it has nothing left to compute.
        assert each["exposed"] == pytest.approx(TRANSFER if its else TRANSFER + HIDDEN, abs=1e-6)
        assert each["wait"] == pytest.approx(0 if its else 20.0 - HIDDEN, abs=1e-6)
        assert each["idle"] == pytest.approx(its, abs=1e-6)
        assert sum(each.values()) == pytest.approx(STEP + 20.0, abs=1e-6)
    run = run_of(profiles, step_ms=STEP + 20.0).decompose()
    assert run.parts.exposed_s == pytest.approx(TRANSFER / 1e3, rel=1e-3)
    assert run.parts.imbalance_s == pytest.approx(0.020, rel=1e-3)
    assert run.late is not None
    assert (run.late.rank, run.late.phase) == (late.index(20.0), "idle")


def run_of(profiles: list[Profile], *, data_ms: float = 0.5, step_ms: float | None = None) -> Run:
    """A run on GPUs whose host waits for data, and whose steps take so long without the profiler."""
    run = make_run(Setting(len(profiles), 32), lambda r, s: {**CALM, "data": data_ms}, noise=0)
    factor = 1.0 if step_ms is None else step_ms / (1e3 * run.step_s)

    def on_gpu(record: RankRecord, profile: Profile) -> RankRecord:
        return replace(
            record,
            facts=Facts(device="cuda", wrapper="evenstep", backend="nccl"),
            profile=profile,
            steps_ns=tuple(round(each * factor) for each in record.steps_ns),
            marks=tuple(round(each * factor) if number % 2 else each for number, each in enumerate(record.marks)),
        )

    return Run(run.setting, tuple(map(on_gpu, run.records, profiles)))


def test_collectives_of_several_groups_are_matched_by_their_own_numbers(tmp_path: Path) -> None:
    """Two groups whose order differs between ranks, and one that only rank 0 has."""
    first, second = Trace(0.0), Trace(1e4)
    for step in range(NUM_STEPS):
        at = 100.0 * step
        first.nccl(at + 10, at + 20, "a")
        first.nccl(at + 30, at + 70, "b")
        first.nccl(at + 80, at + 85, "c")
        second.nccl(at + 30, at + 32, "b")
        second.nccl(at + 40, at + 90, "a")
        second.nccl(at + 92, at + 93, "a", "broadcast")
    for trace in (first, second):
        trace.add("user_annotation", WINDOW, 0, 100 * NUM_STEPS)
    one, two = parts([trace.profile(tmp_path / "trace.json.gz") for trace in (first, second)])
    assert one == pytest.approx({"compute": 0, "exposed": 10 + 2 + 5, "wait": 38, "idle": 45}, abs=1e-6)
    assert two == pytest.approx({"compute": 0, "exposed": 10 + 2 + 1, "wait": 40, "idle": 47}, abs=1e-6)


def test_any_trace_gives_parts_that_add_up(tmp_path: Path, fresh_seed: int) -> None:
    draw = random.Random(fresh_seed)
    for _ in range(40):
        made = [Trace(draw.uniform(0, 1e6)) for _ in range(draw.choice([1, 2, 3]))]
        for trace in made:
            trace.add("user_annotation", WINDOW, 0, 1000)
            for _ in range(draw.randrange(30)):
                since = draw.uniform(0, 990)
                add = trace.nccl if draw.random() < 0.4 else lambda a, b, t=trace: t.add("kernel", "mm", a, b)
                add(since, draw.uniform(since, 1000))
        for steps in device_steps([trace.profile(tmp_path / "trace.json.gz") for trace in made]):
            for step in steps:
                assert min(step.values()) >= -1e-9
