"""Planted causes are found by their names, and nothing else is: on records as ranks would have left them."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from evenstep.tools.bench.decompose import Decomposition, Parts
from evenstep.tools.bench.findings import Case, Finding, find, unexplained
from evenstep.tools.bench.records import Facts
from evenstep.tools.bench.report import case_of
from evenstep.tools.bench.scaling import curve
from tests.bench_runs import CALM, Phases, calm, weak_pair

FACTS = Facts(wrapper="evenstep", num_cores=8)


def findings(size: int, phases: Callable[[int, int], Phases], **given: Any) -> list[Finding]:
    found = weak_pair(size, phases, **{"facts": FACTS, **given})
    return find(case_of(curve(found.curves["weak"], found.rounds)[-1]))


def only(found: list[Finding], cause: str) -> Finding:
    assert [finding.cause for finding in found] == [cause]
    assert found[0].gain > 1
    return found[0]


def with_(**changed: float) -> Callable[[int, int], Phases]:
    return lambda rank, step: {**CALM, **changed}


SIZES = pytest.mark.parametrize("size", [2, 4, 8])


@SIZES
def test_a_healthy_script_has_nothing_to_report(size: int, fresh_seed: int) -> None:
    for noise in (0.0, 0.02, 0.05):
        assert findings(size, calm, exchange_ms=4, seed=fresh_seed, noise=noise) == []
    assert findings(1, calm) == []


@SIZES
def test_a_slow_loader(size: int, fresh_seed: int) -> None:
    found = only(findings(size, with_(data=80.0), exchange_ms=4, seed=fresh_seed), "slow loader")
    assert found.gain == pytest.approx((94.2 + 80 + 4) / (94.2 + 4), rel=0.02)
    assert "num_workers=0" in found.what
    if size < 8:
        assert found.advice.startswith("with `num_workers=1` loading hides behind the rest: 1")
    else:
        assert found.advice.startswith("make `__getitem__` cheaper, or prepare data beforehand (1 worker a rank would")
    only(findings(1, with_(data=80.0), seed=fresh_seed), "slow loader")


@SIZES
@pytest.mark.parametrize("phase", ["data", "forward", "backward", "script"])
def test_one_slow_rank_is_named_with_its_phase(size: int, phase: str, fresh_seed: int) -> None:
    late = random.Random(fresh_seed).randrange(size)
    print(f"rank {late}")  # noqa: T201

    def phases(rank: int, step: int) -> Phases:
        return {**CALM, phase: CALM[phase] + (200.0 if rank == late else 0.0)}

    found = only(findings(size, phases, alone=calm, exchange_ms=4, noise=0), "slow rank")
    words = {"data": "waiting for data", "script": "the script's own work"}.get(phase, f"the {phase} pass")
    assert found.what.startswith(f"rank {late} is the last one ready in 100% of the steps, 200 ms after")
    assert words in found.what
    assert found.gain == pytest.approx(298.2 / 98.2, rel=0.05)


def test_beside_other_programs_only_what_is_large_is_told(fresh_seed: int) -> None:
    """They make everything longer: a sixth of the step is nothing then, and two thirds still are."""
    for data, causes in ((20.0, []), (200.0, ["slow loader"])):
        found = weak_pair(2, with_(data=data), alone=calm, exchange_ms=4, seed=fresh_seed, facts=FACTS)
        case = case_of(curve(found.curves["weak"], found.rounds)[-1])
        only(find(case), "slow loader")
        assert [each.cause for each in find(replace(case, num_cores_elsewhere=1.5))] == causes


def test_uneven_work_is_nobodys_fault(fresh_seed: int) -> None:
    draw = random.Random(fresh_seed)
    times = {(rank, step): draw.uniform(20, 200) for rank in range(4) for step in range(40)}
    uneven = weak_pair(
        4,
        lambda rank, step: {**CALM, "backward": times[rank, step]},
        alone=with_(backward=110),
        exchange_ms=4,
        seed=fresh_seed,
        facts=FACTS,
    )
    shown = case_of(curve(uneven.curves["weak"], uneven.rounds)[-1])
    assert find(shown) == []
    (line,) = unexplained(shown, [])
    assert re.match(r"imbalance is [\d.]+ ms of a step, \d\d%, of unknown cause", line)


def test_what_a_batch_twice_as_large_does_is_computed() -> None:
    """18 of 100 ms are communication; with twice the batch 82 ms become 164."""
    phases = {"forward": 30.0, "backward": 52.0}
    found = only(findings(2, lambda r, s: phases, exchange_ms=18, noise=0), "small batch")
    assert "batch 32 to 64 a replica: exposed communication falls from 18% to 10%" in found.advice
    assert found.gain == pytest.approx(2 * 100 / 182)


@SIZES
def test_oversubscribed_threads(size: int, fresh_seed: int) -> None:
    facts = replace(FACTS, num_threads=8)
    slower = with_(forward=60, backward=120)
    found = only(findings(size, slower, alone=calm, seed=fresh_seed, facts=facts), "contention")
    assert f"{size} ranks compute with {8 * size} threads on 8 cores" in found.what
    assert "no `torch.set_num_threads` in the script" in found.advice
    assert findings(size, calm, seed=fresh_seed, facts=facts) == [], "too many threads that cost nothing"


@SIZES
def test_contention(size: int, fresh_seed: int) -> None:
    found = only(findings(size, with_(forward=45, backward=90), alone=calm, seed=fresh_seed), "contention")
    assert "memory bandwidth" in found.what
    assert found.gain == pytest.approx(139 / 94.7, rel=0.05)


def test_a_smaller_batch_that_computes_more_slowly_is_no_contention(fresh_seed: int) -> None:
    found = weak_pair(2, with_(forward=45, backward=90), alone=calm, seed=fresh_seed, facts=FACTS)
    assert find(case_of(curve(found.curves["weak"], found.rounds)[-1], divides_batch=True)) == []


def on_gpu(**parts: float) -> Case:
    """A step on two GPUs."""
    whole = Decomposition(Parts(**parts), None, (0.09, 0.09), 5)
    return Case(2, 32, whole, replace(FACTS, device="cuda", backend="nccl"), num_threads=16)


def test_a_gpu_that_waits_for_its_host() -> None:
    case = on_gpu(compute_s=0.05, exposed_s=0.004, idle_s=0.04)
    lines = (("train.py:12", 1.0), ("train.py:13", 3.0), ("train.py:99", 0.1))
    found = only(find(replace(case, syncs=lines)), "host-bound")
    assert found.what.startswith(
        "the GPU has nothing to do for 40 ms of 94 ms, 43%: the host waits for the GPU (.item()"
    )
    assert found.what.endswith(" in train.py:12, train.py:13 (3 times a step)")
    assert found.gain == pytest.approx(94 / 54)
    launches = only(find(case), "host-bound")
    assert launches.what.endswith("the host launches kernels more slowly than the GPU computes them")
    assert "torch.compile" in launches.advice
    assert find(replace(on_gpu(compute_s=0.09, exposed_s=0.002, idle_s=0.004), syncs=lines)) == [], "it is busy"
    assert find(replace(case, spread=0.45)) == []
    assert unexplained(replace(case, spread=0.45), []) == ["an idle GPU is 40 ms of a step, 43%, of unknown cause"]


def test_a_loss_smaller_than_what_rounds_differ_by_is_none(fresh_seed: int) -> None:
    """The quartiles of the step are 40 % apart: a part of 20 % is no finding."""
    measured = weak_pair(2, with_(data=24.0), exchange_ms=4, seed=fresh_seed, facts=FACTS)
    case = case_of(curve(measured.curves["weak"], measured.rounds)[-1])
    only(find(case), "slow loader")
    assert find(replace(case, spread=0.4)) == []


def case(phases: Callable[[int, int], Phases], **given: Any) -> Case:
    found = weak_pair(2, phases, **{"facts": FACTS, **given})
    return case_of(curve(found.curves["weak"], found.rounds)[-1])


def test_parameters_that_fsdp2_gathers_twice_are_gathered_once() -> None:
    shown = case(calm, exchange_ms=60, noise=0, facts=replace(FACTS, wrapper="fsdp", backend="nccl"))
    found = only(find(shown), "exposed communication")
    assert "`fully_shard(..., reshard_after_forward=False)`" in found.advice
    assert found.gain == pytest.approx(154.7 / 134.7, rel=1e-3)
    gloo = only(find(replace(shown, facts=replace(shown.facts, backend="gloo"))), found.cause)
    assert "over Gloo" in gloo.what


def test_exchanges_over_gloo_on_cpus_have_a_faster_backend() -> None:
    facts = Facts(wrapper="torch", backend="gloo", num_cores=4)
    parts = Parts(compute_s=0.05, exposed_s=0.02, engine_s=0.01, optimizer_s=0.04)
    case = Case(2, 16, Decomposition(parts, None, (0.05, 0.05), 20), facts, num_threads=4)
    found = only(find(case), "exposed communication")
    assert found.gain == pytest.approx(120 / 90)
    assert '`init_process_group("evenstep")`' in found.advice
    for other in ({"backend": "evenstep"}, {"wrapper": "evenstep"}, {"device": "cuda"}):
        only(find(replace(case, facts=replace(facts, **other))), "small batch")  # type: ignore[arg-type]
    assert find(replace(case, num_replicas=1)) == []
