"""torch's interface around forward and backward, on 2, 3 and 4 ranks, compared with one process or torch's class."""

from __future__ import annotations

import contextlib
import copy
import inspect
import pickle
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

import evenstep
from evenstep.errors import ConfigurationError, UsageError
from tests.ranks import on_ranks

SIZES = pytest.mark.parametrize("nproc", [2, 3])


def make(seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def batch(seed, rows=4, dtype=torch.float64):
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def grads(model):
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def assert_same(got, expected, **tolerance):
    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert (a is None) == (b is None), f"{index}: {a} and {b}"
        if a is not None:
            a, b = (each.to_dense() if each.is_sparse else each for each in (a, b))
            torch.testing.assert_close(a, b, msg=lambda m, i=index: f"{i}: {m}", **tolerance)


def averaged(module, batches, loss_of=lambda out: out.square().mean()):
    """Gradients of the mean of the batches' losses, in one process."""
    module.zero_grad()
    torch.stack([loss_of(module(x)) for x in batches]).mean().backward()
    return grads(module)


# ---------------------------------------------------------------------- groups and meshes


@pytest.mark.extended
@on_ranks(4)
def test_a_sub_group_averages_among_its_ranks(world, fresh_seed):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = world.rank // 2
    model = evenstep.DistributedDataParallel(make(mine), process_group=groups[mine])
    again = evenstep.DistributedDataParallel(make(mine), process_group=groups[mine])
    assert again.world is model.world
    assert (model.world.rank, model.world.world_size) == (world.rank % 2, 2)
    model(batch(fresh_seed + world.rank)).square().mean().backward()
    assert_same(grads(model), averaged(make(mine), [batch(fresh_seed + 2 * mine + r) for r in range(2)]))
    with pytest.raises(UsageError, match=f"rank {world.rank} is not in the process group"):
        world.of_group(groups[1 - mine])
    with pytest.raises(UsageError, match="is not in the process group"):
        evenstep.DistributedDataParallel(make(), process_group=dist.new_group([1 - world.rank % 2]))
    with pytest.raises(UsageError, match="over all ranks"):
        pickle.dumps(model)
    whole = evenstep.DistributedDataParallel(make(), process_group=dist.group.WORLD)
    assert whole.world is world


@pytest.mark.extended
@on_ranks(4)
def test_tensor_parallelism_inside_a_mesh(world, fresh_seed):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module = make()
    parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    with pytest.raises(ConfigurationError, match="2 dimensions"):
        evenstep.DistributedDataParallel(module, device_mesh=mesh)
    with pytest.raises(ConfigurationError, match="pass one of them"):
        evenstep.DistributedDataParallel(module, device_mesh=mesh["dp"], process_group=dist.group.WORLD)
    model = evenstep.DistributedDataParallel(module, device_mesh=mesh["dp"])
    replica = world.rank // 2
    model(batch(fresh_seed + replica)).square().mean().backward()
    names = [name for name, _ in make().named_parameters()]
    whole = dict(zip(names, averaged(make(), [batch(fresh_seed), batch(fresh_seed + 1)]), strict=True))
    local = {name: p.grad for name, p in zip(model.engine.names, model.engine.parameters, strict=True)}
    tp = world.rank % 2
    torch.testing.assert_close(local["0.weight"], whole["0.weight"].chunk(2)[tp])
    torch.testing.assert_close(local["2.weight"], whole["2.weight"].chunk(2, dim=1)[tp])


# ---------------------------------------------------------------------- ranks that run out of data


@pytest.mark.extended(ranks=3)
@on_ranks(2, 3)
def test_join_with_accumulation_and_batch_norm(world, fresh_seed):
    """Passes that don't synchronise need no counterpart; the first to leave never had any data."""
    model = evenstep.DistributedDataParallel(nn.Sequential(make(), nn.BatchNorm1d(3).double()))
    with Join([model], divide_by_initial_world_size=False):
        for step in range(2 * world.rank):
            x = batch(fresh_seed + 10 * step + world.rank)
            with model.no_sync():
                model(x).square().mean().backward()
            with torch.no_grad():
                model(x)
            model(x).square().mean().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
    mine = torch.cat([t.detach().reshape(-1).double() for t in (*model.parameters(), *model.buffers())])
    everybody = world.gather(mine[None])
    assert torch.isfinite(everybody).all()
    assert all(torch.equal(everybody[0], other) for other in everybody)
    counts = [int(b) for name, b in model.named_buffers() if name.endswith("num_batches_tracked")]
    assert counts == [3 * 2 * (world.world_size - 1)], "module buffers are those of the rank that left last"


def square(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()


def zero_redundancy(model, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, when it is imported
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, **settings)


@pytest.mark.extended(ranks=3)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("order", ["first, second", "second, first", "models, optimizer", "with hooks"])
@pytest.mark.parametrize("through_both", [False, True])
@on_ranks(2, 3)
def test_several_models_join_in_any_order(world, fresh_seed, through_both, order, weighted):
    """In `loss.backward()` the model that the loss reaches first ends first; in its own `backward` it ends last.

    Two models, in a `Join` in the order in which their backward passes end, or in the other one, or with an optimizer
    behind them, of which each rank steps its share of the parameters, also after it has left its loop.
    """
    models = [evenstep.DistributedDataParallel(square(s), bucket_cap_mb=1e-4) for s in (1, 2)]
    if order == "with hooks":  # a bucket that a hook sends comes behind the announcement of its window
        for model in models:
            model.register_comm_hook(None, default_hooks.allreduce_hook)
    modules = [square(s) for s in (1, 2)]
    settings = {"lr": 0.1, "momentum": 0.9 if order == "models, optimizer" else 0.0}
    whole, reference = nn.ModuleList(models), torch.optim.SGD(nn.ModuleList(modules).parameters(), **settings)
    joinables = {"first, second": models, "second, first": models[::-1]}.get(order, list(models))
    optimizer = torch.optim.SGD(whole.parameters(), **settings)
    if order == "models, optimizer":
        optimizer = zero_redundancy(whole, **settings)
        joinables.append(optimizer)

    def losses(first, second, x):
        return [second(first(x)).square().mean()] if through_both else [m(x).square().mean() for m in (first, second)]

    with Join(joinables, divide_by_initial_world_size=False):
        for step in range(2 * world.rank):
            x = batch(fresh_seed + 10 * step + world.rank, rows=2 + world.rank)
            for number, loss in enumerate(losses(*models, x)):
                if weighted:
                    evenstep.backward(models if through_both else [models[number]], loss, weight=len(x))
                else:
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for step in range(2 * (world.world_size - 1)):
        batches = [batch(fresh_seed + 10 * step + r, rows=2 + r) for r in range(step // 2 + 1, world.world_size)]
        shares = [float(len(x)) if weighted else 1.0 for x in batches]
        for x, share in zip(batches, shares, strict=True):
            (sum(losses(*modules, x)) * share / sum(shares)).backward()
        reference.step()
        reference.zero_grad()
    for model, module in zip(models, modules, strict=True):
        assert_same(model.parameters(), module.parameters(), rtol=0, atol=1e-12)
    assert world.rank == world.world_size - 1 or all(grad is None for grad in grads(whole))


@pytest.mark.extended(beyond=3)
@pytest.mark.parametrize("mistake", ["twice", "not the same", "optimizer first"])
@on_ranks(2, 3)
def test_models_that_join_out_of_turn_are_told_at_once(world, mistake):
    """What can't end on a rank that has left is refused on those that haven't, at once and not at the deadline."""
    models = [evenstep.DistributedDataParallel(make(s)) for s in (1, 2)]
    numbers = {"twice": [0, 0, 1], "not the same": [0, 1] if world.rank else [1, 0]}.get(mistake, [0])
    joinables = list(models)
    if mistake == "optimizer first":
        joinables = [zero_redundancy(models[0], lr=0.1), models[0]]
    message = {
        "twice": "of number 1 twice",
        "not the same": "of number 1 on some ranks and of number 2 on others",
        "optimizer first": r"Join\(\[model, optimizer\]\)",
    }[mistake]
    with pytest.raises(UsageError, match=rf"rank {world.rank}: .*{message}"), Join(joinables):  # noqa: PT012
        for _ in range(2):
            for number in numbers:
                models[number](batch(world.rank)).square().mean().backward()
    world.close()  # with buckets that nobody has waited for


@pytest.mark.parametrize("after", [0, 2])
@on_ranks(2, 3)
def test_a_rank_that_has_left_is_told_of_a_mistake(world, after):
    """Rank 0 has left its loop when the others average one model's gradients twice: it is told, too."""
    models = [evenstep.DistributedDataParallel(make(s)) for s in (1, 2)]
    with pytest.raises(UsageError, match=rf"rank {world.rank}: .*of number 2 twice"), Join(models):  # noqa: PT012
        for step in range(5 if world.rank else after):
            for number in (1, 1) if step == after else (1, 0):
                models[number](batch(world.rank)).square().mean().backward()
    world.close()  # with buckets that nobody has waited for


@on_ranks(2, 3)
def test_one_join_in_another_is_refused(world):
    first, second = (evenstep.DistributedDataParallel(make(s)) for s in (1, 2))
    with pytest.raises(UsageError, match=r"Use one Join for both: .*Join\(\[first, second\]\)"), first.join():  # noqa: SIM117
        with second.join():
            pass
    for _ in range(2):  # whoever leaves by way of an exception has left
        with pytest.raises(ZeroDivisionError), first.join():
            raise ZeroDivisionError
    for model in (first, second):
        model(batch(world.rank)).square().mean().backward()
        with model.join():
            for _ in range(world.rank):
                model(batch(world.rank)).square().mean().backward()


@pytest.mark.parametrize("how", ["disabled", "impossible"])
@on_ranks(2, 3)
def test_without_a_join_models_are_as_outside_of_one(world, how):
    """A `Join` that is disabled, or couldn't be made, changes nothing: models are as outside of one."""
    models = [evenstep.DistributedDataParallel(make(s), bucket_cap_mb=2e-4) for s in (1, 2)]
    joinables = models if how == "disabled" else [*models, make()]
    with contextlib.suppress(AttributeError), Join(joinables, enable=False):
        for model in models:
            model(batch(world.rank)).square().mean().backward()
    if how == "impossible":
        with models[0].join():  # nor has what was listed beside it to do with its next one
            for _ in range(2 + world.rank):
                models[0](batch(world.rank)).square().mean().backward()
        models[0].zero_grad()
    for seed, model in zip((1, 2), models, strict=True):
        if how == "disabled":
            assert model.monitors.drift.is_on
        else:
            model(batch(world.rank)).square().mean().backward()
        expected = averaged(make(seed), [batch(rank) for rank in range(world.world_size)])
        assert_same(grads(model), expected, rtol=0, atol=1e-12)
        assert model.monitors.drift.is_on


@on_ranks(2)
def test_being_counted_is_awaited(world):
    """The collective in which `Join` counts a rank is awaited once per window."""
    model = evenstep.DistributedDataParallel(make())
    waits = []

    def notify(joinable, notify=Join.notify_join_context):
        work = notify(joinable)
        return mock.Mock(wait=lambda: waits.append(work.wait()))

    with mock.patch.object(Join, "notify_join_context", notify), model.join():
        for step in range(2 + world.rank):
            model(batch(step)).sum().backward()
            assert len(waits) == step + 1


def test_join_in_a_world_of_one_does_nothing():
    model = evenstep.DistributedDataParallel(make(), world=evenstep.World.alone())
    with model.join():
        model(batch(0)).sum().backward()
    with model.join(enable=False):
        model(batch(0)).sum().backward()


# ---------------------------------------------------------------------- several models in one window


def two_scales(seed, own_first, first_dtype, second_dtype, has_idle):
    """16-bit models whose weights are divided by other numbers; a window of the first has passes of both kinds.

    The second's weights are some hundreds, the first's own are a few; with `has_idle` the last rank's is 0.
    """
    world = evenstep.init(quiet=True)
    models = [evenstep.DistributedDataParallel(square(s).to(d)) for s, d in ((1, first_dtype), (2, second_dtype))]
    modules = [square(1).to(first_dtype).double(), square(2).to(second_dtype).double()]
    modules = [copy.deepcopy(each) for each in modules]
    batches = [
        [batch(seed + 10 * number + r, dtype=torch.float64) for r in range(world.world_size)] for number in range(3)
    ]
    weights = [[base + 3.0 * r for r in range(world.world_size)] for base in (200.0, 2.0, 300.0)]
    if has_idle:
        weights[1][-1] = 0.0

    def through_both(first, second, x):
        dtypes = [next(each.parameters()).dtype for each in (first, second)]
        return second(first(x.to(dtypes[0])).to(dtypes[1])).double().square().mean()

    def through_first(first, second, x):
        return first(x.to(next(first.parameters()).dtype)).double().abs().mean()

    order = [0, 2, 1] if has_idle else [1, 0, 2] if own_first else [0, 1, 2]
    for step in range(1 if has_idle else 2):
        for number in order:
            x, weight = batches[number][world.rank], weights[number][world.rank]
            with contextlib.ExitStack() as stack:
                if number != order[-1]:
                    for model in models:
                        stack.enter_context(model.no_sync())
                if number == 1:
                    models[0].backward(through_first(*models, x), weight=weight)
                else:
                    evenstep.backward(models[::-1], through_both(*models, x), weight=weight)
        loss_of = {0: through_both, 1: through_first, 2: through_both}
        for number in range(3):
            for x, weight in zip(batches[number], weights[number], strict=True):
                (loss_of[number](*modules, x) * weight).backward()
        totals = [sum(map(sum, weights)), sum(weights[0]) + sum(weights[2])]
        ended = models[:1] if has_idle else models  # the last pass is then one of the first model alone
        for model, module, total in zip(ended, modules, totals, strict=not has_idle):
            for p, q in zip(model.parameters(), module.parameters(), strict=True):
                expected = q.grad / total
                torch.testing.assert_close(p.grad.double(), expected, rtol=0.1, atol=0.03 * float(expected.abs().max()))
            module.zero_grad()
            model.zero_grad(set_to_none=step == 0)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("first", "second"),
    [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float64), (torch.float64, torch.bfloat16)],
)
@pytest.mark.parametrize("own_first", [False, True])
@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_passes_with_other_scales_in_one_window(ranks, fresh_seed, nproc, own_first, first, second):
    ranks.run(two_scales, nproc, fresh_seed, own_first, first, second, False)


@pytest.mark.parametrize("nproc", [2, 3])
def test_passes_with_other_scales_and_a_weight_of_zero_on_one_rank(ranks, fresh_seed, nproc):
    ranks.run(two_scales, nproc, fresh_seed, False, torch.bfloat16, torch.bfloat16, True)


def make_square(seed):
    return square(seed).float()


@pytest.mark.parametrize("overflows", [False, True])
@on_ranks(1, 2, 3)
def test_one_scaler_for_two_models(world, overflows):
    """A loss goes through two models and is scaled: an overflow is the scaler's business for both."""
    models = [evenstep.DistributedDataParallel(make_square(s), on_nonfinite="raise") for s in (1, 2)]
    modules = [make_square(s) for s in (1, 2)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in models]
    for step in range(3):
        x = batch(step + world.rank, dtype=torch.float32)
        loss = models[1](models[0](x)).square().mean()
        if overflows and step == 1 and world.rank == 0:
            loss = loss * float("inf")
        evenstep.backward(models, loss, weight=2 + world.rank, scaler=scaler)
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        if overflows and step == 1:
            assert scaler.get_scale() == 2.0**9
            continue
        batches = [batch(step + r, dtype=torch.float32) for r in range(world.world_size)]
        losses = [(2 + r) * modules[1](modules[0](x)).square().mean() for r, x in enumerate(batches)]
        (sum(losses) / sum(2 + r for r in range(world.world_size))).backward()
        for module in modules:
            torch.optim.SGD(module.parameters(), lr=0.1).step()
            module.zero_grad()
    for model, module in zip(models, modules, strict=True):
        assert_same(model.parameters(), module.parameters(), rtol=1e-5, atol=1e-6)
    with pytest.raises(evenstep.errors.NonFiniteError):  # without a scaler it is a fault
        evenstep.backward(models, models[1](models[0](x)).square().mean() * float("inf"), weight=1)


# ---------------------------------------------------------------------- kinds of parameters and outputs


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 4, sparse=True)
        self.tags = nn.EmbeddingBag(10, 4, sparse=True, mode="sum")
        self.out = nn.Linear(4, 2)

    def forward(self, words, tags):
        out = self.words(words).mean(1)
        return self.out(out + self.tags(tags) if tags is not None else out)


@pytest.mark.parametrize("weighted", [False, True])
@on_ranks(2, 3)
def test_sparse_gradients_travel_sparse(world, fresh_seed, weighted):
    torch.manual_seed(fresh_seed)
    module = Bag().double()
    model = evenstep.DistributedDataParallel(copy.deepcopy(module))
    optimizer, reference = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, module))
    for step in range(3):
        generator = torch.Generator().manual_seed(fresh_seed + step)
        words = torch.randint(0, 20, (world.world_size, 3, 5), generator=generator)
        tags = torch.randint(0, 10, (world.world_size, 3, 2), generator=generator)
        uses_tags = [step == 1 and r > 0 for r in range(world.world_size)]
        weights = [float(r + 1) if weighted else 1.0 for r in range(world.world_size)]
        r = world.rank
        loss = model(words[r], tags[r] if uses_tags[r] else None).square().mean()
        if weighted:
            model.backward(loss, weight=weights[r])
        else:
            loss.backward()
        assert model.module.words.weight.grad.is_sparse
        losses = [
            module(words[i], tags[i] if uses_tags[i] else None).square().mean() * w for i, w in enumerate(weights)
        ]
        (torch.stack(losses).sum() / sum(weights)).backward()
        assert_same(grads(model), grads(module), rtol=0, atol=1e-12)
        assert model.unused_parameters() == ([] if step == 1 else ["tags.weight"])
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    assert_same(model.parameters(), module.parameters(), rtol=0, atol=1e-12)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Linear(6, 6, bias=False).double()
        self.again = nn.Linear(6, 6).double()
        self.again.weight = self.embed.weight

    def forward(self, x):
        return self.again(torch.tanh(self.embed(x)))


@on_ranks(2, 3)
def test_a_hook_that_comes_after_wrapping_changes_what_is_sent(world, fresh_seed):
    """A hook that the script puts on accumulated gradients after wrapping comes before they are sent, as in torch."""
    x = batch(fresh_seed + world.rank)
    found = []

    def change(parameter):
        parameter.grad.mul_(world.rank + 2).add_(1.0)

    for wrap in (evenstep.DistributedDataParallel, TorchDistributedDataParallel):
        model = wrap(make(), bucket_cap_mb=1e-4)
        for step in range(4):
            model.zero_grad()
            if step == 1:
                next(model.parameters()).register_post_accumulate_grad_hook(lambda _: None)
                for parameter in model.parameters():
                    parameter.register_post_accumulate_grad_hook(change)
            model(x).square().mean().backward()
            found.append(grads(model))
    for ours, torchs in zip(found[:4], found[4:], strict=True):
        assert_same(ours, torchs, rtol=0, atol=1e-12)


@on_ranks(2, 3)
def test_modules_are_used_in_many_ways(world, fresh_seed):
    """Shared parameters, several modules at once, backward twice or for some inputs, hooks."""
    batches = [batch(fresh_seed + r) for r in range(world.world_size)]
    x = batches[world.rank]

    model, module = evenstep.DistributedDataParallel(Tied()), Tied()
    model(x).square().mean().backward()
    assert_same(grads(model), averaged(module, batches), rtol=0, atol=1e-12)

    one, two = (evenstep.DistributedDataParallel(make(s), bucket_cap_mb=1e-4) for s in (1, 2))
    (one(x) * two(x)).mean().backward()
    both = nn.ModuleList([make(1), make(2)])
    torch.stack([(both[0](b) * both[1](b)).mean() for b in batches]).mean().backward()
    assert_same([*grads(one), *grads(two)], grads(both), rtol=0, atol=1e-12)

    model = evenstep.DistributedDataParallel(make())
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    once = grads(model)
    loss.backward()
    assert_same(grads(model), [2 * g for g in once], rtol=0, atol=1e-12)
    model.zero_grad()

    for _ in range(2):
        model(x).square().mean().backward(inputs=[model.module[0].weight])
        assert_same(grads(model)[:1], once[:1], rtol=0, atol=1e-12)
        assert grads(model)[1:] == [None] * 3
        model.zero_grad()

    seen = []
    handle = model.module[0].weight.register_hook(lambda grad: seen.append(grad.clone()) or grad * 3)
    model(x).square().mean().backward()
    assert len(seen) == 1
    assert_same([model.module[0].weight.grad], [3 * once[0]], rtol=0, atol=1e-12)
    handle.remove()


@on_ranks(2, 3)
def test_a_wrapped_model_that_is_wrapped_again_is_averaged_once(world, fresh_seed):
    batches = [batch(fresh_seed + rank) for rank in range(world.world_size)]
    inner = evenstep.DistributedDataParallel(make())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        outer = evenstep.DistributedDataParallel(inner)
    assert [str(each.message)[:29] for each in told] == ["the module is wrapped already"] * (world.rank == 0)
    for model in (outer, inner, outer):
        outer.zero_grad()
        model(batches[world.rank]).square().mean().backward()
        assert_same(grads(outer), averaged(make(), batches), rtol=0, atol=1e-12)
    before = outer.engine.num_reductions
    with outer.no_sync(), inner.no_sync():
        outer(batches[world.rank]).square().mean().backward()
    assert outer.engine.num_reductions == before
    assert list(outer.state_dict()) == [f"module.{name}" for name in inner.state_dict()]
    again = copy.deepcopy(outer) if world.process_group is dist.group.WORLD else outer
    assert again.engine is again.module.engine


# ---------------------------------------------------------------------- arguments and attributes


class Ignoring(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.shared, self.own = make(5), nn.Linear(6, 1 + rank).double()
        self.register_buffer("mine", torch.tensor([float(rank)]))
        self.register_buffer("ours", torch.tensor([float(rank)]))
        TorchDistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            self, ["own.weight", "own.bias", "mine"]
        )

    def forward(self, x):
        return self.shared(x).mean() + self.own(x).mean()


@on_ranks(2, 3)
def test_what_is_ignored_stays_each_ranks_own(world, fresh_seed):
    module = Ignoring(world.rank)
    model = evenstep.DistributedDataParallel(module)
    assert model.parameters_to_ignore == {"own.weight", "own.bias", "mine"}
    assert (module.mine.item(), module.ours.item()) == (world.rank, 0.0)
    x = batch(fresh_seed + world.rank)
    model(x).square().backward()
    alone = Ignoring(world.rank)
    alone.load_state_dict(module.state_dict())
    alone(x).square().backward()
    assert_same(grads(module.own), grads(alone.own), rtol=0, atol=1e-12)
    assert not torch.equal(module.shared[0].weight.grad, alone.shared[0].weight.grad)
    module.mine.fill_(7 + world.rank)
    model(x).backward()
    assert module.mine.item() == 7 + world.rank


@on_ranks(2, 3)
def test_torchs_arguments_and_attributes(world, fresh_seed):
    x, batches = batch(fresh_seed + world.rank), [batch(fresh_seed + r) for r in range(world.world_size)]
    expected = averaged(make(), batches)
    everything = {
        "find_unused_parameters": True,
        "check_reduction": True,
        "gradient_as_bucket_view": True,
        "static_graph": True,
        "skip_all_reduce_unused_params": True,
        "batched_grad_copy": True,
        "lazy_bucket_allocation": True,
        "bucket_cap_mb_list": [1e-4, 5e-4],
    }
    model = evenstep.DistributedDataParallel(make(), **everything)
    for _ in range(3):
        model.zero_grad()
        model(x).square().mean().backward()
        assert_same(grads(model), expected, rtol=0, atol=1e-12)
    assert len(model.engine.buckets) > 1
    assert model.bucket_bytes_cap == 1 << 20, "what torch.compile insists on"

    model.require_backward_grad_sync = False
    before = model.engine.num_reductions
    model(x).square().mean().backward()
    assert model.engine.num_reductions == before
    assert not model.will_sync_module_buffers()
    model.require_backward_grad_sync = True
    assert model.broadcast_buffers
    assert model.forward_sync_buffers
    ((moved,), _) = model.to_kwargs((x,), {}, 0)
    assert torch.equal(moved[0], x)
    for inherited in (lambda: model.scatter((x,), {}, [torch.device("cpu")]), lambda: model.gather([x], "cpu")):
        with pytest.raises((ValueError, AssertionError), match=r"non cpu device|not implemented for CPU"):
            inherited()  # torch's own, for devices only
    model._set_static_graph()
    assert model._has_rebuilt_buckets
    assert not model.is_multi_device_module


@on_ranks(2, 3)
def test_arguments_about_buffers_mean_what_torch_means(world):
    """[equal after construction, after a step, `broadcast_buffers`] for each setting, of ours and of torch's own class.

    None where torch's knows no such argument: 2.11's has no `forward_sync_buffers`.
    """
    settings = [
        {},
        {"broadcast_buffers": True},
        {"broadcast_buffers": False},
        {"forward_sync_buffers": False},
        {"forward_sync_buffers": True, "broadcast_buffers": False},
    ]
    outcomes = []
    for wrap in (evenstep.DistributedDataParallel, TorchDistributedDataParallel):
        for arguments in settings:
            if not arguments.keys() <= inspect.signature(wrap).parameters.keys():
                outcomes.append(None)
                continue
            module = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
            module[1].running_mean.fill_(world.rank)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                model = wrap(module, **arguments)
            means = [module[1].running_mean.clone()]
            model(batch(world.rank, dtype=torch.float32)).sum().backward()
            with torch.no_grad():
                model(batch(0, dtype=torch.float32))  # torch's class makes buffers equal at forward
            means.append(module[1].running_mean.clone())
            everybody = [world.gather(mean[None]) for mean in means]
            outcomes.append([*(bool((each == each[0]).all()) for each in everybody), model.broadcast_buffers])
    ours, torchs = outcomes[: len(settings)], outcomes[len(settings) :]
    assert ours == [[True] * 3, [True] * 3, [False] * 3, [True, False, False], [True] * 3]
    assert None not in torchs[:3]
    assert all(theirs in (None, own) for own, theirs in zip(ours, torchs, strict=True))


@on_ranks(2, 3)
def test_buffers_may_be_switched_on_and_off_between_steps(world):
    """For ours and torch's: are module buffers equal after a step with the switch as it stands?"""
    outcomes = []
    for wrap in (evenstep.DistributedDataParallel, TorchDistributedDataParallel):
        model = wrap(nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)))
        name = "forward_sync_buffers" if hasattr(model, "forward_sync_buffers") else "broadcast_buffers"  # torch 2.11
        found = []
        for step, switch in enumerate((None, False, None, True)):
            if switch is not None:
                setattr(model, "broadcast_buffers" if step == 1 else name, switch)
            model(batch(10 * step + world.rank, dtype=torch.float32)).sum().backward()
            told = (model.broadcast_buffers, model.will_sync_module_buffers())
            assert model.require_forward_param_sync
            with torch.no_grad():
                model(batch(0, dtype=torch.float32))  # torch's class makes buffers equal at forward
            means = world.gather(model.module[1].running_mean[None])
            found.append((*told, bool((means == means[0]).all())))
            assert [len(each) for each in model.modules_buffers[:2]] == [3, 3]
            assert next(iter(model.named_module_buffers)) == "1.running_mean"
        outcomes.append(found)
    ours, torchs = outcomes
    assert ours == torchs == [(True,) * 3, (False,) * 3, (False,) * 3, (True,) * 3]


@on_ranks(2, 3)
def test_it_can_be_pickled_copied_and_saved(world, fresh_seed):
    model = evenstep.DistributedDataParallel(make(), bucket_cap_mb=1e-4)
    model.broadcast_buffers = False
    batches = [batch(fresh_seed + r) for r in range(world.world_size)]
    model(batches[world.rank]).square().mean().backward()
    expected = averaged(make(), batches)
    for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert twin.state_dict().keys() == {f"module.{name}" for name in make().state_dict()}
        twin.zero_grad()
        twin(batches[world.rank]).square().mean().backward()
        assert_same(grads(twin), expected, rtol=0, atol=1e-12)
        assert twin.engine.num_reductions == 1
        assert twin.forward_sync_buffers is twin.engine.trained.module_buffers.is_on is False
    assert set(get_model_state_dict(model)) == set(make().state_dict())
    model.load_state_dict({f"module.{name}": torch.zeros_like(value) for name, value in make().state_dict().items()})
    assert not model.module[0].weight.any()


@on_ranks(2, 3)
def test_optimizers_in_hooks_and_builtin_hooks(world, fresh_seed):
    batches = [batch(fresh_seed + r) for r in range(world.world_size)]
    model, module = evenstep.DistributedDataParallel(make(), bucket_cap_mb=1e-4), make()
    model._register_fused_optim(torch.optim.SGD, 0.1, momentum=0.9)
    reference = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        model(batches[world.rank]).square().mean().backward()
        model.zero_grad()
        averaged(module, batches)
        reference.step()
    assert_same(model.parameters(), module.parameters(), rtol=0, atol=1e-12)

    for kind, tolerance in (
        (dist.BuiltinCommHookType.ALLREDUCE, 1e-12),
        (dist.BuiltinCommHookType.FP16_COMPRESS, 1e-2),
    ):
        model = evenstep.DistributedDataParallel(make())
        model._register_builtin_comm_hook(kind)
        model(batches[world.rank]).square().mean().backward()
        assert_same(grads(model), averaged(make(), batches), rtol=tolerance, atol=tolerance)
    with pytest.raises(UsageError, match="there is one already"):
        model.register_comm_hook(None, lambda state, bucket: None)


@pytest.mark.parametrize(
    "when",
    [
        "before wrapping",
        "after wrapping",
        "after a backward pass",
        "between forward and backward",
        "within a window",
    ],
)
@on_ranks(2, 3)
def test_optimizers_in_the_backward_pass_step_with_the_average(world, fresh_seed, when):
    """torch's `_apply_optimizer_in_backward` on some parameters: each steps once, with the average, and has no grad."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # what torch imports with it
        from torch.distributed.optim import _apply_optimizer_in_backward

    settings = {"lr": 0.1, "momentum": 0.9}
    for weighted in (False, True):
        module, reference = make(), make()

        def apply(now, module=module):
            if now == when:
                _apply_optimizer_in_backward(torch.optim.SGD, module[0].parameters(), settings)

        apply("before wrapping")
        model = evenstep.DistributedDataParallel(module, bucket_cap_mb=1e-4)
        apply("after wrapping")
        optimizers = [torch.optim.SGD(each.parameters(), **settings) for each in (module[2], reference)]
        if when == "after a backward pass":
            for each in (model, reference):
                each(batch(fresh_seed)).square().mean().backward()
                each.zero_grad()
            apply("after a backward pass")
        for step in range(3):
            batches = [batch(fresh_seed + 10 * step + r, rows=2 + r) for r in range(world.world_size)]
            shares = [float(len(x)) if weighted else 1.0 for x in batches]
            before = [p.detach().clone() for p in module.parameters()]
            with model.no_sync():
                loss = model(batches[world.rank]).square().mean()
                if step == 0:
                    apply("between forward and backward")
                model.backward(loss, weight=shares[world.rank]) if weighted else loss.backward()
            assert_same(module.parameters(), before, rtol=0, atol=0)
            if step == 0:
                apply("within a window")
            loss = model(batches[world.rank]).square().mean()
            model.backward(loss, weight=shares[world.rank]) if weighted else loss.backward()
            assert [p.grad is None for p in module.parameters()] == [True, True, False, False]
            twice = 1 if weighted else 2
            for x, share in zip(batches, shares, strict=True):
                (twice * reference(x).square().mean() * share / sum(shares)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_same(module.parameters(), reference.parameters(), rtol=0, atol=1e-12)


@on_ranks(2, 3)
def test_the_batch_may_be_another_dimension(world, fresh_seed):
    """dim=1: the batch is the second dimension of inputs and outputs."""
    torch.manual_seed(1)
    module = nn.GRU(6, 5).double()
    model = evenstep.DistributedDataParallel(copy.deepcopy(module), dim=1)
    sequences = [
        torch.randn(7, r, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(fresh_seed + r))
        for r in range(world.world_size)
    ]  # rank 0's share is empty
    out, _ = model(sequences[world.rank])
    assert out.shape == (7, world.rank, 5)
    model.backward(out.square().mean(), weight=world.rank)
    whole, _ = module(torch.cat(sequences, dim=1))
    whole.square().mean().backward()
    assert_same(grads(model), grads(module), rtol=0, atol=1e-12)


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))
        self.double()

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def compiled(seed):
    """Number of graphs for each class and way of compiling; the gradients are compared here."""
    from torch._dynamo.testing import CompileCounterWithBackend
    from torch._dynamo.utils import counters

    world = evenstep.init(quiet=True)
    batches = [
        torch.randn(4, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + r))
        for r in range(world.world_size)
    ]
    expected = averaged(Deep(), batches)
    num_graphs = []
    for wrap in (evenstep.DistributedDataParallel, TorchDistributedDataParallel):
        for whole in (True, False):
            torch._dynamo.reset()
            counter = CompileCounterWithBackend("eager")
            model = wrap(Deep(), bucket_cap_mb=1)
            if not whole:
                model.module.compile(backend=counter)
            run = torch.compile(model, backend=counter) if whole else model
            for _ in range(3):
                model.zero_grad()
                run(batches[world.rank]).square().mean().backward()
                assert_same(grads(model), expected, rtol=0, atol=1e-12)
            num_graphs.append(counter.frame_count)
            if wrap is evenstep.DistributedDataParallel:
                assert not [why for why in counters["graph_break"] if "does not know how to trace" in why], "it warns"
    return num_graphs


def test_a_compiled_module_is_split_at_buckets_as_torch_does_it(ranks, fresh_seed):
    for ours, ours_inside, torchs, torchs_inside in ranks.run(compiled, 2, fresh_seed, timeout_s=120):
        assert ours == torchs > 1
        assert ours_inside == torchs_inside > 1


class Side(nn.Module):
    """A second output that some losses don't use, from a part that may be wrapped."""

    def __init__(self, seed):
        super().__init__()
        self.first, self.last, self.side = (square(seed + number).double() for number in range(3))

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return self.last(hidden), self.side(hidden)


@pytest.mark.parametrize("is_weighted", [True, False])
@pytest.mark.parametrize("how", ["microbatches", "accumulate"])
@on_ranks(1, 2)
def test_a_wrapped_part_accumulates_with_its_module(world, fresh_seed, how, is_weighted):
    """Beside one process; where it can, the last rank has no samples."""
    module = Side(fresh_seed)
    reference = copy.deepcopy(module)
    module.first = evenstep.DistributedDataParallel(module.first, bucket_cap_mb=1e-4)
    module.side = evenstep.DistributedDataParallel(evenstep.DistributedDataParallel(module.side), bucket_cap_mb=1e-4)
    model = evenstep.DistributedDataParallel(module, bucket_cap_mb=1e-4)
    assert all(name.startswith("last.") for name in model.engine.names), "parts average their own"

    def loss_of(net, x):
        main, side = net(x)
        return main.square().mean() + (side.square().mean() if step < 2 else 0.0)

    def backward(x):
        model.backward(loss_of(model, x), weight=len(x)) if is_weighted else loss_of(model, x).backward()

    for step in range(3):
        has_empty = how == "microbatches" and world.world_size > 1 and step > 0
        rows = [0 if has_empty and rank == world.world_size - 1 else 8 for rank in range(world.world_size)]
        batches = [batch(fresh_seed + 10 * step + rank, rows=count) for rank, count in enumerate(rows)]
        mine = batches[world.rank]
        if how == "microbatches":
            for part in model.microbatches(mine, 4):
                backward(part)
        else:
            with model.accumulate():
                for part in mine[:6].chunk(3):
                    backward(part)
            backward(mine[6:])
        for x in batches:
            for part in x.chunk(4) if len(x) else ():
                share = len(part) / sum(rows) if is_weighted else 1 / world.world_size
                (loss_of(reference, part) * share).backward()
        assert_same(grads(model), grads(reference), rtol=0, atol=1e-12)
        model.zero_grad()
        reference.zero_grad()


@pytest.mark.parametrize(
    ("kind", "is_even", "wanted"),
    [
        (torch.optim.AdamW, False, ["join: in an earlier on"]),
        (torch.optim.AdamW, True, []),
        (torch.optim.SGD, False, []),
    ],
)
@on_ranks(2)
def test_a_join_behind_an_uneven_one_warns_of_optimizer_state(world, kind, is_even, wanted):
    model = evenstep.DistributedDataParallel(square(1))
    optimizer = kind(model.parameters(), lr=0.01)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            with model.join():
                for step in range(2 + (0 if is_even else world.rank)):
                    model.backward(model(batch(step)).square().mean())
                    optimizer.step()
                    model.zero_grad()
    assert [str(each.message)[:22] for each in told] == (wanted if world.rank == 0 else [])
