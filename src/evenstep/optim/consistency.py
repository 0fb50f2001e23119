"""What ranks are given for a step: compared where something travels in any case, and refused on all of them.

[Note: an argument of one rank]

A rank that is given something wrong raises, and makes no further call; the others would wait for it until a deadline.
Three ways to tell them, by what is at hand:

- Who is called once, by all ranks, asks before it begins (`transport.agreement.validate_together`).
- Whose collective is due sends four more numbers with it (`Given`): a checksum of the arguments, or of what is wrong
  with them. Where checksums differ, which all know, ranks tell each other what they were given, and raise the same.
- Else the others learn why from the next call that they make (`telling_others`), if shared memory carries it.

Arguments that are all right, but not the same, are noted where no collective is due (`note`): the header of the next
window has them, see `replica.options`.
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
from evenstep.replica.digests import are_same, half_bits, halves
from evenstep.replica.distributed import DistributedDataParallel
from evenstep.replica.engine import Engine
from evenstep.replica.options import checksum, find_difference
from evenstep.replica.torch_interface import wrapped_models
from evenstep.transport.agreement import judge
from evenstep.transport.base import Transport
from evenstep.transport.exchange import exchange

NUM_NUMBERS = 4

_ids_of: weakref.WeakKeyDictionary[Engine, frozenset[int]] = weakref.WeakKeyDictionary()


def engine_of(parameters: Iterable[Any]) -> Engine | None:
    """Of the first wrapped model of several ranks that has one of some parameters; None if none has."""
    engines = [model.engine for model in wrapped_models() if model.world.world_size > 1]
    if not engines:
        return None
    known = [
        _ids_of.get(engine) or _ids_of.setdefault(engine, frozenset(map(id, engine.parameters))) for engine in engines
    ]
    for parameter in parameters:
        for engine, ids in zip(engines, known, strict=True):
            if id(parameter) in ids:
                return engine
    return None


class OnTheWay:
    """The ranks of a model, asked where its next backward pass comes by: who goes on without asking is found there.

    Args:
        engine: Of the model.
    """

    def __init__(self, engine: Engine) -> None:
        is_on_cpu = engine.parameters[0].device.type == "cpu"
        self._transport = engine.transport if is_on_cpu else engine.world.control
        self.world_size = engine.world.world_size

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, in order of rank, on every rank. Collective."""
        return exchange(self._transport, value)


def note(engine: Engine | None, who: str, given: Sequence[tuple[str, Any]]) -> None:
    """Have the ranks compare a call with the end of the next window.

    Args:
        engine: Of the model that it is about; None: nobody's.
        who: What was called.
        given: What all ranks give alike, by name: plain values.
    """
    if engine is not None and (engine.options.has_optimizers or _are_replicas_alike(engine)):
        engine.options.notes.add((who, tuple(given)))


def keep_note(engine: Engine | None, owner: object, who: str, given: Sequence[tuple[str, Any]]) -> None:
    """The same of something that lasts; where not all ranks have equally many of them, nothing is compared."""
    if engine is not None and _are_replicas_alike(engine):
        engine.options.notes.keep(owner, (who, tuple(given)))


def _are_replicas_alike(engine: Engine) -> bool:
    return engine.drift is not None and engine.drift.is_on


@contextlib.contextmanager
def telling_others(about: Any) -> Iterator[None]:
    """What is refused inside is told to the ranks that would wait for this one: they hear it in their next call.

    Nothing where all ranks refuse. Over Gloo and NCCL alone they can't be told, and wait until this rank has ended.

    Args:
        about: A wrapped model, parameters, or an optimizer over them; nothing is told if they are no model's of several
            ranks. If it is something else, it stands for what others were given rightly.
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
    """Those in which other ranks may wait: the model's, and the one of everything that is asked before."""
    parameters = _parameters_of(about)
    if parameters is not None:
        engine = engine_of(parameters)
        return [] if engine is None else [engine.transport, engine.world.control]
    world = worlds.initialised()
    return [*(model.engine.transport for model in wrapped_models()), *([] if world is None else [world.control])]


def _parameters_of(about: Any) -> list[Any] | None:
    if isinstance(about, DistributedDataParallel):
        return about.engine.parameters[:1]
    if isinstance(about, optim.Optimizer):
        return [parameter for group in about.param_groups for parameter in group["params"]]
    if isinstance(about, nn.Module):
        return list(about.parameters())
    if isinstance(about, Tensor):
        return [about]
    if isinstance(about, list | tuple) and all(isinstance(each, Tensor) for each in about):
        return list(about)
    return None


@dataclass(frozen=True)
class Given:
    """What one rank was given for a collective.

    Attributes:
        who: What was called.
        facts: What all ranks give alike, by name: plain values.
        problem: What is wrong with it; None: nothing.
        changes: The call changes something; else a rank may make it alone where that takes no other rank.
    """

    who: str
    facts: tuple[tuple[str, Any], ...]
    problem: ConfigurationError | None = None
    changes: bool = True

    def numbers(self, num_ranks: int, *, room: int, is_max: bool) -> Tensor:
        """What travels, [room + NUM_NUMBERS], float64, not to be changed: added over ranks, or the largest of each."""
        return _numbers(self.facts if self.problem is None else str(self.problem), num_ranks, room, is_max)

    def judge(self, transport: Transport, numbers: Sequence[float], *, is_max: bool) -> None:
        """Collective if ranks were given different things, which all know.

        Args:
            transport: That carried the numbers, on the CPU.
            numbers: What has come of them, [NUM_NUMBERS].
            is_max: As for `numbers`.

        Raises:
            ConfigurationError: Something is wrong on some rank. On all ranks, with the same text.
            MismatchError: The ranks weren't given the same. The same.
        """
        same = numbers[0] == -numbers[1] if is_max else are_same(numbers, transport.world_size)
        if not same:
            problem = "" if self.problem is None else str(self.problem).removeprefix(f"{self.who}: ")
            own = {"what": self.who, "kind": problem and ConfigurationError.__name__, "problem": problem, "facts": {}}
            facts = {name: repr(value) for name, value in self.facts}
            told = exchange(transport, {**own, "given": facts})
            finding = judge(told)
            if finding is not None:
                raise finding
            difference = find_difference([[each["given"]] for each in told])
            if difference is not None:
                raise MismatchError(f"{self.who}: {difference}. Every rank passes the same arguments.")
        if self.problem is not None:
            raise self.problem


@functools.lru_cache(maxsize=64)  # of the same arguments in each step
def _numbers(value: tuple[Any, ...] | str, num_ranks: int, room: int, is_max: bool) -> Tensor:
    found = checksum(value)
    told = [found, -found, 0, 0] if is_max else halves(found, half_bits(num_ranks))
    return torch.tensor([0.0] * room + [float(each) for each in told], dtype=torch.float64, device="cpu")
