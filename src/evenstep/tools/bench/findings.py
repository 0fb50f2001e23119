"""Finds the causes why a script doesn't scale better, with their expected gain, from measurements. Pure.

A cause is reported if its measured cost is at least a tenth of the step, and more than the spread of the rounds. If
other programs keep cores busy, which makes everything longer, the limit is a quarter of the step. Every part of the
step has at most one cause, so a slow loader isn't reported as a slow rank as well:

    waiting for data          slow loader
    imbalance                 slow rank
    exposed communication     exposed communication, if a faster way to exchange is known; else small batch, with the
                              other costs of an exchange
    contention                contention: too many threads, or memory bandwidth
    idle (of a GPU)           host-bound

A part of at least a tenth of the step that no finding covers becomes a note. A healthy script has no findings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from evenstep.checks import counted
from evenstep.tools.bench.decompose import Decomposition, Parts, in_ms
from evenstep.tools.bench.records import Facts
from evenstep.tools.observing.thresholds import (
    DEVIATIONS,
    MANY_ELSEWHERE,
    MOST_SPREAD,
    MOSTLY,
    OFTEN,
    SCHEDULING_S,
    WORTH,
    WORTH_BESIDE_OTHERS,
    WORTH_UNSURE,
)

_PHASE_WORDS = {
    "data": "waiting for data",
    "sync": "the wrapper's work before the forward pass",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "engine": "the wrapper's work after the backward pass",
    "optimizer": "the optimizer's step",
    "script": "the script's own work between the passes",
    "compute": "computing",
    "idle": "its host, which gives the GPU nothing to do",
}
_LOSSES = {
    "data": "waiting for data",
    "imbalance": "imbalance",
    "exposed": "exposed communication",
    "engine": "the wrapper's own work",
    "contention": "contention",
    "idle": "an idle GPU",
}


@dataclass(frozen=True)
class Finding:
    """One cause of lost time.

    Attributes:
        cause: The name: "slow loader", "slow rank", "exposed communication", "small batch", "contention", "host-bound".
        what: What was measured.
        advice: What to do, and the expected result. Code is in backquotes.
        gain: The throughput without this cause over that with it, at most.
    """

    cause: str
    what: str
    advice: str
    gain: float


@dataclass(frozen=True)
class Case:
    """The input of `find`: one point of a curve.

    Attributes:
        num_replicas: The number of ranks.
        rows_per_replica: The samples of a step on one rank.
        decomposition: The parts of the step.
        facts: The facts of rank 0.
        spread: How much rounds differ: the distance of the quartiles of the step over its median.
        num_threads: The number of threads of all ranks together.
        syncs: On a GPU, the lines that made the host wait, and how often per step.
        divides_batch: Whether strong scaling is measured. Then a smaller batch, and not contention, may make computing
            slower per sample.
        num_cores_elsewhere: The number of cores that other programs kept busy.
    """

    num_replicas: int
    rows_per_replica: float
    decomposition: Decomposition
    facts: Facts
    spread: float = 0.0
    num_threads: int = 1
    syncs: tuple[tuple[str, float], ...] = ()
    divides_batch: bool = False
    num_cores_elsewhere: float = 0.0

    @property
    def parts(self) -> Parts:
        """The parts of the step."""
        return self.decomposition.parts

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs keep so many cores busy that all times are longer."""
        return self.num_cores_elsewhere > MANY_ELSEWHERE

    @property
    def limit(self) -> float:
        """The smallest fraction of a step that is reported. It grows with the spread of rounds."""
        return max(WORTH_BESIDE_OTHERS if self.is_disturbed else WORTH, min(MOST_SPREAD, self.spread))

    @property
    def held_up_by_one(self) -> bool:
        """Whether the same rank comes last in most steps, more often than by chance."""
        late, num_steps = self.decomposition.late, self.decomposition.num_steps
        if late is None:
            return False
        chance = 1 / self.num_replicas
        by_luck = chance + DEVIATIONS * math.sqrt(chance * (1 - chance) / num_steps)
        return (
            late.share_of_steps >= min(1.0, max(MOSTLY, by_luck))
            and late.excess_s >= self.parts.imbalance_s / 2
            and self.parts.share("imbalance") >= WORTH
        )

    @property
    def has_too_many_threads(self) -> bool:
        """Whether CPU ranks compute with more threads than there are cores."""
        return self.facts.device == "cpu" and self.num_threads > self.facts.num_cores


_Told = tuple[float, str, str] | None  # (seconds of a step that would be saved, what was measured, what to do)


def find(case: Case) -> list[Finding]:
    """The causes of lost time, the costliest first."""
    found = []
    for (cause, _), rule in _RULES.items():
        if (told := rule(case)) is not None:
            lost_s, what, advice = told
            total_s = case.parts.total_s
            gain = total_s / (total_s - lost_s)
            found.append(Finding(cause, what, f"{advice}: {in_ms(total_s)} to {in_ms(total_s - lost_s)} a step", gain))
    return sorted(found, key=lambda finding: -finding.gain)


def unexplained(case: Case, findings: Sequence[Finding]) -> list[str]:
    """Texts on lost parts of at least a tenth of the step that no finding covers."""
    causes = {finding.cause for finding in findings}
    covered = {part for cause, parts in _RULES if cause in causes for part in parts}
    return [
        f"{words} is {in_ms(getattr(case.parts, f'{part}_s'))} of a step, {case.parts.share(part):.0%}, of "
        f"unknown cause"
        for part, words in _LOSSES.items()
        if part not in covered and case.parts.share(part) >= WORTH
    ]


def _slow_loader(case: Case) -> _Told:
    parts, facts = case.parts, case.facts
    share = parts.share("data")
    if share < case.limit:
        return None
    rest_s, has = parts.total_s - parts.data_s, f"num_workers={facts.num_workers}"
    what = f"every rank waits {in_ms(parts.data_s)} of its {in_ms(parts.total_s)} for data, {share:.0%} ({has})"
    if facts.num_workers and not facts.keeps_workers and facts.starting_s >= parts.data_s / 2:
        saved_s = min(parts.data_s, facts.starting_s)
        what += f"; {in_ms(saved_s)} of it for the first batches of epochs, whose workers start anew"
        return saved_s, what, "keep them with `persistent_workers=True`"
    loading_s = parts.data_s if facts.num_workers == 0 else facts.num_workers * parts.total_s  # in one process
    needed = max(math.ceil(loading_s / rest_s), facts.num_workers + 1)
    # Ranks that compute on the CPU need a core for each thread, others one core to launch kernels.
    free = facts.num_cores - (case.num_threads if facts.device == "cpu" else case.num_replicas)
    fitting = max(0, free // case.num_replicas)
    if needed <= fitting:
        return parts.data_s, what, f"with `num_workers={needed}` loading hides behind the rest"
    room = f"{counted(needed, 'worker')} a rank would hide it, and {facts.num_cores} cores have room for {fitting}"
    return parts.data_s, what, f"make `__getitem__` cheaper, or prepare data beforehand ({room})"


def _slow_rank(case: Case) -> _Told:
    late, parts = case.decomposition.late, case.parts
    if late is None or not case.held_up_by_one or parts.share("imbalance") < case.limit:
        return None
    return (
        parts.imbalance_s,
        f"rank {late.rank} is the last one ready in {late.share_of_steps:.0%} of the steps, {in_ms(late.excess_s)} "
        f"after a typical rank, and loses it in {_PHASE_WORDS[late.phase]}",
        f"look at what rank {late.rank} does there that others don't; without it",
    )


def _exposed(case: Case) -> _Told:
    """Communication that no computing overlaps, if there is a better remedy than a larger batch."""
    parts, facts = case.parts, case.facts
    exchange_s = parts.exposed_s + parts.engine_s
    if case.num_replicas == 1 or exchange_s < case.limit * parts.total_s:
        return None
    share = f"{exchange_s / parts.total_s:.0%}"
    what = f"{in_ms(exchange_s)} of {in_ms(parts.total_s)} a step are exchanges that no computing hides, {share}"
    if facts.wrapper in ("torch", "fsdp") and facts.device == "cpu" and facts.backend == "gloo":
        return (
            exchange_s,
            f"{what}; over Gloo",
            'ranks of one node exchange faster through shared memory: `import evenstep` and `init_process_group("evenst'
            'ep")`; at best',
        )
    if facts.wrapper == "fsdp":
        return (
            parts.exposed_s / 3,  # one of three exchanges of about the same size
            f"{what}; FSDP2 gathers parameters twice, and scatters gradients",
            "where memory allows it (`evenstep estimate` says), gather once: `fully_shard(..., "
            "reshard_after_forward=False)`, or `evenstep.ShardedOptimizer`; at best",
        )
    return None


def _small_batch(case: Case) -> _Told:
    """The costs of an exchange that don't depend on the batch, with waits for whichever rank is last."""
    parts = case.parts
    # A larger batch doesn't shorten waits for ranks that other programs delay, so these don't count.
    late_s = parts.imbalance_s if case.held_up_by_one else 0.0
    jitter_s = 0.0 if case.is_disturbed else parts.imbalance_s - late_s
    exchange_s = parts.exposed_s + parts.engine_s
    fixed_s = exchange_s + jitter_s
    if case.num_replicas == 1 or fixed_s < case.limit * parts.total_s or _exposed(case) is not None:
        return None
    if case.has_too_many_threads and _contention(case) is not None:
        return None  # too many threads explain slow exchanges and late ranks
    if jitter_s > max(SCHEDULING_S, exchange_s, WORTH_UNSURE * parts.total_s):
        return None  # the waits cost more than the exchange
    waits = f", and {in_ms(jitter_s)} are waiting for whichever rank is last" if jitter_s > 0 else ""
    twice_s = parts.total_s + parts.data_s + parts.contention_s + parts.compute_s + late_s  # with twice the batch
    rows = case.rows_per_replica
    return (
        parts.total_s - twice_s / 2,
        f"of {in_ms(parts.total_s)} a step {in_ms(exchange_s)} are the exchange of gradients{waits}: "
        f"{fixed_s / parts.total_s:.0%}, whatever the size of the batch",
        f"batch {rows:g} to {2 * rows:g} a replica: exposed communication falls from {parts.share('exposed'):.0%} to "
        f"{parts.exposed_s / twice_s:.0%}, all of this from {fixed_s / parts.total_s:.0%} to "
        f"{fixed_s / twice_s:.0%}; or accumulate (`model.microbatches`). For {rows:g} samples",
    )


def _contention(case: Case) -> _Told:
    parts, facts = case.parts, case.facts
    share = parts.share("contention")
    longer = f"computing takes {in_ms(parts.contention_s)} longer than on one replica, {share:.0%} of the step"
    if case.has_too_many_threads and share >= case.limit:
        return (
            parts.contention_s,
            f"{case.num_replicas} ranks compute with {case.num_threads} threads on {facts.num_cores} cores; {longer}",
            f"at most {facts.num_cores} replicas, of one thread each; at best"
            if case.num_replicas > facts.num_cores
            else "no `torch.set_num_threads` in the script; at best",
        )
    if case.divides_batch or case.is_disturbed or share < max(case.limit, WORTH_UNSURE) or case.has_too_many_threads:
        return None
    place = "memory, PCIe or power" if facts.device == "cuda" else "memory bandwidth"
    return (
        parts.contention_s,
        f"{longer}, although every rank has cores of its own: they share {place}",
        "fewer replicas with more threads each, or another node for some of them; at best",
    )


def _host_bound(case: Case) -> _Told:
    parts = case.parts
    if parts.share("idle") < case.limit:
        return None
    lines = [
        f"{line} ({count:.0f} times a step)" if count >= 1.5 else line for line, count in case.syncs if count >= OFTEN
    ]
    if lines:
        why = f"the host waits for the GPU (.item(), .cpu(), a tensor in an `if`) in {', '.join(lines[:3])}"
        advice = "look at values every hundredth step, or keep them on the GPU"
    else:
        why = "the host launches kernels more slowly than the GPU computes them"
        advice = "a larger batch, `torch.compile`, or a fused optimizer (`fused=True`): fewer or longer kernels"
    return (
        parts.idle_s,
        f"the GPU has nothing to do for {in_ms(parts.idle_s)} of {in_ms(parts.total_s)}, {parts.share('idle'):.0%}: "
        f"{why}",
        f"{advice}; at best",
    )


# By cause and the parts of a step that it explains.
_RULES: dict[tuple[str, tuple[str, ...]], Callable[[Case], _Told]] = {
    ("slow loader", ("data",)): _slow_loader,
    ("slow rank", ("imbalance",)): _slow_rank,
    ("exposed communication", ("exposed", "engine")): _exposed,
    ("small batch", ("exposed", "engine", "imbalance")): _small_batch,
    ("contention", ("contention",)): _contention,
    ("host-bound", ("idle",)): _host_bound,
}
