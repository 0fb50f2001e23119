"""Ranks whose nodes keep generations on disks of their own resume from what these hold between them."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import evenstep
from evenstep.checkpoint.checkpointer import Checkpointer
from evenstep.checkpoint.directory import checkpoints_in, read_manifest
from evenstep.checkpoint.format import manifest as manifests
from evenstep.checkpoint.format.manifest import Part, TensorEntry
from evenstep.checkpoint.load import fetch, restore
from evenstep.checkpoint.load.fetch import recover
from evenstep.checkpoint.store import LocalDirectory
from tests.checkpoint_runs import PatientRanks, Training, assert_same, flip, world_for_this_test
from tests.mesh_runs import LAYOUTS, Model, divided, mesh_of, whole_of


@pytest.fixture
def ranks(ranks):
    return PatientRanks(ranks)


def deal_out(directory: Path, nodes: list[int]) -> Path:
    """Make of shared checkpoints what nodes would have written: replicated files are on each, shards where they were.

    Args:
        directory: Of the checkpoints; each node's disk is a folder beside them.
        nodes: Of each rank that has saved.
    """
    tiers, shared = directory.with_name("tiers"), LocalDirectory(directory)
    for folder in checkpoints_in(shared).values():
        manifest = read_manifest(shared, folder)
        on = {
            file: [nodes[int(file.split("-shards-")[1][:5]) - 1]] if "-shards-" in file else sorted(set(nodes))
            for file in manifest.files
        }

        def split(tensor: TensorEntry, on: dict[str, list[int]] = on) -> TensorEntry:
            def named(part: Part, node: int) -> Part:
                return replace(part, file=f"n{node}-{part.file}")

            parts = tuple(named(part, on[part.file][0]) for part in tensor.parts)
            return replace(
                tensor, parts=parts, copies=tuple(named(p, node) for p in tensor.parts for node in on[p.file][1:])
            )

        objects = {
            owner: replace(item, tensors={name: split(tensor) for name, tensor in item.tensors.items()})
            for owner, item in manifest.objects.items()
        }
        files = {
            f"n{node}-{file}": replace(entry, node=node) for file, entry in manifest.files.items() for node in on[file]
        }
        content = manifests.encode(replace(manifest, objects=objects, files=files))
        manifests.decode(content)
        for node in set(nodes):
            target = tiers / f"node{node}" / folder
            target.mkdir(parents=True)
            for file in on:
                if node in on[file]:
                    shutil.copy(directory / folder / file, target / f"n{node}-{file}")
            (target / manifests.NAME).write_bytes(content)
    return tiers


class Tensors:
    """An object of which each rank has a part."""

    def __init__(self, world, start: int) -> None:
        mesh = init_device_mesh("cpu", (world.world_size,))
        self.values = {
            "rows": distribute_tensor(torch.arange(35.0).add(start).view(7, 5), mesh, [Shard(0)]),
            "columns": distribute_tensor(torch.arange(24).add(start).view(3, 8), mesh, [Shard(1)]),
        }

    def state_dict(self):
        return dict(self.values)

    def load_state_dict(self, state) -> None:
        self.values = dict(state)


def training(directory: Path, world, **options) -> Training:
    """With batch normalisation, where a rank has two samples."""
    return Training(directory, world, every_minutes=None, plain=world.world_size == 4, **options)


def save(directory: Path, kind: str):
    """Save steps 2 and 4; what a rank has at the end."""
    world = world_for_this_test()
    if kind == "replicas":
        run = training(directory, world, every_steps=2).run_to(4)
        state = run.everything()
        run.checkpoint.close()
        return state
    for step in (2, 4):
        values = Tensors(world, step)
        with Checkpointer(directory, world=world, every_minutes=None, values=values, keep=9) as checkpoint:
            checkpoint.num_steps = step
            checkpoint.save()
            checkpoint.close()
    return {name: value.full_tensor() for name, value in values.values.items()}


def resume(tiers: Path, kind: str, nodes: list[int], durable_step: int | None, fault: Any):
    """What a rank resumes with, and what was printed.

    Args:
        tiers: Of all nodes.
        kind: Of the run.
        nodes: Of each rank.
        durable_step: Of the durable tier.
        fault: (node, operation, part of a path) that fails there.
    """
    world = world_for_this_test()
    node, lines = nodes[world.rank], []

    class Disk(LocalDirectory):
        def open(self, path):
            if fault is not None and fault[0] == node and fault[1] == "open" and fault[2] in path:
                return self._failing(path)
            return super().open(path)

        def _failing(self, path):
            opened = super().open(path)

            class Failing:
                def __enter__(self):
                    reader = opened.__enter__()

                    def read_into(offset, out):
                        if offset + len(out) > 200:
                            raise OSError(errno.EIO, os.strerror(errno.EIO))
                        return reader.read_into(offset, out)

                    return replace(reader, read_into=read_into)

                def __exit__(self, *error):
                    return opened.__exit__(*error)

            return Failing()

    def hook(operation: str, path: str) -> None:
        if fault is not None and fault[:2] == (node, operation) and fault[2] in path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    local = {
        "node_rank": node,
        "local_rank": nodes[: world.rank].count(node),
        "local_world_size": nodes.count(node),
    }
    with (
        mock.patch.multiple(world, **local),
        mock.patch.object(fetch, "_CHUNK_BYTES", 100),
        mock.patch.object(fetch, "say", lines.append),
        mock.patch.object(restore, "_PAUSES_S", ()),
    ):
        if kind == "replicas":
            run = training(tiers / "unused", world, seed=50 + world.rank)
            objects = run.checkpoint.objects
        else:
            objects = {"values": Tensors(world, 0)}
        storage = LocalDirectory if fault is None else Disk
        found = recover(
            storage(tiers / f"node{node}", hook=hook),
            world,
            objects,
            resumes=[],
            durable_step=durable_step,
            strict=True,
        )
        if found is None:
            return None, {}, lines
        restore.apply(found[1], world, objects, found[0])
    if kind == "replicas":
        return found[1].manifest.step, run.everything(), lines
    return found[1].manifest.step, {name: v.full_tensor() for name, v in objects["values"].values.items()}, lines


def files_on(tiers: Path, node: int) -> set[str]:
    return {str(path.relative_to(tiers / f"node{node}")) for path in (tiers / f"node{node}").rglob("*.*")}


def test_replicas_resume_from_their_own_disks(ranks, tmp_path):
    saved = ranks.run(save, 3, tmp_path / "shared", "replicas")
    tiers = deal_out(tmp_path / "shared", [0, 1, 2])
    before = [files_on(tiers, node) for node in range(3)]
    for (step, state, lines), expected in zip(
        ranks.run(resume, 3, tiers, "replicas", [0, 1, 2], 2, None), saved, strict=True
    ):
        assert (step, lines) == (4, [])
        assert_same(state, expected)
    assert [files_on(tiers, node) for node in range(3)] == before, "nothing was copied"
    assert {each[0] for each in ranks.run(resume, 3, tiers, "replicas", [0, 1, 2], 5, None)} == {None}


@pytest.mark.parametrize("wiped", [0, 1])
def test_a_node_whose_disk_is_empty_gets_the_state_of_a_peer(ranks, tmp_path, wiped):
    saved = ranks.run(save, 3, tmp_path / "shared", "replicas")
    tiers = deal_out(tmp_path / "shared", [0, 1, 2])
    shutil.rmtree(tiers / f"node{wiped}")
    for (step, state, lines), expected in zip(
        ranks.run(resume, 3, tiers, "replicas", [0, 1, 2], 2, None), saved, strict=True
    ):
        assert (step, lines) == (4, [])
        assert_same(state, expected)
    for node in {0, 1, 2} - {wiped}:  # should these be lost next
        shutil.rmtree(tiers / f"node{node}")
    assert {each[0] for each in ranks.run(resume, 3, tiers, "replicas", [0, 1, 2], 2, None)} == {4}


def test_a_flipped_bit_in_one_copy_leads_to_another_copy(ranks, tmp_path):
    """In what a node has itself, and in what it gets."""
    saved = ranks.run(save, 3, tmp_path / "shared", "replicas")
    tiers = deal_out(tmp_path / "shared", [0, 1, 2])
    (model,) = (tiers / "node0").glob("step-0000004-*/n0-model.safetensors")
    flip(model, 8 * model.stat().st_size - 3)
    shutil.rmtree(tiers / "node1")
    results = ranks.run(resume, 3, tiers, "replicas", [0, 1, 2], 2, None)
    for (step, state, _), expected in zip(results, saved, strict=True):
        assert step == 4
        assert_same(state, expected)
    (line,) = results[0][2]
    assert "n0-model.safetensors: tensor model/" in line


def test_an_error_in_the_middle_of_a_file_leads_to_another_copy(ranks, tmp_path):
    saved = ranks.run(save, 3, tmp_path / "shared", "replicas")
    tiers = deal_out(tmp_path / "shared", [0, 1, 2])
    shutil.rmtree(tiers / "node1")
    fault = (0, "open", "0000004-00001-2/n0-model")
    results = ranks.run(resume, 3, tiers, "replicas", [0, 1, 2], 2, fault)
    for (step, state, _), expected in zip(results, saved, strict=True):
        assert step == 4
        assert_same(state, expected)
    assert any("n0-model.safetensors: Input/output error" in line for line in results[0][2])


def test_a_node_that_cannot_store_leads_to_the_durable_checkpoint(ranks, tmp_path):
    ranks.run(save, 3, tmp_path / "shared", "replicas")
    tiers = deal_out(tmp_path / "shared", [0, 1, 2])
    shutil.rmtree(tiers / "node1")
    results = ranks.run(resume, 3, tiers, "replicas", [0, 1, 2], 2, (1, "write", "model"))
    assert {step for step, _, _ in results} == {None}
    assert any("not copied to node 1" in line and "No space left" in line for line in results[1][2])


def test_two_nodes_of_two_ranks_go_on_as_one_of_four(ranks, tmp_path):
    saved = ranks.run(save, 4, tmp_path / "shared", "replicas")
    tiers = deal_out(tmp_path / "shared", [0, 0, 1, 1])
    shutil.rmtree(tiers / "node0")
    (tiers / "node1").rename(tiers / "node0")
    for (step, state, lines), expected in zip(
        ranks.run(resume, 4, tiers, "replicas", [0, 0, 0, 0], 2, None), saved, strict=True
    ):
        assert (step, lines) == (4, [])
        assert_same(state, expected)


def test_of_divided_state_each_node_reads_its_own_part(ranks, tmp_path):
    """And gets no more of it than its ranks want, whatever ranks there are now."""
    saved, *_ = ranks.run(save, 3, tmp_path / "shared", "divided")
    tiers = deal_out(tmp_path / "shared", [0, 1, 2])
    before = [files_on(tiers, node) for node in range(3)]
    for step, state, lines in ranks.run(resume, 3, tiers, "divided", [0, 1, 2], 2, None):
        assert (step, lines) == (4, [])
        assert_same(state, saved)
    assert [files_on(tiers, node) for node in range(3)] == before, "nothing was copied"
    shutil.move(tiers / "node2", tiers / "node2-away")
    assert {each[0] for each in ranks.run(resume, 3, tiers, "divided", [0, 1, 2], 2, None)} == {None}
    for file in (tiers / "node2-away").rglob("step-0000004-*/*shards*"):
        shutil.move(file, tiers / "node1" / file.relative_to(tiers / "node2-away"))
    for step, state, _ in ranks.run(resume, 2, tiers, "divided", [0, 1], 2, None):
        assert step == 4
        assert_same(state, saved)


def test_divided_state_of_which_a_part_is_damaged_is_taken_from_the_generation_before(ranks, tmp_path):
    ranks.run(save, 2, tmp_path / "shared", "divided")
    tiers = deal_out(tmp_path / "shared", [0, 1])
    (shards,) = (tiers / "node1").glob("step-0000004-*/n1-values-shards-*")
    flip(shards, 8 * shards.stat().st_size - 3)
    results = ranks.run(resume, 2, tiers, "divided", [0, 1], None, None)
    for step, state, _ in results:
        assert step == 2
        assert torch.equal(state["rows"], torch.arange(35.0).add(2).view(7, 5))
    (line,) = results[0][2]
    assert "n1-values-shards-00002-of-00002.safetensors: tensor values/" in line


# ---------------------------------------------------------------------- saved by the ranks themselves


def train(root: Path, kind: str, nodes: list[int], upto: int, resumes: bool):
    """The step from which a rank has begun, and the end. Checkpoints are of steps 3 and 6, local copies of 2, 4 and 6.

    Args:
        root: Of the durable checkpoints and of the nodes' disks.
        kind: "replicas", "sharded", or a layout that torch divides the model by.
        nodes: Of each rank.
        upto: The last step; nothing is saved then.
        resumes: Whether it is a later attempt.
    """
    world = world_for_this_test()
    node = nodes[world.rank]
    local = {
        "node_rank": node,
        "num_nodes": max(nodes) + 1,
        "local_rank": nodes[: world.rank].count(node),
        "local_world_size": nodes.count(node),
    }
    with mock.patch.multiple(world, **local):
        torch.manual_seed(1 + resumes)
        model: Any = Model().double()
        if kind in LAYOUTS:
            model = divided(model, mesh_of(kind))
        else:
            model = evenstep.DistributedDataParallel(model, world=world)
        if kind == "sharded":
            optimizer: Any = evenstep.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-2)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        checkpoint = Checkpointer(
            root / "durable",
            world=world,
            every_minutes=None,
            every_steps=3,
            local=root / f"node{node}",
            local_every_steps=2,
            model=model,
            optimizer=optimizer,
        )
        begun = checkpoint.resume() if resumes else 0
        for step in range(begun, upto):
            model(torch.arange(12).view(3, 4).add(step) % 13).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpoint.step()
        checkpoint.wait()
        checkpoint._tier.finish()
        state = whole_of({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        checkpoint._world_ended(RuntimeError("a rank is lost"))
        checkpoint._release()
    return begun, state


def same_within(ours: Any, theirs: Any, tolerance: float, where: str = "") -> None:
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), where
        for key in ours:
            same_within(ours[key], theirs[key], tolerance, f"{where}.{key}")
    elif isinstance(ours, list):
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            same_within(*pair, tolerance, f"{where}.{index}")
    elif isinstance(ours, torch.Tensor):
        assert torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance), where
    else:
        assert ours == theirs, where


@pytest.mark.parametrize(
    ("kind", "nodes", "lost", "nodes_then", "begins"),
    [
        ("replicas", [0, 1, 2], [1], [0, 1, 2], 4),
        ("replicas", [0, 1, 2], [0, 2], [0, 1, 2], 4),
        ("replicas", [0, 1, 2], [2], [0, 1], 4),
        ("replicas", [0, 0, 1, 1], [1], [0, 0, 0, 0], 4),
        ("sharded", [0, 1, 2], [], [0, 1, 2], 4),
        ("sharded", [0, 1, 2], [1], [0, 1, 2], 3),
        ("shard 3", [0, 1, 2], [], [0, 1, 2], 4),
        ("shard 3", [0, 1, 2], [1], [0, 1, 2], 3),
        ("replicate 2 x shard 2", [0, 0, 1, 1], [0], [0, 0, 1, 1], 4),
        ("replicate 2 x shard 2", [0, 0, 1, 1], [1], [0, 0, 0, 0], 4),
        ("shard 4", [0, 0, 1, 1], [], [1, 1, 0, 0], 4),
    ],
)
def test_a_lost_node_costs_the_steps_since_a_copy_where_its_state_is_on_a_peer(
    ranks, tmp_path, kind, nodes, lost, nodes_then, begins
):
    """Nodes are lost, or all processes; there are fewer nodes then, or each has other ranks."""
    expected = ranks.run(train, len(nodes), tmp_path / "undisturbed", kind, nodes, 7, False)[0][1]
    ranks.run(train, len(nodes), tmp_path / "run", kind, nodes, 5, False)
    for node in lost:
        shutil.rmtree(tmp_path / f"run/node{node}")
    for begun, state in ranks.run(train, len(nodes_then), tmp_path / "run", kind, nodes_then, 7, True):
        assert begun == begins
        same_within(state, expected, 0.0 if len(nodes_then) == len(nodes) else 1e-12)
