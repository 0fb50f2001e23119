"""The report of a measurement: one dictionary (`report.json`), and tables on the terminal."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from evenstep.checks import counted
from evenstep.tools.bench.decompose import in_ms
from evenstep.tools.bench.findings import Case, find, unexplained
from evenstep.tools.bench.runs import Measured
from evenstep.tools.bench.scaling import Point, Spread, curve
from evenstep.tools.observing.thresholds import WELL

VERSION = 3

# In the order of the table.
PART_NAMES = {
    "compute": "computing",
    "contention": "contention",
    "data": "waiting for data",
    "idle": "idle GPU",
    "imbalance": "imbalance",
    "exposed": "exposed communication",
    "engine": "engine",
    "optimizer": "optimizer",
}
CURVE_TITLES = {
    "weak": "Weak scaling: each replica has as many samples as alone",
    "strong": "Strong scaling: the replicas share one batch",
}
_CODE, _KEPT = re.compile("`[^`]+`"), "\0"  # code in a text, and a space in it, at which no line ends


def build_report(measured: Measured, version: str) -> dict[str, Any]:
    """The report as plain data. Pure.

    Args:
        measured: The runs.
        version: evenstep's version.
    """
    curves = {name: curve(settings, measured.rounds) for name, settings in measured.curves.items()}
    findings: dict[str, dict[str, Any]] = {}
    notes = []
    for name, points in curves.items():
        case = case_of(points[-1], divides_batch=name == "strong")
        found = find(case)
        for finding in found:  # a cause of both curves is reported once, for weak scaling
            findings.setdefault(finding.cause, {"curve": name, **asdict(finding)})
        notes += [f"{_where(name, case.num_replicas)}: {line}" for line in unexplained(case, found)]
    last = next(iter(curves.values()))[-1]
    return {
        "version": VERSION,
        "evenstep": version,
        "command": asdict(measured.wish),
        "facts": asdict(last.run.records[0].facts),
        "curves": {name: [_point(point) for point in points] for name, points in curves.items()},
        "findings": list(findings.values()),
        "unexplained": notes,
        "findings_at": last.setting.num_replicas,
        "remarks": list(measured.remarks),
    }


def case_of(point: Point, *, divides_batch: bool = False) -> Case:
    """The input of `find` for one point of a curve. `divides_batch` is true for strong scaling."""
    records = point.run.records
    profile = records[0].profile
    return Case(
        num_replicas=point.setting.num_replicas,
        rows_per_replica=point.rows_per_replica,
        decomposition=point.decomposition,
        facts=records[0].facts,
        spread=(point.step_s.high - point.step_s.low) / point.step_s.median,
        num_threads=sum(record.facts.num_threads for record in records),
        syncs=() if profile is None else profile.syncs,
        divides_batch=divides_batch,
        num_cores_elsewhere=point.run.cores_elsewhere,
    )


def _point(point: Point) -> dict[str, Any]:
    decomposition = point.decomposition
    return {
        "num_replicas": point.setting.num_replicas,
        "global_batch_size": point.setting.global_batch_size,
        "rows_per_replica": point.rows_per_replica,
        "step_s": asdict(point.step_s),
        "samples_per_s": asdict(point.samples_per_s),
        "speedup": asdict(point.speedup),
        "efficiency": asdict(point.efficiency),
        "parts": {name: getattr(decomposition.parts, f"{name}_s") for name in PART_NAMES},
        "late": decomposition.late and asdict(decomposition.late),
        "ready_s": list(decomposition.ready_s),
        "num_steps": decomposition.num_steps,
    }


# ---------------------------------------------------------------------- for users


def print_report(report: Mapping[str, Any], console: Console) -> None:
    """Print tables, findings and remarks."""
    for name, points in report["curves"].items():
        console.print(_scaling_table(CURVE_TITLES[name], points, report["command"]["num_rounds"]))
        console.print(_parts_table(points))
    for name, points in report["curves"].items():
        if late := points[-1]["late"]:
            ready = ", ".join(f"rank {rank} {in_ms(seconds)}" for rank, seconds in enumerate(points[-1]["ready_s"]))
            last = f"rank {late['rank']} was the last one in {late['share_of_steps']:.0%} of the steps"
            line = f"{_where(name, points[-1]['num_replicas'])}: ready after {ready}; {last}, mostly in {late['phase']}"
            console.print(line, highlight=False, markup=False)
    if report["findings"]:
        console.print(f"\nWhy not better, on {counted(report['findings_at'], 'replica')}", style="italic")
    lines = _told(report, console.width) if report["findings"] else [nothing_found(report)]
    for line in [*lines, *(f"note: {remark}" for remark in (*report["unexplained"], *report["remarks"]))]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def titled(title: str, *columns: str, **settings: Any) -> Table:
    """Make a table with all columns but the first aligned to the right."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", **settings)
    return table


def _scaling_table(title: str, points: Sequence[Mapping[str, Any]], num_rounds: int) -> Table:
    """The table of throughput, speed-up, and efficiency with its quartiles over rounds."""
    columns = ("replicas", "batch", "step", "samples/s", "speed-up", "efficiency")
    table = titled(title, *columns, no_wrap=True)
    for point in points:
        efficiency = Spread(**point["efficiency"])
        quartiles = f" ({100 * efficiency.low:.0f} to {100 * efficiency.high:.0f})" if num_rounds > 1 else ""
        table.add_row(
            f"{point['num_replicas']}",
            f"{point['rows_per_replica']:g}",
            in_ms(point["step_s"]["median"]),
            f"{point['samples_per_s']['median']:,.0f}",
            f"{point['speedup']['median']:.2f}",
            f"{efficiency.median:.0%}{quartiles}",
        )
    return table


def _parts_table(points: Sequence[Mapping[str, Any]]) -> Table:
    """The table of the parts of a step: time, and fraction of the step. Parts that no step has are left out."""
    table = titled("Where a step goes", "", *(f"{point['num_replicas']}" for point in points))
    totals = [sum(point["parts"].values()) for point in points]
    for name, words in PART_NAMES.items():
        seconds = [point["parts"][name] for point in points]
        if any(seconds):
            cells = (f"{in_ms(each)} {each / total:>4.0%}" for each, total in zip(seconds, totals, strict=True))
            table.add_row(words, *cells)
    table.add_section()
    table.add_row("step", *map(in_ms, totals))
    return table


def _told(report: Mapping[str, Any], width: int) -> list[str]:
    """The lines on findings, wrapped without breaking code in backquotes."""
    found = []
    for finding in report["findings"]:
        found += ["", f"{finding['cause']} ({finding['curve']} scaling): up to {finding['gain']:.2f} times as fast"]
        for text in (finding["what"], finding["advice"]):
            whole = _CODE.sub(lambda code: code[0].replace(" ", _KEPT), text)
            lines = textwrap.wrap(whole, max(20, width - 2), break_long_words=False, break_on_hyphens=False)
            found += [f"  {line.replace(_KEPT, ' ')}" for line in lines]
    return found


def nothing_found(report: Mapping[str, Any]) -> str:
    """The sentence for a report without findings."""
    name, points = next(iter(report["curves"].items()))
    efficiency, where = points[-1]["efficiency"]["median"], f"on {counted(report['findings_at'], 'replica')}"
    if efficiency < WELL or report["unexplained"]:
        return (
            f"No cause was found for certain {where}, although {name} scaling has an efficiency of {efficiency:.0%}: "
            f"see where a step goes, and the notes."
        )
    return f"Nothing costs a tenth of a step {where}: there is nothing to report."


def _where(curve_name: str, num_replicas: int) -> str:
    return f"{curve_name} scaling on {counted(num_replicas, 'replica')}"
