"""Checkpoints of a run with parameter servers, in the format of `Checkpointer`. Each server writes its own part.

The servers are the ranks of their own world. A plain script with the same model and optimizer can load the servers'
checkpoints, and servers can load the script's. The queue's state is saved as a loader's state: a loader without a queue
can continue from it, and so can the queue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from evenstep.checkpoint.checkpointer import Checkpointer
from evenstep.checkpoint.format.manifest import ObjectEntry
from evenstep.checkpoint.load.layouts import Layout
from evenstep.errors import MismatchError, PeerLostError
from evenstep.optim.loading import load_exactly
from evenstep.optim.sharded.flat_segments import Shard as SavedShard
from evenstep.parameter_servers.preparation import Made, Recipe, make_optimizer
from evenstep.parameter_servers.shard import Shard
from evenstep.world import World

FIRST_LOADER = 1
_STATE_VERSION = 1  # version of a loader's state
State = dict[str, Any]


class _Divided:
    """Base class of a state that all servers save together, each its own part."""

    def state_shards(self) -> tuple[State, list[SavedShard]]:
        """(the state common to all servers, this server's part). Collective if the common state needs all servers."""
        raise NotImplementedError

    def state_dict(self) -> State:
        """The state common to all servers."""
        return self.state_shards()[0]


class _Model(_Divided):
    """The state dict of the whole model; this server saves and loads its share."""

    def __init__(self, made: Made, shard: Shard) -> None:
        self._shard = shard
        named = [*made.model.named_parameters(), *made.model.named_buffers()]
        names = {id(each): name for name, each in named}
        # Tensors by key of the state dict; tied parameters have several keys.
        state = made.model.state_dict(keep_vars=True)
        self._name = {key: names[id(each)] for key, each in state.items() if isinstance(each, Tensor)}
        self._trained = set(made.trained)
        self.untrained: dict[str, Tensor] = {}

    def state_shards(self) -> tuple[State, list[SavedShard]]:
        """See `_Divided`."""
        same = {key: self.untrained[name] for key, name in self._name.items() if name not in self._trained}
        own = self._shard.parameters
        return same, [_whole((key,), own[name]) for key, name in self._name.items() if name in own]

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load this server's parameters, and the tensors that aren't trained.

        Raises:
            MismatchError: The state belongs to another model.
        """
        others = sorted(state.keys() ^ self._name.keys())
        if others:
            raise MismatchError(f"it belongs to another model: {', '.join(others)} are only in one of the two")
        own = self._shard.parameters
        with torch.no_grad():
            for key, name in self._name.items():
                if name in own:
                    own[name].copy_(state[key])
                elif name not in self._trained:
                    self.untrained[name] = state[key]


class _Optimizer(_Divided):
    """The state dict of an optimizer over the whole model; this server saves and loads its share."""

    def __init__(self, made: Made, shard: Shard, optimizer_fn: Callable[..., Any], world: World) -> None:
        self._shard, self._world = shard, world
        whole = make_optimizer(optimizer_fn, list(made.trained.items()))
        # On device meta: shapes to compare with the saved state, without memory.
        self.param_groups = [
            {**group, "params": [each.detach().to("meta") for each in group["params"]]} for group in whole.param_groups
        ]
        self._groups = whole.state_dict()["param_groups"]
        names = {id(each): name for name, each in made.trained.items()}
        listed = [names[id(each)] for group in whole.param_groups for each in group["params"]]
        self._number = {name: number for number, name in enumerate(listed)}
        self._group = {number: group for group in self._groups for number in group["params"]}

    def _own(self) -> list[tuple[str, nn.Parameter, State]]:
        """This server's parameters, with their groups, in the order of its optimizer."""
        names = {id(each): name for name, each in self._shard.parameters.items()}
        groups = [] if self._shard.optimizer is None else self._shard.optimizer.param_groups
        return [(names[id(each)], each, group) for group in groups for each in group["params"]]

    def state_shards(self) -> tuple[State, list[SavedShard]]:
        """See `_Divided`."""
        shards, numbers, options = [], {}, {}
        for name, parameter, group in self._own():
            assert self._shard.optimizer is not None
            number = self._number[name]
            kept = self._shard.optimizer.state.get(parameter, {})
            shards += [_whole(("state", number, key), each) for key, each in kept.items() if isinstance(each, Tensor)]
            numbers[str(number)] = {key: each for key, each in kept.items() if not isinstance(each, Tensor)}
            options[str(number)] = {key: each for key, each in group.items() if key not in ("params", "param_names")}
        all_numbers: State = {}
        for theirs, of_groups in self._world.exchange([numbers, options]):
            all_numbers |= theirs
            for number, found in of_groups.items():
                self._group[int(number)].update(found)
        state = {int(number): kept for number, kept in sorted(all_numbers.items()) if kept}
        return {"state": state, "param_groups": self._groups}, shards

    def load_state_dict(self, state: State) -> None:
        """Load the state of this server's parameters, and the options of their groups."""
        optimizer = self._shard.optimizer
        if optimizer is None:
            return
        saved = {number: group for group in state["param_groups"] for number in group["params"]}
        own = self._own()
        groups = []
        for group, here in zip(optimizer.state_dict()["param_groups"], optimizer.param_groups, strict=True):
            names = [name for name, _, of in own if of is here]
            options = saved[self._number[names[0]]] if names else {}
            groups.append(group | {key: each for key, each in options.items() if key not in ("params", "param_names")})
        kept = {
            place: state["state"][self._number[name]]
            for place, (name, _, _) in enumerate(own)
            if self._number[name] in state["state"]
        }
        load_exactly(optimizer, {"state": kept, "param_groups": groups})


class _Scheduler:
    """The state of the learning-rate schedule, which is the same on all servers that have parameters."""

    def __init__(self, shard: Shard, world: World) -> None:
        self._scheduler, self._world = shard.scheduler, world

    def state_dict(self) -> State:
        """Return the first server's state. Collective.

        The first server has the largest parameter, so it has a schedule if any server has.
        """
        state: State = self._world.broadcast_object(self._scheduler and self._scheduler.state_dict())
        return state

    def load_state_dict(self, state: State) -> None:
        """Continue from a saved state."""
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state)


class _Tables(_Divided):
    """The trained rows of embedding tables, over all servers.

    Each server writes its own rows, and reads only these if the number of servers is the same.
    """

    def __init__(self, shard: Shard, server: int, num_servers: int) -> None:
        self._shard, self._server, self._num_servers = shard, server, num_servers

    def state_shards(self) -> tuple[State, list[SavedShard]]:
        """See `_Divided`."""
        own = [
            _whole((name, str(self._server), key), each)
            for name, table in self._shard.tables.items()
            for key, each in table.state_dict().items()
        ]
        return {"num_servers": self._num_servers, "names": sorted(self._shard.tables)}, own

    def state_layouts(self, saved: ObjectEntry) -> dict[str, Layout]:
        """Layouts with which each server reads only its own rows, if the number of servers is the same."""
        num_servers = saved.structure.get("num_servers") if isinstance(saved.structure, dict) else None
        if num_servers != self._num_servers:
            return {}
        return {
            name: Layout((0, *saved.tensors[name].shape[1:]), ())
            for path, name in saved.placed
            if path[1] != str(self._server)
        }

    def load_state_dict(self, state: State) -> None:
        """Load this server's rows.

        Raises:
            MismatchError: The state has other tables.
            ConfigurationError: A table or its optimizer differs.
        """
        names = sorted(self._shard.tables)
        if state["names"] != names:
            raise MismatchError(f"the saved tables of embeddings are {state['names']}, and those of the model {names}")
        for name, table in self._shard.tables.items():
            for part in state.get(name, {}).values():  # empty if no row was trained
                table.load_state_dict(part)


class QueueState:
    """The queue's state, saved as a loader's state."""

    def __init__(self) -> None:
        self.queue: State = {"passes": [], "first_epochs": {}}

    def state_dict(self) -> State:
        """The result of `DataLoader.state_dict` for the loader with the first queue."""
        return loader_state(self.queue) | {"queue": self.queue}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of a queue or of a loader."""
        self.queue = dict(state["queue"]) if "queue" in state else queue_state(state)


class Checkpoints:
    """Saves and restores the state of all servers, in the main thread. Collective, except `is_due` and `note`.

    Args:
        recipe: The script's arguments: directory, intervals, number of checkpoints, and functions.
        made: The whole model, which isn't stored here.
        shard: This server's part.
        world: The world of all servers.
    """

    def __init__(self, recipe: Recipe, made: Made, shard: Shard, world: World) -> None:
        assert recipe.checkpoint is not None
        self._directory, self._policy, self._world, self._queue = recipe.checkpoint, recipe.policy, world, QueueState()
        self._model = _Model(made, shard)
        objects: dict[str, Any] = {"model": self._model, "loader": self._queue}
        if made.trained:
            objects["optimizer"] = _Optimizer(made, shard, recipe.optimizer_fn, world)
        if made.tables:
            objects["tables"] = _Tables(shard, world.rank, world.world_size)
        if made.trained and recipe.scheduler_fn is not None:
            objects["scheduler"] = _Scheduler(shard, world)
        self._checkpointer = Checkpointer(
            self._directory, every_steps=1, every_minutes=None, keep=self._policy.keep, world=world, **objects
        )
        self._saved_at, self._last = time.monotonic(), 0

    def __repr__(self) -> str:
        return f"{self._directory} at step {self._last}"

    @property
    def stop_reason(self) -> str | None:
        """Why this process must stop; None: it needn't."""
        return self._world.stop_reason

    def is_due(self, version: int) -> bool:
        """Whether to save after this number of updates."""
        if version == self._last:
            return False
        every_steps, every_minutes = self._policy.every_steps, self._policy.every_minutes
        by_steps = every_steps is not None and version - self._last >= every_steps
        return by_steps or (every_minutes is not None and time.monotonic() - self._saved_at >= 60 * every_minutes)

    def note(self, version: int) -> None:
        """Record the decision to save at this number of updates."""
        self._saved_at, self._last = time.monotonic(), version

    def restore(self, shard: Shard, untrained: Mapping[str, Tensor]) -> tuple[State, dict[str, Tensor]]:
        """Load the newest good checkpoint, if there is one.

        Args:
            shard: This server's part.
            untrained: The model's untrained tensors, on the first server.

        Returns:
            (The queue's state, the tensors that aren't trained).
        """
        self._model.untrained = dict(untrained)
        shard.version = self._checkpointer.resume()
        self.note(shard.version)
        return self._queue.queue, self._model.untrained

    def save(
        self, shard: Shard, queue: Mapping[str, Any], untrained: Mapping[str, Tensor], *, waits: bool, failure: str
    ) -> None:
        """Save the present state of all servers.

        Collective: a server that has failed takes part, so that the others don't wait for it.

        Args:
            shard: This server's part.
            queue: State of the queue.
            untrained: The model's untrained tensors; the first server's are saved.
            waits: Return only when the save is complete, not when the state is copied.
            failure: Why this server has nothing to save; "": it has a state.

        Raises:
            CheckpointError: This save or the last one has failed.
            PeerLostError: A server has failed: nothing is saved. Raised on all servers.
        """
        self.note(shard.version)
        self._queue.queue = dict(queue)
        seen = self._world.exchange([failure, dict(untrained) if self._world.is_main else {}])
        if failures := [each for each, _ in seen if each]:
            raise PeerLostError(failures[0])
        self._model.untrained = seen[0][1]
        if shard.version == 0 or (shard.version == self._checkpointer.num_steps and not waits):
            return
        if waits:
            if shard.version != self._checkpointer.num_steps:
                self._checkpointer.num_steps = shard.version
                self._checkpointer.save()
            self._checkpointer.wait()
        else:
            self._checkpointer.num_steps = shard.version - 1
            self._checkpointer.step()

    def close(self, error: BaseException | None) -> None:
        """End the servers' world and release the directory."""
        self._checkpointer.__exit__(type(error) if error else None, error, None)
        self._world.close()


def _whole(path: tuple[str | int, ...], value: Tensor) -> SavedShard:
    """A tensor that one server has as a whole, as a shard."""
    return SavedShard(path, tuple(value.shape), 0, value.detach().reshape(-1))


def loader_state(queue: Mapping[str, Any]) -> State:
    """Convert a queue's state to the state of a loader without a queue. Pure.

    Returns:
        A state as from `DataLoader.state_dict`. "batches" has the batch to continue at, and the later batches that are
        done.
    """
    passes = [each for each in queue["passes"] if each["pass"][0] == FIRST_LOADER and each["pass"][2] == 0]
    first_epoch = int(queue["first_epochs"].get(str(FIRST_LOADER), 0))
    epoch, first, ahead, facts = first_epoch, 0, {}, None
    for each in passes:
        facts = facts or each["facts"]
        is_finished = each["num_batches"] and each["first"] >= each["num_batches"]
        if is_finished and each["pass"][1] == epoch:
            epoch += 1
    for each in passes:
        if each["pass"][1] == epoch:
            first = each["first"]
        if each["pass"][1] >= epoch and each["ahead"]:
            ahead[str(each["pass"][1])] = list(each["ahead"])
        if each["pass"][1] > epoch and each["first"]:
            done = sorted({*range(each["first"]), *each["ahead"]})
            ahead[str(each["pass"][1])] = done
    return {
        "version": _STATE_VERSION,
        "epoch": epoch,
        "position": 0,
        "first_epoch": 0,
        "data": facts,
        "batches": {"first": first, "done": ahead},
    }


def queue_state(state: Mapping[str, Any]) -> State:
    """Convert the state of a loader without a queue to a queue's state. Pure."""
    epoch, position, data = int(state["epoch"]), int(state["position"]), state.get("data") or {}
    batches = state.get("batches") or {"first": None, "done": {}}
    first = batches["first"]
    if first is None:
        size = data.get("global_batch_size")
        first = -(-position // size) if size else 0
    done = {int(number): list(each) for number, each in batches["done"].items()}
    passes = [
        {
            "pass": [FIRST_LOADER, number, 0],
            "facts": data or None,
            "num_batches": 0,
            "first": first if number == epoch else 0,
            "ahead": done.get(number, []),
        }
        for number in sorted({epoch, *done} if first or position else done)
    ]
    return {"passes": passes, "first_epochs": {str(FIRST_LOADER): epoch}}
