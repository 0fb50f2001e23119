"""Where nothing was found a script is compared with one process: what is a finding then, and what is said."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("libcst")

from evenstep.errors import UsageError
from evenstep.tools.doctor import comparing
from evenstep.tools.doctor.examination import examine
from evenstep.tools.doctor.report import Report
from evenstep.tools.doctor.run import runs
from evenstep.tools.doctor.run.events import Event, Evidence

SCRIPT = Path(__file__).parents[3] / "scripts" / "clean" / "tutorial.py"


def cause(kind: str, line: int = 7) -> SimpleNamespace:
    return SimpleNamespace(kind=kind, text=f"{kind} is to blame.", path=str(SCRIPT.absolute()), line=line)


def evidence() -> Evidence:
    """Of a run that shows nothing wrong."""
    at, loader = [(str(SCRIPT.absolute()), 7)], {"loader": 1, "iteration": 0}
    made = [[str(SCRIPT.absolute()), 5]]
    events = [
        Event("wrapped", places=at, facts={"wrapper": "torch", "num_bytes": 4}),
        Event("iterate", places=at, facts={**loader, "made": made, "library": "torch"}),
        Event("forward", places=at, facts={"grad": True, "wrapped": True, "rows": []}),
        Event("backward", places=at, facts={"wrapped": True, "synced": True}),
        Event("stepped", places=at, facts={"lr": [0.1]}),
        Event("end", facts={"status": "0", "has_group": False}),
    ]
    return Evidence([events, events])


def examined(monkeypatch: pytest.MonkeyPatch, *, causes: list[Any], difference: Any = None, **options: Any) -> Report:
    verdict = SimpleNamespace(causes=causes, difference=difference)
    calls: list[Any] = []

    def verify_ranks(script: str, arguments: Any, **named: Any) -> SimpleNamespace:
        calls.append(named["ranks"])
        return SimpleNamespace(num_steps=5, verdicts=[verdict], faults=())

    monkeypatch.setattr(runs, "watch", lambda *args, **kwargs: evidence())
    monkeypatch.setattr(comparing, "verify_ranks", verify_ranks)
    report = examine(str(SCRIPT), **options)
    assert calls == [(1, 2)] * (report.compared is not None)
    return report


@pytest.mark.parametrize(("kind", "rule"), [("repeated", "EV101"), ("average", "EV505"), ("drift", "EV606")])
def test_lost_or_repeated_work_is_a_finding(kind: str, rule: str, monkeypatch: pytest.MonkeyPatch):
    report = examined(monkeypatch, causes=[cause("random"), cause(kind, line=9)], difference="step 1 differs")
    (finding,) = report.findings
    assert (finding.rule, finding.line, finding.path) == (rule, 9, str(SCRIPT))
    assert (finding.evidence, finding.confirmed) == (f"{kind} is to blame", True)
    assert not report.is_fine


@pytest.mark.parametrize("kind", ["batch norm", "random", "samples"])
def test_what_is_right_as_ddp_is_makes_a_note(kind: str, monkeypatch: pytest.MonkeyPatch):
    report = examined(monkeypatch, causes=[cause(kind)], difference="step 1 differs")
    assert report.is_fine
    assert report.findings == []
    assert report.compared is not None
    assert "right as torch's DDP is; not one process's answer, because" in report.compared
    assert f"{kind} is to blame." in report.compared


def test_a_difference_without_a_cause_is_said(monkeypatch: pytest.MonkeyPatch):
    report = examined(monkeypatch, causes=[], difference="step 2 is off")
    assert report.is_fine
    assert "step 2 is off, and none of the usual causes shows" in str(report.compared)
    report = examined(monkeypatch, causes=[])
    assert str(report.compared) == "Compared with one process over 5 steps: the same but for rounding."
    assert report.summary().endswith(
        "nothing found (read, and run for 1 step, and compared: 1 loader, 1 wrapped model)."
    )


def test_its_time_is_said_first_and_a_failure_is_no_finding(monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []

    def fails(*args: Any, **kwargs: Any) -> Any:
        assert said, "how long it takes"
        raise UsageError("train.py on 1 rank, failed with status 1. It said:\nmuch")

    monkeypatch.setattr(runs, "watch", lambda *args, **kwargs: evidence())
    monkeypatch.setattr(comparing, "verify_ranks", fails)
    report = examine(str(SCRIPT), say=said.append)
    assert report.is_fine
    assert said == [f"{SCRIPT} is compared with one process: about 1 s (--no-verify leaves it out)"]
    assert report.notes == [
        f"{SCRIPT} couldn't be compared with one process: train.py on 1 rank, failed with status 1. It said:"
    ]
    assert (report.compared, "compared" in report.summary()) == (None, False)
