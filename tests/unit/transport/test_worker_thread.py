"""The thread that runs a transport's calls, and what is copied behind one."""

from __future__ import annotations

import threading

import pytest
import torch

from evenstep.errors import EvenstepError, PeerLostError
from evenstep.transport.backend.work import GroupWork
from evenstep.transport.core.worker_thread import WorkerThread


def test_calls_may_write_to_what_was_made_in_inference_mode_and_futures_make_what_can_be_trained_with() -> None:
    thread = WorkerThread("evenstep test", on_close=lambda: None)
    with torch.inference_mode():
        result = torch.zeros(3)
    go_on, heard, made = threading.Event(), threading.Event(), []

    def run() -> None:
        assert go_on.wait(20)
        result.fill_(2.0)

    def hear(error: EvenstepError | None) -> None:
        made.append((error, result / 4))
        heard.set()

    thread.submit("a call", lambda number: run()).add_done_callback(hear)
    go_on.set()
    assert heard.wait(20)
    ((error, quarter),) = made
    assert error is None
    assert not quarter.is_inference()
    factor = torch.ones(3, requires_grad=True)
    (factor * quarter).sum().backward()  # autograd keeps no tensor of inference mode
    assert factor.grad is not None
    assert factor.grad.tolist() == [0.5] * 3
    thread.close(PeerLostError("closed"))


def test_results_are_copied_to_tensors_of_both_modes() -> None:
    ordinary = torch.zeros(2)
    with torch.inference_mode():
        other = torch.zeros(2)
    copies = [(ordinary, torch.ones(2)), (other, torch.full((2,), 2.0))]
    assert GroupWork([], [ordinary, other], copies).wait()
    assert ordinary.tolist() == [1.0, 1.0]
    assert other.tolist() == [2.0, 2.0]


def test_a_callback_that_raises_is_logged_and_stops_neither_others_nor_later_calls(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The thread ended with it, and later calls never did."""
    thread = WorkerThread("evenstep test", on_close=lambda: None)
    go_on, heard = threading.Event(), threading.Event()

    def fail(error: EvenstepError | None) -> None:
        raise ValueError("in a callback")

    first = thread.submit("a call", lambda number: go_on.wait(20))
    first.add_done_callback(fail)
    first.add_done_callback(lambda error: heard.set())
    go_on.set()
    thread.submit("a call", lambda number: None).wait(20)
    assert heard.is_set()
    assert "in a callback" in caplog.text
    thread.close(PeerLostError("closed"))


@pytest.mark.parametrize("error", [ValueError("in a call"), SystemExit(3), KeyboardInterrupt()])
def test_every_call_ends_whatever_it_and_closing_raise(error: BaseException) -> None:
    """Whoever waited for one hung: the thread had ended, and nobody ended the calls."""

    def run() -> None:
        assert go_on.wait(20)
        raise error

    def close() -> None:
        raise OSError("in closing")

    thread = WorkerThread("evenstep test", on_close=close)
    go_on = threading.Event()
    works = [thread.submit("a call", lambda number: run()), thread.submit("a call", lambda number: None)]
    go_on.set()
    for work in works:
        with pytest.raises(PeerLostError) as raised:
            work.wait(20)
        assert "a call number 1 queued" in str(raised.value)
        assert type(error).__name__ in str(raised.value)
        assert "in closing" in str(raised.value)
    with pytest.raises(OSError, match="in closing"):
        thread.close(PeerLostError("closed"))


def test_a_callback_may_start_calls_and_wait_for_them() -> None:
    """As torch's PowerSGD does between its two calls."""
    thread = WorkerThread("evenstep test", on_close=lambda: None)
    go_on, over, order = threading.Event(), threading.Event(), []

    def hear(error: EvenstepError | None) -> None:
        assert error is None
        queued[0].wait(10.0)  # started before this
        for name in "bc":
            thread.submit(name, lambda number, name=name: order.append(name)).wait(10.0)
        order.append("heard")
        over.set()

    def run(number: int) -> None:
        assert go_on.wait(20)
        order.append("a")

    thread.submit("a", run).add_done_callback(hear)
    queued = [thread.submit("queued", lambda number: order.append("queued"))]
    go_on.set()
    assert over.wait(20)
    thread.submit("d", lambda number: order.append("d")).wait(10.0)
    assert order == ["a", "queued", "b", "c", "heard", "d"]
    thread.close(PeerLostError("closed"))
    assert sum(each.name == "evenstep test" and each.is_alive() for each in threading.enumerate()) == 0
