"""From the evidence of a run to what it has shown: findings, what it refutes, and what it couldn't look at. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from evenstep.tools.doctor.calls import how_it_hangs
from evenstep.tools.doctor.findings import Watched
from evenstep.tools.doctor.rule import Finding, Refuted
from evenstep.tools.doctor.rules import all_rules
from evenstep.tools.doctor.run.events import Event, Evidence
from evenstep.tools.doctor.run.hangs import last_progress_s
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
    """What a run has shown.

    Args:
        evidence: Of its ranks.
        script: As the user named it.
        directory: The current one, absolute.
        facts: What reading knows of the script.
    """
    evidence = replace(evidence, ranks=[_of_the_rank(events) for events in evidence.ranks])
    scene = Scene(evidence, script, directory, facts)
    if evidence.num_steps and not any(evidence.all(kind) for kind in ("init", "wrapped", "enter")):
        return Watched(
            notes=[
                f"Its {scene.world_size} processes never joined: each trained alone, so it was only read. Does it need "
                f"a launcher of its own, or a GPU?"
            ],
            num_steps=0,
        )
    rules = [each for each in all_rules().values() if each.seen is not None]
    seen = [replace(found, rule=each.id) for each in rules if each.seen for found in each.seen(scene)]
    # One finding of a rule at a line, however often it happened there.
    findings = {(each.rule, each.path, each.line): each for each in reversed(seen) if isinstance(each, Finding)}
    refuted = [each for each in seen if isinstance(each, Refuted)]
    return Watched(list(reversed(findings.values())), refuted, _notes(scene), evidence.num_steps)


def _of_the_rank(events: Sequence[Event]) -> list[Event]:
    """Without what a script did that has then started ranks of its own: it would have done that once."""
    began = next((number for number, each in enumerate(events) if each.kind == "spawns"), 0)
    return list(events[began:])


def _notes(scene: Scene) -> list[str]:
    """Why the run ended before it had shown all."""
    evidence = scene.evidence
    raised = scene.error
    steps = f"after {evidence.num_steps} steps" if evidence.num_steps else "before its first step"
    spawned = next(iter(evidence.all("spawns")), None)
    if spawned is not None and not evidence.all("stepped") and raised is None and evidence.hang is None:
        count = spawned["num_ranks"]
        where = scene.told(spawned.place)
        return [f"It starts {count} ranks of its own ({where}), which can't be watched: it was only read."]
    # A script that leaves before its first step has said why, perhaps as an exit with a text, or none.
    message = str(raised["message"]).strip() if raised is not None else ""
    left = not evidence.num_steps and evidence.hang is None and (raised is None or raised["type"] == "SystemExit")
    last = evidence.said if left else ""
    # The last words of a script that has ended by itself: that it needs a GPU.
    words = "\n".join(f"{last}\n{message}".splitlines()[-4:]) if left else message
    if scene.facts.uses_gpus and (_IN_WANT_OF_GPUS.search(words) or (left and _ABOUT_GPUS.search(words))):
        first = message if message and not message.isdecimal() else last.strip().rpartition("\n")[2]
        first = first.partition("\n")[0]
        return [f"It needs GPUs, and this machine has none that it could use, so it was only read: {first}"]
    if raised is not None:
        return [_told_error(scene, raised, steps, evidence.said)]
    if evidence.hang is not None:
        text = how_it_hangs(scene)
        return [f"{text[0].upper()}{text[1:]}. It was ended there; what follows was only read."]
    if evidence.is_late and not evidence.num_steps:
        return [f"No step was made in time{_last_seen(scene)}: it was ended, and only read."]
    if evidence.is_late:
        return [f"The run was ended {steps}, when its time was over{_last_seen(scene)}."]
    broken = next((each for each in evidence.all("raised") if each["type"] != "KeyboardInterrupt"), None)
    if broken is not None:
        return [
            f"The ranks' calls no longer fitted {steps}, and the connection between them broke at "
            f"{scene.told(broken.place)}: what follows was only read."
        ]
    if not evidence.num_steps:
        if evidence.status:
            return [
                f"It ended with status {evidence.status} {steps}, so it was only read. It said:\n{_tail(evidence.said)}"
            ]
        return [
            "It ended without a step of a torch optimizer, so it was only read. Does it need arguments, or data? Give "
            "them behind the script's name."
        ]
    return []


def _told_error(scene: Scene, raised: Event, steps: str, said: str) -> str:
    place = f" at {scene.told(raised.place)}" if raised.places else ""
    if raised["type"] == "SystemExit":
        usage = "\n" + _tail(said) if "usage:" in said else ""
        needs = " It needs other arguments: give them behind the script's name." if usage else ""
        return (
            f"The script ended{place} with status {raised['message']} {steps}, so that it was only read.{needs}{usage}"
        )
    message = str(raised["message"]).strip().partition("\n")[0]
    first = f": {message}" if message else ""
    return f"The script raised {raised['type']}{place} {steps}, so what follows was only read{first}"


def _last_seen(scene: Scene) -> str:
    events = scene.evidence.ranks[0] if scene.evidence.ranks else []
    idle = next((each for each in reversed(events) if each.kind == "idle" and each.places), None)
    if idle is None or last_progress_s(events) > idle.time_s:
        return ""
    return f" (rank 0 was at {scene.told(idle.place)})"


def _tail(said: str) -> str:
    """What the script itself said last."""
    lines = [line for line in said.splitlines() if line.strip()]
    usage = next((i for i, line in enumerate(lines) if "usage:" in line), None)
    return "\n".join(lines[usage : usage + 4] if usage is not None else lines[-4:])
