"""What follows an attempt that has ended: another one, or the end of the run."""

from __future__ import annotations

import pytest

from evenstep.launcher.elastic.agent import plan_next
from evenstep.launcher.elastic.nodes import Standing

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
