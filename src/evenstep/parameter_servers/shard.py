"""A server's part of the parameters: its optimizer, and what a mode lets through when.

A worker pushes the gradients of its step, and the answer is the parameters for its next one. The modes differ in when
gradients are applied, and when the answer comes:

| mode | gradients are applied | the answer comes |
| --- | --- | --- |
| "sync" | once a step, those of all workers together | after that |
| "async" | each push by itself, at once | at once |
| "bounded" | each push by itself, at once | when the slowest worker is at most `max_staleness` steps behind |

No RPC here: answers are futures, which a connection sends when they are complete.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.futures import Future
from torch.optim import Optimizer

from evenstep.parameter_servers.batch_queue import BatchQueue, Pass, Taken
from evenstep.parameter_servers.layout import pack, unpack


class Pushed(NamedTuple):
    """What a worker sends at the end of a step.

    Attributes:
        weight: Sum of its weights; 0: it had no samples.
        version: Number of updates that its parameters had seen.
        used: Which parameters have a gradient.
        gradients: Sums of weight times gradient, packed.
    """

    weight: float
    version: int
    used: list[bool]
    gradients: list[Tensor]


class Answer(NamedTuple):
    """What a server answers.

    Attributes:
        version: Number of updates that the parameters have seen.
        parameters: Packed.
        failure: Why there are none; "" if there are.
    """

    version: int
    parameters: list[Tensor]
    failure: str = ""


@dataclass(frozen=True)
class Mode:
    """When gradients are applied, and who waits for whom.

    Attributes:
        name: "sync", "async" or "bounded".
        max_staleness: Of "bounded": how many steps a worker may be ahead of the slowest.
        delay_compensation: See `evenstep.parameter_server`; 0: none.
    """

    name: str
    max_staleness: int = 0
    delay_compensation: float = 0.0


class Shard:
    """The parameters of one server. Methods may be called from several threads.

    Args:
        parameters: CPU tensors that nobody else changes.
        optimizer: Of these parameters; None where there are none.
        mode: See the table above.
        num_workers: Workers that will push, numbered from 0.
    """

    def __init__(self, parameters: Sequence[Tensor], optimizer: Optimizer | None, mode: Mode, num_workers: int) -> None:
        self._parameters = list(parameters)
        self._optimizer = optimizer
        self._mode = mode
        self._lock = threading.Lock()
        self._version = 0
        self._clocks = dict.fromkeys(
            range(num_workers), 0
        )  # steps that each worker has pushed; without those that left
        self._pushed: dict[int, Pushed] = {}  # "sync": of the present step
        self._waiting: dict[int, Future[Any]] = {}  # workers that wait for an answer
        self._leaving: dict[int, Future[Any]] = {}  # workers that wait for the end
        self._failure = ""
        self._given: dict[int, list[Tensor]] = {}  # the parameters that a worker computes with, packed; to compensate
        self._queue = BatchQueue()  # used on the first server only
        self.staleness: Counter[int] = Counter()
        self.error: Exception | None = None  # what the optimizer has raised
        self.ended = threading.Event()  # all workers have left, or one has failed

    def __repr__(self) -> str:
        return f"<Shard {self._mode.name}, {len(self._parameters)} parameters, version {self._version}>"

    def pull(self, worker: int | None = None) -> Answer:
        """The parameters as they are now, for a worker to compute with, or None to look at."""
        with self._lock:
            answer = self._answer()
            if worker is not None:
                self._note_given([worker], answer)
            return answer

    def push(self, worker: int, pushed: Pushed) -> Future[Any]:
        """Take a worker's gradients.

        Returns:
            The `Answer`, complete when the worker may go on.
        """
        future: Future[Any] = Future()
        with self._lock:
            self._waiting[worker] = future
            if not self._failure:
                self._clocks[worker] += 1
                if self._mode.name == "sync":
                    self._pushed[worker] = pushed
                else:
                    self._apply([pushed], self._given.get(worker))
                    self._queue.finish(worker)
            complete = self._advance()
        complete()
        return future

    def leave(self, worker: int, failure: str = "") -> Future[Any]:
        """A worker has ended: nobody waits for it any more.

        Args:
            worker: Which.
            failure: What it has failed with: the run can't go on then. "": it is done.

        Returns:
            The last `Answer`, complete when all workers have left.
        """
        future: Future[Any] = Future()
        with self._lock:
            self._clocks.pop(worker, None)
            self._queue.give_back(worker)
            self._leaving[worker] = future
            self._failure = self._failure or failure
            complete = self._advance()
        complete()
        return future

    def take(self, worker: int, wanted: Pass, num_batches: int, facts: str) -> Taken:
        """A worker's next batch: see `BatchQueue.take`."""
        with self._lock:
            if self._failure:
                return Taken(wanted[1], -1, failure=self._failure)
            return self._queue.take(worker, wanted, num_batches, facts)

    def lagging(self) -> list[tuple[int, int]]:
        """The workers that others wait for, each with the number of steps that it has pushed."""
        with self._lock:
            return [(worker, done) for worker, done in self._clocks.items() if worker not in self._waiting]

    # Under the lock.

    def _answer(self) -> Answer:
        if self._failure:
            return Answer(self._version, [], self._failure)
        return Answer(self._version, pack(self._parameters, self._parameters))

    def _advance(self) -> Callable[[], None]:
        """Apply what is complete, and choose who may go on.

        Returns:
            What answers them, to be called without the lock: it sends.
        """
        if (
            self._mode.name == "sync"
            and self._pushed
            and not self._failure
            and self._pushed.keys() >= self._clocks.keys()
        ):
            # In order of worker, so that the sum doesn't depend on who came first.
            self._apply([self._pushed[worker] for worker in sorted(self._pushed)])
            for worker in self._pushed:
                self._queue.finish(worker)
            self._pushed = {}
        ready = [worker for worker in self._waiting if self._may_go_on(worker)]
        futures = [self._waiting.pop(worker) for worker in ready]
        if self._failure or not self._clocks:
            futures += self._leaving.values()
            self._leaving = {}
            self.ended.set()
        answer = self._answer() if futures else None
        if answer is not None:
            self._note_given(ready, answer)

        def complete() -> None:
            for future in futures:
                future.set_result(answer)

        return complete

    def _may_go_on(self, worker: int) -> bool:
        if self._failure or self._mode.name == "async":
            return True
        if self._mode.name == "sync":
            return worker not in self._pushed
        ahead = self._clocks[worker] - min(self._clocks.values())
        return ahead <= self._mode.max_staleness

    def _note_given(self, workers: Sequence[int], answer: Answer) -> None:
        if self._mode.delay_compensation and not answer.failure:
            self._given |= dict.fromkeys(workers, answer.parameters)

    def _apply(self, pushes: Sequence[Pushed], computed_with: list[Tensor] | None = None) -> None:
        """One step of the optimizer, on the weighted mean of some gradients.

        Args:
            pushes: Theirs.
            computed_with: The parameters that they were computed with, packed; None: don't compensate.
        """
        weight = sum(each.weight for each in pushes)
        if weight == 0:
            return
        counting = [each for each in pushes if each.weight > 0]
        self.staleness.update(self._version - each.version for each in counting)
        try:
            if self._optimizer is not None:
                self._set_gradients(counting, weight, computed_with)
                self._optimizer.step()
        except Exception as error:
            self.error = error
            self._failure = f"its optimizer failed: {type(error).__name__}: {error}"
            return
        finally:
            for parameter in self._parameters:
                parameter.grad = None
        self._version += 1

    def _set_gradients(self, pushes: Sequence[Pushed], weight: float, computed_with: list[Tensor] | None) -> None:
        total = pushes[0].gradients
        for each in pushes[1:]:
            torch._foreach_add_(total, each.gradients)
        torch._foreach_div_(total, weight)
        if computed_with is not None:
            moved = torch._foreach_sub(pack(self._parameters, self._parameters), computed_with)
            squares = torch._foreach_mul(total, total)
            torch._foreach_addcmul_(total, squares, moved, value=self._mode.delay_compensation)
        gradients = unpack(self._parameters, total)
        for index, (parameter, gradient) in enumerate(zip(self._parameters, gradients, strict=True)):
            parameter.grad = gradient if any(each.used[index] for each in pushes) else None
