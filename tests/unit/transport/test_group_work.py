"""Works of the backend's groups: when their futures end, and how long they are waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.futures import Future

from evenstep.errors import EvenstepError, MismatchError
from evenstep.transport.backend.work import GlooWork, GroupWork, merge


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

    def add_done_callback(self, told: Callable[[EvenstepError | None], object]) -> None:
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


def gloos(compared: Heard, carried: Carried, ended: Callable[[Any], object] = lambda _: None) -> GlooWork:
    return GlooWork(compared, carried, ended)  # type: ignore[arg-type]


def test_a_future_waits_for_what_gloo_carries_beside_the_rest() -> None:
    compared, carried, last, copy = Heard(), Carried(), Heard(), torch.zeros(2)
    work = GroupWork([gloos(compared, carried), last], [copy], [(copy, torch.ones(2))])
    future = work.get_future()
    compared.end()
    last.end()
    assert not future.done()
    carried.future.set_result([])
    assert future.done()
    assert torch.equal(future.wait()[0], torch.ones(2))


def test_a_future_ends_with_the_first_that_fails() -> None:
    compared, carried, last = Heard(), Carried(), Heard()
    work = GroupWork([gloos(compared, carried), last], [])
    future = work.get_future()
    last.end(MismatchError("they disagree"))
    with pytest.raises(RuntimeError, match="they disagree"):
        future.wait()
    compared.end()
    carried.future.set_result([])
    assert isinstance(work.exception(), MismatchError)


def test_several_calls_in_one_are_waited_for_as_long_as_the_shortest_allows() -> None:
    works = [Heard(), Heard(), Heard()]
    merge([GroupWork([works[0]], []), GroupWork([works[1]], [], (), 7.0), GroupWork([works[2]], [], (), 3.0)]).wait()
    assert [each.timeouts for each in works] == [[3.0]] * 3


def test_a_future_ends_also_where_the_result_cannot_be_copied() -> None:
    """Whoever waits for it in C++ would wait for ever."""
    last = Heard()
    work = GroupWork([last], [torch.zeros(2)], [(torch.zeros(2), torch.ones(3))])
    future = work.get_future()
    last.end()
    with pytest.raises(RuntimeError, match="must match"):
        future.wait()
    assert not work.is_success()
