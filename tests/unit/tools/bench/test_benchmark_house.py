"""How `benchmarks/house.py` counts."""

from __future__ import annotations

from typing import Any

import pytest

from tests import modules

TEXT = '''"""Of a module.

With a blank line.
"""

import os  # not a comment's line


# a comment
def f() -> str:
    """Of a function."""
    # another
    return """a text

with a blank line"""
'''


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(modules.ROOT)
    return modules.load(modules.ROOT / "benchmarks" / "house.py", monkeypatch)


def test_every_line_is_counted_once(house):
    counts = house.count_lines(TEXT)
    assert counts == {"docstring": 5, "code": 5, "comment": 2, "blank": 3}
    assert counts.total() == len(TEXT.splitlines())


def test_an_empty_file_has_no_lines(house):
    assert house.count_lines("").total() == 0


def test_circles_are_found_in_the_package_that_has_them(house):
    imports = {
        "evenstep.a.b": {"evenstep.a.c.d", "evenstep.e"},
        "evenstep.a.c.d": {"evenstep.a.c.f"},
        "evenstep.a.c.f": {"evenstep.a.b"},
        "evenstep.e": set(),
    }
    assert house.circles(imports, ["a", "a.c"]) == ["a"]


@pytest.mark.extended
def test_this_checkout_is_counted(house):
    """Everything but the time of an import."""
    counted = house.count(modules.ROOT)
    assert counted["upward_imports"] == []
    assert counted["lines"]["src"]["code"] > counted["lines"]["src"]["docstring"] > 0
    elastic = modules.ROOT / "src" / "evenstep" / "launcher" / "elastic"
    assert counted["entries"]["launcher.elastic"] == len(list(elastic.glob("[!_]*.py"))) > 0
    assert len(house.rows(counted)) > 10
