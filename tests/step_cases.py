"""What tests/procs/replica/test_step_combinations.py draws: a model, how it is trained, and every step of it.

All of it comes from a seed before anybody computes, so that all ranks and the reference know everybody's samples.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from evenstep.replica.batches import split

FEATURES = 5
HALF = (torch.bfloat16, torch.float16)
EXPONENTS = {"norm": 2.0, "sum": 1.0, "inf": float("inf")}  # by how norms are clipped
# NAdam isn't one: it keeps a product in 32 bits, which loading a state makes one of 64.
_KINDS = ["SGD", "AdamW", "Adam", "Adagrad", "RAdam", "Adamax", "RMSprop", "Rprop", "ASGD", "Adadelta"]


@dataclass(frozen=True)
class Case:
    """How a model is trained; the same on all ranks.

    Attributes:
        sizes: Numbers of ranks, one after the other; the second goes on from the first's state.
        way: Of the optimizer: "plain"; "sharded"; "several", which is a sharded one and a plain one.
        sharded: Arguments of the sharded one.
        scaler: Whether the GradScaler is enabled; None: there is none.
        window: What surrounds backward passes: "single", "accumulate", "no_sync" or "microbatches".
    """

    sizes: tuple[int, int]
    transport: str
    model_seed: int
    num_layers: int
    frozen_layer: int | None
    bucket_cap_mb: float
    dtype: torch.dtype
    autocast: torch.dtype | None
    is_complex: bool
    kind: str
    options: dict[str, Any]
    way: str
    sharded: dict[str, Any]
    model_reduce_dtype: torch.dtype | None
    on_nonfinite: str | None
    scaler: bool | None
    clip: str | None
    weighted: bool
    window: str
    has_late_group: bool
    has_schedule: bool
    joins: bool

    def __str__(self) -> str:
        told = {field.name: getattr(self, field.name) for field in fields(self)}
        return ", ".join(f"{name}={value}" for name, value in told.items() if value not in (None, {}, False))

    @property
    def is_master(self) -> bool:
        """Whether parameters of 16 bits are stepped in float32."""
        return self.dtype in HALF and bool(self.sharded.get("master_weights"))

    @property
    def step_dtype(self) -> torch.dtype:
        """Of what is stepped."""
        return torch.float32 if self.is_master else self.dtype

    @property
    def eps(self) -> float:
        """Of the coarsest numbers that gradients pass through."""
        added_in = self.sharded.get("reduce_dtype") or self.model_reduce_dtype or self.dtype
        return max(torch.finfo(each).eps for each in (self.dtype, added_in, self.autocast or self.dtype))

    @property
    def is_exact(self) -> bool:
        """Whether everything is computed in float64."""
        return self.eps == torch.finfo(torch.float64).eps

    @property
    def skips(self) -> bool:
        """Whether a gradient that isn't finite makes all p.grad None. The engine is told of a scaler by `backward`."""
        return self.on_nonfinite == "skip" and not (self.scaler and self.weighted)


@dataclass(frozen=True)
class Part:
    """One backward pass: samples, weight, layers that are used.

    Attributes:
        is_twice: The loss goes through two calls of the model.
        asks: `torch.autograd.grad` goes through the model first.
    """

    x: Tensor
    weight: float
    use: list[int]
    is_twice: bool = False
    asks: bool = False

    def counts(self, case: Case) -> bool:
        """Whether it has a gradient."""
        return len(self.x) > 0 and (not case.weighted or self.weight > 0)


@dataclass(frozen=True)
class Window:
    """What ends with a reduction.

    Attributes:
        parts: By rank; none of a rank that has left its loop.
        wholes: By rank, of what `microbatches` makes the parts, and how many it is asked for.
        poison: (rank, element): what the last pass of a rank makes infinite.
    """

    parts: list[list[Part]]
    wholes: list[tuple[Tensor, int]]
    poison: tuple[int, int] | None


@dataclass(frozen=True)
class Step:
    """Windows, the optimizers' step, and what comes behind it.

    Attributes:
        active: Ranks that take part.
        unscales: `scaler.unscale_` is called, and not left to `scaler.step`.
        zeroed_by: "model", "optimizers", or "nobody".
        loses: By rank, how it begins a window that `zero_grad` drops: "accumulated", "a loop left early", or "".
        lost: The samples of that window.
        writes: How other values come into all parameters behind the step: "load", "replace", "in place", or "".
        reloads: State dicts of model and optimizers are taken and loaded, behind that.
        adds_group: A group of parameters is added to the optimizer.
    """

    windows: list[Window]
    active: list[int]
    unscales: bool
    loses: list[str]
    lost: Tensor
    zeroed_by: str
    set_to_none: bool
    writes: str
    reloads: bool
    adds_group: bool


def draw_case(chance: random.Random) -> Case:
    """A combination that makes sense."""
    transport = chance.choice(["shared memory", "shared memory", "gloo"])
    least = 2 if transport == "gloo" else 1
    dtype = chance.choice([torch.float64] * 6 + [torch.float32] * 3 + [*HALF])
    autocast = chance.choice([None, *HALF]) if dtype is torch.float32 else None
    way = chance.choice(["plain"] * 3 + ["sharded"] * 4 + ["several"] * 2)
    is_complex = dtype is torch.float64 and chance.random() < 0.3
    reduce_dtype = chance.choice([None] * 4 + [torch.float64, torch.float32, *HALF])
    tells_model = way not in ("sharded", "several") or chance.random() < 0.4
    sharded = _draw_sharded(chance, dtype) if way in ("sharded", "several") else {}
    if not tells_model and reduce_dtype is not None:
        sharded["reduce_dtype"] = reduce_dtype
        sharded.pop("elementwise", None)
    has_float16 = torch.float16 in (dtype, autocast, reduce_dtype)
    # What is rounded may be next to nothing of what was added up; a step that divides by it would show that.
    is_rounded = {dtype, reduce_dtype} & set(HALF) or (dtype is torch.float64 and reduce_dtype is torch.float32)
    kind = "SGD" if is_rounded or autocast else chance.choice(_KINDS if dtype is torch.float64 else _KINDS[:2])
    # torch's scalers refuse complex gradients, and float16 ones; what has been scaled might overflow those, and sums.
    scaler = None if is_complex else chance.choice([None, None, torch.float16 not in (dtype, reduce_dtype), False])
    clips = [None, None, "norm", "group", "inf", "sum", *["value"] * (not is_complex)]
    num_layers = chance.randint(1, 4)
    return Case(
        sizes=(chance.randint(least, 4), chance.randint(least, 4)),
        transport=transport,
        model_seed=chance.randrange(1 << 30),
        num_layers=num_layers,
        frozen_layer=chance.randrange(num_layers) if num_layers > 1 and chance.random() < 0.25 else None,
        bucket_cap_mb=chance.choice([2e-4, 1e-3, 25]),
        dtype=dtype,
        autocast=autocast,
        is_complex=is_complex,
        kind=kind,
        # Up the loss grows without end, and with it what is rounded to few bits.
        options=_draw_options(chance, kind, dtype, may_climb=not (has_float16 or is_rounded)),
        way=way,
        sharded=sharded,
        model_reduce_dtype=reduce_dtype if tells_model else None,
        on_nonfinite=chance.choice([None, "warn", "skip", "skip"]),
        scaler=scaler,
        clip=chance.choice(clips),
        weighted=chance.random() < 0.6,
        window=chance.choice(["single", "accumulate", "no_sync", "microbatches"]),
        # Not with Adagrad, which makes the state of its first groups at once and of later ones with their first step.
        has_late_group=way == "sharded" and kind != "Adagrad" and chance.random() < 0.3,
        has_schedule=chance.random() < 0.5,
        joins=way == "plain" and chance.random() < 0.4,
    )


def _draw_sharded(chance: random.Random, dtype: torch.dtype) -> dict[str, Any]:
    likely = {
        "shard_gradients": 0.5,
        "master_weights": 0.7 if dtype in HALF else 0.1,
    }
    chosen = {name: True for name, how in likely.items() if chance.random() < how}
    # Else whole parameters belong to ranks, as where a step needs whole matrices.
    return chosen if chosen or chance.random() < 0.6 else {"elementwise": False}


def _draw_options(chance: random.Random, kind: str, dtype: torch.dtype, *, may_climb: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"lr": 0.05 if dtype in HALF else 0.01}  # so that a step is more than a rounding
    if dtype is torch.float32 and kind != "SGD":
        options["eps"] = 0.1  # or the sign of what is left of a sum would decide
    if kind == "SGD" and chance.random() < 0.6:
        options |= {"momentum": 0.9, "nesterov": chance.random() < 0.5}
    if kind in ("Adam", "AdamW") and chance.random() < 0.3:
        options["amsgrad"] = True
    if kind in ("Adam", "AdamW") and chance.random() < 0.2:
        options |= {"lr": torch.tensor(0.01), "foreach": False}
    elif chance.random() < 0.2:
        options["foreach"] = chance.random() < 0.5
    if chance.random() < 0.2 and kind != "Rprop" and may_climb:
        options["maximize"] = True
    return options


def draw_steps(chance: random.Random, case: Case, world_size: int, num_steps: int, *, adds_group: bool) -> list[Step]:
    """Steps of a number of ranks. In a join, until the last rank leaves."""
    num_mine = [chance.randint(1, num_steps) if case.joins else num_steps for _ in range(world_size)]
    steps = []
    for number in range(max(num_mine)):
        active = [rank for rank in range(world_size) if number < num_mine[rank]]
        # As in torch, what is left in p.grad of a plain window counts in the next one for the ranks that haven't left.
        keeps_nothing = case.joins and not case.weighted
        num_windows = 1 + (chance.random() < 0.3 and not keeps_nothing)
        # A poison is no output of the model's, and so may come first: what is left of a divided gradient is in its way
        # then, which is an error.
        may_poison = case.weighted or not (steps and steps[-1].zeroed_by == "nobody")
        is_poisoned = chance.random() < 0.25 and may_poison and (bool(case.scaler) or case.skips)
        windows = [
            _draw_window(chance, case, world_size, active, poisons=is_poisoned and index == 0)
            for index in range(num_windows)
        ]
        has_all_finite = all(window.poison is None for window in windows)
        loses = any(chance.random() < 0.1 for _ in range(2)) and not case.joins
        ways = [chance.choice(["", "accumulated", "a loop left early"]) for _ in range(world_size)]
        # Some of torch's foreach steps, such as that of SGD with nesterov, write to the gradients.
        may_keep = has_all_finite and not keeps_nothing and not case.options.get("foreach")
        steps.append(
            Step(
                windows,
                active,
                unscales=chance.random() < 0.7 or case.clip is not None,
                loses=ways if loses else [""] * world_size,
                lost=_draw_samples(chance, case, 6),
                zeroed_by=chance.choice(["model", "optimizers", "nobody" if may_keep else "model", "optimizers"]),
                set_to_none=chance.random() < 0.6,
                writes="" if case.joins or chance.random() < 0.8 else chance.choice(["load", "replace", "in place"]),
                reloads=chance.random() < 0.2 and not case.joins,
                adds_group=adds_group and number == 1,
            )
        )
    return steps


def _draw_samples(chance: random.Random, case: Case, num_rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
    wide = torch.float32 if case.dtype in HALF else case.dtype
    return torch.randn(num_rows, FEATURES, dtype=wide, generator=generator).to(case.dtype)


def _draw_window(chance: random.Random, case: Case, world_size: int, active: list[int], *, poisons: bool) -> Window:
    def layers() -> list[int]:
        return [chance.randrange(case.num_layers) for _ in range(chance.randint(0, case.num_layers))]

    used_by_all = layers() if chance.random() < 0.5 else None
    parts: list[list[Part]] = []
    wholes = []
    for rank in range(world_size):
        use = layers() if used_by_all is None else used_by_all
        num_parts = 1 if case.window == "single" else chance.randint(1, 3)
        whole = _draw_samples(chance, case, chance.choice([0, 1, 3, 4]) if case.window == "microbatches" else 0)
        if case.window == "microbatches":
            xs = split(whole, num_parts, 0)
        else:
            sizes = [0, 1, 2, 4] if case.weighted else [1, 2, 4]
            xs = [_draw_samples(chance, case, chance.choice(sizes)) for _ in range(num_parts)]
        weights = [float(len(x)) if chance.random() < 0.9 else 0.0 for x in xs]
        calls = [(chance.random() < 0.2, chance.random() < 0.1) for _ in xs]
        mine = [Part(x, weight, use, *call) for x, weight, call in zip(xs, weights, calls, strict=True)]
        parts.append(mine if rank in active else [])
        wholes.append((whole, num_parts))
    culprit, element = chance.choice(active), chance.randrange(FEATURES * FEATURES)
    hits = poisons and bool(parts[culprit]) and parts[culprit][-1].counts(case)
    return Window(parts, wholes, (culprit, element) if hits else None)


class Branches(nn.Module):
    """Layers of which a call names the ones it uses; a number, a matrix that lies otherwise in memory, waves."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(case.model_seed)
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(case.num_layers))
        self.turned = nn.Parameter(torch.randn(FEATURES, FEATURES).t())
        self.to(case.dtype)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=case.dtype))
        if case.is_complex:
            self.waves = nn.Parameter(torch.randn(FEATURES, FEATURES, dtype=torch.complex128))
        if case.frozen_layer is not None:
            self.layers[case.frozen_layer].requires_grad_(False)

    def forward(self, x: Tensor, use: list[int]) -> Tensor:
        for index in use:
            x = torch.tanh(self.layers[index](x))
        if len(use) % 2:
            x = x @ self.turned
        if hasattr(self, "waves"):
            x = (x.to(torch.complex128) @ self.waves).abs()
        return x * self.scale


def loss_of(case: Case, model: nn.Module, part: Part) -> Tensor:
    """The mean over the samples of a part."""
    with torch.autocast("cpu", case.autocast) if case.autocast is not None else contextlib.nullcontext():
        out = model(part.x, part.use)
        if part.is_twice:
            out = out + model(part.x, part.use[::-1]).sin()
    return (out if out.dtype is torch.float64 else out.float()).square().mean()


def poison_of(module: nn.Module, element: int) -> Tensor:
    """A loss whose gradient is infinite in one element of one matrix, and which has no other."""
    turned: Any = module.turned
    return turned.reshape(-1)[element : element + 1].float().sum() * torch.inf


def groups_of(case: Case, module: nn.Module) -> tuple[list[dict[str, Any]], list[Tensor], list[Tensor]]:
    """(groups, parameters of a second optimizer, parameters of a group that comes later)."""
    named = {name: each for name, each in module.named_parameters() if each.requires_grad}
    late = [named.pop("scale")] if case.has_late_group else []
    second = [named.pop(name) for name in list(named) if case.way == "several" and name.startswith("layers.0")]
    matrices = [p for p in named.values() if p.dim() > 1]
    rest = [p for p in named.values() if p.dim() <= 1]
    decay = {} if case.kind == "Rprop" else {"weight_decay": 0.1}
    return [{"params": matrices, **decay}, {"params": rest}] if rest else [{"params": matrices}], second, late
