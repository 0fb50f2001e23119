"""Runs of `evenstep bench` that never ran: records of ranks whose phases are given, and who wait for each other."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
from evenstep.tools.bench.plan import Setting
from evenstep.tools.bench.records import DATA, DATA_END, SYNC, Facts, RankRecord
from evenstep.tools.bench.runs import Measured, Wish, remarks
from evenstep.tools.bench.scaling import Run

WARMUP = 2
MS = 1_000_000
CALM = {"data": 0.5, "forward": 30.0, "script": 1.0, "backward": 60.0, "engine": 0.2, "optimizer": 3.0}
FACTS = Facts(wrapper="evenstep", num_cores=8)
Phases = Mapping[str, float]  # milliseconds


def make_run(
    setting: Setting,
    phases: Callable[[int, int], Phases],
    *,
    rows: int = 32,
    exchange_ms: float = 0.0,
    num_steps: int = 20,
    facts: Facts | None = None,
    seed: int = 0,
    noise: float = 0.02,
) -> Run:
    """A run in which rank r's phases of step s take `phases(r, s)` milliseconds.

    A rank that is ready waits for the last one, and then `exchange_ms` for the gradients.
    """
    draw = random.Random(seed)
    size = setting.num_replicas
    marks: list[list[int]] = [[] for _ in range(size)]
    ends: list[list[int]] = [[] for _ in range(size)]
    now = [5 * MS] * size
    for step in range(WARMUP + num_steps):
        spent = [{k: v * draw.uniform(1 - noise, 1 + noise) for k, v in phases(r, step).items()} for r in range(size)]
        for rank in range(size):

            def goes_on(name: str, rank: int = rank, spent: list[dict[str, float]] = spent) -> int:
                now[rank] += round(spent[rank].get(name, 0.0) * MS)
                return now[rank]

            its = marks[rank]
            its += (DATA, now[rank], DATA_END, goes_on("data"), SYNC, now[rank], FORWARD, goes_on("sync"))
            its += (FORWARD_END, goes_on("forward"))
            its += (BACKWARD, goes_on("script"))
            begun = now[rank]
            ended = goes_on("backward")
            its += (0, (begun + ended) // 2, 1, ended) if size > 1 else ()
            its += (WAITING, ended)
        arrived = max(now) + round(exchange_ms * MS)
        for rank in range(size):
            if size > 1:
                now[rank] = arrived
            marks[rank] += (REDUCED, now[rank])
            now[rank] += round(spent[rank].get("engine", 0.0) * MS)
            marks[rank] += (END, now[rank], OPTIMIZER, now[rank])
            now[rank] += round(spent[rank].get("optimizer", 0.0) * MS)
            marks[rank] += (OPTIMIZER_END, now[rank])
            ends[rank].append(now[rank])
    return Run(
        setting,
        tuple(
            RankRecord(
                rank,
                size,
                WARMUP,
                tuple(ends[rank]),
                (rows,) * len(ends[rank]),
                tuple(marks[rank]),
                facts or FACTS,
                batches=(rows,) * len(ends[rank]),
            )
            for rank in range(size)
        ),
    )


def calm(rank: int, step: int) -> Phases:
    """A step that computes and does little else."""
    return CALM


def measured(runs: Sequence[Mapping[Setting, Run]], **curves: tuple[Setting, ...]) -> Measured:
    """What `measure` would have returned."""
    replicas = tuple(setting.num_replicas for setting in next(iter(curves.values())))
    wish = Wish("train.py", ("--lr", "<0.1>"), replicas, 20, len(runs), 1)
    rounds = tuple(dict(each) for each in runs)
    return Measured(wish, curves, rounds, tuple(remarks(rounds, wish)))


def weak_pair(
    size: int,
    phases: Callable[[int, int], Phases],
    *,
    alone: Callable[[int, int], Phases] | None = None,
    num_rounds: int = 3,
    seed: int = 0,
    facts: Facts | None = None,
    **both: Any,
) -> Measured:
    """One replica and `size` of them, in rounds."""
    one, many = Setting(1, 32, 1), Setting(size, 32 * size, size)
    rounds = []
    for number in range(num_rounds):
        given = {"facts": facts, "seed": seed + 17 * number, **both}
        rounds.append({one: make_run(one, alone or phases, **given), many: make_run(many, phases, **given)})
    return measured(rounds, weak=(one, many))
