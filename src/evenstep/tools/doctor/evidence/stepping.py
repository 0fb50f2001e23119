"""How steps were made: accumulation, divisors, clipping, parameters, tokens, normalisation, schedules. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from evenstep.tools.doctor.evidence.scene import MIB, Scene, by_place, by_step, usual
from evenstep.tools.doctor.findings import Finding, Refuted
from evenstep.tools.doctor.run.events import Event, Place

_FEW_ROWS = 8  # of a batch on one rank, under which its statistics are noise
_MANY_LOSSES = 8  # of a rank, among which one with padding would be
_CLOSE = 1e-3  # relative difference of two divisors that are taken as equal


def judge(scene: Scene) -> tuple[list[Finding], list[Refuted]]:
    """All of this group."""
    found = [*_passes(scene), *_clipping(scene), *_replaced(scene), *_tokens(scene), *_norms(scene), *_rates(scene)]
    return found, _whole_means(scene)


def _passes(scene: Scene) -> list[Finding]:
    """Accumulation: exchanges that could go, and divisors."""
    if scene.wrapper == "evenstep":
        return []  # its backward passes know of each other
    found = []
    backward = scene.evidence.of("backward")[0] if scene.evidence.ranks else []
    done = {each.step for each in (scene.evidence.of("stepped")[0] if scene.evidence.ranks else [])}
    num_bytes = sum(each["num_bytes"] for each in (scene.evidence.of("wrapped")[0] if scene.evidence.ranks else []))
    followed = [each for each in backward if each.step in done and each["wrapped"]]
    in_all = usual(len(each) for each in by_step(followed).values())
    for place, events in by_place(followed).items():
        steps = by_step(events)
        passes = usual(len(each) for each in steps.values())
        synced = usual(sum(bool(event["synced"]) for event in each) for each in steps.values())
        if passes > 1 and synced == passes:
            seen = f"{passes} backward passes in a step, and gradients were exchanged in each of them"
            cost = f"{passes - 1} of {passes} exchanges of {num_bytes / MIB:.3g} MiB are superfluous"
            found.append(scene.finding("EV501", place, seen, cost=cost))
        seen = _wrong_factor(events, passes, scene.world_size, in_all=in_all)
        if seen:
            found.append(scene.finding("EV502", place, seen))
    return found


def _wrong_factor(events: Sequence[Event], passes: int, world_size: int, *, in_all: int) -> str:
    """What is wrong with the number that the mean loss is multiplied by, in words; "" if nothing is.

    Args:
        events: The backward passes of one line.
        passes: How many of them a step has.
        world_size: Ranks.
        in_all: How many a step has of all lines. Lines of one pass each may be an accumulation that is written out, and
            then they are divided by all of them; or losses of several kinds, with a weight each, or none.
    """
    factors = {round(float(each["factor"]), 9) for each in events if each["factor"] and each["is_mean"]}
    if len(factors) != 1 or any(not each["is_mean"] or each["weighted"] for each in events):
        return ""
    divisor = 1.0 / factors.pop()
    if abs(divisor / passes - 1) < _CLOSE or abs(divisor / in_all - 1) < _CLOSE:
        return ""
    if passes > 1 and abs(divisor - 1) < _CLOSE:
        return f"{passes} backward passes in a step, and the loss was divided by nothing"
    num = passes if passes > 1 else in_all
    if world_size > 1 and abs(divisor / (num * world_size) - 1) < _CLOSE:
        also = f"{num} passes and " if num > 1 else ""
        return f"the loss was divided by {divisor:g}: by {also}the {world_size} ranks, over which DDP averages already"
    if passes > 1 and abs(divisor - round(divisor)) < _CLOSE and divisor > 1:
        return f"{passes} backward passes in a step, and the loss was divided by {divisor:g}"
    return ""


def _clipping(scene: Scene) -> list[Finding]:
    found: dict[Place, Finding] = {}
    for events in scene.evidence.ranks:
        is_scaled = False
        for event in events:
            if event.kind in ("scale", "unscale"):
                is_scaled = event.kind == "scale"
            elif event.kind == "clip" and is_scaled and event.places:
                seen = "gradients were clipped after scaler.scale and before any unscale_"
                found.setdefault(event.place, scene.finding("EV503", event.place, seen))
    return list(found.values())


def _replaced(scene: Scene) -> list[Finding]:
    for event in scene.evidence.all("stepped"):
        if event["stale"] and event["untrained"]:
            seen = (
                f"{event['stale']} tensors of the optimizer belong to no module, and {event['untrained']} parameters "
                f"with a gradient belong to no optimizer"
            )
            return [scene.finding("EV504", event.place, seen)]
    return []


def _tokens(scene: Scene) -> list[Finding]:
    """Means over labels, and sums that the script has divided itself."""
    return [*_divided_sums(scene), *_means_of_labels(scene)]


def _divided_sums(scene: Scene) -> list[Finding]:
    ranks = [
        {(each.place, each.step): 1.0 / each["factor"] for each in events if each["is_sum"] and each["factor"]}
        for events in scene.evidence.of("backward")
    ]
    different: dict[Place, list[tuple[float, float]]] = {}
    for key, mine in ranks[0].items() if len(ranks) > 1 else ():
        other = ranks[1].get(key, mine)
        if mine != other and key[0][0]:
            different.setdefault(key[0], []).append((mine, other))
    found = []
    for place, numbers in different.items():
        if len(numbers) >= max(2, scene.evidence.num_steps // 2):
            ours, theirs = numbers[0]
            seen = f"in {len(numbers)} steps ranks divided their sums by other numbers: {ours:g} and {theirs:g} in one"
            found.append(scene.finding("EV505", place, seen))
    return found


def _whole_means(scene: Scene) -> list[Refuted]:
    """Nothing is left out of means over labels if none was in any step, on any rank."""
    ranks = [[each for each in events if each["reduction"] == "mean"] for events in scene.evidence.of("loss")]
    backward = scene.evidence.all("backward")
    is_whole = all(
        len(events) >= _MANY_LOSSES and all(each["valid"] == each["labels"] for each in events) for events in ranks
    )
    return [Refuted("EV505")] if len(ranks) > 1 and is_whole and all(each["is_mean"] for each in backward) else []


def _means_of_labels(scene: Scene) -> list[Finding]:
    if any(
        each["weighted"] or each["factor"] is None or not each["is_mean"] for each in scene.evidence.all("backward")
    ):
        return []
    ranks = [
        {(each.place, each.step): each for each in events if each["reduction"] == "mean" and each.places}
        for events in scene.evidence.of("loss")
    ]
    if len(ranks) < 2:
        return []
    different: dict[Place, list[tuple[int, int]]] = {}
    for key, mine in ranks[0].items():
        other = ranks[1].get(key)
        if other is not None and mine["valid"] != other["valid"] and _is_of_tokens(mine, other):
            different.setdefault(key[0], []).append((mine["valid"], other["valid"]))
    found = []
    for place, counts in different.items():
        if len(counts) >= max(2, scene.evidence.num_steps // 2):
            ours, theirs = max(counts, key=lambda each: abs(each[0] - each[1]))
            seen = (
                f"in {len(counts)} steps the loss was a mean over other numbers of labels: {ours} and {theirs} in one"
            )
            found.append(scene.finding("EV505", place, seen))
    return found


def _is_of_tokens(mine: Event, other: Event) -> bool:
    """Whether labels were left out; else a batch is just smaller than another."""
    return any(each["valid"] < each["labels"] for each in (mine, other))


def _norms(scene: Scene) -> list[Finding]:
    found = []
    if scene.facts.syncs_norms:
        return []  # as it does on GPUs; torch's refuses a CPU
    for place, events in by_place(scene.evidence.all("norm")).items():
        rows = usual(each["rows"] for each in events)
        if rows < _FEW_ROWS:
            seen = f"a batch normalisation took its statistics from {rows} rows"
            found.append(scene.finding("EV507", place, seen))
    return found[:1]


def _rates(scene: Scene) -> list[Finding]:
    ranks = [{each.step: each["lr"] for each in events} for events in scene.evidence.of("stepped")]
    for rank, rates in enumerate(ranks[1:], 1):
        for step, rate in sorted(rates.items()):
            mine = ranks[0].get(step, rate)
            if mine != rate:
                schedules = scene.evidence.all("schedule")
                place = schedules[0].place if schedules else ("", 1)
                seen = f"in step {step + 1} the learning rate was {mine[0]:g} on rank 0 and {rate[0]:g} on rank {rank}"
                return [scene.finding("EV509", place, seen)]
    return []
