"""The buffers of a module (running statistics, for example): all ranks get rank 0's, unless a rule says otherwise.

[Note: statistics]

A codebook or a counter is a statistic of all ranks' samples. The amounts that ranks have added to it since the window's
first forward pass are added over ranks. With "mean" the sum is divided by the number of ranks that had samples. So, if
shares have equal sizes, a decaying average that is linear in each rank's amount equals that of the whole batch.
At the start all ranks get rank 0's statistics. Values that a program writes outside of forward passes with gradients
(initialisation by k-means, a loaded state) aren't added over ranks, and have to be the same on all ranks.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from evenstep import checks
from evenstep.errors import ConfigurationError
from evenstep.ground.compat.torch_tensors import flatten_dense, unflatten_dense
from evenstep.ground.computing.device import by_kind
from evenstep.ground.health.users_code import warn
from evenstep.transport.base import Work
from evenstep.transport.core.transport import Transport


def broadcast(tensors: Iterable[Tensor], transport: Transport, *, src: int = 0) -> None:
    """Collective: make tensors equal to rank `src`'s."""
    started = []
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        flat = tensor.detach().contiguous().reshape(-1)
        raw = flat.view(torch.uint8)  # bytes, which every backend carries, for any dtype
        started.append((transport.broadcast(raw, src), flat, tensor))
    for work, flat, tensor in started:
        work.wait()
        if flat.data_ptr() != tensor.data_ptr():
            # Write through `.data`: autograd may have saved the buffer for a graph that still exists, and would report
            # a new version as an illegal change by the user.
            tensor.data.copy_(flat.view(tensor.shape))


def places_of(module: nn.Module, ignored: Collection[str] = ()) -> list[tuple[nn.Module, str, str]]:
    """(owner, name in the owner, full name) of every module buffer, including those that are None.

    Args:
        module: The module; buffers of its parts are included, and parts may be TorchScript's.
        ignored: Full names to leave out.
    """
    found = [
        (owner, name, f"{prefix}.{name}" if prefix else name)
        for prefix, owner in module.named_modules()
        for name, _ in owner._buffers.items()  # TorchScript's `_buffers` has no iterator and no `get`
    ]
    return [each for each in found if each[2] not in ignored]


def buffer_at(owner: nn.Module, name: str) -> Tensor | None:
    """The present buffer at a place, or None."""
    return owner._buffers[name] if name in owner._buffers else None  # noqa: SIM401


class Rule(Enum):
    """How a module buffer is synchronised when a window ends."""

    RANK_0 = "rank 0"
    MEAN = "mean"
    SUM = "sum"
    OWN = "own"


def validate_rules(rules: Mapping[str, str], module: nn.Module, ignored: Collection[str]) -> None:
    """Refuse rules for module buffers that can't be followed.

    Args:
        rules: The name of a `Rule` for each pattern of names (as in `fnmatch`).
        module: The module that has the buffers.
        ignored: Names of buffers that every rank keeps for itself.

    Raises:
        ConfigurationError: A rule can't be followed; the message names the pattern or the buffer.
    """
    who = "DistributedDataParallel: buffers"
    if not isinstance(rules, Mapping) or not all(isinstance(each, str) for each in rules):
        raise checks.refuse(who, rules, "a dictionary such as {'codebook.*': 'mean'}, or None")
    words = [each.value for each in Rule]
    buffers = {name: buffer for name, buffer in module.named_buffers() if name not in ignored}
    for pattern, word in rules.items():
        if word not in words:
            raise checks.refuse(f"{who}: {pattern!r}", word, f"one of {', '.join(map(repr, words))}")
        if not any(fnmatch.fnmatchcase(name, pattern) for name in buffers):
            known = f"those are {', '.join(sorted(buffers))}" if buffers else "it has none"
            raise ConfigurationError(
                f"{who}: {pattern!r} matches no buffer of the module; {known}. If the module makes its buffers in the "
                f"forward pass, run it once before you wrap it."
            )
    for name, buffer in buffers.items():
        rule = rule_of(name, rules)
        if rule is Rule.MEAN and not buffer.is_floating_point():
            raise ConfigurationError(f"{who}: {name!r} is {str(buffer.dtype)[6:]}, which has no mean. Use 'sum'.")
        if rule is Rule.SUM and (buffer.dtype is torch.bool or buffer.is_complex()):
            raise ConfigurationError(f"{who}: {name!r} is {str(buffer.dtype)[6:]}, which can't be added. Use 'rank 0'.")


def rule_of(name: str, rules: Mapping[str, str]) -> Rule | None:
    """The first rule that matches a name, or None. Pure."""
    return next((Rule(word) for pattern, word in rules.items() if fnmatch.fnmatchcase(name, pattern)), None)


@dataclass
class _Sent:
    """Buffers of one device that are in flight."""

    work: Work
    packed: Tensor
    buffers: list[Tensor]
    before: list[Tensor] | None = None  # values of statistics at the window's beginning; None for other buffers
    is_mean: bool = False


class BufferExchange:
    """Makes the persistent buffers of a module equal at the end of a step, packed by device and dtype.

    Args:
        module: The module. Its buffers may be replaced later, but no buffers may be added.
        transport: Carries the buffers, in order with the gradients.
        ignored: Names of buffers that every rank keeps for itself.
        rules: As in `validate_rules`.
        is_on: Whether buffers without a rule become rank 0's. Scripts may switch it between steps, on all ranks.

    Attributes:
        has_statistics: Whether some buffers are added over ranks, so that `begin_forward` has to be called.
    """

    def __init__(
        self,
        module: nn.Module,
        transport: Transport,
        ignored: Collection[str] = (),
        rules: Mapping[str, str] | None = None,
        *,
        is_on: bool = True,
    ) -> None:
        self.is_on = is_on
        self._transport = transport
        self._places: dict[Rule | None, list[tuple[nn.Module, str]]] = {}
        self._absent: dict[str, tuple[nn.Module, str]] = {}
        for owner, name, full in places_of(module, ignored):
            rule = rule_of(full, rules or {})
            # Non-persistent buffers are caches, which may grow differently on each rank.
            if rule is None and name in getattr(owner, "_non_persistent_buffers_set", ()):
                rule = Rule.OWN
            if rule in (Rule.MEAN, Rule.SUM) and buffer_at(owner, name) is None:
                self._absent[full] = owner, name  # for example in a normalisation without running statistics
                continue
            self._places.setdefault(rule, []).append((owner, name))
        self.has_statistics = bool(self._places.keys() & {Rule.MEAN, Rule.SUM})
        self._before: dict[Rule, list[Tensor]] = {}  # values before the window's first forward pass
        self._has_samples = False  # whether a forward pass of the window was over samples
        self._src = 0

    def begin_forward(self, *, over_dummy: bool) -> None:
        """Copy the statistics before the window's first forward pass.

        Args:
            over_dummy: The forward pass is over a dummy batch in place of an empty share.
        """
        self._has_samples |= not over_dummy
        if not self._before:
            for rule in (Rule.MEAN, Rule.SUM):
                self._before[rule] = [buffer.detach().clone() for buffer in self._there(rule)]

    def start(self, src: int = 0) -> list[_Sent]:
        """Collective: pack the buffers, send rank `src`'s, and begin to add statistics."""
        self._src = src
        if not (self._places or self._absent):
            return []
        sent = [self._broadcast(group) for group in by_kind(self._there(Rule.RANK_0))]
        if self.is_on:
            sent += [self._broadcast(group) for group in by_kind(self._there(None))]
        late = [full for full, place in self._absent.items() if buffer_at(*place) is not None]
        if late:
            self._absent.clear()
            warn(
                f"buffers: {late[0]!r} was created after the module was wrapped, so each rank keeps its own. Run the "
                f"module once before you wrap it.",
            )
        if self.has_statistics:
            self.begin_forward(over_dummy=True)  # without a forward pass in the window nothing was added
            before, self._before = self._before, {}
            for rule in (Rule.MEAN, Rule.SUM):
                if before[rule]:
                    sent.append(self._add(self._there(rule), before[rule], is_mean=rule is Rule.MEAN))
            self._has_samples = False
        return sent

    def finish(self, started: Sequence[_Sent]) -> None:
        """Wait, and write the received values to the module."""
        for each in started:
            each.work.wait()
            if each.before is not None:
                self._write_statistics(each)
            elif self._transport.rank != self._src:
                # Write through `.data`: see `broadcast`.
                values = unflatten_dense(each.packed, each.buffers)  # type: ignore[no-untyped-call]
                torch._foreach_copy_([buffer.data for buffer in each.buffers], values)

    def _there(self, rule: Rule | None) -> list[Tensor]:
        found = [buffer_at(owner, name) for owner, name in self._places.get(rule, ())]
        return [buffer for buffer in found if buffer is not None and buffer.numel()]

    def _broadcast(self, buffers: list[Tensor]) -> _Sent:
        if self._transport.rank == self._src:
            with torch.no_grad():
                packed: Tensor = flatten_dense(buffers)  # type: ignore[no-untyped-call]
        else:
            numel = sum([buffer.numel() for buffer in buffers])
            packed = torch.empty(numel, dtype=buffers[0].dtype, device=buffers[0].device)
        return _Sent(self._transport.broadcast(packed.view(torch.uint8), self._src), packed, buffers)

    @torch.no_grad()
    def _add(self, buffers: list[Tensor], before: list[Tensor], *, is_mean: bool) -> _Sent:
        """Begin to add over ranks: [whether a rank had samples, the amounts that it added], [1 + numel], float64."""
        count = torch.tensor([float(self._has_samples)], dtype=torch.float64, device="cpu")
        added = [now.double() - then.double() for now, then in zip(buffers, before, strict=True)]
        packed = torch.cat([each.to(buffers[0].device).flatten() for each in (count, *added)])
        return _Sent(self._transport.all_reduce(packed), packed, buffers, before, is_mean)

    @torch.no_grad()
    def _write_statistics(self, sent: _Sent) -> None:
        assert sent.before is not None
        count, added = sent.packed[:1], sent.packed[1:]
        if sent.is_mean:
            added = added / count.clamp(min=1)
        pieces = torch.split(added, [buffer.numel() for buffer in sent.buffers])
        for buffer, then, piece in zip(sent.buffers, sent.before, pieces, strict=True):
            buffer.data.copy_(then.double() + piece.view(then.shape).to(then.device))


@contextmanager
def untouched(module: nn.Module, *, but: Sequence[Tensor] = ()) -> Iterator[None]:
    """Context that restores the module's buffers at its end, except the buffers in `but`."""
    kept = {id(buffer) for buffer in but}
    places = [(owner, name, buffer_at(owner, name)) for owner, name, _ in places_of(module)]
    saved = [
        (owner, name, buffer, None if buffer is None else buffer.detach().clone())
        for owner, name, buffer in places
        if id(buffer) not in kept
    ]
    try:
        yield
    finally:
        for owner, name, buffer, value in saved:
            if buffer_at(owner, name) is not buffer:  # a module may put another tensor there
                owner._buffers[name] = buffer
            if buffer is not None and value is not None:
                buffer.data.copy_(value)
