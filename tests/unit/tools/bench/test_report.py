"""The report: a dictionary that goes through JSON, tables, and a plot."""

from __future__ import annotations

import io
import json
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from evenstep.cli.bench import build_parser
from evenstep.errors import ConfigurationError
from evenstep.tools.bench.command import scaling
from evenstep.tools.bench.report import (
    PART_NAMES,
    build_report,
    print_report,
)
from tests.bench_runs import CALM, calm, weak_pair


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


# ---------------------------------------------------------------------- the command


def parse(*arguments: str) -> Namespace:
    return build_parser().parse_args(["run", *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: script"),
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
