"""The cost of collectives and the simulated step: formulas by hand, limits, and what must hold for any input."""

from __future__ import annotations

import json
import math
import random

import pytest

from evenstep.bench.predict.cost import (
    ALGORITHMS,
    COLLECTIVES,
    Collective,
    Link,
    Network,
    Topology,
    Trip,
    bus_factor,
    collective_s,
    fit_link,
    group_trips,
)
from evenstep.bench.predict.profile import combine, profile_of_report, summarise
from evenstep.bench.predict.simulate import (
    VARIANTS,
    Bucket,
    Profile,
    SimulatedStep,
    expected_maximum,
    predict,
    prediction_table,
    simulate_step,
)
from evenstep.errors import ConfigurationError, UsageError
from evenstep.health.telemetry import StepTimes

INSIDE, BETWEEN = Link(1e-6, 100e9), Link(10e-6, 10e9)
MIB = 1 << 20


def network(algorithm: str = "ring") -> Network:
    return Network(INSIDE, BETWEEN, algorithm)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- collectives


def test_a_ring_by_hand() -> None:
    """8 ranks on 2 nodes: 14 stages of which 2 cross; 2 * 7/8 of the vector through the narrowest link."""
    expected = 12 * 1e-6 + 2 * 10e-6 + 2 * 7 / 8 * 80 * MIB / 10e9
    assert collective_s("all_reduce", 80 * MIB, Topology(2, 4), network()) == pytest.approx(expected)
    half = 6 * 1e-6 + 1 * 10e-6 + 7 / 8 * 80 * MIB / 10e9
    for name in ("reduce_scatter", "all_gather"):
        assert collective_s(name, 80 * MIB, Topology(2, 4), network()) == pytest.approx(half)


def test_a_ring_inside_one_node_knows_nothing_of_the_wire() -> None:
    expected = 6 * 1e-6 + 2 * 3 / 4 * MIB / 100e9
    assert collective_s("all_reduce", MIB, Topology(1, 4), network()) == pytest.approx(expected)


def test_a_tree_by_hand() -> None:
    """Latency grows with the logarithm of the nodes, and NCCL takes it where a ring's stages cost more."""
    tree = 2 * (3 * 1e-6 + 5 * 10e-6) + 2 * 4096 / 10e9
    assert collective_s("all_reduce", 4096, Topology(32, 4), network("tree")) == pytest.approx(tree)
    assert collective_s("all_reduce", 4096, Topology(32, 4), network("nccl")) == pytest.approx(tree)
    ring = collective_s("all_reduce", 1 << 34, Topology(32, 4), network("ring"))
    assert collective_s("all_reduce", 1 << 34, Topology(32, 4), network("nccl")) == pytest.approx(ring)


def test_halving_by_hand() -> None:
    intra_node = 3 * 1e-6 + 3 / 4 * MIB / 100e9
    inter_node = 3 * 10e-6 + 7 / 8 * MIB / 10e9
    assert collective_s("all_reduce", MIB, Topology(8, 4), network("halving")) == pytest.approx(
        2 * (intra_node + inter_node)
    )


def test_hierarchical_by_hand() -> None:
    """What is expected is added, exchanged in one message and spread; of a long vector the pieces overlap."""
    intra_node = 1.5 * (1e-6 + MIB / 100e9)
    inter_node = 10e-6 + 2 * (128 + MIB / 2) / 10e9
    assert collective_s("all_reduce", MIB, Topology(2, 2), network("hierarchical")) == pytest.approx(
        intra_node + inter_node
    )
    long = 64 * MIB  # 16 pieces, of which the first is added while nodes compare what they call
    added, inter_node = 16 * 1e-6 + long / 100e9, 10e-6 + long / 10e9
    assert collective_s("all_reduce", long, Topology(2, 2), network("hierarchical")) == pytest.approx(
        inter_node + 1.5 * added / 16
    )


def test_nodes_that_compare_for_longer_than_a_piece_is_added() -> None:
    """Two pieces of 1 MiB: compare, swap both, spread the second one."""
    links = Network(Link(1e-6, 100e9), Link(5e-3, 10e9), "hierarchical")
    comparing, inter_node = 5e-3 + 2 * 4096 / 10e9, 5e-3 + 2 * MIB / 10e9
    added = 1e-6 + MIB / 100e9  # one of them
    expected = comparing + inter_node + added / 2
    assert collective_s("all_reduce", 2 * MIB, Topology(2, 2), links) == pytest.approx(expected)


def test_short_vectors_and_halves_of_an_all_reduce_by_hand() -> None:
    links = network("hierarchical")
    comparing = 3 * 10e-6 + 3 * 2 * 4096 / 10e9  # of 4 nodes of 2 ranks
    added = 1e-6 + 1024 / 100e9
    assert collective_s("all_reduce", 1024, Topology(4, 2), links) == pytest.approx(added + comparing)
    half = 1e-6 + MIB / 2 / 100e9
    sent_at_once = 10e-6 + 3 / 4 * MIB / 10e9
    scattered = collective_s("reduce_scatter", MIB, Topology(4, 2), links)
    assert scattered == pytest.approx(max(half, comparing) + sent_at_once)
    in_a_ring = 3 * 10e-6 + 3 / 4 * MIB / 10e9
    assert collective_s("all_gather", MIB, Topology(4, 2), links) == pytest.approx(half + comparing + in_a_ring)


def test_hierarchical_of_lonely_ranks_are_gloos_ring() -> None:
    """Except for its reduce-scatter, in which everybody sends to everybody at once."""
    for name in ("all_reduce", "all_gather", "broadcast"):
        lonely = collective_s(name, MIB, Topology(4, 1), network("hierarchical"))
        assert lonely == collective_s(name, MIB, Topology(4, 1), network("ring"))
    lonely = collective_s("reduce_scatter", MIB, Topology(4, 1), network("hierarchical"))
    assert lonely == pytest.approx(10e-6 + 3 / 4 * MIB / 10e9)


@pytest.mark.parametrize(
    ("collective", "num_bytes", "topology", "comparing", "rest"),
    [
        ("all_reduce", 64, (2, 2), (1, 2 * 4096), (0, 0)),
        ("all_reduce", 64, (4, 8), (3, 3 * 8 * 4096), (0, 0)),
        ("all_reduce", MIB, (2, 2), (1, 2 * 128 + MIB), (0, 0)),
        ("all_reduce", 5000, (2, 8), (1, 8 * 4096), (0, 0)),  # a slice of it is shorter than the message is anyway
        ("all_reduce", MIB + 1, (2, 2), (1, 2 * 4096), (1, MIB + 1)),
        ("all_reduce", 128 << 10, (3, 4), (2, 2 * (4 * 128 + (128 << 10))), (0, 0)),
        ("all_reduce", 128 << 10, (4, 4), (3, 3 * 4 * 4096), (4, 1.5 * (128 << 10))),  # 96 KiB a rank: too much
        ("all_reduce", MIB, (4, 2), (3, 3 * 2 * 4096), (4, 1.5 * MIB)),
        ("reduce_scatter", 64, (4, 2), (3, 3 * 2 * 4096), (1, 48)),
        ("reduce_scatter", MIB, (2, 2), (1, 2 * 4096), (1, MIB / 2)),
        ("all_gather", 8 * 3968, (4, 2), (3, 3 * 2 * 4096), (0, 0)),
        ("all_gather", 8 * 3969, (4, 2), (3, 3 * 2 * 4096), (3, 6 * 3969)),
        ("broadcast", 64, (5, 2), (4, 4 * 2 * 4096), (3, 3 * 64)),
    ],
)
def test_what_lanes_send(
    collective: Collective,
    num_bytes: int,
    topology: tuple[int, int],
    comparing: tuple[int, int],
    rest: tuple[int, float],
) -> None:
    """By hand; tests/procs/transport/test_internode.py holds it against what they really send."""
    assert group_trips(collective, num_bytes, Topology(*topology)) == (Trip(*comparing), Trip(*rest))


def test_bus_factors_are_those_of_nccl_tests() -> None:
    assert [bus_factor(name, 4) for name in COLLECTIVES] == [1.5, 0.75, 0.75, 1.0]


def is_sent_at_once(name: Collective, size: float, topology: Topology) -> bool:
    """Whether groups send it with their first message: to more than two nodes more bytes, in fewer messages."""
    return group_trips(name, size, topology)[1].num_messages == 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_costs_grow_with_everything(algorithm: str, fresh_seed: int) -> None:
    """More bytes, more nodes or a slower link never cost less; alone nothing costs anything."""
    draw = random.Random(fresh_seed)
    for _ in range(200):
        name: Collective = draw.choice(COLLECTIVES)
        size, h, k = 10 ** draw.uniform(0, 9), 2 ** draw.randint(0, 7), 2 ** draw.randint(0, 3)
        links = Network(
            Link(draw.uniform(0, 1e-4), draw.uniform(1e8, 1e12)),
            Link(draw.uniform(0, 1e-3), draw.uniform(1e8, 1e11)),
            algorithm,  # type: ignore[arg-type]
        )
        costs = collective_s(name, size, Topology(h, k), links)
        assert math.isfinite(costs)
        assert costs >= 0
        assert collective_s(name, size, Topology(1, 1), links) == 0.0
        is_short = [
            is_sent_at_once(name, each, Topology(by * h, k)) for each, by in ((size, 1), (2 * size, 1), (size, 2))
        ]
        if is_short[0] == is_short[1]:
            assert collective_s(name, 2 * size, Topology(h, k), links) >= costs
        if h > 1 and is_short[0] == is_short[2]:
            assert collective_s(name, size, Topology(2 * h, k), links) >= costs
        slower = Network(
            Link(2 * links.intra_node.latency_s, links.intra_node.bytes_per_s / 2),
            Link(2 * links.inter_node.latency_s, links.inter_node.bytes_per_s / 2),
            algorithm,  # type: ignore[arg-type]
        )
        assert collective_s(name, size, Topology(h, k), slower) == pytest.approx(2 * costs)


def test_a_fit_finds_the_link_that_made_the_times(fresh_seed: int) -> None:
    draw = random.Random(fresh_seed)
    for _ in range(50):
        link = Link(draw.uniform(1e-6, 1e-3), draw.uniform(1e8, 1e11))
        points = [(size, 6 * link.latency_s + 1.5 * size / link.bytes_per_s) for size in (1e3, 1e5, 1e7, 1e9)]
        found, error = fit_link(points, stages=6, traffic=1.5)
        assert found.latency_s == pytest.approx(link.latency_s, rel=1e-3)
        assert found.bytes_per_s == pytest.approx(link.bytes_per_s, rel=1e-3)
        assert error < 1e-3


def test_a_fit_is_right_for_short_and_for_long_vectors() -> None:
    """A call over a wire of 25 MB/s that takes 2 ms at least, as one over namespaces does: no sum of the two."""
    sizes = [1 << number for number in range(10, 26, 2)]
    points = [(float(size), max(2e-3, size / 25e6)) for size in sizes]
    link, _ = fit_link(points, stages=2)
    assert link.bytes_per_s == pytest.approx(25e6, rel=0.01)
    assert link.latency_s == pytest.approx(1e-3, rel=0.3)


def test_a_fit_of_calls_that_take_about_as_long() -> None:
    link, _ = fit_link([(1000.0, 1.0e-3), (2000.0, 1.1e-3), (3000.0, 1.2e-3)])
    assert link.bytes_per_s == pytest.approx(1e7)
    assert link.latency_s == pytest.approx(0.9e-3)
    link, error = fit_link([(1.0, 1.0), (2.0, 0.01), (3.0, 1.0)])  # figures that make no sense
    assert link.latency_s == pytest.approx(1.0)
    assert error == pytest.approx(0.0)


def test_a_fit_has_no_negative_latency() -> None:
    link, error = fit_link([(1e3, 1e-9), (1e6, 1e-3)])
    assert link.latency_s == 0.0
    assert error > 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Link(-1e-6, 1e9), "latency of -1e-06"),
        (lambda: Link(math.nan, 1e9), "latency of nan"),
        (lambda: Link(0, 0), "more than 0"),
        (lambda: Topology(0, 4), "0 nodes of 4 ranks"),
        (lambda: Topology.of(12, 8), "12 ranks don't fill nodes of 8"),
        (lambda: Network(INSIDE, BETWEEN, "butterfly"), "algorithm 'butterfly'"),  # type: ignore[arg-type]
        (lambda: fit_link([(4.0, 1.0), (4.0, 2.0)]), "measure two"),
        (lambda: Profile(0, 1, 1, 1, ()), "0 samples"),
        (lambda: Profile(1, -1, 1, 1, ()), "forward_s = -1"),
        (lambda: Profile(1, 1, 1, 1, (Bucket(0, 1.0),)), "bucket 0 of 0 bytes"),
        (lambda: predict(PROFILE, network(), [], ranks_per_node=8), "numbers from 1"),
        (lambda: predict(PROFILE, network(), [8], ranks_per_node=8, global_batch=0), "global batch of 0"),
        (lambda: simulate_step(PROFILE, Topology(1, 2), network(), "fsdp"), "variant 'fsdp'"),  # type: ignore[arg-type]
        (lambda: Profile.from_json({"version": 7}), "version 7"),
        (lambda: Profile.from_json({"version": 1, "buckets": []}), "no profile"),
    ],
)
def test_what_makes_no_sense_is_refused(make: object, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make()  # type: ignore[operator]
    assert message in str(caught.value)


# ---------------------------------------------------------------------- the step

PROFILE = Profile(
    num_samples=32,
    forward_s=0.010,
    backward_s=0.020,
    optimizer_s=0.004,
    other_s=0.001,
    buckets=(Bucket(10 * MIB, 0.005), Bucket(10 * MIB, 0.012), Bucket(10 * MIB, 0.020)),
)
WIRE = Network(Link(0.0, 1e18), Link(0.0, 2e9), "ring")  # 10 MiB between 2 nodes: 5.24 ms
TAKES = 10 * MIB / 2e9


def test_overlap_by_hand() -> None:
    """Two buckets hide behind the backward pass, the third can't."""
    step = simulate_step(PROFILE, Topology(2, 1), WIRE)
    expected = [0.005, 0.005 + TAKES, 0.012, 0.012 + TAKES, 0.020, 0.020 + TAKES]
    assert [moment for times in step.bucket_times for moment in times] == pytest.approx(expected)
    header = 1024 / 2e9
    assert step.step_s == pytest.approx(0.010 + 0.020 + TAKES + header + 0.004 + 0.001)
    assert step.exposed_s == pytest.approx(TAKES + header)
    assert step.compute_s == pytest.approx(0.035)


def test_buckets_wait_for_each_other() -> None:
    """On a wire ten times slower each bucket waits for the one before it."""
    slow = Network(Link(0.0, 1e18), Link(0.0, 2e8), "ring")
    step = simulate_step(PROFILE, Topology(2, 1), slow)
    ends = [0.005 + 10 * TAKES * n for n in (1, 2, 3)]
    assert [end for _, end in step.bucket_times] == pytest.approx(ends)


def test_sharded_by_hand() -> None:
    """Half the bytes in the backward pass, half of the optimizer's time, and gathers that hide but for the last."""
    step = simulate_step(PROFILE, Topology(2, 1), WIRE, "sharded")
    reduced = 0.020 + TAKES / 2 + 1024 / 2e9
    stepping = 0.002 / 3
    gathered = stepping + 3 * TAKES / 2  # the wire is the slower one
    assert step.step_s == pytest.approx(0.010 + reduced + gathered + 0.001)


def test_stage_2_makes_the_backward_pass_wait_for_memory() -> None:
    slow = Network(Link(0.0, 1e18), Link(0.0, 2e8), "ring")
    first = simulate_step(PROFILE, Topology(2, 1), slow, "sharded")
    second = simulate_step(PROFILE, Topology(2, 1), slow, "sharded, stage 2")
    assert second.step_s >= first.step_s
    quick = Network(Link(0.0, 1e18), Link(0.0, 1e18), "ring")
    steps = [simulate_step(PROFILE, Topology(2, 1), quick, variant).step_s for variant in VARIANTS[1:]]
    assert steps[0] == pytest.approx(steps[1])


def reference(profile: Profile, takes: list[float], after_s: float) -> float:
    """The all-reduced step, by small steps of time instead of events."""
    tick, now, sent, busy_until = 1e-5, 0.0, 0, 0.0
    while sent < len(takes) or now < profile.backward_s or now < busy_until:
        if sent < len(takes) and profile.buckets[sent].ready_s <= now and busy_until <= now:
            busy_until = now + takes[sent]
            sent += 1
        now += tick
    return profile.forward_s + now + after_s


def test_against_a_simulation_by_small_steps_of_time(fresh_seed: int) -> None:
    draw = random.Random(fresh_seed)
    for _ in range(20):
        backward = draw.uniform(0.01, 0.03)
        ready = sorted(draw.uniform(0, backward) for _ in range(draw.randint(1, 6)))
        sizes = [draw.randint(MIB, 20 * MIB) for _ in ready]
        profile = Profile(
            8, draw.uniform(0, 0.02), backward, 0.003, tuple(map(Bucket, sizes, ready)), draw.uniform(0, 0.01)
        )
        topology = Topology(4, 2)
        takes = [collective_s("all_reduce", size, topology, network()) for size in sizes]
        header = collective_s("all_reduce", 1024, topology, network())
        slow = reference(profile, takes, 0.003 + profile.other_s + header)
        assert simulate_step(profile, topology, network()).step_s == pytest.approx(slow, abs=2e-4)


def parts(step: SimulatedStep) -> float:
    return step.compute_s + step.imbalance_s + step.exposed_s


def test_what_must_hold_for_any_step(fresh_seed: int) -> None:
    """Parts add up; a step takes at least its computing; more ranks are no faster."""
    draw = random.Random(fresh_seed)
    for _ in range(200):
        backward = draw.uniform(0.001, 0.1)
        ready = sorted(draw.uniform(0, backward) for _ in range(draw.randint(1, 8)))
        buckets = tuple(Bucket(draw.randint(1, 50 * MIB), when) for when in ready)
        profile = Profile(
            draw.uniform(1, 64), draw.uniform(0, 0.1), backward, draw.uniform(0, 0.02), buckets, 0.0, 0,
            draw.choice([0.0, 0.002]),
        )  # fmt: skip
        algorithm = draw.choice(ALGORITHMS)
        variant = draw.choice(VARIANTS)
        before = 0.0
        for count in (8, 64, 1024):
            step = simulate_step(profile, Topology.of(count, 8), network(algorithm), variant)
            assert parts(step) == pytest.approx(step.step_s)
            assert step.exposed_s <= step.communication_s + 1e-12 or variant == "sharded, stage 2"
            assert step.step_s >= step.compute_s
            if variant == "all-reduce":
                assert step.step_s >= before
                before = step.step_s


def test_alone_a_step_is_what_was_measured() -> None:
    step = simulate_step(PROFILE, Topology(1, 1), network())
    assert step.step_s == pytest.approx(PROFILE.compute_s)
    assert step.exposed_s == 0.0


def test_the_slowest_of_many_is_slower(fresh_seed: int) -> None:
    """Blom's approximation against the mean of maxima."""
    draw = random.Random(fresh_seed)
    for count in (2, 8, 64):
        seen = sum(max(draw.gauss(0, 1) for _ in range(count)) for _ in range(4000)) / 4000
        assert expected_maximum(count) == pytest.approx(seen, abs=0.08)
    late = Profile(**{**vars(PROFILE), "spread_s": 0.001})
    step = simulate_step(late, Topology.of(64, 8), network())
    assert step.imbalance_s == pytest.approx(expected_maximum(64) * 0.001)


def test_a_larger_batch_hides_more() -> None:
    """And strong scaling divides it."""
    small, large = (
        predict(PROFILE.at(samples), network(), [64], ranks_per_node=8)[0].efficiency for samples in (8, 128)
    )
    assert small < large <= 1.0
    strong = predict(PROFILE, network(), [1, 8], ranks_per_node=8, global_batch=64)
    assert strong[0].efficiency == pytest.approx(1.0)
    assert strong[1].step.num_samples == 8


def test_the_table_has_a_line_per_prediction() -> None:
    predictions = predict(PROFILE, network(), [8, 1024], ranks_per_node=8, variants=VARIANTS)
    lines = prediction_table(predictions).splitlines()
    assert len(lines) == 2 + 6
    assert all(line.count("|") == 11 for line in lines)
    assert "1,024" in lines[3]
    assert json.loads(json.dumps(predictions[0].to_json()))["topology"] == {"num_nodes": 1, "ranks_per_node": 8}


def test_a_profile_survives_a_file() -> None:
    assert Profile.from_json(json.loads(json.dumps(PROFILE.to_json()))) == PROFILE


# ---------------------------------------------------------------------- profiles


def times(backward: float, ready: tuple[float, ...]) -> StepTimes:
    return StepTimes(0.0, 0.01, backward, ready, 0.0, 0.001, 0.002)


def test_a_profile_is_made_of_medians() -> None:
    steps = [times(0.02, (0.01, 0.02)), times(0.03, (0.02, 0.03)), times(0.09, (0.08, 0.09)), times(0.5, ())]
    profile = summarise(steps, [4, 8], 16)
    assert profile.backward_s == 0.03
    assert profile.buckets == (Bucket(4, 0.02), Bucket(8, 0.03))
    assert profile.other_s == 0.001


def test_a_profile_needs_steps() -> None:
    with pytest.raises(UsageError, match="train some more"):
        summarise([], [4], 16)


def test_times_alone_and_buckets_together() -> None:
    alone = Profile(16, 0.01, 0.02, 0.004, ())
    together = Profile(16, 0.02, 0.04, 0.004, (Bucket(4, 0.01), Bucket(8, 0.04)))
    assert combine(alone, together).buckets == (Bucket(4, 0.005), Bucket(8, 0.02))
    assert combine(alone, together).backward_s == 0.02


def report() -> dict[str, object]:
    def point(step: float, backward: float, ready: dict[int, float]) -> dict[str, object]:
        parts = {"compute": 0.03, "optimizer": 0.004, "data": 0.002, "engine": 0.001, "exposed": 0.0, "imbalance": 0.0}
        spread = {"median": step, "low": step, "high": step}
        buckets = [{"num_bytes": size, "ready_s": when} for size, when in ready.items()]
        return {"parts": parts, "step_s": spread, "backward_s": backward, "buckets": buckets} | {
            "rows_per_replica": 16,
            "passes_spread_s": 0.002,
            "ready_s": [0.5],  # by rank, not by bucket
        }

    return {"curves": {"weak": [point(0.037, 0.02, {}), point(0.05, 0.04, {MIB: 0.02, 9 * MIB: 0.04})]}}


def test_a_profile_of_a_report() -> None:
    """Times alone, buckets of the most replicas, which computed more slowly."""
    profile = profile_of_report(report())
    assert (profile.num_samples, profile.backward_s, profile.other_s) == (16, 0.02, 0.003)
    assert profile.forward_s == pytest.approx(0.01)
    assert profile.buckets == (Bucket(MIB, 0.01), Bucket(9 * MIB, 0.02))
    assert profile.spread_s == 0.002


def test_reports_without_what_is_needed() -> None:
    with pytest.raises(ConfigurationError, match="no report of"):
        profile_of_report({"curves": {}})
    lonely = report()
    lonely["curves"]["weak"].pop()  # type: ignore[index]
    with pytest.raises(ConfigurationError, match="no buckets"):
        profile_of_report(lonely)
