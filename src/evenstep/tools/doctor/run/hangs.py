"""Whether ranks wait for a rank that will never come, judged by their events so far. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

from evenstep.tools.doctor.run.events import Event, Hang, Place

_STUCK_S = 3.0  # a rank that is longer in a call counts as waiting
_LATE_S = 15.0  # how long a rank may do nothing new while others wait for it
_STEPS_LATE = 10.0  # the same, in median steps; the longer time counts
_PATIENCE_S = 60.0  # how long all ranks may be in the same call


def find_hang(ranks: Sequence[Sequence[Event]], now_s: float) -> Hang | None:
    """The hang of a run; None if the ranks may still go on.

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
    """The call that a rank is in, or None."""
    left = {event["call"] for event in events if event.kind == "leave"}
    if any(event.kind == "end" for event in events):
        return None
    return next((each for each in reversed(events) if each.kind == "enter" and each["call"] not in left), None)


def open_or_last_call(events: Sequence[Event]) -> Event | None:
    """The call that a rank is in, or else its last one; None without calls."""
    return open_call(events) or next((each for each in reversed(events) if each.kind == "enter"), None)


def last_progress_s(events: Sequence[Event]) -> float:
    """The time of a rank's last event that shows progress: repeated "idle" events at one place don't."""
    time_s, place = 0.0, None
    for event in events:
        if event.kind != "idle" or event.place != place:
            time_s = event.time_s
        place = event.place if event.kind == "idle" else None
    return time_s


def idle_place(ranks: Sequence[Sequence[Event]]) -> Place | None:
    """The place where rank 0 is idle; None if it isn't, or if that is unknown."""
    events = ranks[0] if ranks else []
    idle = next((each for each in reversed(events) if each.kind == "idle" and each.places), None)
    return None if idle is None or last_progress_s(events) > idle.time_s else idle.place


def median_step_s(ranks: Sequence[Sequence[Event]]) -> float:
    """The median time of rank 0's steps; 0.0 with fewer than two steps."""
    times = [event.time_s for event in (ranks[0] if ranks else []) if event.kind == "stepped"]
    return statistics.median(b - a for a, b in itertools.pairwise(times)) if len(times) > 1 else 0.0


def calls_of(events: Sequence[Event]) -> list[Event]:
    """The collectives of a rank, in order."""
    return [event for event in events if event.kind == "enter"]


def first_apart(ranks: Sequence[Sequence[Event]]) -> tuple[Event, Event, int] | None:
    """The first calls that differ between rank 0 and another rank.

    Returns:
        (rank 0's call, the other rank's call, the other rank); None if one rank has only made more calls.
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
