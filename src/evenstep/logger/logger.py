"""`Logger`: numbers of a run, written by rank 0 to files that outlive it."""

from __future__ import annotations

import math
import os
import time
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from evenstep.checks import whole
from evenstep.errors import ConfigurationError, MismatchError, UsageError
from evenstep.health.telemetry import StepTimes
from evenstep.logger.files import Csv, JsonLines, TensorBoard, Writer, why_no_tensorboard
from evenstep.world import World, current

FORMATS: dict[str, Callable[[Path], Writer]] = {
    "jsonl": lambda directory: JsonLines(directory / "metrics.jsonl"),
    "csv": lambda directory: Csv(directory / "metrics.csv"),
    "tensorboard": lambda directory: TensorBoard(directory / "tensorboard"),
}
_CHECKSUM_BITS = 20  # of names: sums of its square are exact in float64


class Logger:
    """Write numbers of a run to files: JSON lines, CSV, TensorBoard. Rank 0 writes; all ranks may call.

        logger = evenstep.Logger("runs/digits", formats=("jsonl", "csv"))
        logger.log({"loss": loss.item()}, step=step)                          # rank 0's value
        logger.log({"loss": loss, "accuracy": accuracy}, step=step, mean=True, weight=len(x))   # of all ranks

    Every line is with the operating system when `log` returns, so a killed process loses none. A run that resumes goes
    on in the same files: what the run before had written for steps that are made again is taken out.

    Collective: every rank makes it, with the same arguments.

    Args:
        directory: Where the files lie: `metrics.jsonl`, `metrics.csv`, `tensorboard/`.
        formats: Any of "jsonl", "csv", "tensorboard". The last needs `pip install "evenstep[tensorboard]"`.
        telemetry: Add to every line what the newest finished step of rank 0 spent its time on, as `time/forward_s` and
            so on (see `world.telemetry`).
        every: Write only steps that this divides; others return at once, on all ranks.
        world: Who logs; None: the current world.

    Raises:
        ConfigurationError: No such format, TensorBoard isn't installed, or the directory can't be written. Raised on
        all
            ranks.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        formats: Sequence[str] = ("jsonl",),
        telemetry: bool = False,
        every: int = 1,
        world: World | None = None,
    ) -> None:
        self.world = world if world is not None else current()
        self.directory = Path(directory)
        self.every = every
        self.telemetry = telemetry
        self._last_step: int | None = None
        self._writers: list[Writer] = []
        # Rank 0 alone can't make its files: the others hear of it here, and not when they miss it in a collective.
        problems = self.world.exchange(self._prepare(formats))
        for rank, problem in enumerate(problems):
            if problem is not None:
                raise ConfigurationError(f"Logger on rank {rank}: {problem}")
        self.world.at_end(lambda error: self.close())

    def _prepare(self, formats: Sequence[str]) -> str | None:
        """Make the writers, on rank 0; what is wrong, or None."""
        if not isinstance(formats, tuple | list) or not formats or any(each not in list(FORMATS) for each in formats):
            return f"formats={formats!r}; any of {', '.join(map(repr, FORMATS))}, as a tuple."
        try:
            self.every = whole("every", self.every, least=1)
        except ConfigurationError as error:
            return str(error)
        if not self.world.is_main:
            return None
        if "tensorboard" in formats and (missing := why_no_tensorboard()) is not None:
            return f'TensorBoard can\'t be used ({missing}). Install it: pip install "evenstep[tensorboard]".'
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if not os.access(self.directory, os.W_OK):
                return f"{self.directory} can't be written."
        except OSError as error:
            return f"{self.directory}: {error.strerror}."
        self._writers = [FORMATS[each](self.directory) for each in dict.fromkeys(formats)]
        return None

    def log(
        self,
        values: Mapping[str, float | Tensor],
        *,
        step: int,
        mean: bool = False,
        weight: float | Tensor = 1.0,
    ) -> None:
        """Write numbers of a step.

        With `mean` collective: every rank calls this, with the same names. Without it ranks other than 0 need not, and
        what they give isn't looked at.

        Args:
            values: By name; numbers, or tensors of one element (one on a GPU is waited for).
            step: Of the run, counted over restarts; not less than in the call before.
            mean: Write the mean over all ranks (`world.mean`), instead of rank 0's values.
            weight: With `mean`: what this rank's values count, such as its number of samples. A rank with 0 has no say.

        Raises:
            ConfigurationError: A name is no text, a value no number, or the step no whole number from 0 on.
            UsageError: The step is less than that of the call before.
            MismatchError: With `mean`: the ranks give other names. Raised on all ranks.
        """
        step = whole(f"Logger.log on rank {self.world.rank}: step", step, least=0)
        if step % self.every:
            return
        if not mean and not self.world.is_main:
            return
        if self._last_step is not None and step < self._last_step:
            raise UsageError(
                f"Logger.log on rank {self.world.rank}: step {step} after step {self._last_step}. Count steps over the "
                f"whole run, restarts included."
            )
        self._last_step = step
        if mean:
            numbers = self._mean(values, weight)
        else:
            numbers = {name: self._number(name, value) for name, value in self._items(values)}
        if not self.world.is_main:
            return
        if self.telemetry:
            numbers = {**numbers, **self._times()}
        now = time.time()
        for writer in list(self._writers):
            try:
                writer.write(step, now, numbers)
            except OSError as error:
                # Numbers about a training are worth less than the training.
                self._writers.remove(writer)
                warnings.warn(
                    f"evenstep.Logger: {error.strerror or error}; {type(writer).__name__} in {self.directory} writes "
                    f"nothing from step {step} on, training goes on.",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def close(self) -> None:
        """Let go of the files. Local; twice is once. Called when the `with` block of the world ends."""
        while self._writers:
            self._writers.pop().close()

    def __enter__(self) -> Logger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        names = ", ".join(type(writer).__name__ for writer in self._writers)
        return f"<Logger {self.directory}: {names or 'writes nothing here'}, step {self._last_step}>"

    # ------------------------------------------------------------------ values

    def _items(self, values: Mapping[str, float | Tensor]) -> list[tuple[str, float | Tensor]]:
        if not isinstance(values, Mapping):
            kind = type(values).__name__
            raise ConfigurationError(
                f"Logger.log on rank {self.world.rank}: a {kind}; it takes a dictionary of numbers by name."
            )
        for name in values:
            if not isinstance(name, str) or not name or name in ("step", "time"):
                raise ConfigurationError(
                    f"Logger.log on rank {self.world.rank}: the name {name!r}; names are texts, and `step` and `time` "
                    f"are taken."
                )
        return list(values.items())

    def _number(self, name: str, value: Any) -> float:
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
            return float(value.detach())
        try:
            if isinstance(value, str | bytes | Tensor):
                raise TypeError
            return float(value)
        except (TypeError, ValueError):
            kind = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ConfigurationError(
                f"Logger.log on rank {self.world.rank}: {name!r} is {kind}; it takes numbers, and tensors of one "
                f"element."
            ) from None

    def _mean(self, values: Mapping[str, float | Tensor], weight: float | Tensor) -> dict[str, float]:
        """The means over ranks, in one exchange, with a check that all have named the same.

        What is wrong on one rank is told there, but only after the exchange: the others wait in it.
        """
        problem: ConfigurationError | None = None
        numbers: dict[str, float] = {}
        try:
            numbers = {name: self._number(name, value) for name, value in self._items(values)}
        except ConfigurationError as error:
            problem = error
        names = "\n".join(numbers)
        checksum = float(zlib.crc32(names.encode()) >> (32 - _CHECKSUM_BITS))
        # Who has no say in the means still has one in whether names are equal and values numbers.
        check = self.world.mean(
            torch.tensor([checksum, checksum**2, float(problem is not None)], dtype=torch.float64, device="cpu")
        ).tolist()
        if check[2] > 0:
            told = self.world.exchange(None if problem is None else str(problem))
            first = next(each for each in told if each is not None)
            raise ConfigurationError(first) from problem
        if abs(check[1] - check[0] ** 2) > 0.01:
            lists = self.world.exchange(list(numbers))
            rank = next((rank for rank, each in enumerate(lists) if each != lists[0]), 0)
            raise MismatchError(
                f"Logger.log(mean=True): rank 0 names {', '.join(lists[0])}; rank {rank} names "
                f"{', '.join(lists[rank])}. All ranks give the same names, in the same order."
            )
        if not numbers:
            return {}
        means = self.world.mean(torch.tensor(list(numbers.values()), dtype=torch.float64, device="cpu"), weight)
        return dict(zip(numbers, means.tolist(), strict=True))

    def _times(self) -> dict[str, float]:
        newest = self.world.telemetry.newest()
        return {} if newest is None else times_of(newest)


def times_of(step: StepTimes) -> dict[str, float]:
    """What a step spent its time on, by name, for a line of a log. Pure."""
    told = {
        "forward_s": step.forward_s,
        "backward_s": step.backward_s,
        "wait_s": step.wait_s,
        "finish_s": step.finish_s,
        "optimizer_s": step.optimizer_s,
    }
    if step.ready_s:
        told["ready_s"] = max(step.ready_s)
    return {f"time/{name}": value for name, value in told.items() if math.isfinite(value)}
