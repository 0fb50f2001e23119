"""Steps in parts that add up: marks, ranks that wait for each other, efficiency over rounds, the order of runs."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest

from evenstep.errors import ConfigurationError, UsageError
from evenstep.ground.health.telemetry import (
    BACKWARD,
    END,
    FORWARD,
    FORWARD_END,
    OPTIMIZER,
    OPTIMIZER_END,
    REDUCED,
    WAITING,
)
from evenstep.tools.bench import runs
from evenstep.tools.bench.decompose import Decomposition
from evenstep.tools.bench.plan import Setting, plan_settings
from evenstep.tools.bench.records import (
    COLLECTIVE,
    COLLECTIVE_END,
    DATA,
    DATA_END,
    PHASES,
    RankRecord,
    sorted_marks,
    spans,
    steps_in_parts,
)
from evenstep.tools.bench.runs import Wish
from evenstep.tools.bench.scaling import curve
from tests.bench_runs import CALM, MS, calm, make_run

# ---------------------------------------------------------------------- marks


def test_every_instant_has_one_phase() -> None:
    marks = [DATA, 2, DATA_END, 5, FORWARD, 6, FORWARD_END, 16, BACKWARD, 18, 1, 20, 0, 25, WAITING, 28, REDUCED, 33]
    marks += [END, 34, OPTIMIZER, 36, OPTIMIZER_END, 40]
    assert spans(marks, 0, 40) == [
        ("script", 0, 2),
        ("data", 2, 5),
        ("script", 5, 6),
        ("forward", 6, 16),
        ("script", 16, 18),
        ("backward", 18, 28),
        ("wait", 28, 33),
        ("engine", 33, 34),
        ("script", 34, 36),
        ("optimizer", 36, 40),
    ]


def test_collectives_in_the_middle_of_a_phase_are_waiting_and_go_back_to_it() -> None:
    marks = [FORWARD, 0, COLLECTIVE, 2, COLLECTIVE_END, 5, BACKWARD, 6, COLLECTIVE, 7, COLLECTIVE_END, 9, END, 10]
    assert spans(marks, 0, 12) == [
        ("forward", 0, 2),
        ("wait", 2, 5),
        ("forward", 5, 6),
        ("backward", 6, 7),
        ("wait", 7, 9),
        ("backward", 9, 10),
        ("script", 10, 12),
    ]


def test_any_marks_give_steps_whose_phases_add_up(fresh_seed: int) -> None:
    """Whatever is missing, doubled or out of order."""
    draw = random.Random(fresh_seed)
    for _ in range(200):
        marks = [n for _ in range(draw.randrange(60)) for n in (draw.choice(range(-24, 4)), draw.randrange(100 * MS))]
        ends = tuple(sorted(draw.sample(range(100 * MS), draw.randrange(2, 6))))
        record = RankRecord(0, 1, 1, ends, (1,) * len(ends), tuple(sorted_marks(marks)))
        steps = steps_in_parts(record)
        assert len(steps) == len(ends) - 1
        for step, (began, ended) in zip(steps, pairwise(ends), strict=True):
            assert set(step) == set(PHASES)
            assert min(step.values()) >= 0
            assert sum(step.values()) == pytest.approx((ended - began) / 1e9, abs=1e-12)


# ---------------------------------------------------------------------- who waits for whom


def taken_apart(
    size: int, *, exchange_ms: float = 4.0, noise: float = 0.0, slow: dict[int, float] | None = None
) -> Decomposition:
    def phases(rank: int, step: int) -> dict[str, float]:
        return {**CALM, "forward": 30.0 + (slow or {}).get(rank, 0.0)}

    return make_run(Setting(size, 32), phases, exchange_ms=exchange_ms, noise=noise).decompose()


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_one_slow_rank_is_what_it_costs_the_others(size: int) -> None:
    """Also with two ranks, where the average rank is half slow: what would go without it is all of the 200 ms."""
    found = taken_apart(size, slow={1: 200.0})
    assert found.parts.imbalance_s == pytest.approx(0.2, abs=1e-6)
    assert found.parts.exposed_s == pytest.approx(0.004, abs=1e-6)
    assert found.parts.compute_s == pytest.approx(0.091, abs=1e-6)
    assert found.late is not None
    assert (found.late.rank, found.late.phase, found.late.share_of_steps) == (1, "forward", 1.0)
    assert found.late.excess_s == pytest.approx(0.2, abs=1e-6)
    assert found.ready_s[1] - found.ready_s[0] == pytest.approx(0.2, abs=1e-6)


def test_parts_add_up_to_the_measured_step(fresh_seed: int) -> None:
    """For any ranks: what is told of a step is the step that was measured."""
    draw = random.Random(fresh_seed)
    for _ in range(40):
        size = draw.choice([1, 2, 3, 4, 7])
        scale = {(r, k): draw.uniform(0.2, 3) for r in range(size) for k in CALM}
        run = make_run(
            Setting(size, 32),
            lambda rank, step, scale=scale: {k: v * scale[rank, k] for k, v in CALM.items()},
            exchange_ms=draw.uniform(0, 30),
            seed=draw.randrange(1 << 30),
            noise=draw.uniform(0, 0.6),
        )
        alone_s = draw.choice([None, draw.uniform(0, 0.2)])
        parts = run.decompose(compute_alone_s=alone_s).parts
        assert parts.total_s == pytest.approx(run.step_s, rel=1e-6)
        assert all(getattr(parts, f"{name}_s") >= 0 for name in ("data", "imbalance", "exposed", "contention"))
        if size == 1:
            assert parts.imbalance_s == pytest.approx(0, abs=1e-9)


# ---------------------------------------------------------------------- efficiency


def test_efficiency_is_compared_within_a_round() -> None:
    """The machine is half as fast in the second round, and the figures don't move."""
    one, two = Setting(1, 32, 1), Setting(2, 64, 2)
    rounds = []
    for pace in (1.0, 2.0, 1.3):
        rounds.append(
            {
                setting: make_run(
                    setting,
                    lambda r, s, pace=pace: {k: v * pace for k, v in CALM.items()},
                    exchange_ms=5 * pace,
                    noise=0,
                )
                for setting in (one, two)
            }
        )
    _, point = curve((one, two), rounds)
    expected = 94.7 / 99.7
    assert (point.efficiency.low, point.efficiency.median, point.efficiency.high) == pytest.approx([expected] * 3)
    assert point.speedup.median == pytest.approx(2 * expected)
    assert point.step_s.median == pytest.approx(0.0997 * 1.3, rel=1e-3)
    assert point.decomposition.parts.total_s == pytest.approx(point.run.step_s)


def test_strong_scaling_compares_computing_by_the_sample() -> None:
    one, four = Setting(1, 32), Setting(4, 32)
    quarter = {k: v / 4 for k, v in CALM.items()}
    runs = {
        one: make_run(one, calm, noise=0),
        four: make_run(four, lambda r, s: quarter, rows=8, exchange_ms=1, noise=0),
    }
    base, point = curve((one, four), [runs])
    assert base.efficiency.median == 1.0
    assert point.speedup.median == pytest.approx(94.7 / (94.7 / 4 + 1), rel=1e-4)
    assert point.decomposition.parts.contention_s == pytest.approx(0, abs=1e-6)


# ---------------------------------------------------------------------- which runs


def test_settings_of_both_curves_begin_with_the_same_one() -> None:
    curves = plan_settings((1, 2, 4), 32, has_strong=True)
    assert curves["weak"] == (Setting(1, 32, 1), Setting(2, 64, 2), Setting(4, 128, 4))
    assert curves["strong"] == (Setting(1, 32, 1), Setting(2, 32, 1), Setting(4, 32, 1))
    assert plan_settings((2, 4), None, has_strong=False) == {"weak": (Setting(2, None, 1), Setting(4, None, 2))}


def test_a_batch_that_cannot_be_divided() -> None:
    with pytest.raises(ConfigurationError, match="--strong: 3 samples are too few to divide over 4 replicas"):
        plan_settings((1, 2, 4), 3, has_strong=True)
    with pytest.raises(ConfigurationError, match="--strong: no loader was seen"):
        plan_settings((1, 2), None, has_strong=True)
    assert plan_settings((1, 2, 4), 1, has_strong=False)["weak"][-1] == Setting(4, 4, 4)


def test_a_script_that_never_steps_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "LONGEST_S", 1.0)
    (tmp_path / "train.py").write_text("import time; time.sleep(600)")
    wish = Wish(str(tmp_path / "train.py"), (), (1,), 20, 1, 1, "cpu")
    with pytest.raises(UsageError, match="not over after 1 s"):
        runs.run_once(Setting(1, None), wish, tmp_path / "run")
