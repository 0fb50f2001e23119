"""How parameters are divided and digested, and who is in the minority. Pure; with ranks: `tests/procs/replica`."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from evenstep.replica.gradients.exchange.header import Header
from evenstep.replica.gradients.window import Kind, Window
from evenstep.replica.monitors import checks
from evenstep.replica.monitors.checks import DriftWatch, Replicas, find_minority, plan_portions
from evenstep.replica.monitors.digests import canonical, contrast, digest, distance


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


@pytest.mark.parametrize("num_ranks", [2, 3, 7, 8192])
def test_contrasts_add_up_to_nothing_where_all_ranks_have_the_same(fresh_seed, num_ranks):
    draw = random.Random(fresh_seed)
    for _ in range(20):
        value, other = (draw.getrandbits(64) - (1 << 63) for _ in range(2))
        odd = draw.randrange(num_ranks)
        alike = [contrast(value, rank, num_ranks) for rank in range(num_ranks)]
        assert math.fsum(alike) == sum(alike) == 0.0
        on_a_gpu = contrast(torch.tensor(value), odd, num_ranks)
        assert on_a_gpu == alike[odd]
        alike[odd] = contrast(other, odd, num_ranks)
        draw.shuffle(alike)
        assert math.fsum(alike) == sum(alike) != 0.0
    largest = [contrast(-(1 << 63) if rank else (1 << 63) - 1, rank, num_ranks) for rank in range(num_ranks)]
    assert sum(largest) == sum(map(int, largest))


class Ranks:
    """The watches of all ranks, in this process, and their headers.

    Args:
        groups: By rank, of which replicas it is one; ranks of one group have the same parameters.
    """

    def __init__(self, seed: int, groups: list[int], *, is_late: bool, every: int = 4, is_vouched: bool = False):
        self.watches, self.headers = [], []
        for rank, group in enumerate(groups):
            torch.manual_seed(seed)
            width = 8 if group else 1200  # less to compare, in fewer windows
            model = nn.Sequential(nn.Linear(300, width), nn.Linear(width, 3))
            names, parameters = zip(*model.named_parameters(), strict=True)
            numbers = [number for number, each in enumerate(groups) if each == group]
            nobody: Any = None
            replicas = Replicas(numbers.index(rank), numbers, nobody, nobody)
            watch = DriftWatch(names, parameters, replicas, nobody, every=every, is_vouched=is_vouched)
            self.watches.append(watch)
            self.headers.append(Header(1, torch.device("cpu"), [watch]))
            self.headers[-1].is_late = is_late

    def end_window(self) -> list[bool]:
        """Whether each has found something."""
        for header in self.headers:
            window = Window()
            window.add(Kind.PLAIN, 0.0)
            header.fill(window, [True])
        sums = torch.stack([header.tensor for header in self.headers]).sum(0)
        for header in self.headers:
            header.tensor.copy_(sums)
            header.read()
        found = [watch.found is not None for watch in self.watches]
        states = {(watch._suspect is None, *watch.sent[1:]) for watch in self.watches if watch.sent}
        assert len(states) <= 1, "ranks are in different states"
        return found

    def change(self, rank: int) -> None:
        self.watches[rank]._parameters[0].data[7, 11] += 1.0


@pytest.mark.parametrize("groups", [[0, 0], [0, 0, 0], [0] * 5, [0, 1, 0, 1], [1, 0, 1, 0]])
@pytest.mark.parametrize("is_late", [False, True])  # on a GPU
def test_all_ranks_find_a_difference_in_the_same_window(fresh_seed, groups, is_late):
    ranks = Ranks(fresh_seed, groups, is_late=is_late)
    assert not any(any(ranks.end_window()) for _ in range(11))
    ranks.change(len(groups) - 1)
    seen = [ranks.end_window() for _ in range(10)]
    assert all(len(set(each)) == 1 for each in seen)
    first = next(number for number, each in enumerate(seen) if each[0])
    assert (2 if is_late else 1) <= first <= 4 + 2 * is_late, "not before an optimizer could put it right"
    assert all(watch.is_on for watch in ranks.watches)


def test_what_has_been_found_is_not_suspect_again_at_once(fresh_seed):
    """A difference by rounding stays, and would be compared in every window."""
    ranks = Ranks(fresh_seed, [0, 0], is_late=True)
    ranks.change(1)
    while not ranks.end_window()[0]:
        assert ranks.watches[0].num_windows < 20
    for watch in ranks.watches:
        watch.found = None
    assert not any(ranks.end_window()), "it was sent a second time before it was judged"
    assert all(watch._suspect is None for watch in ranks.watches)


@pytest.mark.parametrize("is_late", [False, True])
def test_what_is_put_right_before_the_next_step_is_no_drift(fresh_seed, is_late):
    ranks = Ranks(fresh_seed, [0, 0], is_late=is_late)
    for _ in range(9):
        assert not any(ranks.end_window())
        differs = [watch._suspect is not None for watch in ranks.watches]
        values = ranks.watches[1]._parameters[0].data
        values.copy_(ranks.watches[0]._parameters[0].data)
        if not any(differs):
            ranks.change(1)


def unlike_machines():
    """Whatever is built inside is on a machine of its own."""
    return mock.patch.object(checks.determinism, "facts", side_effect=({"cpu": str(n)} for n in itertools.count()))


@pytest.mark.parametrize("is_vouched", [False, True])
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("why", ["one doubts", "unlike machines"])
def test_with_a_doubt_nobody_compares_unless_it_was_asked_for(fresh_seed, why, is_late, is_vouched):
    ranks = Ranks(fresh_seed, [0, 0, 0], is_late=is_late, is_vouched=is_vouched)
    if why == "one doubts":
        ranks.end_window()
        ranks.watches[1].doubt()
    else:
        with unlike_machines():
            ranks = Ranks(fresh_seed, [0, 0, 0], is_late=is_late, is_vouched=is_vouched)
    ranks.change(2)
    found = [any(ranks.end_window()) for _ in range(20)]
    assert any(found) is is_vouched
    assert [watch.is_on for watch in ranks.watches] == [is_vouched] * 3


@pytest.mark.parametrize(("is_late", "num_unread"), [(False, 0), (True, 0), (True, 1)])
def test_what_was_suspect_before_a_join_is_not_compared_behind_it(fresh_seed, is_late, num_unread):
    """A join makes ranks equal at its end; within it those that have left take part in windows, and don't step."""
    ranks = Ranks(fresh_seed, [0, 0], is_late=is_late)
    while ranks.watches[0]._suspect is None:
        ranks.end_window()
        ranks.change(1)
    for _ in range(num_unread):  # the suspect is sent again, and its sums come when the join has begun
        assert not any(ranks.end_window())
    for watch in ranks.watches:
        watch.set_apart(True)
    assert not any(any(ranks.end_window()) for _ in range(5))
    assert all(watch.sent is None for watch in ranks.watches)
    ranks.watches[1]._parameters[0].data.copy_(ranks.watches[0]._parameters[0].data)
    for watch in ranks.watches:
        watch.set_apart(False)
        assert watch._suspect is None
    assert not any(any(ranks.end_window()) for _ in range(9))
