"""`Logger`: numbers of a run, written by rank 0 to files that outlive it."""

from __future__ import annotations

import contextlib
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

from evenstep import world as worlds
from evenstep.checks import whole
from evenstep.errors import ConfigurationError, MismatchError, UsageError
from evenstep.health.recovery_files import Losses
from evenstep.health.telemetry import StepTimes
from evenstep.logger.files import Csv, JsonLines, TensorBoard, Writer, why_no_tensorboard
from evenstep.world import World

FORMATS: dict[str, Callable[[Path], Writer]] = {
    "jsonl": lambda directory: JsonLines(directory / "metrics.jsonl"),
    "csv": lambda directory: Csv(directory / "metrics.csv"),
    "tensorboard": lambda directory: TensorBoard(directory / "tensorboard"),
}
# Of this process, by format and place, with the number of loggers that write there: a second one that opened the file
# itself would take what the first has written for an earlier run's.
_shared: dict[tuple[int, str, str], tuple[Writer, int]] = {}
_CHECKSUM_BITS = 20  # of names: sums of its square are exact in float64


class Logger:
    """Write numbers of a run to files: JSON lines, CSV, TensorBoard. Rank 0 writes; all ranks may call.

        logger = evenstep.Logger("runs/digits", formats=("jsonl", "csv"))
        logger.log({"loss": loss.item()}, step=step)                          # rank 0's value
        logger.log({"loss": loss, "accuracy": accuracy}, step=step, mean=True, weight=len(x))   # of all ranks

    `log` returns when the operating system has the line, so a killed process loses none. A resumed run appends to the
    same files. Lines of its first step and later ones, by an earlier run, move to `metrics.replaced.jsonl` first.

    Collective: every rank makes it, with the same arguments. Several loggers of one run may share a directory.

    Args:
        directory: Where the files lie: `metrics.jsonl`, `metrics.csv`, `tensorboard/`.
        formats: Any of "jsonl", "csv", "tensorboard". The last needs `pip install "evenstep[tensorboard]"`.
        telemetry: Add the times of rank 0's newest finished step to every line, as `time/forward_s` and so on (see
            `world.telemetry`); once the run has lost ranks with `--recover`, what that has cost, as `recovery/lost_s`.
        every: Write only steps that this divides; others return at once, on all ranks.
        world: The ranks that log; None: the current world.

    Raises:
        ConfigurationError: No such format, TensorBoard isn't installed, the directory can't be written, or another
            process logs there. Raised on all ranks.
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
        self.world = worlds.chosen(world, "Logger")
        self.directory = Path(directory)
        self.every = every
        self.telemetry = telemetry
        self._last_step: int | None = None
        self._writers: list[Writer] = []
        # If rank 0 can't make its files, the others raise here, too; else they would wait for it in a collective.
        problems = self.world.exchange(self._prepare(formats))
        for rank, problem in enumerate(problems):
            if problem is not None:
                raise ConfigurationError(f"Logger on rank {rank}: {problem}")
        self.world.at_end(self._world_ended)

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
            for each in dict.fromkeys(formats):
                self._writers.append(_acquire(each, self.directory))
        except (OSError, ConfigurationError) as error:
            self.close()
            return f"{self.directory}: {error.strerror}." if isinstance(error, OSError) else str(error)
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
        their values are ignored.

        Args:
            values: By name; numbers, or tensors of one element (one on a GPU is waited for).
            step: Of the run, counted over restarts; not less than in the call before.
            mean: Write the mean over all ranks (`world.mean`), instead of rank 0's values.
            weight: With `mean`: the weight of this rank's values, such as its number of samples; 0: they don't count.

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
                with contextlib.suppress(OSError):
                    _release(writer)
                warnings.warn(
                    f"evenstep.Logger: {error.strerror or error}; {type(writer).__name__} in {self.directory} writes "
                    f"nothing from step {step} on, training goes on.",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def close(self) -> None:
        """Close the files. Local; may be called twice. Called when the `with` block of the world ends."""
        self.world.cancel_at_end(self._world_ended)
        while self._writers:
            _release(self._writers.pop())

    def _world_ended(self, error: BaseException | None) -> None:
        self.close()

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
        """The means over ranks in one exchange, with a check that all ranks have the same names.

        An error on one rank is raised only after the exchange, in which the others wait.
        """
        problem: ConfigurationError | None = None
        numbers: dict[str, float] = {}
        try:
            numbers = {name: self._number(name, value) for name, value in self._items(values)}
        except ConfigurationError as error:
            problem = error
        names = "\n".join(numbers)
        checksum = float(zlib.crc32(names.encode()) >> (32 - _CHECKSUM_BITS))
        # With equal weights: a rank of weight 0 still takes part in the check of names and values.
        check = self.world.mean(
            torch.tensor([checksum, checksum**2, float(problem is not None)], dtype=torch.float64, device="cpu")
        ).tolist()
        if check[2] > 0:
            problems = self.world.exchange(None if problem is None else str(problem))
            first = next(each for each in problems if each is not None)
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
        newest, losses = self.world.telemetry.newest(), self.world.telemetry.losses()
        times = {} if newest is None else times_of(newest)
        return times if losses is None else times | costs_of(losses)


def _acquire(kind: str, directory: Path) -> Writer:
    """The writer of a format for a directory: the one that another logger of this process has, or a new one."""
    key = os.getpid(), kind, os.path.realpath(directory)
    writer, num_users = _shared.get(key) or (FORMATS[kind](directory), 0)
    _shared[key] = writer, num_users + 1
    return writer


def _release(writer: Writer) -> None:
    """Give a writer back; the last logger that does closes it."""
    for key, (each, num_users) in list(_shared.items()):
        if each is writer and num_users > 1:
            _shared[key] = writer, num_users - 1
        elif each is writer:
            del _shared[key]
            writer.close()


def times_of(step: StepTimes) -> dict[str, float]:
    """The times of a step by name, for a line of a log. Pure."""
    times = {
        "forward_s": step.forward_s,
        "backward_s": step.backward_s,
        "wait_s": step.wait_s,
        "finish_s": step.finish_s,
        "optimizer_s": step.optimizer_s,
    }
    if step.ready_s:
        times["ready_s"] = max(step.ready_s)
    return {f"time/{name}": value for name, value in times.items() if math.isfinite(value)}


def costs_of(losses: Losses) -> dict[str, float]:
    """What a run has lost so far by name, for a line of a log. Pure."""
    costs = {"ranks_lost": losses.num_ranks, "steps_repeated": losses.num_repeated, "lost_s": losses.lost_s}
    return {f"recovery/{name}": float(value) for name, value in costs.items()}
