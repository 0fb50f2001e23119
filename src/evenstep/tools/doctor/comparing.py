"""Compares a script without findings with one process, by `verify`, and judges the difference.

A difference is a finding only if work is lost or repeated: samples, weights, gradients that aren't averaged, replicas
that drift apart. Any other difference is right under torch's DDP, and becomes a note.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from evenstep.errors import EvenstepError
from evenstep.tools.doctor.rule import Finding
from evenstep.tools.doctor.rules import all_rules
from evenstep.tools.verify.ranks import verify_ranks

_NUM_STEPS = 5
_MOST_RUNS = 4  # on one rank and on all, each in float32 and float64
_AS_DDP = "right as torch's DDP is; not one process's answer, because"


def compare(
    script: str, arguments: Sequence[str], *, num_ranks: int, took_s: float, say: Callable[[str], None]
) -> tuple[list[Finding], str, bool]:
    """Compare a script on several ranks with itself on one rank.

    Args:
        script: The path, as the user wrote it.
        arguments: The command-line arguments of the script.
        num_ranks: The number of ranks of the second run.
        took_s: The time that the watched run took, to estimate the time of the comparison.
        say: Called with each line of progress; the first says how long the comparison takes.

    Returns:
        (findings, a note on the result, whether the comparison succeeded).
    """
    about_s = max(1.0, _MOST_RUNS * took_s)
    say(f"{script} is compared with one process: about {about_s:.0f} s (--no-verify leaves it out)")
    try:
        report = verify_ranks(script, arguments, ranks=(1, num_ranks), num_steps=_NUM_STEPS, say=say)
    except EvenstepError as error:
        return [], f"{script} couldn't be compared with one process: {str(error).splitlines()[0]}", False
    (verdict,) = report.verdicts
    causes = [*report.faults, *verdict.causes]
    owners = {kind: rule.id for rule in all_rules().values() for kind in rule.compared}
    found = [
        Finding(
            _named(each.path, script),
            max(1, each.line),
            1,
            each.text.rstrip("."),
            confirmed=True,
            rule=owners[each.kind],
        )
        for each in causes
        if each.kind in owners
    ]
    compared = f"Compared with one process over {report.num_steps} steps:"
    if found:
        return found, f"{compared} it differs.", True
    if causes:
        unseen = " How ranks' losses are weighed can't be seen then." if causes[0].kind == "samples" else ""
        return [], f"{compared} {_AS_DDP} {'; '.join(dict.fromkeys(each.text for each in causes))}{unseen}", True
    if verdict.difference is not None:
        reason = f"{verdict.difference}, and none of the usual causes shows in what the ranks have seen."
        return [], f"{compared} {_AS_DDP} {reason}", True
    return [], f"{compared} the same but for rounding.", True


def _named(path: str, script: str) -> str:
    """The path of a file as the user would write it."""
    return script if not path or os.path.abspath(script) == os.path.abspath(path) else os.path.relpath(path)
