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
from evenstep.parameter_servers.server.shard import Pushed, Shard

MODE = Mode("async")


class Endpoint:
    """Notes what is sent. Answers come when the test gives them."""

    me = Peer("server 0", "server-0", "here")

    def __init__(self, *_: Any, **options: Any) -> None:
        self.calls: list[tuple[str, str, tuple[object, ...]]] = []  # (role, method, arguments)
        self.answers: dict[str, Future[Any]] = {}  # to the last call of each role
        self.lost: dict[str, Callable[[], object]] = {}  # what is to be called then, by role

    def find(self, role: str) -> Peer:
        return Peer(role, role, "there")

    def watch(self, peer: Peer, on_lost: Callable[[], object]) -> None:
        self.lost[peer.role] = on_lost

    def call(self, peer: Peer, method: str, *arguments: object, **options: Any) -> Future[Any]:
        self.calls.append((peer.role, method, arguments))
        self.answers[peer.role] = Future()
        return self.answers[peer.role]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], tuple[serving.Server, Endpoint]]:
    """Makes server number `n` of a run with `num_workers`, whose endpoint is the above."""
    monkeypatch.setattr(serving, "Endpoint", Endpoint)

    def build() -> Shard:
        parameter = nn.Parameter(torch.zeros(2))
        return Shard({"p": parameter}, torch.optim.SparseAdam([parameter]), MODE)  # fails with a dense gradient

    def server(number: int, num_workers: int) -> tuple[serving.Server, Endpoint]:
        found = serving.Server(
            Roles(num_workers + number, num_workers, number + 1),
            HashStore(),
            MODE,
            build,
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


def test_a_worker_that_is_killed_after_it_has_left_is_not_waited_for_when_servers_go_back(make: Any):
    server, endpoint = make(0, 3)
    server._begin_era(float("inf"), None)
    members = [server.join(worker, f"worker-{worker}", "there")[1] for worker in range(3)]
    left = [server.leave(1, (member, 1), "", False) for member in members[:2]]
    endpoint.lost["worker 0"]()
    assert left[0].value().is_outdated, "it joins again, if only its connection has broken"
    assert server._end_era() == {1, 2}


def test_a_run_ends_when_all_have_left_and_one_of_them_was_killed(make: Any):
    server, endpoint = make(0, 2)
    server._begin_era(float("inf"), None)
    first, second = [server.join(worker, f"worker-{worker}", "there")[1] for worker in range(2)]
    server.leave(1, (first, 1), "", False)
    endpoint.lost["worker 0"]()
    assert server.leave(1, (second, 1), "", False).done()
    assert server._has_ended


def test_a_server_says_that_it_has_failed_before_its_workers_know(make: Any):
    """They would report it as their own failure, and be named for it."""
    server, endpoint = make(1, 1)
    server.begin(1, None, Endpoint.me)
    pushed = Pushed(1.0, 0, [True], [torch.ones(2)])
    answer = server.ask(1, (1, 1), pushed)
    said: list[Any] = []
    answer.add_done_callback(lambda _: said.extend(endpoint.calls))
    server.execute(1, Decision(1, applied=[(1, 1)]))
    assert "SparseAdam" in answer.value().failure
    assert [method for _, method, _ in said] == ["notice", "failed"]
    assert said[1][2][1].startswith("server 1 (rank 2): its optimizer failed: RuntimeError: SparseAdam")


def test_workers_that_have_not_come_are_asked_and_the_server_goes_on_meanwhile(
    make: Any, monkeypatch: pytest.MonkeyPatch
):
    """Those that don't answer in time are given up."""
    monkeypatch.setattr(serving, "_REJOIN_S", -1.0)
    server, endpoint = make(0, 3)
    server._begin_era(float("inf"), {0, 1, 2})
    server._give_up_at = 0.0
    server.join(0, "worker-0", "there")
    for _ in range(2):  # it waits for nobody's answer
        server._give_up_missing()
    assert list(endpoint.answers) == ["worker 1", "worker 2"]
    endpoint.answers["worker 1"].set_result(None)
    server._give_up_missing()
    assert server._coordinator.expected == {1, 2}
    endpoint.answers["worker 2"].set_exception(RuntimeError("timeout"))
    server._give_up_missing()
    assert server._coordinator.expected == {1}
