"""What a server lets through when: no processes."""

from __future__ import annotations

import random

import pytest
import torch
from torch.futures import Future

from evenstep.parameter_servers.shard import Answer, Mode, Pushed, Shard


def shard(mode: Mode, num_workers: int) -> tuple[Shard, torch.nn.Parameter]:
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    return Shard([parameter], torch.optim.SGD([parameter], lr=1.0), mode, num_workers), parameter


def pushed(gradient: float, *, weight: float = 1.0, version: int = 0) -> Pushed:
    return Pushed(weight, version, [weight > 0], [torch.full((2,), gradient * weight, dtype=torch.float64)])


def test_sync_waits_for_all_and_applies_their_weighted_mean():
    server, parameter = shard(Mode("sync"), 3)
    first = server.push(2, pushed(3.0, weight=5))
    second = server.push(0, pushed(1.0, weight=1))
    assert not first.done()
    assert not second.done()
    assert server.lagging() == [(1, 0)]
    third = server.push(1, pushed(7.0, weight=0))
    assert all(each.done() for each in (first, second, third))
    torch.testing.assert_close(parameter.detach(), torch.full((2,), -16 / 6, dtype=torch.float64))
    answer: Answer = third.wait()
    assert answer.version == 1
    assert torch.equal(answer.parameters[0], parameter.detach())


def test_a_step_of_empty_shares_changes_nothing():
    server, parameter = shard(Mode("sync"), 2)
    server.push(0, pushed(1.0, weight=0))
    assert server.push(1, pushed(1.0, weight=0)).wait().version == 0
    assert parameter.abs().sum() == 0


def test_sync_goes_on_without_a_worker_that_has_left():
    server, _ = shard(Mode("sync"), 2)
    waiting = server.push(0, pushed(1.0))
    left = server.leave(1)
    assert waiting.wait().version == 1
    assert not left.done()
    assert not server.ended.is_set()
    assert server.leave(0).wait().version == 1
    assert left.wait().version == 1
    assert server.ended.is_set()


def test_async_waits_for_nobody_and_counts_staleness():
    server, parameter = shard(Mode("async"), 2)
    for _ in range(4):
        assert server.push(0, pushed(1.0, version=server.pull().version)).done()
    assert server.push(1, pushed(1.0, weight=3, version=0)).wait().version == 5
    assert parameter.tolist() == [-5.0, -5.0]
    assert dict(server.staleness) == {0: 4, 4: 1}


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_bounded_lets_nobody_be_further_ahead(bound: int, fresh_seed: int):
    """And whoever is slowest never waits, in any order of pushes."""
    chosen = random.Random(fresh_seed)
    num_workers = 4
    server, parameter = shard(Mode("bounded", bound), num_workers)
    done = [0] * num_workers
    waits: dict[int, Future[Answer]] = {}
    for _ in range(500):
        able = [worker for worker in range(num_workers) if worker not in waits or waits[worker].done()]
        assert set(able) >= {worker for worker in range(num_workers) if done[worker] == min(done)}
        worker = chosen.choice(able)
        # It begins its next step only now: how far it is ahead then is what the bound is about.
        assert done[worker] - min(done) <= bound
        waits[worker] = server.push(worker, pushed(1.0, version=server.pull().version))
        done[worker] += 1
    assert parameter.tolist() == [-500.0, -500.0]


def test_a_failure_reaches_all_who_wait_and_all_who_come():
    server, _ = shard(Mode("sync"), 3)
    waiting = server.push(0, pushed(1.0))
    server.leave(1, "worker 1 failed: ValueError")
    assert waiting.wait().failure == "worker 1 failed: ValueError"
    assert server.push(2, pushed(1.0)).wait().failure
    assert server.pull().failure
    assert server.ended.is_set()


def test_an_optimizer_that_fails_is_said():
    server, parameter = shard(Mode("async"), 1)
    server._optimizer = torch.optim.SparseAdam([parameter])
    assert "its optimizer failed: RuntimeError" in server.push(0, pushed(1.0)).wait().failure
    assert isinstance(server.error, RuntimeError)


def test_answers_are_copies():
    server, _ = shard(Mode("async"), 1)
    before = server.pull().parameters[0]
    server.push(0, pushed(1.0))
    assert before.abs().sum() == 0


def test_a_server_without_parameters_takes_part():
    server = Shard([], None, Mode("sync"), 2)
    server.push(0, Pushed(2.0, 0, [], []))
    answer: Answer = server.push(1, Pushed(3.0, 0, [], [])).wait()
    assert answer == Answer(1, [], "")


def test_late_gradients_are_compensated(fresh_seed: int):
    """As in the paper's formula, for workers that push in any order and pull in between; sums of several batches."""
    draw = random.Random(fresh_seed)
    server, parameter = shard(Mode("async", delay_compensation=0.3), 3)
    assert server.pull().version == 0, "a look is not what a worker computes with"
    expected = 0.0
    then = {worker: server.pull(worker).parameters[0][0].item() for worker in range(3)}
    for _ in range(40):
        worker = draw.randrange(3)
        if draw.random() < 0.2:
            then[worker] = server.pull(worker).parameters[0][0].item()
        gradient, weight = draw.uniform(-1, 1), draw.choice([0.5, 1.0, 4.0])
        expected -= gradient + 0.3 * gradient * gradient * (expected - then[worker])
        answer: Answer = server.push(worker, pushed(gradient, weight=weight)).wait()
        then[worker] = answer.parameters[0][0].item()
        torch.testing.assert_close(parameter.detach(), torch.full((2,), expected, dtype=torch.float64))
