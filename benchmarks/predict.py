"""Steps on four ranks, predicted from one and two, and then measured: nodes with a wire of a given rate.

    python benchmarks/predict.py                     # network namespaces; needs root

The nodes are network namespaces, `tc tbf` slows what each sends, and layers sleep instead of computing, so that two
cores are enough for four ranks. Measured are: a step on one rank, alone; buckets and the memory on two ranks of one
node; the wire between two nodes of one rank. From that `evenstep.bench.predict.simulate` predicts steps on two nodes of
two ranks and on four nodes of one, which are measured then, on fresh nodes.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from measuring import Namespaces, describe_machine, run_on_hosts
from torch import Tensor, nn

import evenstep
from evenstep.bench.predict.cost import Link, Network, Topology
from evenstep.bench.predict.network import Level, Sweep, levels_from_json, measure, plan_sizes
from evenstep.bench.predict.profile import combine, profile_of
from evenstep.bench.predict.simulate import Profile, Variant, simulate_step

TOLERANCE = 0.15
VARIANTS: tuple[Variant, ...] = ("all-reduce", "sharded", "sharded, stage 2")


@dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
        name: For people.
        layer_ms: How long a layer sleeps forward, and half of how long backward.
        num_layers: Of 1 MiB of parameters each.
    """

    name: str
    layer_ms: float
    num_layers: int = 8


CASES = [
    Case("computing hides the wire", 50.0),
    Case("about as much of both", 20.0),
    Case("the wire takes longer", 5.0),
]


class _Sleep(torch.autograd.Function):
    """A layer that takes its time: forward, and twice that backward, with a gradient for its weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.seconds = seconds
        time.sleep(seconds)
        return x + 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (weight,) = ctx.saved_tensors
        time.sleep(2 * ctx.seconds)
        return grads[0], torch.ones_like(weight), None


class Sleeper(nn.Module):
    """Layers that sleep."""

    def __init__(self, num_layers: int, seconds: float) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(512, 512)) for _ in range(num_layers)])
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        """All of them."""
        for weight in self.weights:
            x = _Sleep.apply(x, weight, self.seconds)
        return x


def train(world: evenstep.World, case: Case, variant: Variant, num_steps: int) -> tuple[float, Profile]:
    """On every rank: (seconds of a step on the slowest rank, what it was made of)."""
    torch.manual_seed(0)
    model = evenstep.DistributedDataParallel(
        Sleeper(case.num_layers, case.layer_ms / 1e3), bucket_cap_mb=2, first_bucket_cap_mb=1, world=world
    )
    optimizer: torch.optim.Optimizer
    if variant == "all-reduce":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        optimizer = evenstep.ShardedOptimizer(
            model, torch.optim.SGD, lr=0.1, shard_gradients=variant == "sharded, stage 2"
        )
    x = torch.zeros(1, requires_grad=True)
    num_warm_up, began = 4, 0.0
    for step in range(num_warm_up + num_steps):
        if step == num_warm_up:
            world.barrier()
            began = time.perf_counter()
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    took = (time.perf_counter() - began) / num_steps
    return max(world.exchange(took)), profile_of(model, 1, num_warm_up=num_warm_up)


def on_rank(out: Path, variants: list[Variant], num_steps: int, *, measures_network: bool) -> None:
    """On every rank: all cases in all variants, and the network; rank 0 writes it."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with evenstep.init(quiet=True) as world:
        if measures_network:
            sweep = Sweep(plan_sizes("1K", "16M"), ("all_reduce",), repeats=5)
            found["network"] = measure(world, sweep).to_json()
        for case in CASES:
            for variant in variants:
                step_s, profile = train(world, case, variant, num_steps)
                found[f"{case.name}, {variant}"] = {"step_s": step_s, "profile": profile.to_json()}
        if world.is_main:
            out.write_text(json.dumps(found))


def run(
    topology: Topology, rate_mbit: float, num_steps: int, variants: Sequence[Variant], *, measures_network: bool = False
) -> dict[str, Any]:
    """Start ranks on namespaces, and return what rank 0 wrote."""
    arguments = ["--steps", str(num_steps), "--variants", ";".join(variants)]
    arguments += ["--network"] * measures_network
    with Namespaces(topology.num_nodes, rate_mbit=rate_mbit) as namespaces:
        found: dict[str, Any] = run_on_hosts(namespaces, topology.ranks_per_node, __file__, arguments)
    return found


def measure_small(rate_mbit: float, num_steps: int) -> tuple[dict[str, Profile], dict[str, Level]]:
    """All that predictions are made from: one rank, two on a node, two nodes of one. Profiles by name of the case."""
    alone = run(Topology(1, 1), rate_mbit, num_steps, ["all-reduce"])
    together = run(Topology(1, 2), rate_mbit, num_steps, ["all-reduce"], measures_network=True)
    apart = run(Topology(2, 1), rate_mbit, num_steps, [], measures_network=True)
    profiles = {}
    for case in CASES:
        one, two = (Profile.from_json(found[f"{case.name}, all-reduce"]["profile"]) for found in (alone, together))
        profile = combine(one, two)
        # What a step takes beyond what its parts say: the loop around them.
        rest_s = max(0.0, alone[f"{case.name}, all-reduce"]["step_s"] - profile.compute_s)
        profiles[case.name] = Profile(**{**vars(profile), "other_s": profile.other_s + rest_s})
    levels = {
        **levels_from_json(together["network"], where="two ranks"),
        **levels_from_json(apart["network"], where="two nodes"),
    }
    return profiles, levels


def compare(rate_mbit: float, num_steps: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """One row for each topology, case and variant; and the links that predictions are made from."""
    profiles, levels = measure_small(rate_mbit, num_steps)
    intra_node, inter_node = levels["intra_node"].link, levels["inter_node"].link
    print(f"intra-node {intra_node}; inter-node {inter_node}", flush=True)
    links = {name: asdict(level) for name, level in levels.items()}
    rows = []
    for topology in (Topology(2, 2), Topology(4, 1)):
        # Predicted before it is measured.
        predicted = {
            (case.name, variant): predict_s(profiles[case.name], topology, intra_node, inter_node, variant)
            for case in CASES
            for variant in VARIANTS
        }
        measured = run(topology, rate_mbit, num_steps, VARIANTS)
        for (name, variant), predicted_s in predicted.items():
            rows.append(
                {
                    "case": name,
                    "topology": asdict(topology),
                    "variant": variant,
                    "alone_s": profiles[name].compute_s,
                    "predicted_s": predicted_s,
                    "measured_s": measured[f"{name}, {variant}"]["step_s"],
                }
            )
        print(table(rows), flush=True)
    return rows, links


def predict_s(profile: Profile, topology: Topology, intra_node: Link, inter_node: Link, variant: Variant) -> float:
    """Seconds of a step. Pure."""
    return simulate_step(profile, topology, Network(intra_node, inter_node, "hierarchical"), variant).step_s


def error(row: dict[str, Any]) -> float:
    """By how much the prediction is off, of what was measured. Pure."""
    return float(row["predicted_s"] / row["measured_s"] - 1)


def table(rows: list[dict[str, Any]]) -> str:
    """For people, and for the documentation. Pure."""
    lines = [
        "| case | nodes x ranks | variant | one rank, ms | predicted, ms | measured, ms | off by |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        seconds = " | ".join(f"{row[name] * 1e3:,.0f}" for name in ("alone_s", "predicted_s", "measured_s"))
        where = f"{row['topology']['num_nodes']} x {row['topology']['ranks_per_node']}"
        lines.append(f"| {row['case']} | {where} | {row['variant']} | {seconds} | {error(row):+.1%} |")
    return "\n".join(lines)


def main() -> int:
    """Predict, measure, print the table, write the JSON; status 1 if a prediction is off by more than 15 %."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=8, help="of each measurement")
    parser.add_argument("--rate-mbit", type=float, default=200.0, help="of each node's wire")
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--variants", default="", help=argparse.SUPPRESS)
    parser.add_argument("--network", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_rank is not None:
        wanted = [variant for variant in VARIANTS if variant in arguments.variants.split(";")]
        on_rank(arguments.as_rank, wanted, arguments.steps, measures_network=arguments.network)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # namespaces go, as they do after Ctrl-C
    machine = describe_machine()
    print(machine)
    rows, links = compare(arguments.rate_mbit, arguments.steps)
    print(f"\n{table(rows)}")
    errors = [abs(error(row)) for row in rows]
    print(f"\n{len(rows)} predictions, off by {statistics.median(errors):.1%} (median), {max(errors):.1%} (worst)")
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(
            json.dumps({"machine": machine, "rate_mbit": arguments.rate_mbit, "links": links, "rows": rows}, indent=1)
        )
    return 0 if max(errors) <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
