"""Turns the evidence of a run into findings, refuted rules, and notes on what the run couldn't examine. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from evenstep.checks import counted
from evenstep.tools.doctor.calls import how_it_hangs
from evenstep.tools.doctor.findings import Watched
from evenstep.tools.doctor.rule import Finding, Refuted
from evenstep.tools.doctor.rules import all_rules
from evenstep.tools.doctor.run.events import Event, Evidence
from evenstep.tools.doctor.run.hangs import idle_place
from evenstep.tools.doctor.scene import Scene
from evenstep.tools.reading.looked import Facts

_UNREAD = Facts()
_IN_WANT_OF_GPUS = re.compile(r"(?i)nccl|no cuda|not compiled with cuda|no nvidia|_cuda_|invalid device ordinal|no gpu")
_ABOUT_GPUS = re.compile(r"(?i)\b(?:gpus?|cuda)\b")


def watched(
    evidence: Evidence,
    *,
    script: str,
    directory: str,
    facts: Facts = _UNREAD,
) -> Watched:
    """Apply the rules to the evidence of a run.

    Args:
        evidence: The events of all ranks.
        script: The path, as the user wrote it.
        directory: The absolute path of the current directory.
        facts: Facts of the script's source.
    """
    evidence = replace(evidence, ranks=[_of_the_rank(events) for events in evidence.ranks])
    scene = Scene(evidence, script, directory, facts)
    if evidence.num_steps and not any(evidence.all(kind) for kind in ("init", "wrapped", "enter")):
        note = (
            f"The {scene.world_size} processes made no process group: each trained alone, so the script was only read."
        )
        return Watched(notes=[note], num_steps=0)
    rules = [each for each in all_rules().values() if each.seen is not None]
    seen = [replace(found, rule=each.id) for each in rules if each.seen for found in each.seen(scene)]
    # At most one finding of a rule at a line.
    findings = {(each.rule, each.path, each.line): each for each in reversed(seen) if isinstance(each, Finding)}
    refuted = [each for each in seen if isinstance(each, Refuted)]
    note, failed = _ending(scene)
    return Watched(list(reversed(findings.values())), refuted, [note] if note else [], evidence.num_steps, failed)


def _of_the_rank(events: Sequence[Event]) -> list[Event]:
    """The events from the script's own `spawn` on, if it has one: each process here ran the code before it, too."""
    began = next((number for number, each in enumerate(events) if each.kind == "spawns"), 0)
    return list(events[began:])


def _ending(scene: Scene) -> tuple[str, bool]:
    """(why the run ended early, or ""; whether the script failed before its first step)."""
    evidence, raised = scene.evidence, scene.error
    steps = f"after {counted(evidence.num_steps, 'step')}" if evidence.num_steps else "before its first step"
    spawned = next(iter(evidence.all("spawns")), None)
    if spawned is not None and not evidence.all("stepped") and raised is None and evidence.hang is None:
        where = scene.told(spawned.place)
        return f"The script starts {spawned['num_ranks']} ranks of its own ({where}), so it was only read.", False
    # A script that exits before its first step has perhaps said why, in its output or in the text of its exit.
    message = str(raised["message"]).strip() if raised is not None else ""
    left = not evidence.num_steps and evidence.hang is None and (raised is None or raised["type"] == "SystemExit")
    words = "\n".join(f"{evidence.said}\n{message}".splitlines()[-4:]) if left else message
    if scene.facts.uses_gpus and (_IN_WANT_OF_GPUS.search(words) or (left and _ABOUT_GPUS.search(words))):
        own = message if message and not message.isdecimal() else evidence.said.strip().rpartition("\n")[2]
        return (
            f"The script needs a GPU that this machine lacks, so it was only read: {own.partition(chr(10))[0]}",
            False,
        )
    if raised is not None:
        return _told_error(scene, raised, steps), not evidence.num_steps
    if evidence.hang is not None:
        text = how_it_hangs(scene)
        return f"{text[0].upper()}{text[1:]}. doctor ended the run there; the rest of the script was only read.", False
    if evidence.is_late:
        made, place = counted(evidence.num_steps, "step"), idle_place(evidence.ranks)
        where = f" (rank 0 was at {scene.told(place)})" if place else ""
        return f"doctor ended the script after {made}, when the time of the run was over{where}.", False
    broken = next((each for each in evidence.all("raised") if each["type"] != "KeyboardInterrupt"), None)
    if broken is not None:
        where = scene.told(broken.place)
        return f"A rank lost its connection to another rank at {where}, {steps}: the rest was only read.", False
    if evidence.num_steps:
        return "", False
    if evidence.status:
        return f"The script ended with status {evidence.status} {steps}. It printed:\n{_tail(evidence.said)}", True
    return (
        "The script ended without a step of a torch optimizer, so it was only read. If it needs arguments, give them "
        "behind its name.",
        False,
    )


def _told_error(scene: Scene, raised: Event, steps: str) -> str:
    place = f" at {scene.told(raised.place)}" if raised.places else ""
    if raised["type"] != "SystemExit":
        error = f"{raised['type']}: {raised['message']}".strip().partition("\n")[0].rstrip(".:")
        return f"The script failed{place}, {steps}: {error}. The rest of the script was only read."
    ended = f"The script ended{place} with status {raised['message']}, {steps}, so it was only read."
    if "usage:" not in scene.evidence.said:
        return ended
    return f"{ended} It needs other arguments: give them behind its name.\n{_tail(scene.evidence.said)}"


def _tail(said: str) -> str:
    """The last lines of a script's output, or its usage message."""
    lines = [line for line in said.splitlines() if line.strip()]
    usage = next((i for i, line in enumerate(lines) if "usage:" in line), None)
    return "\n".join(lines[usage : usage + 4] if usage is not None else lines[-4:])
