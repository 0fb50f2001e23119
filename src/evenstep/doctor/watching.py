"""`evenstep doctor`, the part that runs the script: on some ranks, under watch."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from evenstep.doctor.evidence.verdict import watched
from evenstep.doctor.findings import Facts, Watched
from evenstep.doctor.run.runs import watch

Say = Callable[[str], None]


def run_under_watch(
    script: str,
    arguments: Sequence[str] = (),
    facts: Facts | None = None,
    *,
    ranks: int = 2,
    num_steps: int = 12,
    device: str | None = None,
    limit_s: float = 300.0,
    say: Say = lambda line: None,
) -> Watched:
    """Run a script for some steps and say what was seen.

    Never raises for what the script does: that is told in `Watched.notes`.

    Args:
        script: Of the user's; runs unchanged. What it saves is kept apart, and trackers are told to stay silent.
        arguments: Its own.
        facts: What reading knows of it.
        ranks: How many; a script that starts ranks of its own gets as many as it wants, up to 8.
        num_steps: Optimizer steps that are looked at, half of them in each of two epochs.
        device: As `evenstep run --device`.
        limit_s: A run that takes longer is ended.
        say: Told what is going on, a line each.
    """
    evidence = watch(script, arguments, ranks=ranks, num_steps=num_steps, device=device, limit_s=limit_s, say=say)
    return watched(evidence, script=script, directory=os.getcwd(), facts=facts or Facts())
