"""How `benchmarks/house.py` counts."""

from __future__ import annotations

from typing import Any

import pytest

from tests import modules


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(modules.ROOT)
    return modules.load(modules.ROOT / "benchmarks" / "house.py", monkeypatch)


@pytest.mark.extended
def test_this_checkout_is_counted(house):
    """Everything but the time of an import."""
    counted = house.count(modules.ROOT)
    assert counted["upward_imports"] == []
    assert counted["lines"]["src"]["code"] > counted["lines"]["src"]["docstring"] > 0
    elastic = modules.ROOT / "src" / "evenstep" / "launcher" / "elastic"
    assert counted["entries"]["launcher.elastic"] == len(list(elastic.glob("[!_]*.py"))) > 0
    assert len(house.rows(counted)) > 10
