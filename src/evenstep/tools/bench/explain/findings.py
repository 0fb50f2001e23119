"""Why a script doesn't scale better: measurements in, causes with their expected gain out. Pure.

A cause is reported if what it costs was measured, is worth a tenth of the step, and is more than the spread of the
rounds; where other programs keep cores busy, which makes everything longer, a quarter of the step. Every part of the
step has one cause at most, so a slow loader isn't called a slow rank as well:

    waiting for data          slow loader
    imbalance                 slow rank, or uneven work
    exposed communication     slow exchange (over Gloo, on CPUs); sharded parameters (FSDP2); enormous layer, or small
                              batch (with what else each exchange costs)
    contention                oversubscribed threads, or contention
    optimizer                 slow optimizer: longer than on one replica
    computing, on a GPU       host waits: `.item()` in every step

On a healthy script nothing is reported. Where other programs keep cores busy a note says so, and neither uneven work
nor contention is put down to the script.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from evenstep.tools.bench.measure.decompose import Decomposition, Parts
from evenstep.tools.bench.measure.records import Facts
from evenstep.tools.observing.thresholds import (
    DEVIATIONS,
    DOMINATES,
    LARGE_BYTES,
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
}


_LOSSES = {
    "data": "waiting for data",
    "imbalance": "imbalance",
    "exposed": "exposed communication",
    "engine": "the wrapper's own work",
    "contention": "contention",
}
# The losses that a cause explains.
_COVERS = {
    "slow loader": {"data"},
    "slow rank": {"imbalance"},
    "enormous layer": {"exposed"},
    "small batch": {"exposed", "engine", "imbalance"},
    "uneven work": {"imbalance"},
    "oversubscribed threads": {"contention", "exposed", "engine", "imbalance"},
    "contention": {"contention"},
    "slow exchange": {"exposed", "engine"},
    "sharded parameters": {"exposed"},
    "slow optimizer": {"optimizer"},
    "host waits": set(),
}


@dataclass(frozen=True)
class Finding:
    """One cause.

    Attributes:
        cause: Its name: "slow loader", "slow rank", "uneven work", "enormous layer", "small batch",
            "oversubscribed threads", "contention", "slow exchange", "sharded parameters", "slow optimizer",
            "host waits".
        what: What was measured.
        advice: What to do, and what is to be expected of it.
        gain: Throughput then, over throughput now: at most.
    """

    cause: str
    what: str
    advice: str
    gain: float


@dataclass(frozen=True)
class Case:
    """The input of `find`: one point of a curve.

    Attributes:
        num_replicas: Ranks.
        rows_per_replica: Samples of a step on one of them.
        decomposition: Of the step.
        facts: Of rank 0.
        spread: What rounds differ by: the distance of the quartiles of the step over its median.
        num_threads: Of all ranks together.
        device_busy_s: On a GPU: how long in a step the busiest one computed.
        syncs: On a GPU: lines that made the host wait, and how often in a step.
        divides_batch: Of strong scaling: what computes more slowly than alone may be the smaller batch.
        num_cores_elsewhere: Cores of the machine that other programs kept busy.
        alone: The parts of a step on the fewest replicas, where these are more.
        blocks: Of FSDP2's blocks (name, seconds of a step in all-gathers, in reduce-scatters) that nothing hides.
    """

    num_replicas: int
    rows_per_replica: float
    decomposition: Decomposition
    facts: Facts
    spread: float = 0.0
    num_threads: int = 1
    device_busy_s: float | None = None
    syncs: tuple[tuple[str, float], ...] = ()
    divides_batch: bool = False
    num_cores_elsewhere: float = 0.0
    alone: Parts | None = None
    blocks: tuple[tuple[str, float, float], ...] = ()

    @property
    def parts(self) -> Parts:
        """Of the step."""
        return self.decomposition.parts

    @property
    def held_up_by_one(self) -> bool:
        """Whether it is always the same rank that comes last, and not now this one and now that."""
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
    def jitter_s(self) -> float:
        """Imbalance that no rank is to blame for: each exchange waits for the last rank."""
        return 0.0 if self.held_up_by_one else self.parts.imbalance_s


def find(case: Case) -> list[Finding]:
    """The causes, the costliest first."""
    rules: tuple[Callable[[Case], Finding | None], ...] = (
        _slow_loader,
        _slow_rank,
        _enormous_layer,
        _small_batch,
        _uneven_work,
        _oversubscribed,
        _contention,
        _slow_exchange,
        _sharded_parameters,
        _slow_optimizer,
        _host_waits,
    )
    found = [finding for rule in rules if (finding := rule(case)) is not None]
    return sorted(found, key=lambda finding: -finding.gain)


def grown(case: Case) -> list[tuple[str, float]]:
    """(part, seconds) by which parts of a step are longer than on the fewest replicas, the largest first."""
    if case.alone is None:
        return []
    by = {name.name: getattr(case.parts, name.name) - getattr(case.alone, name.name) for name in fields(Parts)}
    longer = [(name.removesuffix("_s"), seconds) for name, seconds in by.items() if seconds > 0]
    return sorted(longer, key=lambda each: -each[1])


def unexplained(case: Case, findings: Sequence[Finding]) -> list[str]:
    """Losses of a tenth of the step or more that no finding covers, each with the reason why there is none."""
    covered = {part for finding in findings for part in _COVERS[finding.cause]}
    return [
        f"{words} is {_ms(getattr(case.parts, f'{part}_s'))} of a step, {case.parts.share(part):.0%}, and no finding: "
        f"{_why_not(case, part)}"
        for part, words in _LOSSES.items()
        if part not in covered and case.parts.share(part) >= WORTH
    ]


def _why_not(case: Case, part: str) -> str:
    share = case.parts.share(part)
    if case.num_cores_elsewhere > MANY_ELSEWHERE:
        return f"other programs kept {case.num_cores_elsewhere:.1f} cores busy, which makes everything longer"
    if share < _limit(case):
        return f"rounds differ by {case.spread:.0%}"
    if part == "contention" and case.divides_batch:
        return "a smaller batch computes less efficiently, too"
    if share < WORTH_UNSURE:
        return f"below {WORTH_UNSURE:.0%} no single cause can be told from the others"
    return "no rule fits what was measured"


def _slow_loader(case: Case) -> Finding | None:
    parts, facts = case.parts, case.facts
    share = parts.share("data")
    if share < _limit(case):
        return None
    rest_s = parts.total_s - parts.data_s
    needed = math.ceil((parts.data_s if facts.num_workers == 0 else facts.num_workers * parts.total_s) / rest_s)
    needed = max(needed, facts.num_workers + 1)
    gain = parts.total_s / rest_s
    has = "num_workers=0, so the rank itself loads" if facts.num_workers == 0 else f"num_workers={facts.num_workers}"
    cores = case.num_replicas * (needed + 1)
    short = (
        f" (together they want {cores} cores, and there are {facts.num_cores}: a cheaper __getitem__ or data prepared "
        f"beforehand do the same)"
        if facts.device == "cpu" and cores > facts.num_cores
        else ""
    )
    return Finding(
        "slow loader",
        f"every rank waits {_ms(parts.data_s)} of its {_ms(parts.total_s)} for data, {share:.0%} ({has})",
        f"with num_workers={needed} loading hides behind the rest: {_ms(parts.total_s)} to {_ms(rest_s)} a step at "
        f"best{short}",
        gain,
    )


def _slow_rank(case: Case) -> Finding | None:
    late, parts = case.decomposition.late, case.parts
    if late is None or not case.held_up_by_one or parts.share("imbalance") < _limit(case):
        return None
    rest_s = parts.total_s - parts.imbalance_s
    return Finding(
        "slow rank",
        f"rank {late.rank} is the last one ready in {late.share_of_steps:.0%} of the steps, {_ms(late.excess_s)} after "
        f"a typical rank, and loses it in {_PHASE_WORDS[late.phase]}",
        f"look at what rank {late.rank} does there that others don't; without it {_ms(parts.total_s)} to "
        f"{_ms(rest_s)} a step",
        parts.total_s / rest_s,
    )


def _enormous_layer(case: Case) -> Finding | None:
    parts = case.parts
    if parts.share("exposed") < _limit(case) or not _one_layer_dominates(case.facts):
        return None
    name, num_bytes = case.facts.largest
    share = num_bytes / case.facts.gradient_bytes
    rest_s = parts.total_s - parts.exposed_s * share / 2
    return Finding(
        "enormous layer",
        f"{name} has {_mib(num_bytes)} of the {_mib(case.facts.gradient_bytes)} that travel, {share:.0%}: nothing is "
        f"left to hide it behind, and {_ms(parts.exposed_s)} of the step are waiting for it, "
        f"{parts.share('exposed'):.0%}",
        f"send it in 16 bits (torch's bf16_compress_hook): {_ms(parts.total_s)} to {_ms(rest_s)} a step; or make it "
        f"smaller, or its gradient sparse",
        parts.total_s / rest_s,
    )


def _small_batch(case: Case) -> Finding | None:
    parts = case.parts
    # Ranks that are late because of other programs are late for reasons that no batch changes.
    jitter_s = 0.0 if case.num_cores_elsewhere > MANY_ELSEWHERE else case.jitter_s
    fixed_s = parts.exposed_s + parts.engine_s + jitter_s
    if case.num_replicas == 1 or fixed_s < _limit(case) * parts.total_s or _oversubscribed(case) is not None:
        return None  # with more threads than cores exchanges are slow, and ranks late, for that reason
    if parts.exposed_s >= WORTH * parts.total_s and _one_layer_dominates(case.facts):
        return None
    is_work = jitter_s > SCHEDULING_S
    if is_work and jitter_s > max(parts.exposed_s + parts.engine_s, WORTH_UNSURE * parts.total_s):
        return None  # it is not the exchange that costs
    exchange_s = parts.exposed_s + parts.engine_s
    waits = f", and {_ms(jitter_s)} are waiting for whichever rank is last" if jitter_s > 0 else ""
    twice_s = parts.total_s + _grows_s(case)
    gain = 2 * parts.total_s / twice_s
    rows = case.rows_per_replica
    return Finding(
        "small batch",
        f"of {_ms(parts.total_s)} a step {_ms(exchange_s)} are the exchange of gradients{waits}: "
        f"{fixed_s / parts.total_s:.0%}, whatever the size of the batch",
        f"batch {rows:g} to {2 * rows:g} a replica: exposed communication falls from {parts.share('exposed'):.0%} to "
        f"{parts.exposed_s / twice_s:.0%}, all of this from {fixed_s / parts.total_s:.0%} to "
        f"{fixed_s / twice_s:.0%}; or accumulate (model.microbatches)",
        gain,
    )


def _uneven_work(case: Case) -> Finding | None:
    late, parts = case.decomposition.late, case.parts
    if late is None or case.held_up_by_one or parts.share("imbalance") < max(_limit(case), WORTH_UNSURE):
        return None
    if case.num_cores_elsewhere > MANY_ELSEWHERE or _small_batch(case) is not None or _oversubscribed(case) is not None:
        return None
    rest_s = parts.total_s - parts.imbalance_s
    return Finding(
        "uneven work",
        f"the ranks take turns in being late: {_ms(parts.imbalance_s)} of {_ms(parts.total_s)} are waiting for whoever "
        f"comes last, {parts.share('imbalance'):.0%}",
        f"give every rank as much to do in every step (samples of similar length: max_tokens=): {_ms(parts.total_s)} "
        f"to {_ms(rest_s)} a step at best",
        parts.total_s / rest_s,
    )


def _oversubscribed(case: Case) -> Finding | None:
    parts, facts = case.parts, case.facts
    if not _wants_too_many_cores(case) or parts.share("contention") < _limit(case):
        return None
    rest_s = parts.total_s - parts.contention_s
    fitting = max(1, facts.num_cores // case.num_replicas)
    advice = f"--threads-per-rank {fitting}, and no torch.set_num_threads in the script"
    if case.num_replicas > facts.num_cores:
        advice = f"at most {facts.num_cores} replicas, of one thread each"
    return Finding(
        "oversubscribed threads",
        f"{case.num_replicas} ranks compute with {case.num_threads} threads on {facts.num_cores} cores; computing "
        f"takes {_ms(parts.contention_s)} longer than on one replica, {parts.share('contention'):.0%} of the step",
        f"{advice}: {_ms(parts.total_s)} to {_ms(rest_s)} a step at best",
        parts.total_s / rest_s,
    )


def _contention(case: Case) -> Finding | None:
    parts = case.parts
    if case.divides_batch or case.num_cores_elsewhere > MANY_ELSEWHERE or _wants_too_many_cores(case):
        return None
    if parts.share("contention") < max(_limit(case), WORTH_UNSURE):
        return None
    rest_s = parts.total_s - parts.contention_s
    place = "memory, PCIe or power" if case.facts.device == "cuda" else "memory bandwidth"
    return Finding(
        "contention",
        f"computing takes {_ms(parts.contention_s)} longer than on one replica, {parts.share('contention'):.0%} of the "
        f"step, although every rank has cores of its own: they share {place}",
        f"fewer replicas with more threads each, or another node for some of them: {_ms(parts.total_s)} to "
        f"{_ms(rest_s)} a step at best",
        parts.total_s / rest_s,
    )


def _slow_exchange(case: Case) -> Finding | None:
    """Of torch's wrapper or FSDP2 over Gloo between ranks of a CPU: another backend does it in less time."""
    parts, facts = case.parts, case.facts
    if facts.wrapper not in ("torch", "fsdp") or facts.device != "cpu" or facts.backend != "gloo":
        return None
    cost_s = parts.exposed_s + parts.engine_s
    if case.num_replicas == 1 or parts.share("exposed", "engine") < _limit(case):
        return None
    rest_s = parts.total_s - cost_s
    return Finding(
        "slow exchange",
        f"{_ms(cost_s)} of {_ms(parts.total_s)} a step are exchanges over Gloo that no computing hides, "
        f"{cost_s / parts.total_s:.0%}",
        f'ranks of one node exchange faster through shared memory: `import evenstep` and init_process_group("evenstep")'
        f"{'' if case.blocks else ', or evenstep.DistributedDataParallel'}: {_ms(parts.total_s)} to {_ms(rest_s)} a "
        f"step at best",
        parts.total_s / rest_s,
    )


def _sharded_parameters(case: Case) -> Finding | None:
    """FSDP2 gathers what doesn't stay: the block that costs most, and what goes if parameters stay."""
    parts = case.parts
    gathering_s = sum(gathered_s for _, gathered_s, _ in case.blocks)
    if case.num_replicas == 1 or gathering_s < _limit(case) * parts.total_s:
        return None
    scattering_s = sum(scattered_s for _, _, scattered_s in case.blocks)
    name, gathered_s, scattered_s = max(case.blocks, key=lambda block: block[1] + block[2])
    rest_s = parts.total_s - min(gathering_s / 2, parts.exposed_s)
    return Finding(
        "sharded parameters",
        f"{_ms(gathering_s)} of {_ms(parts.total_s)} a step are all-gathers of parameters that no computing hides, "
        f"{gathering_s / parts.total_s:.0%}, and {_ms(scattering_s)} reduce-scatters of gradients; most in {name}: "
        f"{_ms(gathered_s)} and {_ms(scattered_s)}",
        f"where memory allows it, keep parameters after the forward pass (fully_shard(..., reshard_after_forward="
        f"False)): {_ms(parts.total_s)} to {_ms(rest_s)} a step at best; or evenstep.ShardedOptimizer, which gathers "
        f"them once a step. `evenstep estimate` says what fits",
        parts.total_s / rest_s,
    )


def _slow_optimizer(case: Case) -> Finding | None:
    """The optimizer's part has grown: all ranks step all parameters, over the same memory."""
    parts, alone = case.parts, case.alone
    if alone is None or case.num_replicas == 1:
        return None
    more_s = parts.optimizer_s - alone.optimizer_s
    if more_s < _limit(case) * parts.total_s:
        return None
    if case.num_cores_elsewhere > MANY_ELSEWHERE and more_s < WORTH_BESIDE_OTHERS * parts.total_s:
        return None
    divided_s = parts.optimizer_s * (1 - 1 / case.num_replicas)
    rest_s = parts.total_s - divided_s
    return Finding(
        "slow optimizer",
        f"the optimizer's step takes {_ms(parts.optimizer_s)} against {_ms(alone.optimizer_s)} on fewer replicas, "
        f"{parts.optimizer_s / max(alone.optimizer_s, 1e-9):.1f} times as long: every rank steps all parameters, and "
        f"they share memory bandwidth",
        f"divide it (evenstep.ShardedOptimizer), or fuse it (fused=True): {_ms(parts.total_s)} to {_ms(rest_s)} a step",
        parts.total_s / rest_s,
    )


def _host_waits(case: Case) -> Finding | None:
    parts, busy_s = case.parts, case.device_busy_s
    lines = [(line, count) for line, count in case.syncs if count >= OFTEN]
    if case.facts.device != "cuda" or busy_s is None or not lines:
        return None
    idle_s = parts.total_s - parts.exposed_s - parts.imbalance_s - parts.data_s - busy_s
    if idle_s < _limit(case) * parts.total_s:
        return None
    received = ", ".join(f"{line} ({count:.0f} times a step)" if count >= 1.5 else line for line, count in lines[:3])
    rest_s = parts.total_s - idle_s
    return Finding(
        "host waits",
        f"{received}: the host waits there for the GPU (.item(), .cpu(), a tensor in an `if`), and the GPU then for "
        f"the host: it computes {_ms(busy_s)} of {_ms(parts.total_s)}",
        f"look at values every hundredth step, or keep them on the GPU: {_ms(parts.total_s)} to {_ms(rest_s)} a step "
        f"at best",
        parts.total_s / rest_s,
    )


def _limit(case: Case) -> float:
    """The share of a step that a loss must have to be reported: a difference between rounds is no finding."""
    least = WORTH_BESIDE_OTHERS if case.num_cores_elsewhere > MANY_ELSEWHERE else WORTH
    return max(least, min(MOST_SPREAD, case.spread))


def _grows_s(case: Case) -> float:
    """The part of a step that is twice as long with twice the batch."""
    parts = case.parts
    lost_by_one_s = parts.imbalance_s - case.jitter_s
    return parts.data_s + parts.contention_s + parts.compute_s + lost_by_one_s


def _one_layer_dominates(facts: Facts) -> bool:
    _, num_bytes = facts.largest
    return num_bytes >= LARGE_BYTES and facts.num_tensors > 1 and num_bytes >= DOMINATES * facts.gradient_bytes


def _wants_too_many_cores(case: Case) -> bool:
    return case.facts.device == "cpu" and case.num_threads > case.facts.num_cores


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.3g} MiB"
