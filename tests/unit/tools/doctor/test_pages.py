"""The pages of the rules: each rule's wrong example is found, and its right one isn't."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

pytest.importorskip("libcst")

from evenstep.tools.doctor import rules
from evenstep.tools.doctor.examination import read
from evenstep.tools.doctor.rule import Rule, Severity
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


NEW = '''"""two loops (note).

The script has two loops.

It takes twice as long.

Wrong:

```python
for x in a: ...
```

Right:

```python
x = 1
```

Ignore it always.
"""

from evenstep.tools.doctor.asking import Found, Script, found


def read(script: Script) -> Found:
    """All of them."""
    for loop in script.loops:
        yield found((loop.frame.file, loop.line), "a loop")
'''


def test_a_new_file_is_a_new_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No list names the rules; a rule that lacks a part is refused."""
    monkeypatch.setattr(rules, "__path__", [str(tmp_path)])
    (tmp_path / "EV599.py").write_text(NEW)
    (rule,) = rules.rules_in(tmp_path).values()
    assert (rule.id, rule.name, rule.group, rule.severity, rule.found_by) == (
        "EV599",
        "two loops",
        "step",
        Severity.NOTE,
        "reading",
    )
    assert (rule.what, rule.why, rule.mend) == ("The script has two loops.", "It takes twice as long.", "x = 1")
    for part, name in (("Wrong", "EV598"), ("(note)", "EV597"), ("def read", "EV596")):
        (tmp_path / f"{name}.py").write_text(NEW.replace(part, "def other" if part == "def read" else "?"))
        importlib.invalidate_caches()
        with pytest.raises(ValueError, match=f"{name} lacks a part"):
            Rule.of(importlib.import_module(f"{rules.__name__}.{name}"))
