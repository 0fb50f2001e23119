"""Questions of rules about the calls of a run: those that only some ranks made, and which ranks wait. Pure."""

from __future__ import annotations

from evenstep.tools.doctor.run.events import Event
from evenstep.tools.doctor.run.hangs import calls_of, first_apart
from evenstep.tools.doctor.scene import Scene, by_place

# Re-exported for rules.
__all__ = ["calls_of", "first_apart"]

ENDED = "The run ended, but ranks made different calls: a rank may get data that are meant for another call."
# Calls that torch's wrapper makes by itself.
_IMPLICIT = ("gradients of the model", "forward of the model", "DistributedDataParallel", "init_process_group")


def how_it_hangs(scene: Scene) -> str:
    """A text that says which ranks wait where, and where the missing ranks are; "" if the run doesn't hang."""
    hang = scene.evidence.hang
    if hang is None:
        return ""
    if not hang.missing:
        call = next(iter(hang.waiting.values()))
        return f"all ranks were in {told_call(scene, call)} for too long"
    waits = ", ".join(f"rank {rank} waits in {told_call(scene, call)}" for rank, call in sorted(hang.waiting.items()))
    others = ", ".join(f"rank {rank} {_doing(scene, event)}" for rank, event in sorted(hang.missing.items()))
    return f"the run would hang: {waits}" + (f"; {others}" if others else "")


def told_call(scene: Scene, call: Event) -> str:
    """A text that names a call and its place."""
    return f"{call['op']} at {scene.told(call.place)}"


def _doing(scene: Scene, event: Event) -> str:
    if event.kind == "enter":
        return f"in {told_call(scene, event)}"
    if event.kind in ("end", "left"):
        return "has ended"
    return f"is at {scene.told(event.place)}, outside of the collective"


def is_apart(scene: Scene) -> bool:
    """Whether ranks differ in their calls: the run hangs, the order differs, or the numbers at the end do."""
    return scene.evidence.hang is not None or first_apart(scene.evidence.ranks) is not None or ended_apart(scene)


def ended_apart(scene: Scene) -> bool:
    """Whether all ranks reached the end of the script, with different numbers of calls."""
    ended = all(any(each.kind == "end" and each["status"] == "0" for each in events) for events in scene.evidence.ranks)
    left = any(each.kind == "left" for events in scene.evidence.ranks for each in events)
    counts = {len(calls_of(events)) for events in scene.evidence.ranks}
    return ended and not left and len(counts) > 1


def on_some(scene: Scene, ranks: list[list[Event]], what: str) -> list[tuple[Event, str, str]]:
    """(first event, evidence, cost) for each line that only some ranks reached, while the others went on.

    Args:
        scene: The run.
        ranks: By rank, the events to compare.
        what: What the ranks did there, such as "called the wrapped model"; "{op}" stands for the call's name.
    """
    hangs, found = how_it_hangs(scene), []
    places = [by_place(events) for events in ranks]
    for place in {place for each in places for place in each}:
        there = [rank for rank, each in enumerate(places) if place in each]
        others = [rank for rank in range(scene.world_size) if rank not in there]
        first = places[there[0]][place][0]
        if others and all(_went_on(scene, rank, there[0], first) for rank in others):
            seen = f"{_ranks(there)} {what.format(op=first['op'])} here, {_ranks(others)} never did"
            found.append((first, f"{seen}; {hangs}" if hangs else seen, "" if hangs else ENDED))
    return found


def calls_on_some(scene: Scene) -> list[tuple[Event, str, str]]:
    """The collectives that only some ranks called, as `on_some`; [] after an error: others wait for that rank."""
    if scene.error is not None or not is_apart(scene):
        return []
    calls = [[call for call in calls_of(events) if call["op"] not in _IMPLICIT] for events in scene.evidence.ranks]
    return on_some(scene, calls, "called {op}")


def is_guarded(scene: Scene, call: Event) -> bool:
    """Whether a condition around a call may depend on the rank. True if that isn't known: data decide more rarely."""
    return scene.facts.guarded is None or call.place in scene.facts.guarded


def models_on_some(scene: Scene) -> list[tuple[Event, str, str]]:
    """Forward passes that only some ranks made and that communicate: gradients later, or buffers at once."""
    sent = {each.place for each in scene.evidence.all("enter") if each["op"] == "forward of the model"}
    forwards = [[each for each in events if each["wrapped"]] for events in scene.evidence.of("forward")]
    seen = [] if scene.error is not None else on_some(scene, forwards, "called the wrapped model")
    return [each for each in seen if each[0].place in sent or each[0]["grad"]]


def _went_on(scene: Scene, rank: int, there: int, event: Event) -> bool:
    """Whether a rank went on past the moment of another rank's event, judged by its loops and forward passes."""
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


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
