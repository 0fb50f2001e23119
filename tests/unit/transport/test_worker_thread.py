"""The thread that runs a transport's calls, and what is copied behind one."""

from __future__ import annotations

import threading

import pytest

from evenstep.errors import EvenstepError, PeerLostError
from evenstep.transport.core.worker_thread import WorkerThread


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
