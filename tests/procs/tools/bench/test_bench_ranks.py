"""On ranks: memory is what the formulas say, loggers write means."""

from __future__ import annotations

import gc
import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import evenstep
from evenstep.errors import EvenstepError
from evenstep.testing import RankPool
from evenstep.tools.estimate.footprint import footprint
from evenstep.tools.estimate.probe import sizes_of, state_tensors, storage_bytes

# ---------------------------------------------------------------------- memory


def build(widths: list[int]) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))


def train_and_count(widths: list[int], way: str) -> dict[str, int]:
    world = evenstep.init()
    torch.manual_seed(0)
    model = evenstep.DistributedDataParallel(build(widths), bucket_cap_mb=0.25, world=world)
    optimizer: torch.optim.Optimizer
    if way == "DDP":
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    else:
        optimizer = evenstep.ShardedOptimizer(model, torch.optim.AdamW, shard_gradients=way == "sharded, stage 2")
    for _ in range(3):
        optimizer.zero_grad()
        model.backward(model(torch.randn(4, widths[0])).square().mean())
        optimizer.step()
    buckets = model.engine.buckets
    if way == "DDP":
        counted: dict[str, int] = {
            "parameters": storage_bytes(model.parameters()),
            "gradients": storage_bytes([bucket.flat for bucket in buckets]),
            "optimizer": storage_bytes(state_tensors(optimizer)),
        }
        assert {p.grad.untyped_storage()._cdata for p in model.parameters()} <= {
            bucket.flat.untyped_storage()._cdata for bucket in buckets
        }
        return counted
    assert isinstance(optimizer, evenstep.ShardedOptimizer)
    held = [bucket.flat if way == "sharded" else bucket.shard for bucket in buckets]
    return {
        "parameters": sum(bucket.values.whole.nbytes for bucket in buckets),
        "gradients": sum(each.nbytes for each in held),
        "optimizer": optimizer.state_bytes,
    }


@pytest.mark.parametrize("way", ["DDP", "sharded", "sharded, stage 2"])
@pytest.mark.parametrize("nproc", [2, pytest.param(3, marks=pytest.mark.extended)])
def test_formulas_are_what_ranks_have(ranks: RankPool, nproc: int, way: str, fresh_seed: int) -> None:
    """Parameters, gradients and optimizer state of a random model, on the largest rank."""
    draw = random.Random(fresh_seed)
    widths = [draw.randint(50, 300) for _ in range(draw.randint(3, 8))]
    from evenstep.replica.gradients.buckets.layout import BucketPolicy

    with torch.device("meta"):
        sizes = sizes_of(build(widths), lambda p: torch.optim.AdamW(p, foreach=False))
    expected = footprint(sizes, way, nproc, BucketPolicy((1 << 18,)))  # type: ignore[arg-type]
    told = ranks.run(train_and_count, nproc, widths, way)
    # Once the order of gradients is known, parameters may lie in other buckets, and be padded otherwise.
    slack = 0 if way == "DDP" else 64 * nproc * 2 * len(widths)
    for kind in ("parameters", "gradients", "optimizer"):
        most = max(each[kind] for each in told)
        allowed = slack if kind != "optimizer" else 2 * slack + 8 * len(widths) + 64
        assert abs(getattr(expected, kind) - most) <= allowed, (kind, getattr(expected, kind), most)


def blocks_of(width: int, num_blocks: int) -> torch.nn.Module:
    def block() -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )

    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleList(block() for _ in range(num_blocks))  # type: ignore[assignment]
    model.head = torch.nn.Linear(width, 8)  # type: ignore[assignment]

    def forward(x: torch.Tensor) -> torch.Tensor:
        for each in model.blocks:  # type: ignore[union-attr]
            x = x + each(x)
        head: torch.Tensor = model.head(x)
        return head

    model.forward = forward  # type: ignore[assignment]
    return model


def memory_of_fsdp2(side: str, width: int, num_blocks: int, batch: int) -> tuple[int, list[int]]:
    """The most bytes at once in a step with AdamW; and of each segment that ranks share for it.

    Of several steps the one that needs least: another thread may hold a tensor for a moment longer, but never shorter.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    from tests.live_bytes import LiveBytes, shared_bytes

    world = evenstep.init(quiet=True)
    before = shared_bytes()
    group = dist.new_group(backend="gloo" if side == "gloo" else "evenstep")
    assert isinstance(group, dist.ProcessGroup)
    mesh = DeviceMesh.from_group(group, "cpu")
    module = blocks_of(width, num_blocks)
    for each in module.blocks:  # type: ignore[union-attr]
        fully_shard(each, mesh=mesh)
    fully_shard(module, mesh=mesh)
    model: Any = evenstep.attach(module, world) if side == "attached" else module
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    x = torch.randn(batch, width)
    with LiveBytes() as live:
        live.add([p.to_local() for p in model.parameters()])
        peaks = []
        for _ in range(12):
            gc.collect()  # what lies in cycles goes at other moments in each run
            live.peak = 0
            loss = model(x).square().mean()
            if side == "attached":
                model.backward(loss, weight=batch)
            else:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            peaks.append(live.peak)
    return min(peaks[2:]), [num_bytes for file, num_bytes in shared_bytes().items() if file not in before]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("nproc", "width", "num_blocks", "batch"), [(2, 128, 6, 8), (2, 256, 4, 64), (2, 128, 8, 256), (4, 128, 6, 8)]
)
def test_the_memory_of_a_rank_is_within_a_tenth_of_the_estimate(
    ranks: RankPool, nproc: int, width: int, num_blocks: int, batch: int
) -> None:
    """FSDP2 with many small blocks, with few large ones, and where activations are most.

    Over Gloo and over our backend, whose segments come on top; and no more under our loop than without.
    """
    from evenstep.transport.shm.segment import plan_segment

    with torch.device("meta"):
        inputs = [torch.empty(batch, width)]
        sizes = sizes_of(blocks_of(width, num_blocks), lambda p: torch.optim.AdamW(p, foreach=False), inputs)
    peaks = {}
    for side in ("gloo", "plain", "attached"):
        told = ranks.run(memory_of_fsdp2, nproc, side, width, num_blocks, batch, timeout_s=120.0)
        peaks[side] = max(peak for peak, _ in told)
        assert peaks[side] == pytest.approx(footprint(sizes, "FSDP2", nproc).total, rel=0.1), side
        segments = {num_bytes for _, each in told for num_bytes in each}
        assert segments == (set() if side == "gloo" else {plan_segment(nproc, memory_bytes=0).common_bytes})
    assert peaks["attached"] <= 1.01 * peaks["plain"], "a header, a sum for each tensor, views of shared memory"


# ---------------------------------------------------------------------- loggers


def log_means(directory: str) -> None:
    world = evenstep.init()
    with evenstep.Logger(directory, world=world) as log:
        rank = world.rank
        log.log({"loss": float(rank)}, step=0)
        log.log({"loss": float(rank), "rank": torch.tensor(rank)}, step=1, mean=True)
        log.log({"loss": float(rank)}, step=2, mean=True, weight=1 + 2 * rank)
        log.log({"loss": float("nan") if rank == 0 else 7.0}, step=3, mean=True, weight=rank)


def test_means_over_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """Rank 0's own value, the mean, the weighted mean, and one over the ranks that have a say."""
    ranks.run(log_means, 2, str(tmp_path / "run"))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == [0.0, 0.5, 0.75, 7.0]
    assert lines[1]["rank"] == 0.5


WRONG_ON_RANK_1: dict[str, dict[str, Any]] = {
    "another step": {"step": 6},
    "an earlier step": {"step": 2},
    "no step": {"step": "4"},
    "weight": {"weight": -1},
}


def log_nonsense(directory: str, kind: str) -> str:
    world = evenstep.init()
    try:
        if kind == "directory":
            evenstep.Logger("/proc/no/such", world=world)
        log = evenstep.Logger(directory, world=world)
        with log:
            if kind == "names":
                log.log({"loss": 1.0} if world.rank == 0 else {"accuracy": 1.0, "loss": 1.0}, step=0, mean=True)
            if kind == "value":
                log.log({"loss": "high" if world.rank == 1 else 1.0}, step=0, mean=True, weight=1 - world.rank)
            if kind in WRONG_ON_RANK_1:
                log.log({"loss": 1.0}, step=4, mean=True)
                given = {"step": 4, "weight": 1.0} | (WRONG_ON_RANK_1[kind] if world.rank == 1 else {})
                log.log({"loss": 1.0}, mean=True, **given)
    except EvenstepError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        world.barrier()  # the ranks are in step, and can go on
    return "no error"


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("directory", "ConfigurationError: Logger on rank 0: /proc/no"),
        (
            "names",
            "MismatchError: Logger.log(mean=True): the list of names is ['loss'] on rank 0 and ['accuracy', 'loss'] on "
            "rank 1.",
        ),
        ("value", "ConfigurationError: Logger.log(mean=True) on rank 1: 'loss' is 'high'"),
        ("another step", "MismatchError: Logger.log(mean=True): the step is 4 on rank 0 and 6 on rank 1. Log"),
        ("an earlier step", "UsageError: Logger.log(mean=True) on rank 1: step 2 after step 4."),
        ("no step", "ConfigurationError: Logger.log(mean=True) on rank 1: step='4'; a whole number, at least 0."),
        ("weight", "ConfigurationError: Logger.log(mean=True) on rank 1: weight=-1; a number, at least 0."),
    ],
)
def test_what_is_wrong_on_one_rank_is_told_on_all(ranks: RankPool, tmp_path: Path, kind: str, told: str) -> None:
    for error in ranks.run(log_nonsense, 2, str(tmp_path), kind):
        assert error.startswith(told), error
