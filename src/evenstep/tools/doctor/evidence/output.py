"""What ranks have shown and saved: lines, bars, trackers, files, checkpoints. Pure."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence

from evenstep.checks import counted
from evenstep.tools.doctor.evidence.scene import Scene, by_place
from evenstep.tools.doctor.findings import Finding
from evenstep.tools.doctor.run.events import Event, Place

_SHOWN = 60  # characters of a line


def judge(scene: Scene) -> list[Finding]:
    """All of this group."""
    return [*_lines(scene), *_trackers(scene), *_files(scene), *_prefixes(scene)]


def _lines(scene: Scene) -> list[Finding]:
    found = []
    outputs = scene.evidence.of("output")
    num_steps = max(1, scene.evidence.num_steps)
    for place in _on_all(outputs):
        ranks = [by_place(events)[place] for events in outputs]
        if name_ranks([[str(each["text"]) for each in events] for events in ranks]):
            continue
        text = str(ranks[0][0]["text"]).splitlines()[0][:_SHOWN]
        count = counted(len(ranks[0]), "time")
        if any(each["via"] == "bar" for each in ranks[0]):
            found.append(scene.finding("EV202", place, f"{scene.world_size} ranks drew it"))
            continue
        verb = "logged" if ranks[0][0]["via"] == "log" else "printed"
        per_step = f"{len(ranks[0]) * scene.world_size / num_steps:.1f} lines per step instead of "
        cost = f"{per_step}{len(ranks[0]) / num_steps:.1f}" if len(ranks[0]) >= num_steps else ""
        found.append(
            scene.finding("EV201", place, f"{scene.world_size} ranks {verb} {text!r}, {count} each", cost=cost)
        )
    return found


def name_ranks(lines: Sequence[Sequence[str]]) -> bool:
    """Whether lines of one place say which rank has written them: each has its rank at the same word. Pure.

    Args:
        lines: By rank.
    """
    words = [[re.findall(r"\d+(?:\.\d+)*|[^\W\d]+", line) for line in of_rank] for of_rank in lines]
    length = min(len(line) for of_rank in words for line in of_rank)
    return any(
        all(line[at] == str(rank) for rank, of_rank in enumerate(words) for line in of_rank) for at in range(length)
    )


def _on_all(ranks: Sequence[Iterable[Event]]) -> list[Place]:
    """Places where every rank has been."""
    places = [set(by_place(events)) for events in ranks]
    return sorted(set.intersection(*places)) if len(places) > 1 else []


def _trackers(scene: Scene) -> list[Finding]:
    opened = scene.evidence.of("tracker", hurried=True)
    return [
        scene.finding("EV203", place, f"{scene.world_size} ranks opened {by_place(opened[0])[place][0]['tracker']}")
        for place in _on_all(opened)
    ]


def _files(scene: Scene) -> list[Finding]:
    found = []
    saves = [_by_path(events) for events in scene.evidence.of("save", hurried=True)]
    for path, places in _shared(saves).items():
        seen = f"{len(places)} ranks saved {os.path.basename(path)}"
        found.append(scene.finding("EV204", places[0], seen))
    saved = {path for each in saves for path in each}
    writes = [_by_path(events) for events in scene.evidence.of("write", hurried=True)]
    for path, places in _shared(writes).items():
        if path not in saved and not path.endswith((".pyc", ".lock")):
            found.append(scene.finding("EV205", places[0], f"{len(places)} ranks wrote {os.path.basename(path)}"))
    return list({(each.rule, each.path, each.line): each for each in found}.values())


def _by_path(events: Iterable[Event]) -> dict[str, Place]:
    return {
        os.path.abspath(each["path"]): each.place for each in reversed(list(events)) if each["path"] and each.places
    }


def _shared(ranks: Sequence[dict[str, Place]]) -> dict[str, list[Place]]:
    """By file that several ranks have written, where each did."""
    found: dict[str, list[Place]] = {}
    for written in ranks:
        for path, place in written.items():
            found.setdefault(path, []).append(place)
    return {path: places for path, places in found.items() if len(places) > 1}


def _prefixes(scene: Scene) -> list[Finding]:
    saves = [each for each in scene.evidence.all("save", hurried=True) if each["has_prefix"] and each.places]
    seen = "the names in the file began with `module.`"
    return list({each.place: scene.finding("EV206", each.place, seen) for each in saves}.values())
