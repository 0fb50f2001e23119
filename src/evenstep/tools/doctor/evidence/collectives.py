"""Calls that some ranks have made and others not, and who waits for whom. Pure."""

from __future__ import annotations

import statistics

from evenstep.tools.doctor.evidence.scene import Scene, by_place
from evenstep.tools.doctor.findings import Finding
from evenstep.tools.doctor.run.events import Event, Place
from evenstep.tools.doctor.run.hangs import calls_of, first_apart

_ENDED = (
    "The run came to its end, with calls that don't belong together: a rank may get what is meant for another call."
)
# What torch's wrapper calls by itself.
_IMPLICIT = ("gradients of the model", "forward of the model", "DistributedDataParallel", "init_process_group")
_IN_MOST = 0.5  # of the steps: a call that belongs to the step


def judge(scene: Scene, *, has_other_lengths: bool) -> list[Finding]:
    """All of this group.

    Args:
        scene: The run.
        has_other_lengths: A finding says already that ranks have different numbers of batches.
    """
    if scene.error is not None:
        return _barriers(scene)  # ranks wait for one that has failed
    found = _models_on_some(scene)
    on_some = _calls_on_some(scene)
    found += on_some
    if not found and not has_other_lengths:
        found += _apart(scene)
    return [*found, *_barriers(scene)]


def how_it_hangs(scene: Scene) -> str:
    """Who waits where for whom, in words; "" if nobody does."""
    hang = scene.evidence.hang
    if hang is None:
        return ""
    if not hang.missing:
        call = next(iter(hang.waiting.values()))
        return f"all ranks were in {_told(scene, call)} for too long"
    waits = ", ".join(f"rank {rank} waits in {_told(scene, call)}" for rank, call in sorted(hang.waiting.items()))
    others = ", ".join(f"rank {rank} {_doing(scene, event)}" for rank, event in sorted(hang.missing.items()))
    return f"the run would hang: {waits}" + (f"; {others}" if others else "")


def _told(scene: Scene, call: Event) -> str:
    return f"{call['op']} at {scene.told(call.place)}"


def _doing(scene: Scene, event: Event) -> str:
    if event.kind == "enter":
        return f"in {_told(scene, event)}"
    if event.kind in ("end", "left"):
        return "has ended"
    return f"is at {scene.told(event.place)} and doesn't come"


def _is_apart(scene: Scene) -> bool:
    """Whether ranks have called other things: in another order, or some more often than others can make good."""
    return scene.evidence.hang is not None or first_apart(scene.evidence.ranks) is not None or _ended_apart(scene)


def _ended_apart(scene: Scene) -> bool:
    """Whether all ranks came to the end of the script, with different numbers of calls."""
    ended = all(any(each.kind == "end" and each["status"] == "0" for each in events) for events in scene.evidence.ranks)
    left = any(each.kind == "left" for events in scene.evidence.ranks for each in events)
    counts = {len(calls_of(events)) for events in scene.evidence.ranks}
    return ended and not left and len(counts) > 1


def _calls_on_some(scene: Scene) -> list[Finding]:
    if not _is_apart(scene):
        return []
    hangs = how_it_hangs(scene)
    found = []
    places = _on_some(scene, [[c for c in calls_of(e) if c["op"] not in _IMPLICIT] for e in scene.evidence.ranks])
    for place, (ranks, call) in places.items():
        seen = f"{_ranks(ranks)} called {call['op']} here, {_ranks(_others(scene, ranks))} never did"
        # Without a reading it is taken as a condition on the rank: data decide more rarely.
        guarded = scene.facts.guarded
        rule = "EV401" if guarded is None or place in guarded else "EV402"
        found.append(scene.finding(rule, place, f"{seen}; {hangs}" if hangs else seen, cost="" if hangs else _ENDED))
    return found


def _models_on_some(scene: Scene) -> list[Finding]:
    """Forward passes of some ranks that have sent something: gradients later, or buffers at once."""
    found = []
    sent = {each.place for each in scene.evidence.all("enter") if each["op"] == "forward of the model"}
    forwards = [[each for each in events if each["wrapped"]] for events in scene.evidence.of("forward")]
    for place, (ranks, forward) in _on_some(scene, forwards).items():
        if place not in sent and not forward["grad"]:
            continue
        seen = f"{_ranks(ranks)} called the wrapped model here, {_ranks(_others(scene, ranks))} never did"
        hangs = how_it_hangs(scene)
        found.append(scene.finding("EV404", place, f"{seen}; {hangs}" if hangs else seen, cost="" if hangs else _ENDED))
    return found


def _on_some(scene: Scene, ranks: list[list[Event]]) -> dict[Place, tuple[list[int], Event]]:
    """Places where some ranks have been, and others not, though these have gone on."""
    found: dict[Place, tuple[list[int], Event]] = {}
    places = [by_place(events) for events in ranks]
    for place in {place for each in places for place in each}:
        there = [rank for rank, each in enumerate(places) if place in each]
        first = places[there[0]][place][0]
        others = _others(scene, there)
        if others and all(_went_on(scene, rank, there[0], first) for rank in others):
            found[place] = there, first
    return found


def _went_on(scene: Scene, rank: int, there: int, event: Event) -> bool:
    """Whether a rank has come past the moment of another rank's event, as far as loops and passes tell."""
    events = scene.evidence.ranks[rank]
    if any(each.kind == "end" and each["status"] == "0" for each in events):
        return True
    before = list(scene.evidence.ranks[there])
    before = before[: before.index(event)]
    for kind in ("iterate", "forward"):
        mine, theirs = (sum(each.kind == kind for each in each_ones) for each_ones in (events, before))
        if mine != theirs:
            return mine > theirs
    return False


def _apart(scene: Scene) -> list[Finding]:
    """Calls that differ with no line that only some ranks have come by."""
    hang, apart = scene.evidence.hang, first_apart(scene.evidence.ranks)
    if apart is not None:
        here, there, rank = apart
        seen = f"where rank 0 called {_told(scene, here)}, rank {rank} called {_told(scene, there)}"
        return [scene.finding("EV402", here.place, seen, cost="" if hang is not None else _ENDED)]
    if hang is None or not hang.waiting or not hang.missing:  # all of them in one call: a machine that is busy
        if _ended_apart(scene):
            counts = [len(calls_of(events)) for events in scene.evidence.ranks]
            return [scene.finding("EV402", ("", 1), f"ranks have made {counts} calls", cost=_ENDED)]
        return []
    first = min(hang.waiting)
    return [scene.finding("EV402", hang.waiting[first].place, how_it_hangs(scene))]


def _barriers(scene: Scene) -> list[Finding]:
    """Barriers in most steps, with what they have cost."""
    found = []
    num_steps = scene.evidence.num_steps
    calls = [
        each for each in (scene.evidence.of("enter")[0] if scene.evidence.ranks else []) if each["op"] == "barrier"
    ]
    left = {each["call"]: each.time_s for each in (scene.evidence.of("leave")[0] if scene.evidence.ranks else [])}
    for place, events in by_place(calls).items():
        if num_steps < 2 or len({each.step for each in events}) < max(2.0, _IN_MOST * num_steps):
            continue
        waits = [left[each["call"]] - each.time_s for each in events if each["call"] in left]
        cost = f"{statistics.mean(waits) * 1000:.1f} ms of each step on rank 0" if waits else ""
        seen = f"{len(events)} barriers in {num_steps} steps"
        found.append(scene.finding("EV403", place, seen, cost=cost))
    return found


def _others(scene: Scene, ranks: list[int]) -> list[int]:
    return [rank for rank in range(scene.world_size) if rank not in ranks]


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
