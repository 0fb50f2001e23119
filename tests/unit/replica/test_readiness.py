"""Which buckets are complete, and how often that is said."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter

import pytest
import torch
from torch import nn

from evenstep.replica.gradients.autograd_hooks import Readiness
from evenstep.replica.gradients.buckets.layout import BucketPolicy, ParameterSpec, plan_layout


class Noting:
    """Notes the events."""

    def __init__(self) -> None:
        self.complete: Counter[int] = Counter()
        self.late: list[int] = []

    def gradient_came(self, parameter: int) -> bool:
        return True

    def bucket_complete(self, bucket: int) -> None:
        self.complete[bucket] += 1

    def gradient_late(self, parameter: int) -> None:
        self.late.append(parameter)


class SlowSet(set[int]):
    """After each removal it is another thread's turn, if nothing keeps that out."""

    def discard(self, value: int) -> None:
        super().discard(value)
        time.sleep(0)


@pytest.fixture
def quick_switches():
    """Threads take turns far more often than usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_threads_of_two_devices_complete_no_bucket_twice(
    quick_switches: None, fresh_seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters of every bucket get their gradients in two threads, in orders that change from pass to pass."""
    torch.manual_seed(fresh_seed)
    parameters = [nn.Parameter(torch.zeros(4)) for _ in range(32)]
    specs = [ParameterSpec(str(index), (4,), torch.float32, torch.device("cpu")) for index in range(32)]
    layout = plan_layout(specs, range(32), BucketPolicy((4 * 16 * 4,)))  # bytes
    assert len(layout.buckets) >= 4
    listener = Noting()
    readiness = Readiness(parameters, layout, listener)
    awaits = readiness._await

    def awaits_slowly(bucket, but=-1):
        found = awaits(bucket, but)
        if found:
            readiness._awaited[bucket] = SlowSet(readiness._awaited[bucket])
        return found

    monkeypatch.setattr(readiness, "_await", awaits_slowly)

    def run(order: list[int], barrier: threading.Barrier) -> None:
        barrier.wait()
        for index in order:
            parameters[index].sum().backward()

    for number in range(100):
        listener.complete.clear()
        for parameter in parameters:
            parameter.grad = None
        readiness.begin()
        order, barrier = torch.randperm(32).tolist(), threading.Barrier(2)
        threads = [threading.Thread(target=run, args=(order[half::2], barrier)) for half in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        was_counting = readiness.is_counting
        if was_counting:
            readiness.watch(layout)
        readiness.end()
        assert sorted(readiness.order) == list(range(32))
        # A gradient may come between the look at a bucket and the hook for what is missing: launched at the pass's end.
        assert not listener.complete or max(listener.complete.values()) == 1, number
        assert not listener.late
