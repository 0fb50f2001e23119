"""Argument consistency: the arguments of a step are compared between ranks. A wrong argument is an error on all ranks.

[Note: a wrong argument on one rank]

A rank with a wrong argument raises and makes no further call, and the others would wait for it until a deadline. There
are three ways to inform the others:

- A function that all ranks call once compares arguments before it begins
  (`ground.coordination.agreement.validate_on_all_ranks`).
- A function with a collective sends two more numbers with it (`Given`), made from a checksum of the arguments or of the
  problem. If checksums differ, all ranks see this, exchange their arguments, and raise the same error.
- Otherwise the other ranks get the reason in their next call (`abort_peers`), if shared memory carries it.

If a function has no collective, valid arguments are recorded (`note`), and the header of the next window compares them:
see `replica.monitors.checks`.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim

from evenstep import world as worlds
from evenstep.errors import ConfigurationError, EvenstepError, MismatchError
from evenstep.ground.coordination.agreement import judge
from evenstep.replica.gradients.engine import Engine
from evenstep.replica.monitors.checks import checksum, find_difference, plain
from evenstep.replica.monitors.digests import contrast
from evenstep.replica.wrapper.distributed import DistributedDataParallel, wrapped_models
from evenstep.transport.core.object_collectives import exchange
from evenstep.transport.core.transport import Transport

_ids_of: weakref.WeakKeyDictionary[Engine, frozenset[int]] = weakref.WeakKeyDictionary()


def model_of(parameters: Iterable[Any]) -> DistributedDataParallel | None:
    """The first wrapped model over several ranks that has one of these parameters, or None."""
    models = [model for model in wrapped_models() if model.world.world_size > 1]
    if not models:
        return None
    engines = [model.engine for model in models]
    known = [
        _ids_of.get(engine) or _ids_of.setdefault(engine, frozenset(map(id, engine.parameters))) for engine in engines
    ]
    for parameter in parameters:
        for model, ids in zip(models, known, strict=True):
            if id(parameter) in ids:
                return model
    return None


def note(model: DistributedDataParallel | None, who: str, given: Sequence[tuple[str, Any]]) -> None:
    """Record a call's arguments, which the ranks compare at the end of the next window.

    Args:
        model: The wrapped model whose parameters the call uses, or None.
        who: The function that was called.
        given: Arguments that must be equal on all ranks, by name: plain values.
    """
    if model is not None and (model.monitors.options.has_optimizers or model.monitors.are_replicas_alike()):
        model.monitors.options.note(who, given)


@contextlib.contextmanager
def abort_peers(about: Any) -> Iterator[None]:
    """Context that sends an error raised inside to the other ranks, which raise it in their next call.

    Nothing happens if all ranks raise. With only Gloo or NCCL the others wait until this rank has ended.

    Args:
        about: A wrapped model, parameters, or an optimizer over them; nothing is sent if they belong to no model over
            several ranks. Any other value is itself a wrong argument: the error is sent in all transports in which
            ranks that have passed a right one may wait.
    """
    try:
        yield
    except EvenstepError as error:
        for transport in _transports_of(about):
            refuse = getattr(transport, "refuse", None)
            if refuse is not None:
                refuse(str(error))
        raise


def _transports_of(about: Any) -> list[Transport]:
    """The transports in which other ranks may wait: the model's transport, and the control transport."""
    parameters = parameters_of(about)
    if parameters is not None:
        model = model_of(parameters)
        return [] if model is None else [model.engine.transport, model.world.control]
    world = worlds.initialised()
    return [*(model.engine.transport for model in wrapped_models()), *([] if world is None else [world.control])]


def parameters_of(about: Any) -> list[Tensor] | None:
    """The parameters of an optimizer or a module, a tensor, or several tensors; None for other values.

    Reads no iterator.
    """
    if isinstance(about, optim.Optimizer):
        return [parameter for group in about.param_groups for parameter in group["params"]]
    if isinstance(about, nn.Module):
        return list(about.parameters())
    given = [about] if isinstance(about, Tensor) or not isinstance(about, Iterable) else about
    if isinstance(given, Iterator) or not all(isinstance(each, Tensor) for each in given):
        return None
    return list(given)


@dataclass(frozen=True)
class Given:
    """The arguments that one rank passes to a collective.

    Attributes:
        who: The function's name.
        facts: Arguments that must be equal on all ranks, by name: plain values.
        problem: The error in the arguments, or None.
        changes: Whether the call changes something. If not, and if it needs no other rank, a rank may make it alone.
    """

    who: str
    facts: tuple[tuple[str, Any], ...]
    problem: ConfigurationError | None = None
    changes: bool = True

    def numbers(self, rank: int, num_ranks: int, *, is_max: bool) -> Tensor:
        """Return the numbers to send, [2], float64, read-only: for a sum over ranks, or a max."""
        return _numbers(self.facts if self.problem is None else str(self.problem), rank, num_ranks, is_max)

    def judge(self, transport: Transport, numbers: Sequence[float]) -> None:
        """Raise if arguments differ. Collective if they do; all ranks see whether they do.

        Args:
            transport: The transport that carried the numbers, on the CPU.
            numbers: The sum or max over ranks of each rank's `numbers`, [2].

        Raises:
            ConfigurationError: An argument is wrong on some rank. Raised on all ranks, with the same text.
            MismatchError: Arguments differ between ranks. Raised on all ranks, with the same text.
        """
        if numbers[0] != -numbers[1]:
            problem = "" if self.problem is None else str(self.problem).removeprefix(f"{self.who}: ")
            own = {"what": self.who, "kind": problem and ConfigurationError.__name__, "problem": problem, "facts": {}}
            facts = {name: plain(value) for name, value in self.facts}
            received = exchange(transport, {**own, "given": facts})
            finding = judge(received)
            if finding is not None:
                raise finding
            difference = find_difference([[(self.who, each["given"])] for each in received])
            if difference is not None:
                raise MismatchError(f"{difference}. Pass the same arguments on all ranks.")
        if self.problem is not None:
            raise self.problem


@functools.lru_cache(maxsize=64)  # most steps have the same arguments
def _numbers(value: tuple[Any, ...] | str, rank: int, num_ranks: int, is_max: bool) -> Tensor:
    found = checksum(value)
    numbers = [found >> 24, -(found >> 24)] if is_max else [contrast(found, rank, num_ranks), 0]
    return torch.tensor([float(each) for each in numbers], dtype=torch.float64, device="cpu")
