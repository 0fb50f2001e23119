"""`evenstep run --max-restarts` on several hosts: where a run goes on, and that all know whether it gets anywhere."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from evenstep.ground.host.processes import children
from tests.hosts.conftest import Hosts

FAILS = """
    import evenstep, torch
    from evenstep.ground.environment import current_placement

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


def test_all_hosts_end_a_run_that_gets_nowhere(make_hosts: Callable[[int], Hosts], tmp_path: Path) -> None:
    script = FAILS.format(saved=str(tmp_path / "saved"), gets_anywhere=False, num_failures=9, culprit=0)
    hosts = make_hosts(2)
    started = [hosts.start(host, script, ["--max-restarts", "9"]) for host in range(2)]
    for host in started:
        assert host.wait() == 1, host.stderr
        assert host.stderr.count("restarting all ranks") == 3, host.stderr
        assert host.stderr.splitlines()[-1].startswith("evenstep: 3 restarts have come to no new checkpoint")


TRAINS = """
    import hashlib, os
    import evenstep, torch

    with evenstep.init(seed=3, quiet=True) as world:
        model = torch.nn.Sequential(torch.nn.Linear(8, 300), torch.nn.Dropout(0.3), torch.nn.Linear(300, 4))
        model = evenstep.DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        inputs = torch.randn(240, 8, generator=torch.Generator().manual_seed(5))
        loader = evenstep.DataLoader(torch.utils.data.TensorDataset(inputs), global_batch_size=12, shuffle=True)
        checkpoint = evenstep.Checkpointer(
            {saved!r}, every_steps=5, every_minutes=None, asynchronous=False,
            model=model, optimizer=optimizer, loader=loader,
        )
        checkpoint.resume()
        began = checkpoint.num_steps
        for epoch in loader.epochs(3):
            for (x,) in loader:
                model.backward(model(x).square().mean(), weight=len(x))
                if began == 0 and checkpoint.num_steps == 12 and world.rank in {die}:
                    os.kill(os.getpid(), 9)
                optimizer.step()
                optimizer.zero_grad()
                checkpoint.step()
        values = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        digest = hashlib.sha256(values).hexdigest()
        world.print(f"{{world.world_size}} ranks from step {{began}} to {{checkpoint.num_steps}}, {{digest}}")
"""


@pytest.mark.parametrize(("ranks_each", "die"), [(1, (1,)), (1, (0,)), (2, (1,)), (2, (2, 3))])
def test_lost_ranks_cost_the_steps_since_the_checkpoint_and_no_bit(
    make_hosts: Callable[[int], Hosts], tmp_path: Path, ranks_each: int, die: tuple[int, ...]
) -> None:
    """Also where a host has lost all of its ranks, and with dropout."""
    flags = ["--nproc-per-node", str(ranks_each), "--max-restarts", "1"]
    ends = {}
    for name, dying in {"lost": die, "undisturbed": ()}.items():
        hosts = make_hosts(2)
        hosts.directory = tmp_path / name
        text = TRAINS.format(saved=str(tmp_path / f"saved {name}"), die=dying)
        started = [hosts.start(host, text, flags) for host in range(2)]
        assert [host.wait() for host in started] == [0, 0], "\n".join(host.stderr for host in started)
        ends[name] = started[0].stdout
        for host in started:
            assert host.stderr.count("restarting all ranks") == bool(dying), host.stderr
        hosts.__exit__(None, None, None)
    num = 2 * ranks_each
    assert ends["lost"].startswith(f"{num} ranks from step 10 to 60, "), ends
    assert ends["undisturbed"].startswith(f"{num} ranks from step 0 to 60, "), ends
    assert ends["lost"].split()[-1] == ends["undisturbed"].split()[-1]


LEAVES = """
    import atexit, time
    import evenstep, torch

    with evenstep.init(seed=1, quiet=True) as world:
        if {is_slow}:
            atexit.register(time.sleep, 1.5)
        model = evenstep.DistributedDataParallel(torch.nn.Linear(4, 1))
        for _ in range(3 if world.rank == 1 else 5):
            model(torch.ones(2, 4)).sum().backward()
"""


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_rank_whose_loop_is_shorter_is_named_on_all_hosts(make_hosts: Callable[[int], Hosts], is_slow: bool) -> None:
    """Its own host knows first that others were left; theirs wait for what it says."""
    hosts = make_hosts(3)
    started = [hosts.start(host, LEAVES.format(is_slow=is_slow), []) for host in range(3)]
    for host in started:
        assert host.wait() == 72, host.stderr
        line = host.stderr.splitlines()[-1]
        assert re.search(r"rank 1 \(pid \d+\) had ended with status 0 while ranks of other nodes still waited", line)


@pytest.mark.parametrize("asked", [0, 1])
def test_a_stop_asked_of_one_host_ends_all_of_them(
    make_hosts: Callable[[int], Hosts], tmp_path: Path, asked: int
) -> None:
    """The host that was asked ends at once, and the others wait for no host that has ended."""
    hosts = make_hosts(2)
    script = TRAINS.format(saved=str(tmp_path / "saved"), die=()).replace("epochs(3)", "epochs(100000)")
    started = [hosts.start(host, script, []) for host in range(2)]
    started[0].wait_until(lambda: (tmp_path / "saved").exists() and any((tmp_path / "saved").glob("step-*")))
    (launcher,) = children(started[asked].process.pid)  # the one process of the namespace that its maker has started
    os.kill(launcher, signal.SIGTERM)
    assert [host.wait() for host in started] == [75, 75], "\n".join(host.stderr for host in started)
    assert "stop requested (SIGTERM" in started[0].stderr


ASKED = """
    import os, pathlib, signal, time
    import evenstep, torch

    with evenstep.init(seed=3, quiet=True) as world:
        model = evenstep.DistributedDataParallel(torch.nn.Linear(8, 4))
        checkpoint = evenstep.Checkpointer({saved!r}, every_steps=5, every_minutes=None, model=model)
        checkpoint.resume()
        asked = pathlib.Path({asked!r})
        world.barrier()
        if world.rank == 0:
            os.kill(os.getppid(), signal.SIGTERM)
            asked.touch()
            time.sleep(1)  # a long step: it saves at its end
        while not asked.exists():
            time.sleep(0.01)
        if world.rank == 1:
            os.kill(os.getpid(), 9)
        world.barrier()
"""


def test_a_host_that_loses_a_rank_while_another_was_asked_to_stop_does_not_start_again(
    make_hosts: Callable[[int], Hosts], tmp_path: Path
) -> None:
    """Before ranks have agreed to stop: it would wait for the other host, which has ended, until its patience ends."""
    hosts = make_hosts(2)
    script = ASKED.format(saved=str(tmp_path / "saved"), asked=str(tmp_path / "asked"))
    started = [hosts.start(host, script, ["--max-restarts", "3"]) for host in range(2)]
    assert [host.wait() for host in started] == [128 + 15, 128 + 9], started[0].stderr + started[1].stderr
    assert "restarting all ranks" not in started[1].stderr
    assert started[1].stderr.endswith("evenstep: the run had been asked to stop, so there is no other attempt\n")


COMES_BACK = """
    import time
    import evenstep, torch

    with evenstep.init(quiet=True) as world:
        model = evenstep.DistributedDataParallel(torch.nn.Linear(4, 1))
        checkpoint = evenstep.Checkpointer({saved!r}, every_steps=1, every_minutes=None, model=model)
        checkpoint.resume()
        if checkpoint.num_steps == 0:
            checkpoint.step()
            checkpoint.wait()
            open("up", "w").close()
            while True:
                world.barrier()
                time.sleep(0.01)
        world.print(f"{{world.num_nodes}} nodes from step {{checkpoint.num_steps}}")
"""


def test_a_launcher_that_is_started_anew_takes_the_place_of_a_lost_one(
    make_hosts: Callable[[int], Hosts], tmp_path: Path
) -> None:
    """It knows nothing of the attempt before, in which another launcher had its rank."""
    script, flags = COMES_BACK.format(saved=str(tmp_path / "saved")), ["--max-restarts", "1", "--node-timeout", "4"]
    hosts = make_hosts(2)
    started = [hosts.start(host, script, flags) for host in range(2)]
    for host in started:
        host.wait_until((host.directory / "up").exists)
    started[1].process.kill()
    started[1].process.wait()
    second = hosts.start(1, script, flags)
    assert (started[0].wait(), second.wait()) == (0, 0), started[0].stderr + second.stderr
    assert started[0].stdout == "2 nodes from step 1\n"
    assert "two nodes have" not in second.stderr
