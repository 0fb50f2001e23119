"""The changes that `--try` knows, which of them fit a script, and what each should gain. Pure.

[Note: predicted gains]

A change can save what a part of the step lasts now, times the share that the remedy takes off the same work by itself,
which `calibrate` measures on this machine with tensors of the script's sizes. Two things aren't known beforehand, and
are the spread of a prediction: whether other work gets faster too where an exchange no longer wants cores and memory
(contention), and what rounds differ by.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from evenstep.bench.explain.findings import Case
from evenstep.bench.measure.scaling import Spread
from evenstep.errors import ConfigurationError
from evenstep.observe.thresholds import WORTH, WORTH_TRYING

_FUSED_ON_CPU = ("SGD", "Adam", "AdamW", "Adagrad")
_ELEMENTWISE = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")


@dataclass(frozen=True)
class Change:
    """One change.

    Attributes:
        name: As `--only` takes it.
        title: For tables.
        slots: Two changes with a slot in common exclude each other.
        cause: Of the findings whose remedy this is, the names.
        lines: How the script is changed for good.
    """

    name: str
    title: str
    slots: frozenset[str]
    causes: tuple[str, ...]
    lines: str


_EXCHANGE = ("slow exchange", "small batch", "enormous layer", "contention")
CHANGES: dict[str, Change] = {
    change.name: change
    for change in (
        Change(
            "backend", 'backend "evenstep"', frozenset({"transport"}), _EXCHANGE,
            'import evenstep\ndist.init_process_group("evenstep")',
        ),
        Change(
            "wrapper", "evenstep.DistributedDataParallel", frozenset({"transport", "wrapper", "buckets", "view"}),
            _EXCHANGE, "import evenstep\nmodel = evenstep.DistributedDataParallel(model)",
        ),
        Change(
            "view", "gradient_as_bucket_view=True", frozenset({"view"}), ("slow exchange",),
            "model = DistributedDataParallel(model, gradient_as_bucket_view=True)",
        ),
        Change(
            "static-graph", "static_graph=True", frozenset({"graph"}), ("slow exchange",),
            "model = DistributedDataParallel(model, static_graph=True)",
        ),
        Change(
            "one-bucket", "one bucket for all gradients", frozenset({"buckets"}), ("slow exchange", "small batch"),
            "model = DistributedDataParallel(model, bucket_cap_mb={bucket_cap_mb})",
        ),
        Change(
            "16-bit", "gradients sent in 16 bits", frozenset({"hook"}), ("enormous layer", "slow exchange"),
            "from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook\n"
            "model.register_comm_hook(None, fp16_compress_hook)",
        ),
        Change(
            "fused", "torch's fused optimizer", frozenset({"optimizer"}), ("slow optimizer",),
            "optimizer = torch.optim.{optimizer}(..., fused=True)",
        ),
        Change(
            "sharded", "ShardedOptimizer", frozenset({"optimizer", "transport", "wrapper", "buckets", "view"}),
            ("slow optimizer", *_EXCHANGE),
            "import evenstep\nmodel = evenstep.DistributedDataParallel(model)\n"
            "optimizer = evenstep.ShardedOptimizer(model, torch.optim.{optimizer}, ...)",
        ),
        Change(
            "workers", "loader with workers", frozenset({"loader"}), ("slow loader",),
            "loader = DataLoader(..., num_workers={num_workers}, persistent_workers=True)",
        ),
        Change(
            "pin-memory", "pinned memory", frozenset({"pin"}), ("slow loader",),
            "loader = DataLoader(..., pin_memory=True)"
        ),
        Change(
            "threads", "threads that fit the cores", frozenset({"threads"}), ("oversubscribed threads", "contention"),
            "evenstep run --threads-per-rank {num_threads} ...   # and no torch.set_num_threads in the script",
        ),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Uses:
    """What a script uses, as rank 0 saw it after its run.

    Attributes:
        backend: Of the process group; "" without one.
        wrapper: "torch", "evenstep" or "": who averages.
        options: Arguments of torch's wrapper: `gradient_as_bucket_view`, `static_graph`, `bucket_cap_mb`,
            `find_unused_parameters`, and "hook": it has a communication hook.
        optimizer: Name of its class; "" for one that isn't torch's.
        optimizer_options: Options of its first group that are plain values.
        num_optimizers: That made steps.
        shapes: Of the parameters, those of the optimizer.
        dtype: Of the first.
        device: "cpu" or "cuda".
        has_loader: Whether torch's DataLoader was read.
        num_workers: Of that.
        pin_memory: Of that.
        num_nodes: Of the run.
        dtype_of_loss: "float32", ...; "" if no loss was seen.
    """

    backend: str = ""
    wrapper: str = ""
    options: Mapping[str, object] = field(default_factory=dict)
    optimizer: str = ""
    optimizer_options: Mapping[str, object] = field(default_factory=dict)
    num_optimizers: int = 1
    shapes: tuple[tuple[int, ...], ...] = ()
    dtype: str = "float32"
    device: str = "cpu"
    has_loader: bool = True
    num_workers: int = 0
    pin_memory: bool = False
    num_nodes: int = 1
    dtype_of_loss: str = ""


@dataclass(frozen=True)
class Costs:
    """What remedies cost here beside what the script does, as ratios: 0.25 is four times faster.

    Attributes:
        ratios: By name of the change, by what it does ("exchange", "optimizer"): with quartiles. Missing: unknown.
    """

    ratios: Mapping[str, Mapping[str, Spread]] = field(default_factory=dict)

    def of(self, change: str, what: str) -> Spread:
        """The ratio; where it is unknown, anything between nothing and all."""
        return self.ratios.get(change, {}).get(what, Spread(0.5, 0.0, 1.0))


@dataclass(frozen=True)
class Candidate:
    """A change that is tried.

    Attributes:
        change: Its name.
        settings: What it is given: `num_workers`, `num_threads`, `bucket_cap_mb`.
        predicted: Throughput with it over throughput without.
        lines: How the script is changed for good.
    """

    change: str
    settings: Mapping[str, float]
    predicted: Spread
    lines: str


@dataclass(frozen=True)
class Plan:
    """What is tried, the most promising first, and what isn't: (change, reason)."""

    candidates: tuple[Candidate, ...]
    skipped: tuple[tuple[str, str], ...]


def validate_names(names: Sequence[str] | None) -> tuple[str, ...] | None:
    """The changes that were asked for.

    Raises:
        ConfigurationError: One is unknown.
    """
    unknown = [name for name in names or () if name not in CHANGES]
    if unknown or (names is not None and not names):
        named = f"{unknown[0]!r} is no change" if unknown else "no change is named"
        raise ConfigurationError(f"--only: {named}; there are {', '.join(CHANGES)}.")
    return None if names is None else tuple(dict.fromkeys(names))


def plan_changes(case: Case, uses: Uses, costs: Costs, *, busy_cores: float, only: Sequence[str] | None = None) -> Plan:
    """Decide what is tried.

    Args:
        case: The step on the most replicas.
        uses: What the script uses.
        costs: Of the remedies.
        busy_cores: What all ranks together keep busy of the node's cores.
        only: Names; these are tried also where little is expected of them.
    """
    candidates, skipped = [], []
    for name, change in CHANGES.items():
        if only is not None and name not in only:
            continue
        reason = why_not(name, case, uses)
        if reason is not None:
            skipped.append((name, reason))
            continue
        settings = _settings(name, case, uses)
        predicted = predict(name, case, costs, busy_cores=busy_cores)
        # What rounds differ by promises nothing.
        promised = predict(name, replace(case, spread=0.0), costs, busy_cores=busy_cores)
        if only is None and promised.median < WORTH_TRYING and promised.high < 1 + WORTH:
            skipped.append((name, f"nothing to expect: {predicted.median:.2f}x"))
            continue
        words = {**settings, "optimizer": uses.optimizer}
        candidates.append(Candidate(name, settings, predicted, change.lines.format(**words)))
    candidates.sort(key=lambda each: -each.predicted.median)
    return Plan(tuple(candidates), tuple(skipped))


def has_hold(change: str, settings: Mapping[str, float], uses: Uses) -> bool:
    """Whether a run shows that a change was made in it; True of those that leave no trace in what a script uses.

    Args:
        change: Its name.
        settings: What it was given.
        uses: What the changed script used.
    """
    match change:
        case "backend":
            return uses.backend == "evenstep"
        case "wrapper" | "sharded":
            return uses.wrapper == "evenstep"
        case "16-bit":
            return bool(uses.options.get("hook"))
        case "view" | "static-graph":
            return bool(uses.options.get({"view": "gradient_as_bucket_view", "static-graph": "static_graph"}[change]))
        case "fused":
            return bool(uses.optimizer_options.get("fused"))
        case "workers":
            return uses.num_workers == settings["num_workers"]
        case "pin-memory":
            return uses.pin_memory
    return True


def why_not(name: str, case: Case, uses: Uses) -> str | None:
    """Why a change can't be made in a script; None if it can."""
    torchs, is_replicated = uses.wrapper == "torch", case.num_replicas > 1
    ways = {
        "backend": _why_no_backend,
        "wrapper": lambda c, u: None if torchs else "the script doesn't use torch's DistributedDataParallel",
        "view": lambda c, u: _why_no_option(u, "gradient_as_bucket_view"),
        "static-graph": lambda c, u: (
            _why_no_option(u, "static_graph")
            or (
                None if u.options.get("find_unused_parameters") else "find_unused_parameters isn't set: nothing to save"
            )
        ),
        "one-bucket": lambda c, u: (
            _why_no_option(u, "bucket_cap_mb")
            or ("all gradients are in one bucket already" if len(c.facts.bucket_bytes) < 2 else None)
        ),
        "16-bit": _why_no_hook,
        "fused": _why_not_fused,
        "sharded": _why_not_sharded,
        "workers": lambda c, u: None if u.has_loader else "the script reads no torch DataLoader",
        "pin-memory": _why_not_pinned,
        "threads": _why_no_threads,
    }
    if not is_replicated and name in ("backend", "wrapper", "view", "static-graph", "one-bucket", "16-bit", "sharded"):
        return "there is one replica, which exchanges nothing"
    return ways[name](case, uses)


def _why_no_backend(case: Case, uses: Uses) -> str | None:
    if uses.wrapper == "evenstep":
        return "evenstep's wrapper chooses its transport itself"
    if not uses.backend:
        return "the script makes no process group"
    return None if uses.backend in ("gloo", "cpu:gloo") else f"the script uses {uses.backend}"


def _why_no_option(uses: Uses, option: str) -> str | None:
    if uses.wrapper != "torch":
        return "the script doesn't use torch's DistributedDataParallel"
    return f"{option} is set already" if uses.options.get(option) else None


def _why_no_hook(case: Case, uses: Uses) -> str | None:
    if not uses.wrapper:
        return "no wrapped model was found"
    if uses.options.get("hook"):
        return "the model has a communication hook already"
    if uses.dtype != "float32":
        return f"the gradients are {uses.dtype}"
    return None if uses.num_nodes > 1 else "one node: no network is the limit"


def _why_not_fused(case: Case, uses: Uses) -> str | None:
    if not uses.optimizer:
        return "the optimizer isn't one of torch's"
    if uses.optimizer not in _FUSED_ON_CPU:
        return f"{uses.optimizer} has no fused form"
    return "it is fused already" if uses.optimizer_options.get("fused") else None


def _why_not_sharded(case: Case, uses: Uses) -> str | None:
    if uses.wrapper not in ("torch", "evenstep"):
        return "no wrapped model was found"
    if uses.optimizer not in _ELEMENTWISE:
        return "the optimizer isn't known to step each element by itself"
    return "the model has a communication hook, which needs whole gradients" if uses.options.get("hook") else None


def _why_not_pinned(case: Case, uses: Uses) -> str | None:
    if uses.device != "cuda":
        return "no GPU, so nothing is copied from pinned memory"
    if not uses.has_loader:
        return "the script reads no torch DataLoader"
    return "it is pinned already" if uses.pin_memory else None


def _why_no_threads(case: Case, uses: Uses) -> str | None:
    if uses.device != "cpu":
        return "the ranks compute on GPUs"
    fitting = _fitting_threads(case)
    if case.num_threads == fitting * case.num_replicas:
        return f"every rank has as many threads as fit: {fitting}"
    return None


def _fitting_threads(case: Case) -> int:
    return max(1, case.facts.num_cores // case.num_replicas)


def _settings(name: str, case: Case, uses: Uses) -> dict[str, float]:
    if name == "workers":
        return {"num_workers": needed_workers(case)}
    if name == "threads":
        return {"num_threads": _fitting_threads(case)}
    if name == "one-bucket":
        return {"bucket_cap_mb": 1 + math.ceil(case.facts.gradient_bytes / (1 << 20))}
    return {}


def needed_workers(case: Case) -> int:
    """Workers of a loader behind which loading hides, as the finding "slow loader" counts them."""
    parts, has = case.parts, case.facts.num_workers
    rest_s = max(parts.total_s - parts.data_s, 1e-6)
    needed = math.ceil((parts.data_s if has == 0 else has * parts.total_s) / rest_s)
    return min(max(needed, has + 1), max(1, 2 * case.facts.num_cores))


def predict(name: str, case: Case, costs: Costs, *, busy_cores: float) -> Spread:
    """The gain to expect: [Note: predicted gains]."""
    parts = case.parts
    total_s = parts.total_s
    slack = min(0.5, case.spread) / 2
    if name == "workers":
        # Workers load at the same time, and what still lasts longer than the rest of the step is waited for.
        loading_s = parts.data_s * max(1, case.facts.num_workers) / needed_workers(case)
        hidden = total_s / max(total_s - parts.data_s, loading_s, 1e-9)
        # Loading that keeps cores busy can move to other cores only where there are some.
        room = case.facts.num_cores / max(busy_cores, 1e-9)
        gain = max(1.0, min(hidden, room))
        more = gain - 1  # of which a part is lost, or more is won, with workers that beginning and copying keep busy
        return Spread(gain, (1 + 0.75 * more) * (1 - slack), (1 + 1.25 * more) * (1 + slack))
    if name == "threads":
        gain = total_s / (total_s - parts.contention_s)
        return Spread((1 + gain) / 2, 1.0, gain * (1 + slack))
    if name == "pin-memory":
        return Spread(1.0, 1.0, 1 / (1 - min(0.9, parts.share("data"))))
    if name in ("view", "static-graph", "one-bucket"):
        # They save copies, or messages: how many of the seconds is known only by trying.
        most = parts.engine_s + parts.exposed_s / 3
        return _gain(total_s, 0.0, most / 3, most, slack)
    least_s = likely_s = most_s = 0.0
    if name in ("backend", "wrapper", "sharded", "16-bit"):
        ratio = costs.of(name, "exchange")
        jitter_s = case.jitter_s
        least_s += parts.exposed_s * max(0.0, 1 - ratio.high)
        likely_s += (parts.exposed_s + (parts.contention_s + jitter_s) / 2) * (1 - ratio.median)
        most_s += (parts.exposed_s + parts.contention_s + jitter_s) * (1 - ratio.low)
    if name in ("fused", "sharded"):
        ratio = costs.of(name, "optimizer")
        least_s += parts.optimizer_s * (1 - ratio.high)
        likely_s += parts.optimizer_s * (1 - ratio.median)
        most_s += parts.optimizer_s * (1 - ratio.low)
    return _gain(total_s, least_s, likely_s, most_s, slack)


def _gain(total_s: float, least_s: float, likely_s: float, most_s: float, slack: float) -> Spread:
    low, median, high = (total_s / max(total_s - saved_s, 0.02 * total_s) for saved_s in (least_s, likely_s, most_s))
    low, high = min(low, median), max(high, median)
    return Spread(median, low * (1 - slack), high * (1 + slack))
