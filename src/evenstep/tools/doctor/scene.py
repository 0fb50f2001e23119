"""Questions of rules about a run: names of files, loops over loaders, samples of two ranks. Pure."""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from evenstep.tools.doctor.rule import Finding, Refuted, Seen
from evenstep.tools.doctor.run.events import Event, Evidence, Place
from evenstep.tools.doctor.run.hangs import open_or_last_call
from evenstep.tools.reading.looked import Facts

# Re-exported for rules.
__all__ = ["Event", "Evidence", "Place", "Refuted", "Seen"]

MIB = 1 << 20
_SAME = 0.5  # two ranks with at least this fraction of equal samples read the same data
_APART = 0.05  # with at most this fraction, they don't
_FEWEST = 4  # fewer samples prove nothing
_OF_ALL = ("looks", "is_whole", "is_plain")  # equal facts of ranks that each go over all of one data set
_STREAMS = {"torch": "torch's generator", "random": "python's random", "numpy": "numpy.random"}
_IS_OF_A_PEER = re.compile("connection (closed|reset|refused)|closed by peer|broken pipe|gloo/transport", re.IGNORECASE)


@dataclass(frozen=True)
class Loop:
    """One loop over a loader, on one rank.

    Attributes:
        begin: The event "iterate".
        rows: By batch, the digests of its samples.
        num_steps: The optimizer steps during the loop.
        num_evaluated: The forward passes without gradients during the loop.
        end: The event "iterated"; None if the run ended before.
    """

    begin: Event
    rows: Sequence[Sequence[str]] = ()
    num_steps: int = 0
    num_evaluated: int = 0
    end: Event | None = None

    @property
    def samples(self) -> list[str]:
        """The digests of all samples, in order."""
        return [row for rows in self.rows for row in rows]

    @property
    def key(self) -> tuple[int, int]:
        """(loader, iteration): the same on all ranks for the same loop."""
        return self.begin["loader"], self.begin["iteration"]


@dataclass
class Scene:
    """The evidence of a run, with the questions that rules ask.

    Attributes:
        evidence: The events of all ranks.
        script: The path, as the user wrote it.
        directory: The absolute path of the current directory.
        facts: Facts of the script's source.
        loops: By rank, its loops over loaders during the watched steps.
    """

    evidence: Evidence
    script: str = "train.py"
    directory: str = "/"
    facts: Facts = field(default_factory=Facts)
    loops: list[list[Loop]] = field(init=False)

    def __post_init__(self) -> None:
        self.loops = [_loops_of(events) for events in self.evidence.ranks]

    @property
    def world_size(self) -> int:
        """The number of ranks of the run."""
        return len(self.evidence.ranks)

    @property
    def wrapper(self) -> str:
        """The library whose wrapper averages gradients: "torch", "evenstep" or ""."""
        return next((str(each["wrapper"]) for each in self.evidence.all("wrapped")), "")

    @property
    def error(self) -> Event | None:
        """The first error of a rank, other than a lost connection to a rank that has left; None if there is none."""
        raised = [
            each
            for each in self.evidence.all("raised")
            if each["type"] != "KeyboardInterrupt" and not _IS_OF_A_PEER.search(str(each["message"]))
        ]
        return min(raised, key=lambda each: each.time_s) if raised else None

    def finding(self, place: Place, evidence: str, cost: str = "", mend: str = "") -> Finding:
        """Make a confirmed finding at a place."""
        path, line = place
        return Finding(self.name_of(path), max(1, line), 1, evidence, cost=cost, mend=mend, confirmed=True)

    def name_of(self, path: str) -> str:
        """The path of a file as the user would write it."""
        absolute = os.path.join(self.directory, self.script)
        if not path or os.path.normpath(absolute) == os.path.normpath(path):
            return self.script
        return os.path.relpath(path, self.directory)

    def told(self, place: Place) -> str:
        """A text that names a place."""
        return f"{self.name_of(place[0])}:{place[1]}" if place[0] else "a library"

    def training_loops(self) -> list[list[Loop]]:
        """By rank, the loops with optimizer steps."""
        return [[loop for loop in loops if loop.num_steps] for loops in self.loops]


def made_at(loop: Loop) -> Place:
    """The place where the loop's loader was made; if unknown, where the loop begins."""
    made = loop.begin["made"]
    return (str(made[0][0]), int(made[0][1])) if made else loop.begin.place


def pairs(loops: Sequence[Sequence[Loop]]) -> Iterable[tuple[int, Loop, Loop]]:
    """(rank, rank 0's loop, that rank's loop) for each loop that both have."""
    first = {loop.key: loop for loop in loops[0]} if loops else {}
    for rank, others in enumerate(loops[1:], 1):
        for other in others:
            if other.key in first:
                yield rank, first[other.key], other


def by_place(events: Iterable[Event]) -> dict[Place, list[Event]]:
    """Events by place, without those that no line of the script led to."""
    found: dict[Place, list[Event]] = {}
    for event in events:
        if event.places:
            found.setdefault(event.place, []).append(event)
    return found


def by_step(events: Iterable[Event]) -> dict[int, list[Event]]:
    """Events by the number of steps before them."""
    found: dict[int, list[Event]] = {}
    for event in events:
        found.setdefault(event.step, []).append(event)
    return found


def usual(numbers: Iterable[int]) -> int:
    """The most frequent number; 0 without any."""
    counts = Counter(numbers)
    return counts.most_common(1)[0][0] if counts else 0


def share_of_equal(ours: Sequence[str], theirs: Sequence[str], *, in_any_order: bool) -> float:
    """The fraction of samples that are equal on two ranks, from 0 to 1.

    Args:
        ours: The digests of one rank's samples, in order.
        theirs: The digests of the other rank's samples, in order.
        in_any_order: Whether equal samples count at different positions, too, because ranks may shuffle. With many
            repeated samples, only equal positions count.
    """
    count = min(len(ours), len(theirs))
    if not count:
        return 0.0
    in_place = sum(a == b for a, b in zip(ours, theirs, strict=False)) / count
    if not in_any_order or any(len(set(each)) <= 0.9 * len(each) for each in (ours, theirs)):
        return in_place
    return max(in_place, len(set(ours) & set(theirs)) / min(len(set(ours)), len(set(theirs))))


def _loops_of(events: Sequence[Event]) -> list[Loop]:
    loops: dict[tuple[int, int], Loop] = {}
    opened: dict[tuple[int, int], tuple[list[list[str]], list[int]]] = {}
    for event in events:
        if event.kind == "over":
            break
        key = event["loader"], event["iteration"]
        if event.kind == "iterate":
            # `next(iter(loader))` never reaches the loader's end, so the next loop over the loader ends this one.
            for earlier in [each for each in opened if each[0] == key[0]]:
                rows, (steps, evaluated) = opened.pop(earlier)
                loops[earlier] = Loop(loops[earlier].begin, rows, steps, evaluated)
            opened[key] = [], [0, 0]
            loops[key] = Loop(event)
        elif event.kind == "batch" and key in opened:
            opened[key][0].append(list(event["rows"]))
        elif event.kind == "iterated" and key in opened:
            rows, (steps, evaluated) = opened.pop(key)
            loops[key] = Loop(loops[key].begin, rows, steps, evaluated, event)
        elif event.kind == "stepped":
            for _, counts in opened.values():
                counts[0] += 1
        elif event.kind == "forward" and not event["grad"]:
            for _, counts in opened.values():
                counts[1] += 1
    for key, (rows, (steps, evaluated)) in opened.items():
        loops[key] = Loop(loops[key].begin, rows, steps, evaluated)
    return list(loops.values())


# ---------------------------------------------------------------------- the same samples, the same draws


def is_enough(count: int) -> bool:
    """Whether a number of samples suffices for a conclusion."""
    return count >= _FEWEST


def same_samples(scene: Scene, *, of_streams: bool) -> Seen:
    """Findings on training loops in which ranks read the same samples, of streams or of other data sets."""
    loops, shares, told = scene.training_loops(), [0.0], set()
    work = f"{scene.world_size} ranks do the work of one: each sample is read {scene.world_size} times"
    for rank, mine, other in pairs(loops):
        begin, count = mine.begin, min(len(mine.samples), len(other.samples))
        goes_over_all = bool(begin["is_whole"] and begin["is_plain"])
        share = share_of_equal(mine.samples, other.samples, in_any_order=goes_over_all)
        shares += [share, 1.0 if goes_over_all else 0.0]  # ranks may hold shards, or draw without a seed
        if begin["loader"] in told or begin["loader"] is None:
            continue
        if share >= _SAME and is_enough(count):
            loop, percent = begin["iteration"] + 1, round(share * 100)
            evidence = (
                f"in loop {loop} over this loader rank 0 also read {percent} % of the {count} samples of rank {rank}"
            )
        elif goes_over_all and begin["looks"] and all(begin[key] == other.begin[key] for key in _OF_ALL):
            evidence = (
                f"ranks 0 and {rank} have the same data set of {begin['num_samples']} samples, and each rank has a "
                f"{begin['sampler']} that goes over all of it"
            )
        else:
            continue
        told.add(begin["loader"])
        if bool(begin["is_stream"]) == of_streams:
            yield scene.finding(made_at(mine), evidence, cost=work)
    if not any(loops) and not of_streams:
        yield from _same_inputs(scene)
    elif len(shares) > 1 and max(shares) <= _APART:
        yield Refuted()


def _same_inputs(scene: Scene) -> Seen:
    """A finding on equal inputs of the models, for a script without a loader."""
    ranks = [[each for each in events if each["rows"]] for events in scene.evidence.of("forward")]
    for rank, others in enumerate(ranks[1:], 1):
        passes = list(zip(ranks[0], others, strict=False))
        same = sum(share_of_equal(a["rows"], b["rows"], in_any_order=False) >= 0.9 for a, b in passes)
        if len(passes) >= 2 and same == len(passes):
            evidence = f"in {same} of {len(passes)} forward passes ranks 0 and {rank} had the same input"
            yield scene.finding(passes[0][0].place, evidence)
            return


def same_draws(scene: Scene, *, of_workers: bool) -> list[tuple[Place, str]]:
    """(place of a loader, evidence) where workers, or ranks, loaded samples with the same random state."""
    fetches, found = scene.evidence.of("fetch"), dict[Place, str]()
    pairs_of: list[tuple[str, Event, Event]] = []
    if of_workers:
        first = [each for each in (fetches[0] if fetches else []) if each["number"] == 0 and each["worker"] >= 0]
        for mine, other in itertools.combinations(first, 2):
            if mine["dataset"] == other["dataset"] and mine["worker"] != other["worker"]:
                pairs_of.append((f"workers {mine['worker']} and {other['worker']}", mine, other))
    else:
        ours = {_turn(scene, 0, each): each for each in reversed(fetches[0] if fetches else [])}
        for rank, events in enumerate(fetches[1:], 1):
            theirs = {_turn(scene, rank, each): each for each in reversed(events)}  # keeps those of the first epoch
            pairs_of += [(f"ranks 0 and {rank}", ours[turn], theirs[turn]) for turn in ours if turn in theirs]
    for who, mine, other in pairs_of:
        same = [name for name, state in mine["streams"].items() if other["streams"].get(name) == state]
        shared = " and ".join(_STREAMS.get(name, name) for name in same)
        loop = next((each for each in scene.loops[0] if each.begin["dataset"] == mine["dataset"]), None)
        if shared and loop is not None and (of_workers or loop.num_steps):
            during = "" if of_workers else " while they loaded samples"
            found.setdefault(made_at(loop), f"{who} drew from the same state of {shared}{during}")
    return list(found.items())


def _turn(scene: Scene, rank: int, fetch: Event) -> tuple[int, int, int]:
    """(loader, worker, number) of a fetch, the same on all ranks for the same fetch."""
    loop = next((each for each in scene.loops[rank] if each.begin["dataset"] == fetch["dataset"]), None)
    return -1 if loop is None else loop.begin["loader"], fetch["worker"], fetch["number"]


# ---------------------------------------------------------------------- lengths


def different_lengths(scene: Scene) -> list[tuple[Place, str]]:
    """(place, evidence) of training loaders with different numbers of batches on two ranks."""
    found: dict[Place, str] = {}
    trained = {loop.begin["loader"] for loops in scene.training_loops() for loop in loops}
    for rank, mine, other in pairs(scene.loops) if not scene.evidence.all("join") else ():
        if mine.begin["library"] == "evenstep" or mine.begin["loader"] not in trained:
            continue
        planned = mine.begin["num_batches"], other.begin["num_batches"]
        ended = _ended(mine), _ended(other)
        if None not in planned and planned[0] != planned[1]:
            evidence = f"an epoch has {planned[0]} batches on rank 0 and {planned[1]} on rank {rank}"
        elif None not in ended and ended[0] != ended[1]:
            evidence = f"the loop ended after {ended[0]} batches on rank 0 and after {ended[1]} on rank {rank}"
        else:
            evidence = _shorter(scene, (0, mine), (rank, other)) or _shorter(scene, (rank, other), (0, mine))
        if evidence:
            found.setdefault(made_at(mine), evidence)
    return list(found.items())


def _shorter(scene: Scene, one: tuple[int, Loop], other: tuple[int, Loop]) -> str:
    """A text if a loop has ended on one rank while the other waits in a step that needs both; else ""."""
    (who, short), (still, long) = one, other
    if _ended(short) is not None and long.end is None and len(long.rows) > len(short.rows):
        call = open_or_last_call(scene.evidence.ranks[still])
        if call is not None and call["op"] in ("gradients of the model", "forward of the model"):
            return f"rank {who} had {_ended(short)} batches, and rank {still} has read {len(long.rows)} so far"
    return ""


def _ended(loop: Loop) -> int | None:
    """The number of batches of a loop that ended by itself; None for another."""
    return None if loop.end is None or loop.end["cut"] else int(loop.end["num_batches"])


# ---------------------------------------------------------------------- the step


def passes_of_steps(scene: Scene) -> Iterator[tuple[Place, list[Event], int, int, int]]:
    """The backward passes of each line, in steps of a model in torch's wrapper.

    Yields:
        (line, its passes on rank 0, number of its passes per step, number of those that exchange gradients, number of
        passes of all lines per step).
    """
    if not scene.evidence.ranks or scene.wrapper == "evenstep":
        return  # evenstep's wrapper handles several passes itself
    done = {each.step for each in scene.evidence.of("stepped")[0]}
    followed = [each for each in scene.evidence.of("backward")[0] if each.step in done and each["wrapped"]]
    in_all = usual(len(each) for each in by_step(followed).values())
    for place, events in by_place(followed).items():
        steps = by_step(events)
        synced = usual(sum(bool(event["synced"]) for event in each) for each in steps.values())
        yield place, events, usual(len(each) for each in steps.values()), synced, in_all


def replicas_differ(scene: Scene) -> str:
    """A text that counts the trained parameters that differ between two ranks; "" if none differ, or that is allowed.

    Ranks that form groups, or send from rank to rank, may hold parts of a model. evenstep's wrapper checks by itself.
    """
    if scene.wrapper == "evenstep" or scene.evidence.all("apart"):
        return ""
    ranks = [{(each["model"], each["when"]): each["digests"] for each in e} for e in scene.evidence.of("parameters")]
    for rank, theirs in enumerate(ranks[1:], 1):
        for model, when in ranks[0]:
            first, mine, other = (each.get((model, w), {}) for each, w in ((ranks[0], 0), (ranks[0], 1), (theirs, 1)))
            if when or mine.keys() != other.keys():
                continue
            trained = [name for name in mine if name in first and mine[name] != first[name]]
            differing = [name for name in trained if mine[name] != other[name]]
            if differing:
                counts = f"{len(differing)} of {len(trained)} trained parameters ({differing[0]}, for one)"
                return f"after two steps rank 0 and rank {rank} differ in {counts}"
    return ""


# ---------------------------------------------------------------------- output


def same_paths(scene: Scene, kind: str) -> dict[str, list[Place]]:
    """By path of a file that several ranks wrote, the place of each rank's first write."""
    found: dict[str, dict[int, Place]] = {}
    for rank, events in enumerate(scene.evidence.of(kind, hurried=True)):
        for each in events:
            if each["path"] and each.places:
                found.setdefault(os.path.abspath(each["path"]), {}).setdefault(rank, each.place)
    return {path: list(places.values()) for path, places in found.items() if len(places) > 1}


# ---------------------------------------------------------------------- devices
