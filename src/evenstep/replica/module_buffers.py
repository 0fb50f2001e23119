"""The buffers of a module (running statistics and the like): rank 0's are everybody's, unless a rule says otherwise.

[Note: statistics]

A codebook or a counter is a statistic of all ranks' samples. What a rank has added to one since the window's first
forward pass is added over ranks; of "mean" it is divided by the number of ranks that had samples. An average that
decays, and is linear in what each rank adds, is so that of the whole batch where shares have equal sizes. Statistics
begin as rank 0's. What a program writes into one outside of forward passes with gradients (a start by k-means, a state
that is loaded) isn't added over ranks: it has to be the same on all of them.
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
from evenstep.device import by_kind
from evenstep.errors import ConfigurationError
from evenstep.ground.compat.torch_tensors import flatten_dense, unflatten_dense
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
        raw = flat.view(torch.uint8)  # bytes: whatever the dtype, every backend carries them
        started.append((transport.broadcast(raw, src), flat, tensor))
    for work, flat, tensor in started:
        work.wait()
        if flat.data_ptr() != tensor.data_ptr():
            # Through `.data`: autograd may have saved the buffer for a graph that is kept, and would take a new
            # version for a change of the user's.
            tensor.data.copy_(flat.view(tensor.shape))


def places_of(module: nn.Module, ignored: Collection[str] = ()) -> list[tuple[nn.Module, str, str]]:
    """(owner, name in it, whole name) of every module buffer, also of those that are None.

    Args:
        module: Whose, with those of its parts, some of which may be TorchScript's.
        ignored: Whole names that are left out.
    """
    found = [
        (owner, name, f"{prefix}.{name}" if prefix else name)
        for prefix, owner in module.named_modules()
        for name, _ in owner._buffers.items()  # a module of TorchScript's has no iterator and no `get` there
    ]
    return [each for each in found if each[2] not in ignored]


def buffer_at(owner: nn.Module, name: str) -> Tensor | None:
    """What is at a place now."""
    return owner._buffers[name] if name in owner._buffers else None  # noqa: SIM401


class Rule(Enum):
    """What becomes of a module buffer when a window ends."""

    RANK_0 = "rank 0"
    MEAN = "mean"
    SUM = "sum"
    OWN = "own"


def validate_rules(rules: Mapping[str, str], module: nn.Module, ignored: Collection[str]) -> None:
    """Refuse rules for module buffers that can't be followed.

    Args:
        rules: By pattern of a name, as of `fnmatch`: what becomes of such buffers.
        module: That has them.
        ignored: Names of those that every rank keeps for itself.

    Raises:
        ConfigurationError: Naming the pattern or the buffer.
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
                f"{who}: {pattern!r} fits no buffer of the module; {known}. Run a module that makes them later once "
                f"before it is wrapped."
            )
    for name, buffer in buffers.items():
        rule = rule_of(name, rules)
        if rule is Rule.MEAN and not buffer.is_floating_point():
            raise ConfigurationError(f"{who}: {name!r} is {str(buffer.dtype)[6:]}, which has no mean. Say 'sum'.")
        if rule is Rule.SUM and (buffer.dtype is torch.bool or buffer.is_complex()):
            raise ConfigurationError(f"{who}: {name!r} is {str(buffer.dtype)[6:]}, which isn't added. Say 'rank 0'.")


def rule_of(name: str, rules: Mapping[str, str]) -> Rule | None:
    """The first rule that fits a name; None: there is none. Pure."""
    return next((Rule(word) for pattern, word in rules.items() if fnmatch.fnmatchcase(name, pattern)), None)


@dataclass
class _Sent:
    """Buffers of one device that are under way."""

    work: Work
    packed: Tensor
    buffers: list[Tensor]
    before: list[Tensor] | None = None  # of statistics
    is_mean: bool = False


class BufferExchange:
    """Makes the persistent buffers of a module equal at the end of a step, packed by device and dtype.

    Args:
        module: Whose buffers; they may be replaced later, not added.
        transport: Carries them, in order with the gradients.
        ignored: Names of those that every rank keeps for itself.
        rules: As in `validate_rules`.
        is_on: Whether those without a rule are rank 0's. Scripts switch it between steps, on all ranks.

    Attributes:
        has_statistics: Some are added over ranks, so `begin_forward` has to be called.
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
            # Buffers that aren't saved are caches, which grow as each rank needs.
            if rule is None and name in getattr(owner, "_non_persistent_buffers_set", ()):
                rule = Rule.OWN
            if rule in (Rule.MEAN, Rule.SUM) and buffer_at(owner, name) is None:
                self._absent[full] = owner, name  # as of a normalisation that keeps no statistics
                continue
            self._places.setdefault(rule, []).append((owner, name))
        self.has_statistics = bool(self._places.keys() & {Rule.MEAN, Rule.SUM})
        self._before: dict[Rule, list[Tensor]] = {}  # since the window's first forward pass
        self._has_samples = False  # since then
        self._src = 0

    def begin_forward(self, *, over_dummy: bool) -> None:
        """Remember statistics as they are before the window's first forward pass.

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
                f"buffers: {late[0]!r} has come since the module was wrapped, so it stays each rank's own. Run the "
                f"module once before it is wrapped.",
            )
        if self.has_statistics:
            self.begin_forward(over_dummy=True)  # where no forward pass has run nothing has been added
            before, self._before = self._before, {}
            for rule in (Rule.MEAN, Rule.SUM):
                if before[rule]:
                    sent.append(self._add(self._there(rule), before[rule], is_mean=rule is Rule.MEAN))
            self._has_samples = False
        return sent

    def finish(self, started: Sequence[_Sent]) -> None:
        """Wait, and write what was sent into the module."""
        for each in started:
            each.work.wait()
            if each.before is not None:
                self._write_statistics(each)
            elif self._transport.rank != self._src:
                # Through `.data`: see `broadcast`.
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
        """Begin to add over ranks whether they had samples, and what they have added: [1 + numel], float64."""
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
    """Whatever happens to the module's buffers inside is undone, except to those named in `but`."""
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
