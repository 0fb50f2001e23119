"""Which ranks a run can lose."""

from __future__ import annotations

import signal

from evenstep.launcher.failure.report import LossPolicy

KILLED = -signal.SIGKILL


def test_without_servers_no_rank_can_be_lost():
    assert not LossPolicy().can_lose(0, KILLED)


def test_workers_that_were_killed_can_be_lost_and_servers_and_what_failed_by_itself_end_the_run():
    policy = LossPolicy(3)
    assert [rank for rank in range(5) if policy.can_lose(rank, KILLED)] == [0, 1, 2]
    assert not any(policy.can_lose(rank, code) for rank in range(5) for code in (1, 73))
