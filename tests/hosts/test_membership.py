"""Hosts that join a run later, and what a run that starts again finds."""

from __future__ import annotations

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


TRAINS = """
    import pathlib, time
    import evenstep, torch

    with evenstep.init(seed=1, quiet=True) as world:
        model = evenstep.DistributedDataParallel(torch.nn.Linear(4, 1))
        if {saves}:
            checkpoint = evenstep.Checkpointer({saved!r}, every_steps=1000, every_minutes=None, model=model)
            checkpoint.resume()
            began = checkpoint.num_steps
        for step in range(100_000):
            world.barrier()
            if {saves}:
                checkpoint.step()
            if step == 10:
                pathlib.Path(f"up-{{world.world_size}}").touch()
            if world.world_size == 2 and step == 20:
                break
            time.sleep(0.005)
        if {saves}:
            print("began at step", began, flush=True)
"""


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("late", [0, 1])
def test_a_host_that_joins_costs_no_restart(
    make_hosts: Callable[[int], Hosts], tmp_path: Path, saves: bool, late: int
) -> None:
    """Even without any that is allowed; and whichever address it has, by which torch gives the numbers."""
    script = TRAINS.format(saves=saves, saved=str(tmp_path / "saved"))
    hosts = make_hosts(2)
    flags = hosts.elastic("1:3", keeper=1 - late)
    first = hosts.start(1 - late, script, flags, static=False)
    first.wait_until((first.directory / "up-1").exists)
    second = hosts.start(late, script, flags, static=False)
    both = (first, second)
    assert [host.wait() for host in both] == [0, 0], first.stderr + second.stderr
    assert first.stderr.startswith("evenstep: 1 rank on each of 1 to 3 hosts, cpu, ")
    assert "evenstep: another host has come" in first.stderr
    assert "restarting all ranks" not in first.stderr + second.stderr
    if saves:
        began = int((first.stdout + second.stdout).split()[-1])
        assert began > 10, "what was done alone was saved"


FAILS_WITH_TWO = """
    import os, pathlib, time
    import evenstep, torch

    with evenstep.init(seed=1, quiet=True) as world:
        model = evenstep.DistributedDataParallel(torch.nn.Linear(4, 1))
        if {saves}:
            checkpoint = evenstep.Checkpointer({saved!r}, every_steps=1000, every_minutes=None, model=model)
            checkpoint.resume()
        pathlib.Path(f"up-{{os.environ['TORCHELASTIC_RESTART_COUNT']}}").touch()
        world.barrier()
        for step in range(100_000):
            if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" or (world.world_size == 2 and world.rank == 0):
                raise ValueError("a sample that fails every time")
            world.barrier()
            if {saves}:
                checkpoint.step()
            time.sleep(0.005)
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
    script = FAILS_WITH_TWO.format(saves=saves, saved=str(tmp_path / "saved"))
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
