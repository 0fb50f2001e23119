"""Transports that are made of others."""

from __future__ import annotations

import pytest
import torch

from evenstep.transport.core.staged import StagedMessages
from evenstep.transport.core.transport import Transport
from evenstep.transport.local import LocalTransport
from evenstep.transport.tree_order import OrderedTransport


@pytest.mark.parametrize("kind", ["ordered", "staged"])
def test_a_deadline_is_that_of_all_parts(kind: str) -> None:
    """Else the short one at the end of a run wouldn't be kept."""
    parts = [LocalTransport(), LocalTransport()]
    made: Transport = OrderedTransport(parts[0], parts[1:])
    if kind == "staged":
        made = StagedMessages(made, torch.device("cpu"))
    made.set_timeout(3.5)
    assert [each.timeout_s for each in (made, *parts)] == [3.5] * 3
    made.close()
