"""Decides whether two runs take the same steps, by their distances from float64. Pure.

[Note: rounding] Two runs that add the same numbers in another order differ by rounding. How much depends on the script:
by a last bit if sums are short, by a percent in bfloat16. So the base run, on the fewest ranks, is repeated in float64.
Its distance from that reference is rounding, measured for each tensor and step. Other runs may be `ROUNDING_FACTOR`
times as far from the reference.

A run beyond that isn't wrong yet. At the kink of a ReLU, or where Adam divides a gradient of pure rounding by its own
size, a last bit grows to a visible difference. So this run is repeated in float64, too. There, rounding and its effects
are 500 million times smaller, but a mistake is as large as before. A difference that doesn't shrink to `SHRINKS_TO` of
its size is no rounding.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from evenstep.checks import counted
from evenstep.tools.verify.evidence import Run, Seen

# The limits of differences; docs/reference/verify.md shows these lines.
ROUNDING_FACTOR = 16.0  # other runs may be so many times as far from float64 as the base run
SHRINKS_TO = 1e-4  # the part of a difference that may be left in float64 if it was rounding
COARSE = 1e-4  # with more relative rounding, float32 hides too much, and float64 runs are always compared
SAME_WEIGHT = 1e-3  # relative difference up to which two weights in an average count as equal

_EPS = torch.finfo(torch.float32).eps
_EPS_DOUBLE = torch.finfo(torch.float64).eps

KINDS = {"loss": "loss", "grad": "gradient", "param": "parameter", "buffer": "buffer"}  # in order of a step
SKIPPED = "skipped steps"
UNSEEDED = "not seeded"


@dataclass(frozen=True)
class Difference:
    """The first difference between a run and the one that it is compared with.

    Attributes:
        step: The step, from 1.
        kind: A value of `KINDS`, `SKIPPED` or `UNSEEDED`.
        name: The tensor's name; "" for the loss.
        deviation: The difference, relative to the size of the tensor.
        rounding: The deviation that rounding explains.
        num_differing: The number of tensors of this kind that differ in this step; for `SKIPPED`, the number of skipped
            steps before it.
        num_compared: The number of tensors of this kind; for `SKIPPED`, that of skipped steps on the fewest ranks.
        virtual_rank: In reproducible mode, the first virtual rank that differs; None if there is none.
    """

    step: int
    kind: str
    name: str = ""
    deviation: float = math.nan
    rounding: float = 0.0
    num_differing: int = 1
    num_compared: int = 1
    virtual_rank: int | None = None

    def __str__(self) -> str:
        if self.kind == SKIPPED:
            return (
                f"before step {self.step} a GradScaler has skipped {counted(self.num_differing, 'step')}, and "
                f"{self.num_compared} on the fewest ranks"
            )
        if self.kind == UNSEEDED:
            return "so do two runs on the fewest ranks: the script is not seeded"
        of = f" of {self.name!r}" if self.kind == "gradient" else f" {self.name!r}" if self.name else ""
        virtual_rank = "" if self.virtual_rank is None else f", virtual rank {self.virtual_rank}"
        more = f" ({self.num_differing} of {self.num_compared} differ)" if self.num_compared > 1 else ""
        if self.rounding == 0:
            return f"step {self.step}{virtual_rank}: {self.kind}{of} differs in its bits{more}"
        return (
            f"step {self.step}{virtual_rank}: {self.kind}{of} is off by {self.deviation:.1e}, and rounding explains "
            f"{self.rounding:.0e}{more}"
        )


def are_identical(base: Run, run: Run) -> bool:
    """Whether all ranks of both runs have equal bits after every step."""
    steps = min(base.num_steps, run.num_steps)
    for step in range(steps):
        ours = base.ranks[0][step].digests
        if run.ranks[0][step].digests != ours:
            return False
        # torch's wrapper broadcasts module buffers only before their next use, so those of other ranks may differ.
        if any(
            seen.digests[key] != ours[key] for seen in run.at(step) for key in ours if not key.startswith("buffer/")
        ):
            return False
        if base.num_virtual_ranks and _virtual_rank_losses(base, step) != _virtual_rank_losses(run, step):
            return False
    return True


def closeness(base: Run, run: Run) -> float:
    """The largest relative distance of two runs' gradients, or parameters, each taken together for a step."""
    largest = 0.0
    for step in range(min(base.num_steps, run.num_steps)):
        ours, theirs = base.values(step), run.values(step)
        for kind in ("grad/", "param/"):
            pairs = [(ours[name], theirs[name]) for name in ours if name.startswith(kind) and name in theirs]
            size = math.sqrt(sum(float(a.double().square().sum()) for a, _ in pairs))
            apart = math.sqrt(sum(float((a.double() - b.double()).square().sum()) for a, b in pairs))
            largest = max(largest, apart / size if size > 0 else 0.0)
    return largest


def coarsest_rounding(base: Run, reference: Run) -> float:
    """The largest relative rounding of a typical tensor of the base run, over all steps."""
    return max((_Scale(base, reference, step).typical for step in range(base.num_steps)), default=0.0)


def first_other_skip(base: Run, run: Run) -> Difference | None:
    """The first step before which a GradScaler skipped other steps in one run: from there on, the samples differ."""
    for step in range(min(base.num_steps, run.num_steps)):
        ours, theirs = base.ranks[0][step].skipped, run.ranks[0][step].skipped
        if ours != theirs:
            return Difference(step + 1, SKIPPED, num_differing=len(theirs), num_compared=len(ours))
    return None


def first_difference(base: Run, reference: Run, run: Run, double: Run | None = None) -> Difference | None:
    """The first place where a run is further from float64 than rounding explains; None if there is none.

    Args:
        base: The run on the fewest ranks.
        reference: The base run in float64.
        run: The run on more ranks.
        double: `run` in float64. If given, the first place where `double` differs from the reference by more than
            rounding leaves in float64.
    """
    for step in range(min(each.num_steps for each in (base, run, double or run))):
        scale, apart = _Scale(base, reference, step), _apart(reference, run, step)
        allowed = scale.allowed
        if double is not None:
            allowed, apart = functools.partial(scale.remains, apart), _apart(reference, double, step)
        found = _first(step, apart, scale.sizes, allowed=allowed, rounding=allowed)
        if found is not None:
            return found
    return None


def first_other_bits(base: Run, run: Run) -> Difference | None:
    """The first place where bits differ, for reproducible mode, which promises equal bits; None if there is none."""
    for step in range(min(base.num_steps, run.num_steps)):
        ours, theirs = _virtual_rank_digests(base, step), _virtual_rank_digests(run, step)
        virtual_rank = _first_virtual_rank(ours, theirs, base.num_virtual_ranks)
        losses = _virtual_rank_losses(base, step), _virtual_rank_losses(run, step)
        if losses[0] != losses[1]:
            return Difference(step + 1, "loss", virtual_rank=_first_virtual_rank(*losses, base.num_virtual_ranks))
        mine = base.ranks[0][step].digests
        for kind in KINDS:
            names = [name for name in mine if name.startswith(f"{kind}/")]
            wrong = [name for name in names if any(seen.digests.get(name) != mine[name] for seen in run.at(step))]
            if wrong:
                name = wrong[0].partition("/")[2]
                return Difference(step + 1, KINDS[kind], name, math.nan, 0.0, len(wrong), len(names), virtual_rank)
    return None


def loss_of(seen: Sequence[Seen]) -> float:
    """The loss of a step, weighted like its gradients.

    Losses of plain passes are added up and averaged over ranks. Weighted losses are averaged within their accumulation
    window, and the windows of a step are added up.
    """
    losses = [loss for rank in seen for loss in rank.losses]
    if not any(weight is not None for _, weight in losses):
        return sum(value for value, _ in losses) / len(seen)
    totals: dict[int, tuple[float, float]] = {}
    for rank in seen:
        for (value, weight), window in zip(rank.losses, rank.windows or itertools.repeat(0), strict=False):
            if weight:
                of_window, total = totals.get(window, (0.0, 0.0))
                totals[window] = of_window + value * weight, total + weight
    return sum(of_window / total for of_window, total in totals.values())


class _Scale:
    """The sizes and the rounding of all tensors of one step."""

    def __init__(self, base: Run, reference: Run, step: int) -> None:
        self._moved = _apart(reference, base, step)
        exact = reference.values(step)
        self.sizes = {name: _size(value) for name, value in exact.items()} | {"loss/": abs(loss_of(reference.at(step)))}
        relative = [self._moved[name] / size for name, size in self.sizes.items() if size > 0 and name in self._moved]
        finite = [each for each in relative if math.isfinite(each)]
        self.typical = statistics.median(finite) if finite else 0.0
        self._largest = {
            kind: max((size for name, size in self.sizes.items() if name.startswith(kind)), default=0.0)
            for kind in KINDS
        }

    def allowed(self, name: str) -> float:
        """The distance from float64 that a tensor may have."""
        size = self.sizes.get(name, 0.0)
        return ROUNDING_FACTOR * max(self._moved.get(name, 0.0), self.typical * size, _EPS * size)

    def remains(self, single: Mapping[str, float], name: str) -> float:
        """The difference that a tensor may have in float64 if its difference in float32 was rounding."""
        size = self.sizes.get(name, 0.0)
        of_rounding = SHRINKS_TO * max(single.get(name, 0.0), self._moved.get(name, 0.0), _EPS * size)
        return max(of_rounding, ROUNDING_FACTOR * _EPS_DOUBLE * self._largest[name.partition("/")[0]])


def _first(
    step: int,
    apart: Mapping[str, float],
    sizes: Mapping[str, float],
    *,
    allowed: Callable[[str], float],
    rounding: Callable[[str], float],
) -> Difference | None:
    for kind, word in KINDS.items():
        names = [name for name in apart if name.startswith(f"{kind}/")]
        wrong = [name for name in names if not apart[name] <= allowed(name)]
        if wrong:
            name = wrong[0]
            size = sizes.get(name, 0.0) or 1.0
            short = name.partition("/")[2]
            return Difference(step + 1, word, short, apart[name] / size, rounding(name) / size, len(wrong), len(names))
    return None


def _apart(reference: Run, run: Run, step: int) -> dict[str, float]:
    """By tensor of a step, and for the loss, the root-mean-square distance from the reference."""
    exact, values = reference.values(step), run.values(step)
    losses = torch.tensor([loss_of(run.at(step)), loss_of(reference.at(step))], dtype=torch.float64, device="cpu")
    apart = {"loss/": _size(_gap(losses[:1], losses[1:]))}
    for name in [*exact, *(name for name in values if name not in exact)]:
        ours, theirs = values.get(name), exact.get(name)
        if ours is None or theirs is None or ours.shape != theirs.shape:
            apart[name] = math.inf
        else:
            apart[name] = _size(_gap(ours, theirs))
    return apart


def _gap(ours: Tensor, theirs: Tensor) -> Tensor:
    gap = ours.double() - theirs.double()
    return torch.where((ours == theirs) | (ours.isnan() & theirs.isnan()), 0.0, gap.nan_to_num(nan=math.inf))


def _size(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt()) if tensor.numel() else 0.0


def _first_virtual_rank(ours: Sequence[object], theirs: Sequence[object], num_virtual_ranks: int) -> int | None:
    """The virtual rank of the first backward pass that differs, if each has as many passes; None if unknown."""
    if len(ours) != len(theirs) or num_virtual_ranks == 0:
        return None
    first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
    return None if first is None else first * num_virtual_ranks // len(ours)


def _virtual_rank_digests(run: Run, step: int) -> list[dict[str, str]]:
    return [virtual_rank for seen in run.at(step) for virtual_rank in seen.virtual_ranks]


def _virtual_rank_losses(run: Run, step: int) -> list[tuple[float, float | None]]:
    return [loss for seen in run.at(step) for loss in seen.losses]
