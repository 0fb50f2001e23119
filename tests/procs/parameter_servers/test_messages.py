"""Pushes and answers that would show if they were written to while they travel, or came twice or not at all.

python -m tests.procs.parameter_servers.test_messages 10000
"""

from __future__ import annotations

import random
import signal
import sys
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evenstep
from evenstep.launcher.pool import RankGroup

WIDTH = 200_000  # more than a socket holds
WORKERS, SERVERS = 2, 2


class Wide(nn.Module):
    """Of each server half."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))
        self.other = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))


def the_constant(tensor: Tensor) -> float:
    assert bool((tensor == tensor[0]).all()), tensor.unique()
    return tensor[0].item()


class Fills(torch.optim.Optimizer):
    """Checks each gradient: a worker's steps come in their order. Fills the parameters with the number of updates."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.num_updates = 0
        self.num_steps = [0] * WORKERS

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """See the class."""
        self.num_updates += 1
        if random.random() < 0.05:
            time.sleep(0.02)
        for group in self.param_groups:
            (parameter,) = group["params"]
            step, worker = divmod(the_constant(parameter.grad), WORKERS)
            assert step == self.num_steps[int(worker)], (step, worker, self.num_steps)
            self.num_steps[int(worker)] += 1
            parameter.fill_(self.num_updates)


def push_and_check(num_steps: int, seed: int) -> int | None:
    """On a worker the number of steps whose answers were right."""
    random.seed(seed)

    def sleeps(*_: object) -> None:
        time.sleep(random.uniform(0, 0.02))
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.001, 0.2))

    with evenstep.parameter_server(Wide, Fills, mode="async", timeout_s=60) as ps:
        before = signal.signal(signal.SIGALRM, sleeps)  # while it receives, too
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        last = -1.0
        try:
            for step in range(num_steps):
                number = step * WORKERS + ps.worker
                ps.backward((ps.model.one.sum() + ps.model.other.sum()) * number)
                ps.step()
                versions = [the_constant(each.detach()) for each in ps.model.parameters()]
                assert versions == ps._versions, (versions, ps._versions)
                assert versions[0] > last, (versions, last)
                last = versions[0]
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        applied = sum(ps.staleness().values())
        assert applied >= num_steps
    assert [the_constant(each.detach()) for each in ps.model.parameters()] == [num_steps * WORKERS] * 2
    return num_steps


def check(num_messages: int, seed: int) -> None:
    """A step has a push to each server, and an answer of each."""
    num_steps = -(-num_messages // (WORKERS * SERVERS * 2))
    ranks = RankGroup(WORKERS + SERVERS, servers=SERVERS, device="cpu")
    try:
        assert ranks.run(push_and_check, (num_steps, seed)) == [num_steps] * WORKERS + [None] * SERVERS
    finally:
        ranks.close()


@pytest.mark.extended
def test_each_message_is_constant_and_the_right_one(fresh_seed: int):
    check(400, fresh_seed)


if __name__ == "__main__":
    from tests.procs.parameter_servers import test_messages

    chosen = random.randrange(2**31)
    sys.stdout.write(f"seed {chosen}\n")
    test_messages.check(int(sys.argv[1]), chosen)
    sys.stdout.write(f"{sys.argv[1]} messages, each constant and the right one\n")
