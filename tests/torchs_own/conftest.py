"""torch's own programs take minutes: in a run of all tests only a sample of them is played."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenstep.testing import RankPool


@pytest.fixture(scope="module")
def ranks(ranks: RankPool) -> RankPool:
    """New processes: earlier tests leave a process group in theirs, and these programs make one."""
    ranks.close()
    return ranks


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip, and count, what has a make target of its own."""
    here = Path(__file__).parent
    if any(here.name in argument for argument in config.args):
        return
    for item in items:
        if here in item.path.parents and item.get_closest_marker("brief") is None:
            item.add_marker(pytest.mark.skip(reason="torch's own programs are played by `make test-torch PART=own`"))
