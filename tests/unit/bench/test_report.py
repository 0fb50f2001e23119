"""The report: a dictionary that goes through JSON, tables, pictures, and a page that needs nothing else."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from evenstep.bench.command import scaling
from evenstep.bench.explain import page, plots
from evenstep.bench.explain.report import PART_NAMES, build_report, nothing_found, print_report
from evenstep.bench.measure.plan import Setting
from evenstep.bench.measure.runs import Wish, remarks
from evenstep.cli.bench import build_parser
from evenstep.errors import ConfigurationError
from tests.bench_runs import CALM, calm, make_run, measured, weak_pair

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)


WISH = Wish("train.py", (), (1, 2), "weak", None, 2, 20, 1, 1)


def reported() -> dict[str, Any]:
    """A report with a slow rank, as it comes out of report.json."""

    def phases(rank: int, step: int) -> dict[str, float]:
        return {**CALM, "forward": 30.0 + (200.0 if rank == 1 else 0.0)}

    found = weak_pair(2, phases, alone=calm, exchange_ms=4)
    report = build_report(found, version="1.2.3", began_at="2026-01-02 03:04:05+00:00")
    again: dict[str, Any] = json.loads(json.dumps(report))
    return again


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return reported()


@pytest.fixture(scope="module")
def html(report: dict[str, Any]) -> str:
    figures = plots.draw(report)
    return page.render(report, {name: plots.as_svg(figure, name) for name, figure in figures.items()})


def test_the_report_says_what_was_measured(report: dict[str, Any]) -> None:
    one, two = report["curves"]["weak"]
    assert (one["num_replicas"], two["num_replicas"]) == (1, 2)
    assert sum(two["parts"].values()) == pytest.approx(two["step_s"]["median"], rel=1e-3)
    assert two["late"]["rank"] == 1
    assert [finding["cause"] for finding in report["findings"]] == ["slow rank"]
    ranks = report["timeline"]["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1]
    for rank in ranks:
        ends = [ended for _, _, ended in rank["phases"]]
        assert [began for _, began, _ in rank["phases"][1:]] == ends[:-1], "no gap"
        assert [number for number, _, _ in rank["buckets"]] == [0, 1]
    assert any(phase == "wait" for phase, _, _ in ranks[0]["phases"])


def test_the_report_says_when_buckets_set_out(report: dict[str, Any], html: str) -> None:
    """Half-way through the backward pass of 60 ms, and at its end; nothing travels on one replica."""
    one, two = report["curves"]["weak"]
    assert one["buckets"] == []
    assert [each["num_bytes"] for each in two["buckets"]] == report["timeline"]["bucket_bytes"] == [1 << 20, 7 << 20]
    assert [each["ready_s"] for each in two["buckets"]] == pytest.approx([0.03, 0.06], rel=0.05)
    assert "<td>bucket 1</td><td>7 MiB</td>" in html
    assert report["facts"]["bucket_bytes"] == [1 << 20, 7 << 20]


def test_the_tables_fit_a_terminal(report: dict[str, Any]) -> None:
    out = io.StringIO()
    print_report(report, Console(file=out, width=80))
    text = out.getvalue()
    assert "…" not in text, "something was cut off"
    for words in (
        *PART_NAMES.values(),
        "slow rank",
        "samples/s",
        "speed-up",
        "rank 1 was the last one in 100% of the steps",
    ):
        assert words in re.sub(r"\s+", " ", text), words


def test_a_healthy_run_is_said_to_be_healthy() -> None:
    found = build_report(weak_pair(2, calm, exchange_ms=4), version="1", began_at="now")
    assert found["findings"] == []
    out = io.StringIO()
    print_report(found, Console(file=out, width=80))
    assert "Nothing costs a tenth of a step on 2 replicas" in re.sub(r"\s+", " ", out.getvalue())


def test_a_loss_without_a_cause_is_not_said_to_be_healthy() -> None:
    """Many small losses, none of which is worth a tenth of the step."""
    slower = {**CALM, "forward": 36.0, "backward": 66.0, "engine": 3.0, "optimizer": 6.0}
    found = build_report(weak_pair(4, lambda r, s: slower, alone=calm, exchange_ms=5), version="1", began_at="now")
    assert found["findings"] == []
    told = nothing_found(found)
    assert re.match(
        "No cause was found for certain on 4 replicas, although weak scaling has an efficiency of 8[0-9]%", told
    )


def test_a_loss_without_a_finding_is_a_note_in_the_table_and_on_the_page() -> None:
    found = weak_pair(2, lambda r, s: {**CALM, "forward": 45.0, "backward": 90.0}, alone=calm)
    busy = [
        replace(r, usage=replace(r.usage, cores=(1.0,) * 8)) for r in found.rounds[0][found.curves["weak"][-1]].records
    ]
    for round_ in found.rounds:
        setting = found.curves["weak"][-1]
        round_[setting] = replace(round_[setting], records=tuple(busy))
    built = build_report(found, version="1", began_at="now")
    assert built["findings"] == []
    (line,) = built["unexplained"]
    assert line.startswith("weak scaling on 2 replicas: contention is ")
    out = io.StringIO()
    print_report(built, Console(file=out, width=80))
    assert f"note: {line}" in re.sub(r"\s+", " ", out.getvalue())
    assert nothing_found(built).startswith("No cause was found for certain")
    pictures = {name: plots.as_svg(figure, name) for name, figure in plots.draw(built).items()}
    assert f"<li>{line}</li>" in page.render(built, pictures)


def test_one_round_has_no_quartiles() -> None:
    def texts(num_rounds: int) -> tuple[str, str]:
        built = build_report(weak_pair(2, calm, exchange_ms=4), version="1", began_at="now")
        built["command"]["num_rounds"] = num_rounds
        out = io.StringIO()
        print_report(built, Console(file=out, width=100))
        pictures = {name: plots.as_svg(figure, name) for name, figure in plots.draw(built).items()}
        return out.getvalue(), page.render(built, pictures)

    quartiles = r"\d+% \(\d+ to \d+\)"
    terminal, html = texts(3)
    assert re.search(quartiles, terminal)
    assert "<td>one round</td>" not in html
    terminal, html = texts(1)
    assert not re.search(quartiles, terminal)
    assert html.count("<td>one round</td>") == 2
    found = weak_pair(2, calm)
    assert any("one round" in remark for remark in remarks(found.curves, found.rounds[:1], WISH))
    assert not any("one round" in remark for remark in remarks(found.curves, found.rounds[:1] * 3, WISH))


def test_both_curves_in_one_report() -> None:
    one, two, half = Setting(1, 32, 1), Setting(2, 64, 2), Setting(2, 32, 1)
    halved = {k: v / 2 for k, v in CALM.items()}
    runs = {one: make_run(one, calm), two: make_run(two, calm), half: make_run(half, lambda r, s: halved, rows=16)}
    found = build_report(measured([runs], weak=(one, two), strong=(one, half)), version="1", began_at="now")
    assert set(found["curves"]) == {"weak", "strong"}
    assert set(plots.draw(found)) == {"efficiency", "parts", "timeline"}


def test_a_step_of_several_batches_is_told_from_its_batches() -> None:
    """Two batches of 16 for a step of 32: what a loader can be asked for is 16, and what a step has is 32."""
    run = make_run(Setting(2, 32), calm, rows=32)
    run = replace(run, records=tuple(replace(each, batches=(16,) * len(each.steps_ns)) for each in run.records))
    assert (run.usual_batch, run.loader_batch) == (64, 32)
    assert "were asked for" not in str(remarks({"weak": (run.setting,)}, [{run.setting: run}], WISH))
    other = Setting(2, 64)
    assert "a batch had 32 samples and not the 64 that were asked for" in str(
        remarks({"weak": (other,)}, [{other: replace(run, setting=other)}], WISH)
    )


def test_why_there_is_no_strong_scaling() -> None:
    wish = replace(WISH, mode="both")
    for batch, told in ((None, "no loader was seen"), (1, "a batch of 1 samples can't be divided over 2 replicas")):
        settings = Setting(1, batch), Setting(2, batch, 2)
        runs = {each: make_run(each, calm) for each in settings}
        assert told in str(remarks({"weak": settings}, [runs], wish))


# ---------------------------------------------------------------------- the page


def test_the_page_needs_nothing_from_outside(html: str) -> None:
    names = {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
        "http://www.w3.org/1999/02/22-rdf-syntax-ns#",
    }
    names |= {
        "http://creativecommons.org/ns#",
        "http://purl.org/dc/elements/1.1/",
        "http://purl.org/dc/dcmitype/StillImage",
    }
    assert set(re.findall(r'https?://[^"\'<> ]+', html)) <= names | {"https://matplotlib.org/"}
    assert not re.search(r"<(script|link|img|iframe)\b|url\((?!#)|@import", html)
    assert "&lt;0.1&gt;" in html, "arguments are escaped"
    assert "<0.1>" not in html


def test_every_picture_is_in_the_page_once_with_names_of_its_own(html: str) -> None:
    assert re.findall(r'<figure id="(\w+)"', html) == ["efficiency", "parts", "timeline"]
    assert html.count("<svg") == 3
    figures = re.findall(r"<figure.*?</figure>", html, re.DOTALL)
    clips = [set(re.findall(r'<clipPath id="(\w+)"', figure)) for figure in figures]
    assert all(clips)
    assert not clips[0] & clips[1]
    assert not clips[1] & clips[2]


def test_pictures_for_slides(report: dict[str, Any], tmp_path: Path) -> None:
    for name, figure in plots.draw(report).items():
        plots.save_png(figure, tmp_path / f"{name}.png")
        content = (tmp_path / f"{name}.png").read_bytes()
        assert content.startswith(b"\x89PNG")
        assert len(content) > 8000


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome is installed")
def test_a_browser_shows_the_pictures(html: str, tmp_path: Path) -> None:
    """The browser itself measures what it has laid out, and writes that into the page it prints."""
    asks = """<script>window.addEventListener('load', () => {
        const found = [...document.querySelectorAll('figure svg')].map(each => {
            const box = each.getBoundingClientRect();
            const paths = [...each.querySelectorAll('path, use')];
            const ink = paths.filter(path => path.getBoundingClientRect().width > 0).length;
            const bars = paths.filter(path => getComputedStyle(path).fill === 'rgb(229, 121, 74)'
                                              && path.getBoundingClientRect().width > 1).length;
            return [each.parentElement.id, Math.round(box.width), Math.round(box.height), ink, bars].join(' ');
        });
        document.body.setAttribute('data-found', found.join(';'));
    });</script>"""
    (tmp_path / "report.html").write_text(html.replace("</body>", asks + "</body>"))
    assert CHROMIUM is not None
    quiet = ["--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update"]
    called = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        *quiet,
        "--disable-sync",
        "--disable-dev-shm-usage",
    ]
    called += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=900,1200", "--dump-dom"]
    done = subprocess.run([*called, f"file://{tmp_path}/report.html"], capture_output=True, text=True, timeout=120)
    found = re.search(r'data-found="([^"]*)"', done.stdout)
    assert found, done.stderr[-2000:]
    seen = {name: [int(n) for n in numbers] for name, *numbers in (each.split() for each in found[1].split(";"))}
    assert set(seen) == {"efficiency", "parts", "timeline"}
    # Exposed communication has a bar for each number of replicas, either bucket in flight one for each rank; legends.
    assert (seen["parts"][3], seen["timeline"][3]) == (2 + 1, 2 * 2 + 1)
    for name, (width, height, num_paths, _) in seen.items():
        assert width > 500, name
        assert height > 150, name
        assert num_paths > 20, name


# ---------------------------------------------------------------------- the command


def parse(*arguments: str) -> Namespace:
    return build_parser().parse_args(["run", *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: script"),
        (["no-such.py"], "no-such.py: no such script"),
        (["--warmup", "1", "x.py"], "--warmup 1: at least 2"),
        (["--steps", "999", "x.py"], "at most 1000 together"),
        (["--replicas", "2,3", "x.py"], "3 is no multiple of 2"),
        (["--out", "/proc/x", "x.py"], "--out /proc/x"),
    ],
)
def test_commands_that_make_no_sense(arguments: list[str], message: str, tmp_path: Path) -> None:
    out = [] if "--out" in arguments else ["--out", str(tmp_path / "out")]
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        scaling(parse("--replicas", "1", *out, *arguments))


def test_the_scripts_own_flags_are_its_own() -> None:
    args = parse("--replicas", "1,2", "train.py", "--steps", "7", "--out", "here")
    assert (args.nproc_per_node, args.script, args.arguments, args.steps) == (
        (1, 2),
        "train.py",
        ["--steps", "7", "--out", "here"],
        30,
    )


@pytest.mark.parametrize(
    "arguments", [["--replicas", "one", "x.py"], ["--batch", "0", "x.py"], ["--mode", "no", "x.py"]]
)
def test_flags_that_are_no_numbers(arguments: list[str]) -> None:
    with pytest.raises(ConfigurationError, match=r"argument .*--help`"):
        parse(*arguments)


def test_without_matplotlib_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not plots.is_available()
    assert "pip install 'evenstep[bench]'" in plots.MISSING
