"""Checkpoints in two tiers on three hosts: what a lost host costs, and what its empty disk takes from its peers."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts.conftest import Host, Hosts

DURABLE_EVERY, LOCAL_EVERY, DIES_AT, LAST_STEP = 15, 3, 23, 32

TRAINS = """
    import hashlib, os, pathlib, time
    import evenstep, torch

    kind, dies_at, local = {kind!r}, {dies_at}, {local!r}
    with evenstep.init(seed=3, quiet=True) as world:
        model = torch.nn.Sequential(torch.nn.Linear(8, 301), torch.nn.Tanh(), torch.nn.Linear(301, 5))
        if kind == "fsdp2":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard
            fully_shard(model, mesh=init_device_mesh("cpu", (world.world_size,)))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        else:
            model = evenstep.DistributedDataParallel(model)
            optimizer = (
                evenstep.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01)
                if kind == "sharded"
                else torch.optim.AdamW(model.parameters(), lr=0.01)
            )
        inputs = torch.randn(240, 8, generator=torch.Generator().manual_seed(5))
        loader = evenstep.DataLoader(torch.utils.data.TensorDataset(inputs), global_batch_size=12, shuffle=True)
        checkpoint = evenstep.Checkpointer(
            {saved!r}, every_steps={durable_every}, every_minutes=None, local=local, local_every_steps={local_every},
            model=model, optimizer=optimizer, loader=loader,
        )
        began = checkpoint.resume()
        for epoch in loader.epochs(9):
            for (x,) in loader:
                model(x).square().mean().backward()
                if checkpoint.num_steps == dies_at and began == 0:
                    pathlib.Path({there!r}, str(world.rank)).touch()
                    time.sleep(999 if world.rank == 1 else 0)
                optimizer.step()
                optimizer.zero_grad()
                checkpoint.step()
                if checkpoint.num_steps == {last_step}:
                    break
            if checkpoint.num_steps == {last_step}:
                break
        values = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
        digest = hashlib.sha256(b"".join(v.detach().numpy().tobytes() for v in values)).hexdigest()
        world.print(f"{{world.world_size}} ranks from step {{began}} to {{checkpoint.num_steps}}, {{digest}}")
"""


def run_all(hosts: Hosts, texts: list[str], ranks_each: int = 1) -> list[Host]:
    return [hosts.start(host, text, ["--nproc-per-node", str(ranks_each)]) for host, text in enumerate(texts)]


def scripts(tmp_path: Path, name: str, kind: str, num_hosts: int, *, dies_at: int) -> list[str]:
    there = tmp_path / f"there {name}"
    there.mkdir(exist_ok=True)
    return [
        TRAINS.format(
            kind=kind,
            dies_at=dies_at,
            local=str(tmp_path / f"local {name}" / str(host)),
            saved=str(tmp_path / f"saved {name}"),
            there=str(there),
            durable_every=DURABLE_EVERY,
            local_every=LOCAL_EVERY,
            last_step=LAST_STEP,
        )
        for host in range(num_hosts)
    ]


def lose_host_1(started: list[Host], tmp_path: Path, *, wipes: bool) -> None:
    """End host 1 while all make one step, wipe its disk, and wait for the others."""
    there = tmp_path / "there lost"
    started[0].wait_until(lambda: len(list(there.iterdir())) == 3)
    time.sleep(1.0)  # the local save of the step before has time to be written, as at an ordinary step's length
    os.killpg(started[1].process.pid, signal.SIGKILL)
    started[1].process.wait()
    if wipes:
        shutil.rmtree(tmp_path / "local lost" / "1")
    assert [started[host].wait() for host in (0, 2)] == [76, 76], started[0].stderr


def resumed_from(host: Host) -> tuple[int, str]:
    found = re.findall(r"evenstep: resumed from .*step[ -]0*(\d+).*", host.stderr)
    line = next(line for line in host.stderr.splitlines() if "evenstep: resumed from" in line)
    return int(found[-1]), line


@pytest.mark.parametrize(("kind", "from_step"), [("replicas", 21), ("sharded", 15), ("fsdp2", 15)])
@pytest.mark.parametrize("ends_with", ["3 x 1", "2 x 1", "1 x 4"])
def test_a_host_is_lost_with_its_disk(
    make_hosts: Callable[[int], Hosts], tmp_path: Path, kind: str, from_step: int, ends_with: str
) -> None:
    """Replicas go on from a peer's copy; of divided state the lost disk had the only one: the durable tier counts."""
    hosts = make_hosts(3)
    started = run_all(hosts, scripts(tmp_path, "lost", kind, 3, dies_at=DIES_AT))
    lose_host_1(started, tmp_path, wipes=True)
    num_hosts, ranks_each = map(int, ends_with.split(" x "))
    texts = scripts(tmp_path, "lost", kind, num_hosts, dies_at=DIES_AT)
    again = run_all(make_hosts(num_hosts), texts, ranks_each)
    assert [host.wait() for host in again] == [0] * num_hosts, "\n".join(host.stderr for host in again)
    step, line = resumed_from(again[0])
    assert step == from_step, line
    if ends_with == "3 x 1":
        plain = run_all(hosts, scripts(tmp_path, "undisturbed", kind, 3, dies_at=-1))
        assert [host.wait() for host in plain] == [0, 0, 0], plain[0].stderr
        assert again[0].stdout.split()[-1] == plain[0].stdout.split()[-1], (again[0].stdout, plain[0].stdout)


@pytest.mark.parametrize("kind", ["replicas", "sharded", "fsdp2"])
def test_a_host_that_keeps_its_disk_costs_the_steps_since_the_local_copy(
    make_hosts: Callable[[int], Hosts], tmp_path: Path, kind: str
) -> None:
    hosts = make_hosts(3)
    started = run_all(hosts, scripts(tmp_path, "lost", kind, 3, dies_at=DIES_AT))
    lose_host_1(started, tmp_path, wipes=False)
    again = run_all(hosts, scripts(tmp_path, "lost", kind, 3, dies_at=DIES_AT))
    assert [host.wait() for host in again] == [0, 0, 0], "\n".join(host.stderr for host in again)
    step, line = resumed_from(again[0])
    assert step == 21, line
