"""`evenstep run --max-restarts` and `--recover`: how soon the ranks go on, from where, and when it is given up."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

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
    gone = ("page-1-0", "crash-1-12.json", "saves-1-1", "streams-1-0-0a1b2c3d", "rendezvous-1")
    kept = ("crash-0-1.json", "page-0-1", "page-11-1", "rendezvous-0", "rendezvous-11", "virtual-ranks")
    for name in (*gone, *kept):
        (tmp_path / name).touch()
    forget_attempt(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == list(kept)


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
        # Who goes on from the disk needs what the death two steps later finds there.
        waits = "middle" in sys.argv or "sharded" in sys.argv
        checkpoint = evenstep.Checkpointer("saved", every_steps=4, every_minutes=None, asynchronous=not waits, **parts)

        def die_once(name):
            try:
                os.close(os.open(name, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
            os.kill(os.getpid(), 9)

        if "donor" in sys.argv:
            from evenstep.checkpoint.save import survivors

            put_in_place = survivors.put_in_place
            survivors.put_in_place = lambda *args: (die_once("donor"), put_in_place(*args))
        if "two" in sys.argv:
            from evenstep.checkpoint.save import survivors

            both = evenstep.Checkpointer("net", every_minutes=None, net=net), checkpoint
            put_in_place = survivors.put_in_place
            survivors.put_in_place = lambda *args: (time.sleep(2), put_in_place(*args))
            world.print(f"net begins at {both[0].resume()}")
        if "replacement" in sys.argv and os.path.exists("died") and world.rank == world.world_size - 1:
            die_once("replacement")
        world.print(f"begins at {checkpoint.resume()}")
        logger = evenstep.Logger("log", telemetry=True)
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
                if "middle" in sys.argv:
                    die("middle")
                    world.barrier()
                for each in both if "two" in sys.argv else (checkpoint,):
                    each.step()
                logger.log({"rate": optimizer.param_groups[0]["lr"]}, step=checkpoint.num_steps)
            die("epoch")
            model.eval()
            with torch.no_grad():
                model(torch.ones(2, 4))
            world.barrier()
            model.train()
        values = b"".join(value.numpy().tobytes() for value in net.state_dict().values())
        world.print("ended with", hashlib.sha256(values).hexdigest())
"""


def goes_on(tmp_path: Path, flags: list[str], *arguments: str, num_ranks: int = 2) -> tuple[int, str, str]:
    """Run the script above; (status, stdout, stderr). Nothing is left."""
    tmp_path.mkdir(exist_ok=True)
    of_all = ["--nproc-per-node", str(num_ranks), "--device", "cpu", "--threads-per-rank", "1"]
    code, command = call(tmp_path, [*of_all, *flags, "script.py", *arguments], GOES_ON)
    assert command.leaves_no_process()
    if code == 0:
        assert command.left_files() == []
    return code, command.stdout, command.stderr


@pytest.mark.parametrize(
    ("arguments", "step"),
    [
        (["forward"], 6),
        pytest.param(["step"], 7, marks=pytest.mark.extended),
        pytest.param(["forward", "reproducible"], 6, marks=pytest.mark.extended),
        pytest.param(["step", "reproducible"], 7, marks=pytest.mark.extended),
        pytest.param(["forward", "gloo"], 6, marks=pytest.mark.extended),
    ],
)
def test_a_lost_rank_is_replaced_and_the_run_ends_as_if_nothing_had_happened(
    tmp_path: Path, arguments: list[str], step: int
) -> None:
    """Also what is random: dropout, augmentation. The survivor has all of it but the other's streams, in a page."""
    code, undisturbed, _ = goes_on(tmp_path / "undisturbed", [], *arguments[1:])
    assert code == 0
    code, killed, told = goes_on(tmp_path / "killed", ["--recover", "replace"], *arguments)
    assert code == 0, told
    assert killed == undisturbed.replace("begins at 0\n", f"begins at 0\nbegins at {step}\n")
    assert f"evenstep: recovery 1: 2 ranks go on from memory, at step {step}\n" in told
    assert re.search(r"evenstep: 1 rank was lost and replaced, 1 step repeated at most, [\d.]+ s lost\n$", told), told
    lines = [json.loads(line) for line in (tmp_path / "killed" / "log" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 11))
    assert [line.get("recovery/ranks_lost", 0) for line in lines] == [0] * step + [1] * (10 - step)
    assert lines[-1]["recovery/steps_repeated"] == 1


@pytest.mark.extended
@pytest.mark.parametrize("who", ["donor", "replacement", "again"])
def test_another_rank_that_dies_in_the_recovery_costs_no_other_step(tmp_path: Path, who: str) -> None:
    """The survivor that saves, over its save; the replacement, before it has its state; another one, right after."""
    code, undisturbed, _ = goes_on(tmp_path / "undisturbed", [], num_ranks=3)
    assert code == 0
    code, killed, told = goes_on(tmp_path / "killed", ["--recover", "replace"], "forward", who, num_ranks=3)
    assert code == 0, told
    again = "begins at 6\n" if who == "again" else ""
    assert killed == undisturbed.replace("begins at 0\n", f"begins at 0\n{again}begins at 6\n")
    assert told.count("3 ranks go on from memory, at step 6\n") == (1 if who == "donor" else 2)
    assert "evenstep: 2 ranks were lost and replaced, " in told
    assert (tmp_path / "killed" / who).exists()


@pytest.mark.extended
def test_a_rank_that_is_stopped_does_not_keep_the_others_from_noticing_a_loss(tmp_path: Path) -> None:
    code, undisturbed, _ = goes_on(tmp_path / "undisturbed", [], num_ranks=3)
    assert code == 0
    code, killed, told = goes_on(tmp_path / "killed", ["--recover", "replace"], "stops", num_ranks=3)
    assert code == 0, told
    assert killed == undisturbed.replace("begins at 0\n", "begins at 0\nbegins at 6\n")
    assert "evenstep: recovery 1: 3 ranks go on from memory, at step 6\n" in told
    # The stopped rank is counted where it had to be killed before the survivor could notice.
    assert re.search("evenstep: (1 rank was|2 ranks were) lost and replaced, 1 step repeated at most, ", told), told


@pytest.mark.extended
@pytest.mark.parametrize("how", ["hangs", "raises"])
def test_a_rank_that_hangs_or_raises_is_lost_like_one_that_was_killed(tmp_path: Path, how: str) -> None:
    code, undisturbed, _ = goes_on(tmp_path / "undisturbed", [])
    assert code == 0
    flags = ["--recover", "replace", "--phase-timeout", "between=4"]
    code, killed, told = goes_on(tmp_path / "killed", flags, "forward", how)
    assert code == 0, told
    assert killed == undisturbed.replace("begins at 0\n", "begins at 0\nbegins at 6\n")
    assert "evenstep: 1 rank was lost and replaced, 1 step repeated at most, " in told


@pytest.mark.extended
def test_what_several_checkpointers_have_is_awaited_until_all_have_saved(tmp_path: Path) -> None:
    """Each save takes two seconds here, and a rank that is stopped has one."""
    code, undisturbed, _ = goes_on(tmp_path / "undisturbed", [], "two")
    assert code == 0
    flags = ["--recover", "replace", "--shutdown-timeout", "1"]
    code, killed, told = goes_on(tmp_path / "killed", flags, "forward", "two")
    assert code == 0, told
    begins = "net begins at 0\nbegins at 0\n"
    assert killed == undisturbed.replace(begins, f"{begins}net begins at 6\nbegins at 6\n")


@pytest.mark.parametrize(("num_ranks", "left"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.extended)])
def test_those_that_are_left_go_on_and_compute_the_same_bits(tmp_path: Path, num_ranks: int, left: int) -> None:
    """Of 8 virtual ranks 3 ranks can't have equally many."""
    code, undisturbed, _ = goes_on(tmp_path / "undisturbed", [], "reproducible")
    assert code == 0
    flags = ["--recover", "shrink"]
    code, killed, told = goes_on(tmp_path / "killed", flags, "forward", "reproducible", num_ranks=num_ranks)
    assert code == 0, told
    assert killed == undisturbed.replace("begins at 0\n", "begins at 0\nbegins at 6\n")
    verb = "rank goes" if left == 1 else "ranks go"
    assert f"evenstep: recovery 1: {left} {verb} on from memory, at step 6\n" in told
    assert "evenstep: 1 rank was lost, 1 step repeated at most, " in told


@pytest.mark.extended
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["middle"], "could not save the last step: the parameters have changed since step 6 was finished"),
        (["forward", "sharded"], "--recover: optimizer (ShardedOptimizer) has a part of its state on one rank only"),
    ],
)
def test_what_survivors_do_not_have_comes_from_the_disk_and_that_is_said(
    tmp_path: Path, arguments: list[str], why: str
) -> None:
    code, undisturbed, _ = goes_on(tmp_path / "undisturbed", [], *arguments[1:])
    assert code == 0
    code, killed, told = goes_on(tmp_path / "killed", ["--recover", "replace"], *arguments)
    assert code == 0, told
    assert why in told
    assert "evenstep: recovery 1: 2 ranks go on from the newest checkpoint on disk, at step 4\n" in told
    assert killed == undisturbed.replace("begins at 0\n", "begins at 0\nbegins at 4\n")


@pytest.mark.extended
def test_with_too_few_ranks_left_the_run_ends_as_without_recovery(tmp_path: Path) -> None:
    code, _, told = goes_on(tmp_path / "killed", ["--recover", "shrink", "--min-ranks", "2"], "forward")
    assert code == 137
    assert "recovery" not in told
    assert "evenstep: not recovered: 1 rank could go on, and --min-ranks is 2\n" in told
    assert re.search(r"rank 1 \(pid \d+\) was killed by SIGKILL .* between steps, step 6", told.splitlines()[-1]), told
    code, _, told = goes_on(tmp_path / "refused", ["--recover", "shrink", "--min-ranks", "3"])
    assert code == 78
    assert "--min-ranks 3: the run has only 2 ranks." in told


@pytest.mark.extended
def test_a_rank_that_fails_at_the_same_step_every_time_ends_the_run_after_three(tmp_path: Path) -> None:
    script = """
        import evenstep, torch

        with evenstep.init(seed=1, quiet=True) as world:
            model = evenstep.DistributedDataParallel(torch.nn.Linear(4, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            checkpoint = evenstep.Checkpointer("saved", every_minutes=None, model=model, optimizer=optimizer)
            checkpoint.resume()
            while checkpoint.num_steps < 9:
                if checkpoint.num_steps == 3 and world.rank == 1:
                    raise ValueError("a sample that fails every time")
                model.backward(model(torch.ones(2, 4)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                checkpoint.step()
    """
    flags = ["--nproc-per-node", "2", "--device", "cpu", "--recover", "replace", "script.py"]
    code, command = call(tmp_path, flags, script)
    assert code == 1
    assert command.stderr.count("2 ranks go on from memory, at step 3") == 3
    assert "failed: ValueError: a sample that fails every time" in command.stderr.splitlines()[-1]
    assert "evenstep: 3 ranks were lost and replaced, 3 steps repeated at most, " in command.stderr
    assert command.leaves_no_process()
