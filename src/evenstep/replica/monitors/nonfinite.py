"""Gradients that are infinite or not a number: found before they are added, so that one can say whose they are.

One pass over a bucket that is about to travel adds it up: a sum is finite unless something in it isn't (or it is very
large, which a second look tells apart). What the ranks found is agreed once per window, with one small all-reduce. On
a GPU reading that waits for the device. That is what "skip" and "raise" do.

"warn" looks at sums instead, while they are made in shared memory: a rank at the part that it makes, so it costs 1/n.
It is said at the end of the window, or of the next one: the header carries the news. Where Gloo makes the sums on CPUs,
"warn" adds up every bucket as the other two do, and agrees on nothing unless something was found.
"""

from __future__ import annotations

import functools
import gc
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from evenstep.errors import ConfigurationError, NonFiniteError
from evenstep.replica.bucket import Bucket, sum_dtype, total_of
from evenstep.replica.layout import BucketLayout
from evenstep.transport.base import Transport
from evenstep.transport.exchange import exchange
from evenstep.transport.looking import look_at_sums
from evenstep.world import World

Policy = Literal["warn", "skip", "raise"]
_MAX_NAMED = 5
_SMALL_NUMEL = 1 << 14  # elements of a tensor that is looked at together with others


def validate_policy(policy: str | None) -> None:
    """Refuse an unknown policy.

    Raises:
        ConfigurationError: It is none of "warn", "skip", "raise" and None.
    """
    if policy not in ("warn", "skip", "raise", None):
        raise ConfigurationError(f"on_nonfinite={policy!r}; 'warn', 'skip', 'raise', or None.")


def build_guard(policy: Policy | None, world: World, transport: Transport) -> NonFiniteGuard | None:
    """Who decides on steps; None where nobody does."""
    return NonFiniteGuard(policy, world, transport) if policy in ("skip", "raise") else None


def build_sum_watch(policy: Policy | None, world: World, transport: Transport) -> SumWatch | None:
    """Who looks and warns; None where nobody does: on GPUs, which every look would wait for."""
    if policy != "warn" or world.device.type != "cpu" or world.world_size == 1:
        return None
    return SumWatch(world, transport) if transport.name == "shared memory" else OwnWatch(world, transport)


class NonFiniteGuard:
    """Looks at this rank's gradients, and decides with the other ranks.

    Args:
        policy: What happens to the step.
        world: Who takes part.
        transport: Carries what belongs to the model's passes.

    Attributes:
        num_skipped: Steps that were skipped so far.
    """

    def __init__(self, policy: Policy, world: World, transport: Transport) -> None:
        self.num_skipped = 0
        self._policy = policy
        self._world = world
        self._transport = transport
        self._sums: list[Tensor] = []  # 0-dim: finite if everything is
        self._peaks: list[tuple[Sequence[str], Tensor]] = []  # (names, [n] largest absolute values)

    def room_for_totals(self, bucket: Bucket) -> list[float] | None:
        """None: to read sums on the host would wait for a GPU."""
        return None

    def look(self, bucket: Bucket, totals: Sequence[float] | None = None) -> None:
        """At a bucket that holds this rank's gradients, before it travels."""
        self._look([bucket.flat], lambda: (bucket.names, bucket.sent_views))

    def look_at_gradients(self, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
        """At the gradients of parameters that travel in no bucket; those that have none are passed over."""
        found = [(name, p.grad) for name, p in zip(names, parameters, strict=True) if p.grad is not None]
        grads = [grad._values() if grad.is_sparse else grad for _, grad in found]
        if grads:
            self._look(grads, lambda: ([name for name, _ in found], grads))

    def _look(self, tensors: Sequence[Tensor], parts: Callable[[], tuple[Sequence[str], Sequence[Tensor]]]) -> None:
        with torch.no_grad():
            total = torch.stack([each.sum(dtype=sum_dtype(each)).abs().double() for each in _few(tensors)]).sum()
            if total.device.type == "cpu" and bool(torch.isfinite(total)):
                return
            names, views = parts()
            filled = [(name, view) for name, view in zip(names, views, strict=True) if view.numel()]
            peaks = torch.stack([view.abs().amax().double() for _, view in filled])
            self._sums.append(peaks.amax())
            self._peaks.append(([name for name, _ in filled], peaks))

    def own_findings(self) -> list[str]:
        """What was found since the last time, without asking other ranks."""
        peaks, self._peaks, self._sums = self._peaks, [], []
        return [name for names, values in peaks for name in _not_finite(names, values)]

    def is_fault(self, *, is_scaled: bool) -> bool:
        """Collective, at the end of a window: whether a gradient was not finite on some rank, and nobody scaled it.

        Args:
            is_scaled: The loss was scaled, so that an overflow is the scaler's business.
        """
        numbers = torch.zeros(2, dtype=torch.float64, device=self._sums[0].device if self._sums else self._world.device)
        numbers[1:].fill_(is_scaled)
        for total in self._sums:
            numbers[0] += (~torch.isfinite(total)).to(torch.float64)
        self._transport.all_reduce(numbers).wait()
        found, scaled = numbers.tolist()
        mine = self.own_findings()
        if not found or scaled:
            return False
        told = self._world.exchange({"names": mine, "has_scaler": _has_scaler()})
        text = "; ".join(f"rank {rank}: {listed(each['names'])}" for rank, each in enumerate(told) if each["names"])
        message = f"a gradient was infinite or not a number before gradients were averaged, on {text}."
        if any(each["has_scaler"] for each in told):
            message += (
                " If a GradScaler has scaled the loss, say so, and its overflows are left to it: "
                "model.backward(loss, scaler=scaler)."
            )
        if self._policy == "raise":
            raise NonFiniteError(f"{message} The model is as before this step.")
        self.num_skipped += 1
        if self._world.is_main:
            warnings.warn(f"{message} All ranks skip this step (number {self.num_skipped}).", stacklevel=2)
        return True


class SumWatch:
    """Says once whose gradient was not finite, in which parameter. Changes nothing.

    Args:
        world: Who takes part.
        transport: Carries what belongs to the model's passes.
    """

    def __init__(self, world: World, transport: Transport) -> None:
        self._world = world
        self._transport = transport
        self._window = 0
        self._first = -1  # window of the findings
        self._findings: set[tuple[int, str]] = set()  # rank (-1: of all together), parameter
        self._is_off = False

    def watch(self, flat: Tensor, layout: BucketLayout, names: Sequence[str]) -> None:
        """Look at the sums of a bucket, as long as its memory lives."""
        is_lent = layout.sharding is not None and layout.sharding.frees_gradients  # memory of several buckets
        if layout.dtype.is_floating_point and not is_lent:
            begins = torch.tensor([slot.offset_numel for slot in layout.slots], device="cpu")
            look_at_sums(flat, functools.partial(self._look, begins, names))

    @property
    def has_found(self) -> bool:
        """Whether this rank has found something, which the others don't know yet."""
        return bool(self._findings) and not self._is_off

    def end_window(self, any_found: bool) -> None:
        """Collective if any rank has found something: rank 0 warns, unless a GradScaler sees to it. Then it is over."""
        self._window += 1
        if any_found:
            self._conclude()

    def _conclude(self) -> None:
        told = exchange(
            self._transport, {"first": self._first, "found": [*sorted(self._findings)], "scaled": _has_scaler()}
        )
        self._is_off = True
        if any(each["scaled"] for each in told) or not self._world.is_main:
            return
        first = min(each["first"] for each in told if each["found"])
        found = sorted({(rank, name) for each in told if each["first"] == first for rank, name in each["found"]})
        by_rank: dict[int, list[str]] = {}
        for rank, name in found:
            by_rank.setdefault(rank, []).append(name)
        text = "; ".join(
            f"{'only in the sum over ranks' if rank < 0 else f'at least on rank {rank}'}: {listed(names)}"
            for rank, names in by_rank.items()
        )
        warnings.warn(
            f"a gradient was infinite or not a number before gradients were averaged, {text} (in backward pass "
            f"{first + 1}). It is now in the parameters, unless the step was left out. This is said once; "
            f"on_nonfinite='skip' leaves such steps out, 'raise' ends the run, None looks at nothing.",
            stacklevel=2,
        )

    def _look(self, begins: Tensor, names: Sequence[str], begin: int, result: Tensor, inputs: Sequence[Tensor]) -> None:
        if self._is_off or (self._findings and self._first != self._window):
            return
        places = (~torch.isfinite(result)).nonzero()[:, 0]
        if len(places) == 0:
            return  # a large total of finite numbers
        slots = torch.searchsorted(begins, places + begin, right=True) - 1
        own: int | None = None
        others_are_small = torch.ones(len(places), dtype=torch.bool, device="cpu")
        bad_of: dict[int, Tensor] = {}
        for rank, given in enumerate(inputs):
            if given.data_ptr() == result.data_ptr():
                own = rank  # overwritten by the sum: it is what the others don't explain, or not known to be
                continue
            values = given[places]
            bad_of[rank] = ~values.isfinite()
            others_are_small &= values.abs() < torch.finfo(given.dtype).max / (2 * len(inputs))
        if own is not None:
            bad_of[own] = others_are_small
        explained = torch.stack([*bad_of.values()]).any(0)
        bad_of[-1] = ~explained
        self._first = self._window
        for rank, bad in bad_of.items():
            self._findings |= {(rank, names[slot]) for slot in set(slots[bad].tolist())}


class OwnWatch(SumWatch):
    """The same where the sums are made by others, as by Gloo: looks at what this rank is about to send."""

    def watch(self, flat: Tensor, layout: BucketLayout, names: Sequence[str]) -> None:
        """Nothing: the sums come too late to tell whose fault it is."""

    def room_for_totals(self, bucket: Bucket) -> list[float] | None:
        """For sums of what is packed into a bucket; None where nobody looks at them."""
        is_late = bool(self._findings) and self._first != self._window
        return [] if bucket.flat.is_floating_point() and not self._is_off and not is_late else None

    def look(self, bucket: Bucket, totals: Sequence[float] | None = None) -> None:
        """At a bucket that holds this rank's gradients, before it travels.

        Args:
            bucket: What will travel.
            totals: What `Bucket.pack` has added up of it; None: nothing.
        """
        if totals is None and self.room_for_totals(bucket) is None:
            return
        if all(map(math.isfinite, [total_of(bucket.flat)] if totals is None else totals)):
            return
        with torch.no_grad():
            both = zip(bucket.names, bucket.sent_views, strict=True)
            bad = {(self._world.rank, name) for name, view in both if not bool(torch.isfinite(view).all())}
        if bad:  # else a large total of finite numbers
            self._first = self._window
            self._findings |= bad


def _has_scaler() -> bool:
    """Whether somebody in this process scales losses, so that an overflow now and then is no fault."""
    gc.collect()  # one of a training that is over may wait in a circle of references
    kinds = torch.amp.GradScaler
    return any(issubclass(type(each), kinds) and each.is_enabled() for each in gc.get_objects())


def _few(tensors: Sequence[Tensor]) -> list[Tensor]:
    """All elements in fewer tensors: to look at a small one costs many times what copying it does."""
    small = [tensor.reshape(-1) for tensor in tensors if tensor.numel() <= _SMALL_NUMEL]
    if len(small) < 2:
        return list(tensors)
    return [torch.cat(small), *(tensor for tensor in tensors if tensor.numel() > _SMALL_NUMEL)]


def _not_finite(names: Sequence[str], peaks: Tensor) -> list[str]:
    return [name for name, finite in zip(names, torch.isfinite(peaks).tolist(), strict=True) if not finite]


def listed(names: Sequence[str]) -> str:
    """The first few names of parameters, for messages."""
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(map(repr, names[:_MAX_NAMED])) + more
