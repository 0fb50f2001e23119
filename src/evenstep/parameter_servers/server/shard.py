"""A server's part of the parameters, and its optimizer: executes what the coordinator decides.

No RPC here: answers are futures, which a connection sends when they are complete.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.futures import Future
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from evenstep.parameter_servers.embeddings.rows import RowGradients, Rows
from evenstep.parameter_servers.embeddings.tables import Tables, TablesState
from evenstep.parameter_servers.layout import pack, rounded, transferred, unpack
from evenstep.parameter_servers.server.batch_queue import Key
from evenstep.parameter_servers.server.coordinator import Decision, Facts, Mode


class Pushed(NamedTuple):
    """What a worker sends at the end of a step.

    Attributes:
        weight: Sum of its weights; 0: it had no samples.
        version: Number of updates that its parameters had seen.
        used: Which parameters have a gradient.
        gradients: Sums of weight times gradient, packed.
        rows: The same of rows of embeddings, by table; None: there are none.
    """

    weight: float
    version: int
    used: list[bool]
    gradients: list[Tensor]
    rows: dict[str, RowGradients] | None = None


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


class Mean(NamedTuple):
    """The mean by weight of some pushes.

    Attributes:
        parameters: Packed.
        rows: By table.
    """

    parameters: list[Tensor]
    rows: dict[str, RowGradients]


GIVEN_UP = "the servers have lost this worker, and the others train on its batches"


@dataclass(frozen=True)
class Share:
    """The state of a server's part, as checkpoints hold it.

    Attributes:
        parameters: By name.
        state: The optimizer's of each parameter, by name.
        groups: Options of the optimizer's group that each parameter is in, by name.
        scheduler: Of the schedule; None: there is none.
        version: Number of updates.
        tables: Trained rows of embeddings.
    """

    parameters: Mapping[str, Tensor]
    state: Mapping[str, Mapping[str, Any]]
    groups: Mapping[str, Mapping[str, Any]]
    scheduler: Mapping[str, Any] | None
    version: int
    tables: TablesState = field(default_factory=dict)


@dataclass
class Outcome:
    """What comes of a decision.

    Attributes:
        complete: Answers workers; to be called without a lock, as it sends.
        square: Squared norm of a mean that was asked for.
        error: What the optimizer has raised.
        has_ended: The run is over.
    """

    complete: list[Callable[[], None]] = field(default_factory=list)
    squares: list[float] = field(default_factory=list)
    error: Exception | None = None
    has_ended: bool = False


class Shard:
    """The parameters of one server. Methods may be called from several threads.

    Args:
        parameters: By name: CPU tensors that nobody else changes.
        optimizer: Of these parameters; None where there are none.
        mode: When gradients are applied.
        scheduler: Sets the optimizer's rate after each update; None: it stays.
        transfer_dtype: What floating-point tensors travel in; None: in their own dtype.
        tables: Its shares of tables of embeddings; None: there are none.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        optimizer: Optimizer | None,
        mode: Mode,
        *,
        scheduler: LRScheduler | None = None,
        transfer_dtype: torch.dtype | None = None,
        tables: Tables | None = None,
    ) -> None:
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        self._optimizer, self._scheduler = optimizer, scheduler
        self._mode, self._transfer_dtype = mode, transfer_dtype
        self._lock = threading.Lock()
        self._pushed: dict[Key, Pushed] = {}
        self._tables = Tables() if tables is None else tables
        self._mean: tuple[Sequence[Key], Mean] | None = None  # of pushes that were measured
        self._waiting: dict[Key, Future[Any]] = {}
        self._released: dict[Key, Answer] = {}  # before their call has come here: as all servers answer, then
        self._gone: set[int] = set()
        self._decisions: dict[int, Decision] = {}  # that came before an earlier one
        self._next = 1
        self._failure = ""
        self.version = 0
        self._copies: dict[int, Share] = {}  # by number of the decision

    def __repr__(self) -> str:
        return f"<Shard {self._mode.name}, {len(self._parameters)} parameters, version {self.version}>"

    def call(self, key: Key, pushed: Pushed | None) -> tuple[Future[Any], Facts | None]:
        """Keep a worker's call until it is released, and what it pushes until that is applied.

        Returns:
            The `Answer`, and what the coordinator has to know of the push.
        """
        future: Future[Any] = Future()
        facts = None
        with self._lock:
            if key[0] in self._gone:
                future.set_result(Answer(self.version, [], GIVEN_UP))
                return future, None
            if pushed is not None:
                self._pushed[key] = pushed
                square = 0.0
                if self._mode.max_norm is not None:
                    square = _square(Mean(pushed.gradients, pushed.rows or {}))
                facts = Facts(pushed.weight, pushed.version, square)
            answer = self._released.pop(key, None)
            if answer is None and self._failure:
                answer = self._answer()
            if answer is not None:
                future.set_result(answer)
            else:
                self._waiting[key] = future
        return future, facts

    def look_up(self, worker: int, table: str, ids: Tensor) -> Rows:
        """Rows of a table: see `Tables.look_up`.

        Raises:
            Exception: What the user's `init_fn` has raised.
        """
        with self._lock:
            if worker in self._gone or self._failure:
                return no_rows(self._failure or GIVEN_UP)
            return Rows(rounded(self._tables.look_up(table, ids), self._transfer_dtype))

    def execute(self, decision: Decision) -> Outcome:
        """Do what was decided, if all that was decided before is done."""
        outcome = Outcome()
        with self._lock:
            self._decisions[decision.number] = decision
            while (ready := self._decisions.pop(self._next, None)) is not None:
                self._next += 1
                try:
                    self._execute(ready, outcome)
                except Exception as error:
                    outcome.error = error
                    self._failure = self._failure or failure_of(error)
                    break
            if self._failure:
                # Nothing is decided any more for those that wait.
                outcome.complete += [partial(future.set_result, self._answer()) for future in self._waiting.values()]
                self._waiting.clear()
        return outcome

    def fail(self, failure: str) -> None:
        """Answer whoever waits, and whoever comes, that the run can't go on."""
        with self._lock:
            self._failure = self._failure or failure
            answer, waiting = self._answer(), list(self._waiting.values())
            self._waiting.clear()
        for future in waiting:
            future.set_result(answer)

    def take_copy(self, number: int) -> Share | None:
        """What a decision to save has copied; None: it wasn't executed yet. Copies of earlier ones are forgotten."""
        with self._lock:
            self._copies = {each: copy for each, copy in self._copies.items() if each >= number}
            return self._copies.pop(number, None)

    def load(self, share: Share) -> None:
        """Begin with a state that was saved."""
        with self._lock, torch.no_grad():
            for name, parameter in zip(self._names, self._parameters, strict=True):
                parameter.copy_(share.parameters[name])
            if self._optimizer is not None:
                by_id = {id(each): name for name, each in zip(self._names, self._parameters, strict=True)}
                for group in self._optimizer.param_groups:
                    for parameter in group["params"]:
                        name = by_id[id(parameter)]
                        if share.state.get(name):
                            self._optimizer.state[parameter] = {
                                key: value.clone() if isinstance(value, Tensor) else value
                                for key, value in share.state[name].items()
                            }
                        group.update(share.groups.get(name, {}))
                if self._scheduler is not None and share.scheduler is not None:
                    self._scheduler.load_state_dict(dict(share.scheduler))
            if share.tables:
                self._tables.load_state_dicts([share.tables])
            self.version = share.version

    # Under the lock.

    def _execute(self, decision: Decision, outcome: Outcome) -> None:
        self._failure = self._failure or decision.failure
        if decision.measured:
            mean = self._add_up(decision.measured)
            self._mean = (decision.measured, mean)
            outcome.squares.append(_square(mean))
        if decision.applied:
            self._apply(decision.applied, decision.factor)
        for key in (*decision.applied, *decision.dropped):
            self._pushed.pop(key, None)
        for worker in decision.gone:
            measured = () if self._mean is None else self._mean[0]  # these are applied all the same
            for key in [key for key in self._pushed if key[0] == worker and key not in measured]:
                del self._pushed[key]
            for key in [key for key in self._released if key[0] == worker]:
                del self._released[key]
            # It may live, and only its connection have broken: it ends with this failure then.
            given_up = Answer(self.version, [], GIVEN_UP)
            outcome.complete += [
                partial(self._waiting.pop(key).set_result, given_up) for key in list(self._waiting) if key[0] == worker
            ]
            self._gone.add(worker)
        if decision.saves:
            self._copies[decision.number] = self._copy()
        if decision.released:
            answer = self._answer()
            for key in decision.released:
                future = self._waiting.pop(key, None)
                if future is None:
                    self._released[key] = answer
                else:
                    outcome.complete.append(partial(future.set_result, answer))
        outcome.has_ended = outcome.has_ended or decision.has_ended

    def _answer(self) -> Answer:
        packed = [] if self._failure else pack(self._parameters, self._parameters, self._transfer_dtype)
        return Answer(self.version, packed, self._failure)

    def _add_up(self, keys: Sequence[Key]) -> Mean:
        """The mean by weight of what was pushed, in the dtypes of the parameters."""
        pushes = [self._pushed[key] for key in keys]
        weighted = [each for each in pushes if each.weight > 0]
        weight = sum(each.weight for each in weighted)
        rows = self._tables.add_up([each.rows or {} for each in weighted], weight)
        if not self._parameters:
            return Mean([], rows)
        total = transferred(weighted[0].gradients, self._parameters)  # adds to the first push: nobody else has it
        for each in weighted[1:]:
            torch._foreach_add_(total, transferred(each.gradients, self._parameters))
        torch._foreach_div_(total, weight)
        return Mean(total, rows)

    def _apply(self, keys: Sequence[Key], factor: float) -> None:
        """One step of the optimizer, on the weighted mean of some gradients."""
        if self._mean is not None and set(keys) <= set(self._mean[0]):
            total, rows = self._mean[1]
        else:
            total, rows = self._add_up(keys)
        self._mean = None
        pushes = [self._pushed[key] for key in keys]
        if factor != 1.0 and total:
            torch._foreach_mul_(total, factor)
        try:
            if self._optimizer is not None:
                gradients = unpack(self._parameters, total)
                for index, (parameter, gradient) in enumerate(zip(self._parameters, gradients, strict=True)):
                    parameter.grad = gradient if any(each.used[index] for each in pushes) else None
                self._optimizer.step()
                if self._scheduler is not None:
                    self._scheduler.step()
        finally:
            for parameter in self._parameters:
                parameter.grad = None
        self._tables.apply(rows, factor)
        self.version += 1

    def _copy(self) -> Share:
        parameters = {name: each.detach().clone() for name, each in zip(self._names, self._parameters, strict=True)}
        state: dict[str, Mapping[str, Any]] = {}
        groups: dict[str, Mapping[str, Any]] = {}
        if self._optimizer is not None:
            by_id = {id(each): name for name, each in zip(self._names, self._parameters, strict=True)}
            for group in self._optimizer.param_groups:
                options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
                for parameter in group["params"]:
                    name = by_id[id(parameter)]
                    groups[name] = options
                    state[name] = {
                        key: value.clone() if isinstance(value, Tensor) else value
                        for key, value in self._optimizer.state.get(parameter, {}).items()
                    }
        scheduler = None if self._scheduler is None else self._scheduler.state_dict()
        return Share(parameters, state, groups, scheduler, self.version, self._tables.state_dict())


def no_rows(failure: str) -> Rows:
    """The answer to a lookup that has failed."""
    return Rows(torch.empty(0, device="cpu"), failure)


def failure_of(error: Exception) -> str:
    """Why a run can't go on after an optimizer has raised."""
    return f"its optimizer failed: {type(error).__name__}: {error}"


def _square(mean: Mean) -> float:
    tensors = [*mean.parameters, *(each.values for each in mean.rows.values())]
    return float(sum(each.double().square().sum() for each in tensors))
