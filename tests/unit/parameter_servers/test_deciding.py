"""What servers let through when, and do then: no processes."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from evenstep.parameter_servers.deciding.batch_queue import BatchQueue
from evenstep.parameter_servers.deciding.coordinator import Coordinator, Decision, Key, Mode, Push, decoded
from evenstep.parameter_servers.preparation import Roles
from evenstep.parameter_servers.server import Server
from evenstep.parameter_servers.shard import Pushed, Shard
from evenstep.parameter_servers.wire import Message


def make_shard() -> Shard:
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    return Shard({"p": parameter}, torch.optim.SGD([parameter], lr=1.0), None, {})


@dataclass
class Run:
    """Servers with two float64 parameters each, and workers that push to all of them."""

    mode: Mode
    num_workers: int
    num_servers: int = 1
    begins: bool = True
    saves_at_end: bool = False
    queue: BatchQueue = field(default_factory=BatchQueue)

    def __post_init__(self) -> None:
        self.shards = [make_shard() for _ in range(self.num_servers)]
        self.coordinator = Coordinator(self.mode, range(self.num_workers), self.queue, saves_at_end=self.saves_at_end)
        self.held: dict[Key, Pushed] = {}
        self.released: dict[Key, int] = {}  # with the version that it gets
        self.decisions: list[Decision] = []
        self.numbers = dict.fromkeys(range(self.num_workers), 0)
        for worker in range(self.num_workers if self.begins else 0):
            self.coordinator.join(worker)

    @property
    def value(self) -> float:
        """Of all parameters, which have had the same gradients."""
        values = {float(each) for shard in self.shards for each in shard.parameters["p"].detach()}
        assert len(values) == 1, values
        return values.pop()

    def key(self, worker: int) -> Key:
        return worker, self.numbers[worker]

    def push(self, worker: int, gradient: float, *, weight: float = 1.0, version: int = 0) -> Key:
        self.numbers[worker] += 1
        key = self.key(worker)
        values = torch.full((2,), gradient, dtype=torch.float64)
        if weight:
            self.held[key] = Pushed(weight, [True], [values], {})
        self.execute(self.coordinator.push(key, Push(weight, version)))
        return key

    def leave(self, worker: int, failure: str = "") -> Key:
        self.numbers[worker] += 1
        self.execute(self.coordinator.leave(self.key(worker), failure))
        return self.key(worker)

    def lose(self, worker: int) -> None:
        self.execute(self.coordinator.lose(worker))

    def execute(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            assert decision.number == len(self.decisions) + 1, "numbered without a gap"
            decision = decoded(json.loads(json.dumps(decision)))  # as another server gets it
            self.decisions.append(decision)
            if decision.applied:
                pushes = [self.held.pop(key) for key in decision.applied]
                for shard in self.shards:
                    copies = [each._replace(gradients=[g.clone() for g in each.gradients]) for each in pushes]
                    shard.apply(copies)
            for key in [key for key in self.held if key[0] in decision.gone]:
                del self.held[key]
            self.released |= dict.fromkeys(decision.released, self.shards[0].version)


@pytest.mark.parametrize("num_servers", [1, 3])
def test_sync_waits_for_all_and_applies_their_weighted_mean(num_servers: int):
    run = Run(Mode("sync"), 3, num_servers)
    run.push(2, 3.0, weight=5)
    run.push(0, 1.0, weight=1)
    assert not run.released
    assert run.coordinator.lagging() == [(1, 0)]
    run.push(1, 7.0, weight=0)
    assert run.released == {(0, 1): 1, (1, 1): 1, (2, 1): 1}
    assert run.value == pytest.approx(-16 / 6, abs=1e-15)


def test_sync_goes_on_without_a_worker_that_has_left_or_was_lost():
    run = Run(Mode("sync"), 4, 2)
    waiting = run.push(0, 1.0)
    left = run.leave(1)
    run.push(2, 8.0)
    run.lose(2)
    assert not run.released
    run.lose(3)
    assert run.released == {waiting: 1}
    assert run.value == -1.0, "what a lost worker has pushed isn't applied"
    assert not run.held
    last = run.leave(0)
    assert run.released == {waiting: 1, left: 1, last: 1}
    assert run.decisions[-1].has_ended


def test_who_joins_late_begins_with_the_slowest():
    """Were it at the fastest worker's step, it would have to wait for the slowest at once."""
    run = Run(Mode("bounded", 2), 2)
    run.push(0, 1.0)
    for _ in range(3):
        run.push(1, 1.0)
    run.coordinator.join(2)
    run.numbers[2] = 0
    assert run.coordinator.lagging() == [(0, 1), (1, 3), (2, 1)]
    assert run.push(2, 1.0) in run.released
    assert run.push(2, 1.0) in run.released
    assert run.push(2, 1.0) not in run.released, "three ahead of the slowest"


def test_async_waits_for_nobody_and_counts_staleness():
    run = Run(Mode("async"), 2, 2)
    for step in range(4):
        assert run.push(0, 1.0, version=step) in run.released
    assert run.released[run.push(1, 1.0, weight=3, version=0)] == 5
    assert run.value == -5.0
    assert run.coordinator.staleness == {0: {0: 4}, 1: {4: 1}}


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_bounded_lets_nobody_be_further_ahead(bound: int, fresh_seed: int):
    """And whoever is slowest never waits, in any order of beginnings and pushes."""
    chosen = random.Random(fresh_seed)
    num_workers = 4
    run = Run(Mode("bounded", bound), num_workers, 2, begins=False)
    done, begun = [0] * num_workers, set()
    for _ in range(500):
        able = [worker for worker in range(num_workers) if not done[worker] or run.key(worker) in run.released]
        assert set(able) >= {worker for worker in range(num_workers) if done[worker] == min(done)}
        worker = chosen.choice(able)
        if worker not in begun:
            begun.add(worker)
            run.coordinator.join(worker)
            continue
        # It begins its next step only now: how far it is ahead then is what the bound is about.
        assert done[worker] - min(done) <= bound
        run.push(worker, 1.0, version=run.coordinator.version)
        done[worker] += 1
    assert run.value == -float(sum(done))


@pytest.mark.parametrize("saves", [False, True])
def test_the_last_state_is_saved_before_workers_are_answered(saves: bool):
    run = Run(Mode("async"), 2, saves_at_end=saves)
    run.push(0, 1.0)
    run.leave(0)
    run.leave(1)
    *before, end = run.decisions
    assert (end.has_ended, sorted(end.released)) == (True, [(0, 2), (1, 1)])
    assert (before[-1].saves is not None) == saves


def test_batches_that_nobody_is_left_to_take_are_named():
    run = Run(Mode("async"), 3)
    taken = {worker: run.queue.take(worker, (1, 4, 0), 3, "").batch for worker in range(3)}
    run.lose(2)
    assert run.queue.take(0, (1, 4, 0), 3, "").batch == taken[2]
    assert run.coordinator.untrained == []
    run.push(0, 1.0)
    run.leave(0)
    run.lose(1)
    # Worker 0 has left with two batches that it never pushed, and worker 2's was one of them.
    assert run.coordinator.untrained == [(2, taken[2]), (1, taken[1])]


@pytest.mark.parametrize("is_lost", [True, False])
def test_who_never_joins_is_waited_for_no_longer_and_a_run_without_any_worker_ends(is_lost: bool):
    run = Run(Mode("sync"), 2, begins=False)
    run.coordinator.join(0)
    waiting = run.push(0, 1.0)
    assert not run.released
    run.execute(run.coordinator.lose(1) if is_lost else run.coordinator.give_up([1]))
    assert run.released == {waiting: 1}
    run.lose(0)
    assert (run.decisions[-1].failure, run.decisions[-1].has_ended) == ("no worker is left", True)


def test_who_was_lost_gets_nothing_more():
    """Neither a batch, which nobody would train on, nor a beginning, for which others would wait."""
    server = Server(Roles(2, 2, 1), Mode("sync"), make_shard(), {}, BatchQueue(), None, timeout_s=60)
    for worker in range(2):
        server.answer(worker, Message({"kind": "join"}))
    server.lose(1)
    take = {"kind": "take", "wanted": [1, 0, 0], "num_batches": 3, "facts": "{}"}
    for call in ({"kind": "join"}, take):
        assert "the servers have lost this worker" in server.answer(1, Message(dict(call))).head["failure"]
    assert server.answer(0, Message(dict(take))).head["batch"] == ((1, 0, 0), 0)


def test_nothing_is_executed_behind_the_end():
    """Servers get decisions in lists of other lengths: a save that one of them makes alone would never end."""
    shard = make_shard()
    server = Server(Roles(0, 1, 0), Mode("async"), shard, {}, BatchQueue(), None, timeout_s=60)
    server._held[0, 1] = Pushed(1.0, [True], [torch.ones(2, dtype=torch.float64)], {})
    server.execute([Decision(1, has_ended=True), Decision(2, applied=[(0, 1)])])
    assert shard.version == 0
