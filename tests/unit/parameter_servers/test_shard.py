"""What servers let through when, and do then: no processes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.futures import Future

from evenstep.parameter_servers.server.batch_queue import BatchQueue
from evenstep.parameter_servers.server.coordinator import Coordinator, Decision, Mode
from evenstep.parameter_servers.server.shard import GIVEN_UP, Answer, Pushed, Shard


@dataclass
class Call:
    """A worker's call of all servers."""

    futures: list[Future[Any]]

    @property
    def is_done(self) -> bool:
        return all(each.done() for each in self.futures)

    @property
    def answers(self) -> list[Answer]:
        assert self.is_done
        return [each.value() for each in self.futures]


class Servers:
    """Some servers with two float64 parameters each, and workers that call them."""

    def __init__(
        self, mode: Mode, num_workers: int, num_servers: int = 1, *, begin: bool = True, **options: Any
    ) -> None:
        self.parameters = [nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in range(num_servers)]
        self.shards = [Shard({"p": each}, torch.optim.SGD([each], lr=1.0), mode, **options) for each in self.parameters]
        self.queue = BatchQueue()
        self.coordinator = Coordinator(mode, num_servers, range(num_workers), self.queue)
        self.numbers: dict[int, int] = {}
        for worker in range(num_workers if begin else 0):
            self.join(worker)

    @property
    def value(self) -> float:
        """Of all parameters, which have had the same gradients."""
        values = {float(each) for parameter in self.parameters for each in parameter.detach()}
        assert len(values) == 1, values
        return values.pop()

    def join(self, worker: int) -> None:
        self.coordinator.join(worker)
        self.numbers[worker] = 0

    def key(self, worker: int, ahead: int = 0) -> tuple[int, int]:
        return worker, self.numbers[worker] + ahead

    def push(
        self, worker: int, gradient: float, *, weight: float = 1.0, version: int = 0, servers: int | None = None
    ) -> Call:
        """`servers`: how many get it, before the worker dies."""
        self.numbers[worker] += 1
        futures = []
        for shard in self.shards[:servers]:
            values = [torch.full((2,), gradient * weight, dtype=torch.float64)]
            future, facts = shard.call(self.key(worker), Pushed(weight, version, [weight > 0], values))
            futures.append(future)
            assert facts is not None
            self.execute(self.coordinator.push(self.key(worker), facts))
        return Call(futures)

    def pull(self, worker: int) -> Answer:
        self.numbers[worker] += 1
        call = Call([shard.call(self.key(worker), None)[0] for shard in self.shards])
        self.execute(self.coordinator.pull(self.key(worker)))
        return call.answers[0]

    def leave(self, worker: int, failure: str = "") -> Call:
        self.numbers[worker] += 1
        call = Call([shard.call(self.key(worker), None)[0] for shard in self.shards])
        self.execute(self.coordinator.leave(self.key(worker), failure))
        return call

    def lose(self, worker: int) -> None:
        self.execute(self.coordinator.lose(worker))

    def execute(self, decisions: list[Decision]) -> bool:
        """Whether the run has ended."""
        todo, has_ended = list(decisions), False
        while todo:
            decision = todo.pop(0)
            outcomes = [shard.execute(decision) for shard in self.shards]
            for outcome in outcomes:
                for complete in outcome.complete:
                    complete()
                for square in outcome.squares:
                    todo += self.coordinator.measured(square)
                if outcome.error is not None:
                    todo += self.coordinator.fail(str(outcome.error))
                has_ended = has_ended or outcome.has_ended
        return has_ended


@pytest.mark.parametrize("num_servers", [1, 3])
def test_sync_waits_for_all_and_applies_their_weighted_mean(num_servers: int):
    servers = Servers(Mode("sync"), 3, num_servers)
    first = servers.push(2, 3.0, weight=5)
    second = servers.push(0, 1.0, weight=1)
    assert not first.is_done
    assert not second.is_done
    assert servers.coordinator.lagging() == [(1, 0)]
    third = servers.push(1, 7.0, weight=0)
    assert first.is_done
    assert second.is_done
    assert servers.value == pytest.approx(-16 / 6, abs=1e-15)
    assert [answer.version for answer in third.answers] == [1] * num_servers
    assert third.answers[0].parameters[0].tolist() == servers.parameters[0].tolist()


def test_a_step_of_empty_shares_changes_nothing():
    servers = Servers(Mode("sync"), 2)
    servers.push(0, 1.0, weight=0)
    assert servers.push(1, 1.0, weight=0).answers[0].version == 0
    assert servers.value == 0


@pytest.mark.parametrize("num_servers", [1, 2])
def test_sync_goes_on_without_a_worker_that_has_left_or_was_lost(num_servers: int):
    servers = Servers(Mode("sync"), 3, num_servers)
    waiting = servers.push(0, 1.0)
    left = servers.leave(1)
    servers.push(2, 8.0, servers=1)
    if num_servers == 1:  # all servers had its push, and the step was complete
        assert servers.value == -4.5
    else:
        assert not waiting.is_done
    servers.lose(2)
    assert waiting.answers[0].version == 1
    if num_servers == 2:
        assert servers.value == -1.0, "what not all servers have is applied on none"
    assert not left.is_done
    assert servers.leave(0).answers[0].version == 1
    assert left.answers[0].version == 1


def test_who_joins_late_counts_from_then_on():
    servers = Servers(Mode("sync"), 2, begin=False)
    servers.join(0)
    servers.execute(servers.coordinator.give_up([1]))
    assert servers.push(0, 1.0).is_done
    servers.join(1)
    waiting = servers.push(0, 1.0, version=1)
    assert not waiting.is_done
    servers.push(1, 3.0, version=servers.pull(1).version)
    assert waiting.is_done
    assert servers.value == -3.0


def test_async_waits_for_nobody_and_counts_staleness():
    servers = Servers(Mode("async"), 2, 2)
    for _ in range(4):
        assert servers.push(0, 1.0, version=servers.pull(0).version).is_done
    assert servers.push(1, 1.0, weight=3, version=0).answers[0].version == 5
    assert servers.value == -5.0
    assert servers.coordinator.staleness == {0: {0: 4}, 1: {4: 1}}


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_bounded_lets_nobody_be_further_ahead(bound: int, fresh_seed: int):
    """And whoever is slowest never waits, in any order of beginnings and pushes."""
    chosen = random.Random(fresh_seed)
    num_workers = 4
    servers = Servers(Mode("bounded", bound), num_workers, 2, begin=False)
    done = [0] * num_workers
    waits: dict[int, Call] = {}
    for _ in range(500):
        able = [worker for worker in range(num_workers) if worker not in waits or waits[worker].is_done]
        assert set(able) >= {worker for worker in range(num_workers) if done[worker] == min(done)}
        worker = chosen.choice(able)
        if worker not in servers.numbers:
            servers.join(worker)
            continue
        # It begins its next step only now: how far it is ahead then is what the bound is about.
        assert done[worker] - min(done) <= bound
        waits[worker] = servers.push(worker, 1.0, version=servers.coordinator.version)
        done[worker] += 1
    assert servers.value == -float(sum(done))


def test_a_failure_reaches_all_who_wait_and_all_who_come():
    servers = Servers(Mode("sync"), 3, 2)
    waiting = servers.push(0, 1.0)
    servers.leave(1, "worker 1 failed: ValueError")
    assert waiting.answers[1].failure == "worker 1 failed: ValueError"
    assert servers.push(2, 1.0).answers[0].failure
    assert servers.pull(2).failure


def test_a_pull_that_one_server_has_answered_with_its_failure_is_answered_by_all():
    """Nothing is decided for it: the first server, which decides, knows of the failure already."""
    servers = Servers(Mode("async"), 1, 2)
    early, _ = servers.shards[1].call(servers.key(0, 1), None)
    servers.execute(servers.coordinator.fail("out of memory"))
    late, _ = servers.shards[0].call(servers.key(0, 1), None)
    assert [call.done() and call.value().failure for call in (early, late)] == ["out of memory"] * 2


def test_an_optimizer_that_fails_is_said():
    servers = Servers(Mode("async"), 1, 2)
    servers.shards[1]._optimizer = torch.optim.SparseAdam([servers.parameters[1]])
    assert "its optimizer failed: RuntimeError: SparseAdam" in servers.push(0, 1.0).answers[1].failure
    assert "SparseAdam" in servers.push(0, 1.0).answers[0].failure


def test_answers_are_copies():
    servers = Servers(Mode("async"), 1)
    before = servers.pull(0).parameters[0]
    servers.push(0, 1.0)
    assert before.abs().sum() == 0


def test_a_server_without_parameters_takes_part():
    servers = Servers(Mode("sync", max_norm=1.0), 2, 2)
    servers.shards[1] = Shard({}, None, Mode("sync", max_norm=1.0))
    for worker in range(2):
        servers.numbers[worker] += 1
        for shard in servers.shards:
            key = servers.key(worker)
            gradients = [torch.ones(2, dtype=torch.float64)] if shard is servers.shards[0] else []
            _, facts = shard.call(key, Pushed(1.0, 0, [True] if gradients else [], gradients))
            assert facts is not None
            servers.execute(servers.coordinator.push(key, facts))
    assert servers.parameters[0].detach().norm().item() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("name", ["sync", "async"])
def test_clipping_is_by_the_norm_over_all_servers(name: str, fresh_seed: int):
    """In sync of the mean over workers, else of each push: as torch's clip_grad_norm_."""
    draw = random.Random(fresh_seed)
    servers = Servers(Mode(name, max_norm=1.5), 3, 4)
    expected = 0.0
    for step in range(20):
        pushes = [(draw.uniform(-1, 1), draw.choice([1.0, 4.0])) for _ in range(3)]
        for worker, (gradient, weight) in enumerate(pushes):
            servers.push(worker, gradient, weight=weight, version=servers.coordinator.version)
        total = sum(weight for _, weight in pushes)
        means = [sum(g * w for g, w in pushes) / total] if name == "sync" else [g for g, _ in pushes]
        for mean in means:
            like = [nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in range(4)]
            for each in like:
                each.grad = torch.full((2,), mean, dtype=torch.float64)
            torch.nn.utils.clip_grad_norm_(like, 1.5)
            assert like[0].grad is not None
            expected -= float(like[0].grad[0])
        assert servers.value == pytest.approx(expected, abs=1e-12), step


def test_the_schedule_steps_after_every_update():
    servers = Servers(Mode("async"), 2)
    optimizer = servers.shards[0]._optimizer
    assert optimizer is not None
    servers.shards[0]._scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for worker in (0, 1, 0):
        servers.push(worker, 1.0)
    servers.push(1, 1.0, weight=0)
    assert servers.value == -1.75


def test_sixteen_bits_round_what_travels_and_not_what_is_kept():
    servers = Servers(Mode("async"), 1, transfer_dtype=torch.bfloat16)
    for _ in range(300):
        servers.push(0, 1 + 2**-12)
    answer = servers.pull(0)
    assert answer.parameters[0].dtype == torch.bfloat16
    assert servers.value == -300 * (1 + 2**-12)
    assert answer.parameters[0].tolist() == servers.parameters[0].detach().bfloat16().tolist()


def test_decisions_are_executed_in_their_order():
    """They come by several threads of RPC."""
    servers = Servers(Mode("async"), 1)
    shard, coordinator = servers.shards[0], servers.coordinator
    decisions = []
    for number in (1, 2):
        key = (0, number)
        _, facts = shard.call(key, Pushed(1.0, 0, [True], [torch.ones(2, dtype=torch.float64)]))
        assert facts is not None
        decisions += coordinator.push(key, facts)
    done = 0
    for decision in reversed(decisions):
        done += len(shard.execute(decision).complete)
        assert servers.value == (0 if decision is not decisions[0] else -2)
    assert done == 2


def test_a_share_goes_on_from_a_copy(fresh_seed: int):
    """With the optimizer's state and rate, and the schedule's."""
    torch.manual_seed(fresh_seed)

    def shard() -> Shard:
        named = {name: nn.Parameter(torch.zeros(3)) for name in ("a", "b")}
        groups = [{"params": [named["a"]], "lr": 0.1}, {"params": [named["b"]], "weight_decay": 0.1}]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return Shard(named, optimizer, Mode("async"), scheduler=schedule)

    gradients = torch.randn(8, 6)

    def train(one: Shard, numbers: range, first: int) -> list[torch.Tensor]:
        coordinator = Coordinator(Mode("async"), 1, [0], BatchQueue())
        coordinator.join(0)
        for number in numbers:
            key = (0, number)
            _, facts = one.call(key, Pushed(1.0, 0, [True, number % 3 > 0], [gradients[number]]))
            assert facts is not None
            for decision in coordinator.push(key, facts):
                assert one.execute(decision._replace(number=decision.number + first)).error is None
        return one._parameters

    through = shard()
    train(through, range(4), 0)
    last = through._next - 1
    through.execute(Decision(last + 1, saves=True))
    assert through.take_copy(last + 2) is None, "that decision has not come"
    through.execute(Decision(last + 2, saves=True))
    copy = through.take_copy(last + 2)
    assert through.take_copy(last + 1) is None, "nobody wants an earlier one any more"
    assert copy is not None
    expected = train(through, range(4, 8), last + 2)
    again = shard()
    again.load(copy)
    assert again.version == 4
    for one, other in zip(train(again, range(4, 8), 0), expected, strict=True):
        assert torch.equal(one, other)


def test_who_waits_and_who_comes_is_told_that_the_run_cannot_go_on():
    servers = Servers(Mode("sync"), 2)
    waiting = servers.push(0, 1.0)
    servers.shards[0].fail("server 0 was lost")
    assert waiting.answers[0].failure == "server 0 was lost"
    future, _ = servers.shards[0].call((1, 1), None)
    assert future.value().failure == "server 0 was lost"
    assert servers.shards[0].look_up(1, "table", torch.tensor([1])).failure == "server 0 was lost"


def test_a_pull_is_of_one_version():
    """Where a server gets the decision before the worker's call, an update in between isn't in its answer."""
    servers = Servers(Mode("async"), 2, 2)
    servers.numbers[0] += 1
    first, _ = servers.shards[0].call(servers.key(0), None)
    servers.execute(servers.coordinator.pull(servers.key(0)))
    servers.push(1, 1.0)
    late, _ = servers.shards[1].call(servers.key(0), None)
    assert [first.value().version, late.value().version] == [0, 0]
    assert late.value().parameters[0].tolist() == [0.0, 0.0]


def test_a_lost_worker_leaves_nothing_behind():
    """What comes of it later gets an error: only its connection may have broken."""
    servers = Servers(Mode("sync"), 2, 2)
    waiting = servers.push(0, 1.0)
    key = servers.key(0)
    servers.lose(0)
    assert waiting.answers[0].failure == GIVEN_UP
    for shard in servers.shards:
        future, facts = shard.call((key[0], 9), Pushed(1.0, 0, [True], [torch.ones(2, dtype=torch.float64)]))
        assert future.value().failure == GIVEN_UP
        assert facts is None
        assert shard.look_up(key[0], "table", torch.tensor([1])).failure == GIVEN_UP
        assert not any((shard._pushed, shard._waiting, shard._released))


def test_batches_that_nobody_is_left_to_take_are_named():
    servers = Servers(Mode("async"), 3)
    taken = {worker: servers.queue.take(servers.key(worker, 1), (1, 4, 0), 3, "").batch for worker in range(3)}
    servers.lose(2)
    assert servers.queue.take(servers.key(0, 1), (1, 4, 0), 3, "").batch == taken[2]
    assert servers.coordinator.untrained == []
    servers.push(0, 1.0)
    servers.leave(0)
    servers.lose(1)
    assert servers.coordinator.is_done or servers.coordinator._has_ended
    assert servers.coordinator.untrained == [(1, (1, 4, 0), taken[1])]
