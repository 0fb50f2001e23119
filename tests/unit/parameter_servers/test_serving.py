"""A server's process without the others: what it does when they come, go or fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import HashStore
from torch.futures import Future

from evenstep.parameter_servers.remote import Peer
from evenstep.parameter_servers.roles import Roles
from evenstep.parameter_servers.server import serving
from evenstep.parameter_servers.server.coordinator import Decision, Mode
from evenstep.parameter_servers.server.shard import GIVEN_UP, Pushed, Shard

MODE = Mode("async")


class Endpoint:
    """Notes what is sent. Only "begin" is answered."""

    me = Peer("server 0", "server-0", "here")

    def __init__(self, *_: Any, **options: Any) -> None:
        self.calls: list[tuple[str, str, tuple[object, ...]]] = []  # (role, method, arguments)
        self.lost: dict[str, Callable[[], object]] = {}  # what is to be called then, by role

    def find(self, role: str) -> Peer:
        return Peer(role, role, "there")

    def watch(self, peer: Peer, on_lost: Callable[[], object]) -> None:
        self.lost[peer.role] = on_lost

    def call(self, peer: Peer, method: str, *arguments: object, **options: Any) -> Future[Any]:
        self.calls.append((peer.role, method, arguments))
        future: Future[Any] = Future()
        if method == "begin":
            future.set_result(None)
        return future


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[serving.Server, Endpoint]]:
    """Makes server number `n` of a run with `num_workers`, whose endpoint is the above."""
    monkeypatch.setattr(serving, "Endpoint", Endpoint)

    def server(number: int, num_workers: int, num_servers: int | None = None) -> tuple[serving.Server, Endpoint]:
        parameter = nn.Parameter(torch.zeros(2))
        found = serving.Server(
            Roles(num_workers + number, num_workers, num_servers or number + 1),
            HashStore(),
            MODE,
            Shard({"p": parameter}, torch.optim.SparseAdam([parameter]), MODE),  # fails with a dense gradient
            {},
            checkpoints=None,
            has_checkpoints=True,
            interface=None,
            timeout_s=60,
        )
        endpoint = found._endpoint
        assert isinstance(endpoint, Endpoint)
        return found, endpoint

    return server


def test_a_run_ends_when_all_have_left_and_one_of_them_was_killed(make: Any):
    server, endpoint = make(0, 2)
    server._begin_run()
    for worker in range(2):
        assert not server.join(worker, f"worker-{worker}", "there")
    left = server.leave((0, 1), "")
    endpoint.lost["worker 0"]()
    assert left.value().failure == GIVEN_UP, "it ends with an error, if only its connection has broken"
    assert server.leave((1, 1), "").done()
    assert server._has_ended


def test_a_lost_server_ends_the_run_for_all_that_wait_and_come(make: Any):
    server, endpoint = make(0, 2, 2)
    server._begin_run()
    server.join(0, "worker-0", "there")
    waiting = server.ask((0, 1), Pushed(1.0, 0, [True], [torch.ones(2)]))
    endpoint.lost["server 1"]()
    assert waiting.value().failure == "server 1 (rank 3) was lost"
    assert server.join(1, "worker-1", "there") == "server 1 (rank 3) was lost"
    assert server.take((0, 2), (1, 0, 0), 5, "").failure == "server 1 (rank 3) was lost"
    (role, method, (decision,)) = endpoint.calls[-1]
    assert (role, method, decision.failure) == ("server 1", "execute", "server 1 (rank 3) was lost")


def test_a_lost_first_server_ends_the_others(make: Any):
    server, endpoint = make(1, 1)
    server.begin(None, Endpoint.me)
    waiting = server.ask((0, 1), Pushed(1.0, 0, [True], [torch.ones(2)]))
    endpoint.lost["server 0"]()
    server._follow()
    assert server._failure == waiting.value().failure == "server 0 (rank 1) was lost"


def test_a_server_says_that_it_has_failed_before_its_workers_know(make: Any):
    """They would report it as their own failure, and be named for it."""
    server, endpoint = make(1, 1)
    server.begin(None, Endpoint.me)
    pushed = Pushed(1.0, 0, [True], [torch.ones(2)])
    answer = server.ask((0, 1), pushed)
    said: list[Any] = []
    answer.add_done_callback(lambda _: said.extend(endpoint.calls))
    server.execute(Decision(1, applied=[(0, 1)]))
    assert "SparseAdam" in answer.value().failure
    assert [method for _, method, _ in said] == ["notice", "failed"]
    assert said[1][2][0].startswith("server 1 (rank 2): its optimizer failed: RuntimeError: SparseAdam")


def test_workers_that_have_not_come_in_time_are_given_up(make: Any):
    server, _ = make(0, 3)
    server._begin_run()
    server.join(0, "worker-0", "there")
    server._give_up_missing()
    assert server._coordinator.expected == {1, 2}
    server._give_up_at = 0.0
    server._give_up_missing()
    assert server._coordinator.expected == set()
    assert not server.join(1, "worker-1", "there"), "it takes part from now on"
    assert server._coordinator.members == {0, 1}
