"""Parameter servers: unequal workers, equal workers, what a step adds, and accuracy; against synchronous training.

    python benchmarks/parameter_servers.py --json build/parameter-servers.json

**Unequal.** Four workers whose step takes a fixed time, as on an accelerator: slept, so that two cores are enough. One
of them takes five times as long, always ("one slow") or whichever is drawn in each step ("slow by turns"). Samples a
second of each mode, as a multiple of `DistributedDataParallel`'s with the same steps.

**Equal.** Two workers that compute on a core each, and a server, against two ranks of `DistributedDataParallel`.

**RPC.** A step without computing: gradients of 4 MB to a server, and parameters back. Ours in "sync"; a program after
torch's tutorial on parameter servers with batched RPC; and a Gloo all-reduce of as much.

**Digits.** Accuracy after equally many epochs, and how late gradients were. Then a training that fails: workers
push gradients that are twelve of their own steps old, so that each is applied some 50 updates late; once with the rate
of "async", and once with a tenth of it.

Figures are medians over rounds, with the quartiles. Both sides of a ratio are of one round.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measuring import describe_machine, parser_of, quartiles, ratios, seconds_a_step, spread, write_json
from torch import Tensor, nn
from torch.distributed import rpc
from torch.futures import Future

import evenstep
from evenstep.errors import NonFiniteError
from evenstep.ground.environment import current_placement
from evenstep.launcher.pool import RankGroup

MODES: dict[str, dict[str, Any]] = {
    "sync": {"mode": "sync"},
    "bounded, 4": {"mode": "bounded", "max_staleness": 4},
    "async": {"mode": "async"},
}
NUM_WORKERS = 4
STEP_S = 0.02
TIMES_SLOWER = 5


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


def wide() -> nn.Module:
    """A model of 4 MB."""
    return nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of all cases."""
    return torch.optim.SGD(parameters, lr=0.01)


def step_of_ddp(build: Callable[[], nn.Module], loss_of: Callable[[nn.Module], Tensor], weight: int) -> Any:
    """A step of `DistributedDataParallel`."""
    model = evenstep.DistributedDataParallel(build())
    optimizer = sgd(model.parameters())

    def step() -> None:
        model.backward(loss_of(model), weight=weight)
        optimizer.step()
        optimizer.zero_grad()

    return step


def loss_of_small(model: Any) -> Tensor:
    """Of a batch of 16."""
    return F.cross_entropy(model(torch.ones(16, 64)), torch.zeros(16, dtype=torch.long))


def loss_of_wide(model: Any) -> Tensor:
    """Of a batch of 256."""
    return model(torch.ones(256, 512)).square().mean()


def unequal_by_servers(kind: str, options: dict[str, Any], seconds: float) -> float:
    """Steps a second of this worker."""
    torch.set_num_threads(1)
    with evenstep.parameter_server(small, sgd, **options) as ps:
        # In its first step a server imports what its optimizer needs.
        ps.backward(loss_of_small(ps), weight=16)
        ps.step()
        begin, steps = time.monotonic(), 0
        while time.monotonic() - begin < seconds:
            time.sleep(pause(kind, ps.worker, steps))
            ps.backward(loss_of_small(ps), weight=16)
            ps.step()
            steps += 1
        return steps / (time.monotonic() - begin)


def unequal_by_ddp(kind: str, steps: int) -> float:
    """Steps a second of this rank."""
    torch.set_num_threads(1)
    with evenstep.init(quiet=True) as world:
        train, numbers = step_of_ddp(small, loss_of_small, 16), iter(range(-1, steps))

        def step() -> None:
            time.sleep(pause(kind, world.rank, next(numbers)))
            train()

        return 1 / seconds_a_step(step, steps, warmup=1)


def unequal(seconds: float, rounds: int) -> dict[str, list[float]]:
    """Samples a second as multiples of DistributedDataParallel's, by kind and mode."""
    found: dict[str, list[float]] = {}
    for kind in ("one slow", "slow by turns"):
        for _ in range(rounds):
            base = sum(on_ranks(unequal_by_ddp, NUM_WORKERS, (kind, round(seconds / (STEP_S * TIMES_SLOWER)))))
            for name, options in MODES.items():
                rates = on_ranks(unequal_by_servers, NUM_WORKERS, (kind, options, seconds), servers=1)
                found.setdefault(f"{kind}, {name}", []).append(sum(rates[:NUM_WORKERS]) / base)
    return {name: quartiles(each) for name, each in found.items()}


def equal_by_servers(options: dict[str, Any], steps: int) -> float:
    """Seconds a step of this worker."""
    torch.set_num_threads(1)
    with evenstep.parameter_server(wide, sgd, **options) as ps:

        def step() -> None:
            ps.backward(loss_of_wide(ps))
            ps.step()

        return seconds_a_step(step, steps)


def equal_by_ddp(steps: int) -> float:
    """Seconds a step of this rank."""
    torch.set_num_threads(1)
    with evenstep.init(quiet=True):
        return seconds_a_step(step_of_ddp(wide, loss_of_wide, 1), steps)


def equal(steps: int, rounds: int) -> dict[str, list[float]]:
    """The time of a step as a multiple of DistributedDataParallel's."""
    found: dict[str, list[float]] = {"sync": [], "async": []}
    for _ in range(rounds):
        base = max(on_ranks(equal_by_ddp, 2, (steps,)))
        for name, each in found.items():
            each.append(max(on_ranks(equal_by_servers, 2, (MODES[name], steps), servers=1)[:2]) / base)
    return {name: quartiles(each) for name, each in found.items()}


# ------------------------------------------------------------------ RPC


def step_of_ours(folder: str, steps: int) -> float:
    """Seconds a step without computing."""
    with evenstep.parameter_server(wide, sgd, mode="sync") as ps:

        def step() -> None:
            for parameter in ps.model.parameters():
                parameter.grad = torch.ones_like(parameter)
            ps._weight = 1.0  # what `backward` does, which would compute
            ps.step()

        return seconds_a_step(step, steps)


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


def step_of_tutorial(folder: str, steps: int) -> float:
    """Seconds a step without computing, of torch's tutorial's program; 0 on the server."""
    placement = current_placement()
    rank, server = placement.rank, placement.world_size - 1
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/rpc", rpc_timeout=0)
    TutorialServer.one = TutorialServer(server)
    rpc.init_rpc(f"rank-{rank}", rank=rank, world_size=server + 1, rpc_backend_options=options)
    model = wide()

    def step() -> None:
        nonlocal model
        grads = [torch.ones_like(parameter) for parameter in model.parameters()]
        model = rpc.rpc_sync(f"rank-{server}", TutorialServer.update_and_fetch_model, args=(grads,))

    taken = seconds_a_step(step, steps) if rank < server else 0.0
    rpc.shutdown()
    return taken


def step_of_gloo(folder: str, steps: int) -> float:
    """Seconds of an all-reduce of as many bytes, and a step of the optimizer."""
    placement = current_placement()
    dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=placement.rank, world_size=2)
    model = wide()
    optimizer = sgd(model.parameters())

    def step() -> None:
        parameters = list(model.parameters())
        flat = torch.cat([torch.ones_like(parameter).reshape(-1) for parameter in parameters])
        dist.all_reduce(flat)
        flat /= 2
        for parameter, part in zip(parameters, flat.split([each.numel() for each in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)
        optimizer.step()

    taken = seconds_a_step(step, steps)
    dist.destroy_process_group()
    return taken


def overhead(steps: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds a step, of the slowest worker; last the ratio of ours to the tutorial's."""
    sides = {
        "ours, sync": (step_of_ours, 2, 1),
        "torch's tutorial": (step_of_tutorial, 3, 0),
        "Gloo all-reduce": (step_of_gloo, 2, 0),
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, (function, num_ranks, servers) in sides.items():
            with tempfile.TemporaryDirectory() as folder:
                times[name].append(max(filter(None, on_ranks(function, num_ranks, (folder, steps), servers))))
    found = {f"{name}, ms": quartiles([1000 * each for each in values]) for name, values in times.items()}
    return found | {"ours over the tutorial's": ratios(times["ours, sync"], times["torch's tutorial"])}


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


def accuracies(epochs: int, seeds: int) -> dict[str, list[float]]:
    """Accuracy of each seed by case; prints their means, and how late gradients were."""
    found = {}
    for name, (options, lr, delay) in DIGITS.items():
        results = [
            on_ranks(learn, NUM_WORKERS, (options, lr, epochs, seed, delay), servers=1)[0] for seed in range(seeds)
        ]
        found[name] = [accuracy for accuracy, _ in results]
        staleness = sum((Counter(each) for _, each in results), Counter())
        share = sum(count for late, count in staleness.items() if late <= 4) / staleness.total()
        late = f"{share:.0%} at most 4 updates late, the latest {max(staleness)}"
        print(f"  {name}: mean accuracy {statistics.mean(found[name]):.3f}; {late}", flush=True)
    return found


def main() -> None:
    """See the top of the file."""
    parts: dict[str, tuple[str, Callable[[], dict[str, list[float]]]]] = {
        "unequal": (
            "samples a second of four workers, as a multiple of DistributedDataParallel's",
            lambda: unequal(args.seconds, args.rounds),
        ),
        "equal": (
            "time of a step of two equal workers, as a multiple of DistributedDataParallel's",
            lambda: equal(args.steps, args.rounds),
        ),
        "rpc": ("a step of 4 MB without computing, two workers", lambda: overhead(args.steps, args.rounds)),
        "digits": ("digits: accuracy of each seed", lambda: accuracies(args.epochs, args.seeds)),
    }
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each case of unequal workers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=30, help="of the digits")
    parser.add_argument("--seeds", type=int, default=3, help="of the digits")
    parser.add_argument("--only", nargs="*", choices=list(parts), default=list(parts))
    args = parser.parse_args()
    print(describe_machine())
    result = {}
    try:
        for name in args.only:
            title, measure = parts[name]
            print(f"\n{title}", flush=True)
            result[name] = measure()
            for case, values in result[name].items():
                shown = " ".join(f"{each:.3f}" for each in values) if name == "digits" else spread(values)
                print(f"  {case:34} {shown}")
    finally:
        for each in groups.values():
            each.close()
    write_json(args.json, **result)


if __name__ == "__main__":
    main()
