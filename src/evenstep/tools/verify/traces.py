"""Compares the traces of two runs of a script, step by step. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Step:
    """One step on one rank.

    Attributes:
        rows: A digest of each sample that the model was called with.
        tensors: By name, a digest of each tensor of a checkpoint, after the step.
    """

    rows: tuple[int, ...]
    tensors: Mapping[str, int]


def read_trace(path: Path) -> dict[int, Step]:
    """Read the steps of a rank, by number. A step that was repeated after a resume counts once, the later one."""
    steps = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found = json.loads(line)
        except ValueError:
            continue  # the last line of a run that was killed
        steps[int(found["step"])] = Step(tuple(found["rows"]), found["tensors"])
    return steps


def first_difference(straight: Sequence[Mapping[int, Step]], resumed: Sequence[Mapping[int, Step]]) -> str | None:
    """A text on the first difference between a resumed and an undisturbed run; None if there is none.

    Args:
        straight: By rank, the steps of the undisturbed run.
        resumed: By rank, the steps of the resumed run after its resume.
    """
    for step in sorted({step for trace in resumed for step in trace}):
        for rank, (ours, theirs) in enumerate(zip(straight, resumed, strict=True)):
            if step not in theirs:
                return f"step {step} on rank {rank}: missing in the resumed run"
            if step not in ours:
                return f"step {step} on rank {rank}: the undisturbed run had ended before"
            received = _difference(ours[step], theirs[step])
            if received is not None:
                return f"step {step} on rank {rank}: {received}"
    last = [max(trace, default=0) for trace in straight]
    ended = [max(trace, default=0) for trace in resumed]
    if last != ended:
        return f"the undisturbed run ended with step {max(last)}, and the resumed one with step {max(ended)}"
    return None


def _difference(ours: Step, theirs: Step) -> str | None:
    """A text on the difference of two steps; None if equal. Samples come first, as they change all tensors."""
    if len(ours.rows) != len(theirs.rows):
        return f"{len(theirs.rows)} samples instead of {len(ours.rows)}"
    for index, (row, other) in enumerate(zip(ours.rows, theirs.rows, strict=True)):
        if row != other:
            shifted = f"; it was sample {ours.rows.index(other)} of that step" if other in ours.rows else ""
            return f"sample {index} of the {len(ours.rows)} that the model was given differs{shifted}"
    names = [name for name in ours.tensors if ours.tensors[name] != theirs.tensors.get(name)]
    names += [name for name in theirs.tensors if name not in ours.tensors]
    if names:
        more = f", and {len(names) - 1} more" if len(names) > 1 else ""
        return f"the samples are the same, and tensor {names[0]} differs{more} (of {len(ours.tensors)})"
    return None
