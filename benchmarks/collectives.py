"""How long collectives take over shared memory, against Gloo, in one run.

    python benchmarks/collectives.py                         # 2 and 4 ranks, 64 B to 256 MiB
    python benchmarks/collectives.py --ranks 2 --max-bytes 65536 --json result.json

Blocks of calls over shared memory and over Gloo take turns, so that other load on the machine affects both. A block is
timed on the slowest rank. The ratio of each pair of neighbouring blocks is one observation; the table has their median,
with the quartiles. "dist" is `torch.distributed` on the backend "evenstep" with any tensor, as torch programs call it;
"bucket" is an all-reduce of a tensor that the transport allocated, as the engine's are. Sizes are those of the whole:
what each rank gets of an all-gather and a broadcast, and gives to a reduce-scatter.

"moved" is how long plain copies take, all ranks at once, to read and write as much: for an all-reduce each rank its
slice of all vectors, for a reduce-scatter all shares into one, else the whole.
"""

from __future__ import annotations

import datetime
import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from measuring import alternate, describe_machine, markdown, parser_of, ratios, spread, write_json

import evenstep
from evenstep.transport import fallback
from evenstep.transport.core.transport import Transport
from evenstep.transport.shm.handshake import connect_shared_memory

CPU = torch.device("cpu")
COLLECTIVES = ["all_reduce", "all_gather", "reduce_scatter", "broadcast"]
SIDES = ("Gloo", "bucket", "dist", "moved")
RATIOS = (("Gloo", "bucket"), ("Gloo", "dist"), ("bucket", "moved"), ("dist", "moved"))

# torch 2.13 warns of the names that torch 2.11 knows.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Row:
    """One size of a collective on so many ranks; by side, seconds of a call in each block, of the slowest rank."""

    num_ranks: int
    collective: str
    num_bytes: int
    seconds: dict[str, list[float]]

    def cells(self) -> list[object]:
        """What the table shows. Pure."""
        times = [
            f"{statistics.median(self.seconds[side]) * 1e6:,.1f}" if side in self.seconds else "" for side in SIDES
        ]
        known = [set(pair) <= self.seconds.keys() for pair in RATIOS]
        quotients = [
            spread(ratios(self.seconds[one], self.seconds[other]), 1) if is_known else ""
            for (one, other), is_known in zip(RATIOS, known, strict=True)
        ]
        return [self.collective, self.num_ranks, human(self.num_bytes), *times, *quotients]


def measure(sizes: list[int], collectives: list[str], num_blocks: int) -> list[Row]:
    """On every rank: all collectives in all sizes."""
    world = evenstep.init(quiet=True)
    gloo = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=120))
    backend = dist.new_group(backend="evenstep")
    shared = connect_shared_memory(world.control, timeout_s=120)
    assert not isinstance(shared, str), shared
    rows = []
    for collective in collectives:
        for num_bytes in sizes:
            if collective != "all_reduce" and num_bytes < 4 * world.world_size:
                continue
            calls = calls_of(collective, num_bytes, gloo, backend, shared)
            num_calls = max(2, min(200, (16 << 20) // num_bytes))  # some milliseconds
            block = functools.partial(time_block, barrier=shared, num_calls=num_calls)
            blocks = alternate(calls, num_blocks, lambda side, calls=calls, block=block: block(calls[side]))
            rows.append(Row(world.world_size, collective, num_bytes, blocks))
    assert fallback.total == 0, fallback
    shared.close()
    return rows


def calls_of(
    collective: str, num_bytes: int, gloo: dist.ProcessGroup, backend: dist.ProcessGroup, shared: Transport
) -> dict[str, Callable[[], object]]:
    """By side, one call."""
    size = shared.world_size
    numel = num_bytes // 4
    if collective != "all_reduce":
        numel = numel // size * size
    whole, elsewhere = torch.zeros(numel), torch.ones(numel)
    share, shares = torch.zeros(max(1, numel // size)), torch.ones(size, max(1, numel // size))

    def call(group: dist.ProcessGroup) -> None:
        match collective:
            case "all_reduce":
                dist.all_reduce(whole, group=group)
            case "all_gather":
                all_gather(whole, share, group=group)
            case "reduce_scatter":
                reduce_scatter(share, whole, group=group)
            case _:
                dist.broadcast(whole, group_src=0, group=group)

    def move() -> None:
        match collective:
            case "all_reduce":
                for each in shares:
                    each.copy_(share)
            case "reduce_scatter":
                for each in shares:
                    share.copy_(each)
            case _:
                if collective == "all_gather" or shared.rank != 0:
                    whole.copy_(elsewhere)

    calls: dict[str, Callable[[], object]] = {
        "Gloo": lambda: call(gloo),
        "dist": lambda: call(backend),
        "moved": move,
    }
    if collective == "all_reduce":
        bucket = shared.allocate(numel, dtype=torch.float32, device=CPU)
        calls["bucket"] = lambda: shared.all_reduce(bucket).wait()
    return calls


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


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    parser.add_argument("--collectives", nargs="+", choices=COLLECTIVES, default=COLLECTIVES, help="which")
    parser.add_argument("--min-bytes", type=int, default=64, help="smallest vector")
    parser.add_argument("--max-bytes", type=int, default=256 << 20, help="largest vector")
    parser.add_argument("--blocks", type=int, default=11, help="blocks per size and kind")
    args = parser.parse_args()
    sizes = [64 * 4**power for power in range(20) if args.min_bytes <= 64 * 4**power <= args.max_bytes]
    rows: list[Row] = []
    for num_ranks in args.ranks:
        rows += evenstep.launch(measure, num_ranks, (sizes, args.collectives, args.blocks), device="cpu")
    columns = [*(f"{side}, us" for side in SIDES), *("/".join(pair) for pair in RATIOS)]
    titles = f"collective | ranks | size | {' | '.join(columns)}"
    print(f"{describe_machine()}\n\n{markdown(titles, [row.cells() for row in rows])}")
    write_json(args.json, rows=[asdict(row) for row in rows])


if __name__ == "__main__":
    main()
