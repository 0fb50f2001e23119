"""What tests of checkpoints on ranks share."""

from __future__ import annotations

import pytest

from tests.checkpoint_runs import PatientRanks


@pytest.fixture
def ranks(ranks):
    return PatientRanks(ranks)
