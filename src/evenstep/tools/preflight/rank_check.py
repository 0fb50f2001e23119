"""`evenstep run --check`: checks a sum and a training step, and measures pairs of ranks.

Started as a module on every rank. An error names the rank and decides the exit status.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from evenstep.errors import MismatchError
from evenstep.joining import init
from evenstep.replica.wrapper.distributed import DistributedDataParallel
from evenstep.transport.core.transport import Transport
from evenstep.world import World

_SMALL_NUMEL = 2
_LARGE_NUMEL = 4 << 20  # 16 MiB of float32: a bucket's size
_NUM_SMALL, _NUM_LARGE = 100, 5
_MAX_PAIRS = 28  # all pairs of eight ranks
_SLOW = 3.0  # a pair is slow if it takes so many times as long as the median pair


def main() -> None:
    """Run the whole check, and print the results on rank 0."""
    with init(seed=0) as world:
        _check_sum(world)
        world.print(f"a sum over {world.world_size} ranks: right")
        _check_step(world)
        world.print(f"a training step on {world.device.type}: the same as one process's")
        if world.world_size > 1:
            world.print(f"all ranks: {measure(world.transport, world.device)[1]}")
            _measure_pairs(world)


def choose_pairs(nodes: list[int], limit: int = _MAX_PAIRS) -> list[tuple[int, int]]:
    """Choose the pairs of ranks to measure. Pure.

    All pairs if there are few. Else one rank of every node with one of every other node, and neighbours on each node,
    up to the limit.

    Args:
        nodes: By rank, the number of its node.
        limit: The largest number of pairs.
    """
    every = list(itertools.combinations(range(len(nodes)), 2))
    if len(every) <= limit:
        return every
    first_of = [nodes.index(node) for node in dict.fromkeys(nodes)]
    inter_node = list(itertools.combinations(first_of, 2))
    neighbours = [(rank, rank + 1) for rank in range(len(nodes) - 1) if nodes[rank] == nodes[rank + 1]]
    return (inter_node + neighbours)[:limit]


def slow_pairs(seconds: dict[tuple[int, int], float]) -> list[tuple[int, int]]:
    """The pairs that take much longer than the median pair. Pure."""
    if len(seconds) < 3:
        return []
    usual = statistics.median(seconds.values())
    return [pair for pair, taken in seconds.items() if taken > _SLOW * usual]


def _check_sum(world: World) -> None:
    numbers = torch.arange(1000, dtype=torch.float64, device=world.device) * (world.rank + 1)
    world.transport.all_reduce(numbers).wait()
    wanted = torch.arange(1000, dtype=torch.float64, device="cpu") * sum(range(1, world.world_size + 1))
    if not torch.equal(numbers.cpu(), wanted):
        raise MismatchError(
            f"rank {world.rank}: a sum over {world.transport_name} is wrong: {numbers[:4].tolist()} ..."
        )


def _check_step(world: World) -> None:
    """Compare a training step on the ranks' shares of a batch with one on the whole batch."""
    batch = torch.randn(8 * world.world_size, 16, generator=torch.Generator().manual_seed(1), device="cpu")

    def build() -> torch.nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            layers = [torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)]
        return torch.nn.Sequential(*layers).to(world.device)

    def step(model: torch.nn.Module, backward: Callable[[torch.Tensor], object], x: torch.Tensor) -> torch.Tensor:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        backward(model(x.to(world.device)).square().mean())
        optimizer.step()
        return torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters()])

    model = DistributedDataParallel(build(), world=world)
    share = batch[world.rank * 8 : (world.rank + 1) * 8]
    found = step(model, lambda loss: model.backward(loss, weight=len(share)), share)
    furthest = (found - step(build(), torch.autograd.backward, batch)).abs().max().item()
    if not furthest < 1e-5:
        raise MismatchError(
            f"rank {world.rank}: after one step the parameters are {furthest:.3g} away from one process's, and should "
            f"be within 1e-05. Do all nodes have the same torch ({torch.__version__} here)?"
        )


def _measure_pairs(world: World) -> None:
    pairs = choose_pairs([int(node) for node in world.exchange(world.node_rank)])
    seconds: dict[tuple[int, int], float] = {}
    for pair in pairs:
        group = dist.new_group(list(pair))
        if world.rank in pair:
            both = World.from_process_group(device=world.device, group=group)
            taken, row = measure(both.transport, world.device)
            both.close()
        else:
            taken, row = 0.0, ""
        shared = world.exchange([taken, row])[pair[0]]
        seconds[pair] = float(shared[0])
        world.print(f"ranks {pair[0]} and {pair[1]}: {shared[1]}")
        world.barrier()
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    num_pairs = math.comb(world.world_size, 2)
    if len(pairs) < num_pairs:
        world.print(f"({len(pairs)} of {num_pairs} pairs: one rank of every node, and neighbours)")
    for first, second in slow_pairs(seconds):
        world.print(f"slow: ranks {first} and {second} take more than {_SLOW:g} times as long as the median pair")


def measure(transport: Transport, device: torch.device) -> tuple[float, str]:
    """(seconds of a 16 MiB all-reduce, a line with latency and bandwidth). Collective among the transport's ranks."""
    small = transport.allocate(_SMALL_NUMEL, dtype=torch.float32, device=device).zero_()
    large = transport.allocate(_LARGE_NUMEL, dtype=torch.float32, device=device).zero_()

    def timed(tensor: torch.Tensor, count: int) -> float:
        taken = []
        for _ in range(count):
            started = time.perf_counter()
            transport.all_reduce(tensor).wait()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            taken.append(time.perf_counter() - started)
        return statistics.median(taken)

    timed(small, 5), timed(large, 1)
    latency_s, large_s = timed(small, _NUM_SMALL), timed(large, _NUM_LARGE)
    rate = large.nbytes / large_s / 1e9
    return large_s, f"{transport.name}, latency {latency_s * 1e6:,.0f} us, {rate:.2f} GB/s (all-reduce of 16 MiB)"


if __name__ == "__main__":
    main()
