"""Cases of others, as `benchmarks/published.py` simulates them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tests import modules, pages


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Any:
    return modules.load(modules.ROOT / "benchmarks" / "published.py", monkeypatch)


def test_models_have_the_sizes_of_their_papers(published: Any) -> None:
    """Parameters exactly; multiplications of a forward pass over 224 x 224 pixels."""
    found = {
        name: published.resnet(depths)
        for name, depths in {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}.items()
    }
    found[16] = published.vgg16()
    numel = {name: sum(layer.numel for layer in layers) for name, layers in found.items()}
    assert numel == {50: 25_557_032, 101: 44_549_160, 152: 60_192_808, 16: 138_357_544}
    operations = {name: round(sum(layer.operations for layer in layers) / 1e9, 1) for name, layers in found.items()}
    assert operations == {50: 4.1, 101: 7.8, 152: 11.5, 16: 15.5}


def test_fusion_loses_nothing(published: Any) -> None:
    ready = list(published.ready_times(published.resnet((3, 4, 6, 3)), 0.1))
    for fuse in (published.by_size, published.by_cycle):
        buckets = fuse(ready)
        assert sum(bucket.num_bytes for bucket in buckets) == 4 * 25_557_032
        assert [bucket.ready_s for bucket in buckets] == sorted(bucket.ready_s for bucket in buckets)
    assert all(bucket.num_bytes <= 64 << 20 for bucket in published.by_cycle(ready))


def test_the_table_in_the_documentation_is_what_the_command_prints() -> None:
    command = [sys.executable, str(modules.ROOT / "benchmarks" / "published.py")]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert printed.count("\n") == 7
    assert printed in pages.text("contributing/predictions-measured.md")


def test_cases_are_named_once_and_simulated_within_reason(published: Any) -> None:
    rows = [(case.source, case.model) for case in published.cases()]
    assert len(set(rows)) == len(rows) == 5
    assert all(0.3 < case.efficiency() <= 1.0 for case in published.cases())
