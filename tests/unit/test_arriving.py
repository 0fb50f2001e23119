"""Parameters on their way: what waits, what doesn't, and what they are afterwards."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evenstep.errors import PeerLostError
from evenstep.replica.arriving import Arrival, num_tensors_on


class Gather:
    """New values of some memory, there when somebody waits."""

    def __init__(self, values: Tensor, error: Exception | None = None) -> None:
        self.values, self.error, self.num_waits = values, error, 0

    def wait(self) -> None:
        self.num_waits += 1
        if self.error is not None:
            raise self.error
        self.values.fill_(2.0)

    def is_completed(self) -> bool:
        return self.num_waits > 0


class Bucket:
    """Two parameters side by side, [2, 3] and [3]."""

    def __init__(self, error: Exception | None = None) -> None:
        self.values = torch.ones(9)
        self.homes = [self.values[:6].view(2, 3), self.values[6:]]
        self.parameters = [nn.Parameter(home) for home in self.homes]
        self.seen: set[int] = set()
        self.arrival = Arrival(self.parameters, self.homes, [7, 8], self.seen)
        self.work = Gather(self.values, error)

    def begin(self) -> nn.Parameter:
        self.arrival.begin(self.work)
        assert self.arrival.is_under_way
        return self.parameters[0]


READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "an operator": lambda p: p + 1,
    "a layer's function": lambda p: F.linear(torch.ones(1, 3), p),
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "data_ptr": lambda p: p.data_ptr(),
    "storage": lambda p: p.untyped_storage(),
    "in a list": lambda p: torch.cat([torch.ones(2, 3), p]),
    "foreach": lambda p: torch._foreach_norm([p]),
    "in a nest": lambda p: torch.einsum("ij,kj->ik", [torch.ones(2, 3), p]),
    "as an output": lambda p: torch.add(torch.ones(2, 3), 1, out=p.detach()),
    "copied into": lambda p: p.data.copy_(torch.ones(2, 3)),
    "an index": lambda p: p[0, 0],
    "a number": lambda p: p[0, 0].item(),
    "iterated": lambda p: [*p],
    "compared": lambda p: torch.equal(p, p),
    "strides": lambda p: p.stride(),
    "printed": repr,
    "numpy": lambda p: p.detach().numpy(),
    "dlpack": lambda p: torch.from_dlpack(p.detach()),
    "a copy": copy.deepcopy,
    "a shallow copy": copy.copy,
    "pickled": pickle.dumps,
    "replaced": lambda p: setattr(p, "data", torch.zeros(2, 3)),
    "differentiated": lambda p: torch.autograd.grad(torch.ones(1, requires_grad=True).sum(), p, allow_unused=True),
}


def doubled(x: Tensor) -> Tensor:
    return 2 * x


@pytest.mark.parametrize("how", READS)
def test_reading_waits_once(how):
    bucket = Bucket()
    parameter = bucket.begin()
    READS[how](parameter)
    assert bucket.work.num_waits == 1
    assert not bucket.arrival.is_under_way
    assert [type(each) for each in bucket.parameters] == [nn.Parameter] * 2
    assert bucket.parameters[1].tolist() == [2.0] * 3  # the whole bucket has come
    assert how == "replaced" or parameter.data_ptr() == bucket.values.data_ptr()


def test_gradients_are_dropped_and_asked_for_without_waiting():
    bucket = Bucket()
    for parameter in bucket.parameters:
        parameter.grad = torch.zeros_like(parameter)
    module = nn.ParameterList(bucket.parameters)
    bucket.begin()
    assert all(parameter.grad is not None and parameter.requires_grad for parameter in module)
    module.zero_grad()
    bucket.parameters[0].grad = None
    torch.optim.SGD([torch.ones(1, requires_grad=True)]).zero_grad()
    assert isinstance(bucket.parameters[0], nn.Parameter)
    assert bucket.work.num_waits == 0
    assert bucket.arrival.is_under_way


def test_copies_are_ordinary_parameters_with_the_new_values():
    for how in (copy.deepcopy, copy.copy, lambda each: pickle.loads(pickle.dumps(each))):
        made = how(Bucket().begin())
        assert type(made) is nn.Parameter
        assert made.tolist() == [[2.0] * 3] * 2


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_who_does_not_ask_reads_nan_and_no_old_value():
    bucket = Bucket()
    scripted = torch.jit.script(doubled)
    assert scripted(bucket.begin()).isnan().all()
    assert bucket.work.num_waits == 0


def test_several_threads_wait_for_the_same():
    bucket = Bucket()
    parameter = bucket.begin()
    sums: list[float] = []
    threads = [threading.Thread(target=lambda: sums.append(float(parameter.detach().sum()))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == [12.0] * 8
    assert bucket.work.num_waits == 1


def test_an_error_is_everybodys():
    bucket = Bucket(PeerLostError("rank 1 has gone"))
    parameter = bucket.begin()
    for _ in range(2):
        with pytest.raises(PeerLostError):
            parameter.sum()
    bucket.work.error = None
    bucket.arrival.arrive()


def test_listening_notes_what_is_read():
    bucket = Bucket()
    assert not bucket.arrival.can_begin(bucket.values, 1)
    bucket.arrival.listen()
    bucket.parameters[0].grad = None
    assert bucket.seen == set()
    _ = torch.cat([bucket.parameters[1], bucket.parameters[1]])
    assert bucket.seen == {8}
    bucket.arrival.stop_listening()
    bucket.parameters[0].sum()
    assert bucket.seen == {8}, "nobody listened any more"
    assert not bucket.arrival.can_begin(bucket.values, 1)
    bucket.arrival.listen()
    bucket.parameters[0].sum()
    assert bucket.seen == {7, 8}
    assert bucket.arrival.can_begin(bucket.values, 1)
    assert [type(each) for each in bucket.parameters] == [nn.Parameter] * 2


def test_what_somebody_keeps_of_the_memory_is_noticed():
    bucket = Bucket()
    bucket.seen |= {7, 8}
    assert num_tensors_on(bucket.values) == 5
    assert bucket.arrival.can_begin(bucket.values, 1)
    kept: Any = bucket.parameters[0].detach()
    assert not bucket.arrival.can_begin(bucket.values, 1)
    kept = kept.numpy()
    assert not bucket.arrival.can_begin(bucket.values, 1)
    del kept
    assert bucket.arrival.can_begin(bucket.values, 1)


def test_a_parameter_of_another_class_is_left_alone():
    bucket = Bucket()
    bucket.seen |= {7, 8}
    bucket.parameters[0].__class__ = type("Own", (nn.Parameter,), {})
    assert not bucket.arrival.can_begin(bucket.values, 1)
    bucket.seen.clear()
    bucket.arrival.listen()
    bucket.arrival.stop_listening()
    assert type(bucket.parameters[0]).__name__ == "Own"
