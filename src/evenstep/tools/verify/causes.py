"""What usually makes a run on several ranks differ from one on fewer, by the evidence that ranks recorded. Pure.

Nothing here is a guess at the script's text. Each cause has evidence of its own:

    not seeded          what two runs on the same number of ranks load and start with
    repeated, samples   digests of the samples that the model was given, over all ranks, against those of the other run
    drift               digests of parameters that differ between ranks
    settings            the optimizer's numbers
    branch              modules that ran, and nodes of the graph, that differ between ranks
    divisor, average    the reference's gradient is a weighted sum of what the ranks' backward passes added, with other
                        weights than those that were applied: each was right, and only counted wrong
    batch norm          it is no such sum, and layers have normalised over one rank's share
    batch statistics    it is no such sum, and a loss takes a mean over that share
    skipped             calls of a GradScaler's step that made none
    random              the random stream: ranks that share it, or that draw what a single process draws once; inputs
                        that repeat where the samples of the loaders don't
    no gradient         no element of a gradient but 0
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from evenstep.checks import counted
from evenstep.tools.observing.thresholds import SAME_WEIGHT
from evenstep.tools.verify.evidence import OVER_BATCH, Run, Seen, data_ranks

_MOST_PASSES = 64  # backward passes of all ranks in a step, above which their weights are not computed

_SAME_NUMBERS = 1e-5  # relative distance of two sizes that float32 and float64 may compute of the same numbers


@dataclass(frozen=True)
class Cause:
    """What usually causes such a difference.

    Attributes:
        kind: One word of the list above, for programs.
        text: What is wrong, by which evidence, and what to do.
    """

    kind: str
    text: str


OTHERS_SKIPPED = Cause(
    "skipped",
    "a GradScaler skipped other steps: gradients overflow in float16 on one number of ranks, and not on the other. The "
    "scale is nearly too large, or the loss has another size. What steps compute can be compared when none is skipped: "
    "give the scaler a smaller init_scale for that.",
)


def find_causes(base: Run, run: Run, step: int, *, rounding: float) -> list[Cause]:
    """The first cause that the evidence supports; [] if it supports none.

    What comes behind it would be no evidence: gradients of other samples differ in every way.

    Args:
        base: The run on fewer ranks; in float64, if there is one.
        run: The run that differs, likewise.
        step: The first step that differs, from 0.
        rounding: Relative rounding of both.
    """
    seen, known = data_ranks(run.at(step)), data_ranks(base.at(step))
    weights = find_weights(base, run, step)
    found = _data(base, run, step) or _drift(run, step) or _branch(seen)
    if not found and weights is not None and weights.unexplained <= max(1e3 * rounding, 1e-9):
        found = _counted_wrong(weights, base.num_ranks, known, seen)
    elif not found:
        has_passes = any(passes for each in seen for passes in each.virtual_ranks)
        found = _own_statistics(seen, is_sure=weights is not None and has_passes)
    return found or _settings(known, seen) or _draws(seen)


def find_faults(run: Run) -> list[Cause]:
    """What is wrong with a run on several ranks whether or not its gradients differ from those of another."""
    for step in range(run.num_steps):
        seen = data_ranks(run.at(step))
        found = _shared_masks(seen) + _same_data(run, step) + _drift(run, step) + _undivided(seen)
        if found:
            return found
    return _no_gradient(run)


def find_unseeded(base: Run, again: Run) -> list[Cause]:
    """Whether a script begins otherwise each time it runs, by two runs on as many ranks."""
    for ours, theirs in zip(base.at(0), again.at(0), strict=True):
        both = [(name, size, theirs.initial.get(name, size)) for name, size in ours.initial.items()]
        other = next((name for name, size, twin in both if abs(size - twin) > _SAME_NUMBERS * size), "")
        if other or ours.loaded != theirs.loaded:
            _, _, parameter = other.partition("param/")
            what = f"the initial {parameter!r}" if parameter else "the samples of step 1"
            return [
                Cause(
                    "not seeded",
                    f"not seeded: two runs on {counted(base.num_ranks, 'rank')} differ in {what}, so runs on other "
                    f"numbers of ranks can't be compared. Seed before the first random number (a random_split draws "
                    f"some): torch.manual_seed(0), and random.seed and numpy.random.seed where the script uses them.",
                )
            ]
    return []


def _no_gradient(run: Run) -> list[Cause]:
    steps = range(run.num_steps)
    if len(steps) < 2 or any(seen.has_hidden for seen in run.ranks[0]):  # a first step may have no gradient yet
        return []
    if any(bool(value.any()) for step in steps for name, value in run.values(step).items() if name.startswith("grad/")):
        return []
    return [
        Cause(
            "no gradient",
            f"every gradient of {len(steps)} steps is zero, or none arrives at the optimizer: nothing is trained, and "
            f"that bits are equal says nothing. Look for zero_grad between backward and step, a loss that was "
            f"multiplied by 0, or one that doesn't depend on the parameters.",
        )
    ]


def _data(base: Run, run: Run, step: int) -> list[Cause]:
    """The samples of a global batch, as a multiset: other ones, or the same ones more often."""
    ours, theirs = _samples(data_ranks(base.at(step))), _samples(data_ranks(run.at(step)))
    if not ours or not theirs or ours == theirs:
        return []
    more, fewer = theirs - ours, ours - theirs
    total, expected = sum(theirs.values()), sum(ours.values())
    repeated = sum(min(count, theirs[each] - 1) for each, count in more.items() if theirs[each] > 1)
    when, received = f"in step {step + 1}, {repeated} of the {total} samples", _by_whom(data_ranks(run.at(step)))
    if not repeated:
        # Ranks with orders of their own see each other's samples sooner or later.
        steps = range(min(base.num_steps, run.num_steps))
        repeated = max(0, _num_repeated(run, steps) - _num_repeated(base, steps))
        when, received = f"within {len(steps)} steps, {repeated} of the samples", ""
    if repeated and _is_drawn(run, step):
        return _same_numbers(f"{when}{received}")
    if repeated:
        left_out = f", and {sum(fewer.values())} of the {expected} of step {step + 1} are left out" if fewer else ""
        return [
            Cause(
                "repeated",
                f"data seen twice: {when} of {run.num_ranks} ranks are repetitions{received}{left_out}. Divide the "
                f"data over the ranks: evenstep.DataLoader(global_batch_size=), or a DistributedSampler that knows rank"
                f" and number of ranks, with one seed. (At an epoch's end torch's sampler repeats samples, too.)",
            )
        ]
    if total != expected:
        return [
            Cause(
                "samples",
                f"the global batch depends on the number of ranks: {expected} samples on {base.num_ranks}, {total} on "
                f"{run.num_ranks}. verify sees to the batch sizes of torch's DataLoader alone; divide others by the "
                f"number of ranks, or use evenstep.DataLoader(global_batch_size=).",
            )
        ]
    return [
        Cause(
            "samples",
            f"other samples: {sum(more.values())} of the {total} of step {step + 1} are not those that "
            f"{counted(base.num_ranks, 'rank')} saw, and none comes twice. The order of the data depends on the number "
            f"of ranks (each reads a part of its own, or a seed differs), or random numbers are added to them in the "
            f"loop.",
        )
    ]


def _by_whom(seen: Sequence[Seen]) -> str:
    samples = [_samples([each]) for each in seen]
    pairs = itertools.combinations(range(len(seen)), 2)
    shared = ((first, second, sum((samples[first] & samples[second]).values())) for first, second in pairs)
    return next((f" (rank {second} saw {num} of rank {first}'s)" for first, second, num in shared if num), "")


def _num_repeated(run: Run, steps: Sequence[int]) -> int:
    counts = sum((_samples(data_ranks(run.at(step))) for step in steps), Counter())
    return sum(count - 1 for count in counts.values())


def _samples(ranks: Sequence[Seen]) -> Counter[str]:
    return Counter(row for seen in ranks for rows in seen.rows for row in rows)


def _is_drawn(run: Run, step: int) -> bool:
    """Whether loaders have given each rank samples of its own: inputs that repeat are no data."""
    loaded = [set(seen.loaded) for seen in data_ranks(run.at(step))]
    return all(loaded) and len(set().union(*loaded)) == sum(map(len, loaded))


def _same_numbers(which: str) -> list[Cause]:
    return [
        Cause(
            "random",
            f"the same random numbers on several ranks: {which} are the same, and the loaders give each rank samples "
            f"of its own. What the script draws as input must differ between ranks: seed them differently once the "
            f"model is made (numpy and random, too), or draw for the global batch and take this rank's part.",
        )
    ]


def _same_data(run: Run, step: int) -> list[Cause]:
    seen = data_ranks(run.at(step))
    if len(seen) < 2 or not seen[0].num_rows or any(each.rows != seen[0].rows for each in seen):
        return []
    if _is_drawn(run, step):
        return _same_numbers(f"the {seen[0].num_rows} inputs of each of {len(seen)} ranks in step {step + 1}")
    return [
        Cause(
            "repeated",
            f"data seen twice: all {len(seen)} ranks see the same {seen[0].num_rows} samples. Divide the data over the "
            f"ranks: evenstep.DataLoader(global_batch_size=), or a DistributedSampler.",
        )
    ]


def _drift(run: Run, step: int) -> list[Cause]:
    seen = run.at(step)
    for kind, what in (("grad/", "gradient"), ("param/", "parameter")):
        for name, digest in seen[0].digests.items():
            other = next((rank for rank, each in enumerate(seen) if each.digests.get(name) != digest), None)
            if name.startswith(kind) and other is not None:
                return [
                    Cause(
                        "drift",
                        f"replicas drift apart: in step {step + 1} {what} {name.partition('/')[2]!r} of rank {other} "
                        f"is not rank 0's. Gradients are not exchanged (a model that isn't wrapped, or called by its "
                        f"`.module`; no_sync around the last pass), or a rank changes its own.",
                    )
                ]
    return []


def _settings(known: Sequence[Seen], seen: Sequence[Seen]) -> list[Cause]:
    ours = known[0].settings
    for rank, each in enumerate(seen):
        for group, (a, b) in enumerate(zip(ours, each.settings, strict=False)):
            name = next((key for key in a if a[key] != b.get(key, a[key])), None)
            if name is not None:
                return [
                    Cause(
                        "settings",
                        f"the optimizer steps with another {name}: {a[name]:g} on {counted(len(known), 'rank')}, "
                        f"{b[name]:g} on rank {rank} of {len(seen)} (group {group}). It depends on the rank or on "
                        f"their number.",
                    )
                ]
    return []


def _branch(seen: Sequence[Seen]) -> list[Cause]:
    """Ranks that have samples run the same modules and build the same graphs, unless they look at their rank."""
    working = [(rank, each) for rank, each in enumerate(seen) if each.graphs and each.num_rows]
    for (first, a), (second, b) in itertools.pairwise(working):
        evidence = ""
        if a.modules != b.modules:
            evidence = _module_evidence(first, a.modules, second, b.modules)
        elif a.graphs[0] != b.graphs[0]:
            kinds = sorted(set(a.graphs[0]) | set(b.graphs[0]))
            kind = next(each for each in kinds if a.graphs[0].get(each, 0) != b.graphs[0].get(each, 0))
            evidence = (
                f"the graph of rank {first}'s loss has {a.graphs[0].get(kind, 0)} nodes {kind}, and that of rank "
                f"{second} {b.graphs[0].get(kind, 0)}"
            )
        if evidence:
            return [
                Cause(
                    "branch",
                    f"a rank-dependent branch: {evidence}. What is computed for the gradient may not depend on the "
                    f"rank.",
                )
            ]
    return []


def _module_evidence(first: int, ours: list[str], second: int, theirs: list[str]) -> str:
    only = [name for name in ours if name not in theirs], [name for name in theirs if name not in ours]
    if only[0] or only[1]:
        rank, other, name = (first, second, only[0][0]) if only[0] else (second, first, only[1][0])
        return f"module {name!r} runs on rank {rank} and not on rank {other}"
    return f"ranks {first} and {second} run their modules in another order, or more often"


def _counted_wrong(weights: Weights, num_base: int, known: Sequence[Seen], seen: Sequence[Seen]) -> list[Cause]:
    """Each pass has added the right gradient: only the weights are wrong, all of them or some."""
    right, applied = torch.tensor(weights.right, device="cpu"), torch.tensor(weights.applied, device="cpu")
    ratios = applied / right
    passes = max(len(each.virtual_ranks) for each in seen), max(len(each.virtual_ranks) for each in known)
    if not bool(ratios.isfinite().all()) or float(ratios.abs().max()) == 0:
        return []
    if float((ratios - ratios.mean()).abs().max()) > SAME_WEIGHT * float(ratios.abs().mean()):
        rank_of = [rank for rank, each in enumerate(seen) for _ in each.virtual_ranks]
        shares = [
            (float(sum(part[i] for i, owner in enumerate(rank_of) if owner == rank)), rank)
            for rank in range(len(seen))
            for part in (right, applied)
        ]
        received = ", ".join(
            f"rank {rank} by {shares[2 * rank + 1][0]:.4g} instead of {shares[2 * rank][0]:.4g}"
            for rank in range(min(len(seen), 4))
        )
        return [
            Cause(
                "average",
                f"a loss averaged over the wrong number: each rank's gradient is right, and counts by the wrong "
                f"weight ({received}). Ranks average over different numbers of samples or tokens, and the mean of "
                f"their means is not the global mean: model.backward(loss, weight=what it was averaged over).",
            )
        ]
    ratio = float(ratios.mean())
    if abs(ratio - 1) <= SAME_WEIGHT:
        return []
    if max(passes) > 1:
        return [
            Cause(
                "divisor",
                f"a wrong accumulation divisor: the gradient of {len(seen)} ranks is {ratio:.4g} times that of "
                f"{counted(num_base, 'rank')}, with {passes[0]} backward passes a step on each rank against "
                f"{passes[1]}. Divide by the passes that a rank makes (gradients are averaged over ranks already), or "
                f"call model.backward(loss, weight=len(x)) in each.",
            )
        ]
    return [
        Cause(
            "average",
            f"a loss averaged over the wrong number: the gradient of {len(seen)} ranks is {ratio:.4g} times that of "
            f"{counted(num_base, 'rank')}, in all parameters. Gradients are averaged over ranks: the loss must be the "
            f"mean over this rank's samples, divided neither by the number of ranks nor by the global batch, and not "
            f"their sum.",
        )
    ]


def _own_statistics(seen: Sequence[Seen], *, is_sure: bool) -> list[Cause]:
    names = seen[0].unsynced
    means = [name for graph in seen[0].graphs for name in graph if name.endswith(OVER_BATCH)]
    if len(seen) < 2 or not (names or means):
        return []
    if not names:
        return [
            Cause(
                "batch statistics",
                f"a mean over the batch inside the loss ({means[0]}): each rank takes that of its own share, and no "
                f"weighting of the ranks' gradients gives that of the whole batch. Average it over the ranks, with its "
                f"gradient (torch.distributed.nn.functional.all_reduce), or keep to one process's batch.",
            )
        ]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    proof = ", and no weighting of the ranks' gradients gives that of the whole batch" if is_sure else ""
    return [
        Cause(
            "batch norm",
            f"batch norm without synchronisation: {names[0]!r}{more} normalised by the statistics of each rank's own "
            f"share{proof}. evenstep.SyncBatchNorm.convert_sync_batchnorm(model) before wrapping it.",
        )
    ]


def _draws(seen: Sequence[Seen]) -> list[Cause]:
    if not any(each.draws for each in seen):
        return []
    return [
        Cause(
            "random",
            "random numbers in the forward pass, besides dropout: no two numbers of ranks draw the same. (verify "
            "switches dropout off for the comparison, and can't do that with other draws.)",
        )
    ]


def _shared_masks(seen: Sequence[Seen]) -> list[Cause]:
    states = {rank: each.dropouts[0] for rank, each in enumerate(seen) if each.dropouts}
    pairs = itertools.combinations(states, 2)
    return [
        Cause(
            "random",
            f"random state shared between ranks: ranks {first} and {second} draw the same dropout masks, so "
            f"their shares of the batch lose the same units. Seed the ranks differently once the model is "
            f"made, torch.manual_seed(seed + rank); evenstep.init(seed=) does.",
        )
        for first, second in pairs
        if states[first] == states[second]
    ][:1]


def _undivided(seen: Sequence[Seen]) -> list[Cause]:
    for rank, each in enumerate(seen):
        passes = len(each.losses)
        # Virtual ranks of reproducible mode are averaged over, as ranks are.
        if each.held_back and not each.virtual_ranks_of_run and passes > 1 and each.means == passes:
            return [
                Cause(
                    "divisor",
                    f"a wrong accumulation divisor: rank {rank} adds up {passes} backward passes, each of a mean over "
                    f"its own samples and divided by nothing, so the gradient is {passes} times that of their mean. "
                    f"Divide each loss by {passes}, or call model.backward(loss, weight=len(x)).",
                )
            ]
    return []


@dataclass(frozen=True)
class Weights:
    """How the backward passes of all ranks make up two gradients.

    Attributes:
        right: Of each pass, ranks after each other, its weight in the gradient of the run on fewer ranks.
        applied: Its weight in the gradient that the optimizer got.
        unexplained: What of the first is no sum of the passes, relatively.
    """

    right: list[float]
    applied: list[float]
    unexplained: float


def find_weights(base: Run, run: Run, step: int) -> Weights | None:
    """The weights of the backward passes, by least squares over probes of the gradients; None if they aren't known."""
    target = base.probes(0, step).get("applied")
    probes = [run.probes(rank, step) for rank in range(run.num_ranks)]
    applied = probes[0].get("applied")
    columns = [
        given[key] for given in probes for key in sorted((key for key in given if key.isdigit()), key=int)
    ]  # ranks after each other
    if target is None or applied is None or len(columns) > _MOST_PASSES:
        return None
    # Of parameters that are divided no pass is known. Whether all of the gradient is wrong by one factor is seen still.
    columns = columns or [applied]
    if any(column.shape != target.shape for column in [applied, *columns]):
        return None
    matrix = torch.stack([column.double() for column in columns], dim=1)
    right, unexplained = _solve(matrix, target)
    return Weights(right, _solve(matrix, applied)[0], unexplained)


def _solve(matrix: Tensor, target: Tensor) -> tuple[list[float], float]:
    scales = matrix.norm(dim=0).clamp_min(torch.finfo(torch.float64).tiny)
    scaled = matrix / scales
    solution = torch.linalg.lstsq(scaled, target.double().unsqueeze(1), driver="gelsd").solution.squeeze(1)
    left = (target - scaled @ solution).norm() / target.norm().clamp_min(torch.finfo(torch.float64).tiny)
    return (solution / scales).tolist(), float(left)
