"""Meshes on real ranks: who shares samples, draws and means with whom."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import TensorDataset

import evenstep
from evenstep import world as worlds
from evenstep.errors import ConfigurationError


def alone(fn: Callable[[], Any], **arguments: Any) -> Any:
    """Run a function in a world of its own, with a mesh, on ranks that may have another world."""
    before = worlds.initialised()
    if before is not None:
        before.close()
    with evenstep.init(quiet=True, seed=3, **arguments):
        return fn()


def shares():
    world = worlds.current()
    loader = evenstep.DataLoader(TensorDataset(torch.arange(10)), 6, shuffle=True)
    batches = [x.tolist() for (x,) in loader]
    sampler = list(evenstep.DistributedSampler(range(10), shuffle=False))
    # Drawn before, drawn after the ranks have diverged.
    shared = torch.rand(1).item()
    model = evenstep.DistributedDataParallel(nn.Linear(2, 2))
    model(torch.ones(1, 2))
    gathered = world.gather(torch.full((world.data_rank + 1,), world.data_rank))
    in_order = evenstep.DataLoader(TensorDataset(torch.arange(7)), 7)
    rows = [x for (x,) in in_order]
    assert in_order.gather(torch.cat(rows)).tolist() == list(range(7))
    return {
        "place": None if world.mesh is None else tuple(world.mesh.get_coordinate()),
        "names": None if world.mesh is None else world.mesh.mesh_dim_names,
        "data": (world.data_rank, world.data_size),
        "batches": batches,
        "sampler": sampler,
        "shared": shared,
        "drawn": torch.rand(1).item(),
        "gathered": gathered.tolist(),
        "mean": world.mean(float(world.data_rank), weight=world.data_rank + 1),
        "weight": model.module.weight.tolist(),
        "ranks": model.world.world_size,
    }


MESHES = [
    ({"shard": 4}, [0, 1, 2, 3]),
    ({"tensor": 4}, [0, 0, 0, 0]),
    ({"tensor": 2, "replicate": 2}, [0, 0, 1, 1]),
    ({"pipeline": 2, "shard": 2}, [0, 1, 0, 1]),
    ({"replicate": 2, "shard": -1}, [0, 1, 2, 3]),
]


@pytest.mark.parametrize(("mesh", "data_ranks"), MESHES[2:4])
def test_ranks_that_share_samples_share_draws_and_others_dont(ranks, mesh, data_ranks):
    check_shares(ranks, mesh, data_ranks)


@pytest.mark.extended
@pytest.mark.parametrize(("mesh", "data_ranks"), [*MESHES[:2], MESHES[4]])
def test_so_they_do_on_other_meshes(ranks, mesh, data_ranks):
    check_shares(ranks, mesh, data_ranks)


def check_shares(ranks, mesh, data_ranks):
    size = max(data_ranks) + 1
    found = ranks.run(run_shares, 4, mesh)
    [one] = ranks.run(run_shares, 1, None)
    assert [each["data"] for each in found] == [(rank, size) for rank in data_ranks]
    for key in ("batches", "sampler", "drawn"):
        by_data_rank = {each["data"][0]: each[key] for each in found}
        assert all(each[key] == by_data_rank[each["data"][0]] for each in found), key
        assert len({str(value) for value in by_data_rank.values()}) == size, key
    assert {each["shared"] for each in found} == {one["shared"]}
    assert found[0]["drawn"] == one["drawn"]
    firsts = [next(each for each in found if each["data"][0] == rank) for rank in range(size)]
    for step, whole in enumerate(one["batches"]):
        assert [sample for each in firsts for sample in each["batches"][step]] == whole
    total = sum(rank + 1 for rank in range(size))
    for each in found:
        assert each["gathered"] == [rank for rank in range(size) for _ in range(rank + 1)]
        assert each["mean"] == sum(rank * (rank + 1) for rank in range(size)) / total
        assert each["ranks"] == size
        assert each["weight"] == one["weight"]
        assert each["names"] == tuple(name for name in ("pipeline", "replicate", "shard", "tensor") if name in mesh)
    assert len({each["place"] for each in found}) == 4


def run_shares(mesh):
    return alone(shares, mesh=mesh)


def adopted(backend):
    before = worlds.initialised()
    if before is not None:
        before.close()
    placement = evenstep.ground.environment.current_placement()
    store = evenstep.ground.coordination.rendezvous_store.open_store(placement, 60.0)
    dist.init_process_group(backend, store=store, rank=placement.rank, world_size=placement.world_size)
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
        with evenstep.World.from_process_group(mesh=mesh) as world:
            assert world.mesh is mesh
            found = (world.data_rank, world.data_size, world.gather(torch.tensor([world.data_rank])).tolist())
        unnamed = init_device_mesh("cpu", (4,))
        other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for wrong, told in (
            (unnamed, "without names"),
            (other, "the dimension='dp'"),
            (mesh["shard"], "shard 2 is a mesh of 2 ranks"),
        ):
            with pytest.raises(ConfigurationError, match=told):
                evenstep.World.from_process_group(mesh=wrong)
        return found
    finally:
        dist.destroy_process_group()


@pytest.mark.extended
@pytest.mark.parametrize("backend", ["gloo", "evenstep"])
def test_a_scripts_own_mesh_is_adopted(ranks, backend):
    assert ranks.run(adopted, 4, backend) == [(n, 2, [0, 1]) for n in (0, 0, 1, 1)]


def of_the_next_world(has_another_group: bool) -> list[Any]:
    """The groups of a mesh, of what a DTensor's operations give on it, and the sum over one of its dimensions."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    before = worlds.initialised()
    if before is not None:
        before.close()
    with evenstep.init(quiet=True) as world:
        if has_another_group:  # so that names count on from another number
            dist.new_group([0, 1])
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))["shard"]
        value = DTensor.from_local(torch.full((2,), 1.0 + world.rank % 2), mesh, [Shard(0)])
        made = torch.zeros_like(value) + value
        summed = DTensor.from_local(made.to_local(), made.device_mesh, [Partial()]).redistribute(
            placements=[Replicate()]
        )
        groups = [each.get_group().group_name for each in (mesh, made.device_mesh)]
        return [groups[0] == groups[1], made.full_tensor().tolist(), summed.to_local().tolist()]


def test_what_is_computed_has_the_groups_of_this_world(ranks):
    """torch kept results with meshes of groups that had ended: names of no group on one rank, of others elsewhere."""
    for has_another_group in (False, True):
        found = ranks.run(of_the_next_world, 4, has_another_group)
        assert found == [[True, [1.0, 1.0, 2.0, 2.0], [3.0, 3.0]]] * 4
