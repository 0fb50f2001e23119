"""The options monitor: compares optimizers' options between ranks, which step a shard of the model each.

[Note: how options are compared]

Of the options of all parameter groups of optimizers that are divided over ranks, every rank makes a checksum at the
end of each window. The header, which travels in any case, carries four numbers of it, as it does of parameters: see
`drift`. Where they differ, which all ranks see, ranks exchange their options, and all
raise. The checksum is made anew only when an option is another object than in the window before. Hosts that round
otherwise may have another last digit in a cosine: the checksum is of numbers rounded to `_DIGITS`, and those that lie
within `_ROUNDING` of each other are the same.

Nothing waits for a GPU. There, sums in the header are read in every `_LATE_EVERY`th window and judged in the next;
and so is an option that is a tensor on the device.

What else a step is given (`Notes`) is in the same checksum: arguments of clipping.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import math
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, optim

from evenstep.device import Coming, arrived, start_copy
from evenstep.errors import MismatchError
from evenstep.replica.gradients.observer import Observer
from evenstep.replica.monitors.digests import are_same, half_bits, halves
from evenstep.transport.core.object_collectives import exchange
from evenstep.transport.core.transport import Transport
from evenstep.world import World

Call = tuple[str, tuple[tuple[str, Any], ...]]  # who was called, and what it was given: plain values
CallTexts = tuple[str, tuple[tuple[str, str], ...]]  # the same with texts

_NUM_NUMBERS = 4
_NOTHING = (0.0,) * _NUM_NUMBERS
_MAX_CALLS = 1000  # between two windows: within a `join` there are none that tell
ABOUT_SCHEDULERS = "a scheduler that is given a loss, such as ReduceLROnPlateau, wants everybody's: world.mean(loss)."

_LATE_EVERY = 16
_SIMPLE = (bool, int, float, str, type(None))
_NOT_PLAIN = "(not compared)"
_DIGITS = 9
_ROUNDING = 1e-8  # not less than the last of the digits
_ROUNDING_OF_ZERO = 1e-15  # what is left of a cosine that has come to its end
_MAX_NUMEL = 16  # of a tensor that is an option; a larger one is told by its shape


def options_of(optimizer: optim.Optimizer) -> dict[str, str]:
    """Return the options that an optimizer's step reads from its parameter groups, by readable name, as texts.

    Args:
        optimizer: Whose. Only options that its class has are in it, and only plain ones: numbers, texts, small tensors.
    """
    found = {"the number of parameter groups": str(len(optimizer.param_groups))}
    for number, group in enumerate(optimizer.param_groups):
        of = f" of parameter group {number}"
        found[f"the number of parameters{of}"] = str(len(group["params"]))
        for name in optimizer.defaults:
            received = _plain(group.get(name), reads_devices=True)
            if received is not _NOT_PLAIN:
                found[f"{name}{of}"] = repr(received)
    return found


def find_difference(received: Sequence[Sequence[Mapping[str, str]]]) -> str | None:
    """The first option that isn't the same everywhere. Pure.

    Args:
        received: By rank, `options_of` each optimizer; the same optimizers on all ranks.

    Returns:
        None: there is none.
    """
    for number, first in enumerate(received[0]):
        for rank, each in enumerate(received):
            for name in (*first, *each[number]):
                one, other = first.get(name), each[number].get(name)
                if not are_alike(one, other):
                    which = f" in optimizer {number + 1} of {len(received[0])}" if len(received[0]) > 1 else ""
                    return f"{name}{which} is {one} on rank 0 and {other} on rank {rank}"
    return None


class Notes:
    """Calls with arguments that all ranks must give alike, of one rank and model."""

    def __init__(self) -> None:
        self._calls: list[Call] = []

    def add(self, call: Call) -> None:
        """A call of which every rank makes one like it before the next window ends."""
        if len(self._calls) < _MAX_CALLS:
            self._calls.append(call)

    def take(self) -> tuple[Call, ...]:
        """At the end of a window: the calls since the last one."""
        calls, self._calls = tuple(self._calls), []
        return calls

    def forget(self) -> None:
        """Ranks don't come to the same windows for a while."""
        self._calls.clear()


class OptionsWatch(Observer):
    """Compares the options of optimizers that are divided over ranks, and what else steps are given.

    Args:
        world: The ranks that take part.
        control: Carries messages on the CPU, in order with what belongs to the model's passes.
        device: Of the model.
        are_replicas_alike: As far as this rank knows they are meant to be. Where they aren't, ranks may clip as
            they like, if their optimizers aren't sharded.

    Attributes:
        notes: What steps are given.
    """

    num_numbers = _NUM_NUMBERS

    def __init__(
        self, world: World, control: Transport, device: torch.device, are_replicas_alike: Callable[[], bool]
    ) -> None:
        self._are_replicas_alike = are_replicas_alike
        self._is_in_join = False
        self.notes = Notes()
        self._noted: tuple[Call, ...] = ()
        self._world = world
        self._control = control
        self._is_late = device.type != "cpu"
        self._bits = half_bits(world.world_size)
        self._optimizers: dict[int, weakref.ref[optim.Optimizer]] = {}
        self._num_windows = 0
        self._before: list[Any] | None = None  # the options behind `_numbers`, if it is enough to look at who they are
        self._lengths: list[int] = []  # how many parameters each group had then
        self._numbers: Sequence[float] = _NOTHING
        self._values: list[float] = []  # of tensors on a GPU, as they were a few windows ago
        self._values_coming: Coming | None = None
        self._sums_coming: Coming | None = None
        self._found = False

    def add(self, optimizer: optim.Optimizer) -> None:
        """Collective: compare this optimizer's options from now on, for as long as it lives."""
        self._optimizers[max(self._optimizers, default=-1) + 1] = weakref.ref(optimizer)

    @property
    def has_optimizers(self) -> bool:
        """Whether an optimizer is divided over ranks, whose parts then have to fit together."""
        return bool(self._optimizers) and self._world.world_size > 1

    @property
    def alive(self) -> list[optim.Optimizer]:
        """The optimizers that are divided, or would be if there were several ranks."""
        return [optimizer for reference in self._optimizers.values() if (optimizer := reference()) is not None]

    def header_numbers(self) -> Sequence[float]:
        """See `Observer`."""
        if self._is_in_join:
            return _NOTHING
        self._num_windows += 1
        noted_before, self._noted = self._noted, self.notes.take()
        alive = self.alive
        groups = [group for optimizer in alive for group in optimizer.param_groups]
        now = [each for group in groups for each in group.values()]
        lengths = [len(group["params"]) for group in groups]
        before, self._lengths, lengths_before = self._before, lengths, self._lengths
        is_as_before = before is not None and len(before) == len(now) and lengths == lengths_before
        is_as_before = is_as_before and self._noted == noted_before
        if before is not None and is_as_before and all(map(operator.is_, before, now)):
            return self._numbers
        values: list[Any] = [*lengths]
        is_simple = True
        for optimizer in alive:
            for group in optimizer.param_groups:
                found = [*map(group.get, optimizer.defaults)]
                if not _are_simple(found):
                    found, is_simple = [_plain(each, reads_devices=False) for each in found], False
                values.append(found)
        self._before = now if is_simple else None
        if self._is_late and not is_simple:
            self._read_late(groups)
        self._numbers = halves(checksum((values, self._values, self._noted)), self._bits)
        return self._numbers

    def read_header(self, sums: Sequence[float] | Tensor) -> None:
        """See `Observer`."""
        if not isinstance(sums, Tensor):
            self._judge(sums)
            return
        coming, self._sums_coming = self._sums_coming, None
        if coming is not None:
            self._judge(arrived(coming))
        if self._num_windows % _LATE_EVERY == 0:
            self._sums_coming = start_copy(sums)

    def set_join(self, is_open: bool) -> None:
        """See `Observer`."""
        self._is_in_join = is_open
        self.notes.forget()

    def raise_found(self) -> None:
        """Name the options that differ. Collective if some were found to, which all ranks know.

        Raises:
            MismatchError: On every rank, with the same text.
        """
        if not self._found:
            return
        self._found = False
        alive = {number: ref() for number, ref in self._optimizers.items()}
        mine = {str(number): options_of(each) for number, each in alive.items() if each is not None}
        calls = as_texts(self._noted)
        answers = exchange(self._control, {"options": mine, "calls": calls, "alike": self._are_replicas_alike()})
        received = [each["options"] for each in answers]
        # One that has been thrown away may live on for a while on some of the ranks.
        numbers = [number for number in mine if all(number in each for each in received)]
        self._optimizers = {int(number): self._optimizers[int(number)] for number in numbers}
        self._before = None
        difference = find_difference([[each[number] for number in numbers] for each in received])
        if difference is not None:
            raise MismatchError(
                f"the ranks step with different options: {difference} (noticed in backward pass {self._num_windows}), "
                f"and each steps its own part of the parameters. Set options alike on all ranks; "
                f"{ABOUT_SCHEDULERS}"
            )
        self._compare_calls(answers, is_divided=bool(numbers))

    def _compare_calls(self, answers: Sequence[Mapping[str, Any]], *, is_divided: bool) -> None:
        if not (is_divided or all(each["alike"] for each in answers)):
            return
        difference = find_other_call([each["calls"] for each in answers], are_alike)
        if difference is not None:
            raise MismatchError(
                f"the ranks were given different arguments: {difference} (noticed in backward pass "
                f"{self._num_windows}; it was so before that). Every rank makes the same calls with the same "
                f"arguments. Set them alike, and resume from a checkpoint."
            )

    def _judge(self, sums: Sequence[float]) -> None:
        self._found = self._found or not are_same(sums, self._world.world_size)

    def _read_late(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Options that are tensors on a GPU: their values of the last time, and a copy for the next."""
        if self._values_coming is not None:
            self._values, self._values_coming = arrived(self._values_coming), None
        if self._num_windows % _LATE_EVERY == 1:
            far = [value.detach().reshape(-1) for group in groups for value in group.values() if _is_far(value)]
            if far:
                self._values_coming = start_copy(torch.cat([each.to(far[0].device, torch.float64) for each in far]))


def checksum(value: Any) -> int:
    """Of plain values: 40 bits. Numbers that differ by rounding have the same, but for some at the border. Pure."""
    return int.from_bytes(hashlib.blake2b(repr(_rounded(value)).encode(), digest_size=5).digest(), "little")


def _is_far(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type != "cpu" and value.numel() <= _MAX_NUMEL


def _are_simple(values: Sequence[Any]) -> bool:
    """Whether the values are plain and immutable, so that identity shows a change."""
    return all(
        type(each) in _SIMPLE or (type(each) is tuple and all(type(part) in _SIMPLE for part in each))
        for each in values
    )


def _plain(value: Any, *, reads_devices: bool) -> Any:
    """An option as a number, a text, or lists of them; `_NOT_PLAIN` for what is none."""
    if isinstance(value, Tensor):
        is_read = value.numel() <= _MAX_NUMEL and (reads_devices or value.device.type == "cpu")
        return value.tolist() if is_read else f"a tensor {list(value.shape)}"
    if isinstance(value, tuple | list):
        return tuple(_plain(each, reads_devices=reads_devices) for each in value)
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)  # numpy's numbers become python's
    return None if value is None else _NOT_PLAIN


def _rounded(value: Any) -> Any:
    """What `_plain` has given, or a list of it, with numbers as the checksum has them."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    return tuple(map(_rounded, value)) if isinstance(value, tuple | list) else value


def are_alike(one: str | None, other: str | None) -> bool:
    """Whether two texts of `options_of` mean the same, but for rounding."""
    if one == other or one is None or other is None:
        return one == other
    try:
        return _are_close(ast.literal_eval(one), ast.literal_eval(other))
    except (ValueError, SyntaxError):  # "nan", "inf", or no text of numbers
        return False


def _are_close(one: Any, other: Any) -> bool:
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(_are_close, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=_ROUNDING, abs_tol=_ROUNDING_OF_ZERO)
    return type(one) is type(other) and bool(one == other)


def as_texts(calls: Sequence[Call]) -> list[CallTexts]:
    """Calls in the form in which ranks exchange them. Pure."""
    return [(who, tuple((name, repr(value)) for name, value in given)) for who, given in calls]


def find_other_call(
    received: Sequence[Sequence[CallTexts]], are_alike: Callable[[str | None, str | None], bool]
) -> str | None:
    """The first call that ranks haven't made alike; None if there is none. Pure.

    Args:
        received: By rank, the calls in order.
        are_alike: Whether two texts mean the same.
    """
    for rank, each in enumerate(received):
        for first, other in itertools.zip_longest(received[0], each):
            if first is None or other is None:
                has, has_not = (0, rank) if other is None else (rank, 0)
                return f"{(first or other)[0]} was called on rank {has} and not on rank {has_not}"
            if first[0] != other[0]:
                return f"rank 0 called {first[0]} where rank {rank} called {other[0]}"
            ours, theirs = dict(first[1]), dict(other[1])
            for name in (*ours, *theirs):
                if not are_alike(ours.get(name), theirs.get(name)):
                    return f"{first[0]}: {name} is {ours.get(name)} on rank 0 and {theirs.get(name)} on rank {rank}"
    return None
