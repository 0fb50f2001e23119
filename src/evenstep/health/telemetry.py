"""What the steps of a run spent their time on: recorded always, at the cost of reading a clock some ten times a step.

[Note: marks]

While a step runs, every event appends two integers to a list: what it was and when. That is all that happens in the
loop. Only who asks has the lists turned into times (`explain`, pure).

    FORWARD, FORWARD_END      around each forward pass
    BACKWARD                  a backward pass reaches the outputs
    0, 1, 2, ...              bucket 0, 1, 2 ... is complete and about to travel
    WAITING, REDUCED          all buckets are on their way; all have arrived
    END                       the window has ended, `p.grad` is the mean
    OPTIMIZER, OPTIMIZER_END  around the optimizer's step, seen through torch's global hooks

A step begins with the first forward pass after a window's end. On a GPU these are the host's times: when work was
queued, not when it was done.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

FORWARD, FORWARD_END, BACKWARD, WAITING, REDUCED, END, OPTIMIZER, OPTIMIZER_END = range(-8, 0)

NUM_STEPS_KEPT = 1000

_SPANS = ("forward", "backward", "wait", "finish", "optimizer")
# What a mark ends, and what it begins. A backward pass that nobody ends lasts until something else begins.
_TRANSITIONS: dict[int, tuple[tuple[str, ...], str | None]] = {
    FORWARD: (("backward",), "forward"),
    FORWARD_END: (("forward",), None),
    BACKWARD: ((), "backward"),
    WAITING: (("backward",), "wait"),
    REDUCED: (("wait",), "finish"),
    END: (("backward", "wait", "finish"), None),
    OPTIMIZER: (("backward", "finish"), "optimizer"),
    OPTIMIZER_END: (("optimizer",), None),
}


@dataclass(frozen=True)
class StepTimes:
    """One step of one model on this rank. Times in seconds; 0.0 for what was not seen.

    Attributes:
        began_s: When it began, on the clock of `time.perf_counter`.
        forward_s: In forward passes.
        backward_s: In backward passes, until all buckets were on their way.
        ready_s: By bucket: how long after the first backward pass had begun the bucket was complete, before its
            collective. A rank whose times are long holds the others up.
        wait_s: For the buckets, after the last backward pass had ended: communication that wasn't hidden.
        finish_s: For dividing, module buffers and the like.
        optimizer_s: In the optimizer's step.
    """

    began_s: float
    forward_s: float
    backward_s: float
    ready_s: tuple[float, ...]
    wait_s: float
    finish_s: float
    optimizer_s: float


def explain(marks: Sequence[int]) -> StepTimes:
    """Turn a step's marks into times. Pure.

    Args:
        marks: [what, when in ns, what, when in ns, ...], in order of time.
    """
    spent = dict.fromkeys(_SPANS, 0)
    opened: dict[str, int] = {}
    ready: dict[int, int] = {}
    first_backward: int | None = None
    for what, when in zip(marks[::2], marks[1::2], strict=True):
        if what >= 0:
            if first_backward is not None:
                ready[what] = when - first_backward
            continue
        closes, opens = _TRANSITIONS[what]
        for name in closes:
            if name in opened:
                spent[name] += when - opened.pop(name)
        if opens is not None:
            opened.setdefault(opens, when)
        if what == BACKWARD and first_backward is None:
            first_backward = when
    seconds = {f"{name}_s": value / 1e9 for name, value in spent.items()}
    in_order = tuple(ready[bucket] / 1e9 for bucket in sorted(ready))
    return StepTimes(began_s=(marks[1] if marks else 0) / 1e9, ready_s=in_order, **seconds)


class Recorder:
    """The marks of one model's steps.

    Attributes:
        bucket_bytes: Memory of the buckets.
        peak_bucket_bytes: The most it was: for a moment, when buckets are laid out anew, old and new ones exist.
    """

    def __init__(self) -> None:
        self._current: list[int] = []
        self._steps: deque[list[int]] = deque(maxlen=NUM_STEPS_KEPT)
        self._is_over = False
        self.num_steps = 0
        self.bucket_bytes = 0
        self.peak_bucket_bytes = 0

    def forward(self, began_ns: int) -> None:
        """A forward pass ends now."""
        if self._is_over:
            self._turn_the_page()
        self._current += (FORWARD, began_ns, FORWARD_END, perf_counter_ns())

    def mark(self, what: int) -> None:
        """Something happens now."""
        self._current += (what, perf_counter_ns())

    def end(self) -> None:
        """The window has ended: what follows, up to the next forward pass, is the optimizer's."""
        self._current += (END, perf_counter_ns())
        self._is_over = True

    def whole_backward(self) -> None:
        """A backward pass begins that is the whole window; of a plain `loss.backward()` nobody will tell the end."""
        self._current += (BACKWARD, perf_counter_ns())
        self._is_over = True

    def has_buckets(self, num_bytes: int) -> None:
        """Buckets are laid out (anew)."""
        self.peak_bucket_bytes = max(self.peak_bucket_bytes, self.bucket_bytes + num_bytes)
        self.bucket_bytes = num_bytes

    def steps(self) -> list[StepTimes]:
        """The last steps that have ended, at most `NUM_STEPS_KEPT`; the newest may still miss its optimizer."""
        ended = [*self._steps, self._current] if self._is_over else self._steps
        return [explain(marks) for marks in ended]

    def marks(self) -> list[int]:
        """All marks of these steps, one after the other: [what, when in ns, what, when in ns, ...]."""
        ended = [*self._steps, self._current] if self._is_over else self._steps
        return [number for step in ended for number in step]

    def newest(self) -> StepTimes | None:
        """The newest step whose optimizer has been seen; None before there is one."""
        for marks in (self._current, *reversed(self._steps)):
            if OPTIMIZER_END in marks[::2]:
                return explain(marks)
        return None

    def num_marks_per_step(self) -> float:
        """How often the clock was read, on average."""
        ended = [*self._steps, self._current] if self._is_over else self._steps
        return sum(map(len, ended)) / 2 / max(1, len(ended))

    def _turn_the_page(self) -> None:
        self._steps.append(self._current)
        self.num_steps += 1
        self._current = []
        self._is_over = False


class Telemetry:
    """What the models of a world recorded: `world.telemetry`.

    Attributes:
        recorders: One per wrapped model that still exists, in order of wrapping.
    """

    def __init__(self) -> None:
        self._recorders: list[weakref.ref[Recorder]] = []

    @property
    def recorders(self) -> list[Recorder]:
        """One per wrapped model that still exists, in order of wrapping."""
        return [recorder for each in self._recorders if (recorder := each()) is not None]

    def open(self) -> Recorder:
        """A recorder for one more model."""
        if not self._recorders:
            _watch_optimizers(self)
        recorder = Recorder()
        self._recorders.append(weakref.ref(recorder))
        return recorder

    def steps(self, model: int = 0) -> list[StepTimes]:
        """The last steps of a model, oldest first.

        Args:
            model: Its number, in order of wrapping; ordinary scripts have one.
        """
        recorders = self.recorders
        return recorders[model].steps() if model < len(recorders) else []

    def newest(self, model: int = 0) -> StepTimes | None:
        """The newest step of a model that has ended with its optimizer; None before there is one.

        Args:
            model: Its number, in order of wrapping.
        """
        recorders = self.recorders
        return recorders[model].newest() if model < len(recorders) else None

    def optimizer_marked(self, what: int) -> None:
        """An optimizer begins or ends its step."""
        for each in self._recorders:
            recorder = each()
            if recorder is not None and recorder._current:
                recorder._current += (what, perf_counter_ns())
                recorder._is_over = True

    def __repr__(self) -> str:
        told = ", ".join(str(recorder.num_steps) for recorder in self.recorders)
        return f"<Telemetry of {len(self.recorders)} models, steps: {told or 'none'}>"


_watching: weakref.WeakSet[Telemetry] = weakref.WeakSet()
_has_hooks = False


def _watch_optimizers(telemetry: Telemetry) -> None:
    """Have a telemetry told of the steps of all of torch's optimizers, as long as it lives.

    One pair of hooks serves all, and stays: torch iterates over its hooks while an optimizer steps, and would fail if
    the garbage collector took one away meanwhile.
    """
    global _has_hooks
    _watching.add(telemetry)
    if _has_hooks:
        return
    _has_hooks = True

    def marking(what: int) -> Any:
        def mark(*_: object) -> None:
            for each in tuple(_watching):
                each.optimizer_marked(what)

        return mark

    register_optimizer_step_pre_hook(marking(OPTIMIZER))
    register_optimizer_step_post_hook(marking(OPTIMIZER_END))


def cost_of_a_mark(repeats: int = 20_000) -> float:
    """Seconds that one mark takes on this machine, measured now: the least of several runs."""
    best = float("inf")
    for _ in range(5):
        recorder = Recorder()
        started = perf_counter_ns()
        for _ in range(repeats):
            recorder.mark(WAITING)
        best = min(best, (perf_counter_ns() - started) / repeats)
    return best / 1e9
