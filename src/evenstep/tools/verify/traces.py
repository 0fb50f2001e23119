"""Traces of two runs of one script, step by step, and where they first differ. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Step:
    """One step on one rank.

    Attributes:
        rows: A digest of each sample that the model was given.
        tensors: A digest of each tensor that is saved, after the step.
    """

    rows: tuple[int, ...]
    tensors: Mapping[str, int]


def read_trace(path: Path) -> dict[int, Step]:
    """A rank's steps. If a step is there twice, before a kill and after a resume, the later one counts."""
    steps = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found = json.loads(line)
        except ValueError:
            continue  # the last line of a run that was killed
        steps[int(found["step"])] = Step(tuple(found["rows"]), found["tensors"])
    return steps


def first_difference(straight: Sequence[Mapping[int, Step]], resumed: Sequence[Mapping[int, Step]]) -> str | None:
    """Where the resumed run left the undisturbed one, in words; None if it never did.

    Args:
        straight: By rank, the steps of the run that was left alone.
        resumed: The same of the steps after the resume.
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
    """Samples first: other samples are the reason for other tensors."""
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
