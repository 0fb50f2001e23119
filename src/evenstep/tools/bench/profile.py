"""Reads traces of torch's profiler over a few steps, first of one rank and then of all ranks together. Pure.

[Note: communication on a GPU]

A kernel of NCCL runs from the moment when this rank arrives until the exchange is done, so its time includes waiting
for late ranks. If all of it counted as communication, a slow loader on one rank would look like a slow network on the
others. So each kernel is compared with the same one on the other ranks, which needs no common clock:

    rank 0   |-- backward ----|======= all-reduce 7 =======|-- optimizer -|      the shortest of both: communication
    rank 1   |-- backward -----------------|= all-reduce 7 =|-- optimizer -|     what is longer: waiting for rank 1

Communication is the last part of a kernel, as long as the shortest of these kernels. The part of it that no computing
of this rank overlaps is *exposed*. *Waiting* is the earlier part that no computing overlaps. When neither computing nor
communication runs, the GPU is *idle*: the host waits for data, or hasn't launched the next kernel yet. A rank that
waits for a late one computes nothing meanwhile, so the exposed time of a run is that of the rank with the least.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

NUM_STEPS = 6
"""The number of profiled steps, after those that count."""
WINDOW = "evenstep:profiled steps"
"""The name of the profiler's range around the profiled steps."""

Interval = tuple[float, float]  # seconds, on the clock of one rank's trace

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Profile:
    """One rank's profile.

    Attributes:
        window: The time from the begin of the first profiled step to the end of the last one.
        computing: The times when the GPU computed; empty without a GPU.
        collectives: (group, kind and number as one text, from, to) of each kernel of NCCL, in order of time.
        syncs: The lines of the script that made the host wait for the GPU, and how often per step.
    """

    window: Interval
    computing: tuple[Interval, ...] = ()
    collectives: tuple[tuple[str, float, float], ...] = ()
    syncs: tuple[tuple[str, float], ...] = ()


def read_trace(path: Path) -> Profile:
    """Read a gzipped trace of torch's profiler."""
    with gzip.open(path, "rt") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    window, counts = (0.0, 0.0), Counter[str]()
    computing: list[Interval] = []
    collectives = []
    for event in sorted(events, key=lambda event: event["ts"]):
        name, category, args = event["name"], event.get("cat"), event.get("args", {})
        since, until = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
        if category in _ON_DEVICE and "nccl" in name.lower():
            # All ranks of a group call its collectives in the same order, so the same number is the same call.
            kind = f"{args.get('Process Group Name', '')}: {args.get('Collective name', name)}"
            collectives.append((f"{kind} {counts[kind]}", since, until))
            counts[kind] += 1
        elif category in _ON_DEVICE:
            computing.append((since, until))
        elif name == WINDOW and category == "user_annotation":
            window = since, until
    return Profile(window, tuple(union(computing)), tuple(collectives))


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Intervals in order, with overlapping ones merged."""
    found: list[Interval] = []
    for since, until in sorted(intervals):
        if found and since <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], until)
        else:
            found.append((since, until))
    return found


def device_steps(profiles: Sequence[Profile]) -> list[list[dict[str, float]]]:
    """By rank, the steps of its GPU in parts: seconds of "compute", "exposed", "wait" and "idle".

    A step lasts from the end of its predecessor's last collective to the end of its own last one. Without collectives,
    or if their number isn't the same in each step, all steps count as one.

    Args:
        profiles: By rank, its profile.
    """
    shortest: dict[str, float] = {}
    for key, since, until in (each for profile in profiles for each in profile.collectives):
        shortest[key] = min(until - since, shortest.get(key, until - since))
    return [
        [_in_parts(profile, shortest, since, until) for since, until in pairwise(_ends(profile))]
        for profile in profiles
    ]


def _ends(profile: Profile) -> Sequence[float]:
    """The time when the first step begins, and those when each step ends."""
    per_step, rest = divmod(len(profile.collectives), NUM_STEPS)
    if per_step == 0 or rest:
        return profile.window
    return sorted(until for *_, until in profile.collectives)[per_step - 1 :: per_step]


def _in_parts(profile: Profile, shortest: dict[str, float], since: float, until: float) -> dict[str, float]:
    """An interval in parts; see [Note: communication on a GPU]."""
    transfers = [(max(began, ended - shortest[key]), ended) for key, began, ended in profile.collectives]
    kernels = [(began, ended) for _, began, ended in profile.collectives]

    def covered(intervals: Iterable[Interval]) -> float:
        return sum(max(0.0, min(ended, until) - max(began, since)) for began, ended in union(intervals))

    computing = covered(profile.computing)
    communicating = covered([*profile.computing, *transfers])
    busy = covered([*profile.computing, *kernels])
    return {
        "compute": computing,
        "exposed": communicating - computing,
        "wait": busy - communicating,
        "idle": until - since - busy,
    }
