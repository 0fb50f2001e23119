"""Checkpoints of models that torch divides over ranks: the same bits on any layout, each element written once."""

from __future__ import annotations

import itertools
import math
import random
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from evenstep.checkpoint.checkpointer import Checkpointer
from evenstep.checkpoint.directory import checkpoints_in, read_manifest
from evenstep.checkpoint.load.reader import check_checkpoint
from evenstep.checkpoint.store import LocalDirectory
from evenstep.errors import CheckpointError
from tests.checkpoint_runs import Tensors, is_same, world_for_this_test
from tests.mesh_runs import LAYOUTS, Model, divided, mesh_of, num_ranks, whole_of


def carry(directory: Path, layout: str, seed: int, num_steps: int, resumes: bool):
    """Load, if there is something; train; save. Everything before training and at the end, as whole tensors."""
    world = world_for_this_test()
    torch.manual_seed(seed if not resumes else seed + 1)
    model = divided(Model().double(), mesh_of(layout))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    checkpoint = Checkpointer(directory, world=world, every_minutes=None, model=model, optimizer=optimizer)
    before = None
    if resumes:
        assert checkpoint.resume() > 0
        before = whole_of({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    for step in range(num_steps):
        tokens = torch.arange(12).view(3, 4).add(step) % 13
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpoint.step()
    checkpoint.save()
    checkpoint.close()
    is_divided = any(isinstance(p, DTensor) for p in model.parameters())
    return before, whole_of({"model": model.state_dict(), "optimizer": optimizer.state_dict()}), is_divided


def written_once(directory: Path, step: int) -> None:
    """The files hold each element of each tensor once, and every byte is as it was saved."""
    storage, folder = LocalDirectory(directory), checkpoints_in(LocalDirectory(directory))[step]
    manifest = read_manifest(storage, folder)
    assert check_checkpoint(storage, folder) == []
    needed = sum(
        tensor.numel * getattr(torch, tensor.dtype).itemsize
        for item in manifest.objects.values()
        for tensor in item.tensors.values()
    )
    assert sum(file.bytes - file.header_bytes for file in manifest.files.values()) == needed


def play(ranks, directory: Path, layouts: list[str], seed: int) -> None:
    """Carry one run from layout to layout; wherever it comes, it finds the bits that it left."""
    left, steps = None, 0
    for layout in layouts:
        results = ranks.run(carry, num_ranks(layout), directory, layout, seed, 2, steps > 0)
        steps += 2
        for found, _, is_divided in results:
            assert is_divided == bool(LAYOUTS[layout])
            if left is not None:
                assert is_same(found, left), layout
        left = results[0][1]
        written_once(directory, steps)


def test_four_ranks_then_hsdp_then_tensor_then_one_process(ranks, tmp_path, fresh_seed):
    """And back to four. FSDP2's parts are uneven, some are empty; tensor parallelism divides columns."""
    layouts = ["shard 4", "replicate 2 x shard 2", "tensor 2", "one process", "shard 2 x tensor 2"]
    play(ranks, tmp_path, layouts, fresh_seed)


@pytest.mark.extended
def test_from_every_layout_to_every_other(ranks, tmp_path, fresh_seed):
    for number, pair in enumerate(itertools.permutations(LAYOUTS, 2)):
        play(ranks, tmp_path / str(number), list(pair), fresh_seed)


def random_placements(generator: random.Random, mesh: DeviceMesh, ndim: int):
    return [generator.choice([Replicate(), *map(Shard, range(ndim))]) for _ in range(mesh.ndim)]


def keep(directory: Path, seed: int, shape_seed: int, saves: bool):
    """Tensors of random shapes, divided at random: save them; or load them into another division."""
    world = world_for_this_test()
    generator, shapes = random.Random(seed), random.Random(shape_seed)
    layouts = [name for name in LAYOUTS if num_ranks(name) == world.world_size and LAYOUTS[name]]
    mesh = mesh_of(generator.choice(layouts))
    wholes, values = {}, {}
    for number in range(12):
        shape = [shapes.randrange(1, 8) for _ in range(shapes.randrange(1, 4))]
        dtype = shapes.choice([torch.float32, torch.bfloat16, torch.int64, torch.bool])
        whole = torch.arange(math.prod(shape)).add(number).view(shape).to(dtype)
        wholes[str(number)] = whole
        start = whole if saves else torch.zeros_like(whole)
        values[str(number)] = distribute_tensor(start, mesh, random_placements(generator, mesh, len(shape)))
    kept = Tensors(values)
    checkpoint = Checkpointer(directory, world=world, every_minutes=None, kept=kept)
    if saves:
        checkpoint.save()
    else:
        checkpoint.load(0)
        for name, whole in wholes.items():
            assert kept.values[name].placements == values[name].placements
            assert torch.equal(kept.values[name].full_tensor(), whole), (name, values[name].placements)
    checkpoint.close()


def test_any_division_is_read_into_any_other(ranks, tmp_path, fresh_seed):
    """Along several dimensions of a tensor and of a mesh, with parts that are uneven or empty."""
    for number, (saving, loading) in enumerate([(4, 4), (4, 2), (3, 4)]):
        directory = tmp_path / str(number)
        ranks.run(keep, saving, directory, fresh_seed + number, fresh_seed, True)
        written_once(directory, 0)
        ranks.run(keep, loading, directory, fresh_seed + 10 + number, fresh_seed, False)


def refuse(directory: Path, case: str):
    """What is refused, on every rank, with one error."""
    world = world_for_this_test()
    mesh = mesh_of("shard 2")
    assert mesh is not None
    if case == "summands":
        value = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    else:
        value = distribute_tensor(torch.ones(4), DeviceMesh("cpu", [dist.get_rank()]), [Replicate()])
    checkpoint = Checkpointer(directory, world=world, every_minutes=None, kept=Tensors({"a": value}))
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save()
    checkpoint._is_closed = True
    checkpoint._release()
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("summands", r"kept\['a'\] is a DTensor of placements \(Partial\(sum\),\): each rank has a summand"),
        ("meshes apart", r"the parts of kept/a don't make up its 4 elements.*one mesh of all ranks"),
    ],
)
def test_what_cannot_be_is_one_error_on_all_ranks(ranks, tmp_path, case, message):
    first, second = ranks.run(refuse, 2, tmp_path, case)
    assert first == second
    assert re.search(message, first), first
