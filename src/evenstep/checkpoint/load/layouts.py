"""Where what is read goes: which elements of a saved tensor this rank reads, and into which memory."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from evenstep.checkpoint.format.manifest import ObjectEntry, Part
from evenstep.checkpoint.format.regions import Region, Shape, common, held_regions, whole
from evenstep.checkpoint.format.tree import flatten, shown, unwrapped
from evenstep.errors import ConfigurationError
from evenstep.ground.compat.torch_tensors import is_dtensor, local_part, wrapped_like

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Layout:
    """The place of a tensor's elements in this rank's memory.

    Attributes:
        shape: Of the memory.
        regions: What of the whole tensor lies in it, and where.
        like: A DTensor that has its mesh and, if it has its shape, its placements; None: a plain tensor.
    """

    shape: Shape
    regions: tuple[Region, ...]
    like: DTensor | None = None

    def finished(self, memory: Tensor, shape: Shape) -> Tensor:
        """The tensor of an object's state, once `memory` is read. Nothing is communicated."""
        return memory if self.like is None else wrapped_like(self.like, memory, shape)


@dataclass(frozen=True)
class Copy:
    """Elements of a part of a saved tensor, and their place in memory.

    Attributes:
        start: First of these elements in the part.
        shape: They are those of a box of this shape, at `start`, ...
        offsets: ... of which the box from here ...
        sizes: ... of these lengths is copied ...
        at: ... to this index of the memory.
    """

    start: int
    shape: Shape
    offsets: Shape
    sizes: Shape
    at: Shape

    def source(self, values: Tensor) -> Tensor:
        """The elements in the part's values, [numel]."""
        return values[self.start : self.start + math.prod(self.shape)].view(self.shape)[
            _index(self.offsets, self.sizes)
        ]

    def target(self, memory: Tensor) -> Tensor:
        """Where they belong."""
        return memory[_index(self.at, self.sizes)]


def plain(shape: Shape) -> Layout:
    """Of a tensor that this rank has as a whole."""
    return Layout(shape, (whole(shape),))


def plan_copies(part: Part, shape: Shape, layout: Layout) -> list[Copy]:
    """What is to be copied from a part of a tensor of `shape`. Pure."""
    copies = []
    for (offsets, sizes, place), region in itertools.product(part.boxes(shape), layout.regions):
        shared = common((offsets, sizes), (region.offsets, region.sizes))
        if shared is not None:
            inside = tuple(a - b for a, b in zip(shared[0], offsets, strict=True))
            at = tuple(a - b + c for a, b, c in zip(shared[0], region.offsets, region.at, strict=True))
            copies.append(Copy(place, sizes, inside, shared[1], at))
    return copies


def find_layouts(owner: str, saved: ObjectEntry, target: Any) -> dict[str, Layout]:
    """The layouts of those tensors that are DTensors in an object of this run, or those that it says itself.

    An optimizer that has made no step has no state to look at: what it keeps in a parameter's shape is divided as the
    parameter is, and other tensors of a divided parameter are the same on all ranks of its mesh.

    Args:
        owner: Name of the object, for messages.
        saved: Its entry in the manifest.
        target: The object of this run.

    Raises:
        ConfigurationError: It can't be told which elements of a DTensor this rank has.
    """
    target = unwrapped(target)
    if hasattr(target, "state_layouts"):
        layouts: dict[str, Layout] = target.state_layouts(saved)
        return layouts
    if hasattr(target, "state_shards"):
        return {}
    found: dict[str, Layout] = {}
    if isinstance(target, nn.Module):
        known = {key: value for key, value in target.state_dict().items() if is_dtensor(value)}
    elif isinstance(getattr(target, "param_groups", None), list):
        known = {}
        parameters = [parameter for group in target.param_groups for parameter in group["params"]]
        for name, entry in saved.tensors.items():
            first, _, rest = name.partition(".")
            index = rest.partition(".")[0]
            if first == "state" and index.isdigit() and int(index) < len(parameters) and entry.shape:
                parameter = parameters[int(index)]
                if is_dtensor(parameter):
                    known[name] = parameter
    else:
        state = target if isinstance(target, dict) else target.state_dict()
        known = {name: value for name, value in flatten(state, "")[1].items() if is_dtensor(value)}
    for name, value in known.items():
        key = saved.aliases.get(name, name)
        if key not in saved.tensors:
            continue
        shape = saved.tensors[key].shape
        if tuple(value.shape) == shape:
            try:
                regions = tuple(held_regions(value))
            except ValueError as error:
                message = f"{shown((owner, name))} is a DTensor that can't be loaded into: {error}."
                raise ConfigurationError(message) from None
            found[key] = Layout(tuple(local_part(value).shape), regions, value)
        else:
            found[key] = Layout(shape, (whole(shape),), value)
    return found


def _index(offsets: Shape, sizes: Shape) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
