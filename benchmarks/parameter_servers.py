"""Parameter servers: unequal workers, equal workers, what a step adds, and accuracy; against synchronous training.

    python benchmarks/parameter_servers.py --json build/parameter-servers.json

**Unequal.** Four workers whose step takes a fixed time, as on an accelerator: slept, so that two cores are enough. One
of them takes five times as long, always ("one slow") or whichever is drawn in each step ("slow by turns"). Samples a
second of each mode, as a multiple of `DistributedDataParallel`'s with the same steps.

**Equal.** Two workers that compute on a core each, and a server, against two ranks of `DistributedDataParallel`.

**RPC.** A step without computing: gradients of 4 MB to a server, and parameters back. Ours in "sync"; a program after
torch's tutorial on parameter servers with batched RPC; and a Gloo all-reduce of as much.

**Digits.** Accuracy after equally many epochs, with the histogram of staleness.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measuring import describe_machine
from torch import Tensor, nn
from torch.distributed import rpc
from torch.futures import Future

import evenstep
from evenstep.environment import current_placement
from evenstep.launcher.pool.ranks import RankGroup

MODES: dict[str, dict[str, Any]] = {
    "sync": {"mode": "sync"},
    "backup, 1": {"mode": "backup", "backup_workers": 1},
    "bounded, 4": {"mode": "bounded", "max_staleness": 4},
    "async": {"mode": "async"},
    "async, overlap": {"mode": "async", "overlap": True},
}
NUM_WORKERS = 4
STEP_S = 0.02
TIMES_SLOWER = 5
TARGETS = {("one slow", "async"): 2.5, ("one slow", "bounded, 4"): 1.5, ("slow by turns", "bounded, 4"): 1.5}


def on_ranks(function: Any, num_ranks: int, arguments: tuple[Any, ...], servers: int = 0) -> list[Any]:
    """What a function returns on each rank, in new processes; servers come behind."""
    group = RankGroup(num_ranks + servers, servers=servers, device="cpu")
    try:
        return group.run(function, arguments)
    finally:
        group.close()


def pause(kind: str, worker: int, step: int) -> float:
    """Seconds of a step's computing."""
    slow = 0 if kind == "one slow" else random.Random(step).randrange(NUM_WORKERS)
    return STEP_S * (TIMES_SLOWER if kind != "equal" and worker == slow else 1)


def small() -> nn.Module:
    """A model whose own time doesn't count."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of all cases."""
    return torch.optim.SGD(parameters, lr=0.01)


def unequal_by_servers(kind: str, options: dict[str, Any], seconds: float) -> float:
    """Steps a second of this worker."""
    torch.set_num_threads(1)
    x, y = torch.randn(16, 64), torch.randint(10, (16,))
    with evenstep.parameter_server(small, sgd, **options) as ps:
        ps.step()
        begin, steps = time.monotonic(), 0
        while time.monotonic() - begin < seconds:
            time.sleep(pause(kind, ps.worker, steps))
            ps.backward(F.cross_entropy(ps(x), y), weight=len(x))
            ps.step()
            steps += 1
        return steps / (time.monotonic() - begin)


def unequal_by_ddp(kind: str, steps: int) -> float:
    """Steps a second of this rank."""
    torch.set_num_threads(1)
    with evenstep.init(quiet=True) as world:
        model = evenstep.DistributedDataParallel(small())
        optimizer = sgd(model.parameters())
        x, y = torch.randn(16, 64), torch.randint(10, (16,))
        begin = time.monotonic()
        for step in range(steps):
            time.sleep(pause(kind, world.rank, step))
            model.backward(F.cross_entropy(model(x), y), weight=len(x))
            optimizer.step()
            optimizer.zero_grad()
        return steps / (time.monotonic() - begin)


def unequal(seconds: float) -> dict[str, dict[str, float]]:
    """Samples a second as multiples of DistributedDataParallel's, by kind and mode."""
    found: dict[str, dict[str, float]] = {}
    for kind in ("one slow", "slow by turns"):
        steps = round(seconds / (STEP_S * TIMES_SLOWER))
        base = sum(on_ranks(unequal_by_ddp, NUM_WORKERS, (kind, steps)))
        found[kind] = {"DistributedDataParallel, steps/s": base}
        for name, options in MODES.items():
            rates = on_ranks(unequal_by_servers, NUM_WORKERS, (kind, options, seconds), servers=1)
            found[kind][name] = sum(rates[:NUM_WORKERS]) / base
    return found


def wide() -> nn.Module:
    """A model of 4 MB."""
    return nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))


def equal_by_servers(options: dict[str, Any], steps: int) -> float:
    """Seconds a step of this worker."""
    torch.set_num_threads(1)
    x = torch.randn(256, 512)
    with evenstep.parameter_server(wide, sgd, **options) as ps:
        for step in range(steps + 5):
            if step == 5:
                begin = time.monotonic()
            ps.backward(ps(x).square().mean())
            ps.step()
        return (time.monotonic() - begin) / steps


def equal_by_ddp(steps: int) -> float:
    """Seconds a step of this rank."""
    torch.set_num_threads(1)
    x = torch.randn(256, 512)
    with evenstep.init(quiet=True):
        model = evenstep.DistributedDataParallel(wide())
        optimizer = sgd(model.parameters())
        for step in range(steps + 5):
            if step == 5:
                begin = time.monotonic()
            model.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return (time.monotonic() - begin) / steps


def equal(steps: int, rounds: int) -> dict[str, float]:
    """The time of a step as a multiple of DistributedDataParallel's; medians over rounds."""
    ratios: dict[str, list[float]] = {}
    for _ in range(rounds):
        base = max(on_ranks(equal_by_ddp, 2, (steps,)))
        for name in ("sync", "async", "async, overlap"):
            times = on_ranks(equal_by_servers, 2, (MODES[name], steps), servers=1)
            ratios.setdefault(name, []).append(max(times[:2]) / base)
    return {name: statistics.median(each) for name, each in ratios.items()}


# ------------------------------------------------------------------ RPC


def step_of_ours(steps: int) -> float:
    """Seconds a step without computing."""
    with evenstep.parameter_server(wide, sgd, mode="sync") as ps:
        for step in range(steps + 5):
            if step == 5:
                begin = time.monotonic()
            for parameter in ps.model.parameters():
                parameter.grad = torch.ones_like(parameter)
            ps._weight = 1.0  # what `backward` does, which would compute
            ps.step()
        return (time.monotonic() - begin) / steps


class TutorialServer:
    """As in torch's tutorial "Implementing batch RPC processing using asynchronous executions"."""

    one: TutorialServer

    def __init__(self, num_trainers: int) -> None:
        self.model, self.num_trainers = wide(), num_trainers
        self.lock, self.future, self.num_updates = threading.Lock(), Future(), 0
        self.optimizer = sgd(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    @staticmethod
    @rpc.functions.async_execution
    def update_and_fetch_model(grads: list[Tensor]) -> Future[Any]:
        """Add gradients; the model, when all trainers' have come."""
        self = TutorialServer.one
        with self.lock:
            for parameter, grad in zip(self.model.parameters(), grads, strict=True):
                parameter.grad += grad
            self.num_updates += 1
            future = self.future
            if self.num_updates >= self.num_trainers:
                for parameter in self.model.parameters():
                    parameter.grad /= self.num_trainers
                self.num_updates = 0
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=False)
                self.future = Future()
                future.set_result(self.model)
        return future


def step_of_tutorial(directory: str, steps: int) -> float:
    """Seconds a step without computing, of torch's tutorial's program; 0 on the server."""
    placement = current_placement()
    rank, world_size = placement.rank, placement.world_size
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{directory}/rpc", rpc_timeout=0)
    TutorialServer.one = TutorialServer(world_size - 1)
    rpc.init_rpc(f"rank-{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    taken = 0.0
    if rank < world_size - 1:
        model = wide()
        for step in range(steps + 5):
            if step == 5:
                begin = time.monotonic()
            grads = [torch.ones_like(parameter) for parameter in model.parameters()]
            model = rpc.rpc_sync(f"rank-{world_size - 1}", TutorialServer.update_and_fetch_model, args=(grads,))
        taken = (time.monotonic() - begin) / steps
    rpc.shutdown()
    return taken


def step_of_gloo(directory: str, steps: int) -> float:
    """Seconds of an all-reduce of as many bytes, and a step of the optimizer."""
    placement = current_placement()
    dist.init_process_group("gloo", init_method=f"file://{directory}/gloo", rank=placement.rank, world_size=2)
    model = wide()
    optimizer = sgd(model.parameters())
    for step in range(steps + 5):
        if step == 5:
            begin = time.monotonic()
        flat = torch.cat([torch.ones_like(parameter).reshape(-1) for parameter in model.parameters()])
        dist.all_reduce(flat)
        flat /= 2
        for parameter, part in zip(
            model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True
        ):
            parameter.grad = part.view_as(parameter)
        optimizer.step()
    taken = (time.monotonic() - begin) / steps
    dist.destroy_process_group()
    return taken


def overhead(directory: Path, steps: int, rounds: int) -> dict[str, float]:
    """Milliseconds a step: medians over rounds, of the slowest worker."""
    times: dict[str, list[float]] = {"ours, sync": [], "torch's tutorial": [], "Gloo all-reduce": []}
    for number in range(rounds):
        folder = directory / f"round-{number}"
        folder.mkdir(parents=True)
        times["ours, sync"].append(max(on_ranks(step_of_ours, 2, (steps,), servers=1)[:2]))
        times["torch's tutorial"].append(max(on_ranks(step_of_tutorial, 3, (str(folder), steps))))
        times["Gloo all-reduce"].append(max(on_ranks(step_of_gloo, 2, (str(folder), steps))))
    return {name: 1000 * statistics.median(each) for name, each in times.items()}


# ------------------------------------------------------------------ digits


def digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's, in [0, 1]."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return torch.tensor(found.data, dtype=torch.float32) / 16, torch.tensor(found.target)


def learn(options: dict[str, Any], lr: float, epochs: int, seed: int) -> tuple[float, dict[int, int]] | None:
    """(accuracy on a fifth that wasn't trained on, staleness)."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    x, y = digits()
    is_test = torch.arange(len(x)) % 5 == 0
    data = torch.utils.data.TensorDataset(x[~is_test], y[~is_test])
    with evenstep.parameter_server(small, lambda p: torch.optim.SGD(p, lr=lr, momentum=0.9), **options) as ps:
        loader = evenstep.DataLoader(data, global_batch_size=16, shuffle=True, seed=seed, queue=ps.queue())
        for _ in loader.epochs(epochs):
            for features, labels in loader:
                time.sleep(pause("one slow", ps.worker, 0) / 20)
                ps.backward(F.cross_entropy(ps(features), labels), weight=len(features))
                ps.step()
        stale = ps.staleness()
    with torch.no_grad():
        accuracy = (ps(x[is_test]).argmax(1) == y[is_test]).float().mean().item()
    return accuracy, stale


def accuracies(epochs: int) -> dict[str, dict[str, Any]]:
    """Accuracy and staleness by mode; the rate fits each mode's updates."""
    found = {}
    cases = {name: MODES[name] for name in ("sync", "backup, 1", "bounded, 4", "async")}
    for name, options in cases.items():
        lr = 0.2 if name in ("sync", "backup, 1") else 0.05
        results = [on_ranks(learn, NUM_WORKERS, (options, lr, epochs, seed), servers=1)[0] for seed in range(3)]
        found[name] = {
            "accuracy": statistics.mean(each[0] for each in results),
            "staleness": {str(late): count for late, count in results[0][1].items()},
        }
    return found


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=4.0, help="of each case of unequal workers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=15, help="of the digits")
    parser.add_argument("--only", nargs="*", default=["unequal", "equal", "rpc", "digits"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {"machine": describe_machine()}
    if "unequal" in args.only:
        result["unequal"] = unequal(args.seconds)
        print("samples a second, as a multiple of DistributedDataParallel's: four workers")
        for kind, rates in result["unequal"].items():
            for name, rate in rates.items():
                target = TARGETS.get((kind, name))
                print(f"  {kind:14} {name:34} {rate:7.2f}" + (f"   (to reach: {target})" if target else ""))
    if "equal" in args.only:
        result["equal"] = equal(args.steps, args.rounds)
        print("time of a step, as a multiple of DistributedDataParallel's: two equal workers")
        for name, ratio in result["equal"].items():
            print(f"  {name:34} {ratio:7.2f}")
    if "rpc" in args.only:
        import tempfile

        with tempfile.TemporaryDirectory() as directory:
            result["rpc_ms"] = overhead(Path(directory), args.steps, args.rounds)
        print("a step of 4 MB without computing, two workers, ms")
        for name, time_ms in result["rpc_ms"].items():
            print(f"  {name:34} {time_ms:7.2f}")
    if "digits" in args.only:
        result["digits"] = accuracies(args.epochs)
        print("digits: accuracy, mean of three seeds; staleness of the first")
        for name, each in result["digits"].items():
            print(f"  {name:14} {each['accuracy']:.4f}  {each['staleness']}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
