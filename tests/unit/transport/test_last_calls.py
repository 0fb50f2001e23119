"""The record of the last calls, in the words of an error."""

from __future__ import annotations

import pytest
import torch

from evenstep.transport.core import last_calls
from evenstep.transport.core.header import Fingerprint
from evenstep.transport.core.last_calls import RecordedGroup, describe_last_calls, record


@pytest.fixture(autouse=True)
def no_calls() -> None:
    last_calls._calls.clear()


def test_states_and_shapes() -> None:
    """One call has ended, one has begun, one waits for its turn."""
    group = RecordedGroup("ab12", "shared memory")
    record((group, 1, Fingerprint("all_reduce", "sum", torch.float32, (3, 4)).pack()))
    record((group, 2, Fingerprint("all_gather", None, torch.bfloat16, (5,)).pack()))
    record((group, 3, Fingerprint("reduce_scatter", "sum", torch.int64, (6,))))
    group.num_completed, group.num_started = 1, 2
    assert describe_last_calls().splitlines() == [
        "",
        "The last calls of this rank, oldest first:",
        "  all_reduce number 1, float32 [3, 4] over shared memory, group ab12: completed",
        "  all_gather number 2, bfloat16 [5] over shared memory, group ab12: started",
        "  reduce_scatter number 3, int64 [6] over shared memory, group ab12: scheduled",
    ]
