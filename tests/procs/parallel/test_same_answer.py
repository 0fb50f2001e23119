"""FSDP2, HSDP and tensor parallelism under evenstep's loop compute what one process computes."""

from __future__ import annotations

import contextlib
import copy
import math
import random
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import evenstep
from evenstep import world as worlds
from evenstep.errors import DriftError, EvenstepError, NonFiniteError, UsageError
from tests.procs.parallel import gpt
from tests.ranks import on_ranks

MESHES = {
    "fsdp": {"shard": 4},
    "hsdp": {"replicate": 2, "shard": 2},
    "tensor x replicate": {"replicate": 2, "tensor": 2},
    "tensor x fsdp": {"shard": 2, "tensor": 2},
    "tensor": {"tensor": 4},
    "replicate": {"replicate": 4},
}


def world_of(mesh: Any, **arguments: Any) -> evenstep.World:
    """A world of its own, on ranks that may have another one."""
    before = worlds.initialised()
    if before is not None:
        before.close()
    return evenstep.init(quiet=True, mesh=mesh, seed=1, **arguments)


def share_of(world: evenstep.World, tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows, of which there may be none."""
    rank, size = world.data_rank, world.data_size
    return tensor[rank * len(tensor) // size : (rank + 1) * len(tensor) // size]


def trained(mesh, *, transport=None, dtype=torch.float64, with_attach=False, policy=None, **arguments):
    """Parameters at the end, and norms, of a model that was trained on this mesh."""
    with world_of(mesh, transport=transport) as world:
        model = gpt.made(arguments["seed"], dtype)
        options = {} if policy is None else {"mp_policy": policy()}
        if with_attach:
            model = evenstep.attach(by_torch(model, world), compare_every=2)
        else:
            plan = gpt.plan() if "tensor" in mesh else None
            model = evenstep.parallelize(model, world, tensor_plan=plan, compare_every=2, **options)
        _, norms = gpt.train(model, lambda tensor: share_of(world, tensor), **arguments)
        assert model.unused_parameters() == []
        return {name: each.clone() for name, each in gpt.whole(model).items()}, norms


def by_torch(model, world):
    """Divided by the script itself."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    names = world.mesh.mesh_dim_names
    if "tensor" in names:
        parallelize_module(model, world.mesh["tensor"], gpt.plan())
    if "shard" in names:
        mesh = world.mesh["replicate", "shard"] if "replicate" in names else world.mesh["shard"]
        for each in [*model.blocks, model]:
            fully_shard(each, mesh=mesh)
    return model


def call(arguments):
    return trained(**arguments)


def check(ranks, mesh, *, steps, rows, fresh_seed, tolerance=1e-10, **arguments):
    """Within the tolerance, or four times what one rounding of each weight makes in one process, where that is more.

    One rounding moves one process by less than 1e-14 with most seeds, by more than 1e-12 with one in 300.
    """
    given = {"seed": fresh_seed, "steps": steps, "rows": rows}
    optimizer = {k: v for k, v in arguments.items() if k in ("optimizer", "clip", "dtype")}
    expected, norms = gpt.reference(**given, **optimizer)
    nudged = [gpt.reference(**given, **optimizer, nudge=nudge)[0] for nudge in range(3)]
    allowed = max(tolerance, 4 * max(farthest(each, expected) for each in nudged))
    for found, found_norms in ranks.run(call, 4, {"mesh": mesh} | given | arguments, timeout_s=240.0):
        assert farthest(found, expected) <= allowed
        assert found_norms == pytest.approx(norms, rel=allowed)


def farthest(found, expected):
    return max(float((found[name] - each).abs().max()) for name, each in expected.items())


@pytest.mark.parametrize("kind", ["hsdp", "tensor x fsdp", "tensor x replicate"])
def test_steps_are_those_of_one_process(ranks, fresh_seed, kind):
    """Five rows of unequal length on four ranks, in two micro-batches, with clipping."""
    check(ranks, MESHES[kind], steps=4, rows=5, micro=2, fresh_seed=fresh_seed)


@pytest.mark.extended
@pytest.mark.parametrize("kind", list(MESHES))
def test_thirty_steps_are_those_of_one_process(ranks, fresh_seed, kind):
    """Three rows on four ranks: a share is empty where all of them have samples of their own."""
    check(ranks, MESHES[kind], steps=30, rows=3, micro=2, fresh_seed=fresh_seed)


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "tensor x replicate", "tensor x fsdp"])
def test_over_gloo_too(ranks, fresh_seed, kind):
    check(ranks, MESHES[kind], steps=3, rows=5, fresh_seed=fresh_seed, transport="gloo")


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "tensor x replicate", "tensor x fsdp"])
def test_a_model_that_the_script_has_divided(ranks, fresh_seed, kind):
    check(ranks, MESHES[kind], steps=3, rows=5, fresh_seed=fresh_seed, with_attach=True)


@pytest.mark.parametrize("is_weighted", [True, False])
@on_ranks(2)
def test_a_norm_is_that_of_divided_and_whole_gradients_together(world, is_weighted):
    with world_of({"tensor": 2}) as world:
        alone = gpt.made(3, torch.float64)
        model = evenstep.parallelize(gpt.made(3, torch.float64), world, tensor_plan=gpt.plan())
        ((tokens, targets),) = gpt.batches(4, 1, 5)
        loss, weight = gpt.loss_of(model(tokens), targets)
        model.backward(loss, weight=weight) if is_weighted else loss.backward()
        gpt.loss_of(alone(tokens), targets)[0].backward()
        for exponent in (1.0, 2.0, math.inf):
            expected = nn.utils.clip_grad_norm_(alone.parameters(), math.inf, exponent)
            torch.testing.assert_close(evenstep.clip_grad_norm_(model, math.inf, exponent), expected)


class Odd(nn.Module):
    """Parameters that some ranks use, that none uses, and that are frozen; a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.sometimes, self.never = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x, with_it=True):
        self.count += 1
        h = self.first(x)
        return self.last(h * self.sometimes if with_it else h) * self.frozen


def odd_steps(mesh):
    """What `loss.backward()`, unused parameters, zero weights and a second backward pass give."""
    with world_of(mesh) as world:
        rank, size = world.data_rank, world.data_size
        torch.manual_seed(5)
        alone = Odd().double()
        model = evenstep.parallelize(Odd().double(), world, blocks="Linear")
        whole = gpt.whole(model)
        with torch.no_grad():
            for name, parameter in alone.named_parameters():
                parameter.copy_(whole[name])
        xs = torch.randn(size, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(7))

        def of_one(weights, *, uses=lambda r: True):
            alone.zero_grad()
            for r, weight in enumerate(weights):
                (alone(xs[r], uses(r)).square().mean() * weight).backward()
            return {name: None if p.grad is None else p.grad.clone() for name, p in alone.named_parameters()}

        def same(expected, divisor):
            for name, p in model.module.named_parameters():
                wanted = expected[name]
                assert (p.grad is None) == (wanted is None), name
                if wanted is not None:
                    grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                    torch.testing.assert_close(grad, wanted / divisor, rtol=1e-12, atol=1e-14)

        model(xs[rank]).square().mean().backward()  # torch's meaning: averaged over ranks
        same(of_one([1] * size), size)
        assert model.unused_parameters() == ["never"]
        model(xs[rank]).square().mean().backward()  # without zero_grad it is added to what there is
        same(of_one([2] * size), size)
        model.zero_grad()
        weights = [0, *range(1, size)]
        loss = model(xs[rank], rank % 2 == 0).square().mean()
        model.backward(loss * (float("nan") if rank == 0 else 1), weight=weights[rank])
        same(of_one(weights, uses=lambda r: r % 2 == 0), sum(weights) or 1)
        model.backward(model(xs[rank]).square().mean(), weight=2)
        expected = of_one(weights, uses=lambda r: r % 2 == 0)
        more = of_one([1] * size)
        added = {n: None if g is None else expected[n] / (sum(weights) or 1) + more[n] / size for n, g in more.items()}
        same(added, 1)
        model.zero_grad()
        with model.accumulate():
            model.backward(model(xs[rank]).square().mean(), weight=3)
        model.backward(model(xs[rank][:0]).square().mean(), weight=0)
        same(of_one([1] * size), size)
        model.zero_grad()
        with model.accumulate():
            model(xs[rank]).square().mean().backward()
        with pytest.raises(UsageError, match="after"):
            model.backward(model(xs[rank]).square().mean(), weight=3)


@pytest.mark.parametrize("mesh", [{"shard": 2}])
def test_windows_mean_what_they_mean_for_replicas(ranks, mesh):
    ranks.run(odd_steps, 2, mesh)


@pytest.mark.extended
@pytest.mark.parametrize(("mesh", "nproc"), [({"replicate": 2, "shard": 2}, 4), ({"shard": 1}, 1)])
def test_windows_on_other_meshes(ranks, mesh, nproc):
    ranks.run(odd_steps, nproc, mesh)


def equal_sums(model, expected, divisor):
    """Whether gradients are those of one process, of sums that nothing has divided."""
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        torch.testing.assert_close(grad, q.grad / divisor, rtol=1e-12, atol=1e-14)


class WithHalf(nn.Module):
    """In float64, with a layer of 16 bits for whose sake weights are scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.thin = nn.Linear(3, 3).double(), nn.Linear(1, 1).half()

    def forward(self, x):
        return self.wide(x) + 0 * self.thin(torch.ones(1).half())


def made_pair(has_half):
    """An encoder and a decoder."""
    if has_half:
        return [WithHalf(), WithHalf()]
    return [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double() for _ in range(2)]


@pytest.mark.parametrize("has_half", [False, True])
@on_ranks(2)
def test_models_that_share_a_loss_have_one_scale_in_each_pass(world, fresh_seed, has_half):
    """Windows of two models: the decoder may have a pass by itself, before one through both or through its own inputs.

    Shares differ, and some are empty. The losses may be scaled: all ranks tell the model of the scaler, or only the
    first does. Orders of the models differ from window to window.
    """
    with world_of({"shard": 2}) as world:
        torch.manual_seed(fresh_seed)
        chance = random.Random(fresh_seed)
        drawn = torch.Generator().manual_seed(fresh_seed)  # the ranks' own streams differ
        alone = made_pair(has_half)
        models = [evenstep.parallelize(copy.deepcopy(each), world, blocks="Linear") for each in alone]
        for _ in range(10):
            sizes = chance.choice([[8, 8], [3, 2], [8, 0], [5, 5]])
            shares = [torch.randn(size, 3, dtype=torch.float64, generator=drawn) for size in sizes]
            mine, weight = shares[world.rank], float(sizes[world.rank])
            has_own, reaches, all_tell, is_scaled = (chance.random() < 0.5 for _ in range(4))
            has_own = has_own and (all_tell or not is_scaled)
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=is_scaled)
            tells = world.rank == 0 or all_tell
            told = {"weight": weight, "scaler": scaler if tells else None}
            hidden = models[0](mine) if reaches else mine.flip(1)
            losses = [models[1](mine).square().mean()] if has_own else []
            losses.append(models[1](hidden).square().mean())
            if not tells and weight:
                losses = [scaler.scale(each) for each in losses]
            if has_own:
                with models[1].accumulate():
                    models[1].backward(losses[0], **told)
            evenstep.backward(chance.choice([models, models[::-1]]) if reaches else models[1:], losses[-1], **told)
            for x in filter(len, shares):
                losses = [alone[1](x)] * has_own + [alone[1](alone[0](x) if reaches else x.flip(1))]
                sum(each.square().mean() for each in losses).mul(len(x) * scaler.get_scale()).backward()
            for model, other, passes in zip(models, alone, (1, 1 + has_own), strict=True):
                if reaches or model is models[1]:
                    equal_sums(getattr(model.module, "wide", model), getattr(other, "wide", other), passes * sum(sizes))
                model.zero_grad()
                other.zero_grad()


@on_ranks(4)
def test_models_of_other_ranks_may_share_a_loss(world):
    """Gradients of a model that all ranks have, behind one that each pair of ranks has divided among themselves."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    with world_of({"replicate": 2, "shard": 2}) as world:
        torch.manual_seed(7)
        drawn = torch.Generator().manual_seed(7)  # the ranks' own streams differ
        alone = [WithHalf() for _ in range(2)]
        common = nn.Linear(3, 2).double()
        pairs = [[0, 1], [2, 3]]
        groups, pair = [torch.distributed.new_group(each) for each in pairs], world.rank // 2
        sub = evenstep.World.from_process_group(group=groups[pair])
        mesh = DeviceMesh.from_group(groups[pair], "cpu", mesh=pairs[pair])
        divided = copy.deepcopy(alone[pair])
        for layer in divided.children():
            fully_shard(layer, mesh=mesh)
        own = evenstep.attach(divided, sub)
        model = evenstep.DistributedDataParallel(copy.deepcopy(common), world=world)
        weights = [8, 8, 3, 2]
        for _ in range(2):
            x = torch.randn(4, 5, 3, dtype=torch.float64, generator=drawn)
            evenstep.backward([own, model], model(own(x[world.rank])).square().mean(), weight=weights[world.rank])
            for rows, layer, weight in zip(x, [alone[0], alone[0], alone[1], alone[1]], weights, strict=True):
                (common(layer(rows)).square().mean() * weight).backward()
            equal_sums(model, common, sum(weights))
            equal_sums(own.module.wide, alone[pair].wide, sum(weights[2 * pair : 2 * pair + 2]))
            for each in (own, model, common, *alone):
                each.zero_grad()
        sub.close()


@on_ranks(2)
def test_reproducible_mode_is_refused(world):
    with world_of(None, reproducible=True, virtual_ranks=2) as world:
        for divide in (evenstep.parallelize, evenstep.attach):
            with pytest.raises(UsageError, match="in reproducible mode: a divided layer adds in another order"):
                divide(nn.Linear(2, 2), world)


@pytest.mark.extended
@pytest.mark.parametrize("policy", ["raise", "skip", "warn"])
@on_ranks(2)
def test_what_isnt_finite_is_found_in_the_sums(world, policy):
    with world_of({"shard": 2}) as world:
        torch.manual_seed(1)
        model = evenstep.parallelize(nn.Linear(3, 2), world, on_nonfinite=policy)
        loss = model(torch.full((1, 3), math.inf if world.rank else 1.0)).sum()
        raises = policy == "raise"
        fault = pytest.raises(NonFiniteError, match="'weight'") if raises else contextlib.nullcontext()
        with warnings.catch_warnings(record=True) as caught, fault:
            warnings.simplefilter("always")
            model.backward(loss, weight=1)
        told = [str(each.message) for each in caught if "infinite" in str(each.message)]
        assert len(told) == (world.rank == 0 and not raises)
        if not raises:
            assert (model.module.weight.grad is None) is (policy == "skip")
            assert model.skipped_steps == (policy == "skip")


@pytest.mark.parametrize("is_weighted", [False, True])
@on_ranks(4)
def test_a_mean_of_large_float16_gradients_is_finite(world, is_weighted):
    """Gradients whose mean float16 can have, and whose sum it can't."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    with world_of({"shard": 4}) as world:
        policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)
        module = nn.Linear(8, 8, bias=False)
        model = evenstep.parallelize(module, world, mp_policy=policy, compare_every=None)
        x = torch.full((1, 8), 30000.0 + 1000 * world.rank)
        loss = model(x).float().sum()
        model.backward(loss, weight=100.0) if is_weighted else loss.backward()
        (parameter,) = model.parameters()
        assert parameter.grad.full_tensor().unique().tolist() == pytest.approx([31500.0], rel=2e-3)


class Optional(nn.Module):
    """A block that some passes leave out, on all ranks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x, leaves_out):
        return self.blocks[0](x) if leaves_out else self.blocks[1](self.blocks[0](x))


@on_ranks(2)
def test_a_block_without_a_gradient_under_mixed_precision(world):
    """Its zeros have the dtype that torch wants of gradients: from 2.15 on the dtype in which they are added."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    with world_of({"shard": 2}) as world:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = evenstep.parallelize(Optional(), world, mp_policy=policy)
        for leaves_out in (False, True, False):
            model.backward(model(torch.ones(2, 4), leaves_out).float().square().mean(), weight=2)
            found = [name for name in model.unused_parameters() if name.startswith("blocks.1")]
            assert found == (["blocks.1.weight", "blocks.1.bias"] if leaves_out else [])
            model.zero_grad()


@pytest.mark.extended
@on_ranks(2)
def test_torchs_options_and_our_optimizers_go_through(world):
    """Policies, scaler, average, rates: they go through, and training goes on."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    with world_of({"shard": 2}) as world:
        share = lambda tensor: share_of(world, tensor)  # noqa: E731
        arguments = {"seed": 2, "steps": 3, "rows": 5}
        model = gpt.made(2, torch.float32)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = evenstep.parallelize(model, world, blocks=gpt.Block, mp_policy=policy, reshard_after_forward=False)
        losses, _ = gpt.train(model, share, micro=2, **arguments)
        assert all(map(torch.isfinite, map(torch.tensor, losses)))
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        offloaded = evenstep.parallelize(gpt.made(2, torch.float64), world, offload_policy=CPUOffloadPolicy(False))
        gpt.train(offloaded, share, **arguments)
        expected, _ = gpt.reference(**arguments)
        for name, each in gpt.whole(offloaded).items():
            torch.testing.assert_close(each, expected[name], rtol=0, atol=1e-12)
        model = evenstep.parallelize(gpt.made(3, torch.float64), world, blocks=500)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        assert evenstep.scale_learning_rate(optimizer, base_batch_size=4, global_batch_size=8) == 2.0
        assert optimizer.param_groups[0]["lr"] == 0.1
        average = evenstep.ExponentialMovingAverage(model, 0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, total_iters=4)
        start = {name: each.clone() for name, each in gpt.whole(model).items()}
        for tokens, targets in gpt.batches(4, 2, 5):
            loss, weight = gpt.loss_of(model(share(tokens)), share(targets))
            model.backward(loss, weight=weight, scaler=scaler)
            scaler.unscale_(optimizer)
            assert model.clip_grad_norm_(1e9) > 0
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            average.update()
            warmup.step()
        now = {name: each.clone() for name, each in gpt.whole(model).items()}
        with average.applied():
            with torch.no_grad():
                model(share(tokens))
            applied = {name: each.clone() for name, each in gpt.whole(model).items()}
        again = gpt.whole(model)
        for name, each in now.items():
            assert torch.equal(again[name], each)
            assert not torch.equal(applied[name], each), name
            assert not torch.equal(start[name], each), name


@pytest.mark.extended
@pytest.mark.parametrize("how", ["without a mesh", "meta", "compiled", "checkpointed", "called replicas"])
@on_ranks(2)
def test_models_that_were_made_otherwise(world, how):
    """Three steps of SGD with a model that was divided in some other way are those of one process."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import fully_shard

    meshes = {"meta": {"replicate": 1, "shard": 2}, "called replicas": {"replicate": 2}}
    with world_of(meshes.get(how)) as world:
        arguments = {"seed": 4, "steps": 3, "rows": 5, "optimizer": torch.optim.SGD}
        model = gpt.made(4, torch.float64)
        if how == "compiled":
            for block in model.blocks:
                block.compile(backend="eager")
        if how == "checkpointed":
            for index, block in enumerate(model.blocks):
                model.blocks[index] = checkpoint_wrapper(block)
        if how == "meta":
            given, mesh = model, world.mesh["replicate", "shard"]
            with torch.device("meta"):
                model = gpt.GPT().double()
            for each in [*model.blocks, model]:
                fully_shard(each, mesh=mesh)
            model.to_empty(device="cpu")
            values = dict(given.named_parameters())
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(
                        torch.distributed.tensor.distribute_tensor(values[name], mesh, parameter.placements)
                    )
        else:
            for each in [*model.blocks, model]:
                fully_shard(each)  # torch's default mesh, of all ranks
        model = evenstep.attach(model, compare_every=1 if how == "called replicas" else None)
        gpt.train(model, lambda tensor: share_of(world, tensor), micro=2, **arguments)
        expected, _ = gpt.reference(**arguments)
        for name, each in gpt.whole(model).items():
            torch.testing.assert_close(
                each, expected[re.sub(r"_orig_mod\.|_checkpoint_wrapped_module\.", "", name)], rtol=0, atol=1e-12
            )


def refusal(make, mesh):
    """Type and text of the error, and whether ranks still understand each other."""
    with world_of(mesh) as world:
        try:
            make(world)
        except EvenstepError as error:
            return type(error).__name__, str(error), world.exchange(world.rank) == list(range(world.world_size))
    raise AssertionError("no error")


def no_such_class(world):
    evenstep.parallelize(gpt.GPT(), world, blocks="Blok")


def no_such_module(world):
    evenstep.parallelize(gpt.GPT(), world, tensor_plan={"blocks.*.upp": None})


def no_plan(world):
    evenstep.parallelize(gpt.GPT(), world)


def no_dimension(world):
    from torch.distributed.fsdp import CPUOffloadPolicy

    evenstep.parallelize(gpt.GPT(), world, offload_policy=CPUOffloadPolicy())


def optimizer_first(world):
    model = gpt.GPT()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    evenstep.parallelize(model, world)
    optimizer.step()


def optimizer_before_fully_shard(world):
    model = gpt.GPT()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    evenstep.attach(by_torch(model, world))
    optimizer.step()


def local_sgd(world):
    model = evenstep.parallelize(gpt.GPT(), world)
    evenstep.LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), every=2)


def sharded_optimizer(world):
    evenstep.ShardedOptimizer(evenstep.parallelize(gpt.GPT(), world), torch.optim.SGD, lr=0.1)


def twice(world):
    evenstep.parallelize(evenstep.parallelize(gpt.GPT(), world).module, world)


def one_rank_alone(world):
    evenstep.parallelize(gpt.GPT(), world, blocks="Blok" if world.rank else None)


def other_model(world):
    evenstep.parallelize(nn.Linear(2 + world.rank, 2), world)


def other_mesh(world):
    from torch.distributed.fsdp import fully_shard

    evenstep.attach(fully_shard(nn.Linear(2, 2), mesh=world.mesh["tensor"]))


def layers_over_data_ranks(world):
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    evenstep.attach(parallelize_module(nn.Linear(2, 2), world.mesh["shard"], ColwiseParallel()))


def other_stage(world):
    evenstep.parallelize(nn.Linear(2 + (world.rank == 3), 2), world)


def other_blocks(world):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    evenstep.parallelize(model, world, blocks="Linear" if world.rank == 3 else None)


SHARD, TENSOR, STAGES = {"shard": 2}, {"tensor": 2}, {"pipeline": 2, "shard": 2}


@pytest.mark.parametrize(
    ("make", "mesh", "kind", "told"),
    [
        (no_such_class, SHARD, "ConfigurationError", "blocks='Blok': the model has no such module; it has Block"),
        (no_such_module, TENSOR, "ConfigurationError", "tensor_plan names 'blocks.*.upp', but the model has no such"),
        (no_plan, TENSOR, "ConfigurationError", "there is no tensor_plan"),
        (no_dimension, {"replicate": 2}, "ConfigurationError", 'the mesh has no dimension "shard"'),
        (optimizer_first, SHARD, "UsageError", "SGD was made before the model was divided"),
        (optimizer_before_fully_shard, SHARD, "UsageError", "SGD was made before the model was divided"),
        (local_sgd, SHARD, "UsageError", "no rank can step without the others"),
        (sharded_optimizer, SHARD, "UsageError", "it isn't needed here"),
        (twice, SHARD, "UsageError", "divided already"),
        (one_rank_alone, SHARD, "ConfigurationError", "blocks='Blok'"),
        (other_model, SHARD, "MismatchError", "the ranks don't have the same model"),
        (other_stage, STAGES, "MismatchError", "the ranks don't have the same model: parameter 'weight' has shape"),
        (other_blocks, STAGES, "MismatchError", "the number of blocks is 0 on rank 0 and 2 on rank 1"),
        (other_mesh, TENSOR, "ConfigurationError", "fully_shard has divided 'weight' over ranks [0, 1]"),
        (layers_over_data_ranks, SHARD, "ConfigurationError", "different samples, and fully_shard doesn't manage it"),
    ],
)
def test_a_mistake_is_one_error_on_all_ranks(ranks, make, mesh, kind, told):
    found = ranks.run(refusal, math.prod(mesh.values()), make, mesh)
    assert {each[0] for each in found} == {kind}
    assert all(told in each[1] for each in found)
    assert all(each[2] for each in found)


@on_ranks(4)
def test_stages_of_a_pipeline_may_differ(world):
    """Stages of one and of two layers; each has a step of its own."""
    with world_of(STAGES) as world:
        stage = world.rank // 2
        layers = [nn.Linear(3, 3) for _ in range(1 + stage)]
        model = evenstep.parallelize(nn.Sequential(*layers), world, blocks="Linear")
        model.backward(model(torch.ones(2, 3)).square().mean(), weight=1 + world.data_rank)
        assert len(model.engine.parameters) == 2 + 2 * stage
        assert model.unused_parameters() == []


@on_ranks(2)
def test_optimizers_may_have_tensors_of_no_module(world):
    """An optimizer over tensors that belong to no module, of which some have the shapes of parameters."""
    from torch.distributed.fsdp import fully_shard

    with world_of(SHARD) as world:
        temperature, prompt = nn.Parameter(torch.zeros(3)), torch.ones(3, 2, requires_grad=True)
        optimizer = torch.optim.SGD([temperature, prompt], lr=0.1)
        model = evenstep.attach(fully_shard(nn.Linear(2, 3), mesh=world.mesh))
        loss = (model(torch.ones(1, 2)) * temperature + prompt.sum()).square().mean()
        model.backward(loss, weight=1)
        optimizer.step()


def drifting(changed):
    """The error, and the step in which it came, if a rank's part of a parameter is changed before the second step."""
    with world_of({"replicate": 2, "shard": 2}) as world:
        torch.manual_seed(3)
        model = evenstep.parallelize(nn.Linear(6, 4), world, compare_every=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            if step == 1 and world.rank == changed:
                with torch.no_grad():
                    model.module.weight.to_local()[0] += 1
            try:
                model.backward(model(torch.ones(2, 6)).square().mean(), weight=2)
            except DriftError as error:
                return str(error), step
            optimizer.step()
            optimizer.zero_grad()
        return "", step


def test_replicas_of_parts_that_differ_are_one_error_on_all_ranks(ranks):
    found = ranks.run(drifting, 4, 3)
    assert len(set(found)) == 1
    assert found[0][1] == 2, "found in the second step, and still there after it"
    assert "ranks 1 and 3 differ in parameter 'weight'" in found[0][0]
    assert ranks.run(drifting, 4, None) == [("", 3)] * 4
