"""Plans which elements of a saved tensor this rank reads, and to which memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from evenstep.checkpoint.format.manifest import ObjectEntry, Part
from evenstep.checkpoint.format.regions import Region, Shape, common, held_regions, whole
from evenstep.checkpoint.format.tree import flatten, shown, unwrapped
from evenstep.errors import ConfigurationError
from evenstep.ground.compat.torch_tensors import is_dtensor, local_part, wrapped_like
from evenstep.optim.local_sgd.local_sgd import LocalSGD
from evenstep.optim.local_sgd.state import ROWS

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Layout:
    """The place of a tensor's elements in this rank's memory.

    Attributes:
        shape: The memory's shape.
        regions: The regions of the whole tensor that the memory holds, with their places in it.
        like: A DTensor with the same mesh and, if it has the same shape, the same placements; None: a plain tensor.
    """

    shape: Shape
    regions: tuple[Region, ...]
    like: DTensor | None = None

    def finished(self, memory: Tensor, shape: Shape) -> Tensor:
        """Make the tensor of an object's state from its filled memory. Without communication."""
        return memory if self.like is None else wrapped_like(self.like, memory, shape)


@dataclass(frozen=True)
class Copy:
    """A copy of elements from a part of a saved tensor to this rank's memory.

    Attributes:
        start: Place of the source box's first element in the part.
        shape: Shape of the source box.
        offsets: First index, inside the source box, of the box to copy.
        sizes: Lengths of the box to copy.
        at: First index in the memory.
    """

    start: int
    shape: Shape
    offsets: Shape
    sizes: Shape
    at: Shape

    def source(self, values: Tensor) -> Tensor:
        """View the elements to copy in the part's values, [numel]."""
        return values[self.start : self.start + math.prod(self.shape)].view(self.shape)[
            _index(self.offsets, self.sizes)
        ]

    def target(self, memory: Tensor) -> Tensor:
        """View the place in the memory to which the elements are copied."""
        return memory[_index(self.at, self.sizes)]


def plain(shape: Shape) -> Layout:
    """The layout of a tensor that isn't divided."""
    return Layout(shape, (whole(shape),))


def plan_copies(part: Part, shape: Shape, layout: Layout) -> list[Copy]:
    """The copies to make from a part of a tensor of `shape`. Pure."""
    copies = []
    for (offsets, sizes, place), region in itertools.product(part.boxes(shape), layout.regions):
        shared = common((offsets, sizes), (region.offsets, region.sizes))
        if shared is not None:
            inside = tuple(a - b for a, b in zip(shared[0], offsets, strict=True))
            at = tuple(a - b + c for a, b, c in zip(shared[0], region.offsets, region.at, strict=True))
            copies.append(Copy(place, sizes, inside, shared[1], at))
    return copies


def find_layouts(owner: str, saved: ObjectEntry, target: Any) -> dict[str, Layout]:
    """The layouts of tensors that are DTensors in an object of this run, or for which the object returns a layout.

    An optimizer that has made no step has no state yet. State in a parameter's shape is then divided as the parameter
    is, and other state of a divided parameter is the same on all ranks of its mesh.

    Args:
        owner: Name of the object, for messages.
        saved: The object's entry in the manifest.
        target: The object of this run.

    Raises:
        ConfigurationError: The elements of a DTensor on this rank can't be determined.
    """
    target = unwrapped(target)
    if hasattr(target, "state_layouts"):
        layouts: dict[str, Layout] = target.state_layouts(saved)
        return layouts
    found: dict[str, Layout] = {}
    if isinstance(target, LocalSGD):
        found = _row_layouts(owner, saved, target)
        known = {} if target.outer is None else _divided_as_parameters(saved, "outer.state.", target.outer)
    elif hasattr(target, "state_shards"):
        return {}
    elif isinstance(target, nn.Module):
        known = {key: value for key, value in target.state_dict().items() if is_dtensor(value)}
    elif isinstance(getattr(target, "param_groups", None), list):
        known = _divided_as_parameters(saved, "state.", target)
    else:
        state = target if isinstance(target, dict) else target.state_dict()
        known = {name: value for name, value in flatten(state, "")[1].items() if is_dtensor(value)}
    for name, value in known.items():
        key = saved.aliases.get(name, name)
        if key not in saved.tensors:
            continue
        shape = saved.tensors[key].shape
        if tuple(value.shape) == shape:
            found[key] = Layout(tuple(local_part(value).shape), _regions_of(owner, name, value), value)
        else:
            found[key] = Layout(shape, (whole(shape),), value)
    return found


def _parameters_in(saved: ObjectEntry, prefix: str, optimizer: Any) -> Iterator[tuple[str, Shape, Tensor]]:
    """(name, shape, parameter) of the saved state of an optimizer's parameters, without single numbers."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for name, entry in saved.tensors.items():
        index = name.removeprefix(prefix).partition(".")[0]
        if name.startswith(prefix) and index.isdecimal() and int(index) < len(parameters) and entry.shape:
            yield name, entry.shape, parameters[int(index)]


def _divided_as_parameters(saved: ObjectEntry, prefix: str, optimizer: Any) -> dict[str, DTensor]:
    return {name: each for name, _, each in _parameters_in(saved, prefix, optimizer) if is_dtensor(each)}


def _regions_of(owner: str, name: str, value: DTensor) -> tuple[Region, ...]:
    try:
        return tuple(held_regions(value))
    except ValueError as error:
        message = f"{shown((owner, name))} is a DTensor that can't be loaded into: {error}."
        raise ConfigurationError(message) from None


def _row_layouts(owner: str, saved: ObjectEntry, local: LocalSGD) -> dict[str, Layout]:
    """Layouts of LocalSGD's state: the row of this rank's replica, or all rows if the number of replicas differs."""
    found = {}
    for name, (num_rows, *shape), parameter in _parameters_in(saved, f"{ROWS}.", local.optimizer):
        regions: tuple[Region, ...] = (whole(tuple(shape)),)
        held = tuple(shape)
        if is_dtensor(parameter) and tuple(parameter.shape) == held:
            regions, held = _regions_of(owner, name, parameter), tuple(local_part(parameter).shape)
        first, count = (local.peers.number, 1) if num_rows == local.peers.transport.world_size else (0, num_rows)
        rows = [Region((first, *each.offsets), (count, *each.sizes), (0, *each.at)) for each in regions]
        found[name] = Layout((count, *held), tuple(rows))
    return found


def _index(offsets: Shape, sizes: Shape) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
