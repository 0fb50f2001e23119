"""`evenstep run --max-restarts`: how soon the ranks go on, from where, and when it is given up."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from evenstep.launcher.elastic.nodes import Standing
from tests.commands import call


def test_three_restarts_without_a_new_checkpoint_end_the_run(tmp_path: Path) -> None:
    script = """
        import evenstep, torch

        with evenstep.init(seed=1, quiet=True) as world:
            model = evenstep.DistributedDataParallel(torch.nn.Linear(4, 1))
            checkpoint = evenstep.Checkpointer("saved", every_steps=1, every_minutes=None, model=model)
            checkpoint.resume()
            if checkpoint.num_steps == 0:
                checkpoint.step()
                checkpoint.wait()
            raise ValueError("a sample that fails every time")
    """
    code, command = call(
        tmp_path, ["--nproc-per-node", "1", "--device", "cpu", "--max-restarts", "9", "script.py"], script
    )
    assert code == 1
    assert command.stderr.count("restarting all ranks") == 3
    *_, verdict, last = command.stderr.splitlines()
    assert "failed: ValueError: a sample that fails every time" in verdict
    assert last == (
        "evenstep: 3 restarts have come to no new checkpoint, so there is no other, though --max-restarts 9 allows 6 "
        "more"
    )
    assert command.stderr.count("the newest saved step is 1\n") == 4
    assert command.leaves_no_process()


def run_of(*saved_steps: int | None, saves: bool = True, began: Standing | None = None) -> Standing:
    """How a run stands after attempts that have failed, of which each has committed that; not restarted any more."""
    now = began or Standing()
    for number, step in enumerate(saved_steps):
        now = now.after_failure(Standing(saves=saves, saved_step=step))
        if number < len(saved_steps) - 1:
            now = replace(now, num_restarts=now.num_restarts + 1)
    return now


@pytest.mark.parametrize(
    ("saved_steps", "num_in_vain", "newest"),
    [
        ([None], 0, None),
        ([None] * 3, 2, None),
        ([None] * 4, 3, None),
        ([None, None, None, 40], 0, 40),
        ([None, None, None, 40, None, None], 2, 40),
        ([None, None, None, 40, None, None, None], 3, 40),
    ],
)
def test_restarts_are_counted_from_the_last_checkpoint(
    saved_steps: list[int | None], num_in_vain: int, newest: int | None
) -> None:
    now = run_of(*saved_steps)
    assert (now.num_in_vain, now.saved_step, now.is_in_vain) == (num_in_vain, newest, num_in_vain >= 3)


def test_nobody_knows_whether_a_run_without_a_checkpointer_gets_anywhere() -> None:
    assert not run_of(*[None] * 9, saves=False).is_in_vain


def test_what_was_saved_before_a_host_came_counts() -> None:
    now = replace(run_of(None, None), num_restarts=2)
    assert now.after(Standing(saves=True)) == now, "a host that comes while nothing is saved changes nothing"
    assert now.num_in_vain == 1
    now = run_of(None, began=now.after(Standing(saves=True, saved_step=7)))
    assert (now.num_in_vain, now.saved_step) == (0, 7), "the restart has come to a checkpoint"
    assert run_of(None, began=now).num_in_vain == 1


def test_all_nodes_decide_alike() -> None:
    """Whatever each of them knows of what was saved."""
    nothing, here = Standing(), Standing(saves=True, saved_step=5, has_saved=True)
    elsewhere = replace(here, saved_step=10)
    for each in ([here, elsewhere], [elsewhere, here]):
        assert Standing.of_all_nodes(each) == elsewhere
    assert Standing.of_all_nodes([nothing, here]) == here, "one node alone commits checkpoints"
    assert Standing.of_all_nodes([nothing, Standing(saves=True)]) == Standing(saves=True)


GOES_ON = """
    import hashlib, os, random, signal, sys, threading, time
    import evenstep, torch
    from torch import nn

    class Samples(torch.utils.data.Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, index):
            return torch.full((4,), float(index)) / 40 + 0.01 * random.random()

    options = dict(seed=1, reproducible=True) if "reproducible" in sys.argv else dict(seed=1)
    if "gloo" in sys.argv:
        options["transport"] = "gloo"
    with evenstep.init(quiet=True, **options) as world:
        norm = [] if "reproducible" in sys.argv else [nn.BatchNorm1d(8)]
        net = nn.Sequential(nn.Linear(4, 8), *norm, nn.Dropout(0.3), nn.Linear(8, 1))
        model = evenstep.DistributedDataParallel(net)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if "sharded" in sys.argv:
            optimizer = evenstep.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        loader = evenstep.DataLoader(Samples(), global_batch_size=8, shuffle=True)
        parts = dict(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
        # The death two steps after a save must find it on the disk.
        checkpoint = evenstep.Checkpointer("saved", every_steps=4, every_minutes=None, asynchronous=False, **parts)

        def die_once(name):
            try:
                os.close(os.open(name, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
            os.kill(os.getpid(), 9)

        if "replacement" in sys.argv and os.path.exists("died") and world.rank == world.world_size - 1:
            die_once("replacement")
        world.print(f"begins at {checkpoint.resume()}")
        is_first = not os.path.exists("died")

        def die(at):
            if "stops" in sys.argv and is_first and checkpoint.num_steps == 6:
                if world.rank == 1:
                    os.kill(os.getpid(), signal.SIGSTOP)
                if world.rank == 2:  # dies when it has sent its part, and waits for rank 1, as rank 0 does
                    threading.Timer(1, lambda: (open("died", "w").close(), os.kill(os.getpid(), 9))).start()
            if is_first and at in sys.argv and checkpoint.num_steps == 6 and world.rank == world.world_size - 1:
                open("died", "w").close()
                if "hangs" in sys.argv:
                    time.sleep(60)
                if "raises" in sys.argv:
                    raise OSError("a file that isn't there for once")
                os.kill(os.getpid(), 9)

        for epoch in loader.epochs(2):
            for batch in loader:
                for x in model.microbatches(batch) if "reproducible" in sys.argv else [batch]:
                    die("forward")
                    if "again" in sys.argv and not is_first and world.rank == 0:
                        die_once("again")
                    model.backward(model(x).square().mean(), weight=len(x))
                die("step")
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                die("middle")
                checkpoint.step()
            model.eval()
            with torch.no_grad():
                model(torch.ones(2, 4))
            world.barrier()
            model.train()
        values = b"".join(value.numpy().tobytes() for value in net.state_dict().values())
        world.print("ended with", hashlib.sha256(values).hexdigest())
"""


def goes_on(tmp_path: Path, flags: list[str], *arguments: str, num_ranks: int = 2) -> tuple[str, str]:
    """Run the script above, which ends well; (stdout, stderr). Nothing is left but logs of the failed attempt."""
    tmp_path.mkdir(exist_ok=True)
    of_all = ["--nproc-per-node", str(num_ranks), "--device", "cpu", "--threads-per-rank", "1"]
    code, command = call(tmp_path, [*of_all, *flags, "script.py", *arguments], GOES_ON)
    assert command.leaves_no_process()
    assert code == 0, command.stderr
    assert [each for each in command.left_files() if not each.startswith("evenstep-logs-")] == []
    return command.stdout, command.stderr


@pytest.mark.parametrize(
    ("how", "arguments", "num_ranks"),
    [
        ("forward", [], 2),
        *(
            pytest.param(*each, marks=pytest.mark.extended)
            for each in (
                ("step", ["reproducible"], 2),
                ("middle", ["gloo"], 2),
                ("forward", ["sharded"], 2),
                ("stops", [], 3),  # another rank is stopped: it doesn't keep the others from noticing the loss
                ("forward hangs", [], 2),
                ("forward raises", [], 2),
                ("forward replacement", [], 3),  # one of the new ranks dies before it has its state
                ("forward again", [], 3),  # another rank dies after the restart
            )
        ),
    ],
)
def test_a_lost_rank_costs_the_steps_since_the_checkpoint_and_no_bit(
    tmp_path: Path, how: str, arguments: list[str], num_ranks: int
) -> None:
    """Also what is random: dropout, augmentation."""
    undisturbed, _ = goes_on(tmp_path / "undisturbed", [], *arguments, num_ranks=num_ranks)
    restarts = 2 if how in ("forward replacement", "forward again") else 1
    flags = ["--max-restarts", str(restarts), *(["--phase-timeout", "between=4"] if "hangs" in how else [])]
    killed, told = goes_on(tmp_path / "killed", flags, *how.split(), *arguments, num_ranks=num_ranks)
    again = "begins at 4\n" * (1 + ("again" in how))
    assert killed == undisturbed.replace("begins at 0\n", f"begins at 0\n{again}")
    ends = "" if how in ("forward hangs", "forward raises") else " was killed by SIGKILL"
    assert re.search(rf"evenstep: rank {num_ranks - 1} \(pid \d+\){ends}", told), told
    assert told.count("evenstep: restarting all ranks: attempt ") == restarts
    assert "evenstep: the newest saved step is 4\n" in told
