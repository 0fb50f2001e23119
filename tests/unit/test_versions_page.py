"""docs/reference/versions.md: the pairs of torch and python on which the tests were run."""

from __future__ import annotations

import re
from pathlib import Path

from tests import pages

ROOT = Path(__file__).parents[2]


def test_the_package_promises_the_pythons_of_the_table():
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in pages.text("reference/versions.md").splitlines()
        if re.match(r"\| 2\.\d+\.\d+ \|", line)
    ]
    promised = set(re.findall(r'"Programming Language :: Python :: (\d\.\d+)"', (ROOT / "pyproject.toml").read_text()))
    assert promised == {python for _, _, python, *_ in rows}
    assert {wheel for _, wheel, *_ in rows} == {"CPU", "CUDA"}
