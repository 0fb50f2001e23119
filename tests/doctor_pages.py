"""The pages of `docs/reference/doctor/`: what stands above the first rule, and under it the text of the rules' files.

`python -m tests.doctor_pages` writes them.
"""

from __future__ import annotations

from evenstep.tools.doctor.rule import GROUPS
from evenstep.tools.doctor.rules import all_rules
from tests.pages import DOCS


def page(group: str, text: str) -> str:
    """A group's page, with the head that it has now."""
    head = text.partition("## EV")[0].rstrip("\n")
    sections = [rule.section for rule in all_rules().values() if rule.group == group]
    return "\n\n".join([head, *(each.rstrip("\n") for each in sections)]) + "\n"


if __name__ == "__main__":
    for group in GROUPS:
        path = DOCS / "reference" / "doctor" / f"{group}.md"
        path.write_text(page(group, path.read_text()))
