"""Which ranks others wait for, and for how long: decided from heartbeat pages."""

from __future__ import annotations

import math

import pytest

from evenstep.errors import ConfigurationError
from evenstep.ground.health.heartbeat import Heartbeat, Phase
from evenstep.ground.health.phase_timeouts import PhaseTimeouts, find_awaited
from evenstep.launcher.failure.detection import find_overdue

SECOND = 1_000_000_000


def seen(
    phase: Phase = Phase.FORWARD, *, step: int = 7, waits_since_s: float | None = None, at_s: float = 0.0, pid: int = 11
) -> Heartbeat:
    waiting = None if waits_since_s is None else int(waits_since_s * SECOND)
    return Heartbeat(
        pid=pid,
        phase=phase,
        step=step,
        collective=5,
        is_waiting=waiting is not None,
        time_ns=int(at_s * SECOND),
        waiting_since_ns=waiting,
    )


def test_timeouts_are_named_or_multiples_of_the_deadline() -> None:
    timeouts = PhaseTimeouts.parse("evaluating=7200, saving=inf", step_s=100)
    assert [timeouts.of(seen(phase)) for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)] == [100] * 3
    assert timeouts.of(seen(Phase.BETWEEN_STEPS)) == 100
    assert timeouts.of(seen(Phase.COMPILING)) == 600
    assert timeouts.of(seen(Phase.EVALUATING)) == 7200
    assert timeouts.of(seen(Phase.SAVING)) == math.inf
    assert all(timeouts.of(seen(phase)) > 0 for phase in Phase), "every phase has one"
    assert PhaseTimeouts.parse(str(timeouts), step_s=100) == timeouts
    assert PhaseTimeouts.parse("step=60").of(seen(Phase.COMPILING)) == 360


@pytest.mark.parametrize("text", ["step", "step=x", "step=0", "sleeping=3", "step=-1", "step=nan"])
def test_a_timeout_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--phase-timeout"):
        PhaseTimeouts.parse(text)


def test_who_is_late_is_given_up_when_its_phase_times_out() -> None:
    pages = {0: seen(waits_since_s=100), 1: seen(Phase.BACKWARD, pid=12)}
    assert find_overdue(pages, PhaseTimeouts(600), now_ns=131 * SECOND) is None
    assert find_overdue(pages, PhaseTimeouts(600), now_ns=704 * SECOND) is None
    hang = find_overdue(pages, PhaseTimeouts(600), now_ns=706 * SECOND)
    assert hang is not None
    assert (hang.rank, hang.pid, hang.is_suspended) == (1, 12, False)
    assert hang.verdict == (
        "rank 1 (pid 12) is in backward of step 7; rank 0 waits since 606 s. This is longer than allowed in this phase "
        "(600 s), so the run was ended"
    )


@pytest.mark.parametrize("phase", [Phase.EVALUATING, Phase.COMPILING, Phase.SAVING])
def test_what_takes_long_by_right_is_no_hang(phase: Phase) -> None:
    pages = {0: seen(waits_since_s=0), 1: seen(phase)}
    assert find_overdue(pages, PhaseTimeouts(600), now_ns=3599 * SECOND) is None
    assert find_overdue(pages, PhaseTimeouts(600), now_ns=3606 * SECOND) is not None


def test_who_comes_out_of_a_long_phase_gets_a_steps_time_from_then_on() -> None:
    pages = {0: seen(waits_since_s=0), 1: seen(Phase.BETWEEN_STEPS, at_s=3000)}
    assert find_overdue(pages, PhaseTimeouts(600), now_ns=3604 * SECOND) is None
    assert find_overdue(pages, PhaseTimeouts(600), now_ns=3606 * SECOND) is not None


def test_ranks_that_wait_for_each_other_or_for_nobody_are_not_late() -> None:
    everybody_waits = {0: seen(waits_since_s=0), 1: seen(waits_since_s=1)}
    nobody_waits = {0: seen(), 1: seen(Phase.MAIN_FIRST)}
    has_left = {0: seen(waits_since_s=0), 1: seen(Phase.ENDED), 2: None}
    for pages in (everybody_waits, nobody_waits, has_left):
        assert find_awaited(pages, PhaseTimeouts(), now_ns=10_000 * SECOND) == []
