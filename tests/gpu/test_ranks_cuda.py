"""Two ranks with their tensors on GPUs, over NCCL and over Gloo, against one process, the reference and torch's DDP."""

from __future__ import annotations

import contextlib
import copy
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

import evenstep
from evenstep.errors import NonFiniteError
from evenstep.testing import RankPool
from evenstep.transport import fallback
from tests.commands import call
from tests.gpu.sharing import device_of, never_waiting, on_one_gpu, world_over
from tests.procs.replica.test_engine import random_windows

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use"),
    pytest.mark.timeout(180),
]
TRANSPORTS = pytest.mark.parametrize("transport", ["nccl", "gloo"])


@pytest.fixture(scope="module")
def gpu_ranks() -> Iterator[RankPool]:
    with RankPool(device=device_of(2)) as pool:
        pool.run(threading.active_count, 2)  # so that they are there before the first test looks who is
        yield pool


def double_net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def conv_net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 4),
    )


def batch_of(world: evenstep.World, step: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Another one on every rank; the same on CPU and GPU."""
    generator = torch.Generator().manual_seed(step * 100 + world.rank)
    return torch.randn(shape, dtype=dtype, generator=generator).to(world.device)


# ---------------------------------------------------------------------- the engine


def windows(transport: str, seed: int) -> int:
    with world_over(transport) as world:
        return random_windows(seed, 8, 5, world)


@TRANSPORTS
def test_random_windows_equal_the_reference(gpu_ranks: RankPool, fresh_seed: int, transport: str) -> None:
    assert gpu_ranks.run(windows, 2, transport, fresh_seed, timeout_s=150) == [40] * 2


HOOKS: dict[str, Any] = {
    "none": None,
    "allreduce": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
    "powerSGD": powerSGD_hook.powerSGD_hook,
}


def trained_as_torchs(transport: str, hook: str, amp: bool) -> float:
    """The largest difference between parameters after steps with our class and with torch's over NCCL."""
    with world_over(transport) as world:
        models: list[Any] = [
            evenstep.DistributedDataParallel(conv_net(), bucket_cap_mb=1e-3, world=world),
            TorchDistributedDataParallel(conv_net().to(world.device), bucket_cap_mb=1),
        ]
        scalers = [torch.amp.GradScaler("cuda", enabled=amp, init_scale=2.0**10) for _ in models]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in models]
        if HOOKS[hook] is not None:
            for model in models:
                state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2) if hook == "powerSGD" else None
                model.register_comm_hook(state, HOOKS[hook])
        for step in range(5):
            x = batch_of(world, step, 4, 3, 8, 8, dtype=torch.float32)
            for model, scaler, optimizer in zip(models, scalers, optimizers, strict=True):
                with torch.autocast("cuda", torch.float16, enabled=amp):
                    loss = model(x).square().mean()
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        pairs = zip(*(model.parameters() for model in models), strict=True)
        largest = max(float((a - b).abs().max()) for a, b in pairs)
        del pairs, model, models  # torch's reducer may hang when it goes after its process group
        return largest


@TRANSPORTS
@pytest.mark.parametrize(("hook", "amp"), [("none", False), ("none", True), ("allreduce", False), ("fp16", True)])
def test_steps_are_those_of_torchs_ddp(gpu_ranks: RankPool, transport: str, hook: str, amp: bool) -> None:
    differences = gpu_ranks.run(trained_as_torchs, 2, transport, hook, amp, timeout_s=120)
    assert max(differences) < (5e-3 if amp else 1e-5)


@pytest.mark.parametrize(("hook", "at_most"), [("bf16", 5e-3), ("powerSGD", 1e-4)])
def test_torchs_hooks_for_nccl(gpu_ranks: RankPool, hook: str, at_most: float) -> None:
    assert max(gpu_ranks.run(trained_as_torchs, 2, "nccl", hook, False, timeout_s=120)) < at_most


def steps_without_waiting(is_sharded: bool, is_tensor: bool) -> None:
    with world_over("nccl") as world:
        model = evenstep.DistributedDataParallel(double_net(), bucket_cap_mb=1e-3, world=world)
        optimizer: Any
        if is_sharded:
            optimizer = evenstep.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        weight = torch.tensor(4.0, device=world.device) if is_tensor else 4
        x = batch_of(world, 0, 4, 8)
        for step in range(6):
            with never_waiting() if step >= 3 else contextlib.nullcontext():
                model.backward(model(x).square().mean(), weight=weight)
                evenstep.clip_grad_norm_(optimizer, 1.0)
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("is_tensor", [False, True])
def test_a_step_over_nccl_never_waits_for_the_device(gpu_ranks: RankPool, is_sharded: bool, is_tensor: bool) -> None:
    gpu_ranks.run(steps_without_waiting, 2, is_sharded, is_tensor)


def compiled(transport: str, backend: str) -> None:
    with world_over(transport) as world:
        torch._dynamo.reset()
        model = evenstep.DistributedDataParallel(double_net(), bucket_cap_mb=1e-3, world=world)
        run: Any = torch.compile(model, backend=backend)
        one = double_net().to(world.device)
        for step in range(3):
            xs = [
                torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(9 * step + r))
                for r in range(2)
            ]
            model.backward(run(xs[world.rank].to(world.device)).square().mean(), weight=4)
            one(torch.cat(xs).to(world.device)).square().mean().backward()
            for a, b in zip(model.parameters(), one.parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-12)
            model.zero_grad()
            one.zero_grad()


@TRANSPORTS
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_compiled_model(gpu_ranks: RankPool, transport: str, backend: str) -> None:
    gpu_ranks.run(compiled, 2, transport, backend, timeout_s=150)


# ---------------------------------------------------------------------- SyncBatchNorm


def normalise(transport: str) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()

    with world_over(transport) as world:
        net, plain = evenstep.SyncBatchNorm.convert_sync_batchnorm(make()), make().to(world.device)
        model = evenstep.DistributedDataParallel(net, world=world)
        whole = torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(world.device)
        for cuts in ([0, 2, 5], [0, 0, 5]):
            mine = whole[cuts[world.rank] : cuts[world.rank + 1]]
            model.backward(model(mine).square().mean(), weight=len(mine))
            plain(whole).square().mean().backward()
            for a, b in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-10)
            for a, b in zip(model.buffers(), plain.buffers(), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
            model.zero_grad()
            plain.zero_grad()


@TRANSPORTS
def test_batches_are_normalised_over_ranks(gpu_ranks: RankPool, transport: str) -> None:
    gpu_ranks.run(normalise, 2, transport)


# ---------------------------------------------------------------------- the step


def sharded(transport: str, options: dict[str, Any], half: bool) -> None:
    """As one process's AdamW on the whole batch; the state dict goes into it, too."""
    with world_over(transport) as world:
        dtype, reduce_dtype = (torch.bfloat16, torch.float32) if half else (torch.float64, None)
        model = evenstep.DistributedDataParallel(double_net().to(dtype), bucket_cap_mb=1e-3, world=world)
        optimizer = evenstep.ShardedOptimizer(
            model, torch.optim.AdamW, lr=0.01, master_weights=half, reduce_dtype=reduce_dtype, **options
        )
        one = double_net().to(world.device)
        with torch.no_grad():
            for a, b in zip(one.parameters(), model.parameters(), strict=True):
                a.copy_(b)
        plain = torch.optim.AdamW(one.parameters(), lr=0.01)
        for step in range(5):
            xs = [
                torch.randn(3 + r, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step * 2 + r))
                .to(dtype)
                .double()
                for r in range(2)
            ]
            mine = xs[world.rank].to(world.device, dtype)
            model.backward(model(mine).square().mean(), weight=len(mine))
            norm = evenstep.clip_grad_norm_(optimizer, 0.3)
            one(torch.cat(xs).to(world.device)).square().mean().backward()
            expected = nn.utils.clip_grad_norm_(one.parameters(), 0.3)
            if not half:
                torch.testing.assert_close(norm.double(), expected, rtol=1e-9, atol=0)
            optimizer.step()
            plain.step()
            optimizer.zero_grad()
            plain.zero_grad()
        tolerance = {"rtol": 0.05, "atol": 0.02} if half else {"rtol": 1e-10, "atol": 1e-12}
        for a, b in zip(model.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(a.double(), b, **tolerance)
        state = optimizer.state_dict()
        if not half:
            copied = torch.optim.AdamW(one.parameters(), lr=0.01)
            copied.load_state_dict(copy.deepcopy(state))
            for a, b in zip(copied.state.values(), plain.state.values(), strict=True):
                torch.testing.assert_close(a["exp_avg_sq"], b["exp_avg_sq"], rtol=1e-9, atol=1e-15)


@TRANSPORTS
@pytest.mark.parametrize(
    ("options", "half"),
    [({}, False), ({"shard_gradients": True}, False), ({}, True)],
    ids=["stage 1", "stage 2", "bfloat16"],
)
def test_a_sharded_step_is_that_of_one_process(
    gpu_ranks: RankPool, transport: str, options: dict[str, Any], half: bool
) -> None:
    gpu_ranks.run(sharded, 2, transport, options, half)


def scaled(transport: str, is_sharded: bool) -> tuple[int, float]:
    """Steps that were left out, and the scale that remains, where one rank's loss overflows once."""
    with world_over(transport) as world:
        model = evenstep.DistributedDataParallel(double_net().float(), world=world)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
        if is_sharded:
            optimizer = evenstep.ShardedOptimizer(model, torch.optim.SGD, lr=0.01)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**8, growth_interval=1000)
        num_left_out = 0
        for step in range(4):
            x = batch_of(world, step, 4, 8, dtype=torch.float32)
            loss = model(x).square().mean() * (torch.inf if step == 2 and world.rank == 1 else 1.0)
            model.backward(scaler.scale(loss), weight=4, scaler=scaler)
            before = [p.detach().clone() for p in model.parameters()]
            scaler.unscale_(optimizer)
            evenstep.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            num_left_out += all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            assert all(p.isfinite().all() for p in model.parameters())
        return num_left_out, scaler.get_scale()


@TRANSPORTS
@pytest.mark.parametrize("is_sharded", [False, True])
def test_an_overflow_on_one_rank_leaves_out_the_step_of_all(
    gpu_ranks: RankPool, transport: str, is_sharded: bool
) -> None:
    assert gpu_ranks.run(scaled, 2, transport, is_sharded) == [(1, 2.0**7)] * 2


def not_finite(transport: str, on_nonfinite: str) -> list[str]:
    with world_over(transport) as world:
        model = evenstep.DistributedDataParallel(double_net(), world=world, on_nonfinite=on_nonfinite)
        told = []
        for step in range(2):
            x = batch_of(world, step, 4, 8) * (torch.nan if step == 1 and world.rank == 1 else 1.0)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    model.backward(model(x).square().mean(), weight=4)
                except NonFiniteError as error:
                    told.append(str(error))
            told += [str(each.message) for each in caught]
            if on_nonfinite == "skip":
                assert (next(model.parameters()).grad is None) == (step == 1)
            model.zero_grad()
        return told


@TRANSPORTS
@pytest.mark.parametrize("on_nonfinite", ["skip", "raise"])
def test_not_a_number_on_one_rank(gpu_ranks: RankPool, transport: str, on_nonfinite: str) -> None:
    told = gpu_ranks.run(not_finite, 2, transport, on_nonfinite)
    assert any("rank 1" in each and "'4.weight'" in each for each in told[0]), told
    if on_nonfinite == "raise":
        assert told[0] == told[1]


# ---------------------------------------------------------------------- diagnosis


RAISES = """\
import os, time
from tests.gpu.sharing import on_one_gpu
on_one_gpu("{transport}")
import evenstep, torch

with evenstep.init(device="{device}", transport="{transport}") as world:
    model = evenstep.DistributedDataParallel(torch.nn.Linear(64, 64))
    for step in range(1000):
        model.backward(model(torch.ones(4, 64, device=world.device)).sum(), weight=4)
        if step == 20 and world.rank == 1:
            open("failed", "w").close()
            {fault}
"""


@TRANSPORTS
@pytest.mark.parametrize(
    ("fault", "words"), [("raise KeyError('boom')", "KeyError: 'boom'"), ("os.kill(os.getpid(), 9)", "SIGKILL")]
)
def test_who_fails_is_named_and_the_others_end(tmp_path: Path, transport: str, fault: str, words: str) -> None:
    device = device_of(2)
    script = RAISES.format(transport=transport, device=device, fault=fault)
    root = str(Path(__file__).parents[2])
    code, command = call(tmp_path, ["--nproc-per-node", "2", "--device", device, "script.py"], script, PYTHONPATH=root)
    assert code not in (0, None)
    assert words in command.stderr
    assert "rank 1" in command.stderr
    took_s = time.time() - (tmp_path / "failed").stat().st_mtime
    assert took_s < 5, f"nobody waits for NCCL: {command.stderr}"


# ---------------------------------------------------------------------- what a user asks of the world


def asked(transport: str) -> None:
    with world_over(transport) as world:
        mine = torch.arange(3.0, device=world.device) + world.rank
        assert world.mean(mine).tolist() == [0.5, 1.5, 2.5]
        assert world.mean(mine, weight=torch.tensor(world.rank, device=world.device)).tolist() == [1.0, 2.0, 3.0]
        assert world.gather(mine).flatten().tolist() == [0.0, 1.0, 2.0, 1.0, 2.0, 3.0]
        assert world.broadcast_object("rank 1's" if world.rank else None, src=1) == "rank 1's"
        assert world.exchange(world.rank) == [0, 1]
        world.barrier()


@TRANSPORTS
def test_the_worlds_own_collectives(gpu_ranks: RankPool, transport: str) -> None:
    gpu_ranks.run(asked, 2, transport)


def under_a_default_device(transport: str) -> None:
    with world_over(transport) as world, torch.device(world.device):
        model = evenstep.DistributedDataParallel(double_net(), world=world)
        data = torch.utils.data.TensorDataset(torch.arange(32.0, device="cpu").view(4, 8).double())
        loader = evenstep.DataLoader(data, global_batch_size=2, shuffle=True, world=world)
        for (x,) in loader:
            assert x.is_cuda
            model.backward(model(x).square().mean(), weight=len(x))
            model.zero_grad()


@TRANSPORTS
def test_under_a_default_device(gpu_ranks: RankPool, transport: str) -> None:
    gpu_ranks.run(under_a_default_device, 2, transport)


# ---------------------------------------------------------------------- the backend


def under_the_backend() -> dict[str, int]:
    """torch's DDP and FSDP2 on GPUs, in a group that carries the CPU's tensors through shared memory."""
    from torch.distributed.fsdp import fully_shard

    from evenstep import world as worlds

    before = worlds.initialised()
    if before is not None:
        before.close()
    on_one_gpu("nccl")
    dist.init_process_group("cpu:evenstep,cuda:nccl")
    try:
        rank = dist.get_rank()
        device = torch.device("cuda", 0 if torch.cuda.device_count() == 1 else rank)
        torch.cuda.set_device(device)
        fallback.reset()
        for where in ("cpu", device):
            value = torch.full((1000,), float(rank + 1), device=where)
            dist.all_reduce(value)
            assert value.tolist() == [3.0] * 1000
        one = double_net().to(device)
        ddp, fsdp = TorchDistributedDataParallel(double_net().to(device)), double_net().to(device)
        for layer in fsdp:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(fsdp)
        models = (one, ddp, fsdp)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in models]
        for step in range(3):
            xs = [
                torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(7 * step + r)).to(device)
                for r in range(2)
            ]
            for model, optimizer in zip(models, optimizers, strict=True):
                model(torch.cat(xs) if model is one else xs[rank]).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        for a, b, c in zip(one.parameters(), ddp.parameters(), fsdp.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(a, c.full_tensor(), rtol=1e-10, atol=1e-12)
        return fallback.counts()
    finally:
        dist.destroy_process_group()


def test_the_backend_beside_nccl(gpu_ranks: RankPool) -> None:
    assert gpu_ranks.run(under_the_backend, 2, timeout_s=120) == [{}] * 2


# ---------------------------------------------------------------------- checkpoints


def saved(transport: str, directory: str) -> list[Tensor]:
    with world_over(transport) as world:
        model = evenstep.DistributedDataParallel(double_net(), world=world)
        optimizer = evenstep.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01)
        with evenstep.Checkpointer(directory, model=model, optimizer=optimizer, world=world) as checkpointer:
            for step in range(3):
                model.backward(model(batch_of(world, step, 4, 8)).square().mean(), weight=4)
                optimizer.step()
                optimizer.zero_grad()
                checkpointer.step()
            checkpointer.save()
        return [p.detach().cpu() for p in model.parameters()]


@TRANSPORTS
def test_a_checkpoint_of_gpus_loads_on_a_cpu(gpu_ranks: RankPool, tmp_path: Path, transport: str) -> None:
    expected = gpu_ranks.run(saved, 2, transport, str(tmp_path))[0]
    world = evenstep.World.alone(device="cpu")
    model = evenstep.DistributedDataParallel(double_net(1), world=world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with evenstep.Checkpointer(str(tmp_path), model=model, optimizer=optimizer, world=world) as checkpointer:
        assert checkpointer.resume() == 3
    for a, b in zip(model.parameters(), expected, strict=True):
        assert torch.equal(a, b)
    assert all(float(state["step"]) == 3 for state in optimizer.state.values())
