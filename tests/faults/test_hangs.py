"""Who hangs is named with its phase; who only takes its time is left alone; who is slow is told of once."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch

import evenstep
from evenstep.errors import CollectiveTimeoutError, MismatchError
from evenstep.ground.health import heartbeat
from evenstep.ground.health.heartbeat import Phase
from evenstep.testing import RankPool
from evenstep.transport.shm.handshake import connect_shared_memory
from tests.commands import call


def ranks_that_disagree() -> str:
    world = evenstep.init(quiet=True)
    try:
        if world.rank == 0:
            world.transport.split().all_reduce(torch.ones(3)).wait()
        else:
            world.transport.split().all_reduce(torch.ones(4)).wait()
    except MismatchError as error:
        return str(error)
    return "no error"


def test_a_mismatch_says_where_both_calls_were_made(ranks: RankPool) -> None:
    """Within seconds, and not after the timeout. Under `RankGroup`, which is no launcher with pages of its own."""
    first, second = ranks.run(ranks_that_disagree, 2)
    assert first == second, "the same text on all ranks"
    here = re.escape(__file__)
    found = re.search(rf"called here: rank 0: {here}:(\d+) in ranks_that_disagree; rank 1: {here}:(\d+) in", first)
    assert found, first
    assert int(found[2]) == int(found[1]) + 2


def comes_late(phase: Phase, timeout_s: float, sleep_s: float) -> str:
    world = evenstep.init(quiet=True)
    transport = connect_shared_memory(world.control, timeout_s=timeout_s)
    assert not isinstance(transport, str)
    try:
        if world.rank == 1:
            heartbeat.mark(phase)
            time.sleep(sleep_s)
            heartbeat.mark(Phase.BETWEEN_STEPS)
            time.sleep(timeout_s / 2)  # it comes out of its phase late, and has a step's time from then on
        transport.barrier().wait()
    except CollectiveTimeoutError as error:
        return str(error)
    finally:
        transport.close()
        world.control.all_reduce(torch.zeros(1)).wait()  # both are here again
    return "met"


@pytest.mark.extended
def test_deadlines_know_what_the_missing_rank_is_doing(ranks: RankPool) -> None:
    """An evaluation may take six times as long as a step; who hangs is named with its phase."""
    assert ranks.run(comes_late, 2, Phase.EVALUATING, 0.5, 1.5) == ["met", "met"]
    told, _ = ranks.run(comes_late, 2, Phase.BACKWARD, 0.5, 1.5)
    assert re.search(r"Missing: rank 1 \(pid \d+, in backward( of step \d+)?\)", told), told


@pytest.mark.extended
def test_the_launcher_gives_up_a_rank_whose_phase_times_out_and_shows_where_it_was(tmp_path: Path) -> None:
    """The rank holds the interpreter lock, and its peers have 600 s before they speak."""
    script = """
        import evenstep, torch

        with evenstep.init(seed=0) as world:
            model = evenstep.DistributedDataParallel(torch.nn.Linear(4, 4))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(8):
                model.backward(model(torch.ones(2, 4)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    """
    flags = ["--nproc-per-node", "2", "--device", "cpu", "--phase-timeout", "step=0.5", "--inject"]
    code, command = call(tmp_path, [*flags, "hang:rank=1,step=5,phase=backward", "script.py"], script)
    assert code == 71, command.stderr
    last = command.stderr.splitlines()[-1]
    assert re.match(
        r"evenstep: rank 1 \(pid \d+\) is in backward of step 5; rank 0 waits since [56] s\. This is longer than "
        r"allowed in this phase \(0\.5 s\), so the run was ended$",
        last,
    ), last
    assert "evenstep: rank 1 was here:" in command.stderr
    assert "_perform" in command.stderr, "the injector's function, which holds the lock"
    assert command.leaves_no_process()


@pytest.mark.extended
def test_a_slow_rank_is_named_once_on_rank_0(tmp_path: Path) -> None:
    """It is never killed. The windows are shortened."""
    script = """
        import time
        import evenstep, torch
        from evenstep.ground.health import steps

        steps.WINDOW_S = 0.7
        with evenstep.init(seed=0) as world:
            model = evenstep.DistributedDataParallel(torch.nn.Linear(4, 4))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(200):
                time.sleep(0.03 if world.rank == 1 else 0.005)
                model.backward(model(torch.ones(2, 4)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    """
    code, command = call(tmp_path, ["--nproc-per-node", "2", "--device", "cpu", "script.py"], script)
    assert code == 0, command.stderr
    lines = [line for line in command.stderr.splitlines() if "is slow" in line]
    assert len(lines) == 1, command.stderr
    assert re.match(r"evenstep: rank 1 \(pid \d+\) is slow: its part of a step takes [\d.]+ times as long", lines[0])
