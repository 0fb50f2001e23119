"""Checkpoints of a run with parameter servers: those of `Checkpointer`, written by the first server.

The shares of all servers are put together to one model and one optimizer, which the first server holds for that alone:
a plain script that makes the same loads them, and the servers load its. The state of the queue is a loader's: what a
loader without a queue needs to go on, and beside it what the queue does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from evenstep.checkpoint.checkpointer import Checkpointer
from evenstep.errors import EXIT_PREEMPTED
from evenstep.parameter_servers.embeddings.tables import join_states, select_state
from evenstep.parameter_servers.layout import Division
from evenstep.parameter_servers.server.shard import Share
from evenstep.world import World

FIRST_LOADER = 1
_STATE_VERSION = 1  # of a loader's state


@dataclass(frozen=True)
class CheckpointOptions:
    """Where and when to save: see `Checkpointer`."""

    directory: str
    every_steps: int | None
    every_minutes: float | None
    keep: int


@dataclass(frozen=True)
class Restored:
    """What a run goes on from.

    Attributes:
        shares: Of each server.
        queue: State of the queue.
        version: Number of updates.
    """

    shares: Sequence[Share]
    queue: Mapping[str, Any]
    version: int


class QueueState:
    """The state of the queue, as a loader's."""

    def __init__(self) -> None:
        self.queue: dict[str, Any] = {"passes": [], "first_epochs": {}}

    def state_dict(self) -> dict[str, Any]:
        """As `DataLoader.state_dict`, of the loader that made the first queue."""
        return loader_state(self.queue) | {"queue": self.queue}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a queue's state, or a loader's."""
        self.queue = dict(state["queue"]) if "queue" in state else queue_state(state)


def loader_state(queue: Mapping[str, Any]) -> dict[str, Any]:
    """What a loader without a queue needs to go on where a queue was. Pure.

    Returns:
        As of `DataLoader.state_dict`; its "batches" say where the epoch goes on, and which batches behind it are done.
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


def queue_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a queue needs to go on where a loader without one was. Pure."""
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
            "facts": None,
            "num_batches": 0,
            "first": first if number == epoch else 0,
            "ahead": done.get(number, []),
        }
        for number in sorted({epoch, *done})
    ]
    return {"passes": passes, "first_epochs": {str(FIRST_LOADER): epoch}}


class TableRows:
    """The trained rows of all servers' tables of embeddings, as a state that is saved.

    Attributes:
        state: See `Table.state_dict`, by table.
    """

    def __init__(self) -> None:
        self.state: dict[str, dict[str, Tensor]] = {}

    def state_dict(self) -> dict[str, Any]:
        """What is saved."""
        return self.state

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take what was saved."""
        self.state = {name: dict(table) for name, table in state.items()}


class Checkpoints:
    """Saves and restores the state of all servers. For the main thread of the first one.

    Args:
        options: Where, and when.
        model: A whole one, of which nothing else is made.
        names: Of its trained parameters, in the order of `division`.
        division: Which server has which of them.
        optimizer_fn: The user's.
        scheduler_fn: The user's; None: there is none.
        has_tables: The model has tables of embeddings.
    """

    def __init__(
        self,
        options: CheckpointOptions,
        model: nn.Module,
        names: Sequence[str],
        division: Division,
        optimizer_fn: Callable[..., Optimizer],
        scheduler_fn: Callable[[Optimizer], LRScheduler] | None,
        *,
        has_tables: bool = False,
    ) -> None:
        self._options, self._model, self._names, self._division = options, model, names, division
        self._parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
        # torch has no optimizer without parameters; a model of tables alone needs none.
        trained = list(self._parameters.items())
        self._optimizer = optimizer_fn(trained) if trained else torch.optim.SGD([torch.empty(0, device="cpu")], lr=0.0)
        self._scheduler = None if scheduler_fn is None else scheduler_fn(self._optimizer)
        self._loader = QueueState()
        self._tables = TableRows()
        self._world = World.alone(device="cpu")
        objects: dict[str, Any] = {"model": model, "loader": self._loader}
        if trained:
            objects["optimizer"] = self._optimizer
        if has_tables:
            objects["tables"] = self._tables
        if self._scheduler is not None:
            objects["scheduler"] = self._scheduler
        self._checkpointer = Checkpointer(
            options.directory,
            every_steps=None,
            every_minutes=None,
            keep=options.keep,
            asynchronous=False,
            world=self._world,
            **objects,
        )
        self._saved_at, self._last = time.monotonic(), 0

    def __repr__(self) -> str:
        return f"<Checkpoints {self._options.directory}, last of step {self._last}>"

    @property
    def has_buffers(self) -> bool:
        """Whether the model has module buffers that are saved."""
        return any(True for _ in self._model.buffers())

    @property
    def stop_reason(self) -> str | None:
        """Why this process is to stop; None: it isn't."""
        return self._world.stop_reason

    def stop(self) -> None:
        """End this process after a request to stop."""
        raise SystemExit(EXIT_PREEMPTED)

    def is_due(self, version: int) -> bool:
        """Whether to save after so many updates."""
        if version == self._last:
            return False
        every_steps, every_minutes = self._options.every_steps, self._options.every_minutes
        by_steps = every_steps is not None and version - self._last >= every_steps
        return by_steps or (every_minutes is not None and time.monotonic() - self._saved_at >= 60 * every_minutes)

    def restore(self) -> Restored | None:
        """The newest good checkpoint; None: there is none."""
        version = self._checkpointer.resume()
        self._last, self._saved_at = version, time.monotonic()
        if not version:
            return None
        groups = {
            id(parameter): {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for group in self._optimizer.param_groups
            for parameter in group["params"]
        }
        shares = []
        for server, indices in enumerate(self._division):
            names = [self._names[index] for index in indices]
            shares.append(
                Share(
                    {name: self._parameters[name].detach().clone() for name in names},
                    {name: dict(self._optimizer.state.get(self._parameters[name], {})) for name in names},
                    {name: groups[id(self._parameters[name])] for name in names},
                    None if self._scheduler is None else self._scheduler.state_dict(),
                    version,
                    select_state(self._tables.state, server, len(self._division)),
                )
            )
        return Restored(shares, self._loader.queue, version)

    def untrained(self) -> dict[str, Tensor]:
        """Frozen parameters and module buffers, by name, as they were restored or made."""
        frozen = {name: each.detach() for name, each in self._model.named_parameters() if not each.requires_grad}
        return {name: each.clone() for name, each in (frozen | dict(self._model.named_buffers())).items()}

    def save(self, shares: Sequence[Share], queue: Mapping[str, Any], buffers: Mapping[str, Tensor]) -> None:
        """Save what all servers had at one moment.

        Args:
            shares: Of each server.
            queue: State of the queue.
            buffers: Module buffers, by name; those that are missing stay as they are.
        """
        with torch.no_grad():
            for name, each in self._model.named_buffers():
                if name in buffers:
                    each.copy_(buffers[name])
            for share in shares:
                for name, value in share.parameters.items():
                    self._parameters[name].copy_(value)
        states = {name: state for share in shares for name, state in share.state.items()}
        options = {name: group for share in shares for name, group in share.groups.items()}
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        for group in self._optimizer.param_groups if names else ():
            for parameter in group["params"]:
                name = names[id(parameter)]
                group.update(options[name])
                if states[name]:
                    self._optimizer.state[parameter] = dict(states[name])
        scheduler = next((share.scheduler for share in shares if share.scheduler is not None), None)
        if self._scheduler is not None and scheduler is not None:
            self._scheduler.load_state_dict(dict(scheduler))
        self._loader.queue = dict(queue)
        self._tables.state = join_states([share.tables for share in shares])
        (version,) = {share.version for share in shares}
        self._checkpointer.num_steps = version
        if version:
            self._checkpointer.save()
        self._last, self._saved_at = version, time.monotonic()

    def close(self) -> None:
        """Release the directory."""
        self._checkpointer.close()
        self._world.close()
