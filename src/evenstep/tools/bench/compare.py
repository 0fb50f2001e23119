"""`evenstep bench compare`: runs several scripts in rounds, and compares their times and losses.

[Note: alternating rounds]

Every round runs each script once, and every other round goes backwards, so that a machine that gets slower favours
none. Ratios are those of runs in the same round.

    round 1    a.py, b.py
    round 2    b.py, a.py
    round 3    a.py, b.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.table import Table
from rich.text import Text

from evenstep.checks import counted
from evenstep.errors import ConfigurationError
from evenstep.ground.host.named_files import validate_script
from evenstep.ground.host.temporary import private_directory
from evenstep.tools.bench.plan import Setting
from evenstep.tools.bench.report import titled
from evenstep.tools.bench.runs import Series, Wish, common_remarks
from evenstep.tools.bench.scaling import Run, Spread

VERSION = 2

Losses = Sequence[float | None]  # by step; None where no loss was seen


@dataclass(frozen=True)
class LossComparison:
    """A script's losses compared with those of the first script, relative to the first script's largest loss.

    Attributes:
        num_steps: The number of steps in which both have a loss, in the round with the fewest; 0: nothing was compared.
        difference: The largest difference.
        step: The step of the largest difference, from 1; 0 if there is none.
        own: The largest difference between rounds of the first script itself.
    """

    num_steps: int
    difference: float
    step: int
    own: float

    def __str__(self) -> str:
        if self.num_steps == 0:
            return "not compared: both scripts need a step whose backward pass begins with a single number, the loss"
        steps = counted(self.num_steps, "step")
        if self.difference == 0:
            return f"the same in {steps}"
        return (
            f"apart by {self.difference:.2g} of the largest in step {self.step} of {steps}; rounds of the first script "
            f"by {self.own:.2g}"
        )


@dataclass(frozen=True)
class Side:
    """The results of one script over all rounds.

    Attributes:
        name: The script's path, with a number if the same script is compared twice.
        step_s: The time of the average step.
        samples_per_s: The throughput of all ranks.
        rows_per_step: The samples of most steps on all ranks together; 0 if none were seen.
        ratios: By round, the script's time per sample over that of the first script; per step if samples are unknown.
        ratio: The median and quartiles of `ratios`.
        losses: The comparison with the first script's losses; None for the first script.
    """

    name: str
    step_s: Spread
    samples_per_s: Spread
    rows_per_step: int
    ratios: tuple[float, ...]
    ratio: Spread
    losses: LossComparison | None


def validate_scripts(scripts: Sequence[str]) -> tuple[str, ...]:
    """Validate the scripts, and return the names under which they are shown.

    Raises:
        ConfigurationError: There is only one script, or one doesn't exist.
    """
    if len(scripts) < 2:
        raise ConfigurationError(
            f"bench compare needs two scripts or more, and has {scripts[0]} alone. Name it twice to see how much "
            f"rounds of one script differ."
        )
    for script in scripts:
        validate_script(script)
    earlier = [scripts[:number].count(script) for number, script in enumerate(scripts)]
    return tuple(script if not n else f"{script} ({n + 1})" for script, n in zip(scripts, earlier, strict=True))


def run_all(
    wish: Wish, scripts: Sequence[str], names: Sequence[str], say: Callable[[str], None]
) -> list[tuple[Run, ...]]:
    """Run all scripts in rounds. Returns the runs by round, each in the order of the scripts.

    Args:
        wish: The measurement; its script is ignored.
        scripts: The paths of the scripts.
        names: The names of the scripts.
        say: Called with each line of progress.

    Raises:
        UsageError: A script failed, made no steps, or took too long.
    """
    setting = Setting(wish.replicas[0], None)
    jobs = {name: (name, setting, replace(wish, script=script)) for name, script in zip(names, scripts, strict=True)}
    with private_directory("bench") as root:
        rounds = Series(len(jobs) * wish.num_rounds, root, say).rounds(jobs, wish.num_rounds)
    return [tuple(runs[name] for name in names) for runs in rounds]


# ---------------------------------------------------------------------- from runs to figures


def summarise(names: Sequence[str], rounds: Sequence[Sequence[Run]]) -> list[Side]:
    """The results of all scripts. Pure.

    Args:
        names: The names of the scripts.
        rounds: By round, the runs of the scripts.
    """
    sides = []
    firsts = [runs[0] for runs in rounds]
    for number, name in enumerate(names):
        runs = [each[number] for each in rounds]
        are_known = all(run.usual_batch for run in (*runs, *firsts))
        paces = [[1 / run.samples_per_s if are_known else run.step_s for run in each] for each in (runs, firsts)]
        ratios = tuple(pace / first for pace, first in zip(*paces, strict=True))
        sides.append(
            Side(
                name,
                Spread.of([run.step_s for run in runs]),
                Spread.of([run.samples_per_s for run in runs]),
                runs[0].usual_batch,
                ratios,
                Spread.of(ratios),
                compare_losses([*map(losses_of, firsts)], [*map(losses_of, runs)]) if number else None,
            )
        )
    return sides


def losses_of(run: Run) -> list[float | None]:
    """By step, the loss over all ranks: the weighted mean, or the mean over ranks for plain backward passes."""
    found: list[float | None] = []
    for ranks in zip(*(record.losses for record in run.records), strict=False):
        weight = sum(each for _, each in ranks)
        found.append(sum(total for total, _ in ranks) / weight if weight else None)
    return found


def compare_losses(first: Sequence[Losses], others: Sequence[Losses]) -> LossComparison:
    """Compare the losses of the first script with those of another one, round by round. Pure."""
    found = [_difference(a, b) for a, b in zip(first, others, strict=True)]
    _, difference, step = max(found, key=lambda each: each[1])
    own = max(_difference(first[0], each)[1] for each in first)
    return LossComparison(min(count for count, _, _ in found), difference, step, own)


def _difference(some: Losses, others: Losses) -> tuple[int, float, int]:
    """(number of steps in which both have a loss, the largest relative difference, the step of that)."""
    pairs = [
        (step, a, b)
        for step, (a, b) in enumerate(zip(some, others, strict=False), 1)
        if a is not None and b is not None
    ]
    # Relative to the largest loss: the loss of a single step may be nearly zero by chance.
    size = max((abs(a) for _, a, _ in pairs if math.isfinite(a)), default=0.0)
    worst, where = 0.0, 0
    for step, a, b in pairs:
        if a == b or (math.isnan(a) and math.isnan(b)):
            continue
        apart = abs(a - b) / size if size else math.inf
        apart = math.inf if math.isnan(apart) else apart
        if apart > worst:
            worst, where = apart, step
    return len(pairs), worst, where


def remarks(wish: Wish, sides: Sequence[Side], rounds: Sequence[Sequence[Run]]) -> list[str]:
    """Remarks on the figures for the user. Pure."""
    found = common_remarks({side.name: [runs[n] for runs in rounds] for n, side in enumerate(sides)}, wish)
    return found + [
        f"{side.name} takes {counted(side.rows_per_step, 'sample')} a step, and {sides[0].name} "
        f"{sides[0].rows_per_step}: they are compared by the sample"
        for side in sides
        if side.rows_per_step and sides[0].rows_per_step not in (0, side.rows_per_step)
    ]


# ---------------------------------------------------------------------- for users and programs


def as_data(sides: Sequence[Side], told: Sequence[str], wish: Wish) -> dict[str, Any]:
    """The results as plain data, for `--json`."""
    scripts = [
        {**asdict(side), "losses": side.losses and {**asdict(side.losses), "told": str(side.losses)}} for side in sides
    ]
    for each in scripts:
        if each["losses"] and each["losses"]["difference"] == math.inf:
            each["losses"]["difference"] = "inf"  # JSON has no infinity
    of_one_script = ("script", "replicas", "has_strong", "watches_losses")
    command = {name: value for name, value in asdict(wish).items() if name not in of_one_script}
    command["num_ranks"] = wish.replicas[0]
    return {"kind": "compare", "version": VERSION, "command": command, "scripts": scripts, "remarks": list(told)}


def table(sides: Sequence[Side], wish: Wish) -> Table:
    """The results as a table with a row for each script."""
    title = f"On {counted(wish.replicas[0], 'rank')}, {counted(wish.num_rounds, 'round')}"
    made = titled(title, "script", "step, ms", "times the first's", "samples/s")
    for number, side in enumerate(sides):
        step = Spread(side.step_s.median * 1e3, side.step_s.low * 1e3, side.step_s.high * 1e3)
        ratio = _with_spread(side.ratio) if number else "1"
        samples = f"{side.samples_per_s.median:,.0f}" if side.rows_per_step else "unknown"
        made.add_row(Text(side.name), _with_spread(step), ratio, samples)
    return made


def verdicts(sides: Sequence[Side]) -> list[str]:
    """A sentence for each script but the first, on its time and losses."""
    first = sides[0].name
    return [f"{side.name}: {_told(side, first)}; losses: {side.losses}" for side in sides[1:]]


def _told(side: Side, first: str) -> str:
    if min(side.ratios) <= 1 <= max(side.ratios):
        return f"neither faster nor slower than {first} in every round"
    word = "slower" if side.ratio.median > 1 else "faster"
    return f"{word} than {first} in every round, {side.ratio.median:.2f} times as long"


def _with_spread(spread: Spread) -> str:
    return f"{spread.median:.3g} ({spread.low:.3g} to {spread.high:.3g})"
