"""The pairs of torch and python on which the tests were run: `evenstep env` and docs/reference/versions.md."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from evenstep.cli.main import main
from evenstep.preflight.tested_versions import RUNS, SuiteRun, runs_on, untested
from tests import pages

ROOT = Path(__file__).parents[3]
SOME = (
    SuiteRun("2.9.1", "CPU", "3.10", "2026-11-20", "core", 10, 0, 1),
    SuiteRun("2.15.0", "CPU", "3.11", "2026-11-20", "core", 1234, 0, 1),
    SuiteRun("2.15.0", "CUDA", "3.11", "2026-11-21", "unit", 10, 2, 1),
)


def test_a_pair_is_known_by_two_numbers_of_each_version():
    assert runs_on("2.15.0", "3.11.7", SOME) == list(SOME[1:])
    assert runs_on("2.15.1+cu130", "3.11.0", SOME) == list(SOME[1:])
    assert runs_on("2.9.0a0+git1234", "3.10.13rc1", SOME) == [SOME[0]]
    for torchs, pythons in (("2.1.0", "3.11.7"), ("2.15.0", "3.10.13"), ("2.16.0", "3.11.7"), ("2.15.0", "3.1")):
        assert runs_on(torchs, pythons, SOME) == []
    assert SOME[1].result == "1,234 passed, 0 failed, 1 skipped"


def test_an_untested_pair_is_told_what_was_tested_and_how_to_test_it():
    assert untested("2.15.1+cu130", "3.11.9", SOME) is None
    text = untested("2.16.0+cu130", "3.14.0", SOME)
    assert text is not None
    assert "never run on torch 2.16 with python 3.14" in text
    assert "2.9 with 3.10, 2.15 with 3.11." in text
    assert text.endswith("make test-torch TORCH=2.16.0 PYTHON=python3.14")


def test_env_warns_of_an_untested_pair(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "__version__", "2.99.0+cpu")
    for arguments in (["env"], ["env", "--json"]):
        assert main(arguments) == 0
        said = capsys.readouterr()
        assert said.err.startswith("evenstep: warning: evenstep's tests were never run on torch 2.99 with python 3.")
        assert "no: evenstep's tests were never run" in said.out
        assert arguments == ["env"] or json.loads(said.out)["versions"]["tested"].startswith("no: ")


def test_env_shows_what_was_run_on_this_pair(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    run = RUNS[0]
    monkeypatch.setattr(torch, "__version__", f"{run.torch}+cpu")
    monkeypatch.setattr("platform.python_version", lambda: f"{run.python}.99")
    assert main(["env", "--json"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert f"{run.date} on torch {run.torch} ({run.wheel}): {run.result}" in json.loads(said.out)["versions"]["tested"]


def test_the_page_has_the_table_of_the_package():
    page = pages.text("reference/versions.md")
    shown = [
        tuple(cell.strip() for cell in line.strip("|").split("|"))
        for line in page.splitlines()
        if re.match(r"\| 2\.\d+\.\d+ \|", line)
    ]
    assert shown == [(run.torch, run.wheel, run.python, run.date, run.tests, run.result) for run in RUNS]


def test_the_package_promises_the_pythons_of_the_table():
    text = (ROOT / "pyproject.toml").read_text()
    promised = set(re.findall(r'"Programming Language :: Python :: (\d\.\d+)"', text))
    assert promised == {run.python for run in RUNS}
    assert {run.wheel for run in RUNS} == {"CPU", "CUDA"}
