"""Checkpoints of several ranks: the same bits on as many, the same samples on any number, one outcome for all."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import time
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import evenstep
from evenstep.checkpoint import checkpointer
from evenstep.checkpoint.checkpointer import Checkpointer
from evenstep.checkpoint.directory import checkpoints_in
from evenstep.checkpoint.store import LocalDirectory
from evenstep.errors import CheckpointError, UsageError
from tests.checkpoint_runs import Training, assert_same, world_for_this_test


def train(directory: Path, upto: int, resumes: bool, options: dict[str, Any]):
    """Everything that a rank has at the end, its losses and samples."""
    world = world_for_this_test()
    run = Training(
        directory, world, **{"every_minutes": None, "seed": 1 if not resumes else 50 + world.rank, **options}
    )
    if resumes:
        run.checkpoint.resume()
    run.run_to(upto)
    state = run.everything()
    run.checkpoint.close()
    return state, run.losses, run.seen


@pytest.mark.parametrize("nproc", [2, 3])
def test_on_as_many_ranks_every_rank_goes_on_bit_for_bit(ranks, nproc, tmp_path):
    """With dropout, random augmentation, batch norm, momentum, a scheduler and a scaler."""
    straight = ranks.run(train, nproc, tmp_path / "a", 9, False, {"every_steps": 2})
    first = ranks.run(train, nproc, tmp_path / "b", 5, False, {"every_steps": 2})
    second = ranks.run(train, nproc, tmp_path / "b", 9, True, {})
    for rank in range(nproc):
        assert_same(second[rank][0], straight[rank][0])
        assert first[rank][1] + second[rank][1] == straight[rank][1]
    assert len({tuple(losses) for _, losses, _ in straight}) == nproc, "the ranks had streams of their own"


def fork_and_save(directory: Path) -> tuple[list[str], list[str], dict[int, str]]:
    """(What a forked child is told, the checkpoints that it leaves behind, those at the end)."""
    world = evenstep.init(quiet=True)
    run = Training(directory, world, every_minutes=None)
    run.run_to(2)
    run.checkpoint.save()
    run.run_to(3)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = []
        try:
            for call in (run.checkpoint.save, run.checkpoint.step, run.checkpoint.wait, lambda: world.exchange(0)):
                try:
                    call()
                except UsageError as error:
                    said.append(str(error))
            with run.checkpoint:
                pass
        finally:
            os.write(writer, "\n".join(said).encode())
            os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    said = os.read(reader, 1000).decode().split("\n")
    os.close(reader)
    between = list(checkpoints_in(LocalDirectory(directory)).values())
    run.checkpoint.close()
    return said, between, checkpoints_in(LocalDirectory(directory))


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_forked_child_saves_nothing_and_waits_for_nobody(ranks, nproc, tmp_path):
    """It has the lock of its parent, and would write to the same folders."""
    for rank, (said, between, at_the_end) in enumerate(ranks.run(fork_and_save, nproc, tmp_path)):
        refused = f"this process was forked from rank {rank}; only ranks can call collectives."
        assert said == [refused] * (3 if nproc == 1 else 4)  # a world of one exchanges nothing
        assert len(between) == 1
        assert list(at_the_end) == [2, 3]


def test_2_3_1_4_ranks_in_turn_see_the_samples_of_one_undisturbed_run(ranks, tmp_path):
    options = {"plain": True}
    (expected, _, expected_seen), *_ = ranks.run(train, 1, tmp_path / "one", 20, False, options)
    streams: list[list[int]] = []
    for nproc, upto in ((2, 5), (3, 9), (1, 14), (4, 20)):
        results = ranks.run(train, nproc, tmp_path / "turns", upto, upto > 5, options)
        streams += [sorted(itertools.chain(*step)) for step in zip(*(seen for _, _, seen in results), strict=True)]
    assert streams == [sorted(step) for step in expected_seen]
    for name, value in results[0][0].items():
        if isinstance(value, torch.Tensor) and name != "next torch":
            assert torch.allclose(value, expected[name], rtol=1e-9, atol=1e-9), name
    assert results[0][0]["position"] == expected["position"]


# ---------------------------------------------------------------------- one outcome for all


def fails_on(directory: Path, culprit: int, operation: str, where: str):
    """A fault of the disk on one rank alone."""
    world = world_for_this_test()
    armed = False

    def fault(done: str, path: str) -> None:
        if armed and world.rank == culprit and done == operation and where in path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run = Training(LocalDirectory(directory, hook=fault), world, every_steps=2, every_minutes=None).run_to(2)
    run.checkpoint.wait()
    armed = True
    run.run_to(4)
    began = time.monotonic()
    message = ""
    try:
        while time.monotonic() - began < 20:
            run.step()
            time.sleep(0.02)
            if run.checkpoint.num_steps % 2 == 1:
                run.checkpoint.wait()
    except CheckpointError as error:
        message = str(error)
    took_s = time.monotonic() - began
    armed = False
    run.checkpoint.close()
    return message, run.checkpoint.num_steps, took_s


@pytest.mark.parametrize(
    ("culprit", "operation", "where"),
    [(0, "write", "manifest.json"), (0, "rename", "step-"), (1, "write", ".safetensors")],
)
def test_an_error_on_one_rank_is_raised_on_all_at_the_same_step(ranks, tmp_path, culprit, operation, where):
    results = ranks.run(fails_on, 2, tmp_path, culprit, operation, where)
    messages, num_steps, took = zip(*results, strict=True)
    assert len(set(messages)) == 1
    assert f"rank {culprit}: OSError: [Errno 28] No space left on device" in messages[0]
    assert "the newest checkpoint is step-0000002" in messages[0]
    assert len(set(num_steps)) == 1
    assert max(took) < 2.0
    assert set(checkpoints_in(LocalDirectory(tmp_path))) == {2, num_steps[0]}


class Apart(LocalDirectory):
    """A directory of the same name on each node's own disk; when it is opened a shared one, if `shares`."""

    def __init__(self, root: Path, rank: int, shares: bool) -> None:
        super().__init__(root)
        self.rank, self.shares = rank, shares
        self.where = "runs/digits"

    def _path(self, path: str) -> Path:
        is_shared = self.shares and not path.startswith("step-")
        return self.root / f"node{0 if is_shared else self.rank}" / path


def disks_of_their_own(directory: Path, shares: bool):
    world = world_for_this_test()
    model = torch.nn.ModuleList(torch.nn.Linear(1000, 1000, bias=False) for _ in range(6))
    checkpoint = Checkpointer(Apart(directory, world.rank, shares), model=model, every_minutes=None)
    with mock.patch("evenstep.checkpoint.directory._SEEN_WITHIN_S", 0.5), pytest.raises(CheckpointError) as caught:
        checkpoint.save()
    checkpoint._is_closed = True
    checkpoint._release()
    return str(caught.value)


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        (False, r"runs/digits is not a directory that all ranks share.*rank 1 on .* doesn't see it"),
        (True, r"model.*safetensors was written with .* bytes, but can't be opened by rank 0"),
    ],
)
def test_a_directory_that_is_not_shared_is_refused(ranks, tmp_path, shares, message):
    """When it is opened; or, if it isn't shared any more, before there is a manifest."""
    LocalDirectory(tmp_path / "node1").put("lock-00001.json", [b"{}"])  # of an earlier job
    first, second = ranks.run(disks_of_their_own, 2, tmp_path, shares)
    assert first == second
    assert re.search(message, first), first
    assert list(checkpoints_in(LocalDirectory(tmp_path / "node0"))) == []


def problem_on_one_rank(directory: Path, code: int):
    """Rank 1 doesn't find what rank 0 does."""
    world = world_for_this_test()

    class Local(LocalDirectory):
        def open(self, path):
            if world.rank == 1 and path == "step-0000004-00001-2/model.safetensors":
                raise OSError(code, os.strerror(code))
            return super().open(path)

    run = Training(Local(directory), world, every_minutes=None)
    before = {key: value.clone() for key, value in run.model.state_dict().items()}
    try:
        return run.checkpoint.resume()
    except CheckpointError:
        assert_same(run.model.state_dict(), before)
        raise
    finally:
        run.checkpoint._release()


def test_damage_seen_by_one_rank_falls_back_on_all(ranks, tmp_path):
    """There is no regular file any more, or it is shorter than it was."""
    ranks.run(train, 2, tmp_path, 4, False, {"every_steps": 2})
    assert ranks.run(problem_on_one_rank, 2, tmp_path, errno.EINVAL) == [2, 2]


@pytest.mark.extended(beyond=1)
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOENT])
def test_what_one_rank_alone_cannot_read_is_no_damage(ranks, tmp_path, code):
    """An I/O error, or a directory that isn't shared, on one node. No rank changes anything before all have read it."""
    ranks.run(train, 2, tmp_path, 4, False, {"every_steps": 2})
    with pytest.raises(CheckpointError, match=r"model.safetensors.*\(on rank 1\).*left as it is"):
        ranks.run(problem_on_one_rank, 2, tmp_path, code)
    assert list(checkpoints_in(LocalDirectory(tmp_path))) == [2, 4]


def differ(directory: Path):
    world = world_for_this_test()
    checkpoint = Checkpointer(directory, model=torch.nn.Linear(3, 2 + world.rank), every_minutes=None)
    with pytest.raises(CheckpointError, match="the objects of rank 1 have other tensors than those of rank 0"):
        checkpoint.save()
    checkpoint.close()


def test_ranks_that_differ_are_an_error_on_all(ranks, tmp_path):
    ranks.run(differ, 2, tmp_path)
    assert list(checkpoints_in(LocalDirectory(tmp_path))) == []


def stops(directory: Path, slow: bool):
    world = world_for_this_test()
    run = Training(directory, world, every_minutes=None)
    try:
        for step in range(20):
            if slow:
                time.sleep(0.15)
            if step == 5 and world.rank == 1:
                world.request_stop("a person")
            run.step()
    except SystemExit as end:
        stopped_at = run.checkpoint.num_steps
        run.checkpoint._release()
        return end.code, stopped_at
    return None


@pytest.mark.parametrize("slow", [False, True])
def test_a_stop_asked_of_one_rank_is_agreed_upon_by_all(ranks, tmp_path, slow):
    """Within two steps; where steps are slow at the end of the one in which it was asked."""
    results = ranks.run(stops, 3, tmp_path, slow)
    assert len(set(results)) == 1
    code, step = results[0]
    assert code == 75
    assert step == 6 if slow else 6 <= step <= 7
    assert list(checkpoints_in(LocalDirectory(tmp_path))) == [step]


def best_and_clock(directory: Path):
    """Rank 0's clock and rank 0's metric decide, whatever the others have."""
    world = world_for_this_test()
    stopped_clock = types.SimpleNamespace(monotonic=lambda: 0.0)
    with mock.patch.object(checkpointer, "time", time if world.rank == 0 else stopped_clock):
        checkpoint = Checkpointer(
            directory, model=torch.nn.Linear(1, 1), every_minutes=0.04 / 60, best="loss", keep=100
        )
        for step in range(30):
            time.sleep(0.01)
            checkpoint.step(**({"loss": 1.0 / (step + 1) if world.rank == 0 else 5.0} if step % 10 == 9 else {}))
        checkpoint.close()


def test_one_rank_decides_when(ranks, tmp_path):
    ranks.run(best_and_clock, 2, tmp_path)
    found = list(checkpoints_in(LocalDirectory(tmp_path)))
    assert {10, 20, 30} <= set(found)
    assert len(found) >= 4


def goes_back_with_metrics(directory: Path):
    checkpoint = Checkpointer(
        directory, model=torch.nn.Linear(1, 1), every_minutes=None, best="loss", world=world_for_this_test()
    )
    for loss in (0.5, 0.3, 0.1):
        checkpoint.step(loss=loss)
    checkpoint.discard(after=2)
    checkpoint.load(2)
    for loss in (0.4, 0.2, 0.35):
        checkpoint.step(loss=loss)
    checkpoint.wait()
    checkpoint.close()


def test_ranks_agree_on_the_best_metric_after_later_checkpoints_were_discarded(ranks, tmp_path):
    ranks.run(goes_back_with_metrics, 2, tmp_path)
    assert list(checkpoints_in(LocalDirectory(tmp_path))) == [2, 4, 5]


def saves_within_a_join(directory: Path) -> str:
    world = evenstep.init(quiet=True)
    model = evenstep.DistributedDataParallel(torch.nn.Linear(2, 1))
    checkpoint = Checkpointer(directory, model=model, every_minutes=None)
    said = ""
    with contextlib.suppress(UsageError), model.join():
        for _ in range(3 + world.rank):
            model.backward(model(torch.ones(4, 2)).mean())
            try:
                checkpoint.step()
            except UsageError as error:
                said = str(error)
                raise
    checkpoint.save()
    checkpoint.close()
    return said


def test_a_step_within_a_join_is_refused_on_all_ranks(ranks, tmp_path):
    """The ranks that are still in their loops would wait for one that has left until the deadline of the calls."""
    for said in ranks.run(saves_within_a_join, 2, tmp_path):
        assert said.startswith("checkpoint inside model.join(): ")
        assert "checkpoint.save() after the block" in said
