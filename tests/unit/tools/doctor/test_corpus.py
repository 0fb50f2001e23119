"""The scripts of tests/scripts: each planted mistake is found by reading, at its line, and nothing else is."""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path

import pytest

pytest.importorskip("libcst")

from evenstep.tools.doctor.examination import read
from evenstep.tools.doctor.rules import all_rules

ROOT = Path(__file__).parents[4]
PLANTED = sorted((ROOT / "tests" / "scripts" / "planted").glob("*.py"))
CLEAN = sorted((ROOT / "tests" / "scripts" / "clean").glob("*.py"))
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))


def planted(script: Path) -> tuple[str, int, bool]:
    """(rule, line, whether reading finds it) of a script's first comment."""
    match = re.match(r"# planted: (EV\d+), line (\d+)(, seen by running only)?\n", script.read_text())
    assert match, f"{script.name} doesn't begin with its mistake"
    return match[1], int(match[2]), match[3] is None


@pytest.mark.parametrize("script", PLANTED, ids=lambda path: path.stem)
def test_a_planted_mistake_is_found_at_its_line_and_nothing_else(script: Path):
    rule, line, is_read = planted(script)
    found = [(each.rule, each.line) for each in read(script).findings]
    assert found == ([(rule, line)] if is_read else [])


@pytest.mark.parametrize("script", CLEAN, ids=lambda path: path.stem)
def test_nothing_is_found_in_a_clean_script(script: Path):
    received = read(script)
    assert received.findings == []
    assert received.notes == []


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_nothing_is_found_in_our_examples(script: Path):
    received = read(script)
    ignored = received.ignored
    assert [each for each in received.findings if each.rule not in ignored.get((each.path, None, each.line), ())] == []


def test_every_rule_is_planted():
    rules = {planted(script)[0] for script in PLANTED}
    assert rules == set(all_rules())
    only_run = {key for key, rule in all_rules().items() if rule.read is None}
    assert {rule for rule, _, is_read in map(planted, PLANTED) if not is_read} >= only_run
    assert len(PLANTED) >= 60
    assert len(CLEAN) >= 60


@pytest.mark.extended
@pytest.mark.parametrize("script", [*PLANTED, *CLEAN], ids=lambda path: path.stem)
def test_renamed_variables_change_nothing(script: Path, tmp_path: Path):
    """What a finding rests on is what names stand for, and not how they are spelt: loops over `loader` by any name."""
    tree = ast.parse(script.read_text())
    assigned = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    renamed = {
        name: f"{name}_" for name in assigned & {"loader", "dataset", "sampler", "optimizer", "model", "train_set"}
    }
    parameters = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    renamed = {name: new for name, new in renamed.items() if name not in parameters}
    if not renamed:
        return
    pattern = re.compile(rf"(?<![\w.'\"])(?:{'|'.join(renamed)})(?![\w'\"]|=[^=])")
    before = [(each.rule, each.line) for each in read(script).findings]
    lines = [pattern.sub(lambda match: renamed[match[0]], line) for line in script.read_text().split("\n")]
    copy = tmp_path / script.name
    parts = script.with_name(f"{script.stem}_parts")
    if parts.is_dir():
        shutil.copytree(parts, tmp_path / parts.name)
    copy.write_text("\n".join(lines))
    assert [(each.rule, each.line) for each in read(copy).findings] == before
