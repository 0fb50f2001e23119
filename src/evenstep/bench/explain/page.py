"""The report as one HTML file that needs nothing else: pictures and style are inside. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from evenstep.bench.explain.report import CURVE_TITLES, PART_NAMES, late_lines, nothing_found, usage_lines
from evenstep.checks import counted

_STYLE = """
:root { --ink: #23272e; --soft: #626b77; --line: #e1e4e8; --blue: #2f6db3; --red: #c8453b; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink);
       max-width: 860px; margin: 2.2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem } h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem }
p, li { color: var(--ink) } .soft { color: var(--soft) } code { font-size: .92em }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: .28rem .55rem; border-bottom: 1px solid var(--line) }
th { font-weight: 600; color: var(--soft) } th:first-child, td:first-child { text-align: left }
figure { margin: .6rem 0 } figure svg { width: 100%; height: auto }
.finding { border-left: 4px solid var(--red); padding: .3rem 0 .3rem .9rem; margin: .9rem 0 }
.finding h3 { margin: 0; font-size: 1rem } .finding p { margin: .2rem 0 }
.well { border-left: 4px solid #4f9d69; padding: .3rem 0 .3rem .9rem }
.scroll { overflow-x: auto; margin-bottom: 1.2rem }
"""


def render(report: Mapping[str, Any], pictures: Mapping[str, str]) -> str:
    """The page.

    Args:
        report: What `build_report` has made.
        pictures: `<svg>` elements, by name: "efficiency", "parts", "timeline".
    """
    command = report["command"]
    words = " ".join([command["script"], *command["arguments"]])
    facts, curves = report["facts"], report["curves"]
    main = curves.get("weak") or next(iter(curves.values()))
    settings = (
        f"{facts['device']}, {counted(command['num_threads'], 'thread')} a replica, "
        f"{counted(facts['num_cores'], 'core')}; "
        f"{counted(command['num_rounds'], 'round')} of {counted(command['num_steps'], 'step')} after "
        f"{command['num_warmup']} of warm-up; gradients "
        f"averaged by {facts['wrapper'] or 'no wrapper that was found'}"
    )
    body = [
        f"<h1>How well does <code>{escape(words)}</code> scale?</h1>",
        f'<p class="soft">{escape(report["began_at"])}, evenstep {escape(report["evenstep"])}<br>{escape(settings)}',
        _findings(report),
        "<h2>Efficiency</h2>",
        _picture(pictures, "efficiency", "Efficiency against replicas, with quartiles"),
        *(_scaling(name, points, command["num_rounds"]) for name, points in curves.items()),
        "<h2>Where a step goes</h2>",
        _picture(pictures, "parts", "The step in parts, by number of replicas"),
        *(_parts(name, points) for name, points in curves.items()),
        *(f"<p>{escape(line)}.</p>" for line in [*late_lines(report), *usage_lines(report)]),
        "<h2>One step, rank by rank</h2>",
        f'<p class="soft">Step {report["timeline"]["step"] + 1} of the median run. Below each rank its buckets: '
        f"from when they set out until all had arrived.</p>",
        _picture(pictures, "timeline", "One step on every rank, with buckets in flight"),
        _buckets(main[-1]["buckets"]),
    ]
    if remarks := [*report["unexplained"], *report["remarks"]]:
        items = "".join(f"<li>{escape(remark)}</li>" for remark in remarks)
        body += ["<h2>Notes</h2>", f"<ul>{items}</ul>"]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{escape(words)}: scaling</title>\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n" + "\n".join(body) + "\n</body>\n</html>\n"
    )


def _findings(report: Mapping[str, Any]) -> str:
    where = f"on {counted(report['findings_at'], 'replica')}"
    if not report["findings"]:
        return f'<p class="well">{escape(nothing_found(report))}</p>'
    found = [
        f'<div class="finding"><h3>{escape(each["cause"])}, {each["curve"]} scaling: '
        f"up to {each['gain']:.2f} times the throughput</h3>"
        f"<p>Measured: {escape(each['what'])}.</p><p>To do: {escape(each['advice'])}.</p></div>"
        for each in report["findings"]
    ]
    return f"<h2>Why not better, {where}</h2>{''.join(found)}"


def _scaling(name: str, points: Sequence[Mapping[str, Any]], num_rounds: int) -> str:
    rows = [
        [
            f"{point['num_replicas']}",
            f"{point['rows_per_replica']:g}",
            f"{point['step_s']['median'] * 1e3:.3g} ms",
            f"{point['samples_per_s']['median']:,.0f}",
            f"{point['speedup']['median']:.2f}",
            f"{point['efficiency']['median']:.0%}",
            f"{100 * point['efficiency']['low']:.0f} to {point['efficiency']['high']:.0%}"
            if num_rounds > 1
            else "one round",
            f"{sum(point['cores_busy_by_rank']):.1f}",
        ]
        for point in points
    ]
    head = ["replicas", "batch", "step", "samples/s", "speed-up", "efficiency", "quartiles", "cores busy"]
    return f"<p>{escape(CURVE_TITLES[name])}.</p>" + _table(head, rows)


def _parts(name: str, points: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for part, words in PART_NAMES.items():
        cells = []
        for point in points:
            total = sum(point["parts"].values())
            cells.append(f"{point['parts'][part] * 1e3:.3g} ms · {point['parts'][part] / total:.0%}")
        rows.append([words, *cells])
    rows.append(["step", *(f"{sum(point['parts'].values()) * 1e3:.3g} ms" for point in points)])
    head = [f"{name} scaling", *(counted(point["num_replicas"], "replica") for point in points)]
    return _table(head, rows)


def _buckets(buckets: Sequence[Mapping[str, float]]) -> str:
    if not buckets:
        return '<p class="soft">Nobody says in which buckets gradients travel here.</p>'
    rows = [
        [f"bucket {number}", f"{each['num_bytes'] / 2**20:.3g} MiB", f"{each['ready_s'] * 1e3:.3g} ms"]
        for number, each in enumerate(buckets)
    ]
    return _table(["in the average step", "gradients", "sets out, in backward passes"], rows)


def _picture(pictures: Mapping[str, str], name: str, caption: str) -> str:
    return f'<figure id="{name}" aria-label="{escape(caption)}">{pictures[name]}</figure>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
