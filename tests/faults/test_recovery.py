"""`evenstep run --max-restarts`: how soon the ranks go on, from where, and when it is given up."""

from __future__ import annotations

import re
from pathlib import Path

from evenstep.launcher.elastic.restarts import RestartLimit, Standing, forget_attempt
from tests.commands import call

TRAINS = """
    import hashlib, os, sys, time
    import evenstep, torch
    from evenstep.environment import current_placement

    attempt = current_placement().restart_count
    with evenstep.init(seed=1, quiet=True) as world:
        model = evenstep.DistributedDataParallel(torch.nn.Sequential(torch.nn.Dropout(0.3), torch.nn.Linear(4, 1)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        checkpoint = evenstep.Checkpointer(
            "saved", every_steps=5, every_minutes=None, asynchronous=False, model=model, optimizer=optimizer
        )
        resumed = checkpoint.resume()
        while checkpoint.num_steps < 20:
            x = torch.randn(2, 4)
            model.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if "die" in sys.argv and attempt == 0 and checkpoint.num_steps == 12 and world.rank == 1:
                open("died", "w").write(repr(time.monotonic()))
                os.kill(os.getpid(), 9)
            checkpoint.step()
            if attempt == 1 and checkpoint.num_steps == resumed + 1:
                world.print(f"resumed at {resumed}, {time.monotonic() - float(open('died').read()):.3f} s later")
        values = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        world.print("ended with", hashlib.sha256(values).hexdigest())
"""


def test_ranks_go_on_from_the_newest_checkpoint_and_end_as_if_nothing_had_happened(tmp_path: Path) -> None:
    ended = {}
    for name, arguments in {"killed": ["die"], "undisturbed": []}.items():
        (tmp_path / name).mkdir()
        flags = ["--nproc-per-node", "2", "--device", "cpu", "--max-restarts", "1", "script.py", *arguments]
        code, command = call(tmp_path / name, flags, TRAINS)
        assert code == 0, command.stderr
        assert command.leaves_no_process()
        ended[name] = command.stdout
    found = re.fullmatch(r"resumed at 10, ([\d.]+) s later\n(ended with \w+\n)", ended["killed"])
    assert found, ended["killed"]
    assert found[2] == ended["undisturbed"]
    print(f"recovery in {found[1]} s; on a quiet machine 0.5 s, and 4 s with new pythons")  # noqa: T201


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
    assert command.stderr.count("the newest checkpoint is that of step 1\n") == 4
    assert command.leaves_no_process()


def test_restarts_are_counted_from_the_last_checkpoint() -> None:
    limit = RestartLimit()
    limit.note(attempt=0, saves=True, saved_step=None)
    for attempt in (1, 2):
        limit.note(attempt=attempt, saves=True, saved_step=None)
    assert (limit.num_in_vain, limit.is_reached, limit.saved_step) == (2, False, None)
    limit.note(attempt=3, saves=True, saved_step=40)
    for attempt in (4, 5):
        limit.note(attempt=attempt, saves=True, saved_step=None)
    assert not limit.is_reached
    limit.note(attempt=6, saves=True, saved_step=None)
    assert (limit.is_reached, limit.saved_step) == (True, 40)


def test_nobody_knows_whether_a_run_without_a_checkpointer_gets_anywhere() -> None:
    limit = RestartLimit()
    for attempt in range(9):
        limit.note(attempt=attempt, saves=False, saved_step=None)
    assert not limit.is_reached


def test_what_was_saved_before_a_host_came_counts() -> None:
    limit = RestartLimit()
    limit.note(attempt=0, saves=True, saved_step=None)
    limit.note(attempt=1, saves=True, saved_step=None)
    limit.note_saved(None)
    assert limit.num_in_vain == 1, "a host that comes while nothing is saved changes nothing"
    limit.note_saved(7)
    limit.note(attempt=2, saves=True, saved_step=None)
    assert (limit.num_in_vain, limit.saved_step) == (0, 7), "the restart has come to a checkpoint"
    limit.note(attempt=3, saves=True, saved_step=None)
    assert limit.num_in_vain == 1


def test_who_comes_later_counts_as_the_others_do() -> None:
    ran, came = RestartLimit(), RestartLimit()
    for attempt in range(3):
        ran.note(attempt=attempt, saves=True, saved_step=None)
    for standings in (
        [ran.standing(num_restarts=2), came.standing(num_restarts=0)],
        [came.standing(num_restarts=0), ran.standing(num_restarts=2)],
    ):
        together = Standing.of_all_nodes(standings)
        assert together == Standing(num_restarts=2, num_in_vain=2, saved_step=None, has_saved=False)
    for limit in (ran, came):
        limit.adopt(together)
        limit.note(attempt=3, saves=True, saved_step=None)
        assert limit.is_reached
    one_knows = [Standing(2, 1, None, False), Standing(2, 0, 9, True)]
    came.adopt(Standing.of_all_nodes(one_knows))
    assert (came.num_in_vain, came.saved_step) == (0, 9)


def test_only_what_one_attempt_has_left_is_forgotten(tmp_path: Path) -> None:
    for name in ("page-1-0", "crash-1-12.json", "saves-1-1", "page-0-1", "page-11-1", "crash-0-1.json"):
        (tmp_path / name).touch()
    forget_attempt(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["crash-0-1.json", "page-0-1", "page-11-1"]
