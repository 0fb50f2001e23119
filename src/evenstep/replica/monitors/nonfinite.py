"""The non-finite monitor: finds gradients that are infinite or not a number before they are added over ranks.

"skip" and "raise" add up every bucket that is about to travel: a sum is finite unless an element isn't (or the sum is
very large, which a second check tells apart). Ranks exchange their findings once per window, in one small all-reduce.
Reading that waits for a GPU.

"warn" checks the sums over ranks instead, while they are made in shared memory: each rank checks the part that it
makes, so it costs 1/n. Rank 0 warns at the end of the window, or of the next one, because the header carries the
finding. Where Gloo makes the sums on CPUs, "warn" adds up every bucket as the other two do, and exchanges nothing
unless something was found.
"""

from __future__ import annotations

import functools
import gc
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from evenstep.errors import ConfigurationError, NonFiniteError
from evenstep.ground.compat.torch_tensors import local_part
from evenstep.replica.gradients.buckets.bucket import Bucket, sum_dtype, total_of
from evenstep.replica.gradients.observer import Observer
from evenstep.replica.gradients.window import Window
from evenstep.transport.core.nonfinite_monitor import monitor_sums
from evenstep.transport.core.object_collectives import exchange
from evenstep.transport.core.transport import Transport
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


def build_nonfinite_monitor(
    policy: Policy | None, world: World, transport: Transport, control: Transport
) -> NonFiniteGuard | SumWatch | None:
    """Build the monitor of a policy; None: none. "warn" monitors CPUs only, because it would wait for a GPU."""
    if policy in ("skip", "raise"):
        return NonFiniteGuard(policy, world, transport, control)
    if policy is None or world.device.type != "cpu" or world.world_size == 1:
        return None
    return SumWatch(world, transport) if transport.name == "shared memory" else OwnWatch(world, transport)


class NonFiniteGuard(Observer):
    """Inspects this rank's gradients, and decides with the other ranks.

    Args:
        policy: What happens to the step.
        world: The ranks that take part.
        transport: Carries what belongs to the model's passes.
        control: Carries messages on the CPU, in order with that.

    Attributes:
        num_skipped: Steps that were skipped so far.
    """

    inspects_buckets = True
    found_on = "a gradient was infinite or not a number before gradients were averaged, on"

    def __init__(self, policy: Policy, world: World, transport: Transport, control: Transport) -> None:
        self.num_skipped = 0
        self._policy = policy
        self._world = world
        self._transport, self._control = transport, control
        self._sums: list[Tensor] = []  # 0-dim: finite if everything is
        self._peaks: list[tuple[Sequence[str], Tensor]] = []  # (names, [n] largest absolute values)

    def inspect(self, bucket: Bucket, totals: Sequence[float] | None = None) -> None:
        """See `Observer`."""
        self._look([bucket.flat], lambda: (bucket.names, bucket.sent_views))

    def look_at_gradients(self, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
        """Inspect gradients that travel in no bucket."""
        found = [(name, p.grad) for name, p in zip(names, parameters, strict=True) if p.grad is not None]
        grads = [grad._values() if grad.is_sparse else local_part(grad) for _, grad in found]
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

    def end_window(self, names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
        """See `Observer`."""
        self.look_at_gradients(names, parameters)

    def own_findings(self) -> list[str]:
        """Return what this rank has found since the last call: names of parameters. Local."""
        peaks, self._peaks, self._sums = self._peaks, [], []
        return [name for names, values in peaks for name in _not_finite(names, values)]

    def rejects(self, window: Window) -> bool:
        """See `Observer`: true if a gradient was not finite on some rank and no scaler handles it. Collective."""
        numbers = torch.zeros(2, dtype=torch.float64, device=self._sums[0].device if self._sums else self._world.device)
        numbers[1:].fill_(window.is_scaled)
        for total in self._sums:
            numbers[0] += (~torch.isfinite(total)).to(torch.float64)
        self._transport.all_reduce(numbers).wait()
        found, scaled = numbers.tolist()
        mine = self.own_findings()
        if not found or scaled:
            return False
        received = exchange(self._control, {"names": mine, "has_scaler": has_scaler()})
        text = "; ".join(f"rank {rank}: {listed(each['names'])}" for rank, each in enumerate(received) if each["names"])
        message = f"{self.found_on} {text}."
        if any(each["has_scaler"] for each in received):
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


class SumWatch(Observer):
    """Warns once which rank's gradient was not finite, in which parameter. Changes nothing.

    Args:
        world: The ranks that take part.
        transport: Carries what belongs to the model's passes.
    """

    num_numbers = 1

    def __init__(self, world: World, transport: Transport) -> None:
        self._world = world
        self._transport = transport
        self._window = 0
        self._first = -1  # window of the findings
        self._findings: set[tuple[int, str]] = set()  # rank (-1: of all together), parameter
        self._is_off = False

    def watch_buckets(self, buckets: Sequence[Bucket]) -> None:
        """Check the sums of buckets, as long as their memory lives."""
        for bucket in buckets:
            layout = bucket.layout
            is_lent = layout.sharding is not None and layout.sharding.frees_gradients  # memory of several buckets
            if layout.dtype.is_floating_point and not is_lent:
                begins = torch.tensor([slot.offset_numel for slot in layout.slots], device="cpu")
                monitor_sums(bucket.flat, functools.partial(self._look, begins, bucket.names))

    def header_numbers(self) -> Sequence[float]:
        """See `Observer`: whether this rank has found something that the others don't know yet."""
        return (float(bool(self._findings) and not self._is_off),)

    def read_header(self, sums: Sequence[float] | Tensor) -> None:
        """See `Observer`. Where any rank has found something, rank 0 warns, unless a GradScaler handles it."""
        self._window += 1
        if sums[0] > 0:
            self._warn()

    def _warn(self) -> None:
        received = exchange(
            self._transport, {"first": self._first, "found": [*sorted(self._findings)], "scaled": has_scaler()}
        )
        self._is_off = True
        if any(each["scaled"] for each in received) or not self._world.is_main:
            return
        first = min(each["first"] for each in received if each["found"])
        found = sorted({(rank, name) for each in received if each["first"] == first for rank, name in each["found"]})
        by_rank: dict[int, list[str]] = {}
        for rank, name in found:
            by_rank.setdefault(rank, []).append(name)
        text = "; ".join(
            f"{'only in the sum over ranks' if rank < 0 else f'at least on rank {rank}'}: {listed(names)}"
            for rank, names in by_rank.items()
        )
        warnings.warn(
            f"a gradient was infinite or not a number before gradients were averaged, {text} (in backward pass "
            f"{first + 1}). It is now in the parameters, unless the step was left out. This warning comes once; "
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
    """`SumWatch` where Gloo makes the sums: inspects the buckets that this rank is about to send."""

    inspects_buckets = True

    def watch_buckets(self, buckets: Sequence[Bucket]) -> None:
        """Do nothing: Gloo's sums come too late to tell whose fault it is."""

    def totals_for(self, bucket: Bucket) -> list[float] | None:
        """See `Observer`."""
        is_late = bool(self._findings) and self._first != self._window
        return [] if bucket.flat.is_floating_point() and not self._is_off and not is_late else None

    def inspect(self, bucket: Bucket, totals: Sequence[float] | None = None) -> None:
        """See `Observer`."""
        if totals is None and self.totals_for(bucket) is None:
            return
        if all(map(math.isfinite, [total_of(bucket.flat)] if totals is None else totals)):
            return
        with torch.no_grad():
            both = zip(bucket.names, bucket.sent_views, strict=True)
            bad = {(self._world.rank, name) for name, view in both if not bool(torch.isfinite(view).all())}
        if bad:  # else a large total of finite numbers
            self._first = self._window
            self._findings |= bad


def has_scaler() -> bool:
    """Whether a GradScaler is in use in this process, so that an overflow now and then is no fault."""
    gc.collect()  # one of a training that is over may wait in a circle of references
    kinds = torch.amp.GradScaler
    return any(issubclass(type(each), kinds) and each.is_enabled() for each in gc.get_objects())


def _few(tensors: Sequence[Tensor]) -> list[Tensor]:
    """All elements in fewer tensors: checking a small one costs many times what copying it does."""
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
