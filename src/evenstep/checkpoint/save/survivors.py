"""A survivor of a lost rank saves the step that all had finished, and the ranks that are started next go on from there.

Every replica holds all that a checkpoint holds, but for the random streams of the other ranks. So nothing is saved
while nothing happens; a rank remembers little at each step, and writes a checkpoint only when it has lost another one.
Of several nodes each saves, with the streams of its own ranks; the next ranks put these together (`load.hosts`).
The idea is that of just-in-time checkpointing (Gupta et al., EuroSys 2024).

[Note: the state at a step]

An exception that says that a peer is lost comes out of some collective in the middle of the next step. What a
checkpoint of the last step would have held is then partly gone, or was never here:

    parameters, optimizer     as at the step until an optimizer steps; a change is seen, and nothing is saved then
    module buffers            changed by the forward pass since: copied at each step, put back
    learning rates, ...       of the optimizer's groups: copied at each step, put back
    schedulers, loader, ...   the same, with all that is small; of large states (an average of the parameters) a change
                              of a tensor is seen
    own random streams        drawn from since: kept in a page (`stream_page`) at each step
    those of lost ranks       in their pages, which outlive them

A rank may die when the others have got all of its gradients: they step, and it has not. So a page is written before the
last exchange of a step, too, as that of the step to come.

Survivors may differ by one step, where the lost rank's last signal has reached one of them only. Each saves its step,
and the newest counts: one that has stepped had all gradients. Of the survivors of one step the first that gets a lock
saves; the kernel gives that to the next one if it dies over it.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from evenstep import environment
from evenstep.checkpoint.format.random_streams import as_data, forget_streams, leave_streams
from evenstep.checkpoint.format.tree import flatten, unwrapped
from evenstep.checkpoint.save.commit import Saver
from evenstep.checkpoint.save.snapshot import InPlace, models_among
from evenstep.checkpoint.save.stream_page import StreamPage, read_streams
from evenstep.checkpoint.storage.directory import put_in_place, steps_in, sweep
from evenstep.checkpoint.storage.storage import LocalDirectory
from evenstep.compat.torch_pytree import tree_map
from evenstep.compat.torch_tensors import is_dtensor
from evenstep.errors import ConfigurationError
from evenstep.health import recovery_files
from evenstep.world import World

_SMALL_BYTES = 64 << 10


@dataclass(frozen=True)
class _Watched:
    """What large objects consist of at a step.

    Attributes:
        tensors: Kept, so that no other tensor comes to lie where one of them lay.
        versions: Where each lies, and how often it has been changed in place.
        structures: All but the tensors, by name.
    """

    tensors: list[Tensor]
    versions: list[tuple[int, int]]
    structures: list[Any]

    def is_as(self, other: _Watched) -> bool:
        """Whether nothing has changed."""
        return (self.versions, self.structures) == (other.versions, other.structures)


@dataclass(frozen=True)
class _Step:
    """What is remembered of the last step.

    Attributes:
        number: Optimizer steps so far.
        metrics: To be stored with a checkpoint of it.
        versions: Where each parameter lies, and how often it has been changed in place.
        states: Of the small objects, by name.
        watched: The same of each tensor of the large ones, and what else they consist of.
        groups: The settings of each optimizer's groups, by its name.
    """

    number: int
    metrics: dict[str, float]
    versions: list[tuple[int, int]]
    states: dict[str, Any]
    watched: _Watched
    groups: dict[str, list[dict[str, Any]]]


class LastStep:
    """What this rank needs to save the last finished step when it has lost another rank.

    Collective: every rank makes it.

    Args:
        objects: What the `Checkpointer` saves, by name.
        world: The ranks.
        where: Its directory, which tells its files from those of another `Checkpointer`.

    Attributes:
        storage: Where survivors save, and the next ranks find it.
        run_directory: Of the launcher on this node.
    """

    def __init__(self, objects: Mapping[str, Any], world: World, where: str) -> None:
        placement = environment.current_placement()
        assert placement.run_directory is not None
        self.run_directory, self._attempt = placement.run_directory, placement.restart_count
        self._key = recovery_files.key_of(where)
        self._objects, self._world = objects, world
        directory = recovery_files.memory_directory(self.run_directory, self._key)
        self.storage = LocalDirectory(directory, durable=False)
        self.storage.where = "memory"
        nodes = [world.node_rank] * world.world_size if world.num_nodes == 1 else world.exchange(world.node_rank)
        self._near = [node == world.node_rank for node in nodes]  # by rank: whether it is on this node
        self._page = StreamPage(self._streams_file(world.rank))
        modules = {id(each): each for each in map(unwrapped, objects.values()) if isinstance(each, nn.Module)}.values()
        self._parameters = [p for module in modules for p in module.parameters()]
        parts = {id(part): part for module in modules for part in module.modules()}.values()
        self._buffer_places = [(part, name) for part in parts for name, b in part._buffers.items() if b is not None]
        self._buffers = self._current_buffers()
        self._copies = [b.detach().clone() for b in self._buffers]
        self._optimizers = {
            name: target
            for name, each in objects.items()
            if isinstance(target := unwrapped(each), torch.optim.Optimizer)
        }
        sizes = {
            name: _state_bytes(name, each)
            for name, each in objects.items()
            if name not in self._optimizers and not isinstance(unwrapped(each), nn.Module)
        }
        self._small = [name for name, size in sizes.items() if size is not None and size <= _SMALL_BYTES]
        self._large = [name for name, size in sizes.items() if size is not None and size > _SMALL_BYTES]
        self._models = list(models_among(objects))
        self._step: _Step | None = None
        self._has_stepped = False
        self._hook = register_optimizer_step_pre_hook(self._optimizer_steps)
        for model in self._models:
            model.engine.before_exchange.append(self._exchange_begins)
        if world.virtual_ranks is not None and world.is_main:
            recovery_files.note_virtual_ranks(self.run_directory, world.virtual_ranks.num_virtual_ranks)

    # ------------------------------------------------------------------ while nothing happens

    def remember(self, number: int, metrics: Mapping[str, float]) -> None:
        """A step is finished: its state is that of the objects now. Local.

        Args:
            number: Optimizer steps so far.
            metrics: To be stored with a checkpoint of it.
        """
        if self._world.world_size == 1:
            return  # nobody is left to lose
        if self._step is None:
            self._note_kept(None)
        self._page.write(number, has_diverged=self._world.draws_its_own)
        self._buffers = self._current_buffers()
        if any(
            kept.shape != b.shape or kept.dtype != b.dtype for kept, b in zip(self._copies, self._buffers, strict=True)
        ):
            self._copies = [b.detach().clone() for b in self._buffers]
        elif self._buffers:
            torch._foreach_copy_(self._copies, self._buffers)
        states = {name: _copied(unwrapped(self._objects[name]).state_dict()) for name in self._small}
        groups = {
            name: [{key: value for key, value in group.items() if key != "params"} for group in each.param_groups]
            for name, each in self._optimizers.items()
        }
        self._step = _Step(number, dict(metrics), self._versions(), states, self._watched(), groups)
        self._has_stepped = False

    def take_metrics(self, metrics: Mapping[str, float]) -> None:
        """What was measured at the step that is remembered, which ranks agree on after it. Local."""
        if self._step is not None:
            self._step = replace(self._step, metrics=dict(metrics))

    def _exchange_begins(self) -> None:
        """The gradients of the next step are there, and nothing of them has been sent for the last time."""
        if self._step is not None:
            self._page.write(self._step.number + 1, has_diverged=self._world.draws_its_own)

    def _optimizer_steps(self, *_: object) -> None:
        self._has_stepped = True

    def _current_buffers(self) -> list[Tensor]:
        """Those that the modules have now: a forward pass may put another tensor in a buffer's place."""
        found = (part._buffers[name] for part, name in self._buffer_places)
        return [torch.empty(0, device="cpu") if each is None else each for each in found]

    def _versions(self) -> list[tuple[int, int]]:
        return list(map(_version, self._parameters))

    def _watched(self) -> _Watched:
        parts = [flatten(unwrapped(self._objects[name]).state_dict(), name) for name in self._large]
        tensors = [tensor for _, named in parts for tensor in named.values()]
        return _Watched(tensors, list(map(_version, tensors)), [copy.deepcopy(structure) for structure, _ in parts])

    def forget(self) -> None:
        """The `Checkpointer` has ended, and the run goes on without it."""
        recovery_files.forget_kept(self.run_directory, self._world.rank, self._attempt, self._key)

    def close(self) -> None:
        """No more steps are remembered."""
        self._hook.remove()
        for model in self._models:
            model.engine.before_exchange.remove(self._exchange_begins)
        self._page.close()

    # ------------------------------------------------------------------ after a loss

    def save(self) -> None:
        """Save the last finished step, if no other survivor has, or leave a note why that isn't possible. Local.

        The objects are of no use to training after it.
        """
        if self._step is None:
            return
        try:
            problem = self._try_to_save(self._step)
        except Exception as error:  # the loss is what ends this rank, whatever an object does here
            problem = f"{type(error).__name__}: {error}"
        if problem is not None:
            recovery_files.note_unsaved(self.run_directory, self._world.rank, self._attempt, problem)

    def _try_to_save(self, step: _Step) -> str | None:
        if self._has_stepped or self._versions() != step.versions:
            return f"the parameters have changed since step {step.number} was finished"
        if not self._watched().is_as(step.watched):
            return f"a large object ({', '.join(self._large)}) has changed since step {step.number} was finished"
        if not all(model.training for model in self._models):
            return "the model was being evaluated"
        streams = self._streams_of_node(step.number)
        if isinstance(streams, int):
            return f"rank {streams} has not left its random streams of step {step.number}"
        self._put_back(step)
        self._save_once(step, streams)
        return None

    def save_at_end(self) -> None:
        """Save the last step, as this rank's part in the run ends and it won't see whether another is lost. Local.

        Such as one that dies while it writes its part of the last checkpoint.
        """
        if self._step is None:
            return
        with contextlib.suppress(Exception):  # a second chance for a save that is made anyway
            streams = self._streams_of_node(self._step.number)
            if not isinstance(streams, int):
                self._save_once(self._step, streams)

    def _streams_of_node(self, step: int) -> list[Mapping[str, Any] | None] | int:
        """The random streams of this node's ranks at a step, by rank of all; or a rank that has not left them."""
        streams: list[Mapping[str, Any] | None] = []
        for rank, is_near in enumerate(self._near):
            if not is_near:
                streams.append(None)
                continue
            found = read_streams(self._streams_file(rank), step)
            if found is None:
                return rank
            streams.append(as_data(found[0], has_diverged=found[1], data_rank=rank))
        return streams

    def _put_back(self, step: _Step) -> None:
        with torch.no_grad():
            for (part, name), buffer, saved in zip(self._buffer_places, self._buffers, self._copies, strict=True):
                if part._buffers[name] is not None:
                    buffer.copy_(saved)
                    part._buffers[name] = buffer
        for name, state in step.states.items():
            unwrapped(self._objects[name]).load_state_dict(state)
        for name, groups in step.groups.items():
            for group, before in zip(self._optimizers[name].param_groups, groups, strict=True):
                group.update(before)

    def _save_once(self, step: _Step, streams: Sequence[Mapping[str, Any] | None]) -> None:
        self.storage.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._world.num_nodes > 1:
            forget_streams(self.storage.root, before=step.number)
            for number in (step.number, step.number + 1):  # survivors on other nodes may be one ahead
                of_node = self._streams_of_node(number)
                if not isinstance(of_node, int):
                    leave_streams(self.storage.root, number, of_node)
        lock = os.open(self.storage.root / f"lock-{step.number}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if step.number in steps_in(self.storage):
                self._note_kept(step.number)
                return
            saver = Saver(
                self.storage,
                World.alone(device="cpu"),
                self._objects,
                lambda folder, manifest: put_in_place(self.storage, folder, manifest.step),
                staging=InPlace(),  # nothing changes them any more
            )
            saver.open()
            saver.start(step.number, step.metrics, streams=streams)
            problem, _ = saver.finish_alone()
            if problem is not None:
                raise OSError(problem)
            self._note_kept(step.number)
        finally:
            os.close(lock)

    def _note_kept(self, step: int | None) -> None:
        recovery_files.note_kept(self.run_directory, self._world.rank, self._attempt, self._key, step)

    def _streams_file(self, rank: int) -> Path:
        return recovery_files.streams_file(self.run_directory, rank, self._attempt, self._key)


def _version(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor lies, and how often it has been changed in place."""
    return tensor.data_ptr(), tensor._version


def _copied(state: Any) -> Any:
    """A copy of an object's state; of tensors without what they were computed from."""
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf), state)


def why_not(objects: Mapping[str, Any], world: World) -> str | None:
    """Why a lost rank's state can't be had from the others; None if it can."""
    if world.device.type != "cpu":
        return f"the ranks compute on {world.device.type}"
    if world.mesh is not None or world._of_groups:
        return "ranks of this world train in groups, or on a mesh"
    for name, each in objects.items():
        target = unwrapped(each)
        is_divided = isinstance(target, nn.Module) and any(map(is_dtensor, target.state_dict().values()))
        if is_divided or hasattr(target, "state_shards"):
            return f"{name} ({type(target).__name__}) has a part of its state on one rank only"
    if any(model.engine.ending.owner is not None for model in models_among(objects)):
        return "a model is trained with local steps, so the replicas differ"
    return None


def _state_bytes(name: str, value: Any) -> int | None:
    """Of the tensors in an object's state; None if it can't be saved, which the first save says."""
    try:
        _, tensors = flatten(unwrapped(value).state_dict(), name)
    except ConfigurationError:
        return None
    return sum(tensor.nbytes for tensor in tensors.values())


def swept(storage: LocalDirectory) -> list[int]:
    """The steps that survivors on this node have saved; what one has left that died over it is removed. One rank."""
    sweep(storage)
    return steps_in(storage)
