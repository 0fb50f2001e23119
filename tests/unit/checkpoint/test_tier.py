"""Two tiers in one process: copies on the node's own disk between checkpoints, and what a resume takes."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
from pathlib import Path

import pytest
from torch import nn

from evenstep import World
from evenstep.checkpoint import tier as tiers
from evenstep.checkpoint.checkpointer import Checkpointer
from evenstep.checkpoint.directory import checkpoints_in
from evenstep.checkpoint.lock import read_top
from evenstep.checkpoint.store import LocalDirectory
from evenstep.errors import ConfigurationError, UsageError
from tests.checkpoint_runs import Training, assert_same
from tests.unit.checkpoint.test_checkpointer import Dead, Disk


def training(root: Path, local: object = None, *, saved: object = None, **options: int):
    return Training(
        root / "saved" if saved is None else saved,
        World.alone(device="cpu"),
        every_minutes=None,
        local=root / "local" if local is None else local,
        **{"every_steps": 10, "local_every_steps": 2, **options},
    )


def generations(root: Path) -> list[int]:
    """The steps of the generations that are there, whole or not."""
    return sorted(int(path.name[5:12]) for path in (root / "local").glob(f"{os.geteuid()}/*/step-*"))


def is_killed(run: Training) -> None:
    """The run ends, and nothing more is written; the lock is free."""
    with contextlib.suppress(Dead):
        run.checkpoint._saver.writer.finish()
    if run.checkpoint._tier is not None:
        run.checkpoint._tier._saver.writer.finish()
    with contextlib.suppress(Dead):
        run.checkpoint._release()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, object]]:
    """What a run has after each step."""
    run = Training(tmp_path_factory.mktemp("u"), World.alone(device="cpu"), every_minutes=None)
    states = {}
    while run.checkpoint.num_steps < 16:
        run.step()
        states[run.checkpoint.num_steps] = run.everything()
    run.checkpoint.close()
    return states


def test_a_lost_process_costs_the_steps_since_the_local_copy(tmp_path: Path, undisturbed, capsys):
    is_killed(training(tmp_path).run_to(7))
    assert list(checkpoints_in(LocalDirectory(tmp_path / "saved"))) == []
    assert generations(tmp_path) == [4, 6], "the one before is removed as the next save begins"
    assert "a lost process costs at most 2 + " in capsys.readouterr().err
    run = training(tmp_path, seed=9)
    assert run.checkpoint.resume() == 6
    assert (
        "evenstep: resumed from the local copies of step 6 (durable: none); 1 step repeated\n"
        in capsys.readouterr().err
    )
    assert_same(run.everything(), undisturbed[6])
    is_killed(run.run_to(13))
    assert "costs at most" in capsys.readouterr().err
    assert list(checkpoints_in(LocalDirectory(tmp_path / "saved"))) == [10]
    run = training(tmp_path, seed=9)
    assert run.checkpoint.resume() == 12
    assert "of step 12 (durable: 10)" in capsys.readouterr().err
    run.run_to(16)
    assert_same(run.everything(), undisturbed[16])
    run.checkpoint.close()
    assert list(checkpoints_in(LocalDirectory(tmp_path / "saved"))) == [10, 16]
    assert not list((tmp_path / "local").glob("*/*")), "a run that has ended leaves no copies"


def test_an_upload_that_is_slower_than_four_generations_holds_none_of_them_up(tmp_path: Path):
    goes_on = threading.Event()

    def hook(operation: str, path: str) -> None:
        if "step-0000007" in path and operation == "create":
            goes_on.wait(60)

    run = training(tmp_path, saved=LocalDirectory(tmp_path / "saved", hook=hook), every_steps=7, local_every_steps=1)
    run.run_to(12)
    run.checkpoint._tier.finish()
    assert generations(tmp_path) == [12]
    assert list(checkpoints_in(LocalDirectory(tmp_path / "saved"))) == []
    goes_on.set()
    is_killed(run)
    assert list(checkpoints_in(LocalDirectory(tmp_path / "saved"))) == [7]
    run = training(tmp_path)
    assert run.checkpoint.resume() == 12
    run.checkpoint.close()


@pytest.mark.parametrize("has_local", [True, False])
def test_what_a_later_attempt_did_not_go_on_from_is_void(tmp_path: Path, has_local: bool):
    """The disk was away while the run was resumed from an older step, or that attempt kept no local copies."""
    is_killed(training(tmp_path, every_steps=4).run_to(7))
    (tmp_path / "local").rename(tmp_path / "away")
    without = Training(tmp_path / "saved", World.alone(device="cpu"), every_minutes=None)
    run = training(tmp_path, every_steps=4) if has_local else without
    assert run.checkpoint.resume() == 4
    run.step()
    is_killed(run)
    shutil.rmtree(tmp_path / "local", ignore_errors=True)
    (tmp_path / "away").rename(tmp_path / "local")
    assert generations(tmp_path) == [4, 6]
    run = training(tmp_path, every_steps=4)
    assert run.checkpoint.resume() == 4
    run.checkpoint.close()
    assert read_top(LocalDirectory(tmp_path / "saved")).record["resumes"] == [[1, 0], [2, 4]]


def test_a_job_that_was_taken_for_dead_leaves_its_successors_copies_alone(tmp_path: Path):
    dead = training(tmp_path).run_to(5)
    dead.checkpoint._tier.finish()
    dead.checkpoint._directory._lock.release()
    run = training(tmp_path)
    assert run.checkpoint.resume() == 4
    is_killed(run.run_to(7))
    dead.checkpoint._directory.is_succeeded = False  # it stands for another process
    dead.run_to(9)
    is_killed(dead)
    assert generations(tmp_path) == [6, 6, 8], "of which one is the successor's"
    dead.checkpoint._tier.remove()
    assert generations(tmp_path) == [6]
    run = training(tmp_path)
    assert run.checkpoint.resume() == 6
    run.checkpoint.close()


def test_a_full_disk_drops_the_copy_before_and_training_goes_on(tmp_path: Path, undisturbed, capsys):
    disk = Disk(error=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    run = training(tmp_path, LocalDirectory(tmp_path / "local", hook=disk)).run_to(3)
    run.checkpoint._tier._saver.writer.thread.join()
    capsys.readouterr()
    for step, told in ((4, True), (6, False)):
        disk.first_failing = len(disk.effects) + 6
        run.run_to(step)
        run.checkpoint._tier._saver.writer.thread.join()
        disk.first_failing = None
        run.run_to(step + 1)
        run.checkpoint._tier.finish()
        found = capsys.readouterr().err
        assert ("the local copies of step 4 could not be written: rank 0: OSError: [Errno 28]" in found) == told
        assert ("is full on rank 0: the copies of step 2 are removed" in found) == told
        assert generations(tmp_path) == []
    run.run_to(9)
    is_killed(run)
    assert capsys.readouterr().err == ""
    run = training(tmp_path)
    assert run.checkpoint.resume() == 8
    assert_same(run.everything(), undisturbed[8])
    run.checkpoint.close()


@pytest.mark.extended
def test_a_kill_before_any_effect_leaves_a_good_copy(tmp_path: Path, undisturbed, fresh_seed: int):
    """Two local saves and the removal of what they replace, after one that is whole: every third effect, by chance."""
    root = tmp_path / "run"  # always the same: it is what tells a run from others
    is_killed(training(root).run_to(3))
    shutil.copytree(root, tmp_path / "base")

    def go_on(disk: Disk) -> None:
        run = training(root, LocalDirectory(root / "local", hook=disk))
        try:
            run.checkpoint.resume()
            run.run_to(7)
        except Dead:
            pass
        finally:
            is_killed(run)

    whole, reached = Disk(), set()
    go_on(whole)
    for number in [*range(fresh_seed % 3, len(whole.effects), 3), len(whole.effects)]:  # the last one kills nothing
        shutil.rmtree(root)
        shutil.copytree(tmp_path / "base", root)
        go_on(Disk(number))
        run = training(root, seed=3)
        step = run.checkpoint.resume()
        assert step in (2, 4, 6), f"killed before {whole.effects[number : number + 1]}"
        assert_same(run.everything(), undisturbed[step])
        run.step()
        assert set(generations(root)) <= {step, step + 1}, "parts of a save are left"
        is_killed(run)
        reached.add(step)
    assert reached == {2, 4, 6}


def test_what_runs_of_long_ago_have_left_is_removed(tmp_path: Path, capsys):
    is_killed(training(tmp_path / "old", tmp_path / "local").run_to(3))
    is_killed(training(tmp_path / "new", tmp_path / "local").run_to(3))
    old, new = sorted((tmp_path / "local").glob("*/*"), key=lambda path: path.stat().st_mtime)
    os.utime(old, (0, old.stat().st_mtime - tiers._UNUSED_AFTER_S - 1))
    training(tmp_path / "third", tmp_path / "local").run_to(3).checkpoint.close()
    assert not old.exists()
    assert new.exists()
    assert "local copies of a run that has not saved for 7 days" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"local": "x"}, "pass both local .* and local_every_steps"),
        ({"local": "s3://bucket/x", "local_every_steps": 2}, "local='s3://bucket/x'; the path of a directory"),
        ({"local": nn.Linear(1, 1)}, "An object to save takes another name"),
        ({"local": "", "local_every_steps": 2}, "local=''; the path of a directory"),
        ({"local": "x", "local_every_steps": 0}, "local_every_steps=0; a whole number, at least 1"),
        ({"local": "x", "local_every_steps": 9, "every_steps": 8}, "has no effect with every_steps=8"),
    ],
)
def test_arguments_that_make_no_sense(tmp_path: Path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=message):
        Checkpointer(tmp_path, world=World.alone(), model=nn.Linear(1, 1), **options)


@pytest.mark.parametrize("what", ["a file", "a link", "open to all"])
def test_a_directory_that_is_not_this_users_is_refused(tmp_path: Path, what: str):
    local = tmp_path / "local"
    user = local / str(os.geteuid())
    if what == "a file":
        local.write_text("x")
    else:
        (local / "target").mkdir(parents=True)
        user.symlink_to(local / "target")
    if what == "open to all":
        user.unlink()
        user.mkdir()
        user.chmod(0o777)
    with pytest.raises(
        ConfigurationError, match=r"local='.*(isn't a directory|can't be used|must be a directory of user)"
    ):
        training(tmp_path, local)
    assert not (tmp_path / "saved").exists()


def test_a_run_that_goes_back_leaves_no_later_copies(tmp_path: Path):
    """It may be killed before its next local save: the next start must not go on from the steps that it has left."""
    run = training(tmp_path, every_steps=4).run_to(7)
    run.checkpoint._tier.finish()
    assert 6 in generations(tmp_path)
    assert run.checkpoint.load(4) == 4
    is_killed(run)
    run = training(tmp_path, every_steps=4)
    assert run.checkpoint.resume() == 4
    run.checkpoint.close()


def test_a_run_that_does_not_resume_wants_a_decision(tmp_path: Path):
    is_killed(training(tmp_path).run_to(5))
    run = training(tmp_path)
    with pytest.raises(UsageError, match=r"has checkpoints up to step 4, but this run is at step 0.*resume\(\)"):
        run.step()
    run.checkpoint.discard(after=2)
    assert generations(tmp_path) == [2]
    run.checkpoint.close()
