"""What watching costs a step, by accounting: how often each check is made, times what one costs, over the step's time.

    python benchmarks/checks.py                  # the GPT of step.py on two ranks, over shared memory and over Gloo
    python benchmarks/checks.py --json build/checks.json

A difference of half a percent can't be measured between two runs on a busy machine; counts and unit costs can. Counted
on rank 0 are the marks on the progress page, the telemetry's, the comparison of what ranks call (fingerprints), the
look for slow ranks, at sums that aren't finite (in the step itself; the least of the steps), and the digests by which
replicas are compared (a whole round of them). Over Gloo the look is at all that a rank is about to send, as it is
packed, and there are no fingerprints. All, the step too, are the least of several. The launcher's own work is measured
apart: what one of its looks costs, ten times a second at most, on any core.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from measuring import describe_machine, markdown, parser_of, write_json
from models import CASES

import evenstep
from evenstep.ground.health import heartbeat, peer_heartbeats, steps
from evenstep.ground.health.phase_timeouts import PhaseTimeouts, find_awaited
from evenstep.ground.health.telemetry import Recorder
from evenstep.launcher.failure.detection import look_at
from evenstep.launcher.failure.hangs import HangWatch
from evenstep.launcher.spawn.child import Child
from evenstep.replica.gradients.buckets import bucket
from evenstep.replica.gradients.window import Window
from evenstep.replica.monitors.checks import DEFAULT_EVERY, DriftWatch, NonFinite
from evenstep.transport.core import reduction
from evenstep.transport.shm.collectives import ProgramContext

TRANSPORTS = ("shared memory", "gloo")
MOST = 0.005  # of a step

# Where each is looked up, and what is called there.
COUNTED: dict[str, list[tuple[Any, str]]] = {
    "page: phase": [(heartbeat, "mark"), (steps, "mark")],
    "page: collective": [(heartbeat, "mark_collective")],
    "page: waiting": [(heartbeat, "mark_waiting")],
    "telemetry": [(Recorder, "mark"), (Recorder, "forward"), (Recorder, "end")],
}
# Those that are timed in the step itself, as they take longer there.
TIMED: dict[str, list[tuple[Any, str]]] = {
    # With the reading of rows, which is no check.
    "fingerprints": [(ProgramContext, "begin")],
    "sums": [(reduction, "check_sum")],
    "own gradients": [(bucket, "total_of"), (NonFinite, "inspect")],
}


def unit_cost(call: Callable[[], object], repeats: int = 20_000) -> float:
    """Seconds of one call: the least of several runs."""
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        best = min(best, (time.perf_counter() - began) / repeats)
    return best


def account(num_steps: int, transport: str) -> dict[str, Any]:
    """On every rank: calls per step, seconds per call, seconds per step."""
    with evenstep.init(seed=0, device="cpu", transport=transport, quiet=True) as world:
        case = CASES["GPT"]
        model = evenstep.DistributedDataParallel(case.build())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        x, y = case.draw()

        def step() -> float:
            began = time.perf_counter()
            model.backward(case.loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            return time.perf_counter() - began

        for _ in range(3):
            step()
        times = [step() for _ in range(num_steps)]
        counts: Counter[str] = Counter()
        took: dict[str, list[float]] = {what: [] for what in TIMED}
        places = [(what, owner, name) for what, those in (COUNTED | TIMED).items() for owner, name in those]
        kept = [(owner, name, getattr(owner, name)) for _, owner, name in places]
        for what, owner, name in places:
            setattr(owner, name, _counting(getattr(owner, name), what, counts, took.get(what)))
        in_steps: dict[str, list[float]] = {what: [] for what in TIMED}
        for _ in range(num_steps):
            for each in took.values():
                each.clear()
            step()
            for what, each in took.items():
                in_steps[what].append(sum(each))
        for owner, name, original in kept:
            setattr(owner, name, original)
        recorder = Recorder()
        watch = steps.StragglerWatch()
        costs = {
            "page: phase": unit_cost(lambda: heartbeat.mark(heartbeat.Phase.BETWEEN_STEPS)),
            "page: collective": unit_cost(lambda: heartbeat.mark_collective(7)),
            "page: waiting": unit_cost(lambda: heartbeat.mark_waiting(False)),
            "telemetry": unit_cost(lambda: recorder.mark(0), 2_000),
            **{what: min(all_steps) * num_steps / max(1, counts[what]) for what, all_steps in in_steps.items()},
            "drift": cost_of_digests(model.monitors.drift),
            "slow ranks": unit_cost(lambda: watch.poll(time.monotonic()))
            + 0.1 * unit_cost(peer_heartbeats.read_all, 2_000),
        }
        per_step = {what: count / num_steps for what, count in counts.items()} | {"slow ranks": 1 / 16, "drift": 1.0}
        world.barrier()
        return {"step_s": min(times), "per_step": per_step, "cost_s": costs}


def _counting(
    call: Callable[..., Any], what: str, counts: Counter[str], took: list[float] | None
) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        counts[what] += 1
        if took is None:
            return call(*args, **kwargs)
        began = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            took.append(time.perf_counter() - began)

    return counted


def cost_of_digests(watch: DriftWatch) -> float:
    """Seconds per step for comparing replicas: a whole round over its steps, of each the least of several rounds."""
    least = [float("inf")] * DEFAULT_EVERY
    for _ in range(10):
        for number in range(DEFAULT_EVERY):
            began = time.perf_counter()
            numbers = watch.header_numbers(Window())
            took = time.perf_counter() - began
            began = time.perf_counter()
            watch.judge(watch.sent, (0.0,) * len(numbers))  # as if all ranks sent the same
            least[number] = min(least[number], took + time.perf_counter() - began)
    assert watch.is_on
    return sum(least) / DEFAULT_EVERY


def cost_of_a_look(num_ranks: int) -> float:
    """Seconds of the launcher's core: state, size and page of every rank, and whether one has reported its end."""
    watch = HangWatch(after_s=600.0, timeouts=PhaseTimeouts(), num_ranks=num_ranks)
    node = peer_heartbeats.NodePages(num_ranks)
    for rank, page in enumerate(node.pages):
        page.begin(rank)
    process = Child(os.getpid())  # no child of its own, but its state is read like one's

    def poll() -> None:
        states = [look_at(rank, process, page) for rank, page in enumerate(node.pages)]
        now_ns = time.monotonic_ns()
        find_awaited({each.rank: each.page for each in states}, PhaseTimeouts(), now_ns=now_ns)
        watch.observe(now_ns, states)
        assert not watch.is_due(now_ns)
        watch.judge(now_ns)

    cost_s = unit_cost(poll, 500)
    node.close()
    return cost_s


def main() -> None:
    """Account for two ranks, and print a table."""
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    print(describe_machine())
    found = {
        transport: evenstep.launch(account, args.ranks, (args.steps, transport), device="cpu")
        for transport in TRANSPORTS
    }
    shares = {transport: show(transport, each, args.ranks) for transport, each in found.items()}
    look_s = cost_of_a_look(args.ranks)
    print(f"\nthe launcher: {1e6 * look_s:.0f} us per look, ten looks a second: {1000 * look_s:.2f} % of one core")
    by_transport = {transport: {"share": shares[transport], **each} for transport, each in found.items()}
    write_json(args.json, look_s=look_s, transports=by_transport)
    sys.exit(0 if max(shares.values()) <= MOST else 1)


def show(transport: str, found: dict[str, Any], num_ranks: int) -> float:
    """Print the table of one transport; returns the share of a step that all checks take."""
    rows, total = [], 0.0
    for what, cost_s in found["cost_s"].items():
        count = found["per_step"].get(what, 0.0)
        total += count * cost_s
        rows.append([what, f"{count:.1f}", f"{1e6 * cost_s:.2f} us", f"{1e6 * count * cost_s:.1f} us"])
    share = total / found["step_s"]
    print(f"\n{transport}: a step of {1e3 * found['step_s']:.1f} ms on {num_ranks} ranks\n")
    print(markdown("check | per step | each | in all", rows))
    print(f"\nin all {1e6 * total:.0f} us, {100 * share:.3f} % of a step")
    return float(share)


if __name__ == "__main__":
    main()
