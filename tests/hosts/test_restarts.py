"""`evenstep run --max-restarts` on several hosts: all of them know whether a run gets anywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.hosts.conftest import Hosts

FAILS = """
    import evenstep, torch
    from evenstep.environment import current_placement

    with evenstep.init(seed=1, quiet=True) as world:
        model = evenstep.DistributedDataParallel(torch.nn.Linear(4, 1))
        checkpoint = evenstep.Checkpointer({saved!r}, every_steps=1, every_minutes=None, model=model)
        checkpoint.resume()
        if {gets_anywhere} or checkpoint.num_steps == 0:
            checkpoint.step()
            checkpoint.wait()
        world.barrier()
        if current_placement().restart_count < {num_failures} and world.rank == {culprit}:
            raise ValueError("a sample that fails every time")
        world.barrier()
"""


def test_hosts_that_save_nothing_themselves_know_that_the_run_gets_on(
    make_hosts: Callable[[int], Hosts], tmp_path: Path
) -> None:
    """Rank 0's host alone makes checkpoints of what all have written."""
    script = FAILS.format(saved=str(tmp_path / "saved"), gets_anywhere=True, num_failures=5, culprit=1)
    hosts = make_hosts(2)
    started = [hosts.start(host, script, ["--max-restarts", "9"]) for host in range(2)]
    for host in started:
        assert host.wait() == 0, host.stderr
        assert host.stderr.count("restarting all ranks") == 5, host.stderr
        assert "evenstep: the newest checkpoint is that of step 5\n" in host.stderr


def test_all_hosts_end_a_run_that_gets_nowhere(make_hosts: Callable[[int], Hosts], tmp_path: Path) -> None:
    script = FAILS.format(saved=str(tmp_path / "saved"), gets_anywhere=False, num_failures=9, culprit=0)
    hosts = make_hosts(2)
    started = [hosts.start(host, script, ["--max-restarts", "9"]) for host in range(2)]
    for host in started:
        assert host.wait() == 1, host.stderr
        assert host.stderr.count("restarting all ranks") == 3, host.stderr
        assert host.stderr.splitlines()[-1].startswith("evenstep: 3 restarts have come to no new checkpoint")
