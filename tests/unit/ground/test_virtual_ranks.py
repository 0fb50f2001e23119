"""Reproducible mode on one rank: virtual ranks, their sums, their random streams, and what is refused."""

from __future__ import annotations

import random
import warnings

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import evenstep
from evenstep.data.order.batch_plan import divide
from evenstep.errors import ConfigurationError, UsageError
from evenstep.ground.computing.virtual_ranks import (
    VirtualRanks,
    begin_of,
    disagreements,
    validate_division,
    validate_mode,
)
from evenstep.optim import exact
from evenstep.replica.gradients.window import Kind, Window
from evenstep.replica.virtual_ranks.loop import virtual_ranks_of
from evenstep.replica.virtual_ranks.sums import VirtualRankSums


@pytest.fixture
def world():
    with evenstep.init(seed=3, reproducible=True, virtual_ranks=4, quiet=True, device="cpu") as made:
        yield made


# ---------------------------------------------------------------------- one rule of division


def test_shares_and_virtual_ranks_follow_one_rule(fresh_seed):
    """Whatever the number of ranks, virtual rank l has the same samples."""
    generator = random.Random(fresh_seed)
    for _ in range(200):
        length, num_virtual_ranks = generator.randrange(40), 1 << generator.randrange(5)
        batch = torch.arange(length)
        expected = [
            batch[begin_of(length, i, num_virtual_ranks) : begin_of(length, i + 1, num_virtual_ranks)]
            for i in range(num_virtual_ranks)
        ]
        expected = [part.tolist() for part in expected if len(part)]
        world_size = 1 << generator.randrange(num_virtual_ranks.bit_length())
        virtual_ranks = num_virtual_ranks // world_size
        found = []
        for rank in range(world_size):
            start, stop = divide(0, length, rank=rank, world_size=world_size, virtual_ranks=virtual_ranks)
            found += [part.tolist() for part in virtual_ranks_of(batch[start:stop], virtual_ranks)]
        assert found == expected


def test_virtual_ranks_begin_where_memory_is_aligned():
    """A view would begin at another place on another number of ranks, and kernels may look at that."""
    first, second = virtual_ranks_of({"x": torch.arange(6.0).view(6, 1), "scale": torch.tensor(2.0)}, 2)
    assert second["x"].tolist() == [[3.0], [4.0], [5.0]]
    assert second["x"].data_ptr() % 64 == first["x"].data_ptr() % 64 == 0
    assert second["scale"] is first["scale"]


# ---------------------------------------------------------------------- the tree


def tree(leaves):
    """The oracle: a binary tree, in which what isn't there is zero."""
    if len(leaves) == 1:
        return leaves[0]
    left, right = tree(leaves[: len(leaves) // 2]), tree(leaves[len(leaves) // 2 :])
    if left is None and right is None:
        return None
    return (torch.zeros(()) if left is None else left) + (torch.zeros(()) if right is None else right)


@pytest.mark.parametrize("per_rank", [1, 2, 4, 8])
def test_a_binary_counter_adds_in_a_tree(fresh_seed, per_rank):
    generator = random.Random(fresh_seed)
    for _ in range(60):
        num_full = generator.randint(1, per_rank)  # behind it virtual ranks are empty
        parameters = [nn.Parameter(torch.zeros(())) for _ in range(3)]
        sums = VirtualRankSums(VirtualRanks(8, 0, 8 // per_rank, 0), parameters)
        sums.begin()
        window, leaves = Window(), [[None] * per_rank for _ in parameters]
        weights = [generator.random() if index < num_full else 0.0 for index in range(per_rank)]
        for virtual_rank in range(num_full):
            window.add(Kind.WEIGHTED, weights[virtual_rank])
            for parameter, own in zip(parameters, leaves, strict=True):
                if generator.random() < 0.7:
                    own[virtual_rank] = torch.tensor(generator.choice([-0.0, generator.uniform(-1, 1), 1e8, -1e8]))
                    parameter.grad = own[virtual_rank].clone()
            if virtual_rank < num_full - 1:
                sums.add_virtual_rank(window, [])
                assert all(parameter.grad is None for parameter in parameters)
                assert len(sums._sums) <= max(1, per_rank.bit_length() - 1)
        sums.close(window, [])
        assert window.weight == tree([torch.tensor(weight, dtype=torch.float64) for weight in weights]).item()
        for parameter, own in zip(parameters, leaves, strict=True):
            expected = tree(own)
            assert (parameter.grad is None) == (expected is None)
            if expected is not None:
                assert torch.equal(parameter.grad.view(torch.int32), expected.view(torch.int32)), own


# ---------------------------------------------------------------------- the answer


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


@pytest.mark.parametrize("length", [1, 3, 10, 16])
@pytest.mark.parametrize("sharded", [False, True])
def test_the_gradient_is_that_of_the_global_mean(world, fresh_seed, length, sharded):
    torch.manual_seed(fresh_seed)
    module, x, y = TwoLayers().double(), torch.randn(length, 5).double(), torch.randint(3, (length,))
    F.cross_entropy(module(x), y).backward()
    expected = [parameter.grad for parameter in module.parameters()]
    for parameter in module.parameters():
        parameter.grad = None
    model = evenstep.DistributedDataParallel(module)
    if sharded:
        evenstep.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    for turn in range(1, 3):  # without zero_grad the second adds to the first
        for mx, my in model.microbatches((x, y), 2):
            model.backward(F.cross_entropy(model(mx), my), weight=len(mx))
        for parameter, grad in zip(module.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, turn * grad, rtol=0, atol=1e-13)


def test_far_more_virtual_ranks_than_samples_cost_nothing():
    assert [part.tolist() for part in virtual_ranks_of(torch.arange(3), 1 << 40)] == [[0], [1], [2]]


# ---------------------------------------------------------------------- random streams


def test_streams_belong_to_virtual_ranks_and_leave_those_outside_alone(world):
    model = evenstep.DistributedDataParallel(nn.Linear(1, 1))

    def draws():
        return torch.rand(()).item(), random.random(), float(numpy.random.rand())

    def loop():
        drawn = []
        for x in model.microbatches(torch.ones(8, 1)):
            drawn.append(draws())
            model.backward(model(x).mean(), weight=len(x))
        return drawn

    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    expected_outside = [draws(), draws()]
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    state = world.virtual_ranks.state_dict()
    first = loop()
    assert draws() == expected_outside[0]
    second = loop()
    assert draws() == expected_outside[1]
    assert len({*first, *second}) == 8
    world.virtual_ranks.load_state_dict(state)
    assert loop() == first


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"reproducible": 2}, "reproducible=2; True or False"),
        ({"virtual_ranks": 8}, "virtual_ranks=8; it needs reproducible=True"),
        ({"threads": 2}, "threads=2; it needs reproducible=True"),
        ({"reproducible": True}, "without a seed"),
        ({"reproducible": True, "seed": 0, "virtual_ranks": 6}, "virtual_ranks=6; a power of two, such as 4 or 8"),
        ({"reproducible": True, "seed": 0, "virtual_ranks": 0}, "virtual_ranks=0; a whole number"),
        ({"reproducible": True, "seed": 0, "virtual_ranks": True}, "virtual_ranks=True; a whole number"),
        ({"reproducible": True, "seed": 0, "threads": 1.5}, "threads=1.5; a whole number"),
        (
            {"reproducible": True, "seed": 0, "threads": 10**9},
            r"threads=1000000000; at most \d+ on this node, which has",
        ),
    ],
)
def test_bad_arguments(arguments, told):
    with pytest.raises(ConfigurationError, match=told):
        evenstep.init(quiet=True, **arguments)
    defaults = {"reproducible": False, "virtual_ranks": None, "threads": None, "seed": None, "num_cores": 2}
    with pytest.raises(ConfigurationError, match=told):
        validate_mode(**(defaults | arguments))


def test_virtual_ranks_that_cant_be_divided():
    with pytest.raises(
        ConfigurationError, match=r"virtual_ranks=8 can't be divided over 3 ranks. Start 1, 2, 4 or 8 ranks"
    ):
        validate_division(8, 3)
    with pytest.raises(ConfigurationError, match=r"over 2 ranks. Start 1 ranks"):
        validate_division(1, 2)


def test_training_outside_of_the_loop(world):
    model = evenstep.DistributedDataParallel(nn.Linear(1, 1))
    x = torch.ones(4, 1)
    with pytest.raises(UsageError, match=r"called in training on rank 0 outside model.microbatches.*for x, y in"):
        model(x)
    model.eval()
    with pytest.raises(UsageError, match=r"a backward pass on rank 0 outside model\.microbatches"):
        model.backward(model(x).mean())
    model.train()
    with pytest.raises(UsageError, match=r"inside another loop.*model.microbatches\(batch, n\)"), model.no_sync():
        next(model.microbatches(x))
    parts = model.microbatches(x)
    with pytest.raises(UsageError, match="the last part was not followed by a backward pass"):
        list(parts)


@pytest.mark.parametrize(
    ("build", "arguments", "told"),
    [
        (
            lambda: nn.Sequential(nn.Linear(2, 2), evenstep.SyncBatchNorm(2)),
            {},
            "'1' is a SyncBatchNorm.*its 4 virtual ranks one after the other. Start as many ranks as virtual ranks",
        ),
        (lambda: nn.Linear(1, 1).bfloat16(), {}, "parameter 'weight' is bfloat16"),
        (
            lambda: nn.Linear(1, 1),
            {"reduce_dtype": torch.float64},
            "reduce_dtype=torch.float64 with parameter 'weight'",
        ),
        (lambda: nn.Embedding(3, 2, sparse=True), {}, "parameter 'weight' has sparse gradients"),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), {"broadcast_buffers": False}, "broadcast_buffers"),
    ],
)
def test_models_that_cant_be_computed_in_virtual_ranks(world, build, arguments, told):
    with pytest.raises(ConfigurationError, match=told):
        evenstep.DistributedDataParallel(build(), **arguments)


# ---------------------------------------------------------------------- switches, and what they can't do


def test_another_machine_is_named():
    facts = {"cpu": "A", "torch": "2.13"}
    saved = VirtualRanks(8, 0, 1, 5, facts, num_loops=7).state_dict()
    same = VirtualRanks(8, 0, 4, 5, facts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same.load_state_dict(saved)
    assert same.num_loops == 7
    with pytest.warns(UserWarning, match="the CPU was A and is B; the GPU was unknown and is C"):
        VirtualRanks(8, 0, 1, 5, {"cpu": "B", "torch": "2.13", "gpu": "C"}).load_state_dict(saved)
    for other in (VirtualRanks(4, 0, 1, 5, facts), VirtualRanks(8, 0, 1, 6, facts)):
        with pytest.raises(ConfigurationError, match="bits would differ"):
            other.load_state_dict(saved)


def test_ranks_on_other_machines_are_named():
    facts = [{"cpu": "A", "torch": "2.13"}, {"cpu": "A", "torch": "2.13"}, {"cpu": "B", "torch": "2.13"}]
    assert disagreements(facts) == ["the CPU is A on rank 0 and B on rank 2"]
    assert disagreements(facts[:2]) == []


# ---------------------------------------------------------------------- norms without an order


def norm_of(tensors, norm_type):
    peak = exact.largest(tensors, torch.device("cpu"))
    return exact.value_of(exact.words_of(tensors, peak, norm_type), peak, norm_type).pow(1 / norm_type)


@pytest.mark.parametrize("norm_type", [1.0, 2.0])
def test_exact_norms_dont_depend_on_the_division(fresh_seed, norm_type):
    generator = torch.Generator().manual_seed(fresh_seed)
    for scale in (1.0, 1e-30, 1e30, 1e-42):
        values = torch.randn(3000, generator=generator) * scale * 10 ** (6 * torch.rand(3000, generator=generator))
        whole = norm_of([values], norm_type)
        torch.testing.assert_close(whole, values.double().norm(norm_type), rtol=1e-12, atol=0)
        cuts = sorted(torch.randint(3000, (5,), generator=generator).tolist())
        parts = [values[a:b] for a, b in zip([0, *cuts], [*cuts, 3000], strict=True)]
        order = torch.randperm(6, generator=generator).tolist()
        assert torch.equal(norm_of([parts[index] for index in order], norm_type), whole)
