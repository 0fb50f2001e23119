"""The documented thresholds are those of the code."""

from __future__ import annotations

import re

from evenstep.tools.observing import thresholds
from tests import pages


def test_the_page_lists_every_threshold_with_its_value() -> None:
    rows = re.findall(r"^\| `([A-Z_]+)` \| ([0-9.]+) \|", pages.text("reference/thresholds.md"), re.MULTILINE)
    documented = {name: float(value) for name, value in rows}
    assert len(documented) == len(rows), "a threshold is listed twice"
    assert documented == {name: float(value) for name, value in vars(thresholds).items() if name.isupper()}
