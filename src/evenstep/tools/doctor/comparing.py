"""Where reading and the watched run find nothing: is it what one process would compute? `verify` compares, this judges.

A difference is a finding only if work is lost or repeated: samples, weights, gradients that aren't averaged, replicas
that drift apart. Whatever else differs is as it should be under torch's DDP, and is said as a note.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from evenstep.errors import EvenstepError
from evenstep.tools.doctor.rule import Finding
from evenstep.tools.doctor.rules import all_rules
from evenstep.tools.doctor.run.events import Evidence
from evenstep.tools.doctor.scene import Scene, made_at
from evenstep.tools.verify.ranks import verify_ranks

_NUM_STEPS = 5
_MOST_RUNS = 4  # on one rank and on all, in float32 and float64
_AS_DDP = "Compared with one process over {} steps: right as torch's DDP is; not one process's answer, because {}"


def compare(
    script: str,
    arguments: Sequence[str],
    evidence: Evidence,
    *,
    num_ranks: int,
    took_s: float,
    say: Callable[[str], None],
) -> tuple[list[Finding], str, bool]:
    """Compare a script with itself on one rank.

    Args:
        script: As the user named it.
        arguments: Its own.
        evidence: Of its watched run, which has shown nothing wrong: it knows the lines.
        num_ranks: Of the comparison.
        took_s: How long that run has taken.
        say: Told beforehand how long it will take.

    Returns:
        (findings, a note on the result, whether there is one).
    """
    if evidence.all("spawns"):
        return [], "It starts its own ranks, so it was not compared with one process.", False
    about_s = max(1.0, _MOST_RUNS * took_s)
    say(f"{script} is compared with one process: about {about_s:.0f} s (--no-verify leaves it out)")
    try:
        report = verify_ranks(script, arguments, ranks=(1, num_ranks), num_steps=_NUM_STEPS, say=say)
    except EvenstepError as error:
        return [], f"It couldn't be compared with one process: {str(error).splitlines()[0]}", False
    (verdict,) = report.verdicts
    causes = [*report.faults, *verdict.causes]
    owners = {kind: rule.id for rule in all_rules().values() for kind in rule.compared}
    scene = Scene(evidence, script)
    found = [
        replace(_finding(scene, each.kind, each.text), rule=owners[each.kind]) for each in causes if each.kind in owners
    ]
    if found:
        return found, f"Compared with one process over {report.num_steps} steps: it differs.", True
    if causes:
        return [], _AS_DDP.format(report.num_steps, "; ".join(dict.fromkeys(each.text for each in causes))), True
    if verdict.difference is not None:
        reason = f"{verdict.difference}, and none of the usual causes shows in what the ranks have seen."
        return [], _AS_DDP.format(report.num_steps, reason), True
    return [], f"Compared with one process over {report.num_steps} steps: the same but for rounding.", True


def _finding(scene: Scene, kind: str, text: str) -> Finding:
    """At the loader for samples, else at the backward pass, as far as the run has shown them."""
    loops = [each for loops in scene.training_loops() for each in loops]
    passes = [each.place for each in scene.evidence.all("backward") if each.places]
    places = [made_at(each) for each in loops] if kind == "repeated" else passes
    return scene.finding((places or passes or [("", 1)])[0], text.rstrip("."))
