"""`Logger`: rank 0 writes a run's numbers to a file that later runs append to.

A line is written in one write, so at most the last line can be incomplete, after a full disk or a power cut. The next
logger that opens the file removes such a line; nothing else is ever removed or moved. A run that repeats steps after
its last checkpoint appends their lines: if a step has two lines, the later line counts.
"""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from evenstep import checks
from evenstep import world as worlds
from evenstep.errors import ConfigurationError, UsageError
from evenstep.ground.coordination.agreement import validate_on_all_ranks
from evenstep.ground.environment import current_placement
from evenstep.ground.health import excepthook
from evenstep.ground.health.telemetry import StepTimes
from evenstep.ground.health.users_code import warn
from evenstep.world import World

Tracker = Callable[[dict[str, float], int], object]
_NAMES = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}  # numbers that JSON lacks
_TAKEN = ("step", "attempt", "time")


class Logger:
    """Writes a run's numbers to a file of JSON lines, and to a tracker. Rank 0 writes; all ranks may call.

        logger = evenstep.Logger("runs/digits")
        logger.log({"loss": loss.item()}, step=step)                          # rank 0's value
        logger.log({"loss": loss, "accuracy": accuracy}, step=step, mean=True, weight=len(x))   # of all ranks

    A line: {"step": 7, "attempt": 0, "time": 1790000000.1, "loss": 0.5}. The attempt is the launcher's count of
    restarts. `log` returns when the operating system has the line, so a killed process loses no line. A resumed run
    appends to the same file; if a step has two lines, the later line counts.

    Collective: every rank makes it, with the same arguments except `to`.

    Args:
        directory: The directory of `metrics.jsonl`. Several loggers of one run may share it.
        to: Called on rank 0 with the logged values by name, and the step: for example `run.log` of wandb or trackio.
            Other ranks may pass None. If it raises, the logger warns and doesn't call it again.
        telemetry: Add the times of rank 0's newest finished step to every line, as `time/forward_s` and so on (see
            `world.telemetry`).
        every: Write only steps that are a multiple of this; other calls return at once, on all ranks.
        world: The ranks that log; None: the current world.

    Raises:
        ConfigurationError: `to` isn't a function, or the directory can't be written. Raised on all ranks.
        MismatchError: `every` differs between ranks.
    """

    @excepthook.for_users
    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        to: Tracker | None = None,
        telemetry: bool = False,
        every: int = 1,
        world: World | None = None,
    ) -> None:
        self.world = worlds.chosen(world, "Logger")
        self.directory = Path(directory)
        self.every = every
        self.telemetry = telemetry
        self._attempt = current_placement().restart_count
        self._last_step: int | None = None
        self._file: int | None = None
        self._writers: dict[str, Tracker] = {}  # by the name of the destination
        # If rank 0 can't make its file, or ranks would skip different steps, all raise here; else they would wait for
        # each other.
        validate_on_all_ranks(self.world, "Logger", lambda: self._prepare(to))
        self.world.at_end(self._world_ended)

    def _prepare(self, to: Tracker | None) -> dict[str, Any]:
        """Check the arguments; rank 0 makes the directory. Returns the arguments that must be equal on all ranks.

        Raises:
            ConfigurationError: An argument is wrong, or the directory can't be written.
        """
        self.every = checks.whole("every", self.every, least=1)
        if to is not None:
            checks.function("to", to, otherwise="None")
        if self.world.is_main:
            path = self._path
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigurationError(f"{self.directory}: {error.strerror}.") from None
            if not os.access(path if path.exists() else self.directory, os.W_OK):
                raise ConfigurationError(f"{path} can't be written.")
            self._writers = {str(path): self._write} | ({} if to is None else {f"to={to!r}": to})
        return {"every": self.every}

    def log(
        self,
        values: Mapping[str, float | Tensor],
        *,
        step: int,
        mean: bool = False,
        weight: float | Tensor = 1.0,
    ) -> None:
        """Write numbers of a step.

        With `mean` this is collective: every rank calls it, with the same names. Without `mean` only rank 0 needs to
        call it; other ranks' values are ignored.

        Args:
            values: Numbers by name, or tensors of one element (on a GPU this waits for the device).
            step: The step of the run, counted over restarts; not less than in the last call.
            mean: Write the mean over all ranks (`world.mean`), instead of rank 0's values.
            weight: With `mean`: the weight of this rank's values, such as its number of samples; 0: they don't count.

        Raises:
            ConfigurationError: A name isn't a text, a value or the weight isn't a number, or the step isn't a whole
                number of at least 0. With `mean` this and the next two are raised on all ranks.
            UsageError: The step is less than in the last call.
            MismatchError: With `mean`: the ranks pass different names or steps.
        """
        what = "Logger.log(mean=True)" if mean else f"Logger.log on rank {self.world.rank}"
        numbers: dict[str, float] = {}

        def validate() -> dict[str, Any]:
            nonlocal step, weight
            step = checks.whole(f"{what}: step", step, least=0)
            if self._last_step is not None and step < self._last_step:
                raise UsageError(
                    f"{what}: step {step} after step {self._last_step}. Count steps over the whole run, restarts "
                    f"included."
                )
            numbers.update((name, _number(what, name, value)) for name, value in _items(what, values))
            weight = checks.number(f"{what}: weight", weight, least=0)
            return {"the step": step, "the list of names": list(numbers)}

        # All ranks must skip the same steps. A step that isn't a number isn't skipped here, because the other ranks may
        # wait for this rank.
        if (_is_whole(step) and step % self.every) or not (mean or self.world.is_main):
            return
        if mean:
            validate_on_all_ranks(
                self.world, what, validate, advice="Log the same names at the same steps on all ranks."
            )
            if numbers:
                mine = torch.tensor(list(numbers.values()), dtype=torch.float64, device="cpu")
                numbers = dict(zip(numbers, self.world.mean(mine, weight).tolist(), strict=True))
        else:
            validate()
        self._last_step = step
        if not self.world.is_main:
            return
        if self.telemetry:
            numbers = {**numbers, **self._times()}
        for name, write in list(self._writers.items()):
            try:
                write(dict(numbers), step)
            except Exception as error:
                # Training is worth more than its log, so a failing tracker doesn't end the run.
                del self._writers[name]
                text = f"{error.strerror}" if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
                warn(
                    f"evenstep.Logger: {text}. {name} gets nothing from step {step} on; training continues.",
                    RuntimeWarning,
                )

    def close(self) -> None:
        """Close the file. Local; may be called twice. Called when the `with` block of the world ends."""
        self.world.cancel_at_end(self._world_ended)
        self._writers.clear()
        file, self._file = self._file, None
        if file is not None:
            try:
                os.fsync(file)
            finally:
                os.close(file)

    def _world_ended(self, error: BaseException | None) -> None:
        self.close()

    def __enter__(self) -> Logger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        names = ", ".join(self._writers)
        return f"<Logger {self.directory}: {names or 'writes nothing here'}, step {self._last_step}>"

    # ------------------------------------------------------------------ the file

    @property
    def _path(self) -> Path:
        return self.directory / "metrics.jsonl"

    def _write(self, numbers: dict[str, float], step: int) -> None:
        if self._file is None:
            self._file = open_whole(self._path)
        head = {"step": step, "attempt": self._attempt, "time": round(time.time(), 3)}
        line = head | {name: _jsonable(value) for name, value in numbers.items()}
        write_whole(self._file, json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")

    def _times(self) -> dict[str, float]:
        newest = self.world.telemetry.newest()
        return {} if newest is None else times_of(newest)


def _is_whole(step: Any) -> bool:
    try:
        checks.whole("step", step, least=0)
    except ConfigurationError:
        return False
    return True


def _items(what: str, values: Mapping[str, float | Tensor]) -> list[tuple[str, float | Tensor]]:
    if not isinstance(values, Mapping):
        raise ConfigurationError(f"{what}: a {type(values).__name__}; it takes a dictionary of numbers by name.")
    for name in values:
        if not isinstance(name, str) or not name or name in _TAKEN:
            raise ConfigurationError(
                f"{what}: the name {name!r}; names are texts, and `step`, `attempt` and `time` are reserved."
            )
    return list(values.items())


def _number(what: str, name: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value.detach())
    try:
        if isinstance(value, str | bytes | Tensor):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        kind = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ConfigurationError(f"{what}: {name!r} is {kind}; it takes numbers, and tensors of one element.") from None


def open_whole(path: Path) -> int:
    """Open a file for appending, or make it; removes an incomplete last line.

    Raises:
        OSError: The file can't be opened.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        end = os.fstat(file).st_size
        while end and not (block := os.pread(file, min(end, 1 << 16), max(0, end - (1 << 16)))).endswith(b"\n"):
            end += block.rfind(b"\n") + 1 - len(block)
            os.ftruncate(file, end)
    except BaseException:
        os.close(file)
        raise
    return file


def write_whole(file: int, text: str) -> None:
    """Append a text in one write.

    Raises:
        OSError: The text wasn't written as a whole; a part that was written is removed.
    """
    data = text.encode()
    before = os.fstat(file).st_size
    try:
        if os.write(file, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        os.ftruncate(file, before)
        raise


def _jsonable(value: float) -> float | str:
    return value if math.isfinite(value) else _NAMES[str(value)]


def times_of(step: StepTimes) -> dict[str, float]:
    """The times of a step by name, for a line of the log. Pure."""
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
