"""`Checkpointer` in one process: exact resume, faults of the disk at every effect, damage, misfits, policies."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import random
import re
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed import HashStore

import evenstep
from evenstep import World
from evenstep.checkpoint.checkpointer import Checkpointer
from evenstep.checkpoint.directory import checkpoints_in, read_manifest
from evenstep.checkpoint.load.reader import check_checkpoint
from evenstep.checkpoint.lock import read_top
from evenstep.checkpoint.save.writer import Job, Writer
from evenstep.checkpoint.store import LocalDirectory
from evenstep.errors import CheckpointError, ConfigurationError, UsageError
from tests.checkpoint_runs import Training, assert_same, files_of, flip, flips


def training(directory, **options) -> Training:
    return Training(directory, World.alone(device="cpu"), **{"every_minutes": None, **options})


def is_released(directory: Path) -> bool:
    return bool(read_top(LocalDirectory(directory)).record["released"])


def steps(directory) -> list[int]:
    return list(checkpoints_in(LocalDirectory(directory)))


# ---------------------------------------------------------------------- exact resume


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(tmp_path: Path, asynchronous: bool):
    straight = training(tmp_path / "a", every_steps=4, asynchronous=asynchronous)
    assert straight.checkpoint.resume() == 0
    straight.run_to(11)
    expected = straight.everything()
    straight.checkpoint.close()
    found = load_file(tmp_path / "a" / "step-0000011-00001-3" / "model.safetensors")
    assert all(torch.equal(value, found[key]) for key, value in straight.model.state_dict().items())
    first = training(tmp_path / "b", every_steps=2, asynchronous=asynchronous).run_to(7)
    first.checkpoint.close()  # saves step 7
    second = training(tmp_path / "b", seed=99)
    assert second.checkpoint.resume() == 7
    second.run_to(11)
    assert_same(second.everything(), expected)
    assert first.losses + second.losses == straight.losses
    assert first.seen + second.seen == straight.seen
    second.checkpoint.close()


def test_in_the_middle_of_an_accumulation_nothing_is_counted_or_saved(tmp_path: Path):
    run = training(tmp_path, every_steps=1).run_to(1)
    with run.wrapped.accumulate():
        run.wrapped.backward(run.wrapped(torch.ones(2, 4)).mean(), weight=2)
        run.checkpoint.step()
        with pytest.raises(UsageError, match="in the middle of an accumulation"):
            run.checkpoint.save()
    run.checkpoint.step()
    assert run.checkpoint.num_steps == 1
    run.checkpoint.close()
    assert steps(tmp_path) == [1]


def test_samples_of_a_step_that_a_scaler_left_out_are_consumed_all_the_same(tmp_path: Path):
    world = World.alone(device="cpu")
    model = evenstep.DistributedDataParallel(nn.Linear(1, 1), world=world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    loader = evenstep.DataLoader(range(12), 4, world=world)
    checkpoint = Checkpointer(tmp_path, world=world, model=model, loader=loader)
    for step, x in enumerate(loader):
        factor = math.inf if step == 1 else 1.0
        model.backward(model(x.float().unsqueeze(1)).mean() * factor, weight=len(x), scaler=scaler)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        checkpoint.step()
        assert loader.position == 4 * (step + 1)
    checkpoint.close()


def test_compiled_and_wrapped_models_are_saved_under_their_own_names(tmp_path: Path):
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)
    compiled = torch.compile(model, backend="eager")
    checkpoint = Checkpointer(tmp_path, world=World.alone(), model=nn.DataParallel(compiled))
    checkpoint.save()
    checkpoint.close()
    Checkpointer(tmp_path, world=World.alone(), model=other).load(0)
    assert torch.equal(model.weight, other.weight)


# ---------------------------------------------------------------------- a kill at every effect


class Dead(BaseException):
    """Stands for a kill: nothing after it has any effect on the disk."""


class Disk:
    """Counts effects; from one on, every one of them fails."""

    def __init__(self, first_failing: int | None = None, error: BaseException | None = None) -> None:
        self.effects: list[tuple[str, str]] = []
        self.first_failing = first_failing
        self.error = error or Dead("killed")

    def __call__(self, operation: str, path: str) -> None:
        self.effects.append((operation, path))
        if self.first_failing is not None and len(self.effects) > self.first_failing:
            raise self.error


def test_a_kill_at_any_write_sync_and_rename_leaves_a_good_checkpoint(tmp_path: Path, fresh_seed: int):
    """Two saves and the removal of what is too old: before every third of their effects, by chance."""
    reference = training(tmp_path / "whole", every_steps=2, keep=1)
    states = {}
    while reference.checkpoint.num_steps < 6:
        reference.step()
        states[reference.checkpoint.num_steps] = reference.everything()
    reference.checkpoint.close()
    base = tmp_path / "base"
    first = training(base, every_steps=2, keep=1).run_to(2)
    first.checkpoint.close()

    def go_on(directory: Path, disk: Disk) -> None:
        run = training(LocalDirectory(directory, hook=disk), every_steps=2, keep=1)
        try:
            run.checkpoint.resume()
            run.run_to(6)
            run.checkpoint.close()
        except (Dead, CheckpointError):
            pass
        finally:
            with contextlib.suppress(Dead):
                run.checkpoint._release()

    whole = Disk()
    shutil.copytree(base, tmp_path / "counted")
    go_on(tmp_path / "counted", whole)
    kinds = {operation for operation, _ in whole.effects}
    assert kinds == {"mkdir", "create", "write", "sync", "rename", "link", "unlink", "rmdir"}
    assert len(whole.effects) > 50
    reached = set()
    for number in range(fresh_seed % 3, len(whole.effects), 3):
        directory = tmp_path / f"killed-{number}"
        shutil.copytree(base, directory)
        go_on(directory, Disk(number))
        run = training(directory, every_steps=100, seed=3)
        step = run.checkpoint.resume()
        assert step in (2, 4, 6), f"killed before {whole.effects[number]}"
        assert_same(run.everything(), states[step])
        run.checkpoint._release()
        assert not list(directory.glob("*/.*")), "temporary files of parts"
        whole_ones = {directory / folder for folder in checkpoints_in(LocalDirectory(directory)).values()}
        assert {p for p in directory.iterdir() if p.is_dir()} == whole_ones, "parts of a save are left"
        assert [check_checkpoint(LocalDirectory(directory), each.name) for each in whole_ones] == [[]] * len(whole_ones)
        reached.add(step)
    assert reached == {2, 4, 6}


# ---------------------------------------------------------------------- errors of the disk


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_save_that_fails_is_an_error_or_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], goes_on: bool):
    disk = Disk(error=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    storage = LocalDirectory(tmp_path, hook=disk)
    run = training(storage, every_steps=2, on_save_error="continue" if goes_on else "raise").run_to(2)
    run.checkpoint.wait()
    disk.first_failing = len(disk.effects) + 5
    run.run_to(4)  # begins to save
    run.checkpoint._saver.writer.thread.join()
    disk.first_failing = None
    why = r"step 4 could not be saved .* No space left on device.*removed; the newest .*step-0000002"
    with contextlib.nullcontext() if goes_on else pytest.raises(CheckpointError, match=why):
        run.step()
    assert bool(re.search(f"{why}.*Training continues", capsys.readouterr().err)) == goes_on
    assert [p.name for p in tmp_path.glob("step-*")] == ["step-0000002-00001-1"], "the partial one is removed"
    run.run_to(6)  # a script that catches the error may go on
    run.checkpoint.close()
    assert steps(tmp_path) == [2, 6]


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_failing_save_prevents_no_later_save_or_stop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_stopped: bool
):
    """The save of step 4 fails only while a stop, or a save, in step 5 waits for it."""
    reached = threading.Event()

    def hook(operation: str, path: str) -> None:
        if operation == "rename" and path.startswith("step-0000004"):
            assert reached.wait(60)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run = training(LocalDirectory(tmp_path, hook=hook), every_steps=2, on_save_error="continue").run_to(2)
    run.checkpoint.wait()
    run.run_to(4)
    finish = run.checkpoint._saver.finish

    def finish_late() -> str | None:
        reached.set()
        return finish()

    run.checkpoint._saver.finish = finish_late
    if is_stopped:
        run.world.request_stop("a test")
        with pytest.raises(SystemExit) as caught:
            run.step()
        assert caught.value.code == 75
    else:
        run.step()
        run.checkpoint.save()
    assert steps(tmp_path) == [2, 5]
    assert "step 4 could not be saved" in capsys.readouterr().err
    run.checkpoint._end(None)


def test_a_rank_that_dies_is_not_waited_for_until_the_deadline(tmp_path: Path):
    """The loop of a rank that waits for a save doesn't see that another rank of the host has died."""
    writer = Writer(LocalDirectory(tmp_path), HashStore(), rank=0, world_size=2, timeout_s=600)
    writer.pids = {0: os.getpid(), 1: 1 << 30}  # larger than any process's
    writer.start(Job("folder", "run-1", [], {}, commit=lambda receipts: None))
    assert str(writer.finish()) == "rank 1 ended before its part was written"


def test_the_metric_of_a_failed_save_is_not_the_best(tmp_path: Path):
    disk = Disk(error=OSError(errno.EIO, os.strerror(errno.EIO)))
    directory = LocalDirectory(tmp_path, hook=disk)
    run = training(directory, every_minutes=None, best="loss", on_save_error="continue").run_to(1)
    run.checkpoint.step(loss=0.5)
    run.checkpoint.wait()
    disk.first_failing = 0
    run.checkpoint.step(loss=0.1)
    run.checkpoint.wait()
    disk.first_failing = None
    run.checkpoint.step(loss=0.3)
    run.checkpoint.wait()
    assert steps(tmp_path) == [2, 4], "0.3 is better than any checkpoint that is there"
    run.checkpoint.close()


# ---------------------------------------------------------------------- damage


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints, of steps 2 and 4."""
    directory = tmp_path_factory.mktemp("saved")
    run = training(directory, every_steps=2).run_to(4)
    run.checkpoint.close()
    return directory


def damaged_copy(saved: Path, target: Path) -> Path:
    shutil.copytree(saved, target)
    return target


class Away(LocalDirectory):
    """The files of step 4 can't be opened twice, by two kinds of errors."""

    num_refused = 0

    def open(self, path: str):
        if path.startswith("step-0000004-00001-2/") and self.num_refused < 2:
            self.num_refused += 1
            raise OSError(errno.ESTALE if self.num_refused == 1 else errno.ENOENT, "away")
        return super().open(path)


def test_what_can_be_read_after_a_moment_is_read(saved: Path, tmp_path: Path):
    """A file server that restarts."""
    run = training(Away(damaged_copy(saved, tmp_path / "x")))
    assert run.checkpoint.resume() == 4
    run.checkpoint.close()


def test_no_flipped_bit_is_loaded_and_no_file_that_was_cut_off(saved: Path, tmp_path: Path, fresh_seed: int):
    """Each is found and named by file, and by tensor where it lies in one."""
    generator = random.Random(fresh_seed)
    directory = damaged_copy(saved, tmp_path / "x")
    storage = LocalDirectory(directory)
    paths = files_of(directory, "step-0000004-00001-2")
    assert check_checkpoint(storage, "step-0000004-00001-2") == []
    for path, bit in flips(generator, paths, int(os.environ.get("EVENSTEP_TEST_FLIPS", "60"))):
        flip(path, bit)
        findings = check_checkpoint(storage, "step-0000004-00001-2")
        assert findings, f"bit {bit} of {path.name}"
        assert any(f"step-0000004-00001-2/{path.name}" in line for line in findings)
        header = int.from_bytes((saved / "step-0000004-00001-2" / path.name).read_bytes()[:8], "little") + 8
        if path.suffix == ".safetensors" and bit // 8 >= header:
            assert "tensor " in findings[0]
        flip(path, bit)
        content = path.read_bytes()
        path.write_bytes(content[: bit // 8])
        findings = check_checkpoint(storage, "step-0000004-00001-2")
        assert any(f"step-0000004-00001-2/{path.name}" in line for line in findings), "cut off"
        path.write_bytes(content)
    assert check_checkpoint(storage, "step-0000004-00001-2") == []


def test_load_of_one_step_does_not_fall_back_and_needs_no_lock(saved: Path, tmp_path: Path):
    directory = damaged_copy(saved, tmp_path / "x")
    run = training(directory)
    assert run.checkpoint.load(2) == 2
    assert [path.name for path in directory.glob("lock-*")] == ["lock-00001.json"], "that of the run that saved"
    with pytest.raises(CheckpointError, match="no checkpoint of step 3; there are: 2, 4"):
        run.checkpoint.load(3)
    flip(directory / "step-0000004-00001-2" / "model.safetensors", 8 * 900)
    with pytest.raises(CheckpointError, match=r"step-0000004-00001-2/model.safetensors"):
        run.checkpoint.load(4)
    assert steps(directory) == [2, 4]


# ---------------------------------------------------------------------- other objects


def test_another_model_is_all_differences_in_one_message_and_nothing_is_changed(saved: Path, tmp_path: Path):
    directory = damaged_copy(saved, tmp_path / "x")
    run = training(directory, width=5)
    run.model.double()
    run.model.register_buffer("extra", torch.zeros(2))
    before = {key: value.clone() for key, value in run.model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        run.checkpoint.resume()
    text = str(caught.value)
    for line in (
        "model: 0.weight was float32 [8, 4], and is float64 [5, 4] here",
        "model: 4.weight was float32 [2, 8], and is float64 [2, 5] here",
        "model: extra float32 [2] was not saved",
        "optimizer: state.0.momentum_buffer was [8, 4], and its parameter is [5, 4] here",
    ):
        assert line in text.replace("extra float64", "extra float32"), text
    assert all(torch.equal(value, before[key]) for key, value in run.model.state_dict().items())
    assert steps(directory) == [2, 4], "a good checkpoint that doesn't fit is not set aside"
    run.checkpoint._release()


def test_not_strict_loads_what_fits_and_says_what_did_not(saved: Path, tmp_path: Path, capsys):
    directory = damaged_copy(saved, tmp_path / "x")
    straight = training(directory)
    straight.checkpoint.load(4)
    world = World.alone()
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.3), nn.Linear(8, 3))
    other = Checkpointer(directory, world=world, model=model, extra=nn.Linear(1, 1))
    assert other.resume(strict=False) == 4
    assert torch.equal(model[0].weight, straight.model[0].weight)
    told = capsys.readouterr().err
    assert "not loaded: model: 4.weight was float32 [2, 8], and is float32 [3, 8] here" in told
    assert "not loaded: extra: was not saved" in told
    other._release()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "there is nothing to save"),
        ({"model": nn.Linear(1, 1), "x": object()}, "x= is a object without state_dict and load_state_dict"),
        ({"random": nn.Linear(1, 1)}, "random= is the name of the random streams"),
        ({"model": nn.Linear(1, 1), "on_save_error": "ignore"}, "on_save_error='ignore'"),
        ({"model": nn.Linear(1, 1), "keep": -1}, "keep=-1"),
        ({"modèle": nn.Linear(1, 1)}, "names an object; a name is a word of at most 100 letters of ASCII"),
        ({"m" * 101: nn.Linear(1, 1)}, "names an object"),
    ],
)
def test_arguments_that_make_no_sense(tmp_path: Path, arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        Checkpointer(tmp_path, world=World.alone(), **arguments)


# ---------------------------------------------------------------------- when, and what is kept


def test_what_is_kept_by_steps_and_by_metric(tmp_path: Path):
    world = World.alone()
    checkpoint = Checkpointer(
        tmp_path, world=world, model=nn.Linear(1, 1), every_steps=2, keep=2, keep_every=6, best="loss"
    )
    for step in range(1, 15):
        if step % 2:
            checkpoint.step(loss=abs(step - 5) + 0.5)
        else:
            checkpoint.step()
    checkpoint.wait()
    # 5 has the lowest loss, 6 and 12 are kept for good, 12 and 14 are the newest.
    assert steps(tmp_path) == [5, 6, 12, 14]
    checkpoint.close()
    again = Checkpointer(tmp_path, world=world, model=nn.Linear(1, 1), every_steps=100, best="loss")
    again.resume()
    again.step(loss=3.0)  # not better than that of before
    again.wait()
    assert steps(tmp_path) == [5, 6, 12, 14]
    again.step(loss=0.1)
    again.wait()
    assert 16 in steps(tmp_path)
    with pytest.raises(ConfigurationError, match="metric loss='low' isn't a number"):
        again.step(loss="low")
    again.close()


def test_a_metric_is_that_of_the_next_checkpoint_and_of_no_later_one(tmp_path: Path):
    def metrics() -> dict[int, dict[str, float]]:
        run.checkpoint.wait()
        storage = LocalDirectory(tmp_path)
        folders = checkpoints_in(storage)
        return {step: dict(read_manifest(storage, folder).metrics) for step, folder in folders.items()}

    run = training(tmp_path, every_steps=2, keep=10)
    for step in range(1, 7):
        run.checkpoint.step(**({"accuracy": 0.5} if step == 3 else {}), loss=step / 8)
    expected = {2: {"loss": 0.25}, 4: {"accuracy": 0.5, "loss": 0.5}, 6: {"loss": 0.75}}
    assert metrics() == expected
    run.checkpoint.save(accuracy=0.75)  # of the same step
    assert metrics() == {**expected, 6: {"accuracy": 0.75, "loss": 0.75}}
    run.checkpoint.close()
    run = training(tmp_path, every_steps=2, keep=10)
    run.checkpoint.resume()
    run.checkpoint.save()
    for _ in range(2):
        run.checkpoint.step()
    assert metrics() == {**expected, 6: {"accuracy": 0.75, "loss": 0.75}, 8: {}}
    run.checkpoint.close()


def test_a_run_that_is_not_at_the_newest_step_has_to_discard_the_later_checkpoints(tmp_path: Path):
    """Else the next start would load one of them, and what was trained since would be lost."""
    run = training(tmp_path, every_steps=2).run_to(6)
    run.checkpoint.load(4)  # while step 6 is being written
    for goes_on in (run.step, run.checkpoint.save):
        with pytest.raises(UsageError, match=r"up to step 6, but this run is at step 4.*discard\(after=4\)"):
            goes_on()
    run.checkpoint.discard(after=4)
    assert run.checkpoint.load(4) == 4
    run.run_to(5).checkpoint.close()
    assert steps(tmp_path) == [2, 4, 5]
    run = training(tmp_path, every_steps=1)
    with pytest.raises(UsageError, match=r"up to step 5, but this run is at step 0"):
        run.step()
    run.checkpoint.discard()
    run.run_to(4)
    run.checkpoint.discard(after=3)
    run.checkpoint.close()
    assert steps(tmp_path) == [2, 3, 4], "the last step, which was discarded, is saved again"


# ---------------------------------------------------------------------- stopping on request


@contextlib.contextmanager
def handled(which, handler):
    before = signal.signal(which, handler)
    yield
    signal.signal(which, before)


def test_a_handler_from_before_is_called_after_the_last_save_if_no_step_follows(tmp_path: Path):
    called: list[list[int]] = []
    with handled(signal.SIGUSR2, lambda *_: called.append(steps(tmp_path))):
        run = training(tmp_path).run_to(3)
        os.kill(os.getpid(), signal.SIGUSR2)
        run.checkpoint.close()
    assert called == [[3]]


@pytest.mark.parametrize("end", [SystemExit(0), SystemExit(), SystemExit(3), ZeroDivisionError()], ids=repr)
def test_an_orderly_exit_saves_and_another_one_only_finishes_what_is_pending(tmp_path: Path, end: BaseException):
    def leave():
        with evenstep.init(quiet=True, device="cpu") as world:
            run = Training(tmp_path / "world", world, every_minutes=None, every_steps=3).run_to(3)
            with Training(tmp_path / "itself", World.alone(device="cpu"), every_minutes=None).run_to(2).checkpoint:
                run.step()
                raise end

    with pytest.raises(type(end)):
        leave()
    evenstep.init(quiet=True, device="cpu").close()
    for thread in threading.enumerate():
        if thread.name.startswith("evenstep save"):
            thread.join()
    saved = steps(tmp_path / "world"), steps(tmp_path / "itself")
    assert saved == (([3, 4], [2]) if isinstance(end, SystemExit) and not end.code else ([3], []))
    assert is_released(tmp_path / "world"), "released behind what was pending"


def test_a_group_may_share_a_run(tmp_path: Path):
    before = os.umask(0o007)
    try:
        for name, private in (("shared", False), ("own", True)):
            training(tmp_path / name, private=private).run_to(1).checkpoint.close()
    finally:
        os.umask(before)
    for name, file_mode, folder_mode in (("shared", 0o660, 0o770), ("own", 0o600, 0o700)):
        folder = tmp_path / name / "step-0000001-00001-1"
        assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {file_mode}
        assert {each.stat().st_mode & 0o777 for each in (folder, folder.parent)} == {folder_mode}
    with pytest.raises(
        ConfigurationError, match=r"private=False is for the path .*LocalDirectory\(path, private=False"
    ):
        training(LocalDirectory(tmp_path), private=False)


def stopped_in_its_fourth_round(directory: Path, made: list[Checkpointer]) -> None:
    """The second of four notices the stop: the third's optimizer has stepped by then, the fourth's hasn't."""
    with World.alone(device="cpu") as world:
        optimizers = []
        for name in "abcd":
            model = nn.Linear(1, 1)
            optimizers.append(torch.optim.SGD(model.parameters(), lr=0.1))
            objects = {"model": model, "optimizer": optimizers[-1]}
            made.append(Checkpointer(directory / name, **objects, every_minutes=None, world=world))
        for step in range(6):
            for optimizer in optimizers[:3]:
                optimizer.step()
            for checkpoint in made:
                if step == 3 and checkpoint is made[1]:
                    os.kill(os.getpid(), signal.SIGUSR1)
                if checkpoint is made[3]:
                    optimizers[3].step()
                checkpoint.step()


def test_all_checkpointers_of_a_run_are_saved_when_it_is_stopped(tmp_path: Path, capsys):
    """Whichever notices the stop first; the script's own handler is called once, and is back at the end."""
    called: list[list[int]] = []
    made: list[Checkpointer] = []

    def own(number: int, frame: object) -> None:
        called.append(steps(tmp_path / "b"))
        raise SystemExit(76)  # as submitit does

    before = signal.signal(signal.SIGUSR1, own)
    try:
        with pytest.raises(SystemExit) as caught:
            stopped_in_its_fourth_round(tmp_path, made)
        assert caught.value.code == 76
        assert [steps(tmp_path / name) for name in "abcd"] == [[4], [4], [4], [3]]
        assert called == [[4]], "once, and after the save"
        told = capsys.readouterr().err
        assert "has replaced" not in told
        assert f"saved {tmp_path / 'a'}, too" in told
        for checkpoint in (made[1], made[0], *made[2:]):
            assert signal.getsignal(signal.SIGUSR1) != own
            checkpoint._signals.close()
        assert signal.getsignal(signal.SIGUSR1) == own
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_checkpointer_that_was_made_anew_replaces_the_first_one(tmp_path: Path, capsys, is_stopped: bool):
    """As by a notebook's cell that is run twice: at the end only the second one saves."""
    with pytest.raises(SystemExit) if is_stopped else contextlib.nullcontext(), World.alone(device="cpu") as world:
        first = Training(tmp_path, world, every_minutes=None)
        first.checkpoint.resume()
        first.run_to(3)
        second = Training(tmp_path, world, every_minutes=None)
        assert second.checkpoint.resume() == 0
        second.run_to(2)
        with pytest.raises(UsageError, match=r"a later Checkpointer of this process saves to .*Use the later one"):
            first.step()
        if is_stopped:
            world.request_stop("a test")
            second.step()
    told = capsys.readouterr().err
    assert steps(tmp_path) == [2 + is_stopped]
    assert "the first one saves nothing more there" in told
    assert "could not be saved" not in told
    assert ", too" not in told
