"""The times of each step's parts. They are always recorded, by about ten clock reads a step.

[Note: marks]

While a step runs, every event appends two integers to a list: its kind and its time. An event that begins a phase is
also written to the heartbeat page. Nothing else happens in the loop; marks are turned into times only on demand
(`explain`, pure).

    FORWARD, FORWARD_END      around each forward pass
    BACKWARD                  a backward pass reaches the outputs
    0, 1, 2, ...              bucket 0, 1, 2 ... is complete, and its reduction is about to start
    WAITING, REDUCED          all reductions have started; all have ended
    END                       the window has ended, `p.grad` is the mean
    OPTIMIZER, OPTIMIZER_END  around the optimizer's step, seen through torch's global hooks

While torch's profiler runs, these are ranges of the profile, too: "evenstep:forward", "evenstep:backward",
"evenstep:exchange" (from WAITING to REDUCED) and "evenstep:finish". torch itself has a range for the optimizer's step.

A step begins with the first forward pass after a window's end. On a GPU these are the host's times: when work was
queued, not when it was done.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns

from evenstep.ground.compat.torch_profiler import begin_event, is_profiled
from evenstep.ground.health.heartbeat import Phase
from evenstep.ground.health.heartbeat import mark as mark_phase
from evenstep.ground.health.steps import count_optimizer_steps

FORWARD, FORWARD_END, BACKWARD, WAITING, REDUCED, END, OPTIMIZER, OPTIMIZER_END = range(-8, 0)

NUM_STEPS_KEPT = 1000
_MOST_PER_STEP = 20_000  # the most numbers of a step: a model that isn't trained records the steps of all optimizers

_SPANS = ("forward", "backward", "wait", "finish", "optimizer")
_RANGES = {"wait": "exchange"}  # names in a profile, if they differ from the spans' names
# The spans that a mark ends, and the span that it begins. A backward pass without an end lasts until another span
# begins.
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
    """One step of one model on this rank. Times in seconds; 0.0 if not recorded.

    Attributes:
        began_s: When the step began, on the clock of `time.perf_counter`.
        forward_s: Time in forward passes.
        backward_s: Time in backward passes, until the reductions of all buckets had started.
        ready_s: For each bucket, the time from the start of the first backward pass until the bucket was complete,
            before its collective. A rank with long times delays the others.
        wait_s: Time of waiting for the buckets after the last backward pass: communication that wasn't hidden.
        finish_s: Time for division, module buffers and the like.
        optimizer_s: Time in the optimizer's step.
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
        marks: [kind, time in ns, kind, time in ns, ...], in order of time.
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
    """The marks of one model's steps. Events that begin a phase are written to the heartbeat page, too.

    Attributes:
        is_profiled: Whether torch's profiler ran when the last forward pass began, so that marks are ranges of the
            profile.
        bucket_bytes: Memory of the buckets.
        peak_bucket_bytes: The maximum of `bucket_bytes`. When buckets are laid out anew, old and new buckets briefly
            exist together.
    """

    def __init__(self) -> None:
        self._steps: deque[list[int]] = deque([[]], maxlen=NUM_STEPS_KEPT + 1)  # the last step may still run
        self._is_over = False
        self._ranges: dict[str, Callable[[], None]] = {}  # functions that end the open ranges, by span
        self.is_profiled = False
        self.bucket_bytes = 0
        self.peak_bucket_bytes = 0

    def begin_forward(self) -> int:
        """Called when a forward pass begins: returns the time, for `forward`, which marks the pass at its end."""
        mark_phase(Phase.FORWARD)
        if self.is_profiled or is_profiled():
            self.is_profiled = is_profiled()
            self._show(FORWARD)
        return perf_counter_ns()

    def forward(self, began_ns: int) -> None:
        """Mark the beginning and the end of a forward pass that ends now."""
        if self.is_profiled:
            self._show(FORWARD_END)
        if self._is_over:
            self._steps.append([])
            self._is_over = False
        marks = self._steps[-1]
        if len(marks) < _MOST_PER_STEP:
            marks.extend((FORWARD, began_ns, FORWARD_END, perf_counter_ns()))

    def begin_backward(self, *, is_whole: bool = False) -> None:
        """Mark the beginning of a backward pass.

        Args:
            is_whole: The pass is a whole window whose end isn't marked, as in a plain `loss.backward()`.
        """
        mark_phase(Phase.BACKWARD)
        self.mark(BACKWARD)
        self._is_over |= is_whole

    def mark(self, what: int) -> None:
        """Mark an event that doesn't begin a phase."""
        self._steps[-1].extend((what, perf_counter_ns()))
        if self.is_profiled:
            self._show(what)

    def end(self) -> None:
        """Mark the end of the window: the time up to the next forward pass is the optimizer's."""
        self.mark(END)
        self._is_over = True
        mark_phase(Phase.BETWEEN_STEPS)

    def mark_optimizer(self, _: object, has_ended: bool) -> None:
        """Mark the beginning or the end of an optimizer's step, for any model."""
        marks = self._steps[-1]
        if 0 < len(marks) < _MOST_PER_STEP:
            marks.extend((OPTIMIZER_END if has_ended else OPTIMIZER, perf_counter_ns()))
            self._is_over = True

    def has_buckets(self, num_bytes: int) -> None:
        """Record the memory of buckets that were laid out."""
        self.peak_bucket_bytes = max(self.peak_bucket_bytes, self.bucket_bytes + num_bytes)
        self.bucket_bytes = num_bytes

    def steps(self) -> list[StepTimes]:
        """The last finished steps, at most `NUM_STEPS_KEPT`; the newest may not have its optimizer's times yet."""
        return [explain(marks) for marks in self._ended()]

    def marks(self) -> list[int]:
        """All marks of these steps, one after the other: [kind, time in ns, kind, time in ns, ...]."""
        return [number for marks in self._ended() for number in marks]

    def newest(self) -> StepTimes | None:
        """The newest step with its optimizer's times; None before there is one."""
        seen = (marks for marks in reversed(self._steps) if OPTIMIZER_END in marks[::2])
        return next(map(explain, seen), None)

    def _show(self, what: int) -> None:
        """End and begin ranges of the running profile."""
        closes, opens = _TRANSITIONS.get(what, ((), None))
        for name in closes if opens is None else (*closes, opens):  # also a range that an error has left open
            if (end := self._ranges.pop(name, None)) is not None:
                end()
        if opens is not None and (end := begin_event(f"evenstep:{_RANGES.get(opens, opens)}", (), {})) is not None:
            self._ranges[opens] = end

    def _ended(self) -> list[list[int]]:
        """The marks of each of the last steps that have ended."""
        steps = [*self._steps]
        return (steps if self._is_over else steps[:-1])[-NUM_STEPS_KEPT:]


class Telemetry:
    """The records of a world's models: `world.telemetry`.

    Attributes:
        recorders: One recorder for each wrapped model that still exists, in order of wrapping.
    """

    def __init__(self) -> None:
        self._recorders: list[weakref.ref[Recorder]] = []

    @property
    def recorders(self) -> list[Recorder]:
        """One recorder for each wrapped model that still exists, in order of wrapping."""
        return [recorder for each in self._recorders if (recorder := each()) is not None]

    def open(self) -> Recorder:
        """Make a recorder for one more model."""
        recorder = Recorder()
        self._recorders.append(weakref.ref(recorder))
        count_optimizer_steps(recorder.mark_optimizer)
        return recorder

    def steps(self, model: int = 0) -> list[StepTimes]:
        """The last steps of a model, oldest first.

        Args:
            model: The model's number, in order of wrapping; most scripts have one model.
        """
        recorders = self.recorders
        return recorders[model].steps() if model < len(recorders) else []

    def newest(self, model: int = 0) -> StepTimes | None:
        """The newest step of a model with its optimizer's times; None before there is one.

        Args:
            model: The model's number, in order of wrapping."""
        recorders = self.recorders
        return recorders[model].newest() if model < len(recorders) else None

    def __repr__(self) -> str:
        counts = ", ".join(str(len(recorder._ended())) for recorder in self.recorders)
        return f"<Telemetry of {len(self.recorders)} models, steps remembered: {counts or 'none'}>"
