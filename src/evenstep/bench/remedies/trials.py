"""Runs of the script with changes, in rounds that alternate with the unchanged one.

[Note: rounds of trials]

    look       unchanged, once: what the script uses, and the processor's caches
    calibrate  what the remedies cost here, so that a gain can be predicted
    round 0    unchanged, change A, change B, ...
    round 1    ..., change B, change A, unchanged
    round 2    as round 0
    best       unchanged and the best combination, in rounds as well

A gain is the throughput with a change over that of the unchanged script in the same round.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evenstep.bench.explain.findings import Case
from evenstep.bench.measure.plan import Setting
from evenstep.bench.measure.runs import Launch, Wish, run_once
from evenstep.bench.measure.scaling import Run, utilisation
from evenstep.bench.remedies.calibrate import read_costs
from evenstep.bench.remedies.changes import CHANGES, Candidate, Costs, Plan, Uses, has_hold, plan_changes, why_not
from evenstep.bench.remedies.probe import seen_file
from evenstep.bench.remedies.results import Trial, best_combination, compare_losses, in_turn, merge, ranked
from evenstep.environment import Measurement, with_measurement
from evenstep.errors import UsageError
from evenstep.temporary import private_directory

Side = tuple[str, ...]
UNCHANGED = "unchanged"
_PROBE = "evenstep.bench.remedies.probe"
_CALIBRATE = "evenstep.bench.remedies.calibrate"
_CALIBRATION_LIMIT_S = 180.0
_LONGEST_REASON = 160
# The last words of python, or of `evenstep run`, about what went wrong.
_REASON = re.compile(r"^(?:\[[^\]]*\][ :]*|rank \d+[^:]*: )?((?:\w+\.)*\w*(?:Error|Exception|Mismatch\w*)\b.*)$", re.M)


@dataclass(frozen=True)
class Tried:
    """What came of all trials.

    Attributes:
        setting: Of all runs.
        uses: What the script uses.
        costs: Of the remedies, apart from the script.
        trials: Of one change each, the largest gain first.
        best: The best combination of several; None where one change alone is best, or none helps.
        skipped: (change, reason) of those that weren't tried.
    """

    setting: Setting
    uses: Uses
    costs: Costs
    trials: tuple[Trial, ...]
    best: Trial | None
    skipped: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class _Result:
    run: Run
    losses: list[float]
    uses: Uses


class _Runner:
    """Starts runs, each in a directory of its own."""

    def __init__(self, wish: Wish, setting: Setting, root: Path, launch: Launch) -> None:
        self._wish, self._setting, self._root, self._launch = wish, setting, root, launch
        self._number = 0

    def run(self, changes: Sequence[str], settings: Mapping[str, float]) -> _Result:
        """The script with changes, once.

        Raises:
            UsageError: It failed.
        """
        self._number += 1
        place = self._root / f"run-{self._number}"
        wish = self._wish
        if "num_threads" in settings:
            wish = replace(wish, num_threads=int(settings["num_threads"]))
        given = json.dumps({"changes": list(changes), "settings": dict(settings)})
        run = run_once(self._setting, wish, place, launch=self._launch, probe=(_PROBE, given))
        seen = json.loads(seen_file(place, 0).read_text())
        uses = seen["uses"]
        uses["shapes"] = tuple(tuple(shape) for shape in uses["shapes"])
        return _Result(run, seen["losses"], Uses(**uses))

    def calibrate(self, asked: dict[str, Any]) -> Costs:
        """What remedies cost here; unknown where that can't be measured."""
        request, out = self._root / "request.json", self._root / "costs.json"
        request.write_text(json.dumps({**asked, "out": str(out)}))
        arguments = ["--threads-per-rank", str(self._wish.num_threads), "--log-dir", str(self._root / "logs")]
        arguments += ["--device", "cpu", "-m", _CALIBRATE, str(request)]
        asked_of_ranks = Measurement(self._root, 0, 1)
        processes = [
            subprocess.Popen(
                command,
                env={**with_measurement(asked_of_ranks), **variables},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for command, variables in self._launch(self._setting.num_replicas, arguments)
        ]
        try:
            for process in processes:
                process.wait(_CALIBRATION_LIMIT_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            for process in processes:
                if process.poll() is None:
                    process.terminate()
                    process.wait()
        return Costs(read_costs(json.loads(out.read_text()))) if out.exists() else Costs()


def try_changes(
    wish: Wish,
    setting: Setting,
    case: Case,
    say: Callable[[str], None],
    *,
    launch: Launch,
    only: Sequence[str] | None = None,
) -> Tried:
    """Try what fits, and the best combination last.

    Args:
        wish: As for the measurement before it.
        setting: Of its most replicas.
        case: What it measured there.
        say: Told what is going on, a line each.
        launch: Starts the ranks.
        only: Names of changes; None: all that promise something.

    Raises:
        UsageError: The unchanged script failed.
    """
    with private_directory("bench") as root:
        runner = _Runner(wish, setting, root, launch)
        say("trying remedies: a look at what the script uses")
        look = runner.run((), {})
        uses = look.uses
        costs = Costs()
        possible = [name for name in CHANGES if why_not(name, case, uses) is None and (only is None or name in only)]
        if uses.device == "cpu" and setting.num_replicas > 1 and possible:
            say("what exchanges and optimizers cost here")
            costs = runner.calibrate(
                {
                    "bucket_bytes": list(case.facts.bucket_bytes) or [case.facts.gradient_bytes],
                    "shapes": [list(shape) for shape in uses.shapes],
                    "optimizer": uses.optimizer,
                    "optimizer_options": dict(uses.optimizer_options),
                    "changes": possible,
                }
            )
        plan = plan_changes(case, uses, costs, busy_cores=sum(utilisation(look.run)), only=only)
        trials = _rounds(runner, plan, wish.num_rounds, uses, say)
        best = _best(runner, plan, trials, wish.num_rounds, uses, say)
    return Tried(setting, uses, costs, tuple(ranked(trials)), best, plan.skipped)


def _rounds(runner: _Runner, plan: Plan, num_rounds: int, uses: Uses, say: Callable[[str], None]) -> list[Trial]:
    sides: dict[Side, Mapping[str, float]] = {(candidate.change,): candidate.settings for candidate in plan.candidates}
    results, failures = _alternate(runner, sides, num_rounds, say)
    trials = []
    for candidate in plan.candidates:
        change = CHANGES[candidate.change]
        trial = Trial((change.name,), change.title, candidate.lines, candidate.predicted)
        trials.append(_finished(trial, results, failures, uses))
    return trials


def _best(
    runner: _Runner,
    plan: Plan,
    trials: Sequence[Trial],
    num_rounds: int,
    uses: Uses,
    say: Callable[[str], None],
) -> Trial | None:
    names = tuple(name for trial in best_combination(trials) for name in trial.changes)
    if len(names) < 2:
        return None
    candidates: dict[str, Candidate] = {each.change: each for each in plan.candidates}
    title, lines, settings = merge(candidates, names)
    results, failures = _alternate(runner, {names: settings}, num_rounds, say)
    return _finished(Trial(names, title, lines, None), results, failures, uses)


def _alternate(
    runner: _Runner, sides: Mapping[Side, Mapping[str, float]], num_rounds: int, say: Callable[[str], None]
) -> tuple[list[dict[Side, _Result]], dict[Side, str]]:
    """Rounds of the unchanged script, `()`, and each side; one that fails is left out from then on."""
    failures: dict[Side, str] = {}
    rounds: list[dict[Side, _Result]] = []
    if not sides:
        return rounds, failures
    for number in range(num_rounds):
        results: dict[Side, _Result] = {}
        for name in in_turn(["", *map("+".join, sides)], number):
            side: Side = tuple(name.split("+")) if name else ()
            if side in failures:
                continue
            say(f"round {number + 1} of {num_rounds}: {name or UNCHANGED}")
            try:
                results[side] = runner.run(side, sides.get(side, {}))
                missed = [each for each in side if not has_hold(each, sides[side], results[side].uses)]
                if missed:
                    failures[side] = f"the script didn't take the change: {', '.join(missed)}"
            except UsageError as error:
                if not side:
                    raise
                failures[side] = reason_of(str(error))
        rounds.append(results)
    return rounds, failures


def reason_of(message: str) -> str:
    """One line of what a failed run has said: the last error in it. Pure."""
    found = _REASON.findall(message)
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    line = found[-1] if found else lines[0] if lines else "it failed"
    return line if len(line) <= _LONGEST_REASON else line[: _LONGEST_REASON - 3] + "..."


def _finished(
    trial: Trial, rounds: Sequence[Mapping[Side, _Result]], failures: Mapping[Side, str], uses: Uses
) -> Trial:
    if trial.changes in failures:
        return replace(trial, failure=failures[trial.changes])
    both = [(each[()], each[trial.changes]) for each in rounds]
    gains = tuple(changed.run.samples_per_s / unchanged.run.samples_per_s for unchanged, changed in both)
    agreement = compare_losses(
        [unchanged.losses for unchanged, _ in both],
        [changed.losses for _, changed in both],
        uses.dtype_of_loss,
        trial.changes,
    )
    return replace(trial, gains=gains, agreement=agreement)
