"""How fast programs that aren't ours train over the backend "evenstep", beside Gloo.

    python benchmarks/backend.py                     # 2 CPU ranks, the GPT
    python benchmarks/backend.py --programs DDP FSDP2 --models "wide MLP" GPT --json result.json

Of evenstep the programs know the name of the backend, and no more:

    bare        the module itself, nothing is exchanged: its ratio shows how much of the others' is chance
    DDP         torch's DistributedDataParallel as its tutorials write it
    FSDP2       torch's fully_shard, of each of the model's parts (for the GPT its layers)
    tensor      torch's parallelize_module: the two linear layers of each of the GPT's layers are divided over ranks
    compiled    a function under torch.compile: a functional reduce-scatter and all-gather of as many numbers as the
                model has parameters, and no training

All train with torch's fused AdamW. Each program runs in two groups of rank processes, one per backend. Blocks of
equally many steps take turns, and the other group sleeps meanwhile. A block is timed from a barrier to the end of its
last step, on the slowest rank. "Gloo/bare" is the most that a backend could gain, where ranks compute what bare does.

Before that each pair trains for some steps from the same seed, and its parameters are compared: they have the same
bits on two ranks. On more ranks Gloo adds in another order, and AdamW makes of a gradient that is almost zero a step
of its own; there they are equal within 1e-3.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from measuring import alternate, describe_machine, markdown, parser_of, quartiles, ratios, spread, write_json
from models import CASES, Case, shard_parts
from torch import Tensor, nn

from evenstep.testing import RankPool

BACKENDS = ("gloo", "evenstep")
NUM_COMPARED = 5  # steps, before the parameters are compared
START_S = 300.0  # for torch.compile and the like


@dataclass(frozen=True)
class Training:
    """A program that has been set up.

    Attributes:
        step: Trains once. Collective.
        result: What it has come to, whole, to be compared. Collective.
    """

    step: Callable[[], object]
    result: Callable[[], list[Tensor]]


@dataclass(frozen=True)
class Program:
    """One of the programs.

    Attributes:
        build: Sets it up in the default group, which exists. Collective.
        computes_as_bare: Each rank computes what `bare` does.
        only_for: Models that it is written for; none: all.
    """

    build: Callable[[Case], Training]
    computes_as_bare: bool = True
    only_for: tuple[str, ...] = ()


# ---------------------------------------------------------------------- the programs, on a rank


def draw(case: Case, *, by_rank: bool = True) -> tuple[Tensor, Tensor]:
    """A batch: each rank its own, or all the same."""
    torch.manual_seed(1 + (dist.get_rank() if by_rank else 0))
    return case.draw()


def train(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Training:
    """Steps on one batch."""

    def step() -> None:
        case.loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Training(step, lambda: whole(model))


def whole(model: nn.Module) -> list[Tensor]:
    """A model's parameters, also those that are divided over ranks. Collective."""
    return [getattr(each, "full_tensor", lambda each=each: each)().detach() for each in model.parameters()]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """torch's fused one; it doesn't take divided and whole parameters in the same group."""
    by_kind: dict[type, list[Tensor]] = {}
    for each in model.parameters():
        by_kind.setdefault(type(each.data), []).append(each)
    return torch.optim.AdamW([{"params": each} for each in by_kind.values()], lr=1e-4, fused=True)


def build_bare(case: Case) -> Training:
    """The module itself."""
    model = case.build()
    return train(case, model, adamw(model), *draw(case, by_rank=False))


def build_ddp(case: Case) -> Training:
    """torch's DDP."""
    model = nn.parallel.DistributedDataParallel(case.build())
    return train(case, model, adamw(model), *draw(case))


def build_fsdp(case: Case) -> Training:
    """torch's FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh

    model = case.build()
    shard_parts(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    return train(case, model, adamw(model), *draw(case))


def build_tensor(case: Case) -> Training:
    """torch's tensor parallelism."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, mesh = case.build(), init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.modules():
        if isinstance(layer, nn.TransformerEncoderLayer):
            parallelize_module(layer, mesh, {"linear1": ColwiseParallel(), "linear2": RowwiseParallel()})
    return train(case, model, adamw(model), *draw(case, by_rank=False))


def build_compiled(case: Case) -> Training:
    """Collectives that are part of a compiled graph."""
    import torch.distributed._functional_collectives as functional

    # torch 2.13 warns of the names that torch 2.11 knows.
    gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
    scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor
    size, group = dist.get_world_size(), dist.group.WORLD
    assert group is not None
    name = group.group_name
    numel = sum(each.numel() for each in case.build().parameters()) // size * size
    torch.manual_seed(1 + dist.get_rank())
    values, got = torch.randn(numel), torch.empty(0)

    @torch.compile
    def exchange(values: Tensor) -> Tensor:
        return gather(scatter(values * 2, "sum", 0, name) / size, 0, name) + 1

    def step() -> None:
        nonlocal got
        got = exchange(values)

    return Training(step, lambda: [got])


PROGRAMS = {
    "bare": Program(build_bare),
    "DDP": Program(build_ddp),
    "FSDP2": Program(build_fsdp),
    "tensor": Program(build_tensor, computes_as_bare=False, only_for=("GPT",)),
    "compiled": Program(build_compiled, computes_as_bare=False),
}

_running: list[Training] = []  # of this rank process: the one program


def begin(program: str, model: str, backend: str, file: str) -> None:
    """On a rank: set a program up, train for some steps, and write to a file what they have come to."""
    dist.init_process_group(backend)
    torch.manual_seed(0)
    training = PROGRAMS[program].build(CASES[model])
    for _ in range(NUM_COMPARED):
        training.step()
    result = training.result()
    if dist.get_rank() == 0:
        torch.save(result, file)
    _running.append(training)


def time_block(num_steps: int) -> float:
    """On a rank: seconds per step."""
    step = _running[0].step
    dist.barrier()
    started = time.perf_counter()
    for _ in range(num_steps):
        step()
    return (time.perf_counter() - started) / num_steps


def end() -> None:
    """On a rank: let go of the group."""
    _running.clear()
    dist.destroy_process_group()


# ---------------------------------------------------------------------- the two sides


def measure(program: str, model: str, num_ranks: int, blocks: int, block_s: float) -> dict[str, list[float]]:
    """Seconds per step on the slowest rank, by backend, block by block.

    Raises:
        SystemExit: The two have computed different things.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        pools = {backend: stack.enter_context(RankPool(max_ranks=num_ranks)) for backend in BACKENDS}
        files = {backend: f"{folder}/{backend}.pt" for backend in BACKENDS}
        for backend, pool in pools.items():
            pool.run(begin, num_ranks, program, model, backend, files[backend], timeout_s=START_S)
        problem = explain_difference(*(torch.load(each) for each in files.values()), num_ranks=num_ranks)
        if problem is not None:
            raise SystemExit(f"{program} of {model} on {num_ranks} ranks: {problem}")

        def run(backend: str, num_steps: int) -> float:
            return max(pools[backend].run(time_block, num_ranks, num_steps, timeout_s=START_S))

        num_steps = max(3, round(block_s / run("gloo", 5)))
        seconds = alternate(BACKENDS, blocks, lambda backend: run(backend, num_steps))
        for pool in pools.values():
            pool.run(end, num_ranks)
        return seconds


def explain_difference(one: Sequence[Tensor], other: Sequence[Tensor], *, num_ranks: int) -> str | None:
    """What is wrong with two results; None if they are what they should be. Pure."""
    if len(one) != len(other):
        return f"{len(one)} tensors over Gloo, {len(other)} over evenstep"
    tolerance = 0.0 if num_ranks <= 2 else 1e-3
    for index, (a, b) in enumerate(zip(one, other, strict=True)):
        if not torch.allclose(a, b, rtol=0.0, atol=tolerance):
            return f"tensor {index} differs by {float((a - b).abs().max()):.3g} between Gloo and evenstep"
    return None


def table(num_ranks: int, results: dict[str, dict[str, dict[str, list[float]]]]) -> str:
    """For people, and for the documentation. Pure.

    Args:
        num_ranks: Ranks.
        results: By model and program, what `measure` returns.
    """
    rows = []
    for model, by_program in results.items():
        for program, seconds in by_program.items():
            gloo, ours = (quartiles(seconds[backend])[1] for backend in BACKENDS)
            most = ""
            if "bare" in by_program and program != "bare" and PROGRAMS[program].computes_as_bare:
                most = f"{gloo / quartiles(by_program['bare']['gloo'])[1]:.2f}"
            quotient = spread(ratios(seconds["gloo"], seconds["evenstep"]))
            rows.append([model, program, f"{gloo * 1e3:.2f}", f"{ours * 1e3:.2f}", quotient, most])
    columns = "model | program | Gloo, ms | evenstep, ms | Gloo/evenstep | Gloo/bare"
    return f"{num_ranks} ranks, results equal\n\n{markdown(columns, rows, 2)}"


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--programs", nargs="+", choices=list(PROGRAMS), default=list(PROGRAMS))
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=["GPT"], help="which of the five")
    parser.add_argument("--blocks", type=int, default=15, help="of each side")
    parser.add_argument("--block-seconds", type=float, default=0.5, help="about how long a block of Gloo's takes")
    options = parser.parse_args()
    print(describe_machine(), flush=True)
    results: dict[str, dict[str, dict[str, list[float]]]] = {}
    for model in options.models:
        for program in options.programs:
            if model not in (PROGRAMS[program].only_for or CASES):
                print(f"{program} is left out: it isn't written for {model}.", flush=True)
                continue
            measured = measure(program, model, options.ranks, options.blocks, options.block_seconds)
            results.setdefault(model, {})[program] = measured
    print(f"\n{table(options.ranks, results)}")
    write_json(options.json, ranks=options.ranks, seconds=results)


if __name__ == "__main__":
    main()
