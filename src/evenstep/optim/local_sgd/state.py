"""What an optimizer keeps on ranks that step on their own: to a checkpoint, back, and the same on all of them.

[Note: rows]

    what is kept of a parameter     of every rank           in the checkpoint
    a tensor of shape [...]         another one             one tensor of shape [ranks, ...], each rank writes its row
    numbers, small tensors          another one             a list, one entry per rank
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, optim

from evenstep.errors import ConfigurationError
from evenstep.optim.loading import load_exactly
from evenstep.optim.sharded.flat_segments import STATE_DICT, Shard
from evenstep.replica.gradients.engine import Engine
from evenstep.world import World

ROWS = "rows"  # what the tensors of all ranks stand under


def take_apart(optimizer: optim.Optimizer, engine: Engine) -> tuple[dict[str, Any], list[Shard]]:
    """Collective: the states of all ranks' optimizers, as pieces.

    Args:
        optimizer: This rank's.
        engine: Of the model, which knows its ranks.

    Returns:
        (what `put_together` takes without its rows, equal on all ranks; this rank's row of each tensor).

    Raises:
        ConfigurationError: Ranks keep tensors of different shapes. Raised on all of them.
    """
    return _take_apart(optimizer.state_dict(), engine)


def make_equal(optimizer: optim.Optimizer, engine: Engine) -> None:
    """Collective: every optimizer keeps the mean of all ranks' tensors, and the first rank's numbers.

    Its parameter groups stay as they are.

    Args:
        optimizer: This rank's.
        engine: Of the model, which knows its ranks.

    Raises:
        ConfigurationError: Ranks keep tensors of different shapes, or what no message can carry. Raised on all of
            them; nothing was changed.
    """
    whole = optimizer.state_dict()
    state, shards = _take_apart({**whole, "param_groups": []}, engine)
    received = state["ranks"]
    means: dict[str, dict[str, Tensor]] = {}
    for shard in shards:
        number, key = map(str, shard.path[1:])
        having = [rank for rank, each in enumerate(received) if key in each["shapes"].get(number, {})]
        values = shard.values.to(engine.world.device, copy=True)
        flat = torch.view_as_real(values) if values.is_complex() else values
        if flat.is_floating_point():
            engine.transport.all_reduce(flat).wait()  # who has none gives zeros
            flat /= len(having)
        else:
            engine.transport.broadcast(flat, having[0]).wait()
        means.setdefault(number, {})[key] = values.view(shard.shape[1:])
    found: dict[int, dict[str, Any]] = {}
    for each in reversed(received):  # the first rank that has something is the last to say it
        for number, entries in each["state"].items():
            found[int(number)] = {**entries, **means.get(number, {})}
    load_exactly(optimizer, {**whole, "state": found})


def _take_apart(whole: Mapping[str, Any], engine: Engine) -> tuple[dict[str, Any], list[Shard]]:
    kept: dict[str, dict[str, Any]] = {}
    tensors: dict[str, dict[str, Tensor]] = {}
    for number, entries in whole["state"].items():
        large = {key: value for key, value in entries.items() if isinstance(value, Tensor) and value.dim() > 0}
        tensors[str(number)] = large
        kept[str(number)] = {key: value for key, value in entries.items() if key not in large}
    shapes = {n: {key: _told(value) for key, value in each.items()} for n, each in tensors.items()}
    # By the world, which exchanges also at its end, for the last save.
    given = {"state": kept, "shapes": shapes, "param_groups": whole["param_groups"]}
    received = engine.world.exchange(given, what=STATE_DICT)
    shards = []
    for (number, key), (dtype, shape) in _agreed([each["shapes"] for each in received]).items():
        values = tensors.get(number, {}).get(key)
        row = torch.zeros(shape, dtype=getattr(torch, dtype), device="cpu") if values is None else values.detach()
        begin = engine.world.rank * row.numel()
        shards.append(Shard((ROWS, number, key), (engine.world.world_size, *shape), begin, row.reshape(-1)))
    return {"ranks": received}, shards


def put_together(state: Mapping[str, Any], world: World) -> dict[str, Any]:
    """Local: a state dict for this rank's optimizer.

    Args:
        state: What `take_apart` returned, with the rows as tensors.
        world: The ranks now. As many as there were: each has its own again. Others have the mean of all ranks'
            tensors, and rank 0's numbers.
    """
    received, rows = state["ranks"], state.get(ROWS, {})
    if len(received) == world.world_size:
        mine = received[world.rank]
        found = {
            int(number): {**entries, **{key: rows[number][key][world.rank] for key in mine["shapes"][number]}}
            for number, entries in mine["state"].items()
        }
        return {"state": found, "param_groups": mine["param_groups"]}
    found = {}
    for number in sorted({int(number) for each in received for number in each["state"]}):
        having = [rank for rank, each in enumerate(received) if str(number) in each["state"]]
        first = received[having[0]]
        found[number] = {
            **first["state"][str(number)],
            **{key: _mean(rows[str(number)][key][having]) for key in first["shapes"][str(number)]},
        }
    return {"state": found, "param_groups": received[0]["param_groups"]}


def _told(value: Tensor) -> list[Any]:
    return [str(value.dtype).removeprefix("torch."), list(value.shape)]


def _agreed(shapes: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[tuple[str, str], tuple[str, tuple[int, ...]]]:
    """By number of the parameter and name, dtype and shape of what some rank keeps. Pure."""
    found: dict[tuple[str, str], tuple[str, tuple[int, ...]]] = {}
    for rank, each in enumerate(shapes):
        for number, entries in each.items():
            for key, (dtype, shape) in entries.items():
                received = dtype, tuple(shape)
                if found.setdefault((number, key), received) != received:
                    raise ConfigurationError(
                        f"{key!r} of parameter {number} is {dtype} {list(shape)} on rank {rank} and "
                        f"{found[number, key][0]} {list(found[number, key][1])} on a rank before it. Of an optimizer "
                        f"whose state grows differently on each rank no checkpoint can be made."
                    )
    return found


def _mean(rows: Tensor) -> Tensor:
    """Of [ranks, ...]; of whole numbers the first."""
    return rows.mean(0) if rows.is_floating_point() or rows.is_complex() else rows[0]
