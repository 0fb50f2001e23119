"""The checks of one model's steps: gradients that aren't finite, options and calls that differ, replicas that drift.

    check         in the header                     what the sum shows     result, the same on all ranks
    NonFinite     number of findings; has a scaler  not 0: a rank has any  the step is skipped, an error, or one warning
    OptionsWatch  contrasts of options and calls    not 0: ranks differ    `MismatchError` names the option or the call
    DriftWatch    doubts; contrast of a digest      not 0, twice           `DriftError` names ranks and parameters
    StepWatch     steps, batches, passes (`steps`)  ranks differ           one warning

Each check is an `Observer`: its numbers are in the header, which is sent in any case, and each rank judges their sums.
Only if a sum shows a finding, ranks exchange details and make one message of them. OptionsWatch and DriftWatch compare
values that all ranks should have equal, so they are `Comparison`s. To add another comparison, write its values
(`measure`) and its message (`conclude`). On a GPU `header` reads the sums late. `header` itself counts the kinds of
passes. `digests` has the numbers by which values are compared.

[Note: how gradients are checked]

"skip" and "raise" add up every bucket that is about to be sent. If the sum isn't finite, each gradient is checked: an
element may be infinite or NaN, or only the sum was too large. The header carries the number of findings, and is read at
once, before an optimizer can step; on a GPU that waits for the device.

"warn" checks the sums over ranks instead, while they are made in shared memory: each rank checks the part that it sums,
so the check costs 1/n. Rank 0 warns at the end of that window or of the next one. If Gloo makes the sums on CPUs,
"warn" adds up every bucket, as the other two policies do. It also does so if buckets share memory
(`ShardedOptimizer(shard_gradients=True)`), and for complex and sparse gradients.

For a model that is divided over ranks, each rank inspects its parts of the sums that FSDP2 has made.

[Note: how options are compared]

At the end of each window every rank makes a checksum of the options in all parameter groups of sharded optimizers. If
checksums differ, all ranks see this, exchange their options, and raise. A new checksum is made only when an option has
changed since the last window. Machines with different rounding may have a different last digit in a cosine schedule. So
the checksum is of numbers rounded to `_DIGITS`, and options within `_OPTIONS_ROUNDING` of each other count as equal.
Options that are tensors on a GPU aren't read: a digest of their rounded values is the second number.

The same checksum covers the arguments of calls that all ranks make (`OptionsWatch.note`), such as clipping.

[Note: how ranks compare]

Trained parameters are divided into *portions* of equal cost. At the end of a window in which a portion is due, each
rank makes a digest of the portion's bytes, and the header carries two numbers:

    [0]  whether this rank doubts that replicas are meant to be equal, plus a contrast of its machine's properties
    [1]  a contrast of the digest with other ranks' (`digests.contrast`)

Added over ranks, contrasts give 0 if all ranks have the same value. So all ranks reach the same result without an extra
collective. Only if digests differ, ranks determine which parameters differ, and by how much.

In a divided model, ranks that differ only along "replicate" have the same parts of all parameters. The header is added
over all ranks of the model, and a digest is contrasted only with digests of the same parts. All ranks, even those with
nothing to compare, go through the same windows and states, so all raise if replicas of any part differ.

[Note: differences that are no fault]

- Parameters that are changed for one pass and put back before the optimizer steps (sharpness-aware minimisation, with
  each rank's own gradient). So a difference counts only if it is still there after the next step of an optimizer.
- Ranks that step independently: communication hooks other than torch's averaging hooks, optimizers that step in an
  accumulation window, `init_sync=False`. A rank that notices one of these *doubts*. As soon as one rank doubts, no rank
  compares any more.
- Ranks of a `LocalSGD`, until it is closed. Closing makes parameters and optimizer state equal again.
- Ranks within `join`, when some have left. They become equal at its end.
- Ranks on unlike machines, which may round differently, unless the user has set `compare_every`.
- Parameters that aren't trained aren't read: training doesn't change them. Module buffers are either made equal at the
  end of every window, or are each rank's own.

If all differences are rounding, there is one warning and training goes on.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import itertools
import marshal
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn, optim

from evenstep.errors import ConfigurationError, DriftError, MismatchError, NonFiniteError
from evenstep.ground.compat.torch_tensors import local_part
from evenstep.ground.computing import determinism
from evenstep.ground.health.users_code import warn
from evenstep.replica.gradients.buckets.bucket import Bucket, total_of
from evenstep.replica.gradients.observer import Observer
from evenstep.replica.gradients.window import Window
from evenstep.replica.monitors.digests import canonical, contrast, digest, distance, together
from evenstep.replica.monitors.in_backward import InBackward
from evenstep.replica.monitors.steps import StepWatch
from evenstep.transport.core.nonfinite_monitor import monitor_sums
from evenstep.transport.core.object_collectives import exchange
from evenstep.transport.core.transport import Transport
from evenstep.world import World

Number = float | Tensor  # a 0-dim float64 tensor if it comes from a GPU, so that nothing waits


class Comparison(Observer):
    """A check that ranks have equal values. A subclass defines the values (`measure`) and the message (`conclude`).

    Args:
        rank: This rank's number among the compared ranks.
        num_ranks: The number of compared ranks.

    Attributes:
        num_windows: The number of windows in which this rank has compared.
        is_apart: Whether each rank steps independently, so that nothing is compared.
    """

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.num_windows = 0
        self.is_apart = False
        self._place = (rank, num_ranks)

    def measure(self) -> tuple[Any, Sequence[Number]]:
        """Return the value of `sent`, for `judge` and `conclude`, and `num_numbers` numbers from `contrast`."""
        raise NotImplementedError

    def contrast(self, value: Any) -> Number:
        """A number whose sum over ranks is 0 if all have the same `value`: a digest, or plain values up to rounding."""
        return contrast(value if isinstance(value, Tensor) else checksum(value), *self._place)

    def header_numbers(self, window: Window) -> Sequence[float] | Tensor:
        """See `Observer`."""
        self.sent = None
        if self.is_apart:
            return (0.0,) * self.num_numbers
        self.num_windows += 1
        self.sent, numbers = self.measure()
        return as_row(*numbers)

    def set_apart(self, is_apart: bool) -> None:
        """See `Observer`."""
        self.is_apart = is_apart


def as_row(*numbers: Number) -> Sequence[float] | Tensor:
    """Return numbers in the form of `Observer.header_numbers`: one tensor if some of them are on a GPU."""
    if Tensor not in map(type, numbers):
        return numbers  # type: ignore[return-value]
    like = next(each for each in numbers if isinstance(each, Tensor))
    return torch.stack([each if isinstance(each, Tensor) else torch.full_like(like, each) for each in numbers])


# ---------------------------------------------------------------------- gradients that aren't finite

Policy = Literal["warn", "skip", "raise"]
_MAX_NAMED = 5  # parameters in a message


def validate_policy(policy: str | None) -> None:
    """Refuse an unknown policy.

    Raises:
        ConfigurationError: The policy isn't "warn", "skip", "raise" or None.
    """
    if policy not in ("warn", "skip", "raise", None):
        raise ConfigurationError(f"on_nonfinite={policy!r}; 'warn', 'skip', 'raise', or None.")


class Finder:
    """Finds the names of this rank's gradients that aren't finite. Waits for a GPU only in `take`."""

    def __init__(self) -> None:
        self._peaks: list[tuple[Sequence[str], Tensor]] = []  # (names, [n] largest absolute values)

    def check(self, names: Sequence[str], gradients: Sequence[Tensor], whole: Sequence[Tensor] | None = None) -> None:
        """Check some gradients.

        Args:
            names: Names of the gradients' parameters.
            gradients: The gradients, on one device.
            whole: The same gradients in fewer, larger tensors; None: there are no such tensors.
        """
        found = [(name, each) for name, each in zip(names, gradients, strict=True) if each.numel()]
        if not found:
            return
        with torch.no_grad():
            by_size = sorted(whole or gradients, key=Tensor.numel)  # so that small tensors are neighbours
            if found[0][1].device.type == "cpu" and all(map(math.isfinite, map(total_of, together(by_size)))):
                return
            peaks = torch.stack([each.abs().amax().double() for _, each in found])
        self._peaks.append(([name for name, _ in found], peaks))

    def check_grads(self, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
        """Check this rank's part of `p.grad` of some parameters."""
        found = [(name, p.grad) for name, p in zip(names, parameters, strict=True) if p.grad is not None]
        self.check(
            [name for name, _ in found],
            [grad._values() if grad.is_sparse else local_part(grad) for _, grad in found],
        )

    def count(self) -> Number:
        """The number of findings since the last `take`; on a GPU, a number that isn't 0 if there are any."""
        count: Number = 0.0
        for _, peaks in self._peaks:
            bad = (~peaks.isfinite()).sum(dtype=torch.float64)
            count = count + (float(bad) if bad.device.type == "cpu" else bad)
        return count

    def take(self) -> list[str]:
        """Return the names found since the last call."""
        peaks, self._peaks = self._peaks, []
        both = [each for names, values in peaks for each in zip(names, values.isfinite().tolist(), strict=True)]
        return [name for name, is_finite in both if not is_finite]


class NonFinite(Observer):
    """Finds gradients that aren't finite, and skips the step, raises, or warns once, the same on all ranks.

    Args:
        policy: The reaction to such gradients: "warn", "skip" or "raise".
        world: The ranks that take part.
        control: Carries messages on the CPU, in order with the model's passes.
        in_sums: Whether to check the sums over ranks in shared memory instead of this rank's own gradients.
        of_parts: Whether the model is divided over ranks, so that gradients have already been added when they are
            inspected.

    Attributes:
        num_skipped: Number of steps skipped so far.
    """

    num_numbers = 2
    is_read_at_once = True

    def __init__(
        self, policy: Policy, world: World, control: Transport, *, in_sums: bool = False, of_parts: bool = False
    ) -> None:
        self.num_skipped = 0
        self.inspects_buckets = not in_sums
        self._in_sums = in_sums
        self._policy = policy
        self._world = world
        self._control = control
        self._of_parts = of_parts
        self._finder = Finder()
        self._findings: set[tuple[int, int, str]] = set()  # in sums: window, rank (-1: unknown), parameter
        self._num_windows = 0
        self._is_off = False  # whether it has warned
        self._is_apart = False

    def set_apart(self, is_apart: bool) -> None:
        """See `Observer`.

        The ranks of one replica of a divided model can't raise alone: `LocalSGD` checks gradients itself.
        """
        self._is_apart = is_apart and self._of_parts

    # ------------------------------------------------------------------ find

    def watch_buckets(self, buckets: Sequence[Bucket]) -> None:
        """Check the sums in these buckets' memory, as long as the memory exists; inspect the other buckets."""
        summed = [bucket for bucket in buckets if self._is_checked_in_sums(bucket)]
        self.inspects_buckets = len(summed) < len(buckets)
        for bucket in summed:
            begins = torch.tensor([slot.offset_numel for slot in bucket.layout.slots], device="cpu")
            monitor_sums(bucket.flat, functools.partial(self._look_at_sum, begins, bucket.names))

    def _is_checked_in_sums(self, bucket: Bucket) -> bool:
        """Whether a bucket's sums are checked: it has real numbers, and memory that no other bucket uses."""
        layout = bucket.layout
        is_lent = layout.sharding is not None and layout.sharding.frees_gradients
        return self._in_sums and layout.dtype.is_floating_point and not is_lent

    def totals_for(self, bucket: Bucket) -> list[float] | None:
        """See `Observer`."""
        is_wanted = bucket.flat.device.type == "cpu" and bucket.flat.is_floating_point() and not self._is_off
        return [] if is_wanted and not self._is_checked_in_sums(bucket) else None

    def inspect(self, bucket: Bucket, totals: Sequence[float] | None = None) -> None:
        """See `Observer`."""
        if self._is_off or self._is_checked_in_sums(bucket):
            return
        if totals is None or not all(map(math.isfinite, totals)):
            self._finder.check(bucket.names, bucket.sent_views, [bucket.flat])

    def end_window(self, names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
        """See `Observer`."""
        if not (self._is_off or self._is_apart):
            self._finder.check_grads(names, parameters)

    def _look_at_sum(
        self, begins: Tensor, names: Sequence[str], begin: int, result: Tensor, inputs: Sequence[Tensor]
    ) -> None:
        if self._is_off:
            return
        places = (~torch.isfinite(result)).nonzero()[:, 0]
        if len(places) == 0:
            return  # all gradients are finite, only their total was too large
        values = torch.stack([given[places] for given in inputs])
        bad, is_small = ~values.isfinite(), values.abs() < torch.finfo(values.dtype).max / (2 * len(inputs))
        for rank, given in enumerate(inputs):
            if given.data_ptr() == result.data_ptr():
                # The sum has overwritten this rank's input. Blame this rank only if all other inputs are small numbers,
                # which don't explain the sum.
                is_small[rank] = True
                bad[rank] = is_small.all(0)
        slots = torch.searchsorted(begins, places + begin, right=True) - 1
        for rank, here in enumerate([~bad.any(0), *bad], -1):
            self._findings |= {(self._num_windows, rank, names[slot]) for slot in set(slots[here].tolist())}

    # ------------------------------------------------------------------ report

    def header_numbers(self, window: Window) -> Sequence[float] | Tensor:
        """See `Observer`: the number of this rank's unreported findings, and whether a scaler handles them."""
        self.sent = True
        found = self._finder.count() + len(self._findings) if not self._is_off else 0.0
        return as_row(found, float(window.is_scaled))

    def judge(self, sent: Any, sums: Sequence[float]) -> None:
        """See `Observer`."""
        if sums[0] > 0 and (self._policy == "warn" or not sums[1]):
            self.found = sent

    def act(self, window: Window) -> bool:
        """See `Observer`."""
        if self.sent is None:  # a world of one has no header
            numbers = self.header_numbers(window)
            self.judge(self.sent, numbers.tolist() if isinstance(numbers, Tensor) else numbers)
        self.sent = None
        self._num_windows += 1
        if self.found is None:
            self._finder = Finder()  # findings that a scaler handles aren't reported
        return super().act(window)

    def conclude(self, found: Any) -> bool:
        """Skip the step, raise or warn.

        Raises:
            NonFiniteError: The policy is "raise". Raised on all ranks, with the same text.
        """
        number = self._num_windows - 1
        mine = [*sorted(self._findings), *((number, self._world.rank, name) for name in self._finder.take())]
        received = exchange(self._control, {"found": mine, "has_scaler": has_scaler()})
        message, first = self._story([each for theirs in received for each in theirs["found"]])
        has_scaler_anywhere = any(each["has_scaler"] for each in received)
        if self._policy == "warn":
            self._is_off = True
            if self._world.is_main and not has_scaler_anywhere:
                warn(
                    f"{message} (in backward pass {first + 1}). It is now in the parameters, unless the step was "
                    f"skipped. This warning comes once; on_nonfinite='skip' skips such steps, 'raise' ends the run, "
                    f"None turns the check off.",
                )
            return False
        message += "."
        if has_scaler_anywhere:
            message += (
                " If a GradScaler has scaled the loss, pass it, and it handles its overflows itself: "
                "model.backward(loss, scaler=scaler)."
            )
        if self._policy == "raise":
            raise NonFiniteError(f"{message} The model is as before this step.")
        self.num_skipped += 1
        if self._world.is_main:
            warn(f"{message} All ranks skip this step (number {self.num_skipped}).")
        return True

    def _story(self, found: Sequence[tuple[int, int, str]]) -> tuple[str, int]:
        """The message for the findings of the first window that has any, and that window's number."""
        first = min(number for number, _, _ in found)
        by_rank: dict[int, list[str]] = {}
        for number, rank, name in dict.fromkeys(found):
            if number == first:
                by_rank.setdefault(rank, []).append(name)
        who = "at least on rank" if self._policy == "warn" and not self._of_parts else "on rank"
        text = "; ".join(
            f"{'only in the sum over ranks' if rank < 0 else f'{who} {rank}'}: {listed(names)}"
            for rank, names in sorted(by_rank.items())
        )
        where = ", in the parts of its sum that are" if self._of_parts else " before gradients were averaged,"
        return f"a gradient was infinite or not a number{where} {text}", first


def has_scaler() -> bool:
    """Whether a GradScaler is in use in this process, so that occasional overflows are normal."""
    gc.collect()  # a former scaler may still be in a reference cycle
    kinds = torch.amp.GradScaler
    return any(issubclass(type(each), kinds) and each.is_enabled() for each in gc.get_objects())


def listed(names: Sequence[str]) -> str:
    """The first few names of parameters, for messages."""
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(map(repr, names[:_MAX_NAMED])) + more


# ---------------------------------------------------------------------- options and calls that differ

Call = tuple[str, tuple[tuple[str, Any], ...]]  # name of the function, and its arguments: plain values
Facts = tuple[str, Mapping[str, Any]]  # the owner's name, and plain values by name, which should be equal on all ranks

_MAX_CALLS = 1000  # the most calls between two windows
ABOUT_SCHEDULERS = (
    "a scheduler that takes a loss, such as ReduceLROnPlateau, needs the mean over all ranks: world.mean(loss)."
)

_PLAIN = (bool, int, float, str)
_NOT_PLAIN = "(not compared)"
_DIGITS = 9
_MARSHAL_VERSION = 2  # in later versions the bytes depend on reference counts
_OPTIONS_ROUNDING = 1e-8  # not less than the last of `_DIGITS` digits
_ROUNDING_OF_ZERO = 1e-15  # the rounding error of a cosine schedule that has reached 0
_ROUNDED_BITS = 24  # on a GPU: bits of a float64's 52 to round away; leaves about `_DIGITS` digits
_MAX_NUMEL = 16  # the most elements of an option's tensor; of larger tensors only the shape is compared


def options_of(optimizer: optim.Optimizer) -> dict[str, Any]:
    """Return the options that an optimizer's step reads from its parameter groups, by readable name.

    Args:
        optimizer: The optimizer. Only its class's plain options are returned: numbers, texts, small tensors.
    """
    found: dict[str, Any] = {"the number of parameter groups": len(optimizer.param_groups)}
    for number, group in enumerate(optimizer.param_groups):
        of = f" of parameter group {number}"
        found[f"the number of parameters{of}"] = len(group["params"])
        found |= {f"{name}{of}": plain(group.get(name)) for name in optimizer.defaults}
    return {name: value for name, value in found.items() if value is not _NOT_PLAIN}


def facts_of(optimizers: Sequence[Mapping[str, Any]]) -> list[Facts]:
    """The results of `options_of` for several optimizers, in the form of `find_difference`. Pure."""
    count = len(optimizers)
    return [(f"optimizer {n + 1} of {count}" if count > 1 else "", each) for n, each in enumerate(optimizers)]


def find_difference(received: Sequence[Sequence[Facts]]) -> str | None:
    """A description of the first fact that differs between ranks, or None. Pure.

    Args:
        received: For each rank, facts about its optimizers or calls, in the same order on all ranks.
    """
    for rank, each in enumerate(received):
        for first, other in itertools.zip_longest(received[0], each):
            if first is None or other is None:
                has, has_not = (0, rank) if other is None else (rank, 0)
                return f"{(first or other)[0]} was called on rank {has} and not on rank {has_not}"
            if first[0] != other[0]:
                return f"rank 0 called {first[0]} where rank {rank} called {other[0]}"
            for name in (*first[1], *other[1]):
                ours, theirs = first[1].get(name), other[1].get(name)
                if not _are_close(ours, theirs):
                    whose = f"{first[0]}: {name}" if first[0] else name
                    return f"{whose} is {ours!r} on rank 0 and {theirs!r} on rank {rank}"
    return None


class OptionsWatch(Comparison):
    """Compares the options of sharded optimizers, and the arguments of calls that all ranks make.

    Args:
        world: The ranks that take part.
        control: Carries messages on the CPU, in order with those of the model's passes.
        are_replicas_alike: Returns whether replicas are meant to be equal, as far as this rank knows. If they aren't,
            ranks may clip differently, unless their optimizers are sharded.
    """

    num_numbers = 2

    def __init__(self, world: World, control: Transport, are_replicas_alike: Callable[[], bool]) -> None:
        super().__init__(world.rank, world.world_size)
        self._are_replicas_alike = are_replicas_alike
        self._world = world
        self._control = control
        self._calls: list[Call] = []
        self._next_number = itertools.count().__next__
        # Optimizers by number. Numbers are the same on all ranks, but some ranks may not have collected a deleted
        # optimizer yet.
        self._optimizers: weakref.WeakValueDictionary[int, optim.Optimizer] = weakref.WeakValueDictionary()
        self._written = b""  # options and calls of the last window, serialised: the fastest test whether they changed
        self._number: Number = 0.0  # the contrast of these options and calls

    def add(self, optimizer: optim.Optimizer) -> None:
        """Collective: compare this optimizer's options from now on, as long as it lives."""
        self._optimizers[self._next_number()] = optimizer

    def note(self, who: str, given: Sequence[tuple[str, Any]]) -> None:
        """Record a call that every rank has to make with the same arguments before the next window ends."""
        if len(self._calls) < _MAX_CALLS and not self.is_apart:
            self._calls.append((who, tuple(given)))

    @property
    def has_optimizers(self) -> bool:
        """Whether a ShardedOptimizer is divided over several ranks, so that its parts have to fit together."""
        return bool(self._optimizers) and self._world.world_size > 1

    @property
    def alive(self) -> list[optim.Optimizer]:
        """The model's ShardedOptimizers, which are divided if there are several ranks."""
        return list(self._optimizers.values())

    def has_divided(self) -> bool:
        """Whether a ShardedOptimizer of the model is in use."""
        if self.alive:
            gc.collect()  # optimizers are in reference cycles: an unused optimizer may not be collected yet
        return bool(self.alive)

    def measure(self) -> tuple[Sequence[Call], Sequence[Number]]:
        """See `Comparison`: the calls since the last window; contrasts of calls and options, and of unread options."""
        calls, self._calls = self._calls, []
        groups = [(group, optimizer.defaults) for optimizer in self.alive for group in optimizer.param_groups]
        options: list[list[Any]] = [[*map(group.get, names)] for group, names in groups]
        values: Any = (calls, [len(group["params"]) for group, _ in groups], options)
        far = []
        try:
            written = marshal.dumps(values, _MARSHAL_VERSION)
        except ValueError:  # some values aren't plain
            far = [_rounded_bits(value) for each in options for value in each if _is_far(value)]
            values = plain(values, reads_devices=False)
            written = marshal.dumps(values, _MARSHAL_VERSION)
        if written != self._written:
            self._written, self._number = written, self.contrast(plain(values))
        return calls, [self._number, self.contrast(digest(far)) if far else 0.0]

    def conclude(self, found: Sequence[Call]) -> bool:
        """Name the options or calls that differ.

        Raises:
            MismatchError: Options or calls differ. Raised on every rank, with the same text.
        """
        mine = {str(number): options_of(each) for number, each in self._optimizers.items()}
        calls = [(who, {name: plain(value) for name, value in given}) for who, given in found]
        received = exchange(self._control, {"options": mine, "calls": calls, "alike": self._are_replicas_alike()})
        numbers = [number for number in mine if all(number in each["options"] for each in received)]
        for number in mine.keys() - numbers:
            del self._optimizers[int(number)]
        noticed = f"noticed in backward pass {self.num_windows}"
        difference = find_difference([facts_of([each["options"][number] for number in numbers]) for each in received])
        if difference is not None:
            raise MismatchError(
                f"the ranks step with different options: {difference} ({noticed}), and each rank steps its own part of "
                f"the parameters. Set the same options on all ranks; {ABOUT_SCHEDULERS} An optimizer that computes an "
                f"option from all parameters in its step, as Prodigy does its d, can't be divided: use it without "
                f"ShardedOptimizer."
            )
        if numbers or all(each["alike"] for each in received):
            difference = find_difference([each["calls"] for each in received])
            if difference is not None:
                raise MismatchError(
                    f"the ranks were given different arguments: {difference} ({noticed}; it happened before that). "
                    f"Make the same calls with the same arguments on all ranks, and resume from a checkpoint."
                )
        return False


def checksum(value: Any) -> int:
    """A 64-bit checksum of plain values, rounded first.

    Numbers that differ by rounding rarely have different checksums. Pure.
    """
    made = hashlib.blake2b(repr(_rounded(value)).encode(), digest_size=8).digest()
    return int.from_bytes(made, "little", signed=True)


def plain(value: Any, *, reads_devices: bool = True) -> Any:
    """Return an option or argument as a number, a text, or tuples of them; "(not compared)" for other values.

    Args:
        value: Numbers, texts, small tensors, and lists and tuples of them are compared.
        reads_devices: Whether to read tensors on a GPU, which waits for the device; else only their shape is compared.
    """
    if value is None or type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor):
        is_read = value.numel() <= _MAX_NUMEL and (reads_devices or value.device.type == "cpu")
        return value.tolist() if is_read else f"a tensor {list(value.shape)}"
    if isinstance(value, tuple | list):
        return tuple(plain(each, reads_devices=reads_devices) for each in value)
    return next((kind(value) for kind in _PLAIN if isinstance(value, kind)), _NOT_PLAIN)  # numpy's become python's


def _is_far(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type != "cpu" and value.numel() <= _MAX_NUMEL


def _rounded_bits(value: Tensor) -> Tensor:
    bits = value.detach().to(torch.float64, copy=True).reshape(-1).view(torch.int64)
    return (bits + (1 << (_ROUNDED_BITS - 1))) >> _ROUNDED_BITS


def _rounded(value: Any) -> Any:
    """A result of `plain`, or a list of them, with numbers rounded for the checksum."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    return tuple(map(_rounded, value)) if isinstance(value, tuple | list) else value


def _are_close(one: Any, other: Any) -> bool:
    """Whether two results of `plain` are equal up to rounding."""
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(_are_close, one, other))
    if isinstance(one, float) and isinstance(other, float):
        is_close = math.isclose(one, other, rel_tol=_OPTIONS_ROUNDING, abs_tol=_ROUNDING_OF_ZERO)
        return is_close or (math.isnan(one) and math.isnan(other))
    return type(one) is type(other) and bool(one == other)


# ---------------------------------------------------------------------- replicas that drift apart

DEFAULT_EVERY = 64

_LEAST_BYTES = 512 << 10  # of a portion: for a smaller one, the overhead would exceed the time to read it
_CALL_BYTES = 16 << 10  # bytes that can be read in the time that python takes for one more tensor
_ROUNDING = 16  # times the dtype's epsilon, relative to a tensor's largest value


@dataclass(frozen=True)
class Piece:
    """A range of rows of a parameter.

    Attributes:
        parameter: The parameter's number.
        begin: First row, along the first dimension.
        end: One past the last row.
    """

    parameter: int
    begin: int
    end: int


Portion = tuple[Piece, ...]


@dataclass(frozen=True)
class Replicas:
    """The ranks that have the same parameters, or the same parts of them.

    Attributes:
        rank: This rank's number among these ranks.
        numbers: The rank number of each, for messages.
        transport: Carries tensors between these ranks.
        control: Carries messages between these ranks, on the CPU.
    """

    rank: int
    numbers: Sequence[int]
    transport: Transport
    control: Transport


def plan_portions(sizes: Sequence[tuple[int, int]], every: int) -> tuple[Portion, ...]:
    """Divide parameters into at most `every` portions of about the same cost. Each row is in one portion. Pure.

    Args:
        sizes: For each parameter, the number of rows and the bytes of a row.
        every: Number of windows in which all parameters are compared once.
    """
    in_all = sum(rows * row_bytes + _CALL_BYTES for rows, row_bytes in sizes if rows)
    enough = max(_LEAST_BYTES, -(-in_all // every))
    portions: list[list[Piece]] = [[] for _ in range(-(-in_all // enough))]
    cost = 0  # cost of everything before this parameter's rows
    for index, (rows, row_bytes) in enumerate(sizes):
        cost += _CALL_BYTES if rows else 0
        begin = 0
        while begin < rows:
            number = (cost + begin * row_bytes) // enough
            end = min(rows, -((cost - (number + 1) * enough) // row_bytes))  # includes the row at the border
            portions[number].append(Piece(index, begin, end))
            begin = end
        cost += rows * row_bytes
    return tuple(tuple(portion) for portion in portions if portion)


def find_minority(digests: Sequence[Sequence[int]]) -> tuple[list[int], list[int], int]:
    """Find the pieces that differ, the ranks that differ from the majority, and a typical rank. Pure.

    Args:
        digests: The digest of each piece, by rank.

    Returns:
        The pieces that differ; the ranks that differ in any piece from a majority of more than half of the ranks, or
        none if there is no such majority; a rank of the largest group.
    """
    num_ranks = len(digests)
    differing = [piece for piece in range(len(digests[0])) if len({each[piece] for each in digests}) > 1]
    minority: set[int] = set()
    typical = 0
    for piece in reversed(differing):
        values = [each[piece] for each in digests]
        most = max(values, key=values.count)
        typical = values.index(most)
        if 2 * values.count(most) > num_ranks:
            minority |= {rank for rank, value in enumerate(values) if value != most}
    return differing, sorted(minority), typical


class DriftWatch(Comparison):
    """Compares this rank's parameters with its replicas'.

    Args:
        names: Names of the parameters.
        parameters: The trained parameters.
        replicas: The ranks that have the same parameters.
        everybody: Carries messages between all ranks of the model, on the CPU, in order with the model's passes.
        every: Number of windows in which all parameters are compared once.
        is_vouched: Whether the user has set `compare_every`, so that there is no doubt.
    """

    num_numbers = 2

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        replicas: Replicas,
        everybody: Transport,
        *,
        every: int,
        is_vouched: bool,
    ) -> None:
        super().__init__(replicas.rank, len(replicas.numbers))
        self._names = names
        self._parameters = parameters
        self._replicas = replicas
        self._everybody = everybody
        self._is_vouched = is_vouched
        portions = plan_portions([_rows(self._values_of(index)) for index in range(len(parameters))], every)
        # No portion is due in the first of many windows: no optimizer has stepped before it.
        places = [(2 + number * every // len(portions)) % every for number in range(len(portions))]
        self._due = dict(zip(places, portions, strict=True))
        self._every = every
        self._machine = 0.0 if is_vouched else self.contrast(describe_machine(parameters[0].device))
        self._doubts = False
        self._has_warned = False
        self._versions: list[int] | None = None
        self._stepped: set[int] = set()  # ids of optimizers that have stepped since the last window
        self._left: list[int] | None = None  # versions of parameters after the last step on an average; else None
        self._steppers: list[weakref.ref[Any]] = []  # optimizers that have stepped the suspect, in order
        self._watch_steps(None)

    def set_apart(self, is_apart: bool) -> None:
        """See `Observer`.

        Replicas are equal again when ranks step together again, so earlier suspicions are dropped.
        """
        super().set_apart(is_apart)
        self._versions = None
        self._watch_steps(None)

    @property
    def is_on(self) -> bool:
        """Whether parameters are compared, as far as this rank knows."""
        return not (self._doubts or self.is_apart)

    def doubt(self) -> None:
        """Stop comparing, because replicas may be meant to differ; does nothing if the user has set `compare_every`."""
        self._doubts = self._doubts or not self._is_vouched

    # ------------------------------------------------------------------ called by the engine

    def end_local_pass(self) -> None:
        """See `Observer`."""
        if self._versions is None and self.is_on:
            self._versions = self._versions_now()

    def header_numbers(self, window: Window) -> Sequence[float] | Tensor:
        """See `Observer`."""
        self._stepped = set()
        return super().header_numbers(window)

    def measure(self) -> tuple[tuple[Portion, bool], Sequence[Number]]:
        """See `Comparison`: `sent` is a portion, and whether it has differed before."""
        if self._versions is not None and self._versions != self._versions_now():
            self.doubt()  # an optimizer has stepped on this rank's own gradients
        self._versions = None
        is_again = self._suspect is not None
        portion = self._suspect or self._due.get(self.num_windows % self._every, ())
        number: Number = 0.0
        if portion and self.is_on:
            number = self.contrast(self._digest(portion) if self._after_step is None else self._after_step)
        return (portion, is_again), [self._machine + self._doubts, number]

    def judge(self, sent: tuple[Portion, bool], sums: Sequence[float]) -> None:
        """See `Observer`. A difference counts if it is still there after the next step of an optimizer."""
        portion, is_again = sent
        some_doubt, differs = map(bool, sums)
        if some_doubt:
            self._doubts = True
            self._watch_steps(None)
        elif is_again and portion is self._suspect:  # on a GPU, a portion is sent twice before it is judged
            self._watch_steps(None)
            self.found = portion if differs else None
        elif differs and not is_again and self._suspect is None:  # one suspect at a time
            self._watch_steps(portion)

    def conclude(self, found: Portion) -> bool:
        """Raise if replicas have drifted apart, or warn of rounding.

        Raises:
            DriftError: Replicas have drifted apart. Raised on every rank, with the same text.
        """
        received: list[tuple[str, bool]] = exchange(
            self._everybody, self._explain(found, f"noticed in backward pass {self.num_windows}")
        )
        for text, is_rounding in received:
            if text and not is_rounding:
                self._left = None  # a program that catches this error mustn't get it again at the end
                raise DriftError(text)
        texts = [text for text, _ in received if text]
        if texts and self._everybody.rank == 0 and not self._has_warned:
            self._has_warned = True
            warn(texts[0])
        return False

    # ------------------------------------------------------------------ parts

    def _watch_steps(self, suspect: Portion | None) -> None:
        """Compute the digest of a portion after each step of an optimizer from now on; None: of no portion."""
        self._suspect = suspect
        self._after_step: Tensor | None = None  # 0-dim, int64: the suspect's digest after the last step
        if suspect is not None:
            self._steppers = []

    def stepped(self, optimizer: optim.Optimizer) -> None:
        """See `Observer`."""
        versions = self._versions_now()
        if versions != self._left:
            self._left = None if id(optimizer) in self._stepped else versions
        self._stepped.add(id(optimizer))
        if self._suspect is not None:
            self._after_step = self._digest(self._suspect)
            suspects = {id(self._parameters[piece.parameter]) for piece in self._suspect}
            if any(id(p) in suspects for group in optimizer.param_groups for p in group["params"]):
                self._steppers.append(weakref.ref(optimizer))

    def left_by_last_step(self) -> list[int | None] | None:
        """Digests of all parameters, with the values after the last step on an average.

        Returns:
            For each parameter its digest, or None if it has changed since. Or None instead of the list, if replicas may
            be meant to differ.
        """
        if not self.is_on or self._left is None:
            return None
        pieces = self._wholes(range(len(self._parameters)))
        return [
            int(digest([canonical(self._rows_of(piece))])) if piece.end and now == left else None
            for piece, now, left in zip(pieces, self._versions_now(), self._left, strict=True)
        ]

    def explain_end(self, differing: Sequence[int], timeout_s: float) -> tuple[str, bool]:
        """Collective among replicas: like `_explain`, for some parameters, when the run has ended.

        Args:
            differing: Numbers of the parameters.
            timeout_s: Deadline for the other replicas, one of which may not take part.
        """
        for transport in (self._replicas.control, self._replicas.transport):
            transport.set_timeout(timeout_s)
        self._steppers = []
        return self._explain(self._wholes(differing), "noticed at the end of the run")

    def _wholes(self, parameters: Iterable[int]) -> Portion:
        return tuple(Piece(index, 0, _rows(self._values_of(index))[0]) for index in parameters)

    def _versions_now(self) -> list[int]:
        return [parameter._version for parameter in self._parameters]

    def _rows_of(self, piece: Piece) -> Tensor:
        """[rows, ...]."""
        return self._values_of(piece.parameter)[piece.begin : piece.end]

    def _values_of(self, parameter: int) -> Tensor:
        """The part of a parameter that replicas have in common. A 0-dim parameter has one row."""
        values = local_part(self._parameters[parameter]).data
        return values if values.dim() else values.reshape(1)

    def _digest(self, portion: Portion) -> Tensor:
        return digest([self._rows_of(piece) for piece in portion])

    def _explain(self, portion: Portion, when: str) -> tuple[str, bool]:
        """Collective among replicas: a message about their differences (or ""), and whether all are only rounding.

        Args:
            portion: The pieces to compare.
            when: When the difference was noticed, for the message.
        """
        control = self._replicas.control
        # All NaNs count as equal, whatever their bits, and so do both zeros.
        own = [int(digest([canonical(self._rows_of(piece))])) for piece in portion]
        steppers = [options_of(each) for ref in self._steppers if (each := ref()) is not None]
        received = exchange(control, {"digests": own, "steppers": steppers})
        differing, minority, typical = find_minority([each["digests"] for each in received])
        if not differing:
            return "", True
        pieces = [portion[index] for index in differing]
        by_rank: list[list[float]] = exchange(control, [self._distance(piece, typical) for piece in pieces])
        distances = [max(each) for each in zip(*by_rank, strict=True)]
        text = f"the replicas have drifted apart: {self._story(pieces, max(distances), minority)} ({when})."
        limits = [_ROUNDING * torch.finfo(self._parameters[piece.parameter].dtype).eps for piece in pieces]
        if all(distance <= limit for distance, limit in zip(distances, limits, strict=True)):
            return (
                f"{text} That is rounding: the optimizer's step doesn't round in the same way on all ranks. The "
                f"difference may grow. Training goes on, and this warning comes once."
            ), True
        same_number = len({len(each["steppers"]) for each in received}) == 1
        options = find_difference([facts_of(each["steppers"]) for each in received]) if same_number else None
        if options is not None:
            reason = (
                f"The ranks step with different options: {options}. Set the same options on all ranks, and resume from "
                f"a checkpoint; {ABOUT_SCHEDULERS}"
            )
        else:
            reason = (
                "Something has changed parameters on some ranks only: a step or a zero_grad that some ranks skipped, "
                "code that only one rank runs, a file that only one rank has read, a random number in the optimizer's "
                "step, or faulty memory. Resume from a checkpoint."
            )
        return f"{text} {reason} Where ranks are meant to differ, wrap the model with compare_every=0.", False

    def _distance(self, piece: Piece, typical: int) -> float:
        """Collective: the difference of this rank's piece from a typical rank's, relative to the largest value."""
        own = self._rows_of(piece).detach()
        other = own.contiguous().clone()
        self._replicas.transport.broadcast(other.reshape(-1).view(torch.uint8), typical).wait()
        return distance(own, other)

    def _story(self, pieces: Sequence[Piece], most: float, minority: Sequence[int]) -> str:
        numbers = self._replicas.numbers
        names = list(dict.fromkeys(self._names[piece.parameter] for piece in pieces))
        which = f"parameter{'s' if len(names) > 1 else ''} {listed(names)}"
        amount = "by NaN" if most == float("inf") else f"by up to {most:.1e} of the largest value there"
        if minority:
            ranks = f"rank{'s' if len(minority) > 1 else ''} {', '.join(str(numbers[rank]) for rank in minority)}"
            verb = "differ" if len(minority) > 1 else "differs"
            return f"{ranks} {verb} from the other ranks in {which}, {amount}"
        if len(numbers) == 2:
            pair = " and ".join(map(str, numbers))
            return f"ranks {pair} differ in {which}, {amount}; with two ranks it is undecidable which one is right"
        return f"the ranks differ in {which}, {amount}; no majority agrees, so it is undecidable which are right"


def _rows(values: Tensor) -> tuple[int, int]:
    """(number of rows, bytes of a row); 0 rows if the parameter isn't compared."""
    if type(values) is not Tensor or values.layout is not torch.strided or not values.numel():
        return 0, 0
    return len(values), values.nbytes // len(values)


def describe_machine(device: torch.device) -> dict[str, str]:
    """Return the properties on which rounding depends: equal on ranks that round in the same way."""
    facts = determinism.facts(device)
    return {name: fact for name, fact in facts.items() if device.type == "cpu" or name != "num_threads"}


# ---------------------------------------------------------------------- all checks of a model


class Monitors:
    """The observers of one model's steps.

    Args:
        names: Names of the parameters.
        parameters: The trained parameters.
        world: The ranks that take part.
        transport: Carries the messages of the model's passes.
        control: Carries messages on the CPU, in order with the messages of `transport`.
        on_nonfinite: What happens to a step with a gradient that isn't finite; None: nothing is checked.
        compare_every: Every parameter is compared between ranks once in this many windows; None: once in the default
            number of windows, and only while replicas are certainly meant to be equal; 0: never.
        starts_equal: Whether the replicas were made equal when the model was wrapped.
        replicas: The ranks that have the same parameters as this rank, or the same parts of them; None: no other rank
            has.
        is_divided: Whether FSDP2 or tensor parallelism has divided the model over ranks, and adds gradients.

    Attributes:
        options: Compares options of optimizers and arguments of steps between ranks.
        drift: Compares parameters between ranks; None: nothing is compared.
        nonfinite: Finds gradients that aren't finite; None: nothing is checked.
        steps: Checks optimizers' steps; None: there is only one rank.
        observers: All observers, in the order in which the engine calls them.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        world: World,
        transport: Transport,
        control: Transport,
        *,
        on_nonfinite: Policy | None,
        compare_every: int | None,
        starts_equal: bool,
        replicas: Replicas | None,
        is_divided: bool = False,
    ) -> None:
        drift = None
        if replicas is not None and compare_every != 0:
            every, is_vouched = compare_every or DEFAULT_EVERY, compare_every is not None
            drift = DriftWatch(names, parameters, replicas, control, every=every, is_vouched=is_vouched)
            if not starts_equal:
                drift.doubt()
        nonfinite = None
        # "warn" checks only on CPUs, because on a GPU it would wait for the device.
        has_sums = world.device.type == "cpu" and (world.world_size > 1 or is_divided)
        if on_nonfinite in ("skip", "raise") or (on_nonfinite == "warn" and has_sums):
            in_sums = on_nonfinite == "warn" and transport.name == "shared memory" and not is_divided
            nonfinite = NonFinite(on_nonfinite, world, control, in_sums=in_sums, of_parts=is_divided)
        steps_late = not is_divided and (world.world_size > 1 or world.virtual_ranks is not None)
        watches = () if drift is None else (drift,)
        self.drift, self.nonfinite = drift, nonfinite
        self.steps = StepWatch(parameters, world, control, watches) if world.world_size > 1 else None
        self.options = OptionsWatch(world, control, lambda: drift is not None and drift.is_on)
        # The check that can skip a step comes first. Options come before parameters, because different options make
        # parameters differ.
        found = (nonfinite, self.options, drift, self.steps, InBackward(parameters if steps_late else ()))
        self.observers: tuple[Observer, ...] = tuple(each for each in found if each is not None)

    def are_replicas_alike(self) -> bool:
        """Whether replicas are meant to be equal, as far as this rank knows."""
        return self.drift is not None and self.drift.is_on
