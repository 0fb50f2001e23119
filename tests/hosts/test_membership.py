"""Hosts that join a run later, and what a run that starts again finds."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts.conftest import Host, Hosts

TORCHS_OWN = """
    import os

    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.ones(4)
    dist.all_reduce(total)
    if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < 2 and dist.get_rank() == 1:
        raise ValueError("a fault of the first two attempts")
    dist.all_reduce(total)
    print(f"rank {dist.get_rank()}: {total[0].item():g}", flush=True)
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("kind", ["static", "elastic"])
def test_torchs_own_meeting_finds_no_addresses_of_the_ranks_before(
    make_hosts: Callable[[int], Hosts], kind: str
) -> None:
    """`init_process_group` without a name of its own: after two restarts, on two hosts."""
    hosts = make_hosts(2)
    flags = ["--max-restarts", "2", *([] if kind == "static" else hosts.elastic("2:2"))]
    started = [hosts.start(host, TORCHS_OWN, flags, static=kind == "static") for host in range(2)]
    for host in started:
        assert host.wait() == 0, host.stderr
        assert host.stderr.count("restarting all ranks") == 2, host.stderr
    assert started[0].stdout == "rank 0: 4\n"


# Trains until `ends` says otherwise; saves, if it does, when it is asked to stop.
TRAINS = """
    import os, pathlib, time
    import evenstep, torch

    with evenstep.init(seed=1, quiet=True) as world:
        model = evenstep.DistributedDataParallel(torch.nn.Linear(4, 1))
        began = None
        if {saves}:
            checkpoint = evenstep.Checkpointer({saved!r}, every_steps=1000, every_minutes=None, model=model)
            checkpoint.resume()
            began = checkpoint.num_steps
        for step in range(100_000):
            world.barrier()
            if {saves}:
                checkpoint.step()
            {ends}
            time.sleep(0.005)
        print("began at step", began, flush=True)
"""

ENDS_WITH_ALL = """
            if step == 10:
                pathlib.Path(f"up-{{world.world_size}}").touch()
            if world.world_size == {last} and step == 20:
                break
"""


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize(("late", "num_hosts"), [(0, 2), (1, 2), (2, 3)])
def test_a_host_that_joins_costs_no_restart(
    make_hosts: Callable[..., Hosts], tmp_path: Path, late: int, num_hosts: int, saves: bool
) -> None:
    """Even without any that is allowed; and whichever address it has, by which torch gives the numbers."""
    ends = ENDS_WITH_ALL.format(last=num_hosts).strip()
    script = TRAINS.format(saves=saves, saved=str(tmp_path / "saved"), ends=ends)
    hosts = make_hosts(num_hosts)
    before = [host for host in range(num_hosts) if host != late]
    flags = hosts.elastic(f"{len(before)}:3", keeper=before[0])
    started = [hosts.start(host, script, flags, static=False) for host in before]
    for host in started:
        host.wait_until((host.directory / f"up-{len(before)}").exists)
    started.append(hosts.start(late, script, flags, static=False))
    everything = "".join(host.stderr for host in started)
    assert [host.wait() for host in started] == [0] * num_hosts, everything
    for host in started[:-1]:
        assert host.stderr.startswith(f"evenstep: 1 rank on each of {len(before)} to 3 nodes, cpu, ")
        assert host.stderr.count("evenstep: another node has come") == 1, host.stderr
    assert not any("restarting all ranks" in host.stderr or " failed: " in host.stderr for host in started), everything
    if saves:
        began = int("".join(host.stdout for host in started).split()[-1])
        assert began > 10, "what was done before it came was saved"


FAILS_WITH_TWO = """
            if step == 0:
                pathlib.Path(f"up-{os.environ['TORCHELASTIC_RESTART_COUNT']}").touch()
                world.barrier()
            if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" or (world.world_size == 2 and world.rank == 0):
                raise ValueError("a sample that fails every time")
"""


def count_restarts(*hosts: Host) -> list[int]:
    return [host.stderr.count("restarting all ranks") for host in hosts]


@pytest.mark.parametrize("saves", [False, True])
def test_a_host_that_joins_counts_as_the_others_do(
    make_hosts: Callable[[int], Hosts], tmp_path: Path, saves: bool
) -> None:
    """Restarts before it came are counted, by the command's limit and by that of restarts in vain; its coming isn't.

    With a `Checkpointer` what was done before it came is saved, and restarts in vain are those after that.
    """
    script = TRAINS.format(saves=saves, saved=str(tmp_path / "saved"), ends=FAILS_WITH_TWO.strip())
    hosts = make_hosts(2)
    flags = [*hosts.elastic("1:3"), "--max-restarts", "9" if saves else "3"]
    first = hosts.start(0, script, flags, static=False)
    first.wait_until((first.directory / "up-1").exists)
    second = hosts.start(1, script, flags, static=False)
    assert [first.wait(), second.wait()] == [1, 1], first.stderr + second.stderr
    assert count_restarts(first, second) == ([4, 3] if saves else [3, 2]), first.stderr + second.stderr
    for host in (first, second):
        assert ("evenstep: 3 restarts have come to no new checkpoint" in host.stderr) == saves, host.stderr
        assert ("attempt 4 of 4" in host.stderr) == (not saves), host.stderr


TRAINS_ON = """
    import pathlib, time
    import evenstep, torch
    from evenstep.ground.environment import current_placement

    with evenstep.init(seed=3, quiet=True) as world:
        model = evenstep.DistributedDataParallel(torch.nn.Linear(8, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        inputs = torch.randn(240, 8, generator=torch.Generator().manual_seed(5))
        loader = evenstep.DataLoader(torch.utils.data.TensorDataset(inputs), global_batch_size=12, shuffle=True)
        checkpoint = evenstep.Checkpointer(
            {saved!r}, every_steps=5, every_minutes=None, model=model, optimizer=optimizer, loader=loader
        )
        checkpoint.resume()
        began = checkpoint.num_steps
        for epoch in loader.epochs(6):
            for (x,) in loader:
                model.backward(model(x).square().mean(), weight=len(x))
                optimizer.step()
                optimizer.zero_grad()
                checkpoint.step()
                if checkpoint.num_steps == 12:
                    pathlib.Path("up").touch()
                if world.world_size == 3:
                    time.sleep(0.3)  # until one is lost
        total = sum(p.double().abs().sum().item() for p in model.parameters())
        world.print(f"{{world.world_size}} ranks from step {{began}} to {{checkpoint.num_steps}}, {{total:.6f}}")
"""


def test_two_of_three_hosts_go_on_from_the_newest_checkpoint_as_if_there_had_been_no_third(
    make_hosts: Callable[..., Hosts], tmp_path: Path
) -> None:
    """On a slow wire; no sample is left out or used twice, so the end is that of one process."""
    script = TRAINS_ON.format(saved=str(tmp_path / "saved"))
    hosts = make_hosts(3, rate_mbit=100)
    flags = [*hosts.elastic("2:3"), "--max-restarts", "1", "--node-timeout", "4"]
    started = [hosts.start(host, script, flags, static=False) for host in range(3)]
    started[0].wait_until((started[0].directory / "up").exists)
    hosts.cut(2)
    assert [host.wait() for host in started[:2]] == [0, 0], started[0].stderr + started[1].stderr
    done, total = started[0].stdout.strip().rsplit(", ", 1)
    assert done in [f"2 ranks from step {step} to 120" for step in range(10, 120, 5)], started[0].stdout
    (tmp_path / "alone.py").write_text(textwrap.dedent(TRAINS_ON.format(saved=str(tmp_path / "saved alone"))))
    alone = subprocess.run([sys.executable, "alone.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert abs(float(total) - float(alone.stdout.strip().rsplit(", ", 1)[1])) < 2e-5, alone.stdout
