"""The drift monitor: compares parameters between ranks while they train, some in each step.

[Note: how ranks compare]

Trained parameters are divided into *portions* of equal cost. At the end of a window in which a portion is due, each
rank makes a digest of its bytes, and the header, which travels in any case, carries five numbers of it:

    [0]     whether this rank doubts that replicas are meant to be equal
    [1:3]   the lower half of the digest, and its square
    [3:5]   the upper half, and its square

Added over n ranks, `(sum of d)^2 = n * (sum of d^2)` if and only if all digests are the same: so every rank knows, and
all know the same, without a collective of its own. Only where they differ do ranks find out which, and by how much.

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

import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.optim.optimizer import register_optimizer_step_post_hook

from evenstep.device import Coming, arrived, start_copy
from evenstep.errors import DriftError
from evenstep.replica.gradients.observer import Observer
from evenstep.replica.monitors.digests import (
    are_same,
    canonical,
    describe_machine,
    digest,
    distance,
    half_bits,
    halves,
)
from evenstep.replica.monitors.options import ABOUT_SCHEDULERS, find_difference, options_of
from evenstep.transport.core.object_collectives import exchange
from evenstep.transport.core.transport import Transport
from evenstep.world import World

DEFAULT_EVERY = 64
_NUM_NUMBERS = 5
_NOTHING = (0.0,) * _NUM_NUMBERS

_LEAST_BYTES = 512 << 10  # a portion is not smaller: what is done per portion would cost more than reading it
_CALL_BYTES = 16 << 10  # what could be read in the time that python takes for one more tensor
_ROUNDING = 16  # times the dtype's epsilon, of a tensor's largest value
_MAX_NAMED = 3
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
_Sent = tuple[str, Portion]  # why, and of what


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
    """Compares this rank's parameters with the others'.

    Args:
        names: Of the parameters.
        parameters: Those that are trained.
        world: The ranks that take part.
        transport: Carries what belongs to the model's passes.
        control: Carries messages on the CPU, in order with that.
        every: In how many windows all are compared once.
        is_vouched: The user has set `compare_every`, so there is no doubt.

    Attributes:
        numbers: Of these ranks, for messages.
    """

    num_numbers = _NUM_NUMBERS

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        world: World,
        transport: Transport,
        control: Transport,
        *,
        every: int,
        is_vouched: bool,
    ) -> None:
        self._names = names
        self._parameters = parameters
        self._world = world
        self._transport = transport
        self._control = control
        self._is_vouched = is_vouched
        self.numbers: Sequence[int] = range(world.world_size)
        self._device = parameters[0].device
        self._is_late = self._device.type != "cpu"  # what is told is read a window later, when nobody waits for it
        values = [self._values_of(index) for index in range(len(parameters))]
        plain = [type(each) is Tensor and each.layout is torch.strided for each in values]
        sizes = [_rows(each) if is_plain else (0, 0) for each, is_plain in zip(values, plain, strict=True)]
        portions = plan_portions(sizes, every)
        # The first window has something else to tell.
        places = [(1 + number * every // len(portions)) % every for number in range(len(portions))]
        self._due = dict(zip(places, portions, strict=True))
        self._every = every
        self._half_bits = half_bits(world.world_size)
        self._machine = describe_machine(self._device)
        self._doubts = 0.0
        self._is_off = False
        self._is_paused = False  # on all ranks alike
        self._has_warned = False
        self._num_windows = 0
        self._versions: int | None = None
        self._sent: _Sent | None = None
        self._on_its_way: tuple[_Sent, Coming] | None = None
        self._suspect: Portion | None = None
        self._after_step: Tensor | None = None  # 0-dim, int64: digest of the suspect behind an optimizer's step
        self._step_hook: Any = None
        self._steppers: list[weakref.ref[Any]] = []  # optimizers that have stepped the suspect, in that order
        self._found: Portion | None = None
        self._is_in_join = False

    def set_join(self, is_open: bool) -> None:
        """See `Observer`."""
        self._is_in_join = is_open

    @property
    def is_on(self) -> bool:
        """Whether parameters are compared, as far as this rank knows."""
        return not self._is_off and not self._doubts and not self._is_paused

    def doubt(self) -> None:
        """Replicas may be meant to differ from now on, unless the user vouches for the contrary."""
        if not self._is_vouched:
            self._doubts = 1.0

    def pause(self) -> None:
        """Ranks step on their own for a while, and end no windows together."""
        self._is_paused = True

    def go_on(self) -> None:
        """Replicas are equal again, whatever there was before."""
        self._is_paused, self._versions = False, None
        self._watch_steps(None)

    def doubt_hook(self, function: Callable[..., Any]) -> None:
        """Doubt, unless a communication hook is known to average."""
        if function not in _AVERAGING:
            self.doubt()

    # ------------------------------------------------------------------ called by the engine

    def end_local_pass(self) -> None:
        """See `Observer`."""
        if self._versions is None and not self._is_off and not self._is_paused:
            self._versions = self._sum_versions()

    def header_numbers(self) -> Sequence[float] | Tensor:
        """See `Observer`: [5], a tensor where parameters are on a GPU."""
        if self._is_in_join:
            return _NOTHING  # some have left, and are made equal when it ends
        number, self._num_windows = self._num_windows, self._num_windows + 1
        if self._is_off:
            return _NOTHING
        if self._versions is not None:
            if self._versions != self._sum_versions():
                self.doubt()  # an optimizer has stepped on gradients of this rank alone
            self._versions = None
        digest: Tensor | None = None
        if number == 0:
            self._sent = "machine", ()
            digest = torch.tensor(self._machine, device=self._device)
        elif self._suspect is not None:
            if self._on_its_way is not None and self._on_its_way[0][0] == "again":
                return (self._doubts, *_NOTHING[1:])
            self._sent = "again", self._suspect
            digest = self._after_step if self._after_step is not None else self._digest(self._suspect)
        elif (portion := self._due.get(number % self._every)) is not None:
            self._sent = "first", portion
            digest = self._digest(portion)
        return (self._doubts, *_NOTHING[1:]) if digest is None else self._numbers(digest)

    def read_header(self, sums: Sequence[float] | Tensor) -> None:
        """See `Observer`. On a GPU what ranks sent a window ago is judged now."""
        if self._on_its_way is not None:
            (before, coming), self._on_its_way = self._on_its_way, None
            self._judge(*before, arrived(coming))
        sent, self._sent = self._sent, None
        if sent is None or self._is_off:
            return
        if self._is_late:
            self._on_its_way = sent, start_copy(torch.as_tensor(sums, device=self._device))
        else:
            self._judge(*sent, sums.tolist() if isinstance(sums, Tensor) else sums)

    def raise_found(self) -> None:
        """Raise what differs. Collective if a difference has been found, which all ranks know.

        Raises:
            DriftError: On every rank, with the same text.
        """
        portion, self._found = self._found, None
        if portion is not None:
            self._explain(portion)

    # ------------------------------------------------------------------ parts

    def _judge(self, why: str, portion: Portion, sums: Sequence[float]) -> None:
        differ = not are_same(sums[1:], self._world.world_size)
        if sums[0] or (why == "machine" and differ and not self._is_vouched):
            self._is_off = True
        if self._is_off or why == "again":
            self._watch_steps(None)
        if self._is_off or not differ:
            return
        if why == "first" and self._suspect is None:  # one at a time
            self._watch_steps(portion)
        elif why == "again":
            self._found = portion

    def _watch_steps(self, portion: Portion | None) -> None:
        self._suspect, self._after_step = portion, None
        if self._step_hook is not None:
            self._step_hook.remove()
            self._step_hook = None
        if portion is not None:
            watch, suspects = weakref.ref(self), {id(self._parameters[piece.parameter]) for piece in portion}
            self._steppers = []

            def stepped(optimizer: torch.optim.Optimizer, *_: object) -> None:
                if (alive := watch()) is not None and alive._suspect is not None:
                    alive._after_step = alive._digest(alive._suspect)
                    if any(id(p) in suspects for group in optimizer.param_groups for p in group["params"]):
                        alive._steppers.append(weakref.ref(optimizer))

            self._step_hook = register_optimizer_step_post_hook(stepped)

    def _sum_versions(self) -> int:
        return sum([parameter._version for parameter in self._parameters])

    def _rows_of(self, piece: Piece) -> Tensor:
        """[rows, ...], or the whole of a parameter that has no dimensions."""
        values = self._values_of(piece.parameter)
        return values[piece.begin : piece.end] if values.dim() else values

    def _values_of(self, parameter: int) -> Tensor:
        """What replicas have alike of a parameter."""
        return self._parameters[parameter].data

    def _digest(self, portion: Portion) -> Tensor:
        return digest([self._rows_of(piece) for piece in portion]).to(self._device)

    def _numbers(self, whole: Tensor) -> Sequence[float] | Tensor:
        if not self._is_late:
            return [self._doubts, *halves(int(whole) >> 12, self._half_bits)]
        received = torch.stack(halves(whole >> 12, self._half_bits)).double()
        return torch.cat([received.new_full((1,), self._doubts), received])

    def _explain(self, portion: Portion) -> None:
        # NaN is NaN, and zero is zero, whatever their signs and other bits are.
        own = [int(digest([canonical(self._rows_of(piece))])) for piece in portion]
        differing, minority, typical = find_minority(exchange(self._control, own))
        if not differing:
            return
        pieces = [portion[index] for index in differing]
        by_rank: list[list[float]] = exchange(self._control, [self._distance(piece, typical) for piece in pieces])
        distances = [max(each) for each in zip(*by_rank, strict=True)]
        text = self._story(pieces, max(distances), minority)
        steppers = exchange(self._control, [options_of(each) for ref in self._steppers if (each := ref()) is not None])
        same_number = len({len(each) for each in steppers}) == 1
        options = find_difference(steppers) if same_number else None
        limits = [_ROUNDING * torch.finfo(self._parameters[piece.parameter].dtype).eps for piece in pieces]
        if all(distance <= limit for distance, limit in zip(distances, limits, strict=True)):
            if self._world.is_main and not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"{text} That is rounding: the optimizer's step doesn't round alike on all ranks. It may grow; "
                    f"training goes on, and this warning comes once.",
                    stacklevel=2,
                )
            return
        if options is not None:
            raise DriftError(
                f"{text} The ranks step with different options: {options}. Set them alike, and resume from a "
                f"checkpoint; {ABOUT_SCHEDULERS} Where ranks are meant to differ, wrap the model with compare_every=0."
            )
        raise DriftError(
            f"{text} Something has changed parameters on some ranks only: code that only one rank runs, a file that "
            f"only one has read, a random number in the optimizer's step, or faulty memory. Resume from a checkpoint. "
            f"Where ranks are meant to differ, wrap the model with compare_every=0."
        )

    def _distance(self, piece: Piece, typical: int) -> float:
        """Collective: by how much of its largest value this rank's piece differs from a typical rank's."""
        own = self._rows_of(piece).detach()
        other = own.contiguous().clone()
        self._transport.broadcast(other.reshape(-1).view(torch.uint8), typical).wait()
        return distance(own, other)

    def _story(self, pieces: Sequence[Piece], most: float, minority: Sequence[int]) -> str:
        names = list(dict.fromkeys(self._names[piece.parameter] for piece in pieces))
        shown = ", ".join(map(repr, names[:_MAX_NAMED]))
        more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
        which = f"parameter{'s' if len(names) > 1 else ''} {shown}{more}"
        amount = "by what isn't a number" if most == float("inf") else f"by up to {most:.1e} of the largest value there"
        when = f"noticed in backward pass {self._num_windows}"
        if minority:
            ranks = f"rank{'s' if len(minority) > 1 else ''} {', '.join(str(self.numbers[rank]) for rank in minority)}"
            verb = "differ" if len(minority) > 1 else "differs"
            who = f"{ranks} {verb} from the other ranks in {which}, {amount}"
        elif self._world.world_size == 2:
            pair = " and ".join(map(str, self.numbers))
            who = f"ranks {pair} differ in {which}, {amount}; of two ranks it is undecidable which is right"
        else:
            who = f"the ranks differ in {which}, {amount}; no majority agrees, so it is undecidable which are right"
        return f"the replicas have drifted apart: {who} ({when})."


def _rows(parameter: Tensor) -> tuple[int, int]:
    """(number of rows, bytes of one)."""
    rows = parameter.shape[0] if parameter.dim() else 1
    return (rows, parameter.nbytes // rows) if parameter.numel() else (0, 0)
