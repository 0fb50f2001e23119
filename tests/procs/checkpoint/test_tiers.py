"""Two tiers on several ranks and nodes: what a local copy holds, what a resume takes, and one outcome for all ranks."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import evenstep
from evenstep.checkpoint.checkpointer import Checkpointer
from evenstep.checkpoint.directory import checkpoints_in, read_manifest
from evenstep.checkpoint.lock import place_of
from evenstep.checkpoint.store import LocalDirectory
from evenstep.checkpoint.tier import LocalTier
from evenstep.errors import ConfigurationError, MismatchError
from tests.checkpoint_runs import PatientRanks, Training, assert_same, world_for_this_test
from tests.mesh_runs import Model, divided, mesh_of, whole_of


@pytest.fixture
def ranks(ranks):
    return PatientRanks(ranks)


@contextlib.contextmanager
def on_nodes(ranks_each: int) -> Iterator[evenstep.World]:
    """The world, as if every so many ranks were on a node of their own."""
    world = world_for_this_test()
    kept = {name: getattr(world, name) for name in ("node_rank", "num_nodes", "local_rank", "local_world_size")}
    world.node_rank, world.local_rank = divmod(world.rank, ranks_each)
    world.num_nodes, world.local_world_size = world.world_size // ranks_each, ranks_each
    try:
        yield world
    finally:
        vars(world).update(kept)


def generations(root: Path, node: int) -> dict[int, Path]:
    """Those of a node that are whole, by step."""
    folders = (root / f"node{node}").glob("*/*/step-*/manifest.json")
    return {place_of(path.parent.name).step: path.parent for path in folders}


def run_of(
    root: Path, world: evenstep.World, *, resumes: bool, hook: Any = None, durable_hook: Any = None, **options: Any
) -> Training:
    local = root / f"node{world.node_rank}"
    return Training(
        root / "saved" if durable_hook is None else LocalDirectory(root / "saved", hook=durable_hook),
        world,
        every_minutes=None,
        seed=50 + world.rank if resumes else 1,
        local=local if hook is None else LocalDirectory(local, hook=hook),
        **{"every_steps": 10, "local_every_steps": 2, **options},
    )


def train(root: Path, upto: int, resumes: bool, ranks_each: int):
    """What a rank resumed from, has at the end, and has printed; it ends as a killed one does, with step `upto`."""
    told = io.StringIO()
    with on_nodes(ranks_each) as world, contextlib.redirect_stderr(told):
        run = run_of(root, world, resumes=resumes)
        began = run.checkpoint.resume()
        run.run_to(upto)
        state = run.everything()
        tier = run.checkpoint._tier
        assert tier is not None
        tier.finish()
        run.checkpoint.wait()
        run.checkpoint._release()
    return began, state, told.getvalue()


@pytest.mark.parametrize("ranks_each", [2, 1])
def test_every_rank_goes_on_bit_for_bit_from_the_local_copies(ranks, ranks_each, tmp_path):
    straight = ranks.run(train, 2, tmp_path / "a", 17, False, ranks_each)
    ranks.run(train, 2, tmp_path / "b", 15, False, ranks_each)
    second = ranks.run(train, 2, tmp_path / "b", 17, True, ranks_each)
    for rank in range(2):
        assert second[rank][0] == 14
        assert_same(second[rank][1], straight[rank][1])
    assert "resumed from the local copies of step 14 (durable: 10)" in second[0][2]
    assert second[1][2] == ""
    assert [step for node in range(2 // ranks_each) for step in generations(tmp_path / "b", node)] == [16] * (
        2 // ranks_each
    )


def test_a_node_without_its_disk_takes_what_its_peer_holds(ranks, tmp_path):
    straight = ranks.run(train, 2, tmp_path / "a", 17, False, 1)
    ranks.run(train, 2, tmp_path / "b", 15, False, 1)
    shutil.rmtree(tmp_path / "b/node0")
    second = ranks.run(train, 2, tmp_path / "b", 17, True, 1)
    for rank in range(2):
        assert second[rank][0] == 14
        assert_same(second[rank][1], straight[rank][1])


def train_mesh(root: Path, resumes: bool):
    """Two steps of HSDP on two nodes of two ranks, of which each has the whole model."""
    with on_nodes(2) as world:
        torch.manual_seed(world.world_size + resumes)
        model = divided(Model().double(), mesh_of("replicate 2 x shard 2"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        checkpoint = Checkpointer(
            root / "saved",
            world=world,
            every_minutes=None,
            local=root / f"node{world.node_rank}",
            local_every_steps=1,
            model=model,
            optimizer=optimizer,
        )
        began = checkpoint.resume()
        for step in range(began, 2):
            model(torch.arange(12).view(3, 4).add(step) % 13).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpoint.step()
        checkpoint._tier.finish()
        checkpoint._release()
        return began, whole_of(model.state_dict())


def test_replicas_of_a_divided_model_hold_all_of_it_on_each_node_once(ranks, tmp_path):
    first = ranks.run(train_mesh, 4, tmp_path, False)
    manifests = [read_manifest(LocalDirectory(path.parent), path.name) for path in (
        generations(tmp_path, 0)[2], generations(tmp_path, 1)[2],
    )]  # fmt: skip
    assert manifests[0] == manifests[1]
    for node in range(2):
        files = {name for name, file in manifests[0].files.items() if file.node in (None, node)}
        assert files == {path.name for path in generations(tmp_path, node)[2].iterdir()} - {"manifest.json"}
        assert manifests[0].choose(files) is not None
    for item in manifests[0].objects.values():
        for tensor in item.tensors.values():
            where = [manifests[0].files[part.file].node for part in tensor.parts]
            assert where in ([0] * len(where), [None] * len(where))
            assert len(tensor.copies) == (0 if None in where else len(where))
    shutil.rmtree(tmp_path / "node0")
    second = ranks.run(train_mesh, 4, tmp_path, True)
    assert [began for began, _ in second] == [2] * 4
    for rank in range(4):
        assert all(torch.equal(value, first[rank][1][name]) for name, value in second[rank][1].items())


def save_often(root: Path, delay_s: float):
    """Local copies of each step, whose leader removes the one before late; what was printed."""
    told = io.StringIO()
    remove = LocalTier._remove

    def late(tier: LocalTier, *keeps: Any) -> None:
        time.sleep(delay_s)
        remove(tier, *keeps)

    with on_nodes(2) as world, contextlib.redirect_stderr(told), mock.patch.object(LocalTier, "_remove", late):
        run = run_of(root, world, resumes=False, local_every_steps=1).run_to(9)
        tier = run.checkpoint._tier
        assert tier is not None
        tier.finish()
        world.barrier()
        held = sorted(generations(root, 0))
        run.checkpoint._release()
    return held, told.getvalue()


def test_what_other_ranks_write_already_is_not_removed_with_the_copies_before(ranks, tmp_path):
    for held, told in ranks.run(save_often, 2, tmp_path, 0.05):
        assert held == [9]
        assert "could not be written" not in told


def upload_slowly(root: Path, ends: bool):
    """Copies of each step, while the durable save of step 14 stands still; it ends with step 18, or with the run.

    Returns:
        Before it ends: the steps of the generations of this rank's node, and of the durable checkpoints. After it, too.
    """
    goes_on, is_cut = threading.Event(), []

    def hook(operation: str, path: str) -> None:
        if "step-0000014" in path and operation in ("create", "write"):
            goes_on.wait(60)
            if is_cut:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    def held() -> tuple[list[int], list[int]]:
        world.barrier()
        return sorted(generations(root, world.rank)), sorted(checkpoints_in(LocalDirectory(root / "saved")))

    with on_nodes(1) as world:
        run = run_of(root, world, resumes=False, durable_hook=hook, every_steps=7, local_every_steps=1).run_to(18)
        tier = run.checkpoint._tier
        assert tier is not None
        tier.finish()
        before = held()
        is_cut += [True] * (not ends)
        goes_on.set()
        run.checkpoint._saver.writer.thread.join()
        after = held()
        if ends:
            run.run_to(19)
            tier.finish()
        run.checkpoint._release()
    return before, after


def resume_after_upload(root: Path):
    told = io.StringIO()
    with on_nodes(1) as world, contextlib.redirect_stderr(told):
        run = run_of(root, world, resumes=True, every_steps=7, local_every_steps=1)
        begun = run.checkpoint.resume()
        run.run_to(20)
        run.checkpoint.wait()
        state = run.everything()
        run.checkpoint._release()
    return begun, state, told.getvalue()


@pytest.mark.parametrize("ends", [True, False])
def test_an_upload_that_is_slower_than_four_generations_holds_none_of_them_up(ranks, ends, tmp_path):
    straight = ranks.run(train, 2, tmp_path / "straight", 20, False, 1)
    durable = [7, 14] if ends else [7]
    for before, after in ranks.run(upload_slowly, 2, tmp_path / "run", ends):
        assert before == ([18], [7])
        assert after == ([18], durable)
    newest = 19 if ends else 18
    for rank, (begun, state, told) in enumerate(ranks.run(resume_after_upload, 2, tmp_path / "run")):
        assert begun == newest
        assert_same(state, straight[rank][1])
        assert (f"resumed from the local copies of step {newest} (durable: {durable[-1]})" in told) == (rank == 0)


def fail(root: Path, code: int):
    """Rank 1's disk fails in the save of step 4; what was printed, and the steps of whole generations behind it."""
    world, told = world_for_this_test(), io.StringIO()
    failing = []

    def hook(operation: str, path: str) -> None:
        if failing and operation in ("create", "write"):
            raise OSError(code, os.strerror(code))

    with contextlib.redirect_stderr(told):
        run = run_of(root, world, resumes=False, hook=hook).run_to(3)
        tier = run.checkpoint._tier
        assert tier is not None
        tier._saver.writer.thread.join()
        failing += [True] * (world.rank == 1)
        world.barrier()
        run.run_to(4)
        tier._saver.writer.thread.join()
        failing.clear()
        run.run_to(5)
        tier.finish()
        world.barrier()
        held = sorted(generations(root, 0))
        world.barrier()
        run.run_to(7)
        tier.finish()
        world.barrier()
        later = sorted(generations(root, 0))
        run.checkpoint.close()
    return told.getvalue(), held, later


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_fails_on_one_rank_ends_nothing(ranks, code, tmp_path):
    (zero, held, later), (one, *_) = ranks.run(fail, 2, tmp_path, code)
    assert f"the local copies of step 4 could not be written: rank 1: OSError: [Errno {code}]" in zero
    assert "training continues, but 1 of 2 local saves have failed" in zero
    is_full = code != errno.EIO
    assert ("is full on rank 1: the copies of step 2 are removed" in one) == is_full
    assert (held, later) == ([] if is_full else [2], [6])
    assert list(checkpoints_in(LocalDirectory(tmp_path / "saved"))) == [7]
    assert not list(tmp_path.glob("node0/*/*")), "a run that has ended leaves no copies"


def refuse(root: Path, which: str):
    """What the error of a wrong argument on rank 1 says."""
    world = world_for_this_test()
    options: dict[str, Any] = {"local": root / "local", "local_every_steps": 2}
    if world.rank == 1:
        options |= {
            "a file": {"local": root / "file"},
            "a URL": {"local": "s3://bucket/x"},
            "none": {"local": None, "local_every_steps": None},
            "another number": {"local_every_steps": 3},
            "no number": {"local_every_steps": "2"},
        }[which]
    with pytest.raises((ConfigurationError, MismatchError)) as caught:
        Checkpointer(root / "saved", model=nn.Linear(1, 1), **options)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("a file", "ConfigurationError: Checkpointer on rank 1: local="),
        ("a URL", "ConfigurationError: Checkpointer on rank 1: local='s3://bucket/x'; the path of a directory"),
        ("none", "MismatchError: Checkpointer: local_every_steps is 2 on rank 0 and None on rank 1"),
        ("another number", "MismatchError: Checkpointer: local_every_steps is 2 on rank 0 and 3 on rank 1"),
        ("no number", "ConfigurationError: Checkpointer on rank 1: local_every_steps='2'; a whole number"),
    ],
)
def test_a_wrong_argument_on_one_rank_is_one_error_on_all(ranks, tmp_path, which, message):
    (tmp_path / "file").write_text("x")
    first, second = ranks.run(refuse, 2, tmp_path, which)
    assert first == second
    assert first.startswith(message)


def local_steps(root: Path, upto: int, resumes: bool):
    """With LocalSGD, steps are counted and copies are due where ranks exchange."""
    world = world_for_this_test()
    torch.manual_seed(7 + resumes)
    model = evenstep.DistributedDataParallel(nn.Linear(3, 2).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    local = evenstep.LocalSGD(model, optimizer, every=3)
    checkpoint = Checkpointer(
        root / "saved", model=model, local_sgd=local, every_minutes=None, local=root / "local", local_every_steps=1
    )
    began = checkpoint.resume()
    for step in range(began, 3 * upto):
        generator = torch.Generator().manual_seed(10 * step + world.rank)
        optimizer.zero_grad()
        model.backward(model(torch.randn(5, 3, dtype=torch.float64, generator=generator)).square().mean())
        local.step()
        checkpoint.step()
    checkpoint._tier.finish()
    kept = [p.detach().clone() for p in model.parameters()]
    kept += [optimizer.state[p]["momentum_buffer"].clone() for p in model.parameters()]
    checkpoint._release()
    local.close()
    return began, kept


def test_local_sgd_goes_on_from_the_last_exchange(ranks, tmp_path):
    straight = ranks.run(local_steps, 2, tmp_path / "a", 4, False)
    ranks.run(local_steps, 2, tmp_path / "b", 2, False)
    second = ranks.run(local_steps, 2, tmp_path / "b", 4, True)
    for rank in range(2):
        assert second[rank][0] == 6
        assert all(map(torch.equal, second[rank][1], straight[rank][1]))
