"""Optimizer state of ranks that step independently: saved, loaded, and made equal on all ranks.

[Note: rows]

    state of a parameter            on every rank           in the checkpoint
    a tensor of shape [...]         a different tensor      one tensor of shape [ranks, ...], each rank writes its row
    numbers, small tensors          different values        a list, one entry per rank

With a divided model, read "replica" for "rank": a row is a replica's, and each rank writes and reads its part of the
row. State that isn't divided is that of the replica's first rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, optim

from evenstep.errors import ConfigurationError
from evenstep.ground.compat.torch_tensors import is_dtensor, row_on_mesh, wrapped_like
from evenstep.optim.loading import load_exactly
from evenstep.optim.sharded.flat_segments import STATE_DICT, Shard
from evenstep.replica.channels import Peers

ROWS = "rows"  # the key of the tensors with a row per rank


def take_apart(optimizer: optim.Optimizer, peers: Peers) -> tuple[dict[str, Any], list[Shard]]:
    """Collective: the states of all ranks' optimizers, as pieces.

    Args:
        optimizer: This rank's optimizer.
        peers: The model's peers.

    Returns:
        (the argument of `put_together`, equal on all ranks, without rows or with rows as DTensors; this rank's row of
        each tensor that it lacks).

    Raises:
        ConfigurationError: Ranks have tensors of different shapes. Raised on all ranks.
    """
    return _take_apart(optimizer.state_dict(), _parameters_of(optimizer), peers)


def make_equal(optimizer: optim.Optimizer, peers: Peers) -> None:
    """Collective: every optimizer gets the mean of all ranks' tensors, and the first rank's numbers.

    Parameter groups stay as they are.

    Args:
        optimizer: This rank's optimizer.
        peers: The model's peers; the model isn't divided.

    Raises:
        ConfigurationError: Ranks have tensors of different shapes, or values that can't be sent. Raised on all ranks;
            nothing was changed.
    """
    whole = optimizer.state_dict()
    state, shards = _take_apart({**whole, "param_groups": []}, _parameters_of(optimizer), peers)
    received = state["ranks"]
    means: dict[str, dict[str, Tensor]] = {}
    for shard in shards:
        number, key = map(str, shard.path[1:])
        having = [rank for rank, each in enumerate(received) if key in each["shapes"].get(number, {})]
        values = shard.values.to(peers.everybody.device, copy=True)
        flat = torch.view_as_real(values) if values.is_complex() else values
        if flat.is_floating_point():
            peers.transport.all_reduce(flat).wait()  # a rank without the tensor contributes zeros
            flat /= len(having)
        else:
            peers.transport.broadcast(flat, having[0]).wait()
        means.setdefault(number, {})[key] = values.view(shard.shape[1:])
    found: dict[int, dict[str, Any]] = {}
    for each in reversed(received):  # so that the first rank's values are set last and win
        for number, entries in each["state"].items():
            found[int(number)] = {**entries, **means.get(number, {})}
    load_exactly(optimizer, {**whole, "state": found})


def _take_apart(
    whole: Mapping[str, Any], parameters: Sequence[Tensor], peers: Peers
) -> tuple[dict[str, Any], list[Shard]]:
    kept: dict[str, dict[str, Any]] = {}
    tensors: dict[str, dict[str, Tensor]] = {}
    for number, entries in whole["state"].items():
        large = {key: value for key, value in entries.items() if isinstance(value, Tensor) and value.dim() > 0}
        tensors[str(number)] = large
        kept[str(number)] = {key: value for key, value in entries.items() if key not in large}
    shapes = {n: {key: _told(value) for key, value in each.items()} for n, each in tensors.items()}
    given = {"state": kept, "shapes": shapes, "param_groups": whole["param_groups"]}
    # Exchange over the world, which can still do so at its end, for the last save.
    told = peers.everybody.exchange([peers.number, given], what=STATE_DICT)
    by_replica = dict(reversed(told))  # the state of each replica's first rank
    state: dict[str, Any] = {"ranks": [by_replica[number] for number in sorted(by_replica)]}
    num_rows, shards = len(by_replica), []
    for (number, key), (name, shape) in _agreed([each["shapes"] for _, each in told]).items():
        parameter, dtype = parameters[int(number)], getattr(torch, name)
        row = tensors.get(number, {}).get(key)
        if row is None and tuple(parameter.shape) == shape:
            row = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        elif row is None:
            row = torch.zeros(shape, dtype=dtype, device=parameter.device)
        if peers.mesh is not None:
            rows = state.setdefault(ROWS, {}).setdefault(number, {})
            rows[key] = row_on_mesh(row.detach(), peers.mesh, num_rows)
        else:
            begin = peers.number * row.numel()
            shards.append(Shard((ROWS, number, key), (num_rows, *shape), begin, row.detach().reshape(-1)))
    return state, shards


def put_together(state: Mapping[str, Any], optimizer: optim.Optimizer, peers: Peers) -> dict[str, Any]:
    """Local: make a state dict for this rank's optimizer.

    Args:
        state: The result of `take_apart`, with rows as tensors: all rows, or those that this rank needs; for a divided
            parameter, this rank's part of the rows.
        optimizer: This rank's optimizer.
        peers: The model's peers. If there are as many peers as saved rows, each gets its own row. Otherwise all get the
            mean of all rows, and rank 0's numbers.
    """
    received, rows = state["ranks"], state.get(ROWS, {})
    parameters = dict(enumerate(_parameters_of(optimizer)))
    is_own = len(received) == peers.transport.world_size
    found = {}
    for number in sorted({int(number) for each in received for number in each["state"]}):
        having = [rank for rank, each in enumerate(received) if str(number) in each["state"]]
        if is_own and peers.number not in having:
            continue
        first = received[peers.number if is_own else having[0]]
        entries = dict(first["state"][str(number)])
        for key, (_, shape) in first["shapes"][str(number)].items():
            values = rows[str(number)][key]
            own = values[min(peers.number, len(values) - 1)] if is_own else _mean(values[having])
            parameter = parameters.get(number)
            entries[key] = wrapped_like(parameter, own, tuple(shape)) if is_dtensor(parameter) else own
        found[number] = entries
    return {"state": found, "param_groups": received[peers.number if is_own else 0]["param_groups"]}


def _parameters_of(optimizer: optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _told(value: Tensor) -> list[Any]:
    return [str(value.dtype).removeprefix("torch."), list(value.shape)]


def _agreed(shapes: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[tuple[str, str], tuple[str, tuple[int, ...]]]:
    """Dtype and shape of each state tensor that any rank has, by number of the parameter and name. Pure."""
    found: dict[tuple[str, str], tuple[str, tuple[int, ...]]] = {}
    for rank, each in enumerate(shapes):
        for number, entries in each.items():
            for key, (dtype, shape) in entries.items():
                received = dtype, tuple(shape)
                if found.setdefault((number, key), received) != received:
                    raise ConfigurationError(
                        f"{key!r} of parameter {number} is {dtype} {list(shape)} on rank {rank} and "
                        f"{found[number, key][0]} {list(found[number, key][1])} on an earlier rank. The state of an "
                        f"optimizer that grows differently on each rank can't be saved."
                    )
    return found


def _mean(rows: Tensor) -> Tensor:
    """The mean of [ranks, ...] over ranks; for integers, the first rank's values."""
    return rows.mean(0) if rows.is_floating_point() or rows.is_complex() else rows[0]
