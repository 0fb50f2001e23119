"""Works of the backend's groups: when their futures end, and how long they are waited for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.futures import Future

from evenstep.errors import EvenstepError, MismatchError
from evenstep.transport.group_work import GloosWork, GroupWork, merge


class Heard:
    """A work that ends when it is told to."""

    def __init__(self) -> None:
        self.told: list[Callable[[EvenstepError | None], object]] = []
        self.timeouts: list[float | None] = []
        self.is_done = False

    def wait(self, timeout_s: float | None = None) -> None:
        self.timeouts.append(timeout_s)

    def is_completed(self) -> bool:
        return self.is_done

    def when_done(self, told: Callable[[EvenstepError | None], object]) -> None:
        self.told.append(told)

    def end(self, error: EvenstepError | None = None) -> None:
        self.is_done = True
        for told in self.told:
            told(error)


class Carried:
    """What Gloo would give."""

    def __init__(self) -> None:
        self.future: Future[list[torch.Tensor]] = Future()

    def get_future(self) -> Future[list[torch.Tensor]]:
        return self.future

    def is_completed(self) -> bool:
        return self.future.done()

    def wait(self, timeout: object = None) -> None:
        self.future.wait()


def test_a_future_waits_for_what_gloo_carries_beside_the_rest() -> None:
    compared, carried, last, copy = Heard(), Carried(), Heard(), torch.zeros(2)
    work = GroupWork([GloosWork(compared, carried), last], [copy], [(copy, torch.ones(2))])  # type: ignore[arg-type]
    future = work.get_future()
    compared.end()
    last.end()
    assert not future.done()
    carried.future.set_result([])
    assert future.done()
    assert torch.equal(future.wait()[0], torch.ones(2))


def test_a_future_ends_with_the_first_that_fails() -> None:
    compared, carried, last = Heard(), Carried(), Heard()
    work = GroupWork([GloosWork(compared, carried), last], [])  # type: ignore[arg-type]
    future = work.get_future()
    last.end(MismatchError("they disagree"))
    with pytest.raises(RuntimeError, match="they disagree"):
        future.wait()
    compared.end()
    carried.future.set_result([])
    assert isinstance(work.exception(), MismatchError)


def test_a_future_of_nothing_has_ended() -> None:
    assert merge([]).get_future().done()


def test_several_calls_in_one_are_waited_for_as_long_as_the_shortest_allows() -> None:
    works = [Heard(), Heard(), Heard()]
    merge([GroupWork([works[0]], []), GroupWork([works[1]], [], (), 7.0), GroupWork([works[2]], [], (), 3.0)]).wait()
    assert [each.timeouts for each in works] == [[3.0]] * 3
