"""The documented thresholds are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

from evenstep.observe import thresholds

PAGE = Path(__file__).parents[3] / "docs" / "thresholds.md"


def test_the_page_lists_every_threshold_with_its_value() -> None:
    rows = re.findall(r"^\| `([A-Z_]+)` \| ([0-9.]+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    documented = {name: float(value) for name, value in rows}
    assert len(documented) == len(rows), "a threshold is listed twice"
    assert documented == {name: float(value) for name, value in vars(thresholds).items() if name.isupper()}
