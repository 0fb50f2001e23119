"""Workers and servers as processes: the answer of one process, what they listen on, and what goes wrong."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import evenstep
from evenstep.errors import CollectiveTimeoutError, MismatchError, PeerLostError
from evenstep.ground.environment import current_placement
from evenstep.launcher.pool import RankGroup
from tests.commands import Command
from tests.sockets import listening

FEW_STEPS = 6
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)


class Model(nn.Module):
    """With a parameter that some batches don't use, one that is frozen, and a module buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.rare = nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(7, 3)
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.register_buffer("scale", torch.rand(1) + 1)
        self.double()

    def forward(self, x: Tensor, *, rarely: bool) -> Tensor:
        hidden = torch.tanh(self.first(x)) * self.frozen * self.scale
        return self.second(hidden) + self.rare(hidden) if rarely else self.second(hidden)


def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for step in range(FEW_STEPS):
        size = 1 if step == 3 else int(torch.randint(4, 20, (), generator=generator))  # step 3: empty shares
        x = torch.randn(size, 5, generator=generator, dtype=torch.float64)
        yield x, torch.randint(3, (size,), generator=generator)


def train(seed: int, mode: str, bound: int | None, optimizer: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(the state at the start, and at the end)."""
    torch.manual_seed(seed + current_placement().rank)  # every process draws other values: the servers' count
    with evenstep.parameter_server(
        Model, OPTIMIZERS[optimizer], mode=mode, max_staleness=bound, scheduler_fn=schedule
    ) as ps:
        start = {name: each.clone() for name, each in ps.model.state_dict().items()}
        for step, (x, y) in enumerate(batches(seed)):
            x, y = x[ps.worker :: ps.num_workers], y[ps.worker :: ps.num_workers]
            if len(x):
                rarely = step % 2 == 1 and ps.worker == 0
                ps.backward(F.cross_entropy(ps.model(x, rarely=rarely), y), weight=len(x))
            ps.step()
        applied = sum(ps.staleness().values())
        assert applied <= FEW_STEPS * ps.num_workers
    return start, dict(ps.model.state_dict())


def by_one_process(start: dict[str, Tensor], seed: int, optimizer: str, num_workers: int) -> dict[str, Tensor]:
    model = Model()
    model.load_state_dict(start)
    trained = [each for each in model.parameters() if each.requires_grad]
    step_of = OPTIMIZERS[optimizer](trained)
    rate = schedule(step_of)
    for step, (x, y) in enumerate(batches(seed)):
        total = torch.zeros((), dtype=torch.float64)
        for i in range(len(x)):
            rarely = step % 2 == 1 and i % num_workers == 0
            total = total + F.cross_entropy(model(x[i : i + 1], rarely=rarely), y[i : i + 1])
        step_of.zero_grad()
        (total / len(x)).backward()
        step_of.step()
        rate.step()
    return dict(model.state_dict())


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for name, value in one.items():
        torch.testing.assert_close(
            value, other[name], rtol=0, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )


@contextlib.contextmanager
def group(num_workers: int, num_servers: int) -> Iterator[RankGroup]:
    ranks = RankGroup(num_workers + num_servers, servers=num_servers, device="cpu")
    try:
        yield ranks
    finally:
        ranks.close()


def check_synchronous(num_workers: int, num_servers: int, seed: int, optimizers: list[str]) -> None:
    with group(num_workers, num_servers) as ranks:
        for optimizer in optimizers:  # a run after another in the same processes
            results = ranks.run(train, (seed, "sync", None, optimizer))
            assert results[num_workers:] == [None] * num_servers, "a server's process ends in the with statement"
            start, end = results[0]
            for other_start, other_end in results[1:num_workers]:
                assert_same(start, other_start)
                assert_same(end, other_end)
            assert_same(end, by_one_process(start, seed, optimizer, num_workers))


def test_synchronous_training_is_that_of_one_process(fresh_seed: int):
    check_synchronous(2, 1, fresh_seed, ["adamw"])


@pytest.mark.extended
@pytest.mark.parametrize(("num_workers", "num_servers"), [(3, 2), (2, 7)])
def test_synchronous_training_with_any_number_of_workers_and_servers(
    num_workers: int, num_servers: int, fresh_seed: int
):
    check_synchronous(num_workers, num_servers, fresh_seed, ["sgd", "adagrad"])


def from_the_queue(mode: str, bound: int | None, left: str) -> list[list[int]]:
    """Worker 0 is slow; samples by epoch whose gradients this worker has pushed.

    Args:
        left: A file that worker 0 makes when it has pushed a batch and leaves with the next one; "": it stays.
    """
    pushed: list[list[int]] = []
    options: dict[str, Any] = {"mode": mode, "max_staleness": bound}
    num_workers = 2 if mode == "with workers" else 0
    if num_workers:
        options = {"mode": "async"}
    with evenstep.parameter_server(
        lambda: nn.Linear(1, 1, bias=False).double(), lambda p: torch.optim.SGD(p, lr=1.0), **options
    ) as ps:
        loader = evenstep.DataLoader(
            list(range(53)), global_batch_size=4, shuffle=True, queue=ps.queue(), num_workers=num_workers
        )
        for _ in loader.epochs(3):
            pushed.append([])
            for batch in loader:
                if left and pushed[-1]:
                    if ps.worker == 0:
                        Path(left).touch()
                        return pushed
                    while not Path(left).exists():  # or a worker 0 that begins late would find nothing to do
                        time.sleep(0.01)
                time.sleep(0.03 if ps.worker == 0 else 0.01)
                ps.backward(ps.model(batch.double().unsqueeze(1)).mean(), weight=len(batch))
                ps.step()
                pushed[-1] += batch.tolist()
    return pushed


@pytest.mark.extended
def test_each_sample_comes_once_per_epoch_whoever_is_fastest(tmp_path: Path):
    with group(2, 2) as ranks:
        for mode, bound in (("sync", None), ("async", None), ("bounded", 3), ("with workers", None)):
            slow, fast = ranks.run(from_the_queue, (mode, bound, ""))[:2]
            for mine, others in zip(slow, fast, strict=True):
                assert sorted(mine + others) == list(range(53)), mode
        for mode in ("sync", "async"):
            slow, fast = ranks.run(from_the_queue, (mode, None, str(tmp_path / mode)))[:2]
            assert len(slow) == 1
            seen = [sample for samples in slow + fast for sample in samples]
            assert sorted(seen) == sorted(3 * list(range(53))), "what a worker held came back"


def two_layers() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def look_at_ports() -> set[object]:
    with evenstep.parameter_server(lambda: nn.Linear(1, 1), lambda p: torch.optim.SGD(p, lr=0.1)):
        return listening()


@pytest.mark.extended
def test_it_opens_no_port_on_one_host():
    with group(1, 2) as ranks:
        assert ranks.run(look_at_ports)[0] == set()
    before = listening()
    assert look_at_ports() == before


# ------------------------------------------------------------------ mistakes and faults


def other_model() -> None:
    width = 4 if current_placement().rank == 1 else 3
    with evenstep.parameter_server(lambda: nn.Linear(2, width), lambda p: torch.optim.SGD(p, lr=0.1)):
        pass


def failing_worker() -> None:
    with evenstep.parameter_server(lambda: nn.Linear(2, 2), lambda p: torch.optim.SGD(p, lr=0.1), mode="sync") as ps:
        ps.step()
        if ps.worker == 1:
            raise ZeroDivisionError("of worker 1")
        ps.step()


def late_worker(timeout_s: float) -> None:
    with evenstep.parameter_server(
        lambda: nn.Linear(2, 2), lambda p: torch.optim.SGD(p, lr=0.1), mode="sync", timeout_s=timeout_s
    ) as ps:
        ps.step()
        if ps.worker == 1:
            time.sleep(4 * timeout_s)
        ps.step()


@pytest.mark.extended
@pytest.mark.parametrize(
    ("function", "kind", "text"),
    [
        (other_model, MismatchError, r"don't have the same model: .* \[3, 2\] on rank 0 but \[4, 2\] on rank 1"),
        (failing_worker, ZeroDivisionError, "of worker 1"),
    ],
)
def test_mistakes_end_the_run_with_their_reason(function: Any, kind: type[Exception], text: str):
    with pytest.raises(kind, match=text):
        evenstep.launch(function, 2, servers=1, device="cpu", timeout_s=60)


@pytest.mark.extended
def test_a_worker_that_others_wait_for_is_named():
    with pytest.raises(
        CollectiveTimeoutError, match=r"worker 0 \(rank 0\) waited 8 s for others. Missing: worker 1 \(has"
    ):
        evenstep.launch(late_worker, 2, (8.0,), servers=1, device="cpu", timeout_s=120)


class FailsWhileTheOtherSaves(torch.optim.SGD):
    """In its second step, on the second server, when the first has begun to save what its own step has made."""

    num_steps = 0

    def step(self, closure: Any = None) -> None:
        """See the class."""
        self.num_steps += 1
        if current_placement().rank == 2 and self.num_steps == 2:
            time.sleep(1.0)
            raise ZeroDivisionError("of the optimizer")
        super().step()


def save_and_fail(path: str) -> str:
    with (
        contextlib.suppress(PeerLostError, ZeroDivisionError),
        evenstep.parameter_server(
            two_layers, FailsWhileTheOtherSaves, mode="sync", checkpoint=path, every_steps=1, timeout_s=30
        ) as ps,
    ):
        for _ in range(3):
            ps.backward(ps(torch.ones(2, 6, dtype=torch.float64)).sum())
            ps.step()
    return "ended"


@pytest.mark.extended
def test_a_server_that_fails_while_another_saves_keeps_nobody(tmp_path: Path):
    """In processes that live on: neither an end of theirs nor a deadline helps whoever waits."""
    with group(1, 2) as ranks:
        assert ranks.run(save_and_fail, (str(tmp_path / "run"),)) == ["ended"] * 3


SCRIPT = """
import torch
import evenstep

with evenstep.parameter_server(lambda: torch.nn.Linear(2, 1), lambda p: torch.optim.SGD(p, lr=0.1), mode="sync") as ps:
    ps.backward(ps(torch.ones(3, 2)).sum(), weight=3)
    ps.step()
print(f"worker {ps.worker} of {ps.num_workers}, {ps.num_servers} servers")
"""


@pytest.mark.extended
def test_roles_come_from_the_command_line(tmp_path: Path):
    (tmp_path / "train.py").write_text(SCRIPT)
    run = Command(
        tmp_path, ["run", "--servers", "2", "--nproc-per-node", "2", "--device", "cpu", "--all-ranks", "train.py"]
    )
    assert run.wait() == 0, run.stderr
    assert "worker 0 of 2, 2 servers" in run.stdout
    assert "worker 1 of 2, 2 servers" in run.stdout
    assert run.stdout.count("servers") == 2, "what stands behind the with statement is the workers'"
    run = Command(tmp_path, ["run", "--nproc-per-node", "2", "--device", "cpu", "train.py"])
    assert run.wait() == 78
    assert "there is no server among 2 ranks" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.extended
@pytest.mark.parametrize("first", ["with evenstep.init(): pass", "pass"])
def test_servers_of_a_script_that_has_none_are_an_error(first: str, tmp_path: Path):
    (tmp_path / "train.py").write_text(
        f"""
import torch
import evenstep

{first}
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(50):
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
print("trained")
"""
    )
    run = Command(tmp_path, ["run", "--servers", "1", "--nproc-per-node", "1", "--device", "cpu", "train.py"])
    assert run.wait() == 78, run.stderr
    assert "trains without evenstep.parameter_server, so no rank is a server. Leave --servers out." in run.stderr
    assert "Traceback" not in run.stderr
    assert "trained" not in run.stdout
