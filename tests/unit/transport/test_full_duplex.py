"""Parts that ranks send each other: the order of sends and receives, and of waits. The group is played."""

from __future__ import annotations

import gc
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch

from evenstep.transport.process_group.full_duplex import FullDuplex


class Played:
    """Rank 1 of three; keeps what it is asked for. The work with rank `fails` does."""

    def __init__(self, *, fails: int = -1) -> None:
        self.asked: list[tuple[str, int, int]] = []
        self.waited: list[tuple[str, int, timedelta]] = []
        self.tags: list[int] = []
        self.may_arrive = threading.Event()
        self.may_arrive.set()
        self._fails = fails

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 3

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        self.tags.append(tag)
        return self._work("recv", tensors, peer)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        self.tags.append(tag)
        return self._work("send", tensors, peer)

    def _work(self, what: str, tensors: list[torch.Tensor], peer: int) -> Any:
        played = self
        self.asked.append((what, peer, tensors[0].numel()))

        class Work:
            def wait(self, timeout: timedelta) -> None:
                assert played.may_arrive.wait(20)
                played.waited.append((what, peer, timeout))
                if peer == played._fails:
                    raise RuntimeError(f"no word of rank {peer}")

        return Work()


def parts(*sizes: int, value: float = 0.0) -> list[torch.Tensor]:
    return [torch.full((size,), value) for size in sizes]


def exchange(group: Any, received: list[torch.Tensor], sent: list[torch.Tensor]) -> FullDuplex:
    return FullDuplex(group, received, sent, number=418, timeout_s=7)


def test_what_is_expected_is_said_before_anything_is_sent() -> None:
    """A rank's own part is copied, and nothing of no length travels."""
    group, received = Played(), parts(4, 3, 2)
    exchange(group, received, parts(5, 3, 0, value=1.5))
    assert [what for what, _, _ in group.asked] == ["recv", "recv", "send"]
    assert sorted(group.asked) == [("recv", 0, 4), ("recv", 2, 2), ("send", 0, 5)]
    assert received[1].tolist() == [1.5] * 3


def test_messages_of_a_call_have_a_tag_that_those_of_the_next_ones_have_not() -> None:
    tags = []
    for number in range(1000):
        group = Played()
        FullDuplex(group, parts(1, 1, 1), parts(1, 1, 1), number=number, timeout_s=7)
        (tag,) = set(group.tags)
        tags.append(tag)
    assert len(set(tags)) == 1000
    assert 0 < min(tags) < max(tags) < 1 << 31


def test_every_part_is_waited_for_once_with_the_deadline_and_a_failure_is_told_to_all() -> None:
    group = Played()
    work, failing = (exchange(each, parts(1, 1, 1), parts(1, 1, 1)) for each in (group, Played(fails=2)))
    for _ in range(2):  # Gloo would wait for messages that nobody sends
        work.wait()
        with pytest.raises(RuntimeError, match="no word of rank 2"):
            failing.wait()
    assert work.is_completed()
    assert failing.is_completed()
    assert [timeout for _, _, timeout in group.waited] == [timedelta(seconds=7)] * 4


def waiters() -> set[threading.Thread]:
    """Of this test and of those before it, which may still be ending."""
    return {thread for thread in threading.enumerate() if thread.name == "evenstep full duplex"}


@pytest.mark.parametrize("fails", [-1, 0])
def test_who_only_asks_learns_that_it_has_arrived_or_failed(fails: int) -> None:
    """As programs do that poll: nobody calls `wait`."""
    before = waiters()
    group = Played(fails=fails)
    group.may_arrive.clear()
    work = exchange(group, parts(1, 1, 1), parts(1, 1, 1))
    assert not work.is_completed()
    (waiter,) = waiters() - before
    group.may_arrive.set()
    waiter.join(20)
    assert work.is_completed()


def test_what_nobody_waits_for_is_waited_for() -> None:
    """Gloo would forget what it is to receive, and the next calls would time out."""
    gc.collect()  # exchanges of earlier tests, which errors refer to
    before = waiters()
    played = Played()
    played.may_arrive.clear()
    exchange(played, parts(1, 1, 1), parts(1, 1, 1))
    gc.collect()
    threads = waiters() - before
    assert len(threads) == 1
    assert played.waited == []
    played.may_arrive.set()
    threads.pop().join(20)
    assert [(what, peer) for what, peer, _ in played.waited] == [(what, peer) for what, peer, _ in played.asked]
