"""What came of the trials: as plain data for report.json, and as tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from evenstep.bench.measure.scaling import Spread
from evenstep.bench.remedies.changes import CHANGES
from evenstep.bench.remedies.results import Trial, by_finding
from evenstep.bench.remedies.trials import Tried
from evenstep.checks import counted


def add_trials(report: dict[str, Any], tried: Tried) -> None:
    """Put the trials into a report, and the measured gain beside each finding. Pure but for `report`."""
    measured = by_finding([finding["cause"] for finding in report["findings"]], tried.trials)
    for finding in report["findings"]:
        trial = measured.get(finding["cause"])
        finding["measured"] = None if trial is None else {"title": trial.title, "gain": _spread(trial.gain)}
    report["tried"] = {
        "num_replicas": tried.setting.num_replicas,
        "uses": {name: value for name, value in asdict(tried.uses).items() if name != "shapes"},
        "trials": [_as_data(trial) for trial in tried.trials],
        "best": None if tried.best is None else _as_data(tried.best),
        "skipped": [{"change": name, "reason": reason} for name, reason in tried.skipped],
    }


def _as_data(trial: Trial) -> dict[str, Any]:
    agreement = trial.agreement
    return {
        "changes": list(trial.changes),
        "title": trial.title,
        "lines": trial.lines,
        "predicted": _spread(trial.predicted),
        "gain": _spread(trial.gain),
        "gains_by_round": list(trial.gains),
        "as_predicted": trial.as_predicted,
        "losses": None if agreement is None else {**asdict(agreement), "is_ok": agreement.is_ok},
        "helps": trial.helps,
        "failure": trial.failure,
    }


def _spread(spread: Spread | None) -> dict[str, float] | None:
    return None if spread is None else asdict(spread)


def print_trials(report: Mapping[str, Any], console: Console) -> None:
    """The table of trials, what wasn't tried and why, and the lines to change."""
    tried = report["tried"]
    console.print(trials_table(tried))
    for trial in tried["trials"]:
        if trial["failure"]:
            console.print(f"not possible: {trial['title']}: {trial['failure']}", highlight=False, markup=False)
    for skipped in tried["skipped"]:
        title = CHANGES[skipped["change"]].title
        console.print(f"not tried: {title}: {skipped['reason']}", highlight=False, markup=False)
    for line in advice_lines(tried):
        console.print(line, highlight=False, markup=False, soft_wrap=True)  # code that is wrapped can't be copied


def trials_table(tried: Mapping[str, Any]) -> Table:
    """Predicted and measured gains, the largest first, the combination last."""
    replicas = counted(tried["num_replicas"], "replica")
    title = f"Tried, on {replicas}: times the throughput of the unchanged script"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for column in ("change", "predicted", "measured", "losses"):
        table.add_column(column, justify="left" if column in ("change", "losses") else "right")
    rows = [trial for trial in tried["trials"] if not trial["failure"]]
    for trial in [*rows, *([tried["best"]] if tried["best"] else [])]:
        words = (trial["title"], _told(trial["predicted"]), _told(trial["gain"]), _losses(trial))
        table.add_row(*map(Text, words))
    return table


def advice_lines(tried: Mapping[str, Any]) -> list[str]:
    """The lines to change, of the combination or of the best single change."""
    singles = [trial for trial in tried["trials"] if trial["helps"]]
    best = tried["best"] if tried["best"] is not None and tried["best"]["helps"] else None
    if best is None or (singles and singles[0]["gain"]["median"] > best["gain"]["median"]):
        best = singles[0] if singles else None
    if best is None:
        return ["Nothing that was tried made the script faster for certain."]
    return [
        f"Best: {best['title']}, {_told(best['gain'])} times the throughput. The lines to change:",
        *(f"    {line}" for line in best["lines"].splitlines()),
    ]


def _told(spread: Mapping[str, float] | None) -> str:
    return "" if spread is None else f"{spread['median']:.2f} ({spread['low']:.2f} to {spread['high']:.2f})"


def _losses(trial: Mapping[str, Any]) -> str:
    losses = trial["losses"]
    if losses is None:
        return str(trial["failure"])
    if losses["difference"] is None:
        return "not seen, or another number of them: not comparable"
    words = "agree" if losses["is_ok"] else "DIFFER: not used"
    if losses["difference"] == 0:
        return "equal"
    return f"{words}: {losses['difference']:.1g} of {losses['tolerance']:.1g} allowed"
