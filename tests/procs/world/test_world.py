"""What a world does between ranks."""

from __future__ import annotations

import random
import time

import numpy
import pytest
import torch
import torch.distributed as dist

import evenstep
from evenstep import world as worlds
from evenstep.checkpoint.format.random_streams import capture_streams, restore_streams
from evenstep.errors import ConfigurationError, EvenstepError, MismatchError, UsageError
from evenstep.ground.computing import randomness
from tests.ranks import on_ranks
from tests.sockets import listening

SIZES = pytest.mark.parametrize("nproc", [1, 2, 3])


def means():
    world = evenstep.init(quiet=True)
    r = world.rank
    nothing = float("nan") if r == 0 and world.world_size > 1 else 5.0
    assert isinstance(world.mean(r), float)
    tensor = world.mean(torch.tensor([1.0, r]), weight=torch.tensor(r + 1))
    assert tensor.dtype == torch.float32
    for value, weight in ((1.0, -1), (1.0, torch.tensor(float("inf"))), (1.0, "3"), ("text", 1), (1j, 1)):
        with pytest.raises(ConfigurationError, match=r"world.mean on rank \d: (weight=|value=|the value is complex)"):
            world.mean(value, weight=weight)
    # float32 has no odd number above 2^24.
    whole = world.mean(torch.tensor([2**24 + 1, -(2**53)]))
    assert whole.dtype == torch.float64
    assert whole.tolist() == [2**24 + 1, -(2**53)]
    assert world.mean(torch.tensor(True)).item() == 1.0
    return world.mean(r), world.mean(r, weight=r + 1), world.mean(nothing, weight=0 if r == 0 else 2), tensor.tolist()


@SIZES
def test_means_are_weighted_and_equal_on_all_ranks(ranks, nproc):
    weights = [r + 1 for r in range(nproc)]
    expected = sum(r * w for r, w in enumerate(weights)) / sum(weights)
    for plain, weighted, ignoring, tensor in ranks.run(means, nproc):
        assert plain == pytest.approx((nproc - 1) / 2)
        assert weighted == pytest.approx(expected)
        # One rank alone has weight 0, and the mean of nothing is no number.
        assert ignoring == pytest.approx(float("nan") if nproc == 1 else 5.0, nan_ok=True)
        assert tensor == pytest.approx([1.0, expected])


@on_ranks(2)
def test_a_mean_of_what_is_still_to_be_trained_on_is_warned_of(world):
    loss = torch.nn.Linear(2, 1)(torch.ones(3, 2)).square().mean() + 1
    with pytest.warns(UserWarning, match=rf"rank {world.rank}: no gradient flows back through world.mean") as said:
        assert not world.mean(loss).requires_grad
    assert said[0].filename == __file__
    world.mean(loss.detach())
    loss.backward()
    world.mean(loss)  # what is shown behind the backward pass is only shown


@pytest.mark.parametrize("uneven", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
@on_ranks(1, 2, 3)
def test_gather_concatenates_in_order_of_rank(world, dtype, uneven):
    rows = world.rank if uneven else 2
    mine = (torch.arange(rows * 3).reshape(rows, 3) + 10 * world.rank).to(dtype)
    everything = world.gather(mine.T.contiguous().T)  # a stride of its own
    expected = torch.cat(
        [(torch.arange((r if uneven else 2) * 3).reshape(-1, 3) + 10 * r).to(dtype) for r in range(world.world_size)]
    )
    assert everything.dtype == dtype
    assert torch.equal(everything, expected)
    assert world.gather(torch.tensor(world.rank)).tolist() == list(range(world.world_size))


@on_ranks(2)
def test_gather_of_different_dtypes_is_an_error_on_all_ranks(world):
    with pytest.raises(MismatchError, match=r"rank 1 has torch.float64 \[2, 3\]"):
        world.gather(torch.zeros(2, 3, dtype=torch.float64 if world.rank else torch.float32))


@on_ranks(1, 2, 3)
def test_objects_travel_without_pickle_and_refusals_reach_all_ranks(world):
    sent = {"config": [1, 2.5, None, ("a", True)], "tensor": torch.arange(3)}
    for src in range(world.world_size):
        got = world.broadcast_object(sent if world.rank == src else None, src=src)
        assert got["config"] == sent["config"]
        assert torch.equal(got["tensor"], sent["tensor"])
    with pytest.raises(ConfigurationError, match=r"object\['x'\] is a builtins.object"):
        world.broadcast_object({"x": object()} if world.rank == 0 else None)
    last = world.world_size - 1
    with pytest.raises(ConfigurationError, match=rf"on rank {last} .*only dense"):
        world.exchange(torch.eye(2).to_sparse() if world.rank == last else None)
    assert world.broadcast_object("in step" if world.rank == 0 else None) == "in step"
    for src in (9, "0", True):
        with pytest.raises(ConfigurationError, match=f"src={src!r}"):
            world.broadcast_object(1, src=src)
    assert world.exchange(world.rank * 2) == [2 * r for r in range(world.world_size)]
    world.barrier()


def main_goes_first(path):
    world = evenstep.init(quiet=True)
    with world.main_first() as is_main:
        if is_main:
            time.sleep(0.3)
            path.write_text("prepared")
        assert path.read_text() == "prepared"
    assert is_main == world.is_main


@SIZES
def test_main_prepares_while_the_others_wait(ranks, nproc, tmp_path):
    ranks.run(main_goes_first, nproc, tmp_path / "data")


@on_ranks(3)
def test_a_failure_of_main_reaches_those_who_wait(world):
    expected = pytest.raises(OSError, match="disk") if world.is_main else pytest.raises(UsageError, match="disk")
    with expected, world.main_first():
        if not world.is_main:
            raise AssertionError("the block must not run here")
        raise OSError("disk full")


@on_ranks(2)
def test_init_twice_is_the_same_world_or_an_error(world):
    assert evenstep.init() is world
    with pytest.raises(ConfigurationError, match=r"now seed=5 \(was None\)"):
        evenstep.init(seed=5)
    with pytest.raises(ConfigurationError, match=r"now timeout_s=7.5 \(was 600.0\)"):
        evenstep.init(timeout_s=7.5)
    with pytest.raises(ConfigurationError, match="timeout_s=nan"):
        evenstep.init(timeout_s=float("nan"))
    world.close()
    for name, value in (("seed", world.rank), ("timeout_s", 10.0 + world.rank)):
        with pytest.raises(MismatchError, match=rf"{name} is .* on rank 0 and .* on rank 1"):
            evenstep.init(quiet=True, **{name: value})
    assert not dist.is_initialized()
    evenstep.init(quiet=True)


# ---------------------------------------------------------------------- random streams


def draw():
    return {"python": random.random(), "numpy": float(numpy.random.rand()), "torch": float(torch.rand(()))}


def wrapped(world, **arguments):
    return evenstep.DistributedDataParallel(torch.nn.Linear(2, 2), world=world, **arguments)


def draw_behind(model, seed):
    """What is drawn after an evaluation and after a first forward pass in training; both from the same seed."""
    randomness.seed_everything(seed)
    model.eval()(torch.ones(1, 2))
    evaluated = draw()
    randomness.seed_everything(seed)
    model.train()(torch.ones(1, 2))
    return evaluated, draw()


def own_streams(seed):
    world = evenstep.init(quiet=True)
    world.draws_its_own = False
    return draw_behind(wrapped(world), seed)


def test_ranks_draw_the_same_until_training_and_their_own_afterwards(ranks, fresh_seed):
    evaluated, trained = zip(*ranks.run(own_streams, 3, fresh_seed), strict=True)
    for stream in randomness.STREAMS:
        assert len({each[stream] for each in evaluated}) == 1, stream
        assert len({each[stream] for each in trained}) == 3, stream
    assert trained[0] == evaluated[0], "rank 0 draws what one process would"


def streams_of_groups(seed):
    world = evenstep.init(quiet=True)
    world.draws_its_own = False
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = wrapped(world, process_group=pairs[world.rank // 2])
    assert model.world.is_initialised, "modules are moved to its device, too"
    _, own = draw_behind(model, seed)
    assert world.draws_its_own
    assert not world.has_diverged
    _, whole = draw_behind(wrapped(world), seed)
    saved = capture_streams(world)
    restore_streams(world.exchange(saved), world)
    expected = draw()
    restore_streams(world.exchange(saved), world)
    model(torch.ones(1, 2))  # the first of the resumed run, which changes nothing any more
    assert draw() == expected
    return own, whole


def test_ranks_of_a_group_draw_their_own_numbers(ranks, fresh_seed):
    """Equal places in two groups draw the same, as parts of one replica must that compute some things twice."""
    own, whole = zip(*ranks.run(streams_of_groups, 4, fresh_seed), strict=True)
    for stream in randomness.STREAMS:
        assert own[0][stream] == own[2][stream] != own[1][stream] == own[3][stream], stream
        assert len({each[stream] for each in whole}) == 4, stream


@on_ranks(3)
def test_an_adopted_group_keeps_its_random_streams(world, fresh_seed):
    """A shuffle that all ranks must share is shared, and ranks that were seeded differently stay so."""
    for seed in (fresh_seed, fresh_seed + 1 + world.rank):
        adopted = evenstep.World.from_process_group()
        model = wrapped(adopted)
        randomness.seed_everything(seed)
        model.module(torch.ones(1, 2))
        expected = draw()
        randomness.seed_everything(seed)
        model(torch.ones(1, 2))
        assert draw() == expected
        assert adopted.has_diverged, "later calls take the short way"
        assert not adopted.draws_its_own, "a checkpoint leaves the streams of new ranks alone, too"
        adopted.close()


# ---------------------------------------------------------------------- groups


@on_ranks(2)
def test_what_init_is_given_holds_in_adopted_groups_and_sub_groups(world, tmp_path):
    """A group of the script's own: adopted by a constructor, then by `init`, whose sub-groups are as it was told."""
    rank, world_size = world.rank, world.world_size
    world.close()
    store = dist.FileStore(str(tmp_path / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    model = evenstep.DistributedDataParallel(torch.nn.Linear(2, 1))
    for arguments in ({}, {"transport": "gloo"}, {"timeout_s": 1.5}):
        with pytest.raises(UsageError, match="DistributedDataParallel has adopted the script's process group already"):
            evenstep.init(quiet=True, **arguments)
    model.world.close()
    world = evenstep.init(quiet=True, transport="gloo", timeout_s=1.5)
    part = world.of_group(dist.new_group(list(range(world_size))))
    assert (world.transport_name, part.transport_name) == ("gloo", "gloo")
    if rank == 0:
        for alone in (part, world):
            with pytest.raises(EvenstepError):
                alone.barrier()  # to which the others don't come
    dist.barrier()
    world.close()
    dist.destroy_process_group()
    evenstep.init(quiet=True)


def plain_run(directory, seed):
    """What a training script does; what it has listened on."""
    if (left := worlds.initialised()) is not None:  # by a test before this one
        left.close()
    before = listening()
    with evenstep.init(quiet=True, seed=seed) as world:
        model = evenstep.DistributedDataParallel(torch.nn.Linear(3, 1, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.utils.data.TensorDataset(torch.randn(16, 3))
        loader = evenstep.DataLoader(data, global_batch_size=4, shuffle=True)
        checkpoint = evenstep.Checkpointer(directory, model=model, optimizer=optimizer, loader=loader, every_steps=2)
        for (batch,) in loader:
            optimizer.zero_grad()
            model.backward(model(batch).square().mean(), weight=len(batch))
            optimizer.step()
            checkpoint.step()
        checkpoint.save()
        found = listening() - before
        world.barrier()
        total, everything = torch.ones(2), [None] * world.world_size
        dist.all_reduce(total)
        dist.all_gather_object(everything, world.rank)
        dist.barrier()
        assert (total.tolist(), everything) == ([float(world.world_size)] * 2, list(range(world.world_size)))
        group = dist.new_group()
        dist.all_reduce(total, group=group)
        part = evenstep.DistributedDataParallel(torch.nn.Linear(2, 1), process_group=group)
        part(torch.ones(1, 2)).sum().backward()
        return sorted(found | (listening() - before))


def test_nothing_listens_in_a_plain_run_on_one_host(ranks, tmp_path, fresh_seed):
    assert ranks.run(plain_run, 3, str(tmp_path), fresh_seed) == [[]] * 3
