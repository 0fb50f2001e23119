"""Which device a rank computes on, without having one."""

from __future__ import annotations

import pytest
import torch

from evenstep.errors import ConfigurationError
from evenstep.ground.computing.device import choose_device
from evenstep.ground.environment import Placement

SECOND_OF_TWO = Placement(rank=1, world_size=2, local_rank=1, local_world_size=2)


@pytest.mark.parametrize(
    ("asked", "num_gpus", "expected"),
    [
        (None, 0, "cpu"),
        (None, 2, "cuda:1"),
        ("cpu", 8, "cpu"),
        ("cuda", 2, "cuda:1"),
        ("cuda:0", 1, "cuda:0"),
        (torch.device("cuda", 3), 4, "cuda:3"),
    ],
)
def test_the_device_of_a_rank(asked, num_gpus, expected):
    assert choose_device(asked, SECOND_OF_TWO, num_gpus=num_gpus) == torch.device(expected)


def test_one_rank_is_not_called_one_ranks():
    with pytest.raises(ConfigurationError, match=r"^1 rank on this node, but it has no GPU"):
        choose_device("cuda", Placement(), num_gpus=0)


@pytest.mark.parametrize(
    ("asked", "num_gpus", "message"),
    [
        ("cuda", 1, "2 ranks on this node, but it has 1 GPU"),
        ("cuda", 0, r"no GPU that torch can use: each rank needs its own GPU\. Pass device='cpu'\.$"),
        (None, 1, "2 ranks on this node, but it has 1 GPU: .* Start at most 1 rank, or pass device='cpu', or name one"),
        ("cuda:4", 4, "this node has 4 GPUs"),
        ("gpu", 1, "isn't a device"),
        ("mps", 1, "trains on 'cpu' and 'cuda'"),
    ],
)
def test_what_cannot_be_had_is_refused(asked, num_gpus, message):
    with pytest.raises(ConfigurationError, match=message):
        choose_device(asked, SECOND_OF_TWO, num_gpus=num_gpus)
