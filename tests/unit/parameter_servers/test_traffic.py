"""What a worker counts of its pushes, pulls and lookups."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import evenstep
from evenstep.errors import UsageError
from evenstep.parameter_servers.embeddings.rows import RowGradients
from evenstep.parameter_servers.traffic import OnAnswer, Traffic, payload_bytes


def test_bytes_are_those_of_tensors():
    rows = RowGradients(torch.zeros(3, dtype=torch.int64), torch.zeros(3, 2), 0.1)
    assert payload_bytes(["text", 3, None, {"t": rows}, (torch.zeros(5, dtype=torch.bfloat16),)]) == 24 + 24 + 10


def test_calls_are_counted_by_server():
    traffic = Traffic(2)
    sent = [torch.zeros(4), torch.zeros(1)]

    def start(on_answer: OnAnswer) -> Callable[[], list[torch.Tensor]]:
        def finish() -> list[torch.Tensor]:
            on_answer(1)
            time.sleep(0.02)
            return [torch.zeros(2), torch.zeros(3)]

        return finish

    traffic.rates()
    for _ in range(3):
        traffic.call("push", sent, start)()
    traffic.call("pull", (), start)  # not waited for yet
    assert (traffic.sent, traffic.received) == ([48, 12], [24, 36])
    assert traffic.num == {"push": 3, "pull": 1, "lookup": 0}
    rates = traffic.rates()
    seconds = 3 / rates["pushes_per_s"]
    assert rates["sent_bytes_per_s"] * seconds == pytest.approx(60)
    assert rates["server_1/received_bytes_per_s"] * seconds == pytest.approx(36)
    assert 0 < rates["waiting_share"] <= 1
    assert traffic.waited_s >= 0.06
    assert rates["server_1/waiting_share"] < rates["server_0/waiting_share"] == rates["waiting_share"]
    assert not any(traffic.rates().values()), "nothing since then"


def test_a_wait_that_fails_is_counted():
    traffic = Traffic(1)

    def finish() -> list[None]:
        time.sleep(0.01)
        raise ConnectionError

    with pytest.raises(ConnectionError):
        traffic.call("lookup", [None], lambda _: finish)()
    assert traffic.waited_s >= 0.01


def test_a_logger_takes_a_workers_numbers(tmp_path: Path):
    with evenstep.parameter_server(lambda: nn.Linear(2, 1), lambda p: torch.optim.SGD(p, lr=0.1)) as ps:
        assert math.isnan(ps.traffic()["staleness"])
        logger = evenstep.Logger(tmp_path, world=evenstep.World.alone())
        for _ in range(4):
            ps.backward(ps(torch.ones(1, 2)).sum())
            ps.step()
        ps.pull()
        logger.log(ps.traffic(), step=4)
        logger.close()
        traffic = ps._traffic
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    found = json.loads(line)
    assert found["staleness"] == 0
    assert found["pushes_per_s"] == pytest.approx(4 * found["pulls_per_s"])
    assert found["server_0/sent_bytes_per_s"] == found["sent_bytes_per_s"] > 0
    assert traffic.sent == [4 * 3 * 4], "four gradients of three numbers"
    assert traffic.received == [5 * 3 * 4], "and parameters after each push, and of the pull"
    with pytest.raises(UsageError, match="inside"):
        ps.traffic()
