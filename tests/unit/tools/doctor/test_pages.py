"""The pages of the rules: each rule's wrong example is found, and its right one isn't."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("libcst")

from evenstep.tools.doctor.examination import read
from evenstep.tools.doctor.rule import Rule
from evenstep.tools.doctor.rules import all_rules
from tests import pages


def common_lines() -> str:
    """What the examples leave out, as docs/reference/doctor.md says."""
    text = pages.text("reference/doctor.md")
    section = text[text.index("## Examples") :]
    return re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]  # type: ignore[index]


@pytest.mark.parametrize("rule", all_rules().values(), ids=lambda rule: rule.id)
def test_a_page_says_when_to_ignore_its_rule_which_finds_the_wrong_example_alone(rule: Rule, tmp_path: Path):
    common = common_lines()
    if rule.group == "starting":
        common = "\n".join(line for line in common.split("\n") if line.startswith(("import", "from")))
    found = {}
    for name, example in (("wrong", rule.wrong), ("right", rule.right)):
        script = tmp_path / f"{name}.py"
        script.write_text(f"{common}\n{example}")
        found[name] = {each.rule for each in read(script).findings}
    assert re.search(r"[Ii]gnore\s(?:it|the\srule)", rule.text)
    assert rule.id not in found["right"]
    assert (rule.id in found["wrong"]) is (rule.read is not None)
