"""docs/reference/doctor: a section for each rule, whose wrong example is found and whose right one isn't."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("libcst")

from evenstep.tools.doctor.examination import read
from evenstep.tools.doctor.rules import GROUPS, RULES, FoundBy
from tests import pages


def sections(group: str) -> dict[str, str]:
    """By rule, its section of a group's page."""
    text = pages.text(f"reference/doctor/{group}.md")
    parts = re.split(r"^## (EV\d+)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def common_lines() -> str:
    """What the examples leave out, as docs/reference/doctor.md says."""
    text = pages.text("reference/doctor.md")
    section = text[text.index("## Examples") :]
    return re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]  # type: ignore[index]


@pytest.mark.parametrize("group", GROUPS)
def test_a_page_has_its_rules_in_order(group: str):
    assert list(sections(group)) == [rule.id for rule in RULES.values() if rule.group == group]


@pytest.mark.parametrize("rule", RULES)
def test_a_rules_section_is_complete(rule: str):
    section = sections(RULES[rule].group)[rule]
    assert section.index("Wrong:") < section.index("Right:")
    assert re.search(r"[Ii]gnore (?:it|the rule)", section), "when to ignore it"
    bold = re.search(r"\*\*(.+?)\.?\*\*", section)
    assert bold is not None
    assert bold[1].replace("`", "").lower() == RULES[rule].name.lower()


@pytest.mark.parametrize("rule", RULES)
def test_its_wrong_example_is_found_and_its_right_one_is_not(rule: str, tmp_path: Path):
    section = sections(RULES[rule].group)[rule]
    wrong, right = re.findall(r"(?:Wrong|Right):\n\n```python\n(.*?)```", section, flags=re.DOTALL)
    common = common_lines()
    if RULES[rule].group == "starting":
        common = "\n".join(line for line in common.split("\n") if line.startswith(("import", "from")))
    found = {}
    for name, example in (("wrong", wrong), ("right", right)):
        script = tmp_path / f"{name}.py"
        script.write_text(f"{common}\n{example}")
        found[name] = {each.rule for each in read(script).findings}
    assert rule not in found["right"]
    if RULES[rule].found_by is not FoundBy.RUNNING:
        assert rule in found["wrong"]
