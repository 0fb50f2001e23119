"""What a world does between ranks."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

import evenstep
from evenstep.errors import ConfigurationError, MismatchError, UsageError

SIZES = pytest.mark.parametrize("nproc", [1, 2, 3])


def means():
    world = evenstep.init(quiet=True)
    r = world.rank
    nothing = float("nan") if r == 0 and world.world_size > 1 else 5.0
    assert isinstance(world.mean(r), float)
    tensor = world.mean(torch.tensor([1.0, r]), weight=torch.tensor(r + 1))
    assert tensor.dtype == torch.float32
    for weight in (-1, torch.tensor(-1.0), float("nan"), torch.tensor(float("inf")), "3", None, torch.ones(2)):
        with pytest.raises(ConfigurationError, match=r"world.mean on rank \d: weight="):
            world.mean(1.0, weight=weight)
    for value in ([1.0, 2.0], "text", None, 1j, torch.zeros(1, dtype=torch.complex64)):
        with pytest.raises(ConfigurationError, match=r"world.mean on rank \d: (value=|the value is complex)"):
            world.mean(value)
    for value in ([1.0], 2.0, torch.eye(2).to_sparse()):
        with pytest.raises(ConfigurationError, match="it takes dense tensors"):
            world.gather(value)
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


def gathered(dtype, uneven):
    world = evenstep.init(quiet=True)
    rows = world.rank if uneven else 2
    mine = (torch.arange(rows * 3).reshape(rows, 3) + 10 * world.rank).to(dtype)
    everything = world.gather(mine.T.contiguous().T)  # a stride of its own
    expected = torch.cat(
        [(torch.arange((r if uneven else 2) * 3).reshape(-1, 3) + 10 * r).to(dtype) for r in range(world.world_size)]
    )
    assert everything.dtype == dtype
    assert torch.equal(everything, expected)
    assert world.gather(torch.tensor(world.rank)).tolist() == list(range(world.world_size))


@SIZES
@pytest.mark.parametrize("uneven", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
def test_gather_concatenates_in_order_of_rank(ranks, nproc, dtype, uneven):
    ranks.run(gathered, nproc, dtype, uneven)


def gather_mismatch():
    world = evenstep.init(quiet=True)
    with pytest.raises(MismatchError, match=r"rank 1 has torch.float64 \[2, 3\]"):
        world.gather(torch.zeros(2, 3, dtype=torch.float64 if world.rank else torch.float32))


def test_gather_of_different_dtypes_is_an_error_on_all_ranks(ranks):
    ranks.run(gather_mismatch, 2)


def objects():
    world = evenstep.init(quiet=True)
    sent = {"config": [1, 2.5, None, ("a", True)], "tensor": torch.arange(3)}
    for src in range(world.world_size):
        got = world.broadcast_object(sent if world.rank == src else None, src=src)
        assert got["config"] == sent["config"]
        assert torch.equal(got["tensor"], sent["tensor"])
    with pytest.raises(ConfigurationError, match=r"object\['x'\] is a builtins.object"):
        world.broadcast_object({"x": object()} if world.rank == 0 else None)
    circle = []
    circle.append(circle)
    for unsendable, words in ((circle, "holds itself"), (torch.eye(2).to_sparse(), "only dense")):
        with pytest.raises(ConfigurationError, match=words):
            world.broadcast_object(unsendable if world.rank == 0 else None)
        last = world.world_size - 1
        with pytest.raises(ConfigurationError, match=rf"on rank {last} .*{words}"):
            world.exchange(unsendable if world.rank == last else None)
    assert world.broadcast_object("in step" if world.rank == 0 else None) == "in step"
    for src in (9, "0", True):
        with pytest.raises(ConfigurationError, match=f"src={src!r}"):
            world.broadcast_object(1, src=src)
    assert world.exchange(world.rank * 2) == [2 * r for r in range(world.world_size)]
    world.barrier()


@SIZES
def test_objects_travel_without_pickle_and_refusals_reach_all_ranks(ranks, nproc):
    ranks.run(objects, nproc)


def main_goes_first(path):
    world = evenstep.init(quiet=True)
    with world.main_first() as is_main:
        if is_main:
            time.sleep(0.3)
            path.write_text("prepared")
        assert path.read_text() == "prepared"
    assert is_main == world.is_main


def main_fails():
    world = evenstep.init(quiet=True)
    expected = pytest.raises(OSError, match="disk") if world.is_main else pytest.raises(UsageError, match="disk")
    with expected, world.main_first():
        if not world.is_main:
            raise AssertionError("the block must not run here")
        raise OSError("disk full")


@SIZES
def test_main_prepares_while_the_others_wait(ranks, nproc, tmp_path):
    ranks.run(main_goes_first, nproc, tmp_path / "data")


def test_a_failure_of_main_reaches_those_who_wait(ranks):
    ranks.run(main_fails, 3)


def who_prints(capture_path):
    import contextlib

    world = evenstep.init(quiet=True)
    with open(capture_path / str(world.rank), "w") as file, contextlib.redirect_stdout(file):
        world.print("from", world.rank, sep="-")


def test_only_rank_0_prints(ranks, tmp_path):
    ranks.run(who_prints, 2, tmp_path)
    assert [(tmp_path / str(r)).read_text() for r in range(2)] == ["from-0\n", ""]


def init_again():
    world = evenstep.init(quiet=True)
    assert evenstep.init() is world
    with pytest.raises(ConfigurationError, match=r"now seed=5 \(was None\)"):
        evenstep.init(seed=5)
    with pytest.raises(ConfigurationError, match=r"now timeout_s=7.5 \(was 600.0\)"):
        evenstep.init(timeout_s=7.5)
    with pytest.raises(ConfigurationError, match="timeout_s=nan"):
        evenstep.init(timeout_s=float("nan"))
    world.close()
    for name, value in (("seed", world.rank), ("timeout_s", 10.0 + world.rank)):
        with pytest.raises(MismatchError, match=rf"{name}=.* on rank 0, but .* on rank 1"):
            evenstep.init(quiet=True, **{name: value})
    assert not dist.is_initialized()
    evenstep.init(quiet=True)


def test_init_twice_is_the_same_world_or_an_error(ranks):
    ranks.run(init_again, 2)


def random_streams():
    world = evenstep.init(quiet=True)
    world.has_diverged = False
    torch.manual_seed(3)
    same = float(torch.rand(()))
    model = evenstep.DistributedDataParallel(torch.nn.Linear(2, 2), world=world)
    torch.manual_seed(3)
    model(torch.ones(1, 2))
    return same, float(torch.rand(()))


def test_ranks_draw_the_same_until_training_and_their_own_afterwards(ranks):
    same, own = zip(*ranks.run(random_streams, 3), strict=True)
    assert len(set(same)) == 1
    assert len(set(own)) == 3


def adopt(rank, world_size, path):
    """A script that makes its own process group and never calls evenstep.init."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(path / "store"), world_size), rank=rank, world_size=world_size
    )
    world = evenstep.World.from_process_group()
    model = evenstep.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    model(torch.full((1, 2), rank + 1.0)).sum().backward()
    total = torch.ones(1)
    dist.all_reduce(total)  # the script's group is still the script's
    result = (world.rank, world.world_size, world.local_rank, world.num_nodes, model.module.weight.grad.tolist())
    world.close()
    dist.destroy_process_group()
    return *result, float(total)


def test_a_group_that_the_script_made_is_adopted(tmp_path):
    context = torch.multiprocessing.get_context("spawn")
    with context.Pool(2) as pool:
        results = pool.starmap(adopt, [(rank, 2, tmp_path) for rank in range(2)])
        pool.close()
        pool.join()
    assert results == [(r, 2, r, 1, [[1.5, 1.5]], 2.0) for r in range(2)]
