"""How long collectives take over shared memory, against Gloo, in one run.

    python benchmarks/collectives.py                         # 2 and 4 ranks, 64 B to 256 MiB
    python benchmarks/collectives.py --ranks 2 --max-bytes 65536 --json result.json

Blocks of calls over shared memory and over Gloo take turns, so that other load on the machine affects both. A
block is timed from barrier to barrier on the slowest rank. The ratio of each pair of neighbouring blocks is one
observation; the table has their median, with the quartiles. "bucket" is a tensor that the transport allocated, as the
engine's are; "tensor" is any other; "dist" is the same tensor through `torch.distributed.all_reduce` on the backend
"evenstep", as torch programs call it; "DeepSpeed" is its shared-memory operator, where it is installed and can be
compiled (sums of float32 only). "bytes moved" is how long plain copies take to read and write what an all-reduce
in place has to: each rank its slice of all vectors, all ranks at once.

A second table has other collectives of any tensors, through `torch.distributed` on both backends. Its sizes are those
of the whole: what each rank gets of an all-gather and a broadcast, and gives to a reduce-scatter. "bytes moved" is how
long plain copies from other memory take: of the whole, or, for a reduce-scatter, of all shares into one.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from measuring import describe_machine, ratios, spread
from torch import Tensor

import evenstep
from evenstep.transport import fallback
from evenstep.transport.core.transport import Transport
from evenstep.transport.process_group.transport import ProcessGroupTransport
from evenstep.transport.shm.handshake import connect_shared_memory

CPU = torch.device("cpu")
COLLECTIVES = ["all_reduce", "all_gather", "reduce_scatter", "broadcast"]

# torch 2.13 warns of the names that torch 2.11 knows.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Row:
    """One size of an all-reduce on one number of ranks. Times are medians over blocks, in microseconds per call."""

    num_ranks: int
    num_bytes: int
    gloo_us: float
    tensor_us: float
    bucket_us: float
    dist_us: float
    moved_us: float
    deepspeed_us: float | None
    tensor_ratio: list[float]  # Gloo over ours: lower quartile, median, upper quartile
    bucket_ratio: list[float]
    dist_ratio: list[float]
    moved_ratio: list[float]  # "bucket" over "bytes moved": 1 is as fast as it can be
    dist_moved_ratio: list[float]  # the same of "dist"


@dataclass(frozen=True)
class OtherRow:
    """One size of another collective; as `Row`."""

    num_ranks: int
    collective: str
    num_bytes: int
    gloo_us: float
    dist_us: float
    moved_us: float
    dist_ratio: list[float]
    moved_ratio: list[float]  # "dist" over "bytes moved"


def sizes_up_to(max_bytes: int) -> list[int]:
    """64 B to `max_bytes`, by factors of 4. Pure."""
    sizes = []
    size = 64
    while size <= max_bytes:
        sizes.append(size)
        size *= 4
    return sizes


def calls_per_block(num_bytes: int) -> int:
    """Enough for a block of some milliseconds, at most 200. Pure."""
    return max(2, min(200, (16 << 20) // max(num_bytes, 1)))


def measure(sizes: list[int], collectives: list[str], num_blocks: int) -> tuple[list[Row], list[OtherRow]]:
    """On every rank: all sizes."""
    world = evenstep.init(quiet=True)
    group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=120))
    gloo = ProcessGroupTransport(group, name="gloo", timeout_s=120, owns_group=True)
    shared = connect_shared_memory(world.control, timeout_s=120)
    assert not isinstance(shared, str), shared
    backend = dist.new_group(backend="evenstep")
    deepspeed = deepspeeds_operator(world)
    rows: list[Row] = []
    if "all_reduce" in collectives:
        rows += [measure_size(size, gloo, shared, backend, deepspeed, num_blocks) for size in sizes]
    others = [
        measure_other(collective, size, (group, backend), shared, num_blocks)
        for collective in collectives
        if collective != "all_reduce"
        for size in sizes
        if size >= 4 * world.world_size
    ]
    assert fallback.total == 0, fallback
    dist.destroy_process_group(backend)
    gloo.close()
    shared.close()
    return rows, others


def deepspeeds_operator(world: evenstep.World) -> Callable[[Tensor], object] | None:
    """DeepSpeed's own, compiled when first used; None where that can't be."""
    if importlib.util.find_spec("deepspeed") is None:
        return None
    os.environ["LOCAL_SIZE"] = str(world.world_size)  # without it the operator does nothing
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", str(world.broadcast_object(os.getpid())))
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    operator = ShareMemCommBuilder().load()
    operator.initialize(world.world_size, world.rank)
    all_reduce: Callable[[Tensor], object] = torch.ops.deepspeed.inference_all_reduce_
    values = torch.full((1000,), float(world.rank + 1))
    all_reduce(values)
    assert values.eq(sum(range(world.world_size + 1))).all(), values
    return all_reduce


def measure_size(
    num_bytes: int,
    gloo: Transport,
    shared: Transport,
    backend: dist.ProcessGroup,
    deepspeed: Callable[[Tensor], object] | None,
    num_blocks: int,
) -> Row:
    """One size: blocks take turns."""
    numel = num_bytes // 4
    plain = torch.zeros(numel)
    bucket = shared.allocate(numel, dtype=torch.float32, device=CPU)
    share = torch.zeros(max(1, numel // shared.world_size))
    others = [torch.zeros_like(share) for _ in range(shared.world_size)]

    def move() -> None:
        for other in others:
            other.copy_(share)

    calls: dict[str, Callable[[], object]] = {
        "gloo": lambda: gloo.all_reduce(plain).wait(),
        "tensor": lambda: shared.all_reduce(plain).wait(),
        "bucket": lambda: shared.all_reduce(bucket).wait(),
        "dist": lambda: dist.all_reduce(plain, group=backend),
        "moved": move,
    }
    if deepspeed is not None:
        calls["DeepSpeed"] = lambda: deepspeed(plain)
    seconds, medians = take_turns(calls, shared, calls_per_block(num_bytes), num_blocks)
    return Row(
        num_ranks=shared.world_size,
        num_bytes=num_bytes,
        gloo_us=medians["gloo"],
        tensor_us=medians["tensor"],
        bucket_us=medians["bucket"],
        dist_us=medians["dist"],
        moved_us=medians["moved"],
        deepspeed_us=medians.get("DeepSpeed"),
        tensor_ratio=ratios(seconds["gloo"], seconds["tensor"]),
        bucket_ratio=ratios(seconds["gloo"], seconds["bucket"]),
        dist_ratio=ratios(seconds["gloo"], seconds["dist"]),
        moved_ratio=ratios(seconds["bucket"], seconds["moved"]),
        dist_moved_ratio=ratios(seconds["dist"], seconds["moved"]),
    )


def measure_other(
    collective: str, num_bytes: int, groups: tuple[dist.ProcessGroup, dist.ProcessGroup], shared: Transport, blocks: int
) -> OtherRow:
    """One size of a collective other than all-reduce, over Gloo and the backend: blocks take turns."""
    size, rank = shared.world_size, shared.rank
    whole, elsewhere = torch.zeros(num_bytes // 4 // size * size), torch.ones(num_bytes // 4 // size * size)
    share, shares = whole.new_zeros(whole.numel() // size), elsewhere.chunk(size)

    def call(group: dist.ProcessGroup) -> None:
        if collective == "all_gather":
            all_gather(whole, share, group=group)
        elif collective == "reduce_scatter":
            reduce_scatter(share, whole, group=group)
        else:
            dist.broadcast(whole, group_src=0, group=group)

    def move() -> None:
        if collective == "reduce_scatter":
            for each in shares:
                share.copy_(each)
        elif collective == "all_gather" or rank != 0:
            whole.copy_(elsewhere)

    gloo, backend = groups
    calls = {"gloo": lambda: call(gloo), "dist": lambda: call(backend), "moved": move}
    seconds, medians = take_turns(calls, shared, calls_per_block(num_bytes), blocks)
    return OtherRow(
        num_ranks=size,
        collective=collective,
        num_bytes=num_bytes,
        gloo_us=medians["gloo"],
        dist_us=medians["dist"],
        moved_us=medians["moved"],
        dist_ratio=ratios(seconds["gloo"], seconds["dist"]),
        moved_ratio=ratios(seconds["dist"], seconds["moved"]),
    )


def take_turns(
    calls: dict[str, Callable[[], object]], barrier: Transport, num_calls: int, num_blocks: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds per call, block by block, and their medians in microseconds."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for block in range(num_blocks + 1):
        for name, call in calls.items():
            seconds_per_call = time_block(call, barrier, num_calls)
            if block > 0:  # the first one warms up
                seconds[name].append(seconds_per_call)
    return seconds, {name: statistics.median(each) * 1e6 for name, each in seconds.items()}


def time_block(call: Callable[[], object], barrier: Transport, num_calls: int) -> float:
    """Seconds per call, of the slowest rank."""
    barrier.all_reduce(torch.zeros(1)).wait()
    started = time.perf_counter()
    for _ in range(num_calls):
        call()
    took = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
    barrier.all_reduce(took, "max").wait()
    return float(took) / num_calls


def human(num_bytes: int) -> str:
    """64 B, 16 KiB, 4 MiB. Pure."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >> power:
            return f"{num_bytes >> power} {unit}"
    return f"{num_bytes} B"


def table(rows: list[Row]) -> str:
    """For people, and for the documentation. Pure."""
    lines = [
        "| ranks | size | Gloo, us | DeepSpeed, us | tensor, us | bucket, us | dist, us | bytes moved, us "
        "| Gloo/tensor | Gloo/bucket | Gloo/dist | bucket/moved | dist/moved |",
        "| ---: " * 13 + "|",
    ]
    for row in rows:
        times = (row.gloo_us, row.deepspeed_us, row.tensor_us, row.bucket_us, row.dist_us, row.moved_us)
        quotients = (row.tensor_ratio, row.bucket_ratio, row.dist_ratio, row.moved_ratio, row.dist_moved_ratio)
        cells = [str(row.num_ranks), human(row.num_bytes), *("" if each is None else f"{each:,.1f}" for each in times)]
        cells += [spread(each, 1) for each in quotients]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def table_of_others(rows: list[OtherRow]) -> str:
    """The same of other collectives. Pure."""
    lines = [
        "| ranks | collective | size | Gloo, us | dist, us | bytes moved, us | Gloo/dist | dist/moved |",
        "| ---: | --- " + "| ---: " * 6 + "|",
    ]
    for row in rows:
        times = [f"{each:,.1f}" for each in (row.gloo_us, row.dist_us, row.moved_us)]
        quotients = [spread(each, 1) for each in (row.dist_ratio, row.moved_ratio)]
        cells = [str(row.num_ranks), row.collective, human(row.num_bytes), *times, *quotients]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    parser.add_argument("--collectives", nargs="+", choices=COLLECTIVES, default=COLLECTIVES, help="which")
    parser.add_argument("--min-bytes", type=int, default=64, help="smallest vector")
    parser.add_argument("--max-bytes", type=int, default=256 << 20, help="largest vector")
    parser.add_argument("--blocks", type=int, default=11, help="blocks per size and kind")
    parser.add_argument("--json", type=Path, help="where to write the result")
    arguments = parser.parse_args()
    sizes = [size for size in sizes_up_to(arguments.max_bytes) if size >= arguments.min_bytes]
    machine = describe_machine()
    rows: list[Row] = []
    others: list[OtherRow] = []
    for num_ranks in arguments.ranks:
        given = (sizes, arguments.collectives, arguments.blocks)
        of_ranks = evenstep.launch(measure, nproc=num_ranks, args=given, device="cpu")
        rows += of_ranks[0]
        others += of_ranks[1]
    print(f"{machine}\n\n{table(rows)}\n\n{table_of_others(others)}")
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        found = {"rows": [asdict(row) for row in rows], "others": [asdict(row) for row in others]}
        arguments.json.write_text(json.dumps({"machine": machine, **found}, indent=1))


if __name__ == "__main__":
    main()
