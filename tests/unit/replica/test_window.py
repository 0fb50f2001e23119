"""Windows, weights and the header."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstep.errors import ConfigurationError, UsageError
from evenstep.replica.gradients.exchange.header import Header
from evenstep.replica.gradients.exchange.weights import AgreedScale, nearest_power_of_two
from evenstep.replica.gradients.observer import Observer
from evenstep.replica.gradients.window import Kind, Window, as_multiplied, validate_weight
from evenstep.transport.local import LocalTransport

CPU = torch.device("cpu")


@pytest.mark.parametrize("weight", [0, 3, 2.5, torch.tensor(4), torch.tensor([1.5]), torch.tensor(True)])
def test_numbers_and_small_tensors_are_weights(weight):
    checked = validate_weight(weight, rank=0)
    assert isinstance(checked, float)
    assert checked == float(weight)


@pytest.mark.parametrize(
    "weight", [-1, math.nan, math.inf, "many", "2", None, [1], torch.ones(2), torch.tensor(-1.0), torch.tensor(1j)]
)
def test_anything_else_is_refused_with_rank_and_value(weight):
    with pytest.raises(ConfigurationError, match="rank 3"):
        validate_weight(weight, rank=3)


@given(st.floats(1e-30, 1e30))
def test_the_scale_is_a_power_of_two_near_the_total(total):
    scale = nearest_power_of_two(total)
    assert math.frexp(scale)[0] == 0.5
    assert 0.7 < total / scale < 1.42


def test_a_scale_that_is_agreed_on_in_the_middle_of_a_window_holds_from_the_next_one():
    scale = AgreedScale(LocalTransport(), CPU, lambda by: None, is_needed=False, is_one=False)
    found = [scale.agree(1000.0, opens_window=is_first, is_urgent=not is_first) for is_first in (True, False)]
    scale.end_window(Kind.WEIGHTED)
    found.append(scale.agree(1000.0, opens_window=True, is_urgent=True))
    assert found == [1.0, 1.0, 1024.0]


@pytest.mark.parametrize("is_tensor", [False, True])
def test_a_weight_counts_as_far_as_a_loss_of_16_bits_can_be_multiplied_by_it(is_tensor):
    weight = torch.tensor(20001.0, dtype=torch.float64) if is_tensor else 20001.0
    assert float(as_multiplied(weight, 1.0, torch.float32)) == 20001.0
    assert float(as_multiplied(weight, 1.0, torch.bfloat16)) == 19968.0
    assert float(as_multiplied(weight, 16384.0, torch.bfloat16)) == 19968.0
    assert float(as_multiplied(weight, 16384.0, torch.float16)) == 20000.0


def header_of(*ranks, scale=1.0):
    """The sum of what several ranks write."""
    headers = []
    for kind, weight, used in ranks:
        window = Window()
        if kind is not None:
            window.add(kind, weight)
        header = Header(len(used), CPU)
        header.fill(window, used, scale=scale)
        headers.append(header)
    total = Header(len(ranks[0][2]), CPU)
    total.tensor.copy_(sum(header.tensor for header in headers))
    return total


def late_header(num_parameters: int, *observers: Observer) -> Header:
    """As on a GPU: numbers are written elsewhere, and read a window late."""
    header = Header(num_parameters, CPU, observers)
    header.is_late, header._numbers = True, None
    header._hosts = [torch.full_like(header.tensor, torch.nan) for _ in range(2)]
    header._written = [(ctypes.c_double * len(host)).from_address(host.data_ptr()) for host in header._hosts]
    return header


def on_time_header(num_parameters: int, *observers: Observer) -> Header:
    return Header(num_parameters, CPU, observers)


def test_on_a_gpu_numbers_are_written_in_turns_and_a_weight_isnt_read():
    header = late_header(2)
    for number in range(5):
        window, other = Window(), header._hosts[1 - number % 2].clone()
        weight = torch.tensor(6.0 + number, dtype=torch.float64)
        window.add(Kind.WEIGHTED, weight)
        header.fill(window, [True, number % 2 == 0], scale=2.0)
        assert header.tensor.tolist() == [3.0 + number / 2, 1.0, 0.0, 1.0, float(number % 2 == 0)]
        torch.testing.assert_close(header._hosts[1 - number % 2], other, equal_nan=True)  # perhaps still being copied
        assert header.divisor(2.0).item() == 3.0 + number / 2
        header.read()


def read_late(late: Header, header: Header) -> None:
    """As on a GPU."""
    late.tensor.copy_(header.tensor)
    late.read()


@pytest.mark.parametrize("when", [1, 2, 3, 16, 40])
def test_on_a_gpu_ranks_that_mean_different_things_are_told_a_window_later(when):
    """The numbers of one window are wrong; the first two are read at once."""
    alike = header_of((Kind.WEIGHTED, 3.0, [True]), (Kind.WEIGHTED, 3.0, [True]))
    mixed = header_of((Kind.WEIGHTED, 3.0, [True]), (Kind.PLAIN, 0.0, [True]))
    late = late_header(1)
    told = when if when <= 2 else when + 1
    for number in range(1, told):
        read_late(late, mixed if number == when else alike)
    with pytest.raises(UsageError, match=r"called loss.backward\(\) and .* model.backward") as error:
        read_late(late, mixed if told == when else alike)
    assert (f"noticed in backward pass {told}" in str(error.value)) is (when > 2)


def test_on_a_gpu_ranks_without_a_pass_are_left_alone():
    late = late_header(1)
    for number in range(40):
        kinds = [(Kind.PLAIN if number % 2 else Kind.WEIGHTED, 1.0, [True]), (None, 0.0, [False])]
        read_late(late, header_of(*kinds))


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("is_read_at_once", [False, True])
def test_observers_judge_what_they_have_sent(is_late, is_read_at_once):
    """Each once, with what the numbers were about; nothing where nothing was sent."""
    judged = []

    class Counts(Observer):
        num_numbers = 2

        def header_numbers(self, window):
            self.sent = len(sent) if len(sent) % 3 else None
            sent.append(self.sent)
            return (float(len(sent)), 1.0)

        def judge(self, sent, sums):
            judged.append((sent, list(sums)))

    sent, counts = [], Counts()
    counts.is_read_at_once = is_read_at_once
    header = (late_header if is_late else on_time_header)(2, Observer(), counts, Observer())
    seen = []
    for _ in range(8):
        header.fill(Window(), [True, False])
        header.read()
        seen.append(len(judged))
    assert judged == [(number, [number + 1.0, 1.0]) for number in (1, 2, 4, 5, 7)][: len(judged)]
    at_once = [0, 1, 2, 2, 3, 4, 4, 5]
    assert seen == (at_once if is_read_at_once or not is_late else [0, *at_once[:-1]])
    assert header.used_anywhere() == [True, False]
