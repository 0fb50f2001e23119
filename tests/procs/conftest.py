"""Fresh random inputs for every run of the tests, which can be had again."""

from __future__ import annotations

import os
import secrets

import pytest


@pytest.fixture
def fresh_seed() -> int:
    """A new seed each time; printed, and so shown when the test fails. EVENSTEP_TEST_SEED repeats one."""
    given = os.environ.get("EVENSTEP_TEST_SEED")
    seed = int(given) if given else secrets.randbits(31)
    print(f"EVENSTEP_TEST_SEED={seed}")  # noqa: T201
    return seed
