"""How much memory a rank needs, for each way to divide the work: formulas. Pure.

[Note: what lies where]

    P   trained parameters        F   frozen ones and module buffers       S   the optimizer's state of all of P
    B   all buckets of gradients  V   all buckets of parameters            b   the largest bucket, or two
    A   activations               U   the largest unit of FSDP2            n   ranks

                      parameters     gradients    optimizer   while the backward pass runs
    one rank          P + F          P            S
    DDP               P + F          B            S           gradients that have not been packed: the largest bucket
    sharded           V + F          B            S / n       the same
    sharded, stage 2  V + F          B / n        S / n       buckets that are lent: b, and what has not been packed
    FSDP2             P / n + F      P / n        S / n       two units gathered and one of gradients: 3 U
    HSDP, s of n      P / s + F      P / s        S / s       the same
    tensor, t of n    T / n + F      T / n        S T / P n   the same of a unit that is divided by t

Gradients of `DistributedDataParallel` are views of buckets, so they are counted once; torch's has both unless it is
given `gradient_as_bucket_view`. Buckets of a sharded optimizer are padded so that ranks have equal shards
(`replica/gradients/buckets/layout.py`). FSDP2 divides every parameter along its first dimension. HSDP does that among s
ranks, and n / s such groups have the same. Tensor parallelism by t is taken with FSDP2 among the other n / t ranks. It
divides matrices, and not vectors such as those of normalisation, of which every tensor rank has its own: T is what that
makes of P. What a plan really divides is the user's choice. Activations are counted as a whole there, too: those
between divided layers are on every tensor rank. Activations are
what autograd has saved for the backward pass when the forward pass ends; workspaces of single operations, the
allocator's reserve and libraries (a GPU's context takes about half a gigabyte) come on top.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from evenstep.errors import ConfigurationError
from evenstep.replica.gradients.buckets.layout import BucketPolicy, Layout, ParameterSpec, Sharding, plan_layout

WAYS = ("one rank", "DDP", "sharded", "sharded, stage 2", "HSDP", "FSDP2", "tensor")

_NUM_LENT = 2
_MOST_TENSOR_RANKS = 8  # beyond the GPUs of a node, what travels within a layer takes longer than the layer


@dataclass(frozen=True)
class Sizes:
    """What is known of a model, its optimizer and its batch.

    Attributes:
        parameters: The trained ones, in registration order.
        fixed_bytes: Of frozen parameters and module buffers.
        state_bytes: Of the optimizer's state of all parameters, on one rank.
        activation_bytes: Saved for the backward pass, for `num_samples`.
        num_samples: Of a rank's batch; 0 if unknown.
        activation_fixed_bytes: The part of `activation_bytes` that doesn't depend on the batch.
        largest_unit_bytes: Parameters of the largest part that FSDP2 gathers at once; 0: all of them.
    """

    parameters: tuple[ParameterSpec, ...]
    fixed_bytes: int
    state_bytes: int
    activation_bytes: int = 0
    num_samples: int = 0
    activation_fixed_bytes: int = 0
    largest_unit_bytes: int = 0

    @property
    def parameter_bytes(self) -> int:
        """Of the trained parameters."""
        return sum(spec.numel * spec.dtype.itemsize for spec in self.parameters)

    def at(self, num_samples: int) -> Sizes:
        """The same with another batch."""
        if self.num_samples == 0 or num_samples == self.num_samples:
            return self
        per_sample = (self.activation_bytes - self.activation_fixed_bytes) / self.num_samples
        scaled = self.activation_fixed_bytes + math.ceil(per_sample * num_samples)
        return replace(self, activation_bytes=scaled, num_samples=num_samples)


@dataclass(frozen=True)
class Footprint:
    """Bytes of a rank, by kind.

    Attributes:
        way: How the work is divided.
        num_ranks: Over how many.
        mesh: Sizes of the mesh of ranks by name; {}: it needs none.
        parameters: With frozen ones and module buffers.
        gradients: That stay between backward pass and optimizer; where they are views, the buckets.
        optimizer: State.
        passing: While the backward pass runs only.
        activations: Saved for it.
    """

    way: str
    num_ranks: int
    parameters: int
    gradients: int
    optimizer: int
    passing: int
    activations: int
    mesh: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """For people: "HSDP 2 x 4"."""
        sizes = [size for name, size in self.mesh.items() if size > 1 or name == "shard"]
        if self.way == "HSDP":
            return f"HSDP {' x '.join(map(str, sizes))}"
        if self.way == "tensor":
            return f"tensor {self.mesh['tensor']}" + (
                f" x FSDP2 {self.mesh['shard']}" if self.mesh["shard"] > 1 else ""
            )
        return self.way

    @property
    def lines(self) -> list[str]:
        """The lines of a script that divide the work so; the optimizer is made behind them."""
        if self.way == "one rank":
            return []
        if not self.mesh:
            wrapped = ["with evenstep.init() as world:", "    model = evenstep.DistributedDataParallel(model)"]
            if self.way == "DDP":
                return wrapped
            stage = ", shard_gradients=True" if self.way == "sharded, stage 2" else ""
            return [*wrapped, f"    optimizer = evenstep.ShardedOptimizer(model, torch.optim.AdamW, lr=...{stage})"]
        sizes = ", ".join(f'"{name}": {size}' for name, size in self.mesh.items() if size > 1 or name == "shard")
        plan = ", tensor_plan={...}" if self.way == "tensor" else ""
        return [
            f"with evenstep.init(mesh={{{sizes}}}) as world:",
            f"    model = evenstep.parallelize(model, world{plan})",
        ]

    @property
    def total(self) -> int:
        """The most at once: activations go while gradients come, so this is an upper bound."""
        return self.parameters + self.gradients + self.optimizer + self.passing + self.activations

    def to_json(self) -> dict[str, object]:
        """For programs."""
        return {**asdict(self), "total": self.total}


def footprint(
    sizes: Sizes, way: str, num_ranks: int, policy: BucketPolicy | None = None, *, inner: int | None = None
) -> Footprint:
    """What a rank needs; see [Note: what lies where].

    Args:
        sizes: Of model, optimizer and batch.
        way: How the work is divided.
        num_ranks: Over how many.
        policy: Sizes of buckets; None: evenstep's.
        inner: For "HSDP": over how many ranks parameters are sharded. For "tensor": over how many layers are divided.
            None: over half of the ranks, or 2.

    Raises:
        ConfigurationError: No such way, or number of ranks.
    """
    if way not in WAYS:
        raise ConfigurationError(f"way {way!r}: use one of {', '.join(map(repr, WAYS))}.")
    if num_ranks < 1:
        raise ConfigurationError(f"{num_ranks} ranks: at least 1.")
    policy = policy or BucketPolicy()
    if way == "one rank" or num_ranks == 1:
        # Nothing travels, nothing is divided, and gradients stay where autograd has put them.
        return _row(sizes, way, 1, sizes.parameter_bytes, sizes.parameter_bytes, sizes.state_bytes, 0)
    if way in ("FSDP2", "HSDP", "tensor"):
        return _fully_sharded(sizes, way, num_ranks, inner)
    if way == "DDP":
        buckets = _bucket_bytes(_layout(sizes.parameters, policy, 1))
        return _row(
            sizes, way, num_ranks, sizes.parameter_bytes, sum(buckets), sizes.state_bytes, max(buckets, default=0)
        )
    divided = [replace(spec, sharding=Sharding(0)) for spec in sizes.parameters]
    layout = _layout(divided, policy, num_ranks)
    buckets = _bucket_bytes(layout)
    values = sum(
        bucket.numel * divided[bucket.slots[0].parameter].dtype.itemsize for bucket in layout.buckets if bucket.slots
    )
    state = math.ceil(sizes.state_bytes / num_ranks * values / max(1, sizes.parameter_bytes))
    largest = max(buckets, default=0)
    if way == "sharded":
        return _row(sizes, way, num_ranks, values, sum(buckets), state, largest)
    lent = largest * min(_NUM_LENT, len(buckets))
    return _row(sizes, way, num_ranks, values, sum(buckets) // num_ranks, state, lent + largest)


def _fully_sharded(sizes: Sizes, way: str, num_ranks: int, inner: int | None) -> Footprint:
    """FSDP2 alone, among a part of the ranks, or of what tensor parallelism has left."""
    inner = inner or (max(2, num_ranks // 2) if way == "HSDP" else 2)
    if way != "FSDP2" and num_ranks % inner:
        raise ConfigurationError(f"{way} by {inner} on {num_ranks} ranks: {inner} must divide {num_ranks}.")
    tensor = inner if way == "tensor" else 1
    shard = inner if way == "HSDP" else num_ranks // tensor
    divided = [_tensor_share(spec, tensor) for spec in sizes.parameters]
    mine = sum(_dim0_share(spec, shard) for spec in divided)
    unit = sizes.largest_unit_bytes or sizes.parameter_bytes
    whole = max(1, sizes.parameter_bytes)
    unit = math.ceil(unit * sum(spec.numel * spec.dtype.itemsize for spec in divided) / whole)
    state = math.ceil(sizes.state_bytes * mine / whole)
    mesh = {"replicate": num_ranks // inner, "shard": inner} if way == "HSDP" else {"shard": shard}
    row = _row(sizes, way, num_ranks, mine, mine, state, 3 * unit if shard > 1 else 0)
    return replace(row, mesh=mesh if way != "tensor" else {**mesh, "tensor": tensor})


def _tensor_share(spec: ParameterSpec, tensor: int) -> ParameterSpec:
    """What a tensor rank has of a parameter: a part of a matrix' rows, and all of a vector."""
    if len(spec.shape) < 2:
        return spec
    return replace(spec, shape=(math.ceil(spec.shape[0] / tensor), *spec.shape[1:]))


def _row(
    sizes: Sizes, way: str, num_ranks: int, parameters: int, gradients: int, state: int, passing: int
) -> Footprint:
    return Footprint(way, num_ranks, parameters + sizes.fixed_bytes, gradients, state, passing, sizes.activation_bytes)


def _layout(specs: Sequence[ParameterSpec], policy: BucketPolicy, num_shards: int) -> Layout:
    return plan_layout(specs, range(len(specs) - 1, -1, -1), policy, num_shards)


def _bucket_bytes(layout: Layout) -> list[int]:
    return [bucket.numel * bucket.dtype.itemsize for bucket in layout.buckets]


def _dim0_share(spec: ParameterSpec, num_ranks: int) -> int:
    """Bytes of rank 0's part of a parameter that is divided along its first dimension."""
    rows = spec.shape[0] if spec.shape else 1
    return math.ceil(rows / num_ranks) * (spec.numel // max(1, rows)) * spec.dtype.itemsize


def footprints(sizes: Sizes, num_ranks: Sequence[int], policy: BucketPolicy | None = None) -> list[Footprint]:
    """All ways, on all numbers of ranks; one rank once."""
    return [
        footprint(sizes, "one rank", 1, policy),
        *(row for n in num_ranks if n > 1 for row in _ways(sizes, n, policy)),
    ]


def _ways(sizes: Sizes, num_ranks: int, policy: BucketPolicy | None = None) -> list[Footprint]:
    """All ways on so many ranks, in the order in which one tries them: what costs the least time comes first.

    HSDP in groups of half of the ranks and of fewer, tensor parallelism by 2 and by more.
    """
    rows = [footprint(sizes, way, num_ranks, policy) for way in ("DDP", "sharded", "sharded, stage 2")]
    parts = [size for size in range(2, num_ranks) if num_ranks % size == 0]
    rows += [footprint(sizes, "HSDP", num_ranks, policy, inner=size) for size in parts]
    rows += [footprint(sizes, "FSDP2", num_ranks, policy)]
    tensors = [size for size in (*parts, num_ranks) if size <= _MOST_TENSOR_RANKS and size & (size - 1) == 0]
    return rows + [footprint(sizes, "tensor", num_ranks, policy, inner=size) for size in tensors]


# ---------------------------------------------------------------------- for people


def footprint_table(rows: Sequence[Footprint]) -> str:
    """For people, and for the documentation."""
    lines = [
        "| MiB of a rank | ranks | parameters | gradients | optimizer | in passing | activations | in all |",
        "| --- |" + " ---: |" * 7,
    ]
    for row in rows:
        parts = (row.parameters, row.gradients, row.optimizer, row.passing, row.activations, row.total)
        received = " | ".join(f"{part / 2**20:,.1f}" for part in parts)
        lines.append(f"| {row.name} | {row.num_ranks:,} | {received} |")
    return "\n".join(lines)


def verdict(sizes: Sizes, num_ranks: int, memory_bytes: int) -> list[str]:
    """Which way is enough on so many ranks of so much memory, and the lines of a script for it.

    Args:
        sizes: Of model, optimizer and batch.
        num_ranks: How many there are.
        memory_bytes: Of each.
    """
    rows = [footprint(sizes, "one rank", 1)] if num_ranks == 1 else _ways(sizes, num_ranks)
    first, last = rows[0], next((row for row in rows if row.way == "FSDP2"), rows[-1])
    has = f"{_size(memory_bytes)} of memory"
    note = "" if sizes.num_samples else ", without activations, which were not counted"
    if first.total <= memory_bytes:
        lines = [f"{first.name} is enough: {_size(first.total)} of {has}{note}."]
        more = largest_batch(sizes, first.way, num_ranks, memory_bytes)
        if more is not None and more > sizes.num_samples:
            lines.append(f"A batch of {more:,} samples a rank would fit, instead of {sizes.num_samples:,}.")
        return [*lines, *_code(first)]
    lines = [f"{first.name} needs {_size(first.total)} of {has}: it is not enough."]
    warning = _activations_warning(sizes, last, num_ranks, memory_bytes)
    for row in rows[1:]:
        if row.total <= memory_bytes:
            return [*lines, f"{row.name} needs {_size(row.total)}: it is enough{note}.", *_code(row), *warning]
        lines.append(f"{row.name} needs {_size(row.total)}: not enough either.")
    lines += warning
    enough = next((n for n in _doublings(num_ranks) if footprint(sizes, "FSDP2", n).total <= memory_bytes), None)
    if enough is not None:
        lines.append(f"FSDP2 is enough from {enough:,} ranks on.")
    elif last.activations <= memory_bytes / 2:
        more_ranks = next(
            (row for n in _doublings(num_ranks) for row in _ways(sizes, n) if row.total <= memory_bytes), None
        )
        if more_ranks is not None:
            lines.append(f"{more_ranks.name} is enough, on {more_ranks.num_ranks:,} ranks.")
        else:
            lines.append(
                "No number of ranks makes one of these enough: a unit that is gathered must fit. Divide the model into "
                "smaller blocks, or between layers (torch.distributed.pipelining)."
            )
    return lines


def _code(row: Footprint) -> list[str]:
    return [f"    {line}" for line in row.lines]


def _activations_warning(sizes: Sizes, row: Footprint, num_ranks: int, memory_bytes: int) -> list[str]:
    """What to do about activations, where they are the larger part of the memory; else nothing."""
    if row.activations <= memory_bytes / 2:
        return []
    share = f"{row.activations / row.total:.0%} of {row.name} are activations, which none of these divides"
    smaller = "take a smaller batch, or " if sizes.num_samples > 1 else "use "
    lines = [f"{share}: {smaller}torch.utils.checkpoint, which computes them twice."]
    less = largest_batch(sizes, row.way, num_ranks, memory_bytes)
    if less:
        lines.append(f"With {row.way} a batch of {less:,} samples a rank fits; accumulate over microbatches.")
    return lines


def largest_batch(sizes: Sizes, way: str, num_ranks: int, memory_bytes: int) -> int | None:
    """Samples of a rank that fit; 0 if not even one does, None if activations weren't measured."""
    if sizes.num_samples == 0 or sizes.activation_bytes <= sizes.activation_fixed_bytes:
        return None
    low, high = 0, 1 << 40
    while low < high:
        middle = (low + high + 1) // 2
        if footprint(sizes.at(middle), way, num_ranks).total <= memory_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def _doublings(num_ranks: int) -> list[int]:
    counts = [2 * num_ranks]
    while counts[-1] < 4096:
        counts.append(2 * counts[-1])
    return counts


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"
