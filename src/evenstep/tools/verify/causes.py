"""The usual causes why a run on several ranks differs from one on fewer, by the evidence that ranks recorded. Pure.

No cause is guessed from the script's text. Each has its own evidence:

    not seeded          two runs on the same number of ranks load other samples, or start with other parameters
    repeated, samples   digests of the samples that the model was called with, over all ranks, in both runs
    drift               digests of parameters or gradients that differ between ranks
    settings            other numbers in the optimizer's parameter groups
    branch              modules that ran, or nodes of the graph, that differ between ranks
    divisor, average    the reference's gradient is a weighted sum of the ranks' backward passes, with other weights
                        than those applied: each pass is right, and only its weight is wrong
    batch norm          the gradient is no such sum, and layers normalised over one rank's share
    batch statistics    the gradient is no such sum, and nothing else explains that: the loss uses other statistics of
                        a rank's share
    skipped             other calls of `GradScaler.step` that made no step
    random              ranks with the same random state, ranks that draw what a single process draws once, or inputs
                        that repeat although the samples of the loaders don't
    no gradient         all elements of all gradients are 0
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from evenstep.checks import counted
from evenstep.tools.verify.compare import SAME_WEIGHT
from evenstep.tools.verify.evidence import Run, Seen, data_ranks

_MOST_PASSES = 64  # backward passes of all ranks in a step, above which their weights are not computed
_SAME_NUMBERS = 1e-5  # relative distance up to which two sizes, in float32 and float64, are those of equal numbers

# These causes lose or repeat work on several ranks. The others also occur in a right script with torch's DDP.
_LOSES_WORK = ("repeated", "average", "divisor", "drift", "no gradient")
# By kind, the keys of `Seen.lines` whose line of the script is reported, the first known one.
_LINES = {
    "repeated": ("loader", "model"),
    "samples": ("loader", "model"),
    "drift": ("model",),
    "random": ("model",),
    "batch norm": ("wrapper", "model"),
    "settings": ("optimizer",),
    "skipped": ("optimizer",),
    "no gradient": ("optimizer",),
}


@dataclass(frozen=True)
class Cause:
    """A cause of a difference between runs.

    Attributes:
        kind: One of the kinds in the module's docstring, for programs.
        text: What is wrong, the evidence, and what to do.
        path: The file of the script; "" if no line is known.
        line: The line in the file.
    """

    kind: str
    text: str
    path: str = ""
    line: int = 0

    @property
    def is_note(self) -> bool:
        """Whether no work is lost or repeated: right for torch's DDP, but not equal to one process."""
        return self.kind not in _LOSES_WORK


def _cause(kind: str, text: str, seen: Seen, whose: Sequence[str] = ()) -> Cause:
    """Make a cause with the line of the script, as a rank with the evidence recorded it."""
    whose = whose or _LINES.get(kind, ("loss",))
    path, line = next((seen.lines[what] for what in whose if what in seen.lines), ("", 0))
    return Cause(kind, text, path, line)


def others_skipped(run: Run) -> Cause:
    """The cause "skipped": a GradScaler has skipped other steps than in the other run."""
    return _cause(
        "skipped",
        "a GradScaler skipped other steps: gradients overflow in float16 on one number of ranks, and not on the other. "
        "The scale is nearly too large, or the loss has another size. To compare the steps, give the scaler a smaller "
        "init_scale, so that none is skipped.",
        run.ranks[0][0],
    )


def find_causes(base: Run, run: Run, step: int, *, rounding: float) -> list[Cause]:
    """The first cause that the evidence supports, as a list; [] if it supports none.

    Later causes would have no evidence: for example, gradients of other samples differ in every way.

    Args:
        base: The run on fewer ranks, in float64 if there is such a run.
        run: The run that differs, likewise.
        step: The first step that differs, from 0.
        rounding: The relative rounding of both runs.
    """
    return list(itertools.islice(_causes(base, run, step, rounding), 1))


def _causes(base: Run, run: Run, step: int, rounding: float) -> Iterator[Cause]:
    seen, known = data_ranks(run.at(step)), data_ranks(base.at(step))
    yield from _data(base, run, step)
    yield from _drift(run, step)
    yield from _branch(seen)
    weights = find_weights(base, run, step)
    is_sum = weights is not None and weights.unexplained <= max(1e3 * rounding, 1e-9)
    is_no_sum = weights is not None and not is_sum and any(passes for each in seen for passes in each.virtual_ranks)
    if weights is not None and is_sum:
        yield from _counted_wrong(weights, base.num_ranks, known, seen)
    elif len(seen) > 1 and seen[0].unsynced:
        yield _unsynchronised(seen[0], is_sure=is_no_sum)
    yield from _settings(known, seen)
    if any(each.draws for each in seen):
        yield _cause(
            "random",
            "random numbers in the forward pass, besides dropout, are others on another number of ranks. For the "
            "comparison verify switches dropout off, but it can't switch off other draws.",
            seen[0],
        )
    if is_no_sum and len(seen) > 1 and seen[0].synced and len(seen[0].losses) > 1:
        yield _cause(
            "batch statistics",
            f"batch normalisation over micro-batches: {seen[0].synced[0]!r} normalises all ranks' rows of a pass, and "
            f"a step has {len(seen[0].losses)} passes. Which samples are in the same pass depends on the number of "
            f"ranks. Only a step of one pass (microbatches(batch, 1)) is one process's.",
            seen[0],
            whose=("model",),
        )
    elif is_no_sum and len(seen) > 1:
        yield _cause(
            "batch statistics",
            "a loss that is no sum over samples: no weighting of the ranks' gradients gives that of the whole batch. "
            "The loss takes a mean or a spread over the batch, or compares samples with each other, but each rank has "
            "only its own share. Gather the samples of all ranks, with their gradients "
            "(torch.distributed.nn.functional), or keep to one process's batch.",
            seen[0],
        )


def find_faults(run: Run) -> list[Cause]:
    """The faults of a run that its own evidence shows, whether or not its gradients differ from another run's."""
    for step in range(run.num_steps):
        seen = data_ranks(run.at(step))
        found = [*_shared_masks(seen), *_same_data(run, step), *_drift(run, step), *_undivided(seen)]
        if found:
            return found
    return list(_no_gradient(run))


def find_unseeded(base: Run, again: Run) -> list[Cause]:
    """The cause "not seeded" if two runs on equally many ranks begin differently; else []."""
    for ours, theirs in zip(base.at(0), again.at(0), strict=True):
        both = [(name, size, theirs.initial.get(name, size)) for name, size in ours.initial.items()]
        other = next((name for name, size, twin in both if abs(size - twin) > _SAME_NUMBERS * size), "")
        _, _, parameter = other.partition("param/")
        # In reproducible mode, dropout draws from the streams of virtual ranks. Otherwise it is off, and may be
        # unseeded.
        draws_others = ours.virtual_ranks_of_run and ours.dropouts[:1] != theirs.dropouts[:1]
        if other or ours.loaded != theirs.loaded or draws_others:
            is_of_data = ours.loaded != theirs.loaded or other == "inputs"
            what = "the samples of step 1" if is_of_data else "the random numbers of the virtual ranks"
            what = f"the initial {parameter!r}" if parameter else what
            return [
                _cause(
                    "not seeded",
                    f"not seeded: two runs on {counted(base.num_ranks, 'rank')} differ in {what}, so runs on other "
                    f"numbers of ranks can't be compared. Seed before the first random number (a random_split draws "
                    f"some): torch.manual_seed(0), and random.seed and numpy.random.seed where the script uses them; "
                    f"evenstep.init(seed=0) where virtual ranks draw.",
                    ours,
                    whose=("model",) if parameter else ("loader", "model"),
                )
            ]
    return []


def _no_gradient(run: Run) -> Iterator[Cause]:
    steps = range(run.num_steps)
    if len(steps) < 2 or any(seen.has_hidden for seen in run.ranks[0]):  # the first step alone may have none
        return
    gradients = (value for step in steps for name, value in run.values(step).items() if name.startswith("grad/"))
    if not any(bool(value.any()) for value in gradients):
        yield _cause(
            "no gradient",
            f"every gradient of {len(steps)} steps is zero, or none arrives at the optimizer: nothing is trained, and "
            f"equal bits prove nothing. Look for zero_grad between backward and step, a loss that was "
            f"multiplied by 0, or one that doesn't depend on the parameters.",
            run.ranks[0][0],
        )


# ---------------------------------------------------------------------- data


def _data(base: Run, run: Run, step: int) -> Iterator[Cause]:
    """Compare the samples of a global batch as multisets: other samples, or the same ones more often."""
    seen = data_ranks(run.at(step))
    ours, theirs = _samples(data_ranks(base.at(step))), _samples(seen)
    if not ours or not theirs or ours == theirs:
        return
    more, fewer = theirs - ours, ours - theirs
    total, expected = sum(theirs.values()), sum(ours.values())
    repeated = sum(min(count, theirs[each] - 1) for each, count in more.items() if theirs[each] > 1)
    when, by_whom = f"in step {step + 1}, {repeated} of the {total} samples", _by_whom(seen)
    if not repeated:
        # If each rank has its own order, samples repeat in later steps.
        steps = range(min(base.num_steps, run.num_steps))
        repeated = max(0, _num_repeated(run, steps) - _num_repeated(base, steps))
        when, by_whom = f"within {len(steps)} steps, {repeated} of the samples", ""
        if 0 < total - expected == repeated < run.num_ranks:
            yield _cause(
                "samples",
                f"torch's DistributedSampler has filled up its last batch: {counted(repeated, 'sample')} of "
                f"{run.num_ranks} ranks came twice. Use evenstep.DataLoader(global_batch_size=), or drop_last=True.",
                seen[0],
            )
            return
    if repeated:
        left_out = f", and {sum(fewer.values())} of the {expected} of step {step + 1} are left out" if fewer else ""
        yield _repetition(f"{when} of {run.num_ranks} ranks are repetitions{by_whom}{left_out}", seen)
    elif total != expected:
        yield _cause(
            "samples",
            f"the global batch depends on the number of ranks: {expected} samples on {base.num_ranks}, {total} on "
            f"{run.num_ranks}. verify adapts only the batch sizes of torch's DataLoader; divide others by the "
            f"number of ranks, or use evenstep.DataLoader(global_batch_size=). At an epoch's end torch's "
            f"DistributedSampler repeats samples, too.",
            seen[0],
        )
    else:
        yield _cause(
            "samples",
            f"other samples: in step {step + 1}, {sum(more.values())} of {total} samples are not among those of "
            f"{counted(base.num_ranks, 'rank')}, and none comes twice. The order of the data depends on the number "
            f"of ranks (each reads a part of its own, or a seed differs), or random numbers are added to them in the "
            f"loop.",
            seen[0],
        )


def _same_data(run: Run, step: int) -> Iterator[Cause]:
    seen = data_ranks(run.at(step))
    if len(seen) > 1 and seen[0].num_rows and all(each.rows == seen[0].rows for each in seen):
        yield _repetition(f"all {len(seen)} ranks see the same {seen[0].num_rows} samples in step {step + 1}", seen)


def _repetition(which: str, seen: Sequence[Seen]) -> Cause:
    """The cause for repeated inputs: repeated samples, or equal random numbers if the loaders' samples differ."""
    loaded = [set(each.loaded) for each in seen]
    if all(loaded) and len(set().union(*loaded)) == sum(map(len, loaded)):
        return _cause(
            "random",
            f"the same random numbers on several ranks: {which}, and the loaders give each rank samples of its own. "
            f"What the script draws as input must differ between ranks: seed them differently once the model is made "
            f"(numpy and random, too), or draw for the global batch and take this rank's part.",
            seen[0],
        )
    if not any(loaded):
        return _cause(
            "repeated",
            f"the same inputs on several ranks: {which}, and they come from no loader. Let each rank take a part of "
            f"its own of the data, or seed the ranks differently if the script draws its inputs, once the model is "
            f"made: torch.manual_seed(seed + rank).",
            seen[0],
        )
    return _cause(
        "repeated",
        f"data seen twice: {which}. Divide the data over the ranks: evenstep.DataLoader(global_batch_size=), or a "
        f"DistributedSampler that knows rank and number of ranks, with one seed. (At an epoch's end torch's sampler "
        f"repeats samples, too.)",
        seen[0],
    )


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


# ---------------------------------------------------------------------- ranks that differ


def _drift(run: Run, step: int) -> Iterator[Cause]:
    seen = run.at(step)
    for kind, what in (("grad/", "gradient"), ("param/", "parameter")):
        for name, digest in seen[0].digests.items():
            other = next((rank for rank, each in enumerate(seen) if each.digests.get(name) != digest), None)
            if name.startswith(kind) and other is not None:
                yield _cause(
                    "drift",
                    f"replicas drift apart: in step {step + 1} {what} {name.partition('/')[2]!r} of rank {other} "
                    f"is not rank 0's. Gradients are not exchanged (a model that isn't wrapped, or called by its "
                    f"`.module`; no_sync around the last pass), or a rank changes its own.",
                    seen[0],
                )
                return


def _settings(known: Sequence[Seen], seen: Sequence[Seen]) -> Iterator[Cause]:
    for rank, each in enumerate(seen):
        for group, (a, b) in enumerate(zip(known[0].settings, each.settings, strict=False)):
            for name in (key for key in a if a[key] != b.get(key, a[key])):
                yield _cause(
                    "settings",
                    f"the optimizer steps with different values of {name}: {a[name]:g} on "
                    f"{counted(len(known), 'rank')}, {b[name]:g} on rank {rank} of {len(seen)} (group {group}). The "
                    f"value depends on the rank or on the number of ranks.",
                    each,
                )


def _branch(seen: Sequence[Seen]) -> Iterator[Cause]:
    """Ranks that run other modules or build other graphs than the rank before, although both have samples."""
    working = [(rank, each) for rank, each in enumerate(seen) if each.graphs and each.num_rows]
    for (first, a), (second, b) in itertools.pairwise(working):
        ours, theirs = Counter(a.graphs[0]), Counter(b.graphs[0])
        evidence = ""
        if a.modules != b.modules:
            evidence = _module_evidence(first, a.modules, second, b.modules)
        elif ours != theirs:
            kind = next(each for each in sorted(ours | theirs) if ours[each] != theirs[each])
            evidence = (
                f"the graph of the loss has {counted(ours[kind], 'node')} {kind} on rank {first}, and {theirs[kind]} "
                f"on rank {second}"
            )
        if evidence:
            text = f"a rank-dependent branch: {evidence}. What is computed for the gradient may not depend on the rank."
            yield _cause("branch", text, b)


def _module_evidence(first: int, ours: list[str], second: int, theirs: list[str]) -> str:
    only = [name for name in ours if name not in theirs], [name for name in theirs if name not in ours]
    if only[0] or only[1]:
        rank, other, name = (first, second, only[0][0]) if only[0] else (second, first, only[1][0])
        return f"module {name!r} runs on rank {rank} and not on rank {other}"
    return f"ranks {first} and {second} run their modules in another order, or more often"


def _shared_masks(seen: Sequence[Seen]) -> Iterator[Cause]:
    states = {rank: each.dropouts[0] for rank, each in enumerate(seen) if each.dropouts}
    for first, second in itertools.combinations(states, 2):
        if states[first] == states[second]:
            yield _cause(
                "random",
                f"random state shared between ranks: ranks {first} and {second} draw the same dropout masks, so "
                f"their shares of the batch lose the same units. Seed the ranks differently once the model is "
                f"made, torch.manual_seed(seed + rank); evenstep.init(seed=) does.",
                seen[second],
            )
            return


# ---------------------------------------------------------------------- gradients


def _undivided(seen: Sequence[Seen]) -> Iterator[Cause]:
    for rank, each in enumerate(seen):
        passes = len(each.losses)
        # Virtual ranks in reproducible mode have a pass each, but are averaged over like ranks.
        if each.held_back and not each.virtual_ranks_of_run and passes > 1 and each.means == passes:
            yield _cause(
                "divisor",
                f"a wrong accumulation divisor: rank {rank} adds up {passes} backward passes, each of a mean over "
                f"its own samples and divided by nothing, so the gradient is {passes} times that of their mean. "
                f"Divide each loss by {passes}, or call model.backward(loss, weight=len(x)).",
                each,
            )
            return


def _counted_wrong(weights: Weights, num_base: int, known: Sequence[Seen], seen: Sequence[Seen]) -> Iterator[Cause]:
    """The cause if each backward pass has the right gradient, but all or some passes have the wrong weight."""
    right, applied = torch.tensor(weights.right, device="cpu"), torch.tensor(weights.applied, device="cpu")
    ratios = applied / right
    ratio = float(ratios.mean())
    if not bool(ratios.isfinite().all()) or float(ratios.abs().max()) == 0:
        return
    if float((ratios - ratio).abs().max()) > SAME_WEIGHT * float(ratios.abs().mean()):
        owners = torch.tensor([rank for rank, each in enumerate(seen) for _ in each.virtual_ranks], device="cpu")
        # As fractions of their sum: a factor of all gradients, such as that of clipping, is no weight.
        shares, wanted = applied / applied.sum(), right / right.sum()
        received = ", ".join(
            f"rank {rank} by {float(shares[owners == rank].sum()):.4g} instead of "
            f"{float(wanted[owners == rank].sum()):.4g}"
            for rank in range(min(len(seen), 4))
        )
        yield _cause(
            "average",
            f"a loss averaged over the wrong number: each rank's gradient is right, and counts by the wrong "
            f"weight ({received}). Ranks average over different numbers of samples or tokens, and the mean of "
            f"their means is not the global mean: model.backward(loss, weight=what it was averaged over).",
            seen[0],
        )
    elif abs(ratio - 1) > SAME_WEIGHT:
        times = f"the gradient of {len(seen)} ranks is {ratio:.4g} times that of {counted(num_base, 'rank')}"
        passes = max(len(each.virtual_ranks) for each in seen), max(len(each.virtual_ranks) for each in known)
        if max(passes) > 1:
            yield _cause(
                "divisor",
                f"a wrong accumulation divisor: {times}, with {passes[0]} backward passes a step on each rank against "
                f"{passes[1]}. Divide by the passes that a rank makes (gradients are averaged over ranks already), or "
                f"call model.backward(loss, weight=len(x)) in each.",
                seen[0],
            )
        else:
            yield _cause(
                "average",
                f"a loss averaged over the wrong number: {times}, in all parameters. Gradients are averaged over "
                f"ranks: the loss must be the mean over this rank's samples, divided neither by the number of ranks "
                f"nor by the global batch, and not their sum.",
                seen[0],
            )


def _unsynchronised(seen: Seen, *, is_sure: bool) -> Cause:
    more = f" and {len(seen.unsynced) - 1} more" if len(seen.unsynced) > 1 else ""
    proof = ", and no weighting of the ranks' gradients gives that of the whole batch" if is_sure else ""
    return _cause(
        "batch norm",
        f"batch norm without synchronisation: {seen.unsynced[0]!r}{more} normalised by the statistics of each rank's "
        f"own share{proof}. evenstep.SyncBatchNorm.convert_sync_batchnorm(model) before wrapping it.",
        seen,
    )


@dataclass(frozen=True)
class Weights:
    """The weights of all ranks' backward passes in two gradients.

    Attributes:
        right: By pass, rank after rank, its weight in the gradient of the run on fewer ranks.
        applied: By pass, its weight in the gradient that the optimizer got.
        unexplained: The relative part of the first gradient that no weighted sum of the passes explains.
    """

    right: list[float]
    applied: list[float]
    unexplained: float


def find_weights(base: Run, run: Run, step: int) -> Weights | None:
    """Compute the weights of backward passes by least squares over probes of the gradients; None if unknown."""
    target = base.probes(0, step).get("applied")
    probes = [run.probes(rank, step) for rank in range(run.num_ranks)]
    applied = probes[0].get("applied")
    # By pass, rank after rank.
    columns = [given[key] for given in probes for key in sorted((key for key in given if key.isdigit()), key=int)]
    if target is None or applied is None or len(columns) > _MOST_PASSES:
        return None
    # The passes of sharded parameters aren't known. A wrong factor of the whole gradient can still be found.
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
