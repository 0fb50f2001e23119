"""`evenstep bench network`: latency and bandwidth of the world's transport by size, in the manner of nccl-tests.

Every rank times calls one after the other, from a barrier on; what counts is the slowest rank. Sizes take turns, so
that a machine that slows down for a moment doesn't look like a slow size. *Algorithm bandwidth* is the size over the
time; *bus bandwidth* is that times `cost.bus_factor`: what passes through the narrowest link, comparable between
collectives and numbers of ranks.

With several nodes of several ranks each, the all-reduce is measured once more inside every node, and between one rank
of each. This gives the latency and the bandwidth of either *level*, from which `simulate` predicts other topologies.
"""

from __future__ import annotations

import statistics
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from evenstep.bench.predict.arguments import add_json_argument, parse_size, write_json
from evenstep.bench.predict.cost import (
    ALGORITHM_OF,
    COLLECTIVES,
    Algorithm,
    Collective,
    Link,
    Network,
    Topology,
    bus_factor,
    fit_link,
    memory_factor,
    ring_stages,
)
from evenstep.device import parse_device
from evenstep.environment import current_placement
from evenstep.errors import ConfigurationError
from evenstep.joining import init
from evenstep.launcher.launch import launch
from evenstep.launcher.options.flags import add_nproc_per_node
from evenstep.observe.thresholds import POOR_FIT
from evenstep.transport.base import Transport, Work
from evenstep.transport.core.object_collectives import exchange
from evenstep.world import World

REPORT_VERSION = 1
_BLOCK_S = 0.03  # how long calls are repeated, where one is shorter
_MAX_CALLS = 200


@dataclass(frozen=True)
class Sweep:
    """What is measured.

    Attributes:
        sizes: Bytes of the whole vector, ascending.
        collectives: Which.
        repeats: Blocks of calls per size.
    """

    sizes: tuple[int, ...]
    collectives: tuple[Collective, ...] = COLLECTIVES
    repeats: int = 5

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1:
            raise ConfigurationError(f"sizes of {list(self.sizes)} bytes: at least 1 each.")
        if self.repeats < 1:
            raise ConfigurationError(f"--repeats {self.repeats}: at least 1.")
        for name in self.collectives:
            if name not in COLLECTIVES:
                raise ConfigurationError(f"--collectives {name}: there are {', '.join(COLLECTIVES)}.")


@dataclass(frozen=True)
class Figure:
    """One collective at one size.

    Attributes:
        level: "all" ranks, those of one node ("intra_node"), or one of each node ("inter_node").
        collective: Which.
        num_bytes: Of the whole vector.
        num_ranks: How many took part.
        seconds: (lower quartile, median, upper quartile) of a call, on the slowest rank.
    """

    level: str
    collective: Collective
    num_bytes: int
    num_ranks: int
    seconds: tuple[float, float, float]

    @property
    def algorithm_bytes_per_s(self) -> float:
        """Size over time."""
        return self.num_bytes / self.seconds[1]

    @property
    def bus_bytes_per_s(self) -> float:
        """What passes through the narrowest link."""
        return self.algorithm_bytes_per_s * bus_factor(self.collective, self.num_ranks)


@dataclass(frozen=True)
class Level:
    """What was fitted to the all-reduces of a level.

    Attributes:
        link: Latency of a message and bandwidth.
        algorithm: How the collectives that were measured are done.
        error: Median of the relative errors that the fit leaves.
    """

    link: Link
    algorithm: Algorithm
    error: float


@dataclass(frozen=True)
class NetworkReport:
    """What was measured, and what follows.

    Attributes:
        transport: Its name.
        topology: The ranks.
        figures: By level, collective and size.
        levels: By name, "intra_node" and "inter_node"; only those that exist.
    """

    transport: str
    topology: Topology
    figures: tuple[Figure, ...]
    levels: dict[str, Level]

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads, and the bandwidths."""
        figures = [
            {
                **asdict(each),
                "algorithm_bytes_per_s": each.algorithm_bytes_per_s,
                "bus_bytes_per_s": each.bus_bytes_per_s,
            }
            for each in self.figures
        ]
        levels = {name: asdict(level) for name, level in self.levels.items()}
        return {
            "kind": "network",
            "version": REPORT_VERSION,
            "transport": self.transport,
            "topology": asdict(self.topology),
            "levels": levels,
            "figures": figures,
        }


def levels_from_json(read: Any, *, where: str) -> dict[str, Level]:
    """The levels of a report that `evenstep bench network --json` wrote.

    Raises:
        ConfigurationError: It is none, or of another version.
    """
    if not isinstance(read, dict) or read.get("kind") != "network":
        raise ConfigurationError(f"{where} is no report of `evenstep bench network --json`.")
    if read.get("version") != REPORT_VERSION:
        raise ConfigurationError(f"{where} has version {read.get('version')}; this program reads {REPORT_VERSION}.")
    try:
        return {
            name: Level(Link(**level["link"]), level["algorithm"], level["error"])
            for name, level in read["levels"].items()
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{where} is damaged: of its levels not everything can be read ({error!r})."
        ) from error


def join_levels(levels: dict[str, Level], *, prefers: Algorithm | None = None) -> Network:
    """A network out of its levels; one that wasn't measured is taken to be like the other.

    Args:
        levels: "intra_node", "inter_node" or both.
        prefers: How collectives are done; None: as where they were measured.

    Raises:
        ConfigurationError: There is no level.
    """
    if not levels:
        raise ConfigurationError("nothing was measured: a network needs at least two ranks.")
    intra_node, inter_node = levels.get("intra_node"), levels.get("inter_node")
    known = intra_node or inter_node
    assert known is not None
    return Network((intra_node or known).link, (inter_node or known).link, prefers or (inter_node or known).algorithm)


# ---------------------------------------------------------------------- measuring


def measure(world: World, sweep: Sweep) -> NetworkReport:
    """Measure the transports of a world.

    Collective: every rank calls this. The report is the same on all of them.
    """
    topology = Topology(world.num_nodes, world.local_world_size)
    sizes = exchange(world.control, world.local_world_size)
    is_regular = len(set(sizes)) == 1
    groups: list[tuple[str, World | None]] = [("all", world)]
    if world.num_nodes > 1 and world.local_world_size > 1 and is_regular:
        groups += _levels_of(world)
    figures: list[Figure] = []
    for level, part in groups:
        wanted = sweep if level == "all" else replace(sweep, collectives=("all_reduce",))
        # Of the levels only the groups of rank 0 count: its node, and its inter-node group.
        mine = _sweep(part, wanted, level) if part is not None and part.world_size > 1 else []
        world.barrier()
        received = world.broadcast_object([[f.collective, f.num_bytes, f.num_ranks, list(f.seconds)] for f in mine])
        figures += [
            Figure(level, name, size, ranks, (low, mid, high)) for name, size, ranks, (low, mid, high) in received
        ]
    return NetworkReport(world.transport_name, topology, tuple(figures), _fit(figures, topology, world.transport_name))


def _levels_of(world: World) -> list[tuple[str, World | None]]:
    """The ranks of this node, and one rank of every node; None where this rank has no part."""
    places = exchange(world.control, [world.node_rank, world.local_rank])
    members = [[rank for rank, (on, _) in enumerate(places) if on == node] for node in range(world.num_nodes)]
    # `new_group` is collective: every rank makes every group, in the same order.
    node_groups = [dist.new_group(ranks) for ranks in members]
    leaders = dist.new_group([ranks[0] for ranks in members])
    intra_node = world.of_group(node_groups[world.node_rank])
    inter_node = world.of_group(leaders) if world.local_rank == 0 else None
    return [("intra_node", intra_node), ("inter_node", inter_node)]


def _sweep(world: World, sweep: Sweep, level: str) -> list[Figure]:
    transport, n = world.transport, world.world_size
    longest = max(sweep.sizes) // 4 // n * n + n
    whole = transport.allocate(longest, dtype=torch.float32, device=world.device)
    part = transport.allocate(longest // n, dtype=torch.float32, device=world.device)
    calls: dict[tuple[Collective, int], Callable[[], Work]] = {}
    for name in sweep.collectives:
        for size in sweep.sizes:
            numel = max(1, size // 4 // n) * n
            calls[name, numel * 4] = _call(transport, name, whole[:numel], part[: numel // n])
    counts = {}
    for key, call in calls.items():
        took = _time(world, call, 3)  # the first call of a size maps memory
        counts[key] = max(1, min(_MAX_CALLS, int(_BLOCK_S / max(took, 1e-7))))
    seconds: dict[tuple[Collective, int], list[float]] = {key: [] for key in calls}
    for repeat in range(sweep.repeats):
        for key in calls if repeat % 2 else reversed(calls):
            seconds[key].append(_time(world, calls[key], counts[key]))
    return [Figure(level, name, size, n, _quartiles(seconds[name, size])) for name, size in calls]


def _call(transport: Transport, name: Collective, whole: Tensor, part: Tensor) -> Callable[[], Work]:
    if name == "all_reduce":
        return lambda: transport.all_reduce(whole)
    if name == "reduce_scatter":
        return lambda: transport.reduce_scatter(part, whole)
    if name == "all_gather":
        return lambda: transport.all_gather(whole, part)
    return lambda: transport.broadcast(whole, 0)


def _time(world: World, call: Callable[[], Work], count: int) -> float:
    """Seconds of one call, on the slowest rank. The vector holds zeros, so sums stay what they are.

    As many calls go before those that count: what a wire takes for free after a pause (the tokens that one of limited
    rate has saved) has been used up then.
    """
    world.transport.barrier().wait()
    for _ in range(count):
        call().wait()
    _settle(world.device)
    started = time.perf_counter()
    for _ in range(count):
        call().wait()
    _settle(world.device)
    return float(max(exchange(world.control, (time.perf_counter() - started) / count)))


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return (values[0], values[0], values[0])
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (low, middle, high)


def _fit(figures: Sequence[Figure], topology: Topology, transport: str) -> dict[str, Level]:
    """The links that explain the all-reduces of each level. Pure."""
    points: dict[str, list[tuple[float, float]]] = {}
    for each in figures:
        if each.collective == "all_reduce":
            points.setdefault(each.level, []).append((each.num_bytes, each.seconds[1]))
    if topology.num_nodes == 1 or topology.ranks_per_node == 1:
        named = {"intra_node" if topology.num_nodes == 1 else "inter_node": points.get("all", [])}
    else:
        named = {name: points[name] for name in ("intra_node", "inter_node") if name in points}
    levels = {}
    for name, measured in named.items():
        if len({size for size, _ in measured}) < 2:
            continue
        n = topology.ranks_per_node if name == "intra_node" else topology.num_nodes
        shares_memory = name == "intra_node" and transport.startswith("shared memory")
        stages = 1.0 if shares_memory else float(sum(ring_stages("all_reduce", Topology(1, n))))
        traffic = memory_factor("all_reduce", n) if shares_memory else bus_factor("all_reduce", n)
        link, error = fit_link(measured, stages=stages, traffic=traffic)
        levels[name] = Level(link, ALGORITHM_OF.get(transport, "ring"), error)
    return levels


# ---------------------------------------------------------------------- for people


def table(report: NetworkReport) -> str:
    """For people, and for the documentation. Pure."""
    lines = [
        "| ranks | collective | bytes | time, us | algorithm, GB/s | bus, GB/s |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for each in report.figures:
        low, middle, high = (f"{value * 1e6:,.1f}" for value in each.seconds)
        who = f"{each.level} ({each.num_ranks})"
        lines.append(
            f"| {who} | {each.collective} | {each.num_bytes:,} | {middle} ({low} to {high}) "
            f"| {each.algorithm_bytes_per_s / 1e9:,.3f} | {each.bus_bytes_per_s / 1e9:,.3f} |"
        )
    for name, level in report.levels.items():
        lines.append("")
        what = "between the ranks of a node" if name == "intra_node" else "between nodes"
        lines.append(f"{what}: {level.link} ({level.algorithm}; median error of the fit {level.error:.0%})")
        if level.error > POOR_FIT:
            lines.append("The fit is poor: measure again when nodes and network are quiet, with more --repeats.")
    return "\n".join(lines)


def plan_sizes(smallest: str, largest: str) -> tuple[int, ...]:
    """From the smallest to the largest, each four times the one before. Pure."""
    size, last = parse_size(smallest), parse_size(largest)
    if size > last:
        raise ConfigurationError(f"--min-size {smallest} is more than --max-size {largest}.")
    sizes = []
    while size <= last:
        sizes.append(size)
        size *= 4
    return tuple(sizes)


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `evenstep bench network`."""
    add_nproc_per_node(parser, default=2, help="ranks, if no launcher has started them (default: 2)")
    parser.add_argument("--device", help="cpu, cuda, or cuda:0 for all (default: GPUs if there are any)")
    parser.add_argument(
        "--min-size", default="1K", metavar="SIZE", help="bytes of the smallest vector (default: %(default)s)"
    )
    parser.add_argument(
        "--max-size", default="64M", metavar="SIZE", help="of the largest, in steps of 4 (default: %(default)s)"
    )
    add_json_argument(parser, help="write the figures there, for `bench predict` and for programs")
    parser.add_argument(
        "--collectives", default=",".join(COLLECTIVES), metavar="NAMES", help="separated by commas (default: all four)"
    )
    parser.add_argument(
        "--repeats", type=int, default=5, metavar="N", help="blocks of calls per size (default: %(default)s)"
    )


def main(args: Namespace) -> int:
    """Measure, on ranks that a launcher started or on new ones of this node; print the table, write the JSON.

    Raises:
        ConfigurationError: A flag makes no sense, or there is one rank only.
    """
    sweep = Sweep(
        plan_sizes(args.min_size, args.max_size),
        tuple(name.strip() for name in args.collectives.split(",")),
        args.repeats,
    )
    if current_placement().world_size > 1:
        on_rank(sweep, args.json)
        return 0
    if args.nproc_per_node < 2:
        raise ConfigurationError(f"--nproc-per-node {args.nproc_per_node}: a network has at least two ranks.")
    if args.device is not None:
        parse_device(args.device)
    launch(on_rank, args.nproc_per_node, (sweep, args.json), device=args.device)
    return 0


def on_rank(sweep: Sweep, json_file: str | None) -> None:
    """On every rank; rank 0 prints and writes."""
    with init() as world:
        report = measure(world, sweep)
        problem = None
        if world.is_main:
            sys.stdout.write(f"{report.transport}, {report.topology}\n\n{table(report)}\n")
            sys.stdout.flush()
            try:
                if json_file is not None:
                    write_json(json_file, report.to_json())
            except ConfigurationError as error:
                problem = str(error)
        problem = world.broadcast_object(problem)
        if problem is not None:
            raise ConfigurationError(problem)
