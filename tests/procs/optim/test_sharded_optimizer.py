"""The sharded optimizer against torch's own over gradients that every rank has whole, on 1 to 4 ranks."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import evenstep
from evenstep.errors import ConfigurationError, UsageError
from evenstep.replica.sharded.bucket import ShardedBucket
from evenstep.replica.sharded.gradient_placeholder import GradientPlaceholder
from tests.ranks import on_ranks


def assert_same_state(got: dict, expected: dict, context: str = "", *, tolerance: float = 1e-12) -> None:
    """Of two state dicts: keys, numbers, tensors and hyper-parameters."""
    assert got["state"].keys() == expected["state"].keys(), context
    for number, state in expected["state"].items():
        assert got["state"][number].keys() == state.keys(), context
        for key, value in state.items():
            other = got["state"][number][key]
            if isinstance(value, torch.Tensor):
                where = f"{context}, {key} of {number}"
                assert other.shape == value.shape, where
                torch.testing.assert_close(other, value, rtol=tolerance, atol=tolerance, msg=lambda m, w=where: w + m)
            else:
                assert other == value, context
    for one, other in zip(got["param_groups"], expected["param_groups"], strict=True):
        assert one == other, f"{context}: {one} and not {other}"


def assert_same_parameters(got: nn.Module, expected: nn.Module, context: str = "") -> None:
    for (name, one), other in zip(got.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13, msg=lambda m, n=name: f"{context} {n}: {m}")


# ---------------------------------------------------------------------- random cases


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
@on_ranks(2, 3)
def test_the_same_bits_where_the_order_of_summation_is_the_same(world, fresh_seed, kind):
    """In float32, over shared memory, whose sums have one order whether they are scattered or not."""
    models = []
    for _ in range(2):
        torch.manual_seed(fresh_seed)
        layers = [nn.Linear(300, 200), nn.GELU(), nn.Linear(200, 100)]
        models.append(evenstep.DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.1))
    made, options = getattr(torch.optim, kind), {"lr": 0.01, "foreach": False}
    stage2 = world.world_size == 3
    optimizers = [
        evenstep.ShardedOptimizer(models[0], made, shard_gradients=stage2, **options),
        made(models[1].parameters(), **options),
    ]
    torch.manual_seed(fresh_seed + world.rank)
    for _ in range(5):
        x = torch.randn(8, 300)
        for model, optimizer in zip(models, optimizers, strict=True):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))


# ---------------------------------------------------------------------- one case after the other


def build(seed: int, layers=None) -> nn.Module:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 3)) if layers is None else layers()
    return module.double()


def make(seed: int, kind=torch.optim.AdamW, world=None, layers=None, **options):
    world = evenstep.init(quiet=True) if world is None else world
    model = evenstep.DistributedDataParallel(build(seed, layers), bucket_cap_mb=5e-4, world=world)
    return model, evenstep.ShardedOptimizer(model, kind, **{"lr": 0.01, **options})


def train(model, optimizer, seed: int, num_steps: int, shape=(4, 6)) -> None:
    """The same global batches on any number of ranks: rank r has rows r, r + n, ..."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        x = torch.randn(12, *shape[1:], dtype=torch.float64, generator=generator)
        x = x[model.world.rank :: model.world.world_size]
        model.backward(model(x).square().mean(), weight=len(x))
        optimizer.step()
        optimizer.zero_grad()


class Headless(nn.Module):
    """Has parameters without elements, such as those of a head of no classes."""

    def __init__(self) -> None:
        super().__init__()
        self.none, self.head = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(3, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.none.sum() + self.head.sum()


def shards_of(seed: int, kind_name: str, channels_last: bool):
    def layers():
        convolutions = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 2), nn.Flatten())
        if kind_name == "Adagrad":
            convolutions.append(Headless())
        return convolutions.to(memory_format=torch.channels_last) if channels_last else convolutions

    model, optimizer = make(seed, getattr(torch.optim, kind_name), layers=layers)
    train(model, optimizer, seed, 3, shape=(4, 3, 5, 5))
    rest, shards = optimizer.state_shards()
    return rest, [(s.path, s.shape, s.offset_numel, s.values) for s in shards], optimizer.state_dict()


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("kind", ["AdamW", "Adafactor", "Adagrad"])
def test_shards_cover_every_whole_once(ranks, fresh_seed, kind, channels_last):
    told = ranks.run(shards_of, 3, fresh_seed, kind, channels_last)
    rest, _, whole = told[0]
    built: dict[tuple, torch.Tensor] = {}
    for _, shards, _ in told:
        for path, shape, offset, values in shards:
            flat = built.setdefault(path, torch.full((torch.Size(shape).numel(),), torch.nan, dtype=values.dtype))
            assert values.is_contiguous()
            assert flat[offset : offset + len(values)].isnan().all(), "covered twice"
            flat[offset : offset + len(values)] = values
            built[path] = flat
            assert whole["state"][path[1]][path[2]].shape == shape
    for path, flat in built.items():
        rest["state"].setdefault(path[1], {})[path[2]] = flat.view(whole["state"][path[1]][path[2]].shape)
    assert all(told[0][0]["param_groups"] == other["param_groups"] for other, _, _ in told)
    rest["state"] = {number: {k: rest["state"][number][k] for k in s} for number, s in whole["state"].items()}
    assert_same_state(rest, whole, tolerance=0.0)


@on_ranks(2)
def test_gradients_that_are_elsewhere_cant_be_read(world, fresh_seed):
    model, optimizer = make(fresh_seed)
    model(torch.randn(4, 6, dtype=torch.float64)).sum().backward()
    weight = model.module[0].weight
    assert isinstance(weight.grad, GradientPlaceholder)
    assert weight.grad.shape == weight.shape
    assert "divided" in repr(weight.grad)
    reads = [
        lambda: weight.grad.norm(),
        lambda: weight.grad[0],
        lambda: weight.grad.clone(),
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: nn.utils.clip_grad_value_(model.parameters(), 1.0),
        lambda: torch.optim.SGD(model.parameters(), lr=1.0).step(),
        lambda: weight.grad.tolist(),
        lambda: weight.grad.numpy(),
        lambda: np.asarray(weight.grad),
        lambda: np.from_dlpack(weight.grad),  # what has no memory: this read anywhere, those below ended the process
        lambda: torch.from_dlpack(weight.grad),
        lambda: weight.grad.apply_(abs),
        lambda: weight.grad.share_memory_(),
        lambda: weight.grad.data_ptr(),
        lambda: weight.grad.untyped_storage(),
        lambda: weight.grad.data,
        lambda: torch.add(torch.ones_like(weight), 1, out=weight.grad),
        lambda: optimizer.state[weight],
    ]
    for read in reads:
        with pytest.raises(UsageError, match="divided over"):
            read()
    with pytest.raises(UsageError, match=r"'0\.weight'.*evenstep\.clip_grad_norm_"):
        weight.grad.norm()
    with model.accumulate():  # a second window, whose gradients are nobody's yet
        model(torch.randn(4, 6, dtype=torch.float64)).sum().backward()
    assert weight.grad.norm() > 0
    with pytest.raises(UsageError, match="was not averaged"):
        optimizer.step()
    model(torch.randn(4, 6, dtype=torch.float64)).sum().backward()
    optimizer.step()


@on_ranks(2)
def test_wrong_uses_are_named_on_every_rank(world):
    model, optimizer = make(0)
    embedding = evenstep.DistributedDataParallel(nn.Embedding(5, 2, sparse=True))
    wrong_state = {"exp_avg": torch.zeros(2, 2), "step": torch.tensor(1.0)}
    state = {**optimizer.state_dict(), "state": {0: wrong_state}}
    for call, what in (
        (lambda: evenstep.ShardedOptimizer(nn.Linear(2, 2), torch.optim.SGD, lr=1.0), "not a Linear"),
        (lambda: evenstep.ShardedOptimizer(model, torch.optim.LBFGS), "LBFGS"),
        (lambda: evenstep.ShardedOptimizer(model, "AdamW"), "'AdamW'"),
        (lambda: evenstep.ShardedOptimizer(model, torch.optim.AdamW), "another"),
        (lambda: optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()}), r"\[2, 2\]"),
        (lambda: evenstep.ShardedOptimizer(embedding, torch.optim.SGD, lr=1.0), "sparse=False"),
        (lambda: evenstep.ShardedOptimizer(model, torch.optim.Adafactor, shard_gradients=True), "Adafactor"),
        (lambda: optimizer.load_state_dict(state), "'0.weight'"),
    ):
        with pytest.raises(ConfigurationError, match=what):
            call()
    assert len(optimizer.param_groups) == 1
    with pytest.raises(UsageError, match="join"), model.join():
        pass
    train(model, optimizer, 0, 1)


def bytes_of(seed: int, stage2: bool) -> tuple[int, int, int]:
    """(bytes of state, of gradients that stay, of parameters)."""
    evenstep.init(quiet=True)
    torch.manual_seed(seed)
    model = evenstep.DistributedDataParallel(
        nn.Sequential(*(nn.Linear(128, 128) for _ in range(12))), bucket_cap_mb=0.1
    )
    optimizer = evenstep.ShardedOptimizer(model, torch.optim.AdamW, shard_gradients=stage2)
    for _ in range(2):
        model(torch.randn(2, 128)).sum().backward()
        optimizer.step()
    storages = {}
    for bucket in model.engine.buckets:
        for tensor in (bucket.shard, bucket.flat):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    for parameter in model.parameters():
        assert isinstance(parameter.grad, GradientPlaceholder)
    return optimizer.state_bytes, sum(storages.values()), sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("nproc", [2, 4])
def test_memory_is_divided_by_the_number_of_ranks(ranks, fresh_seed, nproc):
    for state, gradients, parameters in ranks.run(bytes_of, nproc, fresh_seed, False):
        assert 2 * parameters / nproc <= state <= 2.1 * parameters / nproc
        assert parameters <= gradients <= 1.1 * parameters + 12 * 65536  # a bucket's memory comes in pages
    for state, gradients, parameters in ranks.run(bytes_of, nproc, fresh_seed, True):
        assert 2 * parameters / nproc <= state <= 2.1 * parameters / nproc
        lent = 2 * 132 * 1024
        assert gradients <= 1.1 * parameters / nproc + lent


class Backwards(nn.Module):
    """Layers that are used in the opposite of the order in which they are registered, behind a sparse embedding."""

    def __init__(self, num_layers: int, width: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))
        self.rows = nn.Embedding(8, width, sparse=True)

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:
        x = self.rows(symbols)
        for layer in reversed(self.layers):
            x = layer(x)
        return x


def laid_out_again(seed: int, stage2: bool) -> tuple[int, int, int]:
    """(bytes of buckets and parameters before, the most while they are laid out again, of one bucket)."""
    world = evenstep.init(quiet=True)
    model = evenstep.DistributedDataParallel(Backwards(12, 256, seed), bucket_cap_mb=0.3, first_bucket_cap_mb=0.3)
    dense = list(model.module.layers.parameters())
    optimizer = evenstep.ShardedOptimizer(model, torch.optim.AdamW, dense, shard_gradients=stage2)
    arena = model.engine.transport._context.arena

    def used_bytes() -> int:
        arena._collect()
        return sum(length for _, length in arena._stretches.values())

    layout, before, most = model.engine.exchange.layout, used_bytes(), 0

    build = ShardedBucket.__init__

    def watched(*args: object, **kwargs: object) -> None:
        nonlocal most
        build(*args, **kwargs)
        most = max(most, used_bytes())

    with mock.patch.object(ShardedBucket, "__init__", watched):
        model(torch.arange(world.rank, world.rank + 3)).square().mean().backward()
    assert model.engine.exchange.layout != layout
    assert model.module.rows.weight.grad is not None, "no bucket's, and not lost"
    values = [p.detach().clone() for p in dense]
    optimizer.step()
    assert all(not torch.equal(p, value) for p, value in zip(dense, values, strict=True))
    return before, most, max(bucket.values.whole.nbytes for bucket in model.engine.exchange.sharded_buckets)


def test_buckets_are_laid_out_again_one_by_one(ranks, fresh_seed):
    """All at once, memory would hold parameters and gradients twice: the largest peak of a training."""
    for stage2 in (False, True):
        for before, most, bucket in ranks.run(laid_out_again, 2, fresh_seed, stage2):
            assert 2 * 12 * (256 << 10) // (1 + stage2) <= before, "the buckets are in shared memory"
            assert most <= before + 2 * bucket + 65536


@on_ranks(2)
def test_several_optimizers_and_a_hook_share_a_model(world: evenstep.World, fresh_seed: int) -> None:
    """Two sharded ones, of different kinds, and a plain one share a model; a hook sees all buckets; bf16 beside."""
    models, optimizers = [], []
    for sharded in (True, False):
        torch.manual_seed(fresh_seed)
        layers = [nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 9)]
        model = evenstep.DistributedDataParallel(nn.Sequential(*layers).double(), bucket_cap_mb=5e-4)
        parts = [list(model.module[i].parameters()) for i in (0, 2, 4)]
        if sharded:
            made = [
                evenstep.ShardedOptimizer(model, torch.optim.AdamW, parts[0], lr=0.01),
                evenstep.ShardedOptimizer(model, torch.optim.SGD, parts[1], lr=0.1, shard_gradients=True),
            ]
        else:
            made = [torch.optim.AdamW(parts[0], lr=0.01), torch.optim.SGD(parts[1], lr=0.1)]
        models.append(model)
        optimizers.append([*made, torch.optim.RMSprop(parts[2])])
    torch.manual_seed(fresh_seed + models[0].world.rank)
    for step in range(6):
        x = torch.randn(3, 6, dtype=torch.float64)
        for model, several in zip(models, optimizers, strict=True):
            if step == 3:
                model.register_comm_hook(None, default_hooks.allreduce_hook)
            model(x).square().mean().backward()
            for optimizer in several:
                optimizer.step()
            model.zero_grad()
    assert_same_parameters(models[0], models[1])


@on_ranks(2)
def test_autograd_notices_that_parameters_have_changed(world, fresh_seed):
    model, optimizer = make(fresh_seed)
    train(model, optimizer, fresh_seed, 1)
    stale = model(torch.randn(2, 6, dtype=torch.float64)).square().sum()
    train(model, optimizer, fresh_seed + 1, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(stale, list(model.parameters()))


@pytest.mark.parametrize("elementwise", [True, False])
@on_ranks(2)
def test_torchs_functions_for_states_step_nothing(world, fresh_seed, elementwise):
    """They step an optimizer that seems to have no state."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    pair = []
    for is_sharded in (True, False):
        if is_sharded:
            model, optimizer = make(fresh_seed, elementwise=elementwise)
        else:
            model = evenstep.DistributedDataParallel(build(fresh_seed))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        train(model, optimizer, fresh_seed, 3)
        pair.append((model, optimizer, get_optimizer_state_dict(model, optimizer)))
    (model, optimizer, ours), (plain, _, theirs) = pair
    assert_same_parameters(model, plain)
    assert ours["state"].keys() == theirs["state"].keys()
    for name, state in theirs["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(ours["state"][name][key].cpu(), value, rtol=1e-12, atol=1e-13)
    set_optimizer_state_dict(model, optimizer, theirs)
    assert_same_parameters(model, plain)
    again = get_optimizer_state_dict(model, optimizer)
    assert all(state["step"] == 3 for state in again["state"].values())
