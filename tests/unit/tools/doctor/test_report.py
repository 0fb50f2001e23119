"""Reports and the command line: text, JSON, SARIF, exit statuses, wrong calls."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("libcst")

from evenstep.cli.main import main
from evenstep.tools.doctor.examination import chosen_rules, examine
from evenstep.tools.doctor.rules import all_rules
from evenstep.tools.doctor.run import runs
from evenstep.tools.doctor.run.events import Event, Evidence

SCRIPTS = Path(__file__).parents[3] / "scripts"
PRINTS = SCRIPTS / "planted" / "tutorial_print.py"
CLEAN = SCRIPTS / "clean" / "tutorial.py"
NOTE = SCRIPTS / "planted" / "no_destroy.py"


@pytest.mark.parametrize(("script", "status"), [(PRINTS, 1), (CLEAN, 0), (NOTE, 0)])
def test_the_exit_status_says_whether_there_are_findings(script: Path, status: int, capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "--no-run", str(script)]) == status
    output = capsys.readouterr().out
    assert ("nothing found (read: 1 loader, 1 wrapped model)" in output) == (script == CLEAN)
    assert ("0 findings, 1 note (read: 1 loader, 1 wrapped model)" in output) == (script == NOTE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: script"),
        (
            ["--ranks", "two", "train.py"],
            "argument --nproc-per-node: 'two' is no whole number",
        ),
        (["--nonsense", "train.py"], "--nonsense"),
        (["--no-run", "nowhere/train.py"], "nowhere/train.py: no such script"),
        (["--select", "EV999", str(CLEAN)], "--select EV999: there is no such rule. Did you mean"),
        (["--json", "nowhere/out.json", str(CLEAN)], "--json nowhere/out.json: can't be written"),
    ],
)
def test_a_wrong_call_ends_with_78_and_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", *arguments]) == 78
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1


def test_a_script_that_fails_ends_with_2_and_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """With findings of reading it is 1: they are there whether or not the script runs."""
    facts = {"type": "RuntimeError", "message": "no data\nmuch more"}
    failed = [
        Event("start", facts={"pid": 1}),
        Event("raised", 1.0, places=[(str(CLEAN), 12)], facts=facts),
        Event("end", 1.0, facts={"status": "1"}),
    ]
    monkeypatch.setattr(runs, "watch", lambda *args, **kwargs: Evidence([failed, failed], status=1, said="much"))
    assert main(["doctor", "--json", str(tmp_path / "a.json"), str(CLEAN)]) == 2
    output = capsys.readouterr().out
    assert f"The script failed at {CLEAN}:12, before its first step: RuntimeError: no data." in output
    assert f"{CLEAN}: the script failed; nothing found (read, and run for 0 steps:" in output
    result = json.loads((tmp_path / "a.json").read_text())
    assert (result["fine"], result["failed"]) == (False, True)
    assert main(["doctor", str(PRINTS)]) == 1


@pytest.mark.extended(beyond=1)
@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [(["--no-run", str(CLEAN)], 78, "pip install 'evenstep[doctor]'"), (["--help"], 0, "")],
)
def test_a_missing_libcst_is_a_wrong_call(arguments: list[str], status: int, told: str):
    """In a new process, which has imported nothing yet."""
    program = (
        "import sys; sys.modules['libcst'] = None; from evenstep.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run([sys.executable, "-c", program, "doctor", *arguments], capture_output=True, text=True)
    assert (done.returncode, told in done.stderr) == (status, True), done.stderr
    assert "Traceback" not in done.stderr


def test_rules_are_chosen_by_id_beginning_and_group():
    data = {key for key, rule in all_rules().items() if rule.group == "data"}
    assert chosen_rules([], []) == set(all_rules())
    assert chosen_rules(["data"], []) == chosen_rules(["EV1"], []) == data
    assert chosen_rules(["ev1", "EV401"], ["EV102"]) == (data | {"EV401"}) - {"EV102"}
    for options in ({"ignore": ["EV201"]}, {"select": ["data", "EV4"]}):
        assert examine(str(PRINTS), runs=False, **options).findings == []


def test_options_behind_the_script_are_told_of(capsys: pytest.CaptureFixture[str]):
    main(["doctor", "--no-run", str(CLEAN), "--select", "data"])
    assert "--select stands behind the script, so it was given to the script" in capsys.readouterr().err


def test_json_has_every_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    target = tmp_path / "doctor.json"
    assert main(["doctor", "--no-run", "--json", str(target), str(PRINTS)]) == 1
    result = json.loads(target.read_text())
    assert (result["version"], result["fine"], result["steps"], result["notes"]) == (2, False, None, [])
    (finding,) = result["findings"]
    assert (finding["rule"], finding["path"], finding["line"], finding["column"]) == ("EV201", str(PRINTS), 20, 9)
    assert finding["confirmed"] is False
    assert finding["mend"].startswith("if dist.get_rank() == 0:\n    print(")


def test_sarif_names_each_rule_once_and_each_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    target = tmp_path / "doctor.sarif"
    script = tmp_path / "my train.py"
    script.write_text(PRINTS.read_text().replace("        print(", "        print(epoch)\n        print("))
    assert main(["doctor", "--no-run", "--sarif", str(target), str(script)]) == 1
    log = json.loads(target.read_text())
    (run,) = log["runs"]
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["EV201"]
    assert [result["ruleIndex"] for result in run["results"]] == [0, 0]
    for result, line in zip(run["results"], (20, 21), strict=True):
        location = result["locations"][0]["physicalLocation"]
        assert location["artifactLocation"]["uri"] == script.as_uri()  # it doesn't lie below the working directory
        assert location["region"] == {"startLine": line, "startColumn": 9}
