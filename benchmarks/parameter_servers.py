"""Parameter servers: unequal workers, equal workers, what a step adds, and accuracy; against synchronous training.

    python benchmarks/parameter_servers.py --json build/parameter-servers.json

**Unequal.** Four workers whose step takes a fixed time, as on an accelerator: slept, so that two cores are enough. One
of them takes five times as long, always ("one slow") or whichever is drawn in each step ("slow by turns"). Samples a
second of each mode, as a multiple of `DistributedDataParallel`'s with the same steps.

**Equal.** Two workers that compute on a core each, and a server, against two ranks of `DistributedDataParallel`.

**RPC.** A step without computing: gradients of 4 MB to a server, and parameters back. Ours in "sync"; a program after
torch's tutorial on parameter servers with batched RPC; and a Gloo all-reduce of as much.

**Calls.** A message of 5 MB there and back between two processes of one host, and one of 64 bytes: over our sockets,
and over torch's RPC.

**Digits.** Accuracy after equally many epochs, with the histogram of staleness. Then a training that fails: workers
push gradients that are twelve of their own steps old, so that each is applied some 50 updates late; once with the rate
of "async", and once with a tenth of it.

Figures are medians over rounds, with the quartiles. Both sides of a ratio are of one round.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measuring import describe_machine, quartiles, ratios, spread
from torch import Tensor, nn
from torch.distributed import rpc
from torch.futures import Future

import evenstep
from evenstep.errors import NonFiniteError
from evenstep.ground.environment import current_placement
from evenstep.launcher.pool.ranks import RankGroup
from evenstep.parameter_servers.wire import Badge, Client, Listener, Message

MODES: dict[str, dict[str, Any]] = {
    "sync": {"mode": "sync"},
    "bounded, 4": {"mode": "bounded", "max_staleness": 4},
    "async": {"mode": "async"},
}
NUM_WORKERS = 4
STEP_S = 0.02
TIMES_SLOWER = 5
TARGETS = {("one slow", "async"): 2.5, ("one slow", "bounded, 4"): 1.5, ("slow by turns", "bounded, 4"): 1.5}


groups: dict[tuple[int, int], RankGroup] = {}  # those of one shape have waited, asleep, for the next case


def on_ranks(function: Any, num_ranks: int, arguments: tuple[Any, ...], servers: int = 0) -> list[Any]:
    """What a function returns on each rank; servers come behind."""
    shape = (num_ranks, servers)
    if shape not in groups:
        groups[shape] = RankGroup(num_ranks + servers, servers=servers, device="cpu")
    return groups[shape].run(function, arguments)


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
        # In its first step a server imports what its optimizer needs.
        ps.backward(F.cross_entropy(ps(x), y), weight=len(x))
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
        for step in range(-1, steps):
            if step == 0:
                begin = time.monotonic()
            time.sleep(pause(kind, world.rank, step))
            model.backward(F.cross_entropy(model(x), y), weight=len(x))
            optimizer.step()
            optimizer.zero_grad()
        return steps / (time.monotonic() - begin)


def unequal(seconds: float, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Samples a second as multiples of DistributedDataParallel's, by kind and mode."""
    found: dict[str, dict[str, list[float]]] = {}
    for kind in ("one slow", "slow by turns"):
        observed: dict[str, list[float]] = {}
        for _ in range(rounds):
            base = sum(on_ranks(unequal_by_ddp, NUM_WORKERS, (kind, round(seconds / (STEP_S * TIMES_SLOWER)))))
            observed.setdefault("DistributedDataParallel, steps/s", []).append(base)
            for name, options in MODES.items():
                rates = on_ranks(unequal_by_servers, NUM_WORKERS, (kind, options, seconds), servers=1)
                observed.setdefault(name, []).append(sum(rates[:NUM_WORKERS]) / base)
        found[kind] = {name: quartiles(each) for name, each in observed.items()}
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


def equal(steps: int, rounds: int) -> dict[str, list[float]]:
    """The time of a step as a multiple of DistributedDataParallel's."""
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        base = max(on_ranks(equal_by_ddp, 2, (steps,)))
        for name in ("sync", "async"):
            times = on_ranks(equal_by_servers, 2, (MODES[name], steps), servers=1)
            found.setdefault(name, []).append(max(times[:2]) / base)
    return {name: quartiles(each) for name, each in found.items()}


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


def overhead(directory: Path, steps: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds a step, of the slowest worker; last the ratio of ours to the tutorial's."""
    times: dict[str, list[float]] = {"ours, sync": [], "torch's tutorial": [], "Gloo all-reduce": []}
    for number in range(rounds):
        folder = directory / f"round-{number}"
        folder.mkdir(parents=True)
        times["ours, sync"].append(max(on_ranks(step_of_ours, 2, (steps,), servers=1)[:2]))
        times["torch's tutorial"].append(max(on_ranks(step_of_tutorial, 3, (str(folder), steps))))
        times["Gloo all-reduce"].append(max(on_ranks(step_of_gloo, 2, (str(folder), steps))))
    found = {f"{name}, ms": quartiles([1000 * each for each in values]) for name, values in times.items()}
    return found | {"ours over the tutorial's": ratios(times["ours, sync"], times["torch's tutorial"])}


# ------------------------------------------------------------------ calls


def echo(tensor: Tensor) -> Tensor:
    """What RPC calls."""
    return tensor


def call_ours(directory: str, num_bytes: int, calls: int) -> float:
    """Seconds a call over our sockets; 0 on the process that answers."""
    badge, done = Badge(b"", "bench"), Path(directory, "done")
    if current_placement().rank == 1:
        listener = Listener(
            Path(directory),
            badge,
            lambda _, message: Message({}, message.tensors),
            lambda _: None,
            most_bytes=num_bytes,
            silent_s=30,
        )
        Path(directory, "listens").touch()
        while not done.exists():
            time.sleep(0.01)
        listener.close(5.0)
        return 0.0
    while not Path(directory, "listens").exists():
        time.sleep(0.01)
    client = Client(f"unix:{directory}", badge, 0, who="a", server="b", timeout_s=60, silent_s=30, most_bytes=num_bytes)
    sent = torch.ones(num_bytes // 4)
    for number in range(-20, calls):
        if number == 0:
            begin = time.monotonic()
        client.call("echo", [sent])
    taken = (time.monotonic() - begin) / calls
    client.close()
    done.touch()
    return taken


def call_rpc(directory: str, num_bytes: int, calls: int) -> float:
    """The same over torch's RPC."""
    rank = current_placement().rank
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{directory}/rpc", rpc_timeout=0)
    rpc.init_rpc(f"rank-{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    taken = 0.0
    if rank == 0:
        sent = torch.ones(num_bytes // 4)
        for number in range(-20, calls):
            if number == 0:
                begin = time.monotonic()
            rpc.rpc_sync("rank-1", echo, args=(sent,))
        taken = (time.monotonic() - begin) / calls
    rpc.shutdown()
    return taken


def time_calls(directory: Path, steps: int, rounds: int) -> dict[str, list[float]]:
    """Microseconds a call, and ours over RPC's."""
    found: dict[str, list[float]] = {}
    for name, num_bytes, calls in (("5 MB", 5 << 20, steps), ("64 bytes", 64, 10 * steps)):
        times: dict[str, list[float]] = {"ours": [], "torch's RPC": []}
        for number in range(rounds):
            for side, function in (("ours", call_ours), ("torch's RPC", call_rpc)):
                folder = directory / f"{name}-{side}-{number}".replace(" ", "-")
                folder.mkdir(mode=0o700, parents=True)
                times[side].append(max(on_ranks(function, 2, (str(folder), num_bytes, calls))))
        found |= {f"{name}, {side}, us": quartiles([1e6 * each for each in values]) for side, values in times.items()}
        found[f"{name}, ours over RPC's"] = ratios(times["ours"], times["torch's RPC"])
    return found


# ------------------------------------------------------------------ digits


def digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's, in [0, 1]."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return torch.tensor(found.data, dtype=torch.float32) / 16, torch.tensor(found.target)


class Delayed:
    """Pushes gradients some steps after they were computed, as a worker does whose way to the servers is that long."""

    def __init__(self, ps: evenstep.ParameterServer, num_steps: int) -> None:
        self._ps, self._num_steps = ps, num_steps
        self._waiting: deque[tuple[list[Tensor | None], float, list[int]]] = deque()

    def exchange(self) -> None:
        """Put this step's gradients away, and have `ps.step` push the oldest: with the version that they are of."""
        ps = self._ps
        trained = list(ps.model.parameters())
        self._waiting.append(([each.grad for each in trained], ps._weight, list(ps._versions)))
        if len(self._waiting) > self._num_steps:
            gradients, ps._weight, ps._versions = self._waiting.popleft()
        else:
            gradients, ps._weight = [None] * len(trained), 0.0
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.grad = gradient


def learn(options: dict[str, Any], lr: float, epochs: int, seed: int, delay: int) -> tuple[float, dict[int, int]]:
    """(accuracy on a fifth that wasn't trained on, staleness); an accuracy of 0: gradients weren't finite."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    x, y = digits()
    is_test = torch.arange(len(x)) % 5 == 0
    data = torch.utils.data.TensorDataset(x[~is_test], y[~is_test])
    with evenstep.parameter_server(small, lambda p: torch.optim.SGD(p, lr=lr), **options) as ps:
        loader = evenstep.DataLoader(data, global_batch_size=16, shuffle=True, seed=seed, queue=ps.queue())
        late = Delayed(ps, delay)
        try:
            for _ in loader.epochs(epochs):
                for features, labels in loader:
                    time.sleep(pause("one slow", ps.worker, 0) / 20)
                    ps.backward(F.cross_entropy(ps(features), labels), weight=len(features))
                    late.exchange()
                    ps.step()
        except NonFiniteError:
            return 0.0, ps.staleness()
        stale = ps.staleness()
    with torch.no_grad():
        accuracy = (ps(x[is_test]).argmax(1) == y[is_test]).float().mean().item()
    return accuracy, stale


# By name: options, rate, and by how many of its own steps a worker's gradients are delayed.
RATE = 0.1  # of an update by one push; that of four is four times larger, as the batch
DIGITS: dict[str, tuple[dict[str, Any], float, int]] = {
    "sync": (MODES["sync"], 4 * RATE, 0),
    "bounded, 4": (MODES["bounded, 4"], RATE, 0),
    "async": (MODES["async"], RATE, 0),
    "async, 50 updates late": (MODES["async"], RATE, 12),
    "the same, a tenth of the rate": (MODES["async"], RATE / 10, 12),
}


def accuracies(epochs: int, seeds: int) -> dict[str, dict[str, Any]]:
    """Accuracy and staleness by case."""
    found = {}
    for name, (options, lr, delay) in DIGITS.items():
        results = [
            on_ranks(learn, NUM_WORKERS, (options, lr, epochs, seed, delay), servers=1)[0] for seed in range(seeds)
        ]
        staleness: Counter[int] = Counter()
        for _, each in results:
            staleness.update(each)
        found[name] = {
            "lr": lr,
            "accuracy": [each[0] for each in results],
            "staleness": {str(late): count for late, count in sorted(staleness.items())},
        }
    return found


def drawn(staleness: dict[str, int], most: int = 8) -> str:
    """A histogram in a line: the shares of so many ranges."""
    counts = {int(late): count for late, count in staleness.items()}
    total, width = sum(counts.values()), max(1, -(-(max(counts, default=0) + 1) // most))
    shares: Counter[int] = Counter()
    for late, count in counts.items():
        shares[late // width] += count
    return ", ".join(
        f"{n * width}{f' to {(n + 1) * width - 1}' if width > 1 else ''}: {shares[n] / total:.0%}"
        for n in sorted(shares)
    )


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="of each case of unequal workers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=30, help="of the digits")
    parser.add_argument("--seeds", type=int, default=3, help="of the digits")
    parser.add_argument("--only", nargs="*", default=["unequal", "equal", "rpc", "calls", "digits"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {"machine": describe_machine()}
    if "unequal" in args.only:
        result["unequal"] = unequal(args.seconds, args.rounds)
        print("samples a second, as a multiple of DistributedDataParallel's: four workers")
        for kind, rates in result["unequal"].items():
            for name, rate in rates.items():
                target = TARGETS.get((kind, name))
                print(f"  {kind:14} {name:34} {spread(rate)}" + (f"   (to reach: {target})" if target else ""))
    if "equal" in args.only:
        result["equal"] = equal(args.steps, args.rounds)
        print("time of a step, as a multiple of DistributedDataParallel's: two equal workers")
        for name, ratio in result["equal"].items():
            print(f"  {name:34} {spread(ratio)}")
    if "rpc" in args.only:
        with tempfile.TemporaryDirectory() as directory:
            result["rpc"] = overhead(Path(directory), args.steps, args.rounds)
        print("a step of 4 MB without computing, two workers")
        for name, values in result["rpc"].items():
            print(f"  {name:34} {spread(values)}")
    if "calls" in args.only:
        with tempfile.TemporaryDirectory() as directory:
            result["calls"] = time_calls(Path(directory), args.steps, args.rounds)
        print("a message there and back, two processes of one host")
        for name, values in result["calls"].items():
            print(f"  {name:34} {spread(values)}")
    if "digits" in args.only:
        result["digits"] = accuracies(args.epochs, args.seeds)
        print("digits: accuracy, mean and seeds; updates late")
        for name, each in result["digits"].items():
            seeds = " ".join(f"{accuracy:.3f}" for accuracy in each["accuracy"])
            mean = statistics.mean(each["accuracy"])
            print(f"  {name:34} {mean:.4f} ({seeds})  {drawn(each['staleness'])}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    try:
        main()
    finally:
        for each in groups.values():
            each.close()
