"""How much memory a rank needs, for each way to divide the work: formulas. Pure.

[Note: what lies where]

    P   trained parameters        F   frozen ones and module buffers       S   the optimizer's state of all of P
    B   all buckets of gradients  V   all buckets of parameters            b   the largest bucket, or two
    A   activations               U   the largest unit of FSDP2            n   ranks
    T   what the optimizer's step needs beside

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
between divided layers are on every tensor rank.

Activations are all that the passes have made and still hold when that is most: what autograd has saved, its gradients,
and results of single operations. On one rank and with FSDP2 they go while gradients come, so only the larger of both
counts; buckets are there all the time. Libraries (a GPU's context takes about half a gigabyte) and the
allocator's reserve come on top.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from evenstep.errors import ConfigurationError
from evenstep.replica.gradients.buckets.layout import BucketPolicy, ParameterSpec, Sharding, plan_layout

WAYS = ("one rank", "DDP", "sharded", "sharded, stage 2", "HSDP", "FSDP2", "tensor")

_NUM_LENT = 2
_MOST_TENSOR_RANKS = 8  # beyond the GPUs of a node, what travels within a layer takes longer than the layer
_MOST_RANKS = 8192


@dataclass(frozen=True)
class Sizes:
    """What is known of a model, its optimizer and its batch.

    Attributes:
        parameters: The trained ones, in registration order.
        fixed_bytes: Of frozen parameters and module buffers.
        state_bytes: Of the optimizer's state of all parameters, on one rank.
        stepping_bytes: What the optimizer's step needs for a moment.
        activation_bytes: What the passes hold at most beside gradients, for `num_samples`.
        num_samples: Of a rank's batch; 0 if unknown.
        activation_lines: (bytes, bytes a sample) of straight lines, of which the highest tells what other batches take:
            in a small batch gradients of weights are the most, in a large one activations. (): in proportion.
        largest_unit_bytes: Parameters of the largest part that FSDP2 gathers at once; 0: all of them.
    """

    parameters: tuple[ParameterSpec, ...]
    fixed_bytes: int
    state_bytes: int
    activation_bytes: int = 0
    num_samples: int = 0
    activation_lines: tuple[tuple[float, float], ...] = ()
    largest_unit_bytes: int = 0
    stepping_bytes: int = 0

    @property
    def parameter_bytes(self) -> int:
        """Of the trained parameters."""
        return sum(map(_bytes_of, self.parameters))

    def at(self, num_samples: int) -> Sizes:
        """The same with another batch."""
        if self.num_samples == 0 or num_samples == self.num_samples:
            return self
        lines = self.activation_lines or ((0.0, self.activation_bytes / self.num_samples),)
        taken = max(fixed + per_sample * num_samples for fixed, per_sample in lines)
        return replace(self, activation_bytes=math.ceil(taken), num_samples=num_samples, activation_lines=lines)


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
        activations: What the passes hold at most beside.
        stepping: While the optimizer steps only.
        lasting: Activations that are there at the end of the backward pass, too: a gradient of weights on its way.
        total: The most at once.
    """

    way: str
    num_ranks: int
    parameters: int
    gradients: int
    optimizer: int
    passing: int
    activations: int
    stepping: int
    mesh: dict[str, int] = field(default_factory=dict)
    lasting: int = 0

    @property
    def name(self) -> str:
        """For people: "HSDP 2 x 4"."""
        if self.way == "HSDP":
            return f"HSDP {self.mesh['replicate']} x {self.mesh['shard']}"
        if self.way == "tensor":
            rest = f" x FSDP2 {self.mesh['shard']}" if self.mesh["shard"] > 1 else ""
            return f"tensor {self.mesh['tensor']}{rest}"
        return self.way

    @property
    def lines(self) -> list[str]:
        """The lines of a script that divide the work so; the optimizer is made behind them."""
        if self.way == "one rank":
            return []
        if self.mesh:
            sizes = ", ".join(f'"{name}": {size}' for name, size in self.mesh.items())
            plan = ", tensor_plan={...}" if self.way == "tensor" else ""
            return [
                f"with evenstep.init(mesh={{{sizes}}}) as world:",
                f"    model = evenstep.parallelize(model, world{plan})",
            ]
        stage = ", shard_gradients=True" if self.way == "sharded, stage 2" else ""
        return [
            "with evenstep.init() as world:",
            "    model = evenstep.DistributedDataParallel(model)",
            f"    optimizer = evenstep.ShardedOptimizer(model, torch.optim.AdamW, lr=...{stage})",
        ][: 2 if self.way == "DDP" else 3]

    @property
    def total(self) -> int:
        """The most at once."""
        if self.num_ranks == 1 or self.mesh:
            # Shards of gradients come while activations go; buckets are there all the time.
            passes = self.passing + max(self.activations, self.gradients + (self.lasting if self.mesh else 0))
            return self.parameters + self.optimizer + max(passes, self.gradients + self.stepping)
        return self.parameters + self.optimizer + self.gradients + max(self.passing + self.activations, self.stepping)

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
    values, state, mesh = sizes.parameter_bytes, float(sizes.state_bytes), dict[str, int]()
    gradients, passing, part = values, 0, 1.0
    if way == "one rank" or num_ranks == 1:
        num_ranks = 1  # nothing travels, nothing is divided, and gradients stay where autograd has put them
    elif way in ("FSDP2", "HSDP", "tensor"):
        inner = inner or (max(2, num_ranks // 2) if way == "HSDP" else 2)
        if way != "FSDP2" and num_ranks % inner:
            raise ConfigurationError(f"{way} by {inner} on {num_ranks} ranks: {inner} must divide {num_ranks}.")
        tensor = inner if way == "tensor" else 1
        shard = inner if way == "HSDP" else num_ranks // tensor
        mesh = {"replicate": num_ranks // inner} if way == "HSDP" else {}
        mesh |= {"shard": shard} | ({"tensor": tensor} if way == "tensor" else {})
        # A tensor rank has a part of a matrix' rows, and all of a vector.
        divided = [_rows_divided(spec, tensor) if len(spec.shape) > 1 else spec for spec in sizes.parameters]
        whole = max(1, values)
        unit = (sizes.largest_unit_bytes or values) * sum(map(_bytes_of, divided)) / whole
        values = gradients = sum(_bytes_of(_rows_divided(spec, shard)) for spec in divided)
        passing = 3 * math.ceil(unit) if shard > 1 else 0
        part = values / whole
    else:
        specs = sizes.parameters
        if way != "DDP":
            specs = tuple(replace(spec, sharding=Sharding(0)) for spec in specs)
        order = range(len(specs) - 1, -1, -1)
        layout = plan_layout(specs, order, policy or BucketPolicy(), 1 if way == "DDP" else num_ranks)
        buckets = [bucket.numel * bucket.dtype.itemsize for bucket in layout.buckets]
        gradients, passing = sum(buckets), max(buckets, default=0)
        if way != "DDP":
            used = [bucket for bucket in layout.buckets if bucket.slots]
            padded = sum(bucket.numel * specs[bucket.slots[0].parameter].dtype.itemsize for bucket in used)
            part, values = padded / max(1, values) / num_ranks, padded
        if way == "sharded, stage 2":
            passing *= 1 + min(_NUM_LENT, len(buckets))
            gradients //= num_ranks
    return Footprint(
        way,
        num_ranks,
        values + sizes.fixed_bytes,
        gradients,
        math.ceil(state * part),
        passing,
        sizes.activation_bytes,
        math.ceil(sizes.stepping_bytes * part),
        mesh,
        min(sizes.activation_bytes, math.ceil(max((fixed for fixed, _ in sizes.activation_lines), default=0))),
    )


def _bytes_of(spec: ParameterSpec) -> int:
    return spec.numel * spec.dtype.itemsize


def _rows_divided(spec: ParameterSpec, parts: int) -> ParameterSpec:
    """The first one's part of a parameter that is divided along its first dimension."""
    return replace(spec, shape=(math.ceil(spec.shape[0] / parts), *spec.shape[1:])) if spec.shape else spec


def footprints(sizes: Sizes, num_ranks: Sequence[int]) -> list[Footprint]:
    """All ways, on all numbers of ranks; one rank once."""
    return [footprint(sizes, "one rank", 1), *(row for n in num_ranks if n > 1 for row in _ways(sizes, n))]


def _ways(sizes: Sizes, num_ranks: int) -> list[Footprint]:
    """All ways on so many ranks, in the order in which one tries them: what costs the least time comes first.

    HSDP in groups of half of the ranks and of fewer, tensor parallelism by 2 and by more.
    """
    if num_ranks == 1:
        return [footprint(sizes, "one rank", 1)]
    parts = [size for size in range(2, num_ranks) if num_ranks % size == 0]
    tensors = [size for size in (*parts, num_ranks) if size <= _MOST_TENSOR_RANKS and size & (size - 1) == 0]
    inners = {"HSDP": parts, "tensor": tensors}
    return [footprint(sizes, way, num_ranks, inner=size) for way in WAYS[1:] for size in inners.get(way, [None])]


# ---------------------------------------------------------------------- for people


def footprint_table(rows: Sequence[Footprint]) -> str:
    """For people, and for the documentation."""
    columns = ("parameters", "gradients", "optimizer", "passing", "activations", "stepping", "total")
    lines = [f"| MiB of a rank | ranks | {' | '.join(columns)} |", "| --- |" + " ---: |" * 8]
    for row in rows:
        cells = " | ".join(f"{getattr(row, column) / 2**20:,.1f}" for column in columns)
        lines.append(f"| {row.name} | {row.num_ranks:,} | {cells} |")
    return "\n".join(lines)


def verdict(sizes: Sizes, num_ranks: int, memory_bytes: int) -> list[str]:
    """Which way is enough on so many ranks of so much memory, and the lines of a script for it.

    Args:
        sizes: Of model, optimizer and batch.
        num_ranks: How many there are.
        memory_bytes: Of each.
    """
    note = "" if sizes.num_samples else ", without activations, which were not counted"
    lines: list[str] = []
    for row in _ways(sizes, num_ranks):
        if row.total <= memory_bytes:
            lines.append(f"{row.name} is enough: it needs {_size(row.total)} of {_size(memory_bytes)} of memory{note}.")
            more = largest_batch(sizes, row.way, num_ranks, memory_bytes) if len(lines) == 1 else None
            if more is not None and more > sizes.num_samples:
                lines.append(f"A batch of {more:,} samples a rank would fit, instead of {sizes.num_samples:,}.")
            return [*lines, *(f"    {line}" for line in row.lines)]
        lines.append(f"{row.name} needs {_size(row.total)} of {_size(memory_bytes)} of memory: it is not enough.")
    least = footprint(sizes, "FSDP2", num_ranks)
    if least.activations > memory_bytes / 2:
        smaller = "take a smaller batch, or use" if sizes.num_samples > 1 else "use"
        lines.append(
            f"{least.activations / least.total:.0%} of {least.name} are activations, which none of these divides: "
            f"{smaller} torch.utils.checkpoint, which computes them twice."
        )
        if less := largest_batch(sizes, least.way, num_ranks, memory_bytes):
            lines.append(f"With {least.name} a batch of {less:,} samples a rank fits; accumulate over microbatches.")
        return lines
    while (num_ranks := 2 * num_ranks) <= _MOST_RANKS:
        for row in _ways(sizes, num_ranks):
            if row.total <= memory_bytes:
                return [*lines, f"{row.name} is enough from {num_ranks:,} ranks on."]
    return [
        *lines,
        "No number of ranks makes one of these enough: a unit that is gathered must fit. Divide the model into smaller "
        "blocks, or between layers (torch.distributed.pipelining).",
    ]


def largest_batch(sizes: Sizes, way: str, num_ranks: int, memory_bytes: int) -> int | None:
    """Samples of a rank that fit; 0 if not even one does, None if activations weren't measured."""
    if sizes.num_samples == 0 or sizes.at(1 << 40).activation_bytes <= sizes.activation_bytes:
        return None
    low, high = 0, 1 << 40
    while low < high:
        middle = (low + high + 1) // 2
        fits = footprint(sizes.at(middle), way, num_ranks).total <= memory_bytes
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"
