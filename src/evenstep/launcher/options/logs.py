"""The destination of each rank's output. Rank 0 inherits the terminal, so that progress bars work."""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, Std, to_map

from evenstep.errors import ConfigurationError
from evenstep.ground.host.temporary import temporary_root

_TERMINAL = ""  # torchelastic's word for "inherited"
PREFIX = "[rank ${rank}] "


@dataclass(frozen=True)
class OutputChoices:
    """The command line's choices about output, in torchelastic's terms, by local rank.

    Attributes:
        redirects: Streams of rank 0 that go to a file instead of the terminal.
        tee: Streams of other ranks that are also shown on the terminal.
        shown: The only ranks to show on the terminal; None: no choice was made.
    """

    redirects: Std | dict[int, Std] = Std.NONE
    tee: Std | dict[int, Std] = Std.NONE
    shown: frozenset[int] | None = None

    @classmethod
    def parse(cls, *, redirects: str, tee: str, local_ranks_filter: str) -> OutputChoices:
        """Parse the flags' texts.

        Raises:
            ConfigurationError: A text is invalid.
        """

        def streams(flag: str, text: str) -> Std | dict[int, Std]:
            try:
                return Std.from_str(text)
            except ValueError:
                raise ConfigurationError(
                    f"{flag} {text}: use 1 (stdout), 2 (stderr) or 3 (both), for all ranks, or 0:3,1:1 for some."
                ) from None

        try:
            shown = frozenset(int(part) for part in local_ranks_filter.split(",")) if local_ranks_filter else None
        except ValueError:
            raise ConfigurationError(f"--local-ranks-filter {local_ranks_filter}: use ranks, as in 0,2.") from None
        return cls(redirects=streams("--redirects", redirects), tee=streams("--tee", tee), shown=shown)

    def validate_ranks(self, num_ranks: int) -> None:
        """Check that every named rank exists: a wrong number would silently show nothing.

        Args:
            num_ranks: Number of ranks on this host.

        Raises:
            ConfigurationError: A rank doesn't exist.
        """
        there_are = {1: "is 0", 2: "are 0 and 1"}.get(num_ranks, f"are 0 to {num_ranks - 1}")
        chosen: Mapping[str, dict[int, str]] = {
            "--local-ranks-filter": {rank: str(rank) for rank in sorted(self.shown or ())},
            "--tee": {rank: f"{rank}:{std.value}" for rank, std in _by_rank(self.tee).items()},
            "--redirects": {rank: f"{rank}:{std.value}" for rank, std in _by_rank(self.redirects).items()},
        }
        for flag, by_rank in chosen.items():
            missing = [text for rank, text in by_rank.items() if not 0 <= rank < num_ranks]
            if missing:
                raise ConfigurationError(f"{flag} {','.join(missing)}: no such rank on this host; there {there_are}.")


_TEMPORARY_LOGS = "evenstep-logs-"


def name_of_run(log_directory: Path) -> str:
    """The name of the run to which a directory of `make_log_directory` belongs."""
    return log_directory.name.removeprefix(_TEMPORARY_LOGS)


def make_log_directory(log_dir: str | None) -> Path:
    """Make the directory of one run's logs: in `log_dir` under a unique name, or, for None, a temporary one.

    Raises:
        ConfigurationError: The directory can't be made or written to.
    """
    try:
        if log_dir is None:
            return Path(tempfile.mkdtemp(prefix=f"{_TEMPORARY_LOGS}{os.getpid()}-", dir=temporary_root()))
        # In several pods all launchers have pid 1, and may have the same host name.
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{platform.node()}-{os.getpid()}"
        for number in itertools.count(1):
            directory = Path(log_dir).absolute() / (f"{name}-{number}" if number > 1 else name)
            with contextlib.suppress(FileExistsError):
                directory.mkdir(parents=True)
                break
    except OSError as error:
        where = "no directory for the logs of the ranks" if log_dir is None else f"--log-dir {log_dir}"
        raise ConfigurationError(
            f"{where}: {error.strerror}. Pass a directory that can be made and written to with --log-dir."
        ) from None
    return directory


@dataclass(frozen=True)
class Destination:
    """Files for one rank's streams ("": the terminal), and which of them are also shown on the terminal."""

    stdout: str
    stderr: str
    tee: Std


def plan_destination(
    choices: OutputChoices, *, local_rank: int, rank: int, directory: Path, attempt: int = 0
) -> Destination:
    """The destination of one rank's output. Pure.

    Both streams go to one file, in the order of writing, unless only one of them is shown on the terminal.
    """
    is_shown = choices.shown is None or local_rank in choices.shown
    if rank == 0:
        to_file = Std.ALL if not is_shown else to_map(choices.redirects, local_rank + 1)[local_rank]
        tee = Std.NONE
    else:
        to_file = Std.ALL
        tee = to_map(choices.tee, local_rank + 1)[local_rank]
        if choices.shown is not None:
            tee = Std.ALL if is_shown else Std.NONE
    stem = str(directory / (f"rank-{rank}" + (f".attempt-{attempt}" if attempt else "")))
    if to_file == Std.ALL and tee in (Std.NONE, Std.ALL):
        return Destination(f"{stem}.log", f"{stem}.log", tee)
    return Destination(
        f"{stem}.stdout.log" if to_file & Std.OUT else _TERMINAL,
        f"{stem}.stderr.log" if to_file & Std.ERR else _TERMINAL,
        tee,
    )


class RankLogs(LogsSpecs):
    """torchelastic's interface for the destination of output, implemented by `plan_destination`.

    Args:
        choices: The command line's choices.
        log_directory: This run's directory.
    """

    def __init__(self, choices: OutputChoices, log_directory: Path) -> None:
        super().__init__(log_dir=str(log_directory))
        self._choices = choices
        self._directory = log_directory
        self._last = -1
        self.destinations: dict[int, Destination] = {}  # destinations in the last attempt, by rank

    @property
    def root_log_dir(self) -> str:
        """See base class."""
        return str(self._directory)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """See base class."""
        self._directory.mkdir(parents=True, exist_ok=True)
        dest = LogsDest(
            filtered_stdout=str(self._directory / "filtered_stdout.log"),
            filtered_stderr=str(self._directory / "filtered_stderr.log"),
        )
        count = max((int(variables["TORCHELASTIC_RESTART_COUNT"]) for variables in envs.values()), default=0)
        # An attempt that continues with more hosts keeps its number, and must not overwrite its earlier output.
        self._last = max(count, self._last + 1)
        for local_rank, variables in envs.items():
            rank = int(variables["RANK"])
            plan = plan_destination(
                self._choices, local_rank=local_rank, rank=rank, directory=self._directory, attempt=self._last
            )
            self.destinations[rank] = plan
            dest.stdouts[local_rank], dest.stderrs[local_rank] = plan.stdout, plan.stderr
            if plan.tee & Std.OUT:
                dest.tee_stdouts[local_rank] = plan.stdout
            if plan.tee & Std.ERR and plan.stderr != plan.stdout:
                dest.tee_stderrs[local_rank] = plan.stderr
            # Ranks report errors on their heartbeat pages. torchelastic would mistake an unwritable error file for an
            # error of the rank.
            dest.error_files[local_rank] = variables["TORCHELASTIC_ERROR_FILE"] = os.devnull
        return dest


def tail(path: str, *, num_lines: int = 20) -> str:
    """The last lines of a log; "" if there are none."""
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 64 * 1024))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-num_lines:])


def _by_rank(choice: Std | dict[int, Std]) -> dict[int, Std]:
    return choice if isinstance(choice, dict) else {}
