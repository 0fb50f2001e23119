"""What follows an attempt that has ended: another one, or the end of the run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from evenstep.ground.health.first_failure import Exit
from evenstep.launcher.elastic.agent import RankAgent, RunFailed, plan_next
from evenstep.launcher.elastic.nodes import Standing
from evenstep.launcher.failure.report import Failure
from evenstep.launcher.failure.verdict import End

FIRST, SECOND, THIRD = Standing(), Standing(num_restarts=1), Standing(num_restarts=2)
IN_VAIN = Standing(num_restarts=3, num_in_vain=3)


@pytest.mark.parametrize(
    ("now", "max_restarts", "was_stopping", "expected"),
    [
        (FIRST, 0, False, (False, "")),
        (FIRST, 2, False, (True, "restarting all ranks: attempt 2 of 3")),
        (SECOND, 2, False, (True, "restarting all ranks: attempt 3 of 3")),
        (THIRD, 2, False, (False, "")),
        (FIRST, 2, True, (False, "the run had been asked to stop, so there is no other attempt")),
        (IN_VAIN, 3, False, (False, "")),
        (
            IN_VAIN,
            5,
            False,
            (
                False,
                "3 restarts have come to no new checkpoint, so there is no other, though --max-restarts 5 allows "
                "2 more",
            ),
        ),
    ],
)
def test_what_follows_an_attempt_that_has_failed(
    now: Standing, max_restarts: int, was_stopping: bool, expected: tuple[bool, str]
) -> None:
    assert plan_next(now, max_restarts=max_restarts, was_stopping=was_stopping) == expected


class Agent(RankAgent):
    """Whose attempts end as a test says."""

    def __init__(self, attempts: list[Any], max_restarts: int) -> None:
        self._attempts, self._standing, self._failure = iter(attempts), Standing(), None
        self._spec = SimpleNamespace(max_restarts=max_restarts)
        self._logs: Any = SimpleNamespace(destinations={}, root_log_dir="/nonexistent")
        self.begun: list[Standing] = []

    def get_worker_group(self, role: str = "") -> Any:
        return SimpleNamespace(group_world_size=1)

    def _begin(self) -> Any:
        self.begun.append(self._standing)
        return next(self._attempts)


def attempt(end: End, *, saved_step: int | None = None, was_stopping: bool = False) -> Any:
    failure = Failure(0, Exit(0, 5, 3), None, was_stopping=was_stopping) if end is End.FAILED else None
    saved = Standing(saves=True, saved_step=saved_step)
    return SimpleNamespace(watch=lambda: end, failure=failure, saved=saved, has_saved=end is End.SAVED)


def test_failures_are_counted_and_new_nodes_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    failed = attempt(End.FAILED)
    agent = Agent([failed, attempt(End.NODE_COMES, saved_step=7), failed, failed], max_restarts=2)
    with pytest.raises(RunFailed) as raised:
        agent.run_attempts()
    assert raised.value.failure is failed.failure
    after = Standing(num_restarts=1, saved_step=7, has_saved=True)
    assert agent.begun == [FIRST, SECOND, after, Standing(num_restarts=2, saved_step=7)]
    said = capsys.readouterr().err
    assert said.count("rank 0 (pid 5) exited with status 3") == 3
    assert said.count("restarting all ranks") == 2
    assert said.count("the newest saved step is 7") == 2
