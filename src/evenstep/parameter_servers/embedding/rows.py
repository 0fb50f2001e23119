"""What travels of a table, and which server has which rows. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class RowGradients(NamedTuple):
    """What a worker pushes of a table to one server.

    Attributes:
        ids: [n], int64, each once, all of that server.
        values: [n, dim], the mean by weight of this worker's gradients.
        lr: The rate of this step.
    """

    ids: Tensor
    values: Tensor
    lr: float


def split_by_server(ids: Tensor, num_servers: int) -> list[Tensor]:
    """For each server the positions of its ids, ascending.

    Row i is on server i modulo `num_servers`: tables are often sorted by how frequent their rows are, and ranges would
    give one server all the frequent ones.

    Args:
        ids: [n], int64.
        num_servers: At least 1.
    """
    owner = ids % num_servers
    return [torch.nonzero(owner == server).flatten() for server in range(num_servers)]


def add_up(ids: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Each id once, ascending, with the sum of its rows, added in the order in which they are given.

    Args:
        ids: [n] each, int64.
        values: [n, dim] each.
    """
    if len(ids) == 1:  # each once already
        return ids[0], values[0]
    unique, inverse = torch.unique(torch.cat(list(ids)), return_inverse=True)
    stacked = torch.cat(list(values))
    return unique, stacked.new_zeros(len(unique), stacked.shape[1]).index_add_(0, inverse, stacked)
