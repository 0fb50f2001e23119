"""What replication adds to a training step: evenstep and torch's DDP beside the step without either.

    python benchmarks/step.py                    # the five models, one and two ranks
    python benchmarks/step.py --ranks 2 --models "wide MLP" GPT --json result.json
    python benchmarks/step.py --ranks 2 --sides sharded --steps 10
    python benchmarks/step.py --ranks 2 --models GPT --sides evenstep reproducible ZeRO sharded attached
    python benchmarks/step.py --device cuda          # on GPUs alone; else on the CPU, and on GPUs where there are some

Six sides of the same training take turns within one run, in blocks of equally many steps:

    bare       the module itself: nothing is exchanged
    tutorial   torch's DistributedDataParallel as its tutorials write it, with their optimizer
    best       the same with gradient_as_bucket_view, static_graph and a fused optimizer
    ZeRO       torch's DDP at its best with torch's ZeroRedundancyOptimizer over the fused optimizer
    evenstep   evenstep.DistributedDataParallel with a fused optimizer
    sharded    the same with evenstep.ShardedOptimizer

In a world of one there are bare and evenstep; `--sides bare sharded` measures that one. More sides are measured where
`--sides` names them:

    reproducible  evenstep in reproducible mode, a virtual rank on each rank; on CPUs
    attached      torch's FSDP2, each part of the model sharded by itself, under evenstep.attach
    weighted      evenstep with model.backward(loss, weight=)
    uneven        weighted, with batches of 1:4 that alternate between the ranks
    accumulated   weighted, a window of four passes over a quarter of the batch each

While others run, torch's global optimizer hooks are taken off, through which evenstep sees optimizers. What a side adds
is the difference of neighbouring blocks to bare; uneven and accumulated have a bare side of their own, with the same
batches, and uneven's has an empty barrier in each step. A block is timed from barrier to barrier, on the slowest rank;
the tables have medians over blocks, with quartiles.

Several CPU ranks have a limit: the bare step, the bytes that have to be moved at the speed of plain copies, and one
empty barrier, all three measured in blocks of the same run. What has to be moved is, of as many numbers as there are
parameters: for an all-reduce, this rank's share of all ranks' gradients into all ranks' sums; for sharded, all shares
into one, and the others' shares of the parameters.

On GPUs each rank has one, and NCCL; with more ranks than GPUs all share the first: all sides
have Gloo then. A barrier there waits for all that was queued. On CPUs torch's sides have a group of Gloo's own: the
default group of `evenstep.init` is one of the backend "evenstep".
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from measuring import (
    Device,
    choose_devices,
    describe_machine,
    markdown,
    only_torchs_own,
    parser_of,
    quartiles,
    ratios,
    spread,
    steps_within,
    take_turns,
    write_json,
)
from models import CASES, Case, shard_parts
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer

import evenstep
from evenstep.ground.computing import determinism
from evenstep.ground.computing.virtual_ranks import VirtualRanks

Step = Callable[[], None]
SIDES = ["bare", "tutorial", "best", "ZeRO", "evenstep", "sharded"]
MORE_SIDES = ["reproducible", "attached", "weighted", "uneven", "accumulated"]
# Sides whose batches aren't the usual ones: what they are compared with.
BARE_OF = {side: f"bare {side}" for side in ("uneven", "accumulated")}
OURS = [*SIDES[4:], *MORE_SIDES]
LIMITED = SIDES[4:]
# Parts of the limit, which take turns with the sides.
COPIES, SHARDED_COPIES, BARRIER = PARTS = ["copies", "sharded copies", "barrier"]


@contextlib.contextmanager
def reproducible_mode(world: evenstep.World) -> Iterator[None]:
    """Compute as in reproducible mode, with a virtual rank on each rank."""
    assert world.transport_name in ("local", "shared memory"), "a transport whose order is a tree"
    world.virtual_ranks = VirtualRanks(world.world_size, world.rank, world.world_size, seed=0)
    undo = determinism.switch_on(world.device, threads=torch.get_num_threads())
    try:
        yield
    finally:
        undo()
        world.virtual_ranks = None


def around(side: str, world: evenstep.World) -> contextlib.AbstractContextManager[object]:
    """What surrounds a side when its step is built, and each of its blocks."""
    if side == "reproducible":
        return reproducible_mode(world)
    return contextlib.nullcontext() if side in OURS else only_torchs_own()


def build_step(case: Case, side: str, world: evenstep.World, torchs: dist.ProcessGroup | None) -> Step:
    """One side's training step, on a model of its own; `torchs` is the group of torch's sides, None the default one."""
    torch.manual_seed(0)
    module = case.build().to(world.device)
    x, y = (each.to(world.device) for each in case.draw())
    model: Any
    if side == "attached":
        shard_parts(module, init_device_mesh(world.device.type, (world.world_size,)))
        model = evenstep.attach(module, world)
    elif side in OURS:
        model = evenstep.DistributedDataParallel(module, world=world)
    elif side == "tutorial":
        model = torch.nn.parallel.DistributedDataParallel(module, process_group=torchs)
    elif side in ("best", "ZeRO"):
        model = torch.nn.parallel.DistributedDataParallel(
            module, process_group=torchs, gradient_as_bucket_view=True, static_graph=True
        )
    else:
        model = module
    fused = {} if side == "tutorial" else {"fused": True}
    kind, is_bare = side.removeprefix("bare "), side.startswith("bare")
    optimizer: Any
    if side == "sharded":
        optimizer = evenstep.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-4, fused=True)
    elif side == "ZeRO":
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, process_group=torchs, lr=1e-4, fused=True
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **fused)

    def step() -> None:
        case.loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    def step_under_our_loop() -> None:
        for some_x, some_y in model.microbatches((x, y), 1):
            model.backward(case.loss(model(some_x), some_y), weight=len(some_x))
        optimizer.step()
        optimizer.zero_grad()

    turns = itertools.count(world.rank)

    def step_of_weights() -> None:
        shares = [(x, y)]
        if kind == "accumulated":
            shares = list(zip(x.chunk(4), y.chunk(4), strict=True))
        elif kind == "uneven" and next(turns) % 2:
            shares = [(x[: max(1, len(x) // 4)], y[: max(1, len(y) // 4)])]
        for number, (some_x, some_y) in enumerate(shares, start=1):
            with contextlib.nullcontext() if is_bare or number == len(shares) else model.no_sync():
                loss = case.loss(model(some_x), some_y)
                if is_bare:
                    loss.backward()
                else:
                    model.backward(loss, weight=len(some_x))
        if side == BARE_OF["uneven"]:
            world.barrier()
        optimizer.step()
        optimizer.zero_grad()

    if kind in ("weighted", "uneven", "accumulated"):
        return step_of_weights
    return step_under_our_loop if side in ("reproducible", "attached") else step


def build_part(case: Case, part: str, world: evenstep.World) -> Step:
    """A part of the limit."""
    if part == BARRIER:
        return world.barrier
    num_shares = world.world_size
    numel = max(1, sum(each.numel() for each in case.build().parameters()) // num_shares)
    share, *shares = (torch.ones(numel) for _ in range(num_shares + 1))

    def copy() -> None:
        for each in shares:
            each.copy_(share)

    def copy_sharded() -> None:
        for each in shares:
            share.copy_(each)
        for each in shares[1:]:
            each.copy_(share)

    return copy if part == COPIES else copy_sharded


def measure(
    name: str, sides: list[str], blocks: int, block_s: float, asked_steps: int | None, device: Device
) -> dict[str, list[float]]:
    """On a rank: seconds per step of each side, block by block."""
    case = CASES[name]
    world = evenstep.init(quiet=True, device=device.name, transport=device.transport)
    torchs = dist.new_group(backend="gloo") if world.world_size > 1 and not device.is_cuda else None
    steps = {}
    for side in [*sides, *(bare for side, bare in BARE_OF.items() if side in sides)]:
        with around(side, world):
            steps[side] = build_step(case, side, world, torchs)
    if world.world_size > 1 and not device.is_cuda:
        steps |= {part: build_part(case, part, world) for part in PARTS}
    for side, step in steps.items():
        with around(side, world):
            for _ in range(5):
                step()
    fitting = steps_within(steps["bare"], block_s, world)
    num_steps = asked_steps or fitting
    if num_steps < fitting:  # of short blocks there are more, for as long as the others take
        blocks = round(blocks * min(10, fitting / num_steps))
    return take_turns(steps, world, blocks, num_steps, lambda side: around(side, world))


def on_ranks(
    names: list[str], sides: list[str], blocks: int, block_s: float, steps: int | None, device: Device
) -> dict[str, dict[str, list[float]]]:
    """On a rank: all models, one after the other."""
    torch.set_num_threads(1)  # a rank that is alone would have all cores
    try:
        return {name: measure(name, sides, blocks, block_s, steps, device) for name in names}
    finally:
        if dist.is_initialized():
            evenstep.init(quiet=True, device=device.name, transport=device.transport).close()


def summarise(seconds: dict[str, list[float]]) -> dict[str, dict[str, list[float]]]:
    """For each side: quartiles of the step, of what it adds (microseconds), and of its ratio to bare. Pure.

    Of evenstep and sharded also the ratio to the limit, where its parts were measured.
    """
    bare, found = seconds["bare"], {}
    for side in (each for each in seconds if each not in (*PARTS, *BARE_OF.values())):
        pairs = list(zip(seconds[side], seconds[BARE_OF.get(side, "bare")], strict=True))
        found[side] = {
            "step_us": quartiles([value * 1e6 for value, _ in pairs]),
            "added_us": quartiles([(value - other) * 1e6 for value, other in pairs]),
            "ratio": ratios(*zip(*pairs, strict=True)),
        }
    for side in LIMITED:
        if side in found and BARRIER in seconds:
            parts = (bare, seconds[SHARDED_COPIES if side == "sharded" else COPIES], seconds[BARRIER])
            found[side]["over_limit"] = ratios(seconds[side], [sum(each) for each in zip(*parts, strict=True)])
    return found


def table(num_ranks: int, where: str, results: dict[str, dict[str, dict[str, list[float]]]]) -> str:
    """For people, and for the documentation. Pure."""
    rows = []
    for name, sides in results.items():
        for side, each in sides.items():
            added, ratio = ("", "") if side == "bare" else (spread(each["added_us"], 0), spread(each["ratio"], 3))
            limit = spread(each["over_limit"], 3) if "over_limit" in each else ""
            rows.append([name, side, f"{each['step_us'][1]:,.0f}", added, ratio, limit])
    lines = [f"{num_ranks} rank{'s' if num_ranks > 1 else ''}, {where}", ""]
    lines.append(markdown("model | side | step, us | added, us | times bare | times the limit", rows, 2))
    share = share_of_best(results)
    if share is not None:
        lines += ["", f"evenstep adds {share:.2f} of what torch's DDP at its best adds (geometric mean)"]
    for side, mean in over_limit(results).items():
        lines += ["", f"{side} takes {mean:.3f} times as long as the limit (geometric mean)"]
    for side, mean in speeds_of_sharded(results).items():
        lines += ["", f"{side} takes {mean:.2f} times as long as sharded (geometric mean)"]
    return "\n".join(lines)


def share_of_best(results: dict[str, dict[str, dict[str, list[float]]]]) -> float | None:
    """Geometric mean over models of what evenstep adds, relative to `best`; None if one wasn't measured. Pure.

    Less than 2 % of the bare step can't be told from nothing, and counts as 2 %.
    """
    shares = []
    for sides in results.values():
        if not {"evenstep", "best"} <= sides.keys():
            return None
        least = 0.02 * sides["bare"]["step_us"][1]
        shares.append(max(least, sides["evenstep"]["added_us"][1]) / max(least, sides["best"]["added_us"][1]))
    return statistics.geometric_mean(shares)


def over_limit(results: dict[str, dict[str, dict[str, list[float]]]]) -> dict[str, float]:
    """Geometric means over models of our sides' steps over the limit; none where that wasn't measured. Pure."""
    found = {}
    for side in LIMITED:
        measured = [sides[side]["over_limit"][1] for sides in results.values() if "over_limit" in sides.get(side, {})]
        if measured:
            found[side] = statistics.geometric_mean(measured)
    return found


def speeds_of_sharded(results: dict[str, dict[str, dict[str, list[float]]]]) -> dict[str, float]:
    """Geometric means over models of other sides' steps over the sharded one. Pure."""
    sides = set.intersection(*map(set, results.values()))
    if "sharded" not in sides:
        return {}
    return {
        side: statistics.geometric_mean(
            each[side]["step_us"][1] / each["sharded"]["step_us"][1] for each in results.values()
        )
        for side in [*SIDES, *MORE_SIDES]
        if side in sides and side != "sharded"
    }


def main() -> None:
    """Measure, print the tables, write the JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="world sizes")
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=list(CASES), help="which of the five")
    parser.add_argument(
        "--sides", nargs="+", choices=[*SIDES, *MORE_SIDES], help="which, bare always; without it see above"
    )
    parser.add_argument("--device", nargs="+", choices=["cpu", "cuda"], help="where; without it, on all that there is")
    parser.add_argument("--blocks", type=int, default=21, help="of each side")
    parser.add_argument("--block-s", type=float, default=0.25, help="about how long a block of bare steps takes")
    parser.add_argument("--steps", type=int, help="of a block, instead; where they are fewer there are more blocks")
    arguments = parser.parse_args()
    whole: dict[str, object] = {}
    print(describe_machine())
    for num_ranks in arguments.ranks:
        for device in choose_devices(arguments.device, num_ranks, torch.cuda.device_count()):
            requested = arguments.sides or (["evenstep"] if num_ranks == 1 else SIDES)
            sides = [side for side in [*SIDES, *MORE_SIDES] if side == "bare" or side in requested]
            given = (arguments.models, sides, arguments.blocks, arguments.block_s, arguments.steps, device)
            measured = evenstep.launch(on_ranks, num_ranks, given, device=device.name)
            results = {name: summarise(seconds) for name, seconds in measured.items()}
            print(f"\n{table(num_ranks, device.label, results)}", flush=True)
            key = f"{num_ranks} ranks" + (f" {device.label}" if device.is_cuda else "")
            whole[key] = {
                "sides": results,
                "share_of_best": share_of_best(results),
                "over_limit": over_limit(results),
                "over_sharded": speeds_of_sharded(results),
            }
    write_json(arguments.json, **whole)


if __name__ == "__main__":
    main()
