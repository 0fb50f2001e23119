"""Which ranks a run can lose."""

from __future__ import annotations

import signal

import pytest

from evenstep.launcher.failure.policy import Loss, LossPolicy

KILLED = -signal.SIGKILL


def test_without_servers_no_rank_can_be_lost():
    assert not LossPolicy().can_lose(0, KILLED)
    assert not LossPolicy(num_workers=4, max_restarts=3).can_lose(0, KILLED)


def test_what_failed_by_itself_ends_the_run():
    policy = LossPolicy(3, 2, 5)
    assert [policy.can_lose(rank, code) for rank, code in ((0, 1), (4, 73), (0, KILLED), (4, KILLED))] == [
        False,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("rank", "max_restarts", "num_restarts", "num_left", "has_checkpoints", "loss"),
    [
        (0, 0, 0, 2, False, Loss.GO_ON),
        (0, 0, 0, 0, True, Loss.END_RUN),
        (2, 1, 0, 0, False, Loss.START_AGAIN),
        (2, 1, 1, 2, False, Loss.GO_ON),
        (3, 1, 0, 3, True, Loss.START_AGAIN),
        (3, 1, 0, 3, False, Loss.END_RUN),
        (4, 1, 1, 3, True, Loss.END_RUN),
        (4, 0, 0, 3, True, Loss.END_RUN),
    ],
)
def test_losses(rank: int, max_restarts: int, num_restarts: int, num_left: int, has_checkpoints: bool, loss: Loss):
    policy = LossPolicy(3, 2, max_restarts)
    found = policy.judge(rank, num_restarts=num_restarts, num_workers_left=num_left, has_checkpoints=has_checkpoints)
    assert found is loss
    assert policy.name_of(rank) == (f"worker {rank}" if rank < 3 else f"server {rank - 3}")
