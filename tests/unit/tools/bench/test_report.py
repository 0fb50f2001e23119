"""The report: a dictionary that goes through JSON, tables, and a plot."""

from __future__ import annotations

import io
import json
import re
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from evenstep.cli.bench import build_parser
from evenstep.errors import ConfigurationError
from evenstep.tools.bench.command import scaling
from evenstep.tools.bench.plan import Setting
from evenstep.tools.bench.records import Facts
from evenstep.tools.bench.report import (
    MISSING,
    PART_NAMES,
    build_report,
    can_draw,
    draw_efficiency,
    nothing_found,
    print_report,
)
from evenstep.tools.bench.runs import Wish, remarks
from tests.bench_runs import CALM, calm, make_run, measured, weak_pair

WISH = Wish("train.py", (), (1, 2), 20, 3, 1)


def reported() -> dict[str, Any]:
    """A report with a slow rank, as it comes out of report.json."""

    def phases(rank: int, step: int) -> dict[str, float]:
        return {**CALM, "forward": 30.0 + (200.0 if rank == 1 else 0.0)}

    found = weak_pair(2, phases, alone=calm, exchange_ms=4)
    report = build_report(found, "1.2.3")
    again: dict[str, Any] = json.loads(json.dumps(report))
    return again


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return reported()


def test_the_report_says_what_was_measured(report: dict[str, Any]) -> None:
    one, two = report["curves"]["weak"]
    assert (one["num_replicas"], two["num_replicas"]) == (1, 2)
    assert sum(two["parts"].values()) == pytest.approx(two["step_s"]["median"], rel=1e-3)
    assert two["late"]["rank"] == 1
    assert [finding["cause"] for finding in report["findings"]] == ["slow rank"]


def test_the_tables_fit_a_terminal(report: dict[str, Any]) -> None:
    out = io.StringIO()
    print_report(report, Console(file=out, width=80))
    text = out.getvalue()
    assert "…" not in text, "something was cut off"
    for words in (
        *(words for part, words in PART_NAMES.items() if part not in ("contention", "idle")),
        "slow rank",
        "samples/s",
        "speed-up",
        "rank 1 was the last one in 100% of the steps",
    ):
        assert words in re.sub(r"\s+", " ", text), words


def test_a_healthy_run_is_said_to_be_healthy() -> None:
    found = build_report(weak_pair(2, calm, exchange_ms=4), "1")
    assert found["findings"] == []
    out = io.StringIO()
    print_report(found, Console(file=out, width=80))
    assert "Nothing costs a tenth of a step on 2 replicas" in re.sub(r"\s+", " ", out.getvalue())


def test_a_loss_without_a_cause_is_not_said_to_be_healthy() -> None:
    """Many small losses, none of which is worth a tenth of the step."""
    slower = {**CALM, "forward": 36.0, "backward": 66.0, "engine": 3.0, "optimizer": 6.0}
    found = build_report(weak_pair(4, lambda r, s: slower, alone=calm, exchange_ms=5), "1")
    assert found["findings"] == []
    told = nothing_found(found)
    assert re.match(
        "No cause was found for certain on 4 replicas, although weak scaling has an efficiency of 8[0-9]%", told
    )


def test_a_loss_without_a_finding_is_a_note() -> None:
    found = weak_pair(2, lambda r, s: {**CALM, "forward": 45.0, "backward": 90.0}, alone=calm)
    setting = found.curves["weak"][-1]
    for round_ in found.rounds:
        round_[setting] = replace(round_[setting], cores_elsewhere=6.0)
    built = build_report(found, "1")
    assert built["findings"] == []
    (line,) = built["unexplained"]
    assert line.startswith("weak scaling on 2 replicas: contention is ")
    out = io.StringIO()
    print_report(built, Console(file=out, width=80))
    assert f"note: {line}" in re.sub(r"\s+", " ", out.getvalue())
    assert nothing_found(built).startswith("No cause was found for certain")


def test_one_round_has_no_quartiles() -> None:
    def text(num_rounds: int) -> str:
        built = build_report(weak_pair(2, calm, exchange_ms=4), "1")
        built["command"]["num_rounds"] = num_rounds
        out = io.StringIO()
        print_report(built, Console(file=out, width=100))
        return out.getvalue()

    quartiles = r"\d+% \(\d+ to \d+\)"
    assert re.search(quartiles, text(3))
    assert not re.search(quartiles, text(1))
    found = weak_pair(2, calm)
    assert "one round" in str(remarks(found.rounds[:1], replace(WISH, num_rounds=1)))
    assert "one round" not in str(remarks(found.rounds, WISH))


def test_both_curves_in_one_report_and_one_plot(tmp_path: Path) -> None:
    one, two, half = Setting(1, 32, 1), Setting(2, 64, 2), Setting(2, 32, 1)
    halved = {k: v / 2 for k, v in CALM.items()}
    runs = {one: make_run(one, calm), two: make_run(two, calm), half: make_run(half, lambda r, s: halved, rows=16)}
    found = build_report(measured([runs], weak=(one, two), strong=(one, half)), "1")
    assert set(found["curves"]) == {"weak", "strong"}
    draw_efficiency(found["curves"], tmp_path / "efficiency.png")
    content = (tmp_path / "efficiency.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 8000


def test_a_step_of_several_batches_is_told_from_its_batches() -> None:
    """Two batches of 16 for a step of 32: what a loader can be asked for is 16, and what a step has is 32."""
    run = make_run(Setting(2, 32), calm, rows=32)
    run = replace(run, records=tuple(replace(each, batches=(16,) * len(each.steps_ns)) for each in run.records))
    assert (run.usual_batch, run.loader_batch) == (64, 32)
    assert "were asked for" not in str(remarks([{run.setting: run}], WISH))
    other = Setting(2, 64)
    assert "a batch had 32 samples and not the 64 that were asked for" in str(
        remarks([{other: replace(run, setting=other)}], WISH)
    )


def test_code_in_an_advice_is_never_cut() -> None:
    """Whatever the width of the terminal: it is there to be copied."""
    facts = Facts(wrapper="torch", backend="gloo", num_cores=8)
    report = build_report(weak_pair(2, calm, exchange_ms=60, facts=facts), "1")
    for width in range(24, 100):
        out = io.StringIO()
        print_report(report, Console(file=out, width=width))
        told = [line for line in out.getvalue().splitlines() if line.startswith("  ")]
        for code in ("`import evenstep`", '`init_process_group("evenstep")`'):
            assert any(code in line for line in told), (width, code)
        assert all(len(line) <= max(width, 2 + len('`init_process_group("evenstep")`;')) for line in told), width


# ---------------------------------------------------------------------- the command


def parse(*arguments: str) -> Namespace:
    return build_parser().parse_args(["run", *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: script"),
        (["no-such.py"], "no-such.py: no such script"),
        (["--steps", "999", "x.py"], "--steps 999: at most 995 are remembered"),
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
    "arguments", [["--replicas", "one", "x.py"], ["--replicas", "0,2", "x.py"], ["--rounds", "0", "x.py"]]
)
def test_flags_that_are_no_numbers(arguments: list[str]) -> None:
    with pytest.raises(ConfigurationError, match=r"argument .*--help`"):
        parse(*arguments)


def test_without_matplotlib_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not can_draw()
    assert "pip install 'evenstep[bench]'" in MISSING
