"""Which changes `bench --try` makes, what it expects of them, and what it says of their figures: decided purely."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from evenstep.bench.explain.findings import Case, find, grown
from evenstep.bench.measure.decompose import Decomposition, Parts
from evenstep.bench.measure.records import Facts
from evenstep.bench.measure.scaling import Spread
from evenstep.bench.remedies.calibrate import ratios_of, repeats_of
from evenstep.bench.remedies.changes import (
    CHANGES,
    Candidate,
    Costs,
    Uses,
    has_hold,
    plan_changes,
    predict,
    validate_names,
)
from evenstep.bench.remedies.results import (
    Agreement,
    Trial,
    best_combination,
    by_finding,
    compare_losses,
    in_turn,
    merge,
    ranked,
)
from evenstep.bench.remedies.trials import reason_of
from evenstep.errors import ConfigurationError

FACTS = Facts(wrapper="torch", num_cores=4, gradient_bytes=8 << 20, num_tensors=6, bucket_bytes=(4 << 20, 4 << 20))
FACTS = replace(FACTS, backend="gloo")
USES = Uses(backend="gloo", wrapper="torch", optimizer="AdamW", dtype_of_loss="float32")
QUARTER = Spread(0.25, 0.2, 0.3)
COSTS = Costs(
    {
        "backend": {"exchange": QUARTER},
        "wrapper": {"exchange": QUARTER},
        "sharded": {"exchange": QUARTER, "optimizer": QUARTER},
        "fused": {"optimizer": QUARTER},
        "16-bit": {"exchange": Spread(0.5, 0.5, 0.5)},
    }
)
OK = Agreement(0.0, 1e-3)


def case_with(uses_threads: int = 4, **milliseconds: float) -> Case:
    parts = Parts(**{f"{name}_s": value / 1e3 for name, value in ({"compute": 50.0} | milliseconds).items()})
    return Case(2, 16, Decomposition(parts, None, (0.05, 0.05), 20), FACTS, num_threads=uses_threads)


def trial(name: str, *gains: float, agreement: Agreement = OK) -> Trial:
    return Trial((name,), CHANGES[name].title, CHANGES[name].lines, Spread(1.5, 1.4, 1.6), gains, agreement)


def first(case: Case, uses: Uses = USES, busy_cores: float = 2.0) -> str:
    return plan_changes(case, uses, COSTS, busy_cores=busy_cores).candidates[0].change


def test_the_largest_part_decides_what_comes_first() -> None:
    assert first(case_with(exposed=40)) in ("backend", "wrapper", "sharded")
    assert first(case_with(optimizer=40, exposed=1)) in ("fused", "sharded")
    assert first(case_with(data=90)) == "workers"
    same = Costs({"wrapper": {"exchange": Spread(1, 1, 1)}, "16-bit": {"exchange": Spread(0.5, 0.5, 0.5)}})
    far = replace(USES, backend="evenstep", num_nodes=2, optimizer="")
    assert plan_changes(case_with(exposed=90), far, same, busy_cores=2.0).candidates[0].change == "16-bit"
    assert plan_changes(case_with(), USES, COSTS, busy_cores=2.0).candidates == ()


def test_noise_promises_nothing() -> None:
    """Rounds that differ widen a prediction; what could gain nothing is not tried because of that."""
    noisy = replace(case_with(exposed=40, data=0.1), spread=0.4)
    plan = plan_changes(noisy, USES, COSTS, busy_cores=2.0)
    assert "nothing to expect" in dict(plan.skipped)["workers"]
    assert plan.candidates[0].predicted.low < predict("sharded", case_with(exposed=40), COSTS, busy_cores=2.0).low
    assert any(
        each.change == "workers"
        for each in plan_changes(noisy, USES, COSTS, busy_cores=2.0, only=["workers"]).candidates
    )


def test_short_work_is_timed_in_blocks(fresh_seed: int) -> None:
    draw = random.Random(fresh_seed)
    for seconds in [10 ** draw.uniform(-7, 1) for _ in range(50)]:
        repeats = repeats_of(seconds)
        assert 1 <= repeats <= 200
        assert repeats in (1, 200) or 0.01 < repeats * seconds < 0.06
    assert repeats_of(0.0) == 200


def test_what_does_not_fit_a_script_is_skipped_with_its_reason() -> None:
    uses = replace(USES, optimizer="LBFGS", options={"gradient_as_bucket_view": True})
    plan = plan_changes(case_with(exposed=40), uses, COSTS, busy_cores=2.0)
    reasons = dict(plan.skipped)
    assert reasons["fused"] == "LBFGS has no fused form"
    assert "each element by itself" in reasons["sharded"]
    assert "is set already" in reasons["view"]
    assert "find_unused_parameters isn't set" in reasons["static-graph"]
    assert "one node" in reasons["16-bit"]
    assert {each.change for each in plan.candidates} | set(reasons) == set(CHANGES)


def test_one_replica_has_nothing_to_exchange() -> None:
    plan = plan_changes(replace(case_with(exposed=40), num_replicas=1), USES, COSTS, busy_cores=1.0)
    assert not {"backend", "wrapper", "sharded"} & {each.change for each in plan.candidates}


def test_asking_for_changes_tries_them_whatever_they_promise() -> None:
    plan = plan_changes(case_with(), USES, COSTS, busy_cores=2.0, only=["view", "fused"])
    assert {each.change for each in plan.candidates} == {"view", "fused"}
    for names in (["fuse"], []):
        with pytest.raises(ConfigurationError, match="--only"):
            validate_names(names)
    assert validate_names(None) is None


def test_a_prediction_is_what_the_remedy_takes_off_a_part() -> None:
    gain = predict("fused", case_with(optimizer=50), COSTS, busy_cores=2.0)
    assert gain.median == pytest.approx(100 / (100 - 50 * 0.75))
    assert gain.low == pytest.approx(100 / (100 - 50 * 0.7))
    assert gain.high == pytest.approx(100 / (100 - 50 * 0.8))
    # Loading on cores that are all busy already gains nothing.
    assert predict("workers", case_with(data=50), COSTS, busy_cores=4.0).median == 1.0
    assert predict("workers", case_with(data=50), COSTS, busy_cores=1.0).median == pytest.approx(2.0)
    # No more than twice as many workers as cores, here eight, are proposed: their loading is still waited for.
    starved = case_with(compute=2, data=98)
    assert predict("workers", starved, COSTS, busy_cores=0.1).median == pytest.approx(100 / (98 / 8))


@pytest.mark.parametrize(
    ("change", "settings", "unchanged", "changed"),
    [
        ("backend", {}, USES, replace(USES, backend="evenstep")),
        ("wrapper", {}, USES, replace(USES, wrapper="evenstep")),
        ("sharded", {}, USES, replace(USES, wrapper="evenstep", optimizer="")),
        ("16-bit", {}, replace(USES, options={"hook": False}), replace(USES, options={"hook": True})),
        ("view", {}, USES, replace(USES, options={"gradient_as_bucket_view": True})),
        ("static-graph", {}, USES, replace(USES, options={"static_graph": True})),
        ("fused", {}, USES, replace(USES, optimizer_options={"fused": True})),
        ("workers", {"num_workers": 3}, replace(USES, num_workers=2), replace(USES, num_workers=3)),
        ("pin-memory", {}, USES, replace(USES, pin_memory=True)),
    ],
)
def test_a_change_that_did_not_reach_the_script_is_noticed(
    change: str, settings: dict[str, float], unchanged: Uses, changed: Uses
) -> None:
    assert has_hold(change, settings, changed)
    assert not has_hold(change, settings, unchanged)


def test_predictions_are_ordered_whatever_the_parts(fresh_seed: int) -> None:
    draw = random.Random(fresh_seed)
    for _ in range(200):
        names = ("data", "exposed", "engine", "optimizer", "contention", "imbalance")
        case = replace(case_with(**{name: draw.uniform(0, 100) for name in names}), spread=draw.uniform(0, 1))
        for name in CHANGES:
            gain = predict(name, case, COSTS, busy_cores=draw.uniform(0.1, 4))
            assert 0 < gain.low <= gain.median <= gain.high, (name, gain)


def test_losses_agree_within_what_dtype_and_script_allow() -> None:
    losses = [2.0, 1.5, 1.0]
    near, far = [2.0, 1.5, 1.0001], [2.0, 1.5, 1.05]
    assert compare_losses([losses], [near], "float32", ["fused"]).is_ok
    assert not compare_losses([losses], [near], "float64", ["fused"]).is_ok
    assert not compare_losses([losses], [far], "float32", ["fused"]).is_ok
    assert compare_losses([losses], [far], "float32", ["16-bit"]).is_ok
    assert compare_losses([losses, far], [far, far], "float32", ["fused"]).is_ok  # the script differs by itself
    assert not compare_losses([losses], [[2.0, 1.5, float("nan")]], "float32", ["fused"]).is_ok
    assert compare_losses([losses], [losses[:2]], "float32", ["fused"]).difference is None
    assert not compare_losses([[]], [[]], "", []).is_ok


def test_the_best_combination_takes_what_helps_and_excludes_nothing() -> None:
    trials = [
        trial("backend", 1.4, 1.5),
        trial("wrapper", 1.3, 1.4),
        trial("fused", 1.2, 1.3),
        trial("workers", 0.9, 1.3),  # not in three quarters of the rounds
        trial("one-bucket", 3.0, 3.0, agreement=Agreement(0.5, 1e-3)),  # computes something else
    ]
    assert [each.changes[0] for each in best_combination(trials)] == ["backend", "fused"]
    assert ranked(trials)[-1].changes == ("one-bucket",)
    assert by_finding(["slow exchange", "slow loader", "slow rank"], trials)["slow exchange"].changes == ("backend",)
    assert set(by_finding(["slow rank"], trials)) == set()
    candidates = {
        name: Candidate(name, {"a": 1.0}, Spread(1, 1, 1), CHANGES[name].lines) for name in ("wrapper", "sharded")
    }
    title, lines, settings = merge(candidates, ("wrapper", "sharded"))
    assert title == "evenstep.DistributedDataParallel + ShardedOptimizer"
    assert lines.count("import evenstep\n") == 1
    assert settings == {"a": 1.0}


def test_predicted_and_measured_are_compared_by_their_spreads() -> None:
    assert trial("fused", 1.55, 1.7).as_predicted
    assert not trial("fused", 1.7, 1.8).as_predicted
    assert trial("fused").as_predicted is None


def test_rounds_alternate() -> None:
    assert in_turn(["", "a", "b"], 0) == ["", "a", "b"]
    assert in_turn(["", "a", "b"], 1) == ["b", "a", ""]
    assert ratios_of({"now": [2.0, 4.0], "fused": [1.0, 1.0]}, "now") == {"fused": [0.5, 0.25]}


def test_a_failed_change_has_one_line_of_reason() -> None:
    said = "train.py failed with status 1. It said:\nTraceback:\n  File\nevenstep.errors.UsageError: too bad\nbye"
    assert "too bad" in reason_of(said)
    assert "\n" not in reason_of(said)
    assert reason_of("")


def test_exchanges_over_gloo_and_an_optimizer_that_has_grown_are_findings() -> None:
    case = replace(case_with(exposed=30, optimizer=40), alone=Parts(compute_s=0.05, optimizer_s=0.01))
    found = {finding.cause: finding for finding in find(case)}
    assert found["slow exchange"].gain == pytest.approx(120 / 90)
    assert 'init_process_group("evenstep")' in found["slow exchange"].advice
    assert found["slow optimizer"].gain == pytest.approx(120 / 100)
    assert "ShardedOptimizer" in found["slow optimizer"].advice
    assert [part for part, _ in grown(case)] == ["exposed", "optimizer"]
    ours = replace(case, facts=replace(FACTS, backend="evenstep"), alone=None)
    assert not {"slow exchange", "slow optimizer"} & {finding.cause for finding in find(ours)}
