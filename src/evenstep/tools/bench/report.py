"""All that was measured: one dictionary (`report.json`), tables on the terminal, and a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from evenstep import checks
from evenstep.checks import counted
from evenstep.tools.bench.findings import Case, find, unexplained
from evenstep.tools.bench.runs import Measured
from evenstep.tools.bench.scaling import Point, Spread, curve
from evenstep.tools.observing.thresholds import WELL

VERSION = 2
MISSING = checks.needs("a picture", "matplotlib", "bench")

# In the order of a step; what is lost stands above what is used.
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
_CURVE_COLOURS = {"weak": "#2f6db3", "strong": "#e5794a"}


def build_report(measured: Measured, *, version: str, began_at: str) -> dict[str, Any]:
    """The report as plain data. Pure.

    Args:
        measured: What came of the runs.
        version: Of evenstep.
        began_at: When, for people.
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
        "began_at": began_at,
        "command": asdict(measured.wish),
        "facts": asdict(last.run.records[0].facts),
        "curves": {name: [_point(point) for point in points] for name, points in curves.items()},
        "findings": list(findings.values()),
        "unexplained": notes,
        "findings_at": last.setting.num_replicas,
        "remarks": list(measured.remarks),
    }


def case_of(point: Point, *, divides_batch: bool = False) -> Case:
    """The input of `find` for one point of a curve; `divides_batch`: of strong scaling."""
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
        blocks=tuple(point.run.blocks()),
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
        "blocks": [
            {"name": name, "all_gather_s": gathering, "reduce_scatter_s": scattering}
            for name, gathering, scattering in point.run.blocks()
        ],
        "num_steps": decomposition.num_steps,
        "cores_busy": point.run.cores_busy,
    }


# ---------------------------------------------------------------------- for people


def print_report(report: Mapping[str, Any], console: Console) -> None:
    """Tables, findings and remarks."""
    for name, points in report["curves"].items():
        console.print(_scaling_table(CURVE_TITLES[name], points, report["command"]["num_rounds"]))
        console.print(_parts_table(points))
        if points[-1]["blocks"]:
            console.print(_blocks_table(points[-1]))
    for name, points in report["curves"].items():
        if late := points[-1]["late"]:
            ready = ", ".join(f"rank {rank} {_ms(seconds)}" for rank, seconds in enumerate(points[-1]["ready_s"]))
            last = f"rank {late['rank']} was the last one in {late['share_of_steps']:.0%} of the steps"
            line = f"{_where(name, points[-1]['num_replicas'])}: ready after {ready}; {last}, mostly in {late['phase']}"
            console.print(line, highlight=False, markup=False)
    console.print(_findings_table(report) if report["findings"] else nothing_found(report), highlight=False)
    for remark in [*report["unexplained"], *report["remarks"]]:
        console.print(f"note: {remark}", highlight=False, markup=False)


def titled(title: str, *columns: str, **settings: Any) -> Table:
    """A table whose columns of figures, all but the first, stand to the right."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", **settings)
    return table


def _scaling_table(title: str, points: Sequence[Mapping[str, Any]], num_rounds: int) -> Table:
    """Throughput, speed-up, efficiency with its quartiles over rounds, and how many cores the ranks kept busy."""
    columns = ("replicas", "batch", "step", "samples/s", "speed-up", "efficiency", "cores")
    table = titled(title, *columns, no_wrap=True)
    for point in points:
        efficiency = Spread(**point["efficiency"])
        quartiles = f" ({100 * efficiency.low:.0f} to {100 * efficiency.high:.0f})" if num_rounds > 1 else ""
        table.add_row(
            f"{point['num_replicas']}",
            f"{point['rows_per_replica']:g}",
            _ms(point["step_s"]["median"]),
            f"{point['samples_per_s']['median']:,.0f}",
            f"{point['speedup']['median']:.2f}",
            f"{efficiency.median:.0%}{quartiles}",
            f"{point['cores_busy']:.1f}",
        )
    return table


def _parts_table(points: Sequence[Mapping[str, Any]]) -> Table:
    """The step in parts: milliseconds, and what they are of the step. Parts that no step has are left out."""
    table = titled("Where a step goes", "", *(f"{point['num_replicas']}" for point in points))
    totals = [sum(point["parts"].values()) for point in points]
    for name, words in PART_NAMES.items():
        seconds = [point["parts"][name] for point in points]
        if any(seconds):
            cells = (f"{_ms(each)} {each / total:>4.0%}" for each, total in zip(seconds, totals, strict=True))
            table.add_row(words, *cells)
    table.add_section()
    table.add_row("step", *map(_ms, totals))
    return table


def _blocks_table(point: Mapping[str, Any]) -> Table:
    """What FSDP2's blocks wait for, of a curve's last point."""
    title = f"Blocks of FSDP2 on {counted(point['num_replicas'], 'replica')}: time in their collectives"
    table = titled(title, "block", "all-gather", "reduce-scatter")
    for block in point["blocks"]:
        table.add_row(Text(block["name"]), _ms(block["all_gather_s"]), _ms(block["reduce_scatter_s"]))
    return table


def _findings_table(report: Mapping[str, Any]) -> Table:
    """Causes, with what to do and what is to be expected of it."""
    title = f"Why not better, on {counted(report['findings_at'], 'replica')}"
    table = Table(title=title, title_justify="left", show_lines=True)
    table.add_column("cause", style="bold", no_wrap=True)
    table.add_column("measured")
    table.add_column("what to do, and to expect")
    for finding in report["findings"]:
        gain = f"{finding['cause']}\n{finding['curve']} scaling\nup to {finding['gain']:.2f}x"
        table.add_row(*map(Text, (gain, finding["what"], finding["advice"])))  # as they are: no markup
    return table


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


def can_draw() -> bool:
    """Whether there is a matplotlib to draw with."""
    return find_spec("matplotlib") is not None


def draw_efficiency(curves: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Efficiency against replicas, as a PNG: medians, and a band between the quartiles."""
    # Without pyplot: nothing global is set, and nothing has to be closed.
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.grid(color="#e6e8eb", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    for name, points in curves.items():
        x = [point["num_replicas"] for point in points]
        low, median, high = ([point["efficiency"][key] for point in points] for key in ("low", "median", "high"))
        colour = _CURVE_COLOURS[name]
        axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
        axes.plot(x, median, color=colour, marker="o", linewidth=2, label=f"{name} scaling")
    ticks = sorted({point["num_replicas"] for points in curves.values() for point in points})
    axes.axhline(1.0, color="#3a3f47", linewidth=0.9, linestyle=(0, (4, 3)))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, list(map(str, ticks)))
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_xlabel("replicas")
    axes.set_ylabel("efficiency")
    axes.legend(frameon=False, loc="lower left")
    figure.savefig(path, dpi=160, format="png")


def _where(curve_name: str, num_replicas: int) -> str:
    return f"{curve_name} scaling on {counted(num_replicas, 'replica')}"


def _ms(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.2f} ms"
