"""Gains with their spread, whether losses agree, and the best combination. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evenstep.bench.measure.scaling import Spread
from evenstep.bench.remedies.changes import CHANGES, Candidate

# Relative differences of losses: the order of sums differs, and steps carry it on.
TOLERANCES = {"float64": 1e-8, "float32": 1e-3, "bfloat16": 5e-2, "float16": 2e-2}
TOLERANCE_16_BIT = 5e-2


@dataclass(frozen=True)
class Agreement:
    """Of the losses of a run with changes and of the unchanged script.

    Attributes:
        difference: The largest, relative; None: no losses were seen, or not as many.
        tolerance: What is allowed.
    """

    difference: float | None
    tolerance: float

    @property
    def is_ok(self) -> bool:
        """Whether they agree; False if that isn't known."""
        return self.difference is not None and self.difference <= self.tolerance


@dataclass(frozen=True)
class Trial:
    """What came of one change, or of several together.

    Attributes:
        changes: Their names.
        title: In words.
        lines: How the script is changed for good.
        predicted: The gain that was expected; None of a combination.
        gains: By round, throughput over that of the unchanged script in the same round; empty if it failed.
        agreement: Of the losses.
        failure: Why there is no gain, in a line; "" if there is one.
    """

    changes: tuple[str, ...]
    title: str
    lines: str
    predicted: Spread | None
    gains: tuple[float, ...] = ()
    agreement: Agreement | None = None
    failure: str = ""

    @property
    def gain(self) -> Spread | None:
        """With quartiles over rounds."""
        return Spread.of(self.gains) if self.gains else None

    @property
    def is_usable(self) -> bool:
        """Whether it ran, and the losses agree."""
        return bool(self.gains) and self.agreement is not None and self.agreement.is_ok

    @property
    def helps(self) -> bool:
        """Whether three quarters of the rounds were faster."""
        return self.is_usable and self.gain is not None and self.gain.low > 1.0

    @property
    def as_predicted(self) -> bool | None:
        """Whether predicted and measured gain lie within each other's spread; None if one is missing."""
        if self.predicted is None or self.gain is None:
            return None
        return self.predicted.low <= self.gain.high and self.gain.low <= self.predicted.high


def compare_losses(
    unchanged: Sequence[Sequence[float]], changed: Sequence[Sequence[float]], dtype: str, changes: Sequence[str]
) -> Agreement:
    """Compare the losses of rank 0, run by run.

    Args:
        unchanged: Of the script as it is, by round.
        changed: Of the script with changes, by round.
        dtype: Of the loss.
        changes: That were made: with 16 bits on the way more may differ.
    """
    tolerance = TOLERANCES.get(dtype, TOLERANCES["float32"])
    if "16-bit" in changes:
        tolerance = max(tolerance, TOLERANCE_16_BIT)
    own = [_difference(unchanged[0], each) for each in unchanged[1:]]
    known = [each for each in own if each is not None and math.isfinite(each)]
    tolerance = max([tolerance, *(2 * each for each in known)])  # a script that differs by itself may do so here
    found = [_difference(a, b) for a, b in zip(unchanged, changed, strict=False)]
    if not found or any(each is None for each in found):
        return Agreement(None, tolerance)
    return Agreement(max(each for each in found if each is not None), tolerance)


def _difference(some: Sequence[float], others: Sequence[float]) -> float | None:
    """The largest relative difference; None where there is nothing to compare."""
    if not some or len(some) != len(others):
        return None
    size = max(map(abs, some))  # of all: one that is nearly zero by chance is no measure
    worst = 0.0
    for a, b in zip(some, others, strict=True):
        if a == b or (math.isnan(a) and math.isnan(b)):
            continue
        apart = abs(a - b) / size if size else math.inf
        worst = max(worst, apart if math.isfinite(apart) else math.inf)
    return worst


def in_turn(names: Sequence[str], round_number: int) -> list[str]:
    """The order of a round: every other one backwards, so that drift of the machine favours none."""
    return list(names) if round_number % 2 == 0 else list(names)[::-1]


def ranked(trials: Sequence[Trial]) -> list[Trial]:
    """The largest gain first; what can't be used last."""
    return sorted(trials, key=lambda each: (not each.is_usable, -(each.gain.median if each.gain else 0.0)))


def best_combination(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """The trials of one change each that are tried together: the best first, and others that it leaves room for."""
    chosen: list[Trial] = []
    taken: set[str] = set()
    for trial in ranked([each for each in trials if each.helps]):
        slots = {slot for name in trial.changes for slot in CHANGES[name].slots}
        if not slots & taken:
            chosen.append(trial)
            taken |= slots
    return tuple(chosen)


def merge(candidates: Mapping[str, Candidate], names: Sequence[str]) -> tuple[str, str, dict[str, float]]:
    """Title, lines and settings of several changes together; a line that two share is shown once."""
    lines = dict.fromkeys(line for name in names for line in candidates[name].lines.splitlines())
    settings = {key: value for name in names for key, value in candidates[name].settings.items()}
    return " + ".join(CHANGES[name].title for name in names), "\n".join(lines), settings


def by_finding(causes: Sequence[str], trials: Sequence[Trial]) -> dict[str, Trial]:
    """By cause of a finding, the best measured trial of one change that is a remedy for it."""
    found = {}
    for cause in causes:
        fitting = [
            each
            for each in ranked(trials)
            if each.is_usable and len(each.changes) == 1 and cause in CHANGES[each.changes[0]].causes
        ]
        if fitting:
            found[cause] = fitting[0]
    return found
