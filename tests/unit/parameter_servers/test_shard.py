"""Which server has which parameters, and packing."""

from __future__ import annotations

import random

import pytest
import torch

from evenstep.errors import ConfigurationError
from evenstep.ground.environment import Placement
from evenstep.parameter_servers.preparation import assign_roles
from evenstep.parameter_servers.shard import pack, plan_division, unpack


def test_every_parameter_has_one_server(fresh_seed: int):
    chosen = random.Random(fresh_seed)
    for _ in range(50):
        sizes = [chosen.choice([0, 4, 400, 40_000, 4_000_000]) for _ in range(chosen.randint(1, 30))]
        num_servers = chosen.randint(1, 8)
        division = plan_division(sizes, num_servers)
        assert len(division) == num_servers
        assert sorted(index for each in division for index in each) == list(range(len(sizes)))
        assert max(sum(sizes[i] for i in each) for each in division) <= sum(sizes) / num_servers + max(sizes)


def test_packed_tensors_come_back(fresh_seed: int):
    torch.manual_seed(fresh_seed)
    dtypes = [torch.float32, torch.float64, torch.bfloat16]
    like = [torch.randn(shape).to(dtypes[i % 3]) for i, shape in enumerate([(3, 4), (), (0,), (7,), (2, 1, 5)])]
    like[0] = torch.randn(4, 3).t()
    packed = pack(like, like)
    assert len(packed) == 3
    for a, b in zip(like, unpack(like, packed), strict=True):
        assert torch.equal(a, b)
        assert a.dtype == b.dtype
    like[3].add_(1)
    assert not torch.equal(unpack(like, packed)[3], like[3]), "what is packed must be a copy"
    assert unpack(like, pack(like, [None] * 5))[0].abs().sum() == 0


@pytest.mark.parametrize(("num_servers", "text"), [(0, "no server among 4 ranks"), (4, "leave no worker")])
def test_roles_that_cannot_be(num_servers: int, text: str):
    with pytest.raises(ConfigurationError, match=text):
        assign_roles(Placement(world_size=4, local_world_size=4), num_servers)
