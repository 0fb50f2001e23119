"""Whether ranks wait for one that will never come, from what they have written so far. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

from evenstep.tools.doctor.run.events import Event, Hang, Place

_STUCK_S = 3.0  # in a call, before it is asked whether the others will come
_LATE_S = 15.0  # a rank that computes, or sleeps, while others wait for it
_STEPS_LATE = 10.0  # median steps that it may take in any case
_PATIENCE_S = 60.0  # ranks that are all in the same call


def find_hang(ranks: Sequence[Sequence[Event]], now_s: float) -> Hang | None:
    """Who waits for whom for ever; None as long as it may still go on.

    Args:
        ranks: By rank, its events so far.
        now_s: The time, on the clock of the events.
    """
    waiting = {rank: call for rank, events in enumerate(ranks) if (call := open_call(events)) is not None}
    stuck = {rank: call for rank, call in waiting.items() if now_s - call.time_s > _STUCK_S}
    if not stuck:
        return None
    last = {rank: events[-1] for rank, events in enumerate(ranks) if events}
    gone = {rank: event for rank, events in enumerate(ranks) for event in events if event.kind in ("end", "left")}
    others = {rank: events for rank, events in enumerate(ranks) if rank not in gone}
    if gone and len(stuck) == len(others):
        return Hang(stuck, gone)
    busy = {rank: event for rank, event in last.items() if rank not in waiting and rank not in gone}
    longest = max(_LATE_S, _STEPS_LATE * median_step_s(ranks))
    if busy:
        quiet = all(now_s - last_progress_s(ranks[rank]) > longest for rank in busy)
        return Hang(stuck, busy) if quiet else None
    if len(stuck) < len(ranks):
        return None
    apart = first_apart(ranks)
    if apart is not None:
        first = {rank: calls for rank, calls in stuck.items() if rank == 0}
        return Hang(first, {rank: call for rank, call in stuck.items() if rank != 0})
    longest_wait = min(now_s - call.time_s for call in stuck.values())
    return Hang(stuck, {}) if longest_wait > max(_PATIENCE_S, longest) else None


def open_call(events: Sequence[Event]) -> Event | None:
    """The call that a rank is in; None if it is in none."""
    left = {event["call"] for event in events if event.kind == "leave"}
    if any(event.kind == "end" for event in events):
        return None
    return next((each for each in reversed(events) if each.kind == "enter" and each["call"] not in left), None)


def open_or_last_call(events: Sequence[Event]) -> Event | None:
    """The call that a rank was in last."""
    return open_call(events) or next((each for each in reversed(events) if each.kind == "enter"), None)


def last_progress_s(events: Sequence[Event]) -> float:
    """When a rank did something that was new."""
    time_s, place = 0.0, None
    for event in events:
        if event.kind != "idle" or event.place != place:
            time_s = event.time_s
        place = event.place if event.kind == "idle" else None
    return time_s


def idle_place(ranks: Sequence[Sequence[Event]]) -> Place | None:
    """Where rank 0 stands while it does nothing new; None if that isn't known."""
    events = ranks[0] if ranks else []
    idle = next((each for each in reversed(events) if each.kind == "idle" and each.places), None)
    return None if idle is None or last_progress_s(events) > idle.time_s else idle.place


def median_step_s(ranks: Sequence[Sequence[Event]]) -> float:
    """The median of rank 0's steps; 0.0 before two steps were made."""
    times = [event.time_s for event in (ranks[0] if ranks else []) if event.kind == "stepped"]
    return statistics.median(b - a for a, b in itertools.pairwise(times)) if len(times) > 1 else 0.0


def calls_of(events: Sequence[Event]) -> list[Event]:
    """The calls that other ranks have to make, too, in order."""
    return [event for event in events if event.kind == "enter"]


def first_apart(ranks: Sequence[Sequence[Event]]) -> tuple[Event, Event, int] | None:
    """The first calls in which rank 0 and another rank differ.

    Returns:
        (rank 0's, the other's, the other rank); None where one has only made more of them.
    """
    mine = calls_of(ranks[0]) if ranks else []
    for rank, events in enumerate(ranks[1:], 1):
        for group in sorted({str(call["group"]) for call in mine}):
            ours = [call for call in mine if call["group"] == group]
            theirs = [call for call in calls_of(events) if call["group"] == group]
            for here, there in zip(ours, theirs, strict=False):
                if here["op"] != there["op"]:
                    return here, there, rank
    return None
