"""Which server has which parameters, and packing."""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evenstep.errors import ConfigurationError
from evenstep.ground.environment import Placement
from evenstep.parameter_servers.embedding.table import RowGradients
from evenstep.parameter_servers.preparation import assign_roles
from evenstep.parameter_servers.shard import Pushed, Shard, pack, plan_division, unpack


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


def test_rows_are_looked_up_before_a_step_or_behind_it():
    begun, goes_on, order = threading.Event(), threading.Event(), list[str]()

    def apply(_: Any) -> None:
        begun.set()
        assert goes_on.wait(30)
        order.append("applied")

    table: Any = SimpleNamespace(mean=list, apply=apply, look_up=lambda _: order.append("looked up"))
    shard, ids = Shard({}, None, None, {"t": table}), torch.tensor([1])
    pushed = Pushed(1.0, [], [], {"t": RowGradients(ids, torch.ones(1, 2), 0.1)})
    step = threading.Thread(target=shard.apply, args=([pushed],))
    look = threading.Thread(target=shard.look_up, args=("t", ids))
    step.start()
    assert begun.wait(30)
    look.start()
    look.join(0.2)
    goes_on.set()
    step.join()
    look.join()
    assert order == ["applied", "looked up"]


def test_the_last_ranks_are_servers():
    roles = [
        assign_roles(Placement(rank=rank, world_size=5, local_rank=rank, local_world_size=5), 2) for rank in range(5)
    ]
    assert [each.name for each in roles] == [
        "worker 0 (rank 0)",
        "worker 1 (rank 1)",
        "worker 2 (rank 2)",
        "server 0 (rank 3)",
        "server 1 (rank 4)",
    ]
    assert [each.is_server for each in roles] == [False, False, False, True, True]
    assert assign_roles(Placement(), 3).is_alone


@pytest.mark.parametrize(("num_servers", "text"), [(0, "no server among 4 ranks"), (4, "leave no worker")])
def test_roles_that_cannot_be(num_servers: int, text: str):
    with pytest.raises(ConfigurationError, match=text):
        assign_roles(Placement(world_size=4, local_world_size=4), num_servers)
