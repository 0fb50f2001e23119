"""Memory per rank: torch's DDP, torch's ZeroRedundancyOptimizer, and evenstep, plain and sharded.

    python benchmarks/memory.py                      # a GPT of 25 million parameters on two ranks
    python benchmarks/memory.py --ranks 4 --width 768 --json result.json
    python benchmarks/memory.py --device cuda        # on GPUs alone; else on the CPU, and on GPUs where there are some

Each side trains in processes of its own. Tensors are counted by their storages; a storage that two kinds share counts
for the first. How large torch's buckets are, which Python can't reach, torch says (`_get_ddp_logging_data`); `buckets`
is what gradients don't lie in of that. `peak` is the largest resident size while training,
above that before the model was made: what ranks share counts for each of them. `host` is what all ranks together have
between a backward pass and the step, pages that they share counted once (PSS), above that before the models were made;
`host's parameters` is that of the parameters alone, by their storages. On a GPU `peak` is the most that torch has had
allocated there while training, and there is nothing that ranks of a node have in common.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measuring import Device, choose_devices, describe_machine
from models import GPT
from torch.distributed.optim import ZeroRedundancyOptimizer

import evenstep

SIDES = {
    "torch DDP": {},
    "torch ZeRO": {},
    "evenstep": {},
    "sharded": {},
    "sharded, stage 2": {"shard_gradients": True},
}
COLUMNS = ["parameters", "gradients", "optimizer", "buckets", "peak"]
OF_HOST = ["host's parameters", "host"]  # of all ranks together


def storage_bytes(tensors: Iterable[torch.Tensor | None], counted: set[int]) -> int:
    """Bytes of storages that haven't been counted yet."""
    total = 0
    for tensor in tensors:
        if tensor is None or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            continue
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in counted:
            counted.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def torch_bucket_bytes(logged: Mapping[str, Any]) -> int:
    """Of all buckets that torch's DDP has, by its own account. Pure."""
    name = "rebuilt_bucket_sizes" if logged.get("has_rebuilt_buckets") else "bucket_sizes"
    return sum(int(size) for size in logged[name].split(","))


def resident_bytes() -> int:
    """Of this process, now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmRSS")


def proportional_bytes() -> int:
    """Of this process, now; of a page that n processes have, each has an n-th."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/smaps_rollup has no Pss")


def measure(side: str, width: int, steps: int, device: Device) -> dict[str, int]:
    """On a rank: bytes by kind after some steps, counted between a backward pass and the step."""
    world = evenstep.init(quiet=True, device=device.name, transport=device.transport)
    gc.collect()
    before = resident_bytes()
    world.barrier()
    host_before = proportional_bytes()
    world.barrier()
    torch.manual_seed(0)
    if device.is_cuda:
        torch.cuda.reset_peak_memory_stats(world.device)
        before = torch.cuda.memory_allocated(world.device)
    module = GPT(width=width).to(world.device)
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    if side.startswith("torch"):
        model = torch.nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
        if side == "torch ZeRO":
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    else:
        model = replicated = evenstep.DistributedDataParallel(module, world=world)
        if side == "evenstep":
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        else:
            optimizer = evenstep.ShardedOptimizer(replicated, torch.optim.AdamW, lr=1e-4, **SIDES[side])
    symbols = torch.randint(512, (2, 64)).to(world.device)
    for step in range(steps):
        model(symbols).square().mean().backward()
        if step < steps - 1:
            optimizer.step()
            optimizer.zero_grad()
    counted: set[int] = set()
    parameters = storage_bytes(model.parameters(), counted)
    gradients = storage_bytes([p.grad for p in model.parameters()], counted)
    buckets = 0
    if isinstance(model, evenstep.DistributedDataParallel):
        if isinstance(optimizer, evenstep.ShardedOptimizer):
            gradients += storage_bytes([bucket.reduced for bucket in model.engine.buckets], counted)
        buckets = storage_bytes([bucket.flat for bucket in model.engine.buckets], counted)
    elif isinstance(model, torch.nn.parallel.DistributedDataParallel):
        buckets = torch_bucket_bytes(model._get_ddp_logging_data())
        buckets -= sum(p.grad.nbytes for p in model.parameters() if p.grad is not None and p.grad._is_view())
    if isinstance(optimizer, evenstep.ShardedOptimizer):
        state = optimizer.state_bytes
    else:
        inner = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
        state = storage_bytes([v for s in inner.state.values() for v in s.values()], counted)
    gc.collect()
    world.barrier()
    host = proportional_bytes() - host_before
    world.barrier()
    optimizer.step()
    if device.is_cuda:
        torch.cuda.synchronize(world.device)
        peak = torch.cuda.max_memory_allocated(world.device) - before
        return dict(zip(COLUMNS, [parameters, gradients, state, buckets, peak], strict=True))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    sizes = [parameters, gradients, state, buckets, peak, parameters, host]
    return dict(zip([*COLUMNS, *OF_HOST], sizes, strict=True))


def on_rank(side: str, width: int, steps: int, device: Device) -> dict[str, int]:
    """On a rank: the largest of all ranks, by kind, and of a node the sum."""
    try:
        mine = measure(side, width, steps, device)
        world = evenstep.init(quiet=True, device=device.name, transport=device.transport)
        everybodys = world.gather(torch.tensor([list(mine.values())]))
        largest, sums = everybodys.amax(0).tolist(), everybodys.sum(0).tolist()
        return {name: (sums if name in OF_HOST else largest)[i] for i, name in enumerate(mine)}
    finally:
        if dist.is_initialized():
            evenstep.init(quiet=True, device=device.name, transport=device.transport).close()


def table(results: dict[str, dict[str, int]]) -> str:
    """For people, and for the documentation. Pure."""
    columns = list(next(iter(results.values())))
    lines = ["| MiB on the largest rank | " + " | ".join(columns) + " |", "| --- |" + " ---: |" * len(columns)]
    for side, sizes in results.items():
        lines.append(f"| {side} | " + " | ".join(f"{sizes[name] / 2**20:,.1f}" for name in columns) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, default=2, help="world size")
    parser.add_argument("--device", nargs="+", choices=["cpu", "cuda"], help="where; without it, on all that there is")
    parser.add_argument("--width", type=int, default=576, help="of the GPT; 576 are 25 million parameters")
    parser.add_argument("--steps", type=int, default=4, help="of training")
    parser.add_argument("--json", type=Path, help="where to write the result")
    arguments = parser.parse_args()
    machine = describe_machine()
    print(machine)
    whole: dict[str, object] = {"machine": machine, "ranks": arguments.ranks}
    for device in choose_devices(arguments.device, arguments.ranks, torch.cuda.device_count()):
        results = {}
        for side in SIDES:
            given = (side, arguments.width, arguments.steps, device)
            results[side] = evenstep.launch(on_rank, arguments.ranks, given, device=device.name)
            print(side, results[side], flush=True)
        print(f"\n{arguments.ranks} ranks {device.label}\n\n{table(results)}", flush=True)
        whole["bytes on GPUs" if device.is_cuda else "bytes"] = results
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(whole, indent=1))


if __name__ == "__main__":
    main()
