"""`evenstep run` on several hosts: as one, late, cut off, failing, fewer."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from tests.hosts.conftest import Hosts

TRAINS = """
    import evenstep, torch

    with evenstep.init(seed=3) as world:
        model = evenstep.DistributedDataParallel(torch.nn.Linear(8, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(5))
        loader = evenstep.DataLoader(torch.utils.data.TensorDataset(inputs), global_batch_size=8, shuffle=True)
        for (x,) in loader:
            model.backward(model(x).square().mean(), weight=len(x))
            optimizer.step()
            optimizer.zero_grad()
        total = sum(p.double().sum().item() for p in model.parameters())
        world.print(f"{world.world_size} ranks, {world.num_nodes} hosts, {world.transport_name}, {total:.5f}")
"""

LASTS = """
    import os, pathlib, time
    import evenstep, torch

    with evenstep.init() as world:
        for step in range(100_000):
            world.barrier()
            if step == 20:
                pathlib.Path("up").touch()
            time.sleep(0.005)
"""


@pytest.mark.extended
@pytest.mark.brief
def test_two_hosts_train_as_one_process_does(make_hosts: Callable[[int], Hosts]) -> None:
    hosts = make_hosts(2)
    first = hosts.start(0, TRAINS, [])
    second = hosts.start(1, TRAINS, [])
    assert (first.wait(), second.wait()) == (0, 0), first.stderr + second.stderr
    alone = subprocess.run(
        [sys.executable, "script.py"], cwd=first.directory, capture_output=True, text=True, check=True
    ).stdout
    told, total = first.stdout.strip().rsplit(", ", 1)
    assert told.startswith("2 ranks, 2 hosts, ")
    assert abs(float(total) - float(alone.rsplit(", ", 1)[1])) < 2e-5
    assert "2 ranks on 2 nodes" in first.stderr


def test_a_host_that_comes_late_is_waited_for_by_name(make_hosts: Callable[[int], Hosts]) -> None:
    hosts = make_hosts(2)
    first = hosts.start(0, TRAINS, [])
    first.wait_until(lambda: "evenstep: waiting for node 1 of 2" in first.stderr)
    second = hosts.start(1, TRAINS, [])
    assert (first.wait(), second.wait()) == (0, 0), first.stderr + second.stderr


@pytest.mark.parametrize("victim", [0, 1])
def test_a_host_that_is_cut_off_is_named_in_seconds_with_76(make_hosts: Callable[[int], Hosts], victim: int) -> None:
    """Whichever side one looks from, the other one is gone."""
    hosts = make_hosts(2)
    started = [hosts.start(host, LASTS, ["--node-timeout", "4"]) for host in range(2)]
    for host in started:
        host.wait_until((host.directory / "up").exists)
    hosts.cut(victim)
    cut = time.monotonic()
    survivor = started[1 - victim]
    assert survivor.wait() == 76, survivor.stderr
    assert time.monotonic() - cut < 20, survivor.stderr  # 6 s on a quiet machine
    expected = "node 1 (" if victim == 1 else "the node of the store, "
    assert survivor.stderr.splitlines()[-1].startswith(f"evenstep: {expected}"), survivor.stderr
    assert started[victim].wait() == 76, started[victim].stderr


def test_who_failed_on_another_host_is_said_on_all(make_hosts: Callable[[int], Hosts]) -> None:
    script = LASTS.replace(
        "if step == 20:",
        "if step == 20 and world.rank == 1:\n                raise ValueError('boom')\n            if step == 20:",
    )
    hosts = make_hosts(2)
    first, second = (hosts.start(host, script, []) for host in range(2))
    assert second.wait() == 1, second.stderr
    assert "ValueError: boom" in second.stderr
    assert first.wait() == 1, first.stderr
    last = first.stderr.splitlines()[-1]
    assert last.startswith("evenstep: on node 1 ("), first.stderr
    assert "rank 1 (pid " in last
    assert "failed: ValueError: boom" in last


TRAINS_ON = """
    import time
    import evenstep, torch

    with evenstep.init(seed=3) as world:
        model = evenstep.DistributedDataParallel(torch.nn.Linear(8, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(100_000):
            model.backward(model(torch.ones(2, 8)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.005)
"""


def test_what_all_ranks_did_is_said_on_all_hosts(make_hosts: Callable[[int], Hosts]) -> None:
    """The root cause by name, where it was, and what the ranks of the others did."""
    hosts = make_hosts(2)
    flags = ["--inject", "stop:rank=1,step=40", "--stopped-grace", "3"]
    started = [hosts.start(host, TRAINS_ON, flags) for host in range(2)]
    for host in started:
        assert host.wait() == 71, host.stderr
    here, there = started[1].stderr.splitlines(), started[0].stderr.splitlines()
    assert "is stopped (state T)" in here[-1]
    assert there[-1].startswith("evenstep: on node 1 ("), there
    assert "rank 1 (pid " in there[-1]
    assert "is stopped (state T)" in there[-1]
    # Rank 0 waits in Gloo for rank 1, which has come to step 40 and goes no further.
    for lines in (here, there):
        assert any(line.startswith("evenstep: run ") and "rank 1 (pid " in line and "step 40" in line for line in lines)
    waits = (
        r"evenstep: at that time, on node 0 \(.*\): rank 0 \(pid \d+\) was .*step 40.*, waiting for others for [\d.]+ s"
    )
    assert any(re.fullmatch(waits, line) for line in here), here


def test_elastic_hosts_go_on_without_one_that_is_lost(make_hosts: Callable[[int], Hosts]) -> None:
    """--nnodes 1:3: two come, one is cut off, and the rest starts again with a world of its own size."""
    script = """
        import pathlib, time
        import evenstep

        with evenstep.init() as world:
            for step in range(100_000):
                world.barrier()
                if step == 20:
                    pathlib.Path(f"up-{world.world_size}").touch()
                if world.world_size == 1 and step == 40:
                    print("went on alone", flush=True)
                    break
                time.sleep(0.005)
    """
    hosts = make_hosts(2)
    flags = [*hosts.elastic("1:3"), "--max-restarts", "3", "--node-timeout", "4"]
    slow = "join_timeout=60,last_call_timeout=12"
    first, second = (hosts.start(host, script, [*flags, "--rdzv-conf", slow], static=False) for host in range(2))
    first.wait_until((first.directory / "up-2").exists)
    hosts.cut(1)
    assert first.wait() == 0, first.stderr
    assert "went on alone" in first.stdout
    assert "node 1 (" in first.stderr
    assert second.process.poll() is None or second.process.returncode == 76
