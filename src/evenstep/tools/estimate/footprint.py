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

Gradients of `DistributedDataParallel` are views of buckets, so they are counted once; torch's has both unless it is
given `gradient_as_bucket_view`. Buckets of a sharded optimizer are padded so that ranks have equal shards
(`replica/gradients/buckets/layout.py`). FSDP2 divides every parameter along its first dimension. HSDP takes what FSDP2
takes on the ranks of one of its groups. What tensor parallelism divides is the user's plan, and isn't computed.

Activations are all that the passes have made and still hold when that is most: what autograd has saved, its gradients,
and results of single operations. On one rank and with FSDP2 they go while gradients come, so only the larger of both
counts; buckets are there all the time. Libraries (a GPU's context takes about half a gigabyte) and the
allocator's reserve come on top.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from evenstep.replica.gradients.buckets.layout import BucketPolicy, ParameterSpec, Sharding, plan_layout

WAYS = ("one rank", "DDP", "sharded", "sharded, stage 2", "FSDP2")

_NUM_LENT = 2
_MOST_RANKS = 8192


@dataclass(frozen=True)
class Sizes:
    """What is known of a model, its optimizer and its batch.

    Attributes:
        parameters: The trained ones, in registration order.
        fixed_bytes: Frozen parameters and module buffers.
        state_bytes: The optimizer's state for all parameters, on one rank.
        stepping_bytes: What the optimizer's step needs for a moment.
        activation_bytes: What the passes hold at most beside gradients, for `num_samples`.
        num_samples: How many a rank's batch has; 0 if unknown.
        largest_unit_bytes: Parameters of the largest part that FSDP2 gathers at once; 0: all of them.
    """

    parameters: tuple[ParameterSpec, ...]
    fixed_bytes: int
    state_bytes: int
    activation_bytes: int = 0
    num_samples: int = 0
    largest_unit_bytes: int = 0
    stepping_bytes: int = 0

    @property
    def parameter_bytes(self) -> int:
        """The bytes of the trained parameters."""
        return sum(map(_bytes_of, self.parameters))


@dataclass(frozen=True)
class Footprint:
    """Bytes of a rank, by kind.

    Attributes:
        way: How the work is divided.
        num_ranks: Over how many.
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
    lasting: int = 0

    @property
    def lines(self) -> list[str]:
        """The lines of a script that divide the work so; the optimizer is made behind them."""
        if self.way == "one rank":
            return []
        if self.way == "FSDP2":
            return [
                'with evenstep.init(mesh={"shard": -1}) as world:',
                "    model = evenstep.parallelize(model, world)",
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
        if self.num_ranks == 1 or self.way == "FSDP2":
            # Shards of gradients come while activations go; buckets are there all the time.
            passes = self.passing + max(self.activations, self.gradients + (self.lasting if self.num_ranks > 1 else 0))
            return self.parameters + self.optimizer + max(passes, self.gradients + self.stepping)
        return self.parameters + self.optimizer + self.gradients + max(self.passing + self.activations, self.stepping)

    def to_json(self) -> dict[str, object]:
        """For programs."""
        return {**asdict(self), "total": self.total}


def footprint(sizes: Sizes, way: str, num_ranks: int, policy: BucketPolicy | None = None) -> Footprint:
    """What a rank needs; see [Note: what lies where].

    Args:
        sizes: How large model, optimizer and batch are.
        way: How the work is divided, one of `WAYS`.
        num_ranks: Over how many.
        policy: Sizes of buckets; None: evenstep's.
    """
    values = gradients = sizes.parameter_bytes
    passing, part = 0, 1.0
    if way == "one rank" or num_ranks == 1:
        num_ranks = 1  # nothing travels, nothing is divided, and gradients stay where autograd has put them
    elif way == "FSDP2":
        passing = 3 * (sizes.largest_unit_bytes or values)
        gradients = sum(_bytes_of(_rows_divided(spec, num_ranks)) for spec in sizes.parameters)
        part, values = gradients / max(1, values), gradients
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
        math.ceil(sizes.state_bytes * part),
        passing,
        sizes.activation_bytes,
        math.ceil(sizes.stepping_bytes * part),
        min(sizes.activation_bytes, max(map(_bytes_of, sizes.parameters), default=0)),
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
    """All ways on so many ranks, in the order in which one tries them: what costs the least time comes first."""
    return [footprint(sizes, way, num_ranks) for way in (WAYS[1:] if num_ranks > 1 else WAYS[:1])]


# ---------------------------------------------------------------------- for people


def footprint_table(rows: Sequence[Footprint]) -> str:
    """For people, and for the documentation."""
    columns = ("parameters", "gradients", "optimizer", "passing", "activations", "stepping", "total")
    lines = [f"| MiB of a rank | ranks | {' | '.join(columns)} |", "| --- |" + " ---: |" * 8]
    for row in rows:
        cells = " | ".join(f"{getattr(row, column) / 2**20:,.1f}" for column in columns)
        lines.append(f"| {row.way} | {row.num_ranks:,} | {cells} |")
    return "\n".join(lines)


def verdict(sizes: Sizes, num_ranks: int, memory_bytes: int) -> list[str]:
    """Which way is enough on so many ranks of so much memory, and the lines of a script for it.

    Args:
        sizes: How large model, optimizer and batch are.
        num_ranks: How many there are.
        memory_bytes: What each has.
    """
    note = "" if sizes.num_samples else ", without activations, which were not counted"
    lines: list[str] = []
    for row in _ways(sizes, num_ranks):
        if row.total <= memory_bytes:
            lines.append(f"{row.way} is enough: it needs {_size(row.total)} of {_size(memory_bytes)} of memory{note}.")
            return [*lines, *(f"    {line}" for line in row.lines)]
        lines.append(f"{row.way} needs {_size(row.total)} of {_size(memory_bytes)} of memory: it is not enough.")
    least = footprint(sizes, "FSDP2", num_ranks)
    if least.activations > memory_bytes / 2:
        smaller = "take a smaller batch, or use" if sizes.num_samples > 1 else "use"
        lines.append(
            f"{least.activations / least.total:.0%} of {least.way} are activations, which none of these divides: "
            f"{smaller} torch.utils.checkpoint, which computes them twice."
        )
        return lines
    while (num_ranks := 2 * num_ranks) <= _MOST_RANKS:
        for row in _ways(sizes, num_ranks):
            if row.total <= memory_bytes:
                return [*lines, f"{row.way} is enough from {num_ranks:,} ranks on."]
    return [
        *lines,
        "No number of ranks makes one of these enough: a unit that is gathered must fit. Divide the model into smaller "
        "blocks, or inside layers (tensor parallelism) or between them (torch.distributed.pipelining).",
    ]


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"
