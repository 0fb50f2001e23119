"""The checks of one model's steps: gradients that aren't finite, options and calls that differ, replicas that drift.

    check         in the header                     what the sum shows     what is done, on all ranks alike
    NonFinite     found something; has a scaler     some rank has          the step is skipped, an error, or one warning
    OptionsWatch  contrast of a checksum            not 0: ranks differ    `MismatchError` names the option or the call
    DriftWatch    doubts; contrast of a digest      not 0, twice           `DriftError` names ranks and parameters

Each is an `Observer`: a header that travels in any case carries its numbers, each rank judges their sums, and only if
they show something ranks exchange what they have, and make one message of it. `header` reads them late on a GPU, and
counts kinds of passes itself. `digests` has the numbers by which values are compared.

[Note: how gradients are checked]

"skip" and "raise" add up every bucket that is about to travel: a sum is finite unless an element isn't (or the sum is
very large, which a second look at each gradient tells apart). The header carries whether a rank has found something,
and is read at once, before an optimizer can step: on a GPU that waits for it.

"warn" checks the sums over ranks instead, while they are made in shared memory: each rank checks the part that it
makes, so it costs 1/n. Rank 0 warns at the end of the window, or of the next one. Where Gloo makes the sums on CPUs,
"warn" adds up every bucket as the other two do.

Of a model that is divided over ranks each rank inspects its parts of the sums, which FSDP2 has made by then.

[Note: how options are compared]

Of the options of all parameter groups of optimizers that are divided over ranks, every rank makes a checksum at the
end of each window. Where checksums differ, which all ranks see, ranks exchange their options, and all raise. The
checksum is made anew only when an option is another object than in the window before. Hosts that round otherwise may
have another last digit in a cosine: the checksum is of numbers rounded to `_DIGITS`, and those that lie within
`_OPTIONS_ROUNDING` of each other are the same. Options that are tensors on a GPU aren't read: their digest, rounded
too, is added there.

What else a step is given (`OptionsWatch.note`) is in the same checksum: arguments of clipping.

[Note: how ranks compare]

Trained parameters are divided into *portions* of equal cost. At the end of a window in which a portion is due, each
rank makes a digest of its bytes, and the header, which travels in any case, carries two numbers:

    [0]  whether this rank doubts that replicas are meant to be equal
    [1]  a contrast of the digest with other ranks' (`digests.contrast`)

Added over ranks, the second is 0 if all digests are the same: so every rank knows, and all know the same, without a
collective of its own. Only where they differ do ranks find out which, and by how much.

Of a divided model, ranks that differ only along "replicate" have the same parts of all parameters. The header is added
over all ranks of the model, and a digest is contrasted with those of the same parts. All ranks come to the same windows
and states, whatever each has to compare, so all of them raise if replicas of any part differ.

[Note: what may differ, and is no fault]

- Parameters that are changed for one pass and put back before the optimizer steps (sharpness-aware minimisation, with
  each rank's own gradient). So a difference counts only if it is still there after the next step of an optimizer.
- Ranks that step on their own: communication hooks other than torch's that average, optimizers that step in an
  accumulation window, `init_sync=False`. A rank that sees such a thing *doubts*, and as soon as one doubts no rank
  compares any more.
- Ranks of a `LocalSGD`, until it is closed, which makes parameters and what optimizers keep equal again.
- Ranks within `join`, of which some have left. They are made equal at its end.
- Ranks on unlike machines, which may round differently. They find out in the first window.
- Parameters that aren't trained aren't read: training doesn't change them. Module buffers are either made equal at the
  end of every window, or are each rank's own.

A difference of rounding alone leads to one warning, and ends nothing.
"""

from __future__ import annotations

import ast
import functools
import gc
import hashlib
import itertools
import math
import operator
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn, optim
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from evenstep.errors import ConfigurationError, DriftError, MismatchError, NonFiniteError
from evenstep.ground.compat.torch_tensors import local_part
from evenstep.replica.gradients.buckets.bucket import Bucket, total_of
from evenstep.replica.gradients.observer import Observer
from evenstep.replica.gradients.window import Window
from evenstep.replica.monitors.digests import canonical, contrast, describe_machine, digest, distance, together
from evenstep.replica.monitors.in_backward import InBackward
from evenstep.replica.monitors.steps import StepWatch
from evenstep.transport.core.nonfinite_monitor import monitor_sums
from evenstep.transport.core.object_collectives import exchange
from evenstep.transport.core.transport import Transport
from evenstep.world import World

# ---------------------------------------------------------------------- gradients that aren't finite

Policy = Literal["warn", "skip", "raise"]
_MAX_NAMED = 5  # parameters in a message


def validate_policy(policy: str | None) -> None:
    """Refuse an unknown policy.

    Raises:
        ConfigurationError: It is none of "warn", "skip", "raise" and None.
    """
    if policy not in ("warn", "skip", "raise", None):
        raise ConfigurationError(f"on_nonfinite={policy!r}; 'warn', 'skip', 'raise', or None.")


class Finder:
    """Finds gradients of this rank that aren't finite, by name. Waits for a GPU only in `take`."""

    def __init__(self) -> None:
        self._peaks: list[tuple[Sequence[str], Tensor]] = []  # (names, [n] largest absolute values)

    def look(self, names: Sequence[str], gradients: Sequence[Tensor], whole: Sequence[Tensor] | None = None) -> None:
        """Look at some gradients.

        Args:
            names: Of their parameters.
            gradients: On one device.
            whole: The same numbers in fewer tensors; None: there are none.
        """
        found = [(name, each) for name, each in zip(names, gradients, strict=True) if each.numel()]
        if not found:
            return
        is_on_cpu = found[0][1].device.type == "cpu"
        with torch.no_grad():
            by_size = sorted(whole or gradients, key=Tensor.numel)  # so that all small ones are neighbours
            if is_on_cpu and all(map(math.isfinite, map(total_of, together(by_size)))):
                return
            peaks = torch.stack([each.abs().amax().double() for _, each in found])
            if is_on_cpu and bool(peaks.isfinite().all()):
                return  # a large total of finite numbers
            self._peaks.append(([name for name, _ in found], peaks))

    def look_in_grads(self, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
        """Look at what `p.grad` of some parameters has on this rank."""
        found = [(name, p.grad) for name, p in zip(names, parameters, strict=True) if p.grad is not None]
        self.look(
            [name for name, _ in found],
            [grad._values() if grad.is_sparse else local_part(grad) for _, grad in found],
        )

    def count(self) -> float | Tensor:
        """0 if nothing has been found since the last `take`; 0-dim on a GPU, without waiting for it."""
        count: float | Tensor = 0.0
        for _, peaks in self._peaks:
            count = count + (1.0 if peaks.device.type == "cpu" else (~peaks.amax().isfinite()).double())
        return count

    def take(self) -> list[str]:
        """Return the parameters that were found since the last call."""
        peaks, self._peaks = self._peaks, []
        both = [each for names, values in peaks for each in zip(names, values.isfinite().tolist(), strict=True)]
        return [name for name, is_finite in both if not is_finite]

    def forget(self) -> None:
        """Forget what was found."""
        self._peaks = []


class NonFinite(Observer):
    """Finds gradients that aren't finite, and skips the step, raises, or warns once, as the ranks decide together.

    Args:
        policy: What happens to the step.
        world: The ranks that take part.
        control: Carries messages on the CPU, in order with the model's passes.
        in_sums: Check the sums over ranks in shared memory, and not this rank's own gradients.
        of_parts: The model is divided over ranks, and gradients have been added when they are inspected.

    Attributes:
        num_skipped: Steps that were skipped so far.
    """

    num_numbers = 2
    is_read_at_once = True

    def __init__(
        self, policy: Policy, world: World, control: Transport, *, in_sums: bool = False, of_parts: bool = False
    ) -> None:
        self.num_skipped = 0
        self.inspects_buckets = not in_sums
        self._policy = policy
        self._world = world
        self._control = control
        self._in_sums, self._of_parts = in_sums, of_parts
        self._finder = Finder()
        self._findings: set[tuple[int, int, str]] = set()  # in sums: window, rank (-1: of all together), parameter
        self._num_windows = 0
        self._is_told: bool | None = None  # None: no header has come
        self._is_off = False  # it has warned

    # ------------------------------------------------------------------ look

    def watch_buckets(self, buckets: Sequence[Bucket]) -> None:
        """Check the sums of buckets, as long as their memory lives."""
        for bucket in buckets if self._in_sums else ():
            layout = bucket.layout
            is_lent = layout.sharding is not None and layout.sharding.frees_gradients  # memory of several buckets
            if layout.dtype.is_floating_point and not is_lent:
                begins = torch.tensor([slot.offset_numel for slot in layout.slots], device="cpu")
                monitor_sums(bucket.flat, functools.partial(self._look_at_sum, begins, bucket.names))

    def totals_for(self, bucket: Bucket) -> list[float] | None:
        """See `Observer`."""
        is_wanted = bucket.flat.device.type == "cpu" and bucket.flat.is_floating_point() and not self._is_off
        return [] if is_wanted else None

    def inspect(self, bucket: Bucket, totals: Sequence[float] | None = None) -> None:
        """See `Observer`."""
        if not self._is_off and (totals is None or not all(map(math.isfinite, totals))):
            self._finder.look(bucket.names, bucket.sent_views, [bucket.flat])

    def end_window(self, names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
        """See `Observer`."""
        if not self._in_sums and not self._is_off:
            self._finder.look_in_grads(names, parameters)

    def _look_at_sum(
        self, begins: Tensor, names: Sequence[str], begin: int, result: Tensor, inputs: Sequence[Tensor]
    ) -> None:
        if self._is_off:
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
        for rank, bad in bad_of.items():
            self._findings |= {(self._num_windows, rank, names[slot]) for slot in set(slots[bad].tolist())}

    # ------------------------------------------------------------------ tell

    def header_numbers(self, window: Window) -> Sequence[float] | Tensor:
        """See `Observer`: how much this rank has found that others don't know yet, and whether a scaler handles it."""
        self.sent = True
        found = self._finder.count() + len(self._findings) if not self._is_off else 0.0
        if isinstance(found, Tensor):
            return torch.stack([found, torch.full_like(found, window.is_scaled)])
        return (found, float(window.is_scaled))

    def judge(self, sent: Any, sums: Sequence[float]) -> None:
        """See `Observer`."""
        self._is_told = sums[0] > 0 and (self._policy == "warn" or not sums[1])

    def act(self, window: Window) -> bool:
        """Skip the step, raise or warn, if some rank has found something. Collective then, which all ranks know.

        Raises:
            NonFiniteError: By policy "raise"; on all ranks, with the same text.
        """
        if self._is_told is None:  # a world of one has no header
            numbers = self.header_numbers(window)
            self.judge(True, numbers.tolist() if isinstance(numbers, Tensor) else numbers)
        is_told, self._is_told = self._is_told, None
        number, self._num_windows = self._num_windows, self._num_windows + 1
        if not is_told:
            self._finder.forget()
            return False
        mine = [*sorted(self._findings), *((number, self._world.rank, name) for name in self._finder.take())]
        received = exchange(self._control, {"found": mine, "has_scaler": has_scaler()})
        message, first = self._story([each for theirs in received for each in theirs["found"]])
        has_scaler_anywhere = any(each["has_scaler"] for each in received)
        if self._policy == "warn":
            self._is_off = True
            if self._world.is_main and not has_scaler_anywhere:
                warnings.warn(
                    f"{message} (in backward pass {first + 1}). It is now in the parameters, unless the step was left "
                    f"out. This warning comes once; on_nonfinite='skip' leaves such steps out, 'raise' ends the run, "
                    f"None looks at nothing.",
                    stacklevel=2,
                )
            return False
        message += "."
        if has_scaler_anywhere:
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

    def _story(self, found: Sequence[tuple[int, int, str]]) -> tuple[str, int]:
        """What was found in the first window of several, and the number of that."""
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


def build_nonfinite(
    policy: Policy | None, world: World, transport: Transport, control: Transport, *, of_parts: bool
) -> NonFinite | None:
    """Build the check of a policy; None: none. "warn" checks CPUs only, because it would wait for a GPU."""
    if policy is None or (
        policy == "warn" and (world.device.type != "cpu" or (world.world_size == 1 and not of_parts))
    ):
        return None
    in_sums = policy == "warn" and transport.name == "shared memory" and not of_parts
    return NonFinite(policy, world, control, in_sums=in_sums, of_parts=of_parts)


def has_scaler() -> bool:
    """Whether a GradScaler is in use in this process, so that an overflow now and then is no fault."""
    gc.collect()  # one of a training that is over may wait in a circle of references
    kinds = torch.amp.GradScaler
    return any(issubclass(type(each), kinds) and each.is_enabled() for each in gc.get_objects())


def listed(names: Sequence[str]) -> str:
    """The first few names of parameters, for messages."""
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(map(repr, names[:_MAX_NAMED])) + more


# ---------------------------------------------------------------------- options and calls that differ

Call = tuple[str, tuple[tuple[str, Any], ...]]  # who was called, and what it was given: plain values
Facts = tuple[str, Mapping[str, str]]  # whose, and the texts of values that all ranks have alike, by name

_MAX_CALLS = 1000  # between two windows
ABOUT_SCHEDULERS = "a scheduler that is given a loss, such as ReduceLROnPlateau, wants everybody's: world.mean(loss)."

_SIMPLE = (bool, int, float, str, type(None))
_NOT_PLAIN = "(not compared)"
_DIGITS = 9
_OPTIONS_ROUNDING = 1e-8  # not less than the last of the digits
_ROUNDING_OF_ZERO = 1e-15  # what is left of a cosine that has come to its end
_ROUNDED_BITS = 24  # of a float64's 52, on a GPU; about the digits
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


def facts_of(optimizers: Sequence[Mapping[str, str]]) -> list[Facts]:
    """`options_of` several optimizers as `find_difference` takes them. Pure."""
    count = len(optimizers)
    return [(f"optimizer {n + 1} of {count}" if count > 1 else "", each) for n, each in enumerate(optimizers)]


def find_difference(received: Sequence[Sequence[Facts]]) -> str | None:
    """The first fact that isn't the same everywhere; None: there is none. Pure.

    Args:
        received: By rank, facts of what every rank has or has called in the same order.
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
                if not _are_alike(ours, theirs):
                    return f"{first[0]}{': ' if first[0] else ''}{name} is {ours} on rank 0 and {theirs} on rank {rank}"
    return None


class OptionsWatch(Observer):
    """Compares the options of optimizers that are divided over ranks, and what else steps are given.

    Args:
        world: The ranks that take part.
        control: Carries messages on the CPU, in order with what belongs to the model's passes.
        are_replicas_alike: As far as this rank knows they are meant to be. Where they aren't, ranks may clip as
            they like, if their optimizers aren't sharded.
    """

    num_numbers = 1

    def __init__(self, world: World, control: Transport, are_replicas_alike: Callable[[], bool]) -> None:
        self._are_replicas_alike = are_replicas_alike
        self._world = world
        self._control = control
        self._is_apart = False
        self._calls: list[Call] = []
        self._optimizers: dict[int, weakref.ref[optim.Optimizer]] = {}
        self._num_windows = 0
        self._before: list[Any] | None = None  # the options behind `_number`, if it is enough to look at who they are
        self._key: Any = None  # and what else it is of
        self._number: Sequence[float] | Tensor = (0.0,)
        self._found: Sequence[Call] | None = None  # the calls of a window in which something differed

    def add(self, optimizer: optim.Optimizer) -> None:
        """Collective: compare this optimizer's options from now on, for as long as it lives."""
        self._optimizers[max(self._optimizers, default=-1) + 1] = weakref.ref(optimizer)

    def note(self, who: str, given: Sequence[tuple[str, Any]]) -> None:
        """A call of which every rank makes one like it before the next window ends."""
        if len(self._calls) < _MAX_CALLS:
            self._calls.append((who, tuple(given)))

    @property
    def has_optimizers(self) -> bool:
        """Whether an optimizer is divided over ranks, whose parts then have to fit together."""
        return bool(self._optimizers) and self._world.world_size > 1

    @property
    def alive(self) -> list[optim.Optimizer]:
        """The optimizers that are divided, or would be if there were several ranks."""
        return [optimizer for reference in self._optimizers.values() if (optimizer := reference()) is not None]

    def header_numbers(self, window: Window) -> Sequence[float] | Tensor:
        """See `Observer`."""
        self.sent = None
        if self._is_apart:
            return (0.0,)
        self._num_windows += 1
        self.sent, self._calls = tuple(self._calls), []
        groups = [(optimizer, group) for optimizer in self.alive for group in optimizer.param_groups]
        now = [each for _, group in groups for each in group.values()]
        before, key_before, self._before = self._before, self._key, None
        self._key = (self.sent, [len(group["params"]) for _, group in groups])
        is_same = before is not None and len(before) == len(now) and all(map(operator.is_, before, now))
        if is_same and self._key == key_before:
            self._before = before
            return self._number
        values: list[Any] = [[*map(group.get, optimizer.defaults)] for optimizer, group in groups]
        if all(map(_are_simple, values)):
            self._before = now
        else:
            values = [_plain(each, reads_devices=False) for each in values]
        self._number = self._contrast(checksum((self._key, values)), [group for _, group in groups])
        return self._number

    def judge(self, sent: Sequence[Call], sums: Sequence[float]) -> None:
        """See `Observer`."""
        if sums[0]:
            self._found = sent

    def set_apart(self, is_apart: bool) -> None:
        """See `Observer`."""
        self._is_apart = is_apart
        self._calls = []

    def act(self, window: Window) -> bool:
        """Name the options or calls that differ. Collective if some were found to, which all ranks know.

        Raises:
            MismatchError: On every rank, with the same text.
        """
        found, self._found = self._found, None
        if found is None:
            return False
        mine = {
            str(number): options_of(each) for number, ref in self._optimizers.items() if (each := ref()) is not None
        }
        calls = [(who, {name: repr(value) for name, value in given}) for who, given in found]
        received = exchange(self._control, {"options": mine, "calls": calls, "alike": self._are_replicas_alike()})
        # One that has been thrown away may live on for a while on some of the ranks.
        numbers = [number for number in mine if all(number in each["options"] for each in received)]
        self._optimizers = {int(number): self._optimizers[int(number)] for number in numbers}
        self._before = None
        noticed = f"noticed in backward pass {self._num_windows}"
        difference = find_difference([facts_of([each["options"][number] for number in numbers]) for each in received])
        if difference is not None:
            raise MismatchError(
                f"the ranks step with different options: {difference} ({noticed}), and each steps its own part of the "
                f"parameters. Set options alike on all ranks; {ABOUT_SCHEDULERS}"
            )
        if numbers or all(each["alike"] for each in received):
            difference = find_difference([each["calls"] for each in received])
            if difference is not None:
                raise MismatchError(
                    f"the ranks were given different arguments: {difference} ({noticed}; it was so before that). Every "
                    f"rank makes the same calls with the same arguments. Set them alike, and resume from a checkpoint."
                )
        return False

    def _contrast(self, found: int, groups: Sequence[Mapping[str, Any]]) -> Sequence[float] | Tensor:
        far = [value.detach().reshape(-1) for group in groups for value in group.values() if _is_far(value)]
        whole: int | Tensor = found
        if far:
            bits = torch.cat([each.to(far[0].device, torch.float64) for each in far]).view(torch.int64)
            rounded = (bits + (1 << (_ROUNDED_BITS - 1))) >> _ROUNDED_BITS
            whole = digest([rounded]) + found
        number = contrast(whole, self._world.rank, self._world.world_size)
        return number.reshape(1) if isinstance(number, Tensor) else (number,)


def checksum(value: Any) -> int:
    """Of plain values: 64 bits. Numbers that differ by rounding have the same, but for some at the border. Pure."""
    made = hashlib.blake2b(repr(_rounded(value)).encode(), digest_size=8).digest()
    return int.from_bytes(made, "little", signed=True)


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


def _are_alike(one: str | None, other: str | None) -> bool:
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
        return math.isclose(one, other, rel_tol=_OPTIONS_ROUNDING, abs_tol=_ROUNDING_OF_ZERO)
    return type(one) is type(other) and bool(one == other)


# ---------------------------------------------------------------------- replicas that drift apart

DEFAULT_EVERY = 64

_LEAST_BYTES = 512 << 10  # a portion is not smaller: what is done per portion would cost more than reading it
_CALL_BYTES = 16 << 10  # what could be read in the time that python takes for one more tensor
_ROUNDING = 16  # times the dtype's epsilon, of a tensor's largest value
# Those of torch's hooks after which all ranks have the same gradients, whatever they keep for themselves.
_AVERAGING = (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook)


@dataclass(frozen=True)
class Piece:
    """Some rows of a parameter.

    Attributes:
        parameter: Its number.
        begin: First row, along the first dimension.
        end: Behind the last.
    """

    parameter: int
    begin: int
    end: int


Portion = tuple[Piece, ...]


@dataclass(frozen=True)
class Replicas:
    """The ranks that have the same parameters, or the same parts of them.

    Attributes:
        rank: This rank, among them.
        numbers: What messages call each of them.
        transport: Carries tensors between them.
        control: Carries messages between them, on the CPU.
    """

    rank: int
    numbers: Sequence[int]
    transport: Transport
    control: Transport


def plan_portions(sizes: Sequence[tuple[int, int]], every: int) -> tuple[Portion, ...]:
    """Divide parameters into at most `every` portions that cost about the same. Each row is in one of them. Pure.

    Args:
        sizes: Of each parameter, the number of rows and the bytes of one.
        every: In how many windows all are to be compared once.
    """
    in_all = sum(rows * row_bytes + _CALL_BYTES for rows, row_bytes in sizes if rows)
    enough = max(_LEAST_BYTES, -(-in_all // every))
    portions: list[list[Piece]] = [[]]
    missing = enough
    for index, (rows, row_bytes) in enumerate(sizes):
        missing -= _CALL_BYTES if rows else 0
        begin = 0
        while begin < rows:
            if missing <= 0:
                portions.append([])
                missing += enough
                continue
            end = min(rows, begin + max(1, -(-missing // row_bytes)))
            portions[-1].append(Piece(index, begin, end))
            missing -= (end - begin) * row_bytes
            begin = end
    return tuple(tuple(portion) for portion in portions if portion)


def find_minority(digests: Sequence[Sequence[int]]) -> tuple[list[int], list[int], int]:
    """Find the pieces that differ, the ranks that differ from the majority, and a typical rank. Pure.

    Args:
        digests: By rank, of each piece.

    Returns:
        The pieces that aren't the same everywhere; the ranks that differ from more than half of all in one of them, or
        none where there is no such majority; a rank of the largest group.
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


class DriftWatch(Observer):
    """Compares this rank's parameters with its replicas'.

    Args:
        names: Of the parameters.
        parameters: Those that are trained.
        replicas: The ranks that have the same ones.
        everybody: Carries messages of all ranks of the model, on the CPU, in order with its passes.
        every: In how many windows all are compared once.
        is_vouched: The user has set `compare_every`, so there is no doubt.
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
        self._names = names
        self._parameters = parameters
        self._replicas = replicas
        self._everybody = everybody
        self._is_vouched = is_vouched
        portions = plan_portions([_rows(self._values_of(index)) for index in range(len(parameters))], every)
        # The first window has something else to tell.
        places = [(1 + number * every // len(portions)) % every for number in range(len(portions))]
        self._due = dict(zip(places, portions, strict=True))
        self._every = every
        self._machine = describe_machine(parameters[0].device)
        self._doubts = 0.0
        self._is_off = False
        self._is_apart = False
        self._has_warned = False
        self._num_windows = 0
        self._versions: list[int] | None = None
        self._suspect: Portion | None = None
        self._after_step: Tensor | None = None  # 0-dim, int64: digest of the suspect behind an optimizer's step
        self._steppers: list[weakref.ref[Any]] = []  # optimizers that have stepped the suspect, in that order
        self._stepped: set[int] = set()  # optimizers since the last window, by id
        self._left: list[int] | None = None  # versions of what steps have left; None: of steps without an average
        self._when = ""
        self._found: Portion | None = None

    def set_apart(self, is_apart: bool) -> None:
        """See `Observer`. Replicas are equal again when ranks come together, whatever there was before."""
        self._is_apart, self._versions = is_apart, None
        self._watch_steps(None)

    @property
    def is_on(self) -> bool:
        """Whether parameters are compared, as far as this rank knows."""
        return not (self._is_off or self._doubts or self._is_apart)

    def doubt(self) -> None:
        """Replicas may be meant to differ from now on, unless the user vouches for the contrary."""
        if not self._is_vouched:
            self._doubts = 1.0

    def doubt_hook(self, function: Callable[..., Any]) -> None:
        """Doubt, unless a communication hook is known to average."""
        if function not in _AVERAGING:
            self.doubt()

    # ------------------------------------------------------------------ called by the engine

    def end_local_pass(self) -> None:
        """See `Observer`."""
        if self._versions is None and not self._is_off and not self._is_apart:
            self._versions = self._versions_now()

    def header_numbers(self, window: Window) -> Sequence[float] | Tensor:
        """See `Observer`."""
        self._stepped = set()
        self.sent = None
        if self._is_off or self._is_apart:
            return (0.0, 0.0)
        number, self._num_windows = self._num_windows, self._num_windows + 1
        if self._versions is not None:
            if self._versions != self._versions_now():
                self.doubt()  # an optimizer has stepped on gradients of this rank alone
            self._versions = None
        whole: int | Tensor
        if number == 0:
            self.sent, whole = ("machine", ()), self._machine
        elif self._suspect is not None:
            self.sent = "again", self._suspect
            whole = self._digest(self._suspect) if self._after_step is None else self._after_step
        else:
            portion = self._due.get(number % self._every, ())
            self.sent, whole = ("first", portion), self._digest(portion) if portion else 0
        found = contrast(whole, self._replicas.rank, len(self._replicas.numbers))
        if isinstance(found, Tensor):
            return torch.stack([torch.full_like(found, self._doubts), found])
        return (self._doubts, found)

    def judge(self, sent: tuple[str, Portion], sums: Sequence[float]) -> None:
        """See `Observer`. A difference counts if it is there again behind the next step of an optimizer."""
        why, portion = sent
        num_doubts, differs = sums[0], sums[1] != 0
        if num_doubts or (why == "machine" and differs and not self._is_vouched):
            self._is_off = True
            self._watch_steps(None)
        if self._is_off:
            return
        if why == "first" and differs and self._suspect is None:  # one at a time
            self._watch_steps(portion)
        elif why == "again" and portion is self._suspect:  # on a GPU it has been sent twice when it is judged
            self._watch_steps(None)
            self._found = portion if differs else None

    def act(self, window: Window) -> bool:
        """Raise what differs. Collective if a difference has been found, which all ranks know.

        Raises:
            DriftError: On every rank, with the same text.
        """
        portion, self._found = self._found, None
        if portion is None:
            return False
        received: list[tuple[str, bool]] = exchange(self._everybody, self._explain(portion))
        for text, is_rounding in received:
            if text and not is_rounding:
                raise DriftError(text)
        texts = [text for text, _ in received if text]
        if texts and self._everybody.rank == 0 and not self._has_warned:
            self._has_warned = True
            warnings.warn(texts[0], stacklevel=2)
        return False

    # ------------------------------------------------------------------ parts

    def _watch_steps(self, portion: Portion | None) -> None:
        self._suspect, self._after_step = portion, None
        if portion is not None:
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
        """Digests of all parameters, as the last step behind an average has left them.

        Returns:
            None for those that have changed since; None for all where replicas may be meant to differ.
        """
        if not self.is_on or self._left is None:
            return None
        pieces = self._wholes(range(len(self._parameters)))
        return [
            int(digest([canonical(self._rows_of(piece))])) if piece.end and now == left else None
            for piece, now, left in zip(pieces, self._versions_now(), self._left, strict=True)
        ]

    def explain_end(self, differing: Sequence[int]) -> tuple[str, bool]:
        """Collective among replicas: as `_explain`, for some parameters, when the run has ended."""
        self._when, self._steppers = "noticed at the end of the run", []
        return self._explain(self._wholes(differing))

    def _wholes(self, parameters: Iterable[int]) -> Portion:
        return tuple(Piece(index, 0, _rows(self._values_of(index))[0]) for index in parameters)

    def _versions_now(self) -> list[int]:
        return [parameter._version for parameter in self._parameters]

    def _rows_of(self, piece: Piece) -> Tensor:
        """[rows, ...], or the whole of a parameter that has no dimensions."""
        values = self._values_of(piece.parameter)
        return values[piece.begin : piece.end] if values.dim() else values

    def _values_of(self, parameter: int) -> Tensor:
        """What replicas have alike of a parameter."""
        return local_part(self._parameters[parameter]).data

    def _digest(self, portion: Portion) -> Tensor:
        return digest([self._rows_of(piece) for piece in portion])

    def _explain(self, portion: Portion) -> tuple[str, bool]:
        """Collective among replicas: what differs between them, and whether by rounding alone; "" if nothing does."""
        control = self._replicas.control
        # NaN is NaN, and zero is zero, whatever their signs and other bits are.
        own = [int(digest([canonical(self._rows_of(piece))])) for piece in portion]
        steppers = [options_of(each) for ref in self._steppers if (each := ref()) is not None]
        received = exchange(control, {"digests": own, "steppers": steppers})
        differing, minority, typical = find_minority([each["digests"] for each in received])
        if not differing:
            return "", True
        pieces = [portion[index] for index in differing]
        by_rank: list[list[float]] = exchange(control, [self._distance(piece, typical) for piece in pieces])
        distances = [max(each) for each in zip(*by_rank, strict=True)]
        text = self._story(pieces, max(distances), minority)
        limits = [_ROUNDING * torch.finfo(self._parameters[piece.parameter].dtype).eps for piece in pieces]
        if all(distance <= limit for distance, limit in zip(distances, limits, strict=True)):
            return (
                f"{text} That is rounding: the optimizer's step doesn't round alike on all ranks. It may grow; "
                f"training goes on, and this warning comes once."
            ), True
        same_number = len({len(each["steppers"]) for each in received}) == 1
        options = find_difference([facts_of(each["steppers"]) for each in received]) if same_number else None
        if options is not None:
            reason = f"The ranks step with different options: {options}. Set them alike, and resume from a checkpoint; "
            reason += ABOUT_SCHEDULERS
        else:
            reason = (
                "Something has changed parameters on some ranks only: code that only one rank runs, a file that only "
                "one has read, a random number in the optimizer's step, or faulty memory. Resume from a checkpoint."
            )
        return f"{text} {reason} Where ranks are meant to differ, wrap the model with compare_every=0.", False

    def _distance(self, piece: Piece, typical: int) -> float:
        """Collective: by how much of its largest value this rank's piece differs from a typical rank's."""
        own = self._rows_of(piece).detach()
        other = own.contiguous().clone()
        self._replicas.transport.broadcast(other.reshape(-1).view(torch.uint8), typical).wait()
        return distance(own, other)

    def _story(self, pieces: Sequence[Piece], most: float, minority: Sequence[int]) -> str:
        numbers = self._replicas.numbers
        names = list(dict.fromkeys(self._names[piece.parameter] for piece in pieces))
        which = f"parameter{'s' if len(names) > 1 else ''} {listed(names)}"
        amount = "by what isn't a number" if most == float("inf") else f"by up to {most:.1e} of the largest value there"
        when = self._when or f"noticed in backward pass {self._num_windows}"
        if minority:
            ranks = f"rank{'s' if len(minority) > 1 else ''} {', '.join(str(numbers[rank]) for rank in minority)}"
            verb = "differ" if len(minority) > 1 else "differs"
            who = f"{ranks} {verb} from the other ranks in {which}, {amount}"
        elif len(numbers) == 2:
            pair = " and ".join(map(str, numbers))
            who = f"ranks {pair} differ in {which}, {amount}; of two ranks it is undecidable which is right"
        else:
            who = f"the ranks differ in {which}, {amount}; no majority agrees, so it is undecidable which are right"
        return f"the replicas have drifted apart: {who} ({when})."


def _rows(values: Tensor) -> tuple[int, int]:
    """(number of rows, bytes of one); none of what isn't compared."""
    if type(values) is not Tensor or values.layout is not torch.strided or not values.numel():
        return 0, 0
    rows = values.shape[0] if values.dim() else 1
    return rows, values.nbytes // rows


# ---------------------------------------------------------------------- all of them


@dataclass(frozen=True)
class Monitors:
    """What watches the steps of one model.

    Attributes:
        options: Compares options of optimizers and arguments of steps between ranks.
        drift: Compares parameters between ranks; None: nothing is compared.
        nonfinite: Finds gradients that aren't finite; None: nothing is checked.
        steps: Looks at optimizers' steps; None: there is nobody to be out of step with.
        in_backward: Steps optimizers within the backward pass.
    """

    options: OptionsWatch
    drift: DriftWatch | None
    nonfinite: NonFinite | None
    steps: StepWatch | None
    in_backward: InBackward

    @property
    def observers(self) -> tuple[Observer, ...]:
        """Those that there are, in the order in which the engine calls them."""
        # A step that must not be made comes first, and options before parameters: these differ where those do.
        found = (self.nonfinite, self.options, self.drift, self.steps, self.in_backward)
        return tuple(each for each in found if each is not None)

    def are_replicas_alike(self) -> bool:
        """Return whether replicas are meant to be equal, as far as this rank knows."""
        return self.drift is not None and self.drift.is_on


def build_monitors(
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
) -> Monitors:
    """Build the monitors of a model.

    Args:
        names: Of the parameters.
        parameters: Those that are trained.
        world: The ranks that take part.
        transport: Carries what belongs to the model's passes.
        control: Carries messages on the CPU, in order with that.
        on_nonfinite: What happens to a step with a gradient that isn't finite; None: nothing is checked.
        compare_every: In so many windows parameters are compared between ranks once; None: where they are surely meant
            to be equal, in the usual number; 0: never.
        starts_equal: The replicas were made equal when the model was wrapped.
        replicas: The ranks that have the same parameters as this one, or the same parts of them; None: no others have.
        is_divided: FSDP2 or tensor parallelism has divided the model over ranks, and adds gradients.
    """
    drift = None
    if replicas is not None and compare_every != 0:
        every, is_vouched = compare_every or DEFAULT_EVERY, compare_every is not None
        drift = DriftWatch(names, parameters, replicas, control, every=every, is_vouched=is_vouched)
        if not starts_equal:
            drift.doubt()
    options = OptionsWatch(world, control, lambda: drift is not None and drift.is_on)
    nonfinite = build_nonfinite(on_nonfinite, world, transport, control, of_parts=is_divided)
    steps_late = not is_divided and (world.world_size > 1 or world.virtual_ranks is not None)
    steps = None
    if world.world_size > 1:
        steps = StepWatch(parameters, world, control, () if drift is None else (drift,))
    return Monitors(options, drift, nonfinite, steps, InBackward(parameters if steps_late else ()))
