"""`evenstep bench compare`: several scripts in alternating rounds, their speed and their losses.

The scripts are compared within a round, as in [Note: rounds] of `measure/plan`: one round goes through them in order,
the next one backwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from evenstep.bench.measure.plan import Setting
from evenstep.bench.measure.runs import Wish, run_once
from evenstep.bench.measure.scaling import Run, Spread
from evenstep.errors import ConfigurationError
from evenstep.temporary import private_directory

# Relative differences of losses that rounding explains: the order of sums differs, and steps carry it on.
_TOLERANCES = {"float64": 1e-8, "float32": 1e-3, "bfloat16": 5e-2, "float16": 2e-2}


@dataclass(frozen=True)
class Compared:
    """One script beside the first one.

    Attributes:
        script: Its path.
        step_ms: Of the average step, over rounds.
        samples_per_s: Throughput of all ranks, over rounds.
        speed: Throughput over the first script's in the same round, over rounds.
        losses: In words, whether they are the first script's.
        differs: Whether they are known to differ.
        num_steps: Steps that counted in the shortest run.
    """

    script: str
    step_ms: Spread
    samples_per_s: Spread
    speed: Spread
    losses: str
    differs: bool
    num_steps: int


def compare(wish: Wish, scripts: Sequence[str], say: Callable[[str], None]) -> list[Compared]:
    """Run the scripts in alternating rounds, and compare each with the first.

    Args:
        wish: Ranks, batch, steps and rounds; its script is not looked at.
        scripts: At least two; one may come twice, which shows the noise.
        say: Called with what is going on, a line each.

    Raises:
        ConfigurationError: A script isn't there.
        UsageError: A run failed, made no steps, or took too long.
    """
    missing = [script for script in scripts if not Path(script).is_file()]
    if missing:
        raise ConfigurationError(f"{missing[0]}: no such script.")
    setting = Setting(wish.replicas[0], wish.batch)
    rounds: list[dict[int, Run]] = []
    with private_directory("bench") as root:
        for number in range(wish.num_rounds):
            runs = {}
            in_order = range(len(scripts))
            for each in reversed(in_order) if number % 2 else in_order:
                say(f"round {number + 1} of {wish.num_rounds}: {scripts[each]}")
                runs[each] = run_once(setting, replace(wish, script=scripts[each]), root / f"{number}-{each}")
            rounds.append(runs)
    return [compared(scripts, rounds, each) for each in range(len(scripts))]


def compared(scripts: Sequence[str], rounds: Sequence[dict[int, Run]], each: int) -> Compared:
    """Script number `each` beside number 0. Pure."""
    runs, first = [runs[each] for runs in rounds], [runs[0] for runs in rounds]
    losses, differs = ("", False) if each == 0 else compare_losses(first, runs, scripts[0], scripts[each])
    return Compared(
        script=scripts[each],
        step_ms=Spread.of([1e3 * run.step_s for run in runs]),
        samples_per_s=Spread.of([run.samples_per_s for run in runs]),
        speed=Spread.of([run.samples_per_s / of.samples_per_s for run, of in zip(runs, first, strict=True)]),
        losses=losses,
        differs=differs,
        num_steps=min(record.num_steps for run in runs for record in run.records),
    )


def compare_losses(first: Sequence[Run], runs: Sequence[Run], name: str, other: str) -> tuple[str, bool]:
    """Compare the losses of two scripts, round by round. Pure.

    The loss of a backward pass is the mean over ranks. A script whose own rounds differ (no seed) may differ twice as
    much from another.

    Args:
        first: Runs of the first script, by round.
        runs: Runs of the other.
        name: Of the first script.
        other: Of the other.

    Returns:
        The answer in words, and whether the losses are known to differ.
    """
    ours, theirs = ([mean_losses(run) for run in each] for each in (first, runs))
    for of, losses in ((name, ours), (other, theirs)):
        if not losses[0]:
            return f"not compared: in {of} no backward pass began at a loss of one element", False
    counts = {len(losses) for losses in ours + theirs}
    if len(counts) > 1:
        return f"not compared: {len(ours[0])} backward passes in {name}, and {len(theirs[0])} in {other}", False
    differences = [difference(a, b) for a, b in zip(ours, theirs, strict=True)]
    apart, step = max(differences)
    own = [difference(script[0], each)[0] for script in (ours, theirs) for each in script[1:]]
    spread = max((each for each in own if math.isfinite(each)), default=0.0)
    allowed = max(2 * spread, *(_TOLERANCES.get(run.records[0].loss_dtype, 1e-3) for run in (first[0], runs[0])))
    noise = f"; runs of one script differ by {spread:.1e}" if spread else ""
    if apart <= allowed:
        return ("the same, bit by bit" if apart == 0 else f"the same: at most {apart:.1e} apart{noise}"), False
    return f"DIFFERENT: {apart:.1e} apart in backward pass {step + 1}{noise}", True


def mean_losses(run: Run) -> list[float]:
    """By backward pass, the mean of the ranks' losses; empty if the ranks made different numbers of passes. Pure."""
    by_rank = [record.losses for record in run.records]
    if len({len(losses) for losses in by_rank}) > 1:
        return []
    return [
        math.fsum(losses) / len(losses) if all(map(math.isfinite, losses)) else math.nan
        for losses in zip(*by_rank, strict=True)
    ]


def difference(some: Sequence[float], others: Sequence[float]) -> tuple[float, int]:
    """The largest relative difference of two runs' losses, and where it is. Pure."""
    size = max(map(abs, some))  # of all losses: one that is nearly zero by chance is no measure
    worst = (0.0, 0)
    for place, (a, b) in enumerate(zip(some, others, strict=True)):
        if a == b or (math.isnan(a) and math.isnan(b)):
            continue
        apart = abs(a - b) / size if size else math.inf
        worst = max(worst, (apart if math.isfinite(apart) else math.inf, place), key=lambda each: each[0])
    return worst


def print_compared(found: Sequence[Compared], wish: Wish, console: Console) -> None:
    """Print a row for each script, and the answers about losses below it."""
    table = Table(box=SIMPLE_HEAD, title_justify="left")
    for title in ("script", "ms a step", "samples a second", f"speed over {found[0].script}"):
        table.add_column(title, justify="left" if title == "script" else "right")
    for each in found:
        table.add_row(each.script, _cell(each.step_ms, 1), _cell(each.samples_per_s, 0), _cell(each.speed, 2))
    console.print(table)
    for each in found:
        if each.num_steps < wish.num_steps:
            text = f"{each.script} ended by itself after {each.num_steps} of {wish.num_steps} steps that were to count"
            console.print(text, markup=False, highlight=False)
    for each in found[1:]:
        console.print(f"losses of {each.script} and {found[0].script}: {each.losses}", markup=False, highlight=False)


def as_data(found: Sequence[Compared], wish: Wish) -> dict[str, Any]:
    """The answer as plain data, for a file. Pure."""
    return {
        "nproc_per_node": wish.replicas[0],
        "rounds": wish.num_rounds,
        "steps": wish.num_steps,
        "scripts": [
            {
                "script": each.script,
                "step_ms": _spread(each.step_ms),
                "samples_per_s": _spread(each.samples_per_s),
                "speed": _spread(each.speed),
                "steps": each.num_steps,
                "losses": each.losses,
                "losses_differ": each.differs,
            }
            for each in found
        ],
    }


def _spread(spread: Spread) -> dict[str, float]:
    return {"median": spread.median, "low": spread.low, "high": spread.high}


def _cell(spread: Spread, digits: int) -> str:
    return f"{spread.median:.{digits}f} ({spread.low:.{digits}f} to {spread.high:.{digits}f})"
