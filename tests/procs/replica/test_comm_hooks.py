"""torch's own communication hooks run unchanged, each one by its name."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

import evenstep
from evenstep.errors import ConfigurationError, UsageError
from tests.ranks import on_ranks

POWER_SGD_FULL_RANK = {"matrix_approximation_rank": 64, "start_powerSGD_iter": 2, "min_compression_rate": 0}


def make_hook(name):
    """(state, hook) of one of torch's, and how far its average may be from the true one."""
    group = dist.group.WORLD
    power = powerSGD_hook.PowerSGDState(group, **POWER_SGD_FULL_RANK)
    plain = powerSGD_hook.PowerSGDState(group, **{**POWER_SGD_FULL_RANK, "start_powerSGD_iter": 100})
    local = post_localSGD_hook.PostLocalSGDState(group, group, start_localSGD_iter=100)
    return {
        "allreduce_hook": (None, default_hooks.allreduce_hook, 1e-6),
        "fp16_compress_hook": (None, default_hooks.fp16_compress_hook, 2e-3),
        "bf16_compress_hook": (None, default_hooks.bf16_compress_hook, 2e-2),
        "fp16_compress_wrapper": (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), 2e-3),
        "bf16_compress_wrapper": (None, default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook), 2e-2),
        "powerSGD_hook": (power, powerSGD_hook.powerSGD_hook, 1e-4),
        "batched_powerSGD_hook": (plain, powerSGD_hook.batched_powerSGD_hook, 1e-6),
        "post_localSGD_hook": (local, post_localSGD_hook.post_localSGD_hook, 1e-6),
        "quantization_pertensor_hook": (group, quantization_hooks.quantization_pertensor_hook, 5e-2),
        "quantization_perchannel_hook": (group, quantization_hooks.quantization_perchannel_hook, 5e-2),
        "noop_hook": (None, debugging_hooks.noop_hook, None),
    }[name]


HOOKS = [
    "allreduce_hook",
    "fp16_compress_hook",
    "bf16_compress_hook",
    "fp16_compress_wrapper",
    "bf16_compress_wrapper",
    "powerSGD_hook",
    "batched_powerSGD_hook",
    "post_localSGD_hook",
    "noop_hook",
]


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


@pytest.mark.extended(beyond=18)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", HOOKS)
@on_ranks(2, 3, 4)
def test_a_hook_of_torchs_averages_as_it_promises(world, name, weighted):
    state, hook, tolerance = make_hook(name)
    model = evenstep.DistributedDataParallel(make_model(), bucket_cap_mb=5e-4, world=world)
    module = make_model()
    model.register_comm_hook(state, hook)
    for step in range(4):  # PowerSGD begins to compress in its third
        batches = [
            torch.randn(2 + r, 8, generator=torch.Generator().manual_seed(10 * step + r))
            for r in range(world.world_size)
        ]
        weights = [float(len(x)) if weighted else 1.0 for x in batches]
        loss = model(batches[world.rank]).square().mean()
        if weighted:
            model.backward(loss, weight=weights[world.rank])
        else:
            loss.backward()
        if tolerance is None:  # noop: every rank keeps its own gradient
            own = module(batches[world.rank]).square().mean()
            (own * (weights[world.rank] * world.world_size / sum(weights) if weighted else 1.0)).backward()
        else:
            losses = [module(x).square().mean() * w for x, w in zip(batches, weights, strict=True)]
            (torch.stack(losses).sum() / sum(weights)).backward()
        for a, b in zip(model.parameters(), module.parameters(), strict=True):
            scale = b.grad.abs().max().item()
            torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=(tolerance or 1e-6) * max(scale, 1e-3))
        model.zero_grad()
        module.zero_grad()


@on_ranks(4)
def test_post_local_sgd_averages_in_its_subgroup(world, fresh_seed):
    """post_localSGD_hook: from its second step on, gradients are averaged in pairs of ranks, and nowhere else."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    state = post_localSGD_hook.PostLocalSGDState(dist.group.WORLD, pairs[world.rank // 2], start_localSGD_iter=1)
    model, module = evenstep.DistributedDataParallel(make_model(), compare_every=0), make_model()
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    for step in range(3):
        batches = [
            torch.randn(3, 8, generator=torch.Generator().manual_seed(fresh_seed + 10 * step + r)) for r in range(4)
        ]
        model(batches[world.rank]).square().mean().backward()
        first = world.rank // 2 * 2
        shared = batches if step == 0 else batches[first : first + 2]
        torch.stack([module(x).square().mean() for x in shared]).mean().backward()
        for a, b in zip(model.parameters(), module.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)
        model.zero_grad()
        module.zero_grad()


@on_ranks(2, 3)
def test_what_power_sgd_keeps_for_later_doesnt_depend_on_weights(world, fresh_seed):
    """It keeps what it leaves out for the next step, where batches have different sizes in each step."""
    found = []
    for wrap in (evenstep.DistributedDataParallel, TorchDistributedDataParallel):
        torch.manual_seed(fresh_seed)
        # One bucket: with two torch's ranks would begin the collectives of PowerSGD in different orders.
        model = wrap(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 12)).double(), bucket_cap_mb=64)
        state = powerSGD_hook.PowerSGDState(dist.group.WORLD, 1, start_powerSGD_iter=2, min_compression_rate=0.5)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            sizes = [(40, 3, 17, 30, 1)[step] + rank for rank in range(world.world_size)]
            size = sizes[world.rank]
            generator = torch.Generator().manual_seed(fresh_seed + 10 * step + world.rank)
            loss = model(torch.randn(size, 8, generator=generator, dtype=torch.float64)).square().mean()
            if wrap is evenstep.DistributedDataParallel:
                model.backward(loss, weight=size)
            else:
                (loss * (size * world.world_size / sum(sizes))).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([p.detach().clone() for p in model.parameters()])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gloo", [False, True])
@on_ranks(2)
def test_large_weights_dont_overflow_in_a_hook_of_16_bits(world, gloo):
    """Gradients of one, whose weights are beyond what 16 bits hold; some ranks have no sample."""
    if gloo:
        world = evenstep.World.from_process_group(transport="gloo", device="cpu")
    model = evenstep.DistributedDataParallel(nn.Linear(4, 2, bias=False), world=world)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    for weights, expected in (([90_000, 90_000], [1.0]), ([0, 90_000], [1.0]), ([0, 0], None)):
        weight = weights[world.rank]
        with model.accumulate():
            model.backward(model(torch.ones(2, 4)).sum(1).mean(), weight=weight)
        model.backward(model(torch.ones(2 if weight else 0, 4)).sum(1).mean(), weight=weight)
        grad = model.module.weight.grad
        assert (None if grad is None else grad.unique().tolist()) == expected
        model.zero_grad()
    if gloo:
        world.close()


@on_ranks(2)
def test_a_hook_sees_what_torchs_class_would_show_it(world):
    model = evenstep.DistributedDataParallel(make_model(), bucket_cap_mb=5e-4, world=world)
    seen = []

    def hook(state, bucket):
        assert bucket.buffer().dim() == 1
        for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
            assert gradient.shape == parameter.shape
            assert gradient.untyped_storage().data_ptr() == bucket.buffer().untyped_storage().data_ptr()
        state.append((bucket.index(), bucket.is_last(), len(bucket.parameters())))
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(seen, hook)
    model(torch.ones(1, 8)).sum().backward()
    assert [index for index, _, _ in seen] == list(range(len(seen)))
    assert [last for _, last, _ in seen] == [False] * (len(seen) - 1) + [True]
    assert sum(count for _, _, count in seen) == 4
    with pytest.raises(UsageError, match="there is one already"):
        model.register_comm_hook(None, hook)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # wrapped already
        outer = evenstep.DistributedDataParallel(model, world=world)
    with pytest.raises(UsageError, match="there is one already"):
        outer.register_comm_hook(None, hook)
    other = evenstep.DistributedDataParallel(make_model(), world=world)
    with pytest.raises(ConfigurationError, match="must be callable"):
        other.register_comm_hook(None, None)
    with pytest.raises(ConfigurationError, match=r"with \(state, bucket\)"):
        other.register_comm_hook(None, lambda bucket: bucket)
    other.register_comm_hook(None, lambda state, bucket: bucket.buffer())
    with pytest.raises(ConfigurationError, match=r"must return a torch\.futures\.Future"):
        other(torch.ones(1, 8)).sum().backward()


RESULTS = {
    "too short": (lambda buffer: buffer[:-2], r"gave float32 \[30\] for bucket 0; .*: float32 \[32\]\."),
    "too short elsewhere": (lambda buffer: buffer[:-2].clone(), r"gave float32 \[30\]"),
    "complex": (lambda buffer: buffer.to(torch.complex64), r"gave complex64 \[32\]"),
    "nothing": (lambda buffer: None, "gave a NoneType"),
    "an empty list": (lambda buffer: [], "gave a list"),
    "transposed": (lambda buffer: buffer.view(4, 8).t(), None),
    "in a list": (lambda buffer: [buffer.view(1, -1)], None),
    "wider": (lambda buffer: buffer.double(), None),
}


@on_ranks(2)
def test_a_hooks_result_that_is_no_average_is_named(world):
    for make, message in RESULTS.values():
        model = evenstep.DistributedDataParallel(nn.Linear(4, 8, bias=False), world=world)
        given = []

        def hook(state, bucket, make=make, given=given):
            given.append(make(bucket.buffer().clone()))
            future = torch.futures.Future()
            future.set_result(make(bucket.buffer()))
            return future

        model.register_comm_hook(None, hook)
        loss = (model(torch.ones(1, 4)) * torch.arange(8.0)).sum()
        if message is None:
            loss.backward()
            wanted = given[0][0] if isinstance(given[0], list) else given[0]
            assert torch.equal(model.module.weight.grad.reshape(-1), wanted.float().reshape(-1))
        else:
            with pytest.raises(ConfigurationError, match=message):
                loss.backward()
