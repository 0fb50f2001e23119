"""What ranks have read: the same samples, the same order, the same draws, different numbers of batches. Pure."""

from __future__ import annotations

from evenstep.tools.doctor.evidence.scene import Loop, Scene, made_at, pairs, share_of_equal
from evenstep.tools.doctor.findings import Finding, Refuted
from evenstep.tools.doctor.run.events import Event
from evenstep.tools.doctor.run.hangs import open_or_last_call

_SAME = 0.5  # of the samples of two ranks, from which on they read the same data
_APART = 0.05  # and up to which they don't
_FEWEST = 4  # samples that say something


def judge(scene: Scene) -> tuple[list[Finding], list[Refuted]]:
    """All of this group."""
    samples, refuted = _same_samples(scene)
    order, refuted_order = _same_order(scene)
    found = [*samples, *order, *_padded(scene), *_same_draws(scene), *_different_lengths(scene)]
    return found, [*refuted, *refuted_order]


def _same_samples(scene: Scene) -> tuple[list[Finding], list[Refuted]]:
    found: dict[int, Finding] = {}
    shares = []
    twice = f"{scene.world_size} ranks do the work of one: {scene.world_size - 1} of {scene.world_size} samples again"
    for rank, mine, other in pairs(scene.training_loops()):
        goes_over_all = bool(mine.begin["is_whole"] and mine.begin["is_plain"])
        share = share_of_equal(mine.samples, other.samples, in_any_order=goes_over_all)
        shares.append(share)
        number = mine.begin["loader"]
        if number in found or number is None:
            continue
        count = min(len(mine.samples), len(other.samples))
        is_stream = bool(mine.begin["is_stream"])
        if share >= _SAME and count >= _FEWEST:
            seen = (
                f"{round(share * 100)} % of the {count} samples that rank {rank} read in {_name(mine)} rank 0 read, too"
            )
        elif _is_whole(mine, other):
            seen = (
                f"ranks 0 and {rank} have the same data set of {mine.begin['num_samples']} samples, and the "
                f"{mine.begin['sampler']} of each goes over all of it"
            )
        else:
            continue
        found[number] = scene.finding("EV106" if is_stream else "EV101", made_at(mine), seen, cost=twice)
    if not any(scene.training_loops()):
        alike = _same_inputs(scene)
        return ([alike] if alike is not None else []), []
    # Ranks that go over all of what they have, and have other samples: shards, or samples drawn without a seed.
    is_unsure = any(mine.begin["is_whole"] and mine.begin["is_plain"] for _, mine, _ in pairs(scene.training_loops()))
    is_apart = bool(shares) and not found and not is_unsure and max(shares) <= _APART
    return list(found.values()), [Refuted("EV101"), Refuted("EV106")] if is_apart else []


def _is_whole(mine: Loop, other: Loop) -> bool:
    """Whether two ranks go over all of one data set, in whatever order."""
    looks = mine.begin["looks"]
    both = (mine.begin, other.begin)
    return bool(looks) and looks == other.begin["looks"] and all(each["is_whole"] and each["is_plain"] for each in both)


def _same_inputs(scene: Scene) -> Finding | None:
    """Without a loader: what went into the model."""
    ranks = [[each for each in events if each["rows"]] for events in scene.evidence.of("forward")]
    for rank, others in enumerate(ranks[1:], 1):
        passes = list(zip(ranks[0], others, strict=False))
        same = sum(share_of_equal(a["rows"], b["rows"], in_any_order=False) >= 0.9 for a, b in passes)
        if len(passes) >= 2 and same == len(passes):
            seen = f"in {same} of {len(passes)} forward passes ranks 0 and {rank} had the same input"
            return scene.finding("EV101", passes[0][0].place, seen)
    return None


def _same_order(scene: Scene) -> tuple[list[Finding], list[Refuted]]:
    found: dict[int, Finding] = {}
    refuted = False
    loops = scene.training_loops()[0] if scene.loops else []
    for number in {loop.begin["loader"] for loop in loops}:
        first, *later = [loop for loop in loops if loop.begin["loader"] == number]
        if not later or not first.begin["is_distributed"] or not first.begin["is_shuffled"]:
            continue
        second = later[0]
        count = min(len(first.samples), len(second.samples))
        same = count >= _FEWEST and first.samples[:count] == second.samples[:count]
        epochs = first.begin["epoch"], second.begin["epoch"]
        if (same and len(set(first.samples)) > 1) or (epochs[0] is not None and epochs[0] == epochs[1]):
            what = f"the first {count} samples of two epochs came in the same order" if same else "two epochs"
            seen = f"{what}, and the sampler was in epoch {epochs[1]} in both"
            found[number] = scene.finding("EV102", first.begin.place, seen)
        else:
            refuted = True
    return list(found.values()), [Refuted("EV102")] if refuted and not found else []


def _padded(scene: Scene) -> list[Finding]:
    found: dict[int, Finding] = {}
    for loop in scene.loops[0] if scene.loops else []:
        count, padded = loop.begin["num_samples"], loop.begin["padded_to"]
        if loop.num_steps or not loop.num_evaluated or not loop.begin["is_distributed"] or not (count and padded):
            continue
        if padded > count:
            seen = f"{padded} samples were evaluated by {scene.world_size} ranks, where the data set has {count}"
            found.setdefault(loop.begin["loader"], scene.finding("EV105", made_at(loop), seen))
    return list(found.values())


# ---------------------------------------------------------------------- random draws


def _same_draws(scene: Scene) -> list[Finding]:
    found: list[Finding] = []
    fetches = scene.evidence.of("fetch")
    for rank, others in enumerate(fetches[1:], 1):
        # The first epoch's: later ones replace nothing.
        theirs = {_turn(scene, rank, each): each for each in reversed(others)}
        ours = {_turn(scene, 0, each): each for each in reversed(fetches[0])}
        for turn, mine in ours.items():
            other = theirs.get(turn)
            shared = _shared_streams(mine, other)
            loop = _loop_of(scene, 0, mine)
            if shared and loop is not None and loop.num_steps:
                seen = f"ranks 0 and {rank} drew from the same state of {shared} while they loaded samples"
                found.append(scene.finding("EV107", made_at(loop), seen))
    first = [each for each in (fetches[0] if fetches else []) if each["number"] == 0 and each["worker"] >= 0]
    for index, mine in enumerate(first):
        for other in first[index + 1 :]:
            shared = _shared_streams(mine, other) if mine["dataset"] == other["dataset"] else ""
            loop = _loop_of(scene, 0, mine)
            if shared and loop is not None and mine["worker"] != other["worker"]:
                seen = f"workers {mine['worker']} and {other['worker']} drew from the same state of {shared}"
                found.append(scene.finding("EV108", made_at(loop), seen))
    of_workers = {(each.path, each.line) for each in found if each.rule == "EV108"}
    # Workers that all begin alike do so on all ranks: one mistake.
    kept = [each for each in found if each.rule == "EV108" or (each.path, each.line) not in of_workers]
    return list({(each.rule, each.path, each.line): each for each in reversed(kept)}.values())


def _turn(scene: Scene, rank: int, fetch: Event) -> tuple[int, int, int]:
    """Which of the fetches it is: the same key on all ranks."""
    loop = _loop_of(scene, rank, fetch)
    return -1 if loop is None else loop.begin["loader"], fetch["worker"], fetch["number"]


def _loop_of(scene: Scene, rank: int, fetch: Event) -> Loop | None:
    return next((each for each in scene.loops[rank] if each.begin["dataset"] == fetch["dataset"]), None)


def _shared_streams(mine: Event, other: Event | None) -> str:
    if other is None:
        return ""
    same = [name for name, state in mine["streams"].items() if other["streams"].get(name) == state]
    return " and ".join(_STREAMS.get(name, name) for name in same)


_STREAMS = {"torch": "torch's generator", "random": "python's random", "numpy": "numpy.random"}


# ---------------------------------------------------------------------- lengths


def _different_lengths(scene: Scene) -> list[Finding]:
    if scene.evidence.all("join"):
        return []
    found: dict[int, Finding] = {}
    for rank, mine, other in pairs(scene.loops):
        if mine.begin["library"] == "evenstep" or not _trains(scene, mine.begin["loader"]):
            continue
        planned = mine.begin["num_batches"], other.begin["num_batches"]
        if None not in planned and planned[0] != planned[1]:
            seen = f"an epoch has {planned[0]} batches on rank 0 and {planned[1]} on rank {rank}"
        elif _ended(mine) is not None and _ended(other) is not None and _ended(mine) != _ended(other):
            seen = f"the loop ended after {_ended(mine)} batches on rank 0 and after {_ended(other)} on rank {rank}"
        elif (short := _shorter(scene, rank, mine, other)) is not None:
            seen = short
        else:
            continue
        found.setdefault(mine.begin["loader"], scene.finding("EV109", made_at(mine), seen))
    return list(found.values())


def _shorter(scene: Scene, rank: int, mine: Loop, other: Loop) -> str | None:
    """A loop that has ended on one rank, while the other makes a step that needs both; in words, or None."""
    for (who, short), (still, long) in (((0, mine), (rank, other)), ((rank, other), (0, mine))):
        if _ended(short) is not None and long.end is None and len(long.rows) > len(short.rows):
            call = open_or_last_call(scene.evidence.ranks[still])
            if call is not None and call["op"] in ("gradients of the model", "forward of the model"):
                return f"rank {who} had no more after {_ended(short)} batches, rank {still} read {len(long.rows)}"
    return None


def _trains(scene: Scene, loader: int) -> bool:
    return any(loop.num_steps and loop.begin["loader"] == loader for loops in scene.loops for loop in loops)


def _ended(loop: Loop) -> int | None:
    """Batches of a loop that has ended by itself."""
    return None if loop.end is None or loop.end["cut"] else int(loop.end["num_batches"])


def _name(loop: Loop) -> str:
    return f"loop {loop.begin['iteration'] + 1} over this loader"
