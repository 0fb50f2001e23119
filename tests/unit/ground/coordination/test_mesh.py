"""The plan of a mesh: its sizes, and which ranks share samples."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from evenstep.errors import ConfigurationError
from evenstep.ground.coordination.mesh import DATA, NAMES, complete_mesh, ranks_along, validate_mesh


def test_any_order_and_any_subset_is_one_mesh():
    assert validate_mesh("mesh", None) is None
    for count in range(1, 5):
        for names in itertools.permutations(NAMES, count):
            sizes = validate_mesh("mesh", dict.fromkeys(names, 2))
            assert sizes is not None
            assert list(sizes) == [name for name in NAMES if name in names]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, r"mesh=\{\}; sizes by name"),
        ([2, 2], "sizes by name"),
        ("shard", "sizes by name"),
        ({"dp": 2}, "mesh: the dimension='dp'"),
        ({1: 2}, "mesh: the dimension=1"),
        ({"shard": 0}, "sizes are at least 1"),
        ({"shard": 2.5}, r"mesh\['shard'\]=2.5"),
        ({"shard": True}, r"mesh\['shard'\]=True"),
        ({"shard": -2}, r"mesh\['shard'\]=-2"),
        ({"shard": -1, "tensor": -1}, "one of them may be -1"),
    ],
)
def test_what_is_no_mesh_is_refused(given, told):
    with pytest.raises(ConfigurationError, match=told):
        validate_mesh("mesh", given)


def test_sizes_multiply_to_the_number_of_ranks():
    assert complete_mesh("mesh", {"replicate": 2, "tensor": 3}, 6) == {"replicate": 2, "tensor": 3}
    assert complete_mesh("mesh", {"shard": -1, "tensor": 2}, 8) == {"shard": 4, "tensor": 2}
    assert complete_mesh("mesh", {"shard": -1}, 1) == {"shard": 1}
    with pytest.raises(ConfigurationError, match=r"mesh: replicate 2 x shard 2 is a mesh of 4 ranks, but there are 6"):
        complete_mesh("mesh", {"replicate": 2, "shard": 2}, 6)
    for size in (3, 1):
        with pytest.raises(ConfigurationError, match=r"shard \? x tensor 2 is a mesh of 2 ranks or a multiple, but"):
            complete_mesh("mesh", {"shard": -1, "tensor": 2}, size)


def test_groups_have_every_rank_once_and_differ_only_along_their_dimensions(fresh_seed):
    chance = random.Random(fresh_seed)
    sizes = [chance.randint(1, 3) for _ in NAMES]
    ranks = torch.randperm(math.prod(sizes), generator=torch.Generator().manual_seed(fresh_seed)).reshape(sizes)
    place = {int(ranks[at]): at for at in itertools.product(*map(range, sizes))}
    for along in (DATA, ("tensor",), (), NAMES, ("shard", "tensor")):
        groups = ranks_along(ranks, NAMES, along)
        assert sorted(itertools.chain(*groups)) == list(range(ranks.numel()))
        for group in groups:
            assert group == sorted(group)
            fixed = {tuple(place[rank][n] for n, name in enumerate(NAMES) if name not in along) for rank in group}
            assert len(fixed) == 1
            assert len(group) == math.prod(size for size, name in zip(sizes, NAMES, strict=True) if name in along)
