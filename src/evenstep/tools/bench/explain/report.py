"""All that was measured, as one dictionary (`report.json`), and as tables on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from evenstep.checks import counted
from evenstep.tools.bench.explain.findings import Case, find, grown, unexplained
from evenstep.tools.bench.measure.runs import Measured
from evenstep.tools.bench.measure.scaling import Point, Run, Spread, busy_cores, cores_elsewhere, curve, utilisation
from evenstep.tools.observing.thresholds import WELL

VERSION = 1

# In the order of a step; what is lost stands above what is used.
PART_NAMES = {
    "compute": "computing",
    "contention": "contention",
    "data": "waiting for data",
    "imbalance": "imbalance",
    "exposed": "exposed communication",
    "engine": "engine",
    "optimizer": "optimizer",
}
CURVE_TITLES = {
    "weak": "Weak scaling: each replica has as many samples as alone",
    "strong": "Strong scaling: the replicas share one batch",
}


def build_report(measured: Measured, *, version: str, began_at: str) -> dict[str, Any]:
    """The report as plain data. Pure.

    Args:
        measured: What came of the runs.
        version: Of evenstep.
        began_at: When, for people.
    """
    wish = measured.wish
    curves = {name: curve(settings, measured.rounds) for name, settings in measured.curves.items()}
    main = curves.get("weak") or next(iter(curves.values()))
    return {
        "version": VERSION,
        "evenstep": version,
        "began_at": began_at,
        "command": asdict(wish),
        "facts": asdict(main[-1].run.records[0].facts),
        "curves": {name: [_point(point) for point in points] for name, points in curves.items()},
        "findings": _findings(curves),
        "unexplained": _unexplained(curves),
        "grown": _grown(main),
        "findings_at": main[-1].num_replicas,
        "remarks": list(measured.remarks),
    }


def _findings(curves: Mapping[str, Sequence[Point]]) -> list[dict[str, Any]]:
    """Of each curve's last point; a cause of both curves is reported once, for weak scaling."""
    found: dict[str, dict[str, Any]] = {}
    for name, points in curves.items():
        for finding in find(case_of(points[-1], divides_batch=name == "strong", base=points[0])):
            found.setdefault(finding.cause, {"curve": name, **asdict(finding)})
    return list(found.values())


def _unexplained(curves: Mapping[str, Sequence[Point]]) -> list[str]:
    """Losses of each curve's last point that no finding explains, with the reason."""
    found = []
    for name, points in curves.items():
        case = case_of(points[-1], divides_batch=name == "strong", base=points[0])
        where = f"{name} scaling on {counted(case.num_replicas, 'replica')}"
        found += [f"{where}: {line}" for line in unexplained(case, find(case))]
    return found


def _grown(points: Sequence[Point]) -> list[dict[str, Any]]:
    """The parts of a step that have grown from the fewest replicas to the most, the largest first."""
    case = case_of(points[-1], base=points[0])
    return [{"part": part, "seconds": seconds, "share": seconds / case.parts.total_s} for part, seconds in grown(case)]


def case_of(point: Point, *, divides_batch: bool = False, base: Point | None = None) -> Case:
    """The input of `find` for one point of a curve; `divides_batch`: of strong scaling; `base`: its first."""
    records = point.run.records
    return Case(
        num_replicas=point.num_replicas,
        rows_per_replica=point.rows_per_replica,
        decomposition=point.decomposition,
        facts=records[0].facts,
        spread=(point.step_s.high - point.step_s.low) / point.step_s.median,
        num_threads=sum(record.facts.num_threads for record in records),
        device_busy_s=_device_busy_s(point.run),
        syncs=records[0].syncs,
        divides_batch=divides_batch,
        num_cores_elsewhere=cores_elsewhere(point.run),
        alone=base.decomposition.parts if base is not None and base.num_replicas < point.num_replicas else None,
        blocks=tuple(point.run.blocks()),
    )


def _device_busy_s(run: Run) -> float | None:
    """How long in a step the busiest GPU computed; None without one."""
    return max((r.device_busy_s for r in run.records if r.device_busy_s is not None), default=None)


def _point(point: Point) -> dict[str, Any]:
    decomposition, busy_s = point.decomposition, _device_busy_s(point.run)
    return {
        "num_replicas": point.num_replicas,
        "global_batch_size": point.setting.global_batch_size,
        "rows_per_replica": point.rows_per_replica,
        "step_s": asdict(point.step_s),
        "samples_per_s": asdict(point.samples_per_s),
        "speedup": asdict(point.speedup),
        "efficiency": asdict(point.efficiency),
        "parts": {name: getattr(decomposition.parts, f"{name}_s") for name in PART_NAMES},
        "late": None if decomposition.late is None else asdict(decomposition.late),
        "ready_s": list(decomposition.ready_s),
        "blocks": [
            {"name": name, "all_gather_s": gathering, "reduce_scatter_s": scattering}
            for name, gathering, scattering in point.run.blocks()
        ],
        "num_steps": decomposition.num_steps,
        "cores_busy_by_rank": utilisation(point.run),
        "busy_share_by_core": list(busy_cores(point.run)),
        "device_busy_share": None if busy_s is None else busy_s / point.step_s.median,
    }


# ---------------------------------------------------------------------- for people


def print_report(report: Mapping[str, Any], console: Console) -> None:
    """Tables, findings and remarks."""
    for name, points in report["curves"].items():
        console.print(scaling_table(CURVE_TITLES[name], points, report["command"]["num_rounds"]))
        console.print(parts_table(points))
        if points[-1]["blocks"]:
            console.print(blocks_table(points[-1]))
    for line in [*grown_lines(report), *late_lines(report), *usage_lines(report)]:
        console.print(line, highlight=False, markup=False)
    console.print(findings_table(report) if report["findings"] else nothing_found(report), highlight=False)
    for remark in [*report["unexplained"], *report["remarks"]]:
        console.print(f"note: {remark}", highlight=False, markup=False)


def scaling_table(title: str, points: Sequence[Mapping[str, Any]], num_rounds: int) -> Table:
    """Throughput, speed-up, efficiency with its quartiles over rounds, and how many cores the ranks kept busy."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for column in ("replicas", "batch", "step", "samples/s", "speed-up", "efficiency", "cores"):
        table.add_column(column, justify="right", no_wrap=True)
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
            f"{sum(point['cores_busy_by_rank']):.1f}",
        )
    return table


def parts_table(points: Sequence[Mapping[str, Any]]) -> Table:
    """The step in parts: milliseconds, and what they are of the step."""
    table = Table(title="Where a step goes", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("")
    for point in points:
        table.add_column(f"{point['num_replicas']}", justify="right")
    for name, words in PART_NAMES.items():
        cells = []
        for point in points:
            total = sum(point["parts"].values())
            cells.append(f"{_ms(point['parts'][name])} {point['parts'][name] / total:>4.0%}")
        table.add_row(words, *cells)
    table.add_section()
    table.add_row("step", *(_ms(sum(point["parts"].values())) for point in points))
    return table


def grown_lines(report: Mapping[str, Any]) -> list[str]:
    """What has grown with the replicas, where it is worth naming."""
    parts = [
        f"{PART_NAMES[each['part']]} +{_ms(each['seconds'])} ({each['share']:.0%})"
        for each in report["grown"]
        if each["share"] >= 0.01
    ]
    return [f"grown on {counted(report['findings_at'], 'replica')}: {', '.join(parts)}"] if parts else []


def late_lines(report: Mapping[str, Any]) -> list[str]:
    """The straggler of each step with a wait."""
    lines = []
    for name, points in report["curves"].items():
        point = points[-1]
        late = point["late"]
        if late is None:
            continue
        ready = ", ".join(f"rank {rank} {_ms(seconds)}" for rank, seconds in enumerate(point["ready_s"]))
        last = f"rank {late['rank']} was the last one in {late['share_of_steps']:.0%} of the steps"
        where = f"{name} scaling on {counted(point['num_replicas'], 'replica')}"
        lines.append(f"{where}: ready after {ready}; {last}, mostly in {late['phase']}")
    return lines


def usage_lines(report: Mapping[str, Any]) -> list[str]:
    """What ranks and cores, or GPUs, were busy with."""
    lines = []
    for name, points in report["curves"].items():
        point = points[-1]
        busy = ", ".join(f"rank {rank} {cores:.2f}" for rank, cores in enumerate(point["cores_busy_by_rank"]))
        line = f"{name} scaling on {counted(point['num_replicas'], 'replica')}: cores kept busy: {busy}"
        if point["busy_share_by_core"]:
            line += f"; by core: {', '.join(f'{share:.0%}' for share in point['busy_share_by_core'])}"
        if point["device_busy_share"] is not None:
            line += f"; the GPU computes {point['device_busy_share']:.0%} of a step"
        lines.append(line)
    return lines


def findings_table(report: Mapping[str, Any]) -> Table:
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


def blocks_table(point: Mapping[str, Any]) -> Table:
    """What FSDP2's blocks wait for, of a curve's last point."""
    title = f"Blocks of FSDP2 on {counted(point['num_replicas'], 'replica')}: communication that computing doesn't hide"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("block")
    table.add_column("all-gather", justify="right")
    table.add_column("reduce-scatter", justify="right")
    for block in point["blocks"]:
        table.add_row(Text(block["name"]), _ms(block["all_gather_s"]), _ms(block["reduce_scatter_s"]))
    return table


def nothing_found(report: Mapping[str, Any]) -> str:
    """The sentence for a report without findings."""
    curves = report["curves"]
    name = "weak" if "weak" in curves else next(iter(curves))
    efficiency, where = curves[name][-1]["efficiency"]["median"], f"on {counted(report['findings_at'], 'replica')}"
    if efficiency < WELL or report["unexplained"]:
        return (
            f"No cause was found for certain {where}, although {name} scaling has an efficiency of {efficiency:.0%}: "
            f"see where a step goes, and the notes."
        )
    return f"Nothing costs a tenth of a step {where}: there is nothing to report."


def _ms(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.2f} ms"
