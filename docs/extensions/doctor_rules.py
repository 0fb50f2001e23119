"""The page reference/doctor/rules: the docstring of each rule's file is a section."""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx

from evenstep.tools.doctor.rules import all_rules


def add_rules(_: Sphinx, name: str, source: list[str]) -> None:
    """Add the sections to the text of the page."""
    if name == "reference/doctor/rules":
        source[0] = "\n\n".join([source[0], *(rule.section for rule in all_rules().values())])


def setup(app: Sphinx) -> dict[str, Any]:
    """Call `add_rules` for each page."""
    app.connect("source-read", add_rules)
    return {"parallel_read_safe": True}
