"""Reproducible mode: the same bits on any number of ranks.

What is compared are digests of losses, parameters, module buffers and optimizer state: see tests/reproducible_runs.py.

    python -m tests.procs.replica.test_reproducible 100      # that many steps on up to eight ranks
"""

from __future__ import annotations

import sys
import time
from functools import partial

import pytest
import torch
from torch import nn

import evenstep
from evenstep import world as worlds
from evenstep.testing import RankPool
from evenstep.transport.core.reduction import plan_tree
from evenstep.transport.factory import open_between
from evenstep.transport.tree_order import in_tree_order
from tests import reproducible_runs as runs
from tests.procs.transport.test_transport import gloo_carries
from tests.ranks import on_ranks
from tests.transport_cases import Coverage, check_transport

STEPS = 7  # of the digits, 5 of the language model: among them a short last batch, and a step behind it


def assert_same(found, expected, what):
    for rank, each in enumerate(found):
        assert each.keys() == expected.keys()
        differing = [name for name, value in expected.items() if each[name] != value]
        assert not differing, (
            f"{what}, rank {rank}: {len(differing)} of {len(expected)} differ, such as {differing[:6]}"
        )


def compare(ranks, run, sizes, *arguments, also=()):
    """A run on one rank against the same on others, and against others that are to be the same."""
    expected = ranks.run(run, 1, *arguments, timeout_s=600)[0]
    for nproc in sizes:
        assert_same(ranks.run(run, nproc, *arguments, timeout_s=600), expected, f"{nproc} ranks")
    for nproc, others in also:
        assert_same(ranks.run(run, nproc, *others, timeout_s=600), expected, f"{nproc} ranks with {others}")


@pytest.mark.extended
def test_digits_with_batch_normalisation_dropout_and_augmentation(ranks, fresh_seed):
    also = [
        (2, (STEPS, fresh_seed, True)),  # the sharded optimizer against the plain one
        (1, (STEPS, fresh_seed, True)),
        (4, (STEPS, fresh_seed, False, "gloo")),
        (2, (STEPS, fresh_seed, False, None, 2)),  # augmented by workers
    ]
    compare(ranks, runs.digits, [2, 4], STEPS, fresh_seed, also=also)


@pytest.mark.extended
def test_language_model_with_parts_of_virtual_ranks_clipping_and_autocast(ranks, fresh_seed):
    also = [
        (4, (5, fresh_seed, {})),
        (2, (5, fresh_seed, {"shard_gradients": True})),
        (2, (5, fresh_seed, {}, "gloo")),
    ]
    compare(ranks, runs.language, [2, 4], 5, fresh_seed, also=also)


def test_plain_backward_and_a_gradient_scaler(ranks, fresh_seed):
    compare(ranks, runs.digits, [2], STEPS, fresh_seed, False, None, 0, True)
    compare(ranks, runs.language, [4], 5, fresh_seed, None, None, True, also=[(2, (5, fresh_seed, {}, None, True))])


@pytest.mark.extended(ranks=4)
@pytest.mark.parametrize("nproc", [2, 4])
def test_batch_normalisation_over_virtual_ranks_that_run_at_the_same_time(ranks, fresh_seed, nproc):
    ranks.run(warm_up, nproc)
    first = ranks.run(runs.normalised, nproc, fresh_seed, timeout_s=120)
    expected, _ = first[0]
    ranks.run(warm_up, nproc)
    again = ranks.run(runs.normalised, nproc, fresh_seed, "gloo", timeout_s=120)
    for found, distance in first + again:
        assert_same([found], expected, "another rank or transport")
        assert distance < 1e-12, "not what one process computes over the whole batch"


class BesideOutputs(nn.Module):
    """Has a parameter that the loss uses, and the model's own outputs don't, and a buffer that counts passes."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(3, 3).double()
        self.factor = nn.Parameter(torch.randn(1, dtype=torch.float64))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return self.layer(x) * float(self.count)

    def loss(self, model, x):
        return model(x).square().mean() + self.factor.square().sum() * x.sum()


@pytest.mark.parametrize("keeps", [False, True])
@on_ranks(1, 2, 4)
def test_plain_backward_averages_gradients_beside_the_models_outputs(world, fresh_seed, keeps):
    """Without zero_grad between some steps, too; the loop's gradients against those of the whole batch."""
    with runs.reproducible(fresh_seed, virtual_ranks=4) as world:
        model = evenstep.DistributedDataParallel(BesideOutputs(fresh_seed), world=world)
        single = BesideOutputs(fresh_seed)
        for step in range(6):
            x = torch.randn(4, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(fresh_seed + step))
            per_rank = 4 // world.world_size
            share = x[world.rank * per_rank : (world.rank + 1) * per_rank].reshape(-1, 3)
            for part in model.microbatches(share):
                model.module.loss(model, part).backward()
            for each in x:
                single.count.fill_(step)  # every virtual rank begins with the buffers of the step's beginning
                (single.loss(single, each) / 4).backward()
            for (name, got), expected in zip(model.module.named_parameters(), single.parameters(), strict=True):
                message = f"fresh_seed {fresh_seed}, step {step}, {name}: {got.grad} and not {expected.grad}"
                assert torch.allclose(got.grad, expected.grad, rtol=1e-12, atol=1e-12), message
            if not (keeps and step % 3 == 1):
                model.zero_grad(set_to_none=step % 2 == 0)
                single.zero_grad()


# ---------------------------------------------------------------------- transports


def ordered_sums(seed):
    """Sums over Gloo, through one level and through two, against the tree of the ranks' vectors."""
    world = evenstep.init(quiet=True)
    gloo = open_between("gloo", range(world.world_size), timeout_s=600)
    one = in_tree_order(gloo, ["here"] * world.world_size, partial(open_between, timeout_s=600))
    two = in_tree_order(gloo.split(), ["a", "a", "b", "b"][: world.world_size], partial(open_between, timeout_s=600))
    assert len(one._levels) == 1
    assert len(two._levels) == (2 if world.world_size == 4 else 1)
    generator = torch.Generator().manual_seed(seed)
    try:
        for numel in (0, 1, 4, 7, 1000, 1024):
            for dtype in (torch.float32, torch.float64, torch.bfloat16):
                vectors = [
                    (torch.randn(numel, generator=generator) * 1e4 ** torch.rand(numel, generator=generator)).to(dtype)
                    for _ in range(world.world_size)
                ]
                partial_sums = [vector.float() if dtype is torch.bfloat16 else vector.clone() for vector in vectors]
                for a, b in plan_tree(world.world_size):
                    partial_sums[a] = partial_sums[a] + partial_sums[b]
                expected = partial_sums[0].to(dtype)
                for transport in (one, two, one.split() if numel == 7 else one):
                    mine = vectors[world.rank].clone()
                    transport.all_reduce(mine).wait()
                    assert torch.equal(mine, expected)
                    if numel % world.world_size == 0:
                        share = numel // world.world_size
                        out = torch.empty(share, dtype=dtype)
                        transport.reduce_scatter(out, vectors[world.rank].clone()).wait()
                        assert torch.equal(out, expected[world.rank * share : (world.rank + 1) * share])
        assert one.all_reduce(torch.tensor([world.rank]), "max").wait() is None
        mean = torch.tensor([float(world.rank)])
        two.all_reduce(mean, "mean").wait()
        assert mean.item() == (world.world_size - 1) / 2
        coverage = Coverage(shapes=((), (3, 5), (1000,)), carries=gloo_carries, seed=seed)
        assert check_transport(one.split, coverage) > 100
        assert check_transport(two.split, coverage) > 100
    finally:
        one.close()
        two.close()
    return True


@pytest.mark.extended
@pytest.mark.extended(ranks=3)
@pytest.mark.parametrize("nproc", [2, 4])
def test_sums_over_gloo_are_added_in_a_tree(ranks, fresh_seed, nproc):
    assert ranks.run(ordered_sums, nproc, fresh_seed, timeout_s=120) == [True] * nproc


# ---------------------------------------------------------------------- what ranks must agree on


def told_error(arguments_of_rank):
    before = worlds.initialised()
    rank = 0 if before is None else before.rank
    if before is not None:
        before.close()
    try:
        evenstep.init(quiet=True, **arguments_of_rank[rank])
    except evenstep.EvenstepError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_every_rank_is_told_what_is_wrong(ranks):
    ranks.run(warm_up, 2)
    same = {"seed": 1, "reproducible": True, "virtual_ranks": 4}
    for told in ranks.run(told_error, 2, [same, {**same, "virtual_ranks": 8}]):
        assert told.startswith("MismatchError: evenstep.init: virtual_ranks is 4 on rank 0 and 8 on rank 1")
    ranks.run(warm_up, 2)
    for told in ranks.run(told_error, 2, [{**same, "virtual_ranks": 1}] * 2):
        assert told.startswith("ConfigurationError: evenstep.init: virtual_ranks=1 can't be divided over 2 ranks")


def warm_up():
    """So that there is a world, from which a rank knows its number."""
    return evenstep.init(quiet=True).rank


# ---------------------------------------------------------------------- on and on


def chain(ranks, folder, stages, seed):
    """One run in stages of (number of ranks, stops behind this step, is killed there)."""
    for nproc, stop, killed in stages:
        if killed:
            with pytest.raises(evenstep.EvenstepError):
                ranks.run(runs.digits_until, nproc, str(folder), stop, seed, True, timeout_s=600)
        else:
            last = ranks.run(runs.digits_until, nproc, str(folder), stop, seed, False, timeout_s=600)
    return last


def test_a_run_goes_on_on_other_numbers_of_ranks(ranks, fresh_seed, tmp_path):
    expected = ranks.run(runs.digits_until, 1, str(tmp_path / "whole"), 8, fresh_seed, False, timeout_s=600)[0]
    found = chain(ranks, tmp_path / "parts", [(2, 3, False), (1, 5, False), (4, 8, False)], fresh_seed)
    assert_same(found, expected, "2, 1 and 4 ranks")


def play_many_steps(ranks, run, sharded, steps, seed):
    """The same bits after many steps, also on more ranks than there are cores."""
    compare(ranks, run, [2, 4, 8], steps, seed, also=[(8, (steps, seed, sharded))])


MANY = [(runs.digits, True), (runs.language, {})]


@pytest.mark.extended
@pytest.mark.timeout(300)  # more ranks than cores, and each case has a limit of its own
@pytest.mark.parametrize(("run", "sharded"), MANY)
def test_many_steps_on_eight_ranks(ranks, run, sharded, fresh_seed):
    play_many_steps(ranks, run, sharded, 25, fresh_seed)


if __name__ == "__main__":
    given, new_seed = int(sys.argv[1]), int(time.time())
    with RankPool() as pool:
        for each, how in MANY:
            play_many_steps(pool, each, how, given, new_seed)
            print(f"seed {new_seed}: {each.__name__} has the same bits after {given} steps on 1, 2, 4 and 8 ranks")  # noqa: T201
