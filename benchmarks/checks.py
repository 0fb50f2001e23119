"""What watching costs a step, by accounting: how often each check is made, times what one costs, over the step's time.

    python benchmarks/checks.py                  # the GPT of step.py on two ranks
    python benchmarks/checks.py --json build/checks.json

A difference of half a percent can't be measured between two runs on a busy machine; counts and unit costs can. Counted
on rank 0 are the marks on the progress page, the telemetry's, the comparison of what ranks call (fingerprints), the
look for slow ranks, at sums that aren't finite (in the step itself; the least of the steps), and the digests by which
replicas are compared (a whole round of them). All, the step too, are the least of several. The launcher's own work is
measured apart: what one of its looks costs, ten times a second at most, on any core.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measuring import describe_machine
from models import CASES

import evenstep
from evenstep.health import page, peer_pages, steps
from evenstep.health.blame import read_reports
from evenstep.health.budgets import Budgets, find_late
from evenstep.health.telemetry import Recorder
from evenstep.launcher.watch import observe
from evenstep.replica.drift import DEFAULT_EVERY, DriftWatch
from evenstep.transport import reduction
from evenstep.transport.collectives import Exchange

# Where each is looked up, and what is called there.
COUNTED: dict[str, list[tuple[Any, str]]] = {
    "page: phase": [(page, "mark"), (steps, "mark")],
    "page: collective": [(page, "mark_collective")],
    "page: waiting": [(page, "mark_waiting")],
    "telemetry": [(Recorder, "mark"), (Recorder, "forward"), (Recorder, "end")],
    "fingerprints": [(Exchange, "_read_headers")],
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


def account(num_steps: int) -> dict[str, Any]:
    """On every rank: calls per step, seconds per call, seconds per step."""
    with evenstep.init(seed=0, device="cpu", quiet=True) as world:
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
        in_headers: list[float] = []
        kept = [(owner, name, getattr(owner, name)) for places in COUNTED.values() for owner, name in places]
        at_sums: list[float] = []
        least_at_sums = float("inf")
        kept.append((reduction, "check_sum", reduction.check_sum))
        for what, places in COUNTED.items():
            for owner, name in places:
                setattr(owner, name, _counting(getattr(owner, name), what, counts, in_headers))
        reduction.check_sum = _counting(reduction.check_sum, "sums", counts, at_sums)
        for _ in range(num_steps):
            at_sums.clear()
            step()
            least_at_sums = min(least_at_sums, sum(at_sums))
        for owner, name, original in kept:
            setattr(owner, name, original)
        recorder = Recorder()
        watch = steps.SlowWatch()
        costs = {
            "page: phase": unit_cost(lambda: page.mark(page.Phase.BETWEEN_STEPS)),
            "page: collective": unit_cost(lambda: page.mark_collective(7)),
            "page: waiting": unit_cost(lambda: page.mark_waiting(False)),
            "telemetry": unit_cost(lambda: recorder.mark(0), 2_000),
            "fingerprints": min(in_headers, default=0.0),
            "sums": least_at_sums * num_steps / max(1, counts["sums"]),
            "drift": cost_of_digests(model.engine.drift, world.world_size),
            "slow ranks": unit_cost(lambda: watch.look(time.monotonic())) + 0.1 * unit_cost(peer_pages.read_all, 2_000),
        }
        per_step = {what: count / num_steps for what, count in counts.items()} | {"slow ranks": 1 / 16, "drift": 1.0}
        world.barrier()
        return {"step_s": min(times), "per_step": per_step, "cost_s": costs}


def _counting(call: Callable[..., Any], what: str, counts: Counter[str], took: list[float]) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        counts[what] += 1
        if what not in ("fingerprints", "sums"):
            return call(*args, **kwargs)
        began = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            took.append(time.perf_counter() - began)

    return counted


def cost_of_digests(watch: DriftWatch, num_ranks: int) -> float:
    """Seconds per step for comparing replicas: a whole round over its steps, of each the least of several rounds."""
    least = [float("inf")] * DEFAULT_EVERY
    for _ in range(10):
        for number in range(DEFAULT_EVERY):
            began = time.perf_counter()
            told = watch.tell()
            took = time.perf_counter() - began
            sums = torch.tensor(told, dtype=torch.float64) * num_ranks  # as if all had told the same
            began = time.perf_counter()
            watch.hear(sums)
            least[number] = min(least[number], took + time.perf_counter() - began)
    assert watch.is_on
    return sum(least) / DEFAULT_EVERY


def cost_of_a_look(num_ranks: int) -> float:
    """Seconds of the launcher's core: state, size and page of every rank, and whether one has told of its end."""
    with tempfile.TemporaryDirectory() as directory:
        for rank in range(num_ranks):
            page.open_page(page.page_file(Path(directory), rank, 0))
        page.close_page()

        def look() -> None:
            pages = {rank: page.read_page(page.page_file(Path(directory), rank, 0)) for rank in range(num_ranks)}
            for _ in range(num_ranks):
                observe(os.getpid())
            find_late(pages, Budgets(), now_ns=time.monotonic_ns())
            read_reports(Path(directory))

        return unit_cost(look, 500)


def main() -> None:
    """Account for two ranks, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = evenstep.launch(account, args.ranks, (args.steps,), device="cpu")
    total = 0.0
    print(f"{describe_machine()}\nstep: {1e3 * found['step_s']:.1f} ms on {args.ranks} ranks\n")
    print("| check | per step | each | in all |\n| --- | --- | --- | --- |")
    for what, cost_s in found["cost_s"].items():
        count = found["per_step"].get(what, 0.0)
        total += count * cost_s
        print(f"| {what} | {count:.1f} | {1e6 * cost_s:.2f} us | {1e6 * count * cost_s:.1f} us |")
    share = total / found["step_s"]
    look_s = cost_of_a_look(args.ranks)
    print(f"\nin all {1e6 * total:.0f} us, {100 * share:.3f} % of a step")
    print(f"the launcher: {1e6 * look_s:.0f} us per look, ten looks a second: {1000 * look_s:.2f} % of one core")
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"machine": describe_machine(), "share": share, "look_s": look_s, **found}))
    sys.exit(0 if share <= 0.005 else 1)


if __name__ == "__main__":
    main()
