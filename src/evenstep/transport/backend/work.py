"""The works that the backend "evenstep" returns to torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from evenstep.errors import EvenstepError, PeerLostError
from evenstep.ground.compat.torch_dynamo import uncompiled
from evenstep.transport.base import Work


class CallbackWork(Work, Protocol):
    """A transport's work, with more methods than `base.Work`."""

    def wait(self, timeout_s: float | None = None) -> None:
        """See `base.Work.wait`; no longer than `timeout_s`."""

    def add_done_callback(self, callback: Callable[[EvenstepError | None], object]) -> None:
        """Call `callback` once, with the error or None, from any thread."""


class GlooWork:
    """A call that Gloo carries, while the ranks compare it over shared memory.

    Args:
        compared: A work that is done when all ranks have made this call.
        gloos: Gloo's work.
        ended: Called with Gloo's work after `wait`.
    """

    def __init__(self, compared: CallbackWork, gloos: dist.Work, ended: Callable[[dist.Work], object]) -> None:
        self._compared = compared
        self._gloos = gloos
        self._ended = ended

    def wait(self, timeout_s: float | None = None) -> None:
        """See `CallbackWork`. Gloo's errors are RuntimeErrors."""
        self._compared.wait(timeout_s)  # wait for this first: if ranks disagree, Gloo would wait until its deadline
        if timeout_s is None:
            self._gloos.wait()
        else:
            self._gloos.wait(timedelta(seconds=timeout_s))
        self._ended(self._gloos)

    def is_completed(self) -> bool:
        """See `CallbackWork`."""
        if not self._compared.is_completed():
            return False
        try:
            self._compared.wait()
        except EvenstepError:
            return True
        return self._gloos.is_completed()

    def add_done_callback(self, callback: Callable[[EvenstepError | None], object]) -> None:
        """See `CallbackWork`."""

        def on_gloo(future: Future[Any]) -> None:
            try:
                future.value()
            except RuntimeError as error:
                callback(PeerLostError(f"over gloo: {error}"))
            else:
                callback(None)

        def on_compared(error: EvenstepError | None) -> None:
            if error is not None:
                callback(error)
            else:
                self._gloos.get_future().add_done_callback(on_gloo)

        self._compared.add_done_callback(on_compared)


_copying = threading.Lock()  # shared by all works: a lock costs as much as the rest of a work


class _Failed:
    def __init__(self, error: Exception) -> None:
        self.error = error


@uncompiled
class GroupWork(dist.Work):
    """One call of a group: one or several collectives of one transport.

    Args:
        works: The works, in the order of their launch.
        result: The future's value.
        copies: (to, from): copies to make when all works are done.
        timeout_s: Deadline of `wait`; None: the transport's.
    """

    def __init__(
        self,
        works: Sequence[CallbackWork],
        result: list[Tensor],
        copies: Sequence[tuple[Tensor, Tensor]] = (),
        timeout_s: float | None = None,
    ) -> None:
        super().__init__()
        self._works = works
        self._result = result
        self._copies = copies
        self._timeout_s = timeout_s
        self._is_done = False
        self._error: Exception | None = None
        self._future: Future[Any] | None = None

    def call_at_end(self, function: Callable[[], None]) -> None:
        """Call a function when the work is known to be done.

        A work that fails, or is collected before that, drops the function without calling it.
        """
        self._at_end = function
        if self._is_done and self.__dict__.pop("_at_end", None) is not None:
            function()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the results may be read.

        Raises:
            MismatchError: The ranks made different calls.
            PeerLostError: A peer died.
            CollectiveTimeoutError: A peer did not arrive before the deadline.
        """
        if not self._is_done:
            timeout_s = timeout.total_seconds() if timeout else self._timeout_s
            for work in self._works:
                work.wait(timeout_s)
            self._conclude()
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return or raise at once."""
        if not self._is_done and all(work.is_completed() for work in self._works):
            try:
                self.wait()
            except (EvenstepError, RuntimeError) as error:  # Gloo raises RuntimeErrors
                self._error = error
                return True
        return self._is_done

    def is_success(self) -> bool:
        """Whether the call is completed without an error."""
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        """The error that `wait` would raise; None while it isn't known."""
        self.is_completed()
        return self._error

    def _source_rank(self) -> int:
        """The rank that has sent a message."""
        return self._works[0].source  # type: ignore[attr-defined,no-any-return]

    def result(self) -> list[Tensor]:
        """The output tensors."""
        return self._result

    def synchronize(self) -> None:
        """The same as `wait`: there are no streams."""
        self.wait()

    def get_future(self) -> Future[Any]:
        """A future of the output tensors. A thread completes it, even without a `wait`.

        Code that waits for the future gets an error as a RuntimeError with the same text, because it passes through
        C++.
        """
        if self._future is None:
            inner: Future[Any] = Future()
            if self._is_done or self.is_success():
                inner.set_result(self._result)
                self._future = inner
            else:
                # Python's `Future.set_exception` would complete the future with the exception as its value, and C++
                # would look for tensors in it. But C++ treats an exception that a callback raises as an error.
                self._future = inner.then(_value_of)
                self._listen(inner)
        return self._future

    def _listen(self, future: Future[Any]) -> None:
        """Complete the future when the last work is done, or the first work has failed."""
        missing, lock = len(self._works), threading.Lock()

        def on_done(error: EvenstepError | None) -> None:
            nonlocal missing
            with lock:
                missing = 0 if error is not None and missing > 0 else missing - 1
                is_over = missing == 0
            if is_over:
                self._end(future, error)

        for work in self._works:
            work.add_done_callback(on_done)

    def _end(self, future: Future[Any], error: EvenstepError | None) -> None:
        failure: Exception | None = error
        if failure is None:
            try:
                self._conclude()
            except Exception as raised:  # else a thread that waits for the future in C++ would wait for ever
                failure = raised
        self._error = failure
        future.set_result(self._result if failure is None else _Failed(failure))

    def _conclude(self) -> None:
        if self._copies:
            # This may run in any thread: tensors made in torch's inference mode may only be written in that mode.
            inference = torch.is_inference_mode_enabled() or any(to.is_inference() for to, _ in self._copies)
            with _copying, torch.inference_mode(inference):
                for to, source in self._copies:
                    to.copy_(source)
                self._copies = ()
        self._is_done = True
        at_end = self.__dict__.pop("_at_end", None)  # `pop` gives it to only one of several threads
        if at_end is not None:
            at_end()


def _value_of(future: Future[Any]) -> Any:
    value = future.value()
    if isinstance(value, _Failed):
        raise value.error
    return value


def merge(works: Sequence[GroupWork]) -> GroupWork:
    """Combine several calls of one group, in the order of their launch, into one work."""
    return GroupWork(
        [each for work in works for each in work._works],
        [each for work in works for each in work._result],
        [each for work in works for each in work._copies],
        min((work._timeout_s for work in works if work._timeout_s is not None), default=None),
    )
