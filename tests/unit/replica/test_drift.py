"""How parameters are divided and digested, and who is in the minority. Pure; with ranks: `tests/procs/replica`."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from evenstep.replica.monitors.digests import canonical, digest, distance
from evenstep.replica.monitors.drift import DriftWatch, find_minority, plan_portions


def test_portions_cover_each_row_once_and_cost_about_the_same(fresh_seed):
    draw = random.Random(fresh_seed)
    for _ in range(200):
        sizes = [
            (draw.choice([0, 1, 3, 1000, 50_000]), draw.choice([4, 256, 4096])) for _ in range(draw.randrange(1, 60))
        ]
        every = draw.choice([1, 2, 7, 64])
        portions = plan_portions(sizes, every)
        assert len(portions) <= every
        covered = [[] for _ in sizes]
        for portion in portions:
            assert portion
            for piece in portion:
                covered[piece.parameter].append((piece.begin, piece.end))
        for (rows, _), ranges in zip(sizes, covered, strict=True):
            assert [begin for begin, _ in ranges] == [0, *(end for _, end in ranges)][: len(ranges)]
            assert not ranges or ranges[-1][1] == rows
            assert bool(ranges) == bool(rows)
        costs = [sum((p.end - p.begin) * sizes[p.parameter][1] + (16 << 10) for p in portion) for portion in portions]
        in_all = sum(rows * row + (16 << 10) for rows, row in sizes if rows)
        assert max(costs, default=0) <= max(512 << 10, in_all / every) + 4096 + (32 << 10)


def test_a_model_without_trained_elements_has_no_portion():
    assert plan_portions([(0, 4)], 64) == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_a_digest_sees_every_change_of_bits_and_nothing_else(fresh_seed, dtype):
    torch.manual_seed(fresh_seed)
    tensors = [torch.randn(shape).to(dtype) for shape in ((), (3,), (7, 5), (2, 3, 4, 5), (40_001,), (300, 401))]
    before = int(digest(tensors))
    assert int(digest([each.clone() for each in tensors])) == before
    last = tensors[3].to(memory_format=torch.channels_last) if not dtype.is_complex else tensors[3]
    assert int(digest([*tensors[:3], last, *tensors[4:]])) == before, "strides are no difference"
    shifted = torch.empty(40_002, dtype=dtype)[1:].copy_(tensors[4])
    assert int(digest([*tensors[:4], shifted, tensors[5]])) == before, "nor is where it lies"
    for number in range(len(tensors)):
        for change in ("negate", "one", "swap", "all signs"):
            changed = [each.clone() for each in tensors]
            flat = changed[number].reshape(-1)
            place = int(torch.randint(flat.numel(), ()))
            if change == "negate":
                flat[place] = -flat[place]
            elif change == "all signs":
                flat.neg_()
            elif change == "one":
                raw = flat.view(torch.uint8)
                raw[int(torch.randint(raw.numel(), ()))] ^= 1 << int(torch.randint(8, ()))
            elif flat.numel() > 1:
                other = (place + 1) % flat.numel()
                flat[[place, other]] = flat[[other, place]]
            if not torch.equal(flat.view(torch.uint8), tensors[number].reshape(-1).view(torch.uint8)):
                assert int(digest(changed)) != before, (number, change)


def test_rows_that_changed_places_are_seen():
    table = torch.arange(4096.0 * 128).view(4096, 128)
    exchanged = table[torch.tensor([1, 0, *range(2, 4096)])]
    far = table[torch.tensor([1024, *range(1, 1024), 0, *range(1025, 4096)])]
    assert len({int(digest([each])) for each in (table, exchanged, far)}) == 3


def test_kinds_of_nan_and_of_zero_are_no_difference():
    nans = torch.tensor([0x7FC00000, -0x400000, 0x7FC00001, -(1 << 31), 0], dtype=torch.int32).view(torch.float32)
    others = torch.tensor([-0x400000, 0x7FC00001, 0x7FC00000, 0, -(1 << 31)], dtype=torch.int32).view(torch.float32)
    assert int(digest([nans])) != int(digest([others]))
    assert int(digest([canonical(nans)])) == int(digest([canonical(others)]))
    assert distance(nans, others) == 0.0


def test_distances():
    one = torch.tensor([1.0, -4.0, torch.nan])
    assert distance(one, one.clone()) == 0.0
    assert distance(one, torch.tensor([1.5, -4.0, torch.nan])) == pytest.approx(0.125)
    assert distance(one, torch.tensor([1.0, -4.0, 0.0])) == float("inf")
    assert distance(torch.tensor([1.0]), torch.tensor([torch.inf])) == float("inf")
    assert distance(torch.zeros(2), torch.zeros(2)) == 0.0


@pytest.mark.parametrize(
    ("digests", "differing", "minority"),
    [
        ([[1, 2], [1, 2]], [], []),
        ([[1, 2], [1, 3]], [1], []),
        ([[1, 2], [1, 3], [1, 2]], [1], [1]),
        ([[5, 2], [1, 2], [1, 3]], [0, 1], [0, 2]),
        ([[1], [2], [3]], [0], []),
        ([[1], [1], [3], [3]], [0], []),
        ([[1], [1], [3], [4], [5]], [0], []),
        ([[4], [1], [1], [1]], [0], [0]),
    ],
)
def test_only_less_than_half_are_a_minority(digests, differing, minority):
    found, ranks, typical = find_minority(digests)
    assert (found, ranks) == (differing, minority)
    if minority and len(differing) == 1:
        assert typical not in minority


def build_watches(seed: int, num_ranks: int, *, is_late: bool, every: int = 4) -> list[DriftWatch]:
    """The watches of all ranks, in this process."""
    made = []
    for _ in range(num_ranks):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(300, 400), nn.Linear(400, 3))
        names, parameters = zip(*model.named_parameters(), strict=True)
        world: Any = SimpleNamespace(world_size=num_ranks, is_main=True)
        watch = DriftWatch(names, parameters, world, None, None, every=every, is_vouched=False)  # type: ignore[arg-type]
        watch._is_late = is_late
        made.append(watch)
    return made


def end_window(watches: list[DriftWatch]) -> list[bool]:
    """What the header does; whether each has found something."""
    told = [torch.as_tensor(watch.header_numbers(), dtype=torch.float64) for watch in watches]
    for watch in watches:
        watch.read_header(torch.stack(told).sum(0))
    return [watch._found is not None for watch in watches]


@pytest.mark.parametrize("num_ranks", [2, 3, 5, 8192])
@pytest.mark.parametrize("is_late", [False, True])  # on a GPU
def test_all_ranks_find_a_difference_in_the_same_window(fresh_seed, num_ranks, is_late):
    watches = build_watches(fresh_seed, min(num_ranks, 5), is_late=is_late)
    for watch in watches:  # of many ranks, those that aren't here tell what rank 0 tells
        watch._world.world_size = num_ranks
        watch._half_bits = min(20, (53 - (num_ranks - 1).bit_length()) // 2)

    def end() -> list[bool]:
        told = [torch.as_tensor(watch.header_numbers(), dtype=torch.float64) for watch in watches]
        sums = torch.stack(told).sum(0) + told[0] * (num_ranks - len(watches))
        for watch in watches:
            watch.read_header(sums)
        return [watch._found is not None for watch in watches]

    assert not any(any(end()) for _ in range(11))
    watches[-1]._parameters[0].data[7, 11] += 1.0
    seen = [end() for _ in range(10)]
    assert all(len(set(each)) == 1 for each in seen)
    assert any(each[0] for each in seen[: 4 + 1 + 2 * is_late])
    assert all(watch.is_on for watch in watches)


@pytest.mark.parametrize("is_late", [False, True])
def test_with_one_doubt_nobody_compares(fresh_seed, is_late):
    watches = build_watches(fresh_seed, 3, is_late=is_late)
    end_window(watches)
    watches[1].doubt()
    watches[2]._parameters[0].data[7, 11] += 1.0
    assert not any(any(end_window(watches)) for _ in range(20))
    assert not any(watch.is_on for watch in watches)


def test_who_is_asked_for_doubts_nothing(fresh_seed):
    watches = build_watches(fresh_seed, 2, is_late=False)
    for watch in watches:
        watch._is_vouched = True
        watch.doubt()
        watch._machine += id(watch)
    assert not any(any(end_window(watches)) for _ in range(6))
    watches[1]._parameters[2].data[0, 0] += 1.0
    assert any(all(end_window(watches)) for _ in range(7))
