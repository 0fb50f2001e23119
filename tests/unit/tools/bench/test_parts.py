"""Steps in parts that add up: marks, ranks that wait for each other, efficiency over rounds, the order of runs."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

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
from evenstep.tools.bench.decompose import Decomposition, decompose
from evenstep.tools.bench.plan import Setting, default_replicas, plan_settings, validate_replicas
from evenstep.tools.bench.profile import Profile
from evenstep.tools.bench.records import (
    COLLECTIVE,
    COLLECTIVE_END,
    DATA,
    DATA_END,
    PHASES,
    RankRecord,
    read_record,
    sorted_marks,
    spans,
    steps_in_parts,
    write_record,
)
from evenstep.tools.bench.runs import Wish, remarks
from evenstep.tools.bench.scaling import Run, Spread, curve, median_run
from tests.bench_runs import CALM, MS, calm, make_run, weak_pair

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


def test_a_stretch_begins_in_the_phase_that_the_marks_before_it_say() -> None:
    assert spans([FORWARD, 10, FORWARD_END, 30], 20, 40) == [("forward", 20, 30), ("script", 30, 40)]


def test_waiting_for_data_in_the_middle_of_a_phase_goes_back_to_it() -> None:
    marks = [FORWARD, 0, DATA, 10, DATA_END, 20, FORWARD_END, 30]
    assert [phase for phase, *_ in spans(marks, 0, 30)] == ["forward", "data", "forward"]


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


def test_a_record_comes_back_as_it_was_written(tmp_path: Path) -> None:
    (record,) = make_run(Setting(1, 32), calm).records
    seen = Profile((0.5, 2.0), ((0.6, 0.7),), (("0: all 0", 0.8, 0.9),), (("train.py:3", 1.0),))
    record = replace(record, losses=((1.0, 2.0),), profile=seen)
    write_record(record, tmp_path / "rank-0.json")
    assert read_record(tmp_path / "rank-0.json") == record
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0.json"]
    with pytest.raises(UsageError, match=r"no rank-1.json: the script made no step"):
        read_record(tmp_path / "rank-1.json")


# ---------------------------------------------------------------------- who waits for whom


def taken_apart(
    size: int, *, exchange_ms: float = 4.0, noise: float = 0.0, slow: dict[int, float] | None = None
) -> Decomposition:
    def phases(rank: int, step: int) -> dict[str, float]:
        return {**CALM, "forward": 30.0 + (slow or {}).get(rank, 0.0)}

    return make_run(Setting(size, 32), phases, exchange_ms=exchange_ms, noise=noise).decompose()


def test_the_parts_of_equal_ranks() -> None:
    parts = taken_apart(4).parts
    told = (parts.data_s, parts.imbalance_s, parts.exposed_s, parts.engine_s, parts.optimizer_s, parts.compute_s)
    assert told == pytest.approx((0.0005, 0.0, 0.004, 0.0002, 0.003, 0.091), abs=1e-6)
    assert parts.total_s == pytest.approx(0.0987, abs=1e-6)


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


def test_ranks_that_are_slow_in_different_phases_and_wait_for_nobody_are_no_imbalance() -> None:
    def phases(rank: int, step: int) -> dict[str, float]:
        return {**CALM, ("data" if rank else "forward"): 50.0 + CALM["forward" if rank == 0 else "data"]}

    parts = make_run(Setting(2, 32), phases, exchange_ms=2, noise=0).decompose().parts
    assert parts.imbalance_s == pytest.approx(0.0, abs=1e-6)


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


def test_contention_is_what_one_replica_alone_does_not_need() -> None:
    run = make_run(Setting(2, 64), calm, noise=0)
    parts = run.decompose(compute_alone_s=0.061).parts
    assert (parts.contention_s, parts.compute_s) == pytest.approx((0.030, 0.061), abs=1e-6)
    assert run.decompose(compute_alone_s=0.2).parts.contention_s == 0.0  # faster than alone: the machine's mood


def test_nothing_to_take_apart() -> None:
    with pytest.raises(ValueError, match="no step"):
        decompose([[], []])


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


def test_computing_alone_is_that_of_one_replica_also_where_the_fewest_are_two() -> None:
    """Four ranks that compute as long as two did are not contended."""
    two, four = Setting(2, 64, 1), Setting(4, 128, 2)
    run = {each: make_run(each, calm, noise=0) for each in (two, four)}
    _, point = curve((two, four), [run])
    assert point.decomposition.parts.contention_s == pytest.approx(0.0, abs=1e-6)
    slower = {**run, four: make_run(four, lambda r, s: {**CALM, "forward": 50.0}, noise=0)}
    assert curve((two, four), [slower])[1].decomposition.parts.contention_s == pytest.approx(0.02, abs=1e-6)


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


def test_spread_and_the_run_in_the_middle() -> None:
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0)
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 5.0]) == Spread(3.0, 2.0, 4.0)
    setting = Setting(1, 32)
    runs = [make_run(setting, lambda r, s, p=p: {"forward": p}, noise=0) for p in (30.0, 10.0, 20.0)]
    assert median_run(runs) is runs[2]
    assert median_run(runs[:2]) is runs[1]


@pytest.mark.parametrize("num_rounds", [1, 2, 3, 4])
def test_parts_add_up_to_the_step_that_is_told_however_many_rounds(num_rounds: int) -> None:
    setting = Setting(1, 32)
    rounds = [{setting: make_run(setting, lambda r, s, n=n: {"forward": 10.0 * n}, noise=0)} for n in range(1, 5)]
    (point,) = curve([setting], rounds[:num_rounds])
    assert point.decomposition.parts.total_s == pytest.approx(point.step_s.median)
    assert point.samples_per_s.median == pytest.approx(32 / point.step_s.median)
    assert point.step_s.low <= point.step_s.median <= point.step_s.high


# ---------------------------------------------------------------------- which runs


def test_settings_of_both_curves_begin_with_the_same_one() -> None:
    curves = plan_settings((1, 2, 4), 32, has_strong=True)
    assert curves["weak"] == (Setting(1, 32, 1), Setting(2, 64, 2), Setting(4, 128, 4))
    assert curves["strong"] == (Setting(1, 32, 1), Setting(2, 32, 1), Setting(4, 32, 1))
    assert plan_settings((2, 4), None, has_strong=False) == {"weak": (Setting(2, None, 1), Setting(4, None, 2))}


def test_rounds_go_up_and_down_and_have_each_setting_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was run before isn't run again, traces are kept of the job that they are asked for, and the rest is told."""
    made: list[tuple[Setting, Path | None]] = []
    now = [100.0]

    def run_once(setting: Setting, wish: Wish, place: Path, traces: Path | None = None) -> Run:
        place.mkdir()
        made.append((setting, traces))
        now[0] += 20.0
        return Run(setting, ())

    monkeypatch.setattr(runs, "run_once", run_once)
    monkeypatch.setattr(runs.time, "monotonic", lambda: now[0])
    one, two, half = Setting(1, 32, 1), Setting(2, 64, 2), Setting(2, 32, 1)
    wish = Wish("train.py", (), (1, 2), 20, 3, 1)
    jobs = {each: (f"job {number}", each, wish) for number, each in enumerate((one, two, half))}
    said: list[str] = []
    series = runs.Series(9, tmp_path, said.append)
    done = {one: series.run("first", one, wish)}
    rounds = series.rounds(jobs, 3, done=done, traces={two: tmp_path})
    kept, others = (two, tmp_path), [(half, None), (one, None)]
    assert made[1:] == [kept, others[0], others[0], kept, others[1], others[1], kept, others[0]]
    assert said[:4] == [
        "9 runs, each of 15 minutes at most; after the first it is told about how long the rest takes",
        "run 1 of 9: first",
        "run 2 of 9: job 1; about 3 minutes left",
        "run 3 of 9: job 2; about 2 minutes left",
    ]
    assert said[-1] == "run 9 of 9: job 2; about 20 s left"
    assert [set(each) for each in rounds] == [set(jobs)] * 3
    assert rounds[0][one] is done[one]


def test_numbers_of_replicas() -> None:
    assert default_replicas(1) == (1,)
    assert default_replicas(6) == (1, 2, 4)
    assert default_replicas(8) == (1, 2, 4, 8)
    assert validate_replicas([4, 1, 2, 2]) == (1, 2, 4)
    with pytest.raises(ConfigurationError, match="--nproc-per-node 2,3: 3 is no multiple of 2, the fewest"):
        validate_replicas([2, 3])


def test_a_batch_that_cannot_be_divided() -> None:
    with pytest.raises(ConfigurationError, match="--strong: 3 samples are too few to divide over 4 replicas"):
        plan_settings((1, 2, 4), 3, has_strong=True)
    with pytest.raises(ConfigurationError, match="--strong: no loader was seen"):
        plan_settings((1, 2), None, has_strong=True)
    assert plan_settings((1, 2, 4), 1, has_strong=False)["weak"][-1] == Setting(4, 4, 4)


def test_a_reader_is_told_what_the_figures_are_worth() -> None:
    """Only what is true of these runs."""
    found = weak_pair(2, calm)
    assert found.remarks == ()
    busy = {setting: replace(run, cores_elsewhere=1.5) for setting, run in found.rounds[0].items()}
    (line,) = remarks([busy] * 3, found.wish)
    assert line.startswith("other programs kept 1.5 cores of this host busy")


def test_a_script_that_never_steps_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "LONGEST_S", 1.0)
    (tmp_path / "train.py").write_text("import time; time.sleep(600)")
    wish = Wish(str(tmp_path / "train.py"), (), (1,), 20, 1, 1, "cpu")
    with pytest.raises(UsageError, match="not over after 1 s"):
        runs.run_once(Setting(1, None), wish, tmp_path / "run")


def test_what_other_programs_use_is_what_the_ranks_have_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 30 seconds of the host's cores in 10 the ranks and their loaders have used 25."""
    (record,) = make_run(Setting(1, 32), calm).records
    made = SimpleNamespace(process=SimpleNamespace(wait=lambda limit_s: 0))
    clocks = iter([(0.0, 100.0, 5.0), (10.0, 130.0, 30.0)])
    monkeypatch.setattr(runs, "launched", lambda *_: nullcontext(made))
    monkeypatch.setattr(runs, "read_record", lambda path: record)
    monkeypatch.setattr(runs, "_clocks", lambda: next(clocks))
    wish = Wish("train.py", (), (1,), 20, 1, 1, "cpu")
    assert runs.run_once(Setting(1, None), wish, tmp_path / "run").cores_elsewhere == pytest.approx(0.5)
