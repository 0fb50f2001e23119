"""What ranks leave in the run's directory for those who go on after a rank is lost: see `checkpoint.save.survivors`.

memory/KEY/step-0000090     a checkpoint in the page cache, written by a survivor; KEY: of a `Checkpointer`
streams-ATTEMPT-RANK-KEY    a rank's random streams of its last steps
lost-ATTEMPT-peers          which peers on other nodes are lost, written by the launcher for ranks that wait for them
saved-KEY                   when the last whole save to the disk began: the next one is due some minutes after it
brought                     the last step that another node has sent to this one's memory
losses                      what the run has lost so far, written by the launcher
virtual-ranks               how many there are in reproducible mode
"""

from __future__ import annotations

import contextlib
import json
import re
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

_STEP = re.compile(r"step-(\d{7,})")
_MEMORY, _VIRTUAL_RANKS, _LOSSES, _BROUGHT = "memory", "virtual-ranks", "losses", "brought"


@dataclass(frozen=True)
class Losses:
    """What a run of `evenstep run --recover` has lost so far, and what that has cost.

    Attributes:
        num_ranks: How many ranks were lost.
        num_repeated: Steps that were made again, at most; without those since a checkpoint on disk.
        num_from_disk: How often the ranks went on from a checkpoint on disk.
        lost_s: Seconds from each loss to the next step, of those that have come to one.
    """

    num_ranks: int
    num_repeated: int
    num_from_disk: int
    lost_s: float


def key_of(where: str) -> str:
    """What tells the files of one `Checkpointer` from those of another, by its directory."""
    return f"{zlib.crc32(where.encode()):08x}"


def memory_directory(run_directory: Path, key: str) -> Path:
    """Where the survivors of a loss write the checkpoint of one `Checkpointer`."""
    return run_directory / _MEMORY / key


def newest_in_memory(run_directory: Path) -> int | None:
    """The newest step that survivors have saved whole; None: none."""
    steps = [
        int(found[1])
        for path in run_directory.glob(f"{_MEMORY}/*/step-*")
        if (found := _STEP.fullmatch(path.name)) is not None
    ]
    return max(steps, default=None)


def is_newer(step: int | None, before: int | None) -> bool:
    """Whether survivors have saved since `newest_in_memory` told `before`; a damaged step may have gone meanwhile."""
    return step is not None and (before is None or step > before)


def streams_file(run_directory: Path, rank: int, attempt: int, key: str) -> Path:
    """Where a rank keeps its random streams, for others to read after its death."""
    return run_directory / f"streams-{attempt}-{rank}-{key}"


def saved_file(run_directory: Path, key: str) -> Path:
    """Where the time of a `Checkpointer`'s last save to the disk stands, on the monotonic clock of this host."""
    return run_directory / f"saved-{key}"


def read_time(path: Path) -> float | None:
    """The time that stands in a file; None: there is none."""
    with contextlib.suppress(OSError, ValueError):
        return float(path.read_text())
    return None


def note_unsaved(run_directory: Path, rank: int, attempt: int, why: str) -> None:
    """Say why this survivor has saved nothing."""
    (run_directory / f"unsaved-{attempt}-{rank}").write_text(why)


def why_unsaved(run_directory: Path, rank: int, attempt: int) -> str | None:
    """Why a survivor has saved nothing; None: it has, or there was nothing to save."""
    return _text(run_directory / f"unsaved-{attempt}-{rank}")


def note_brought(run_directory: Path, step: int) -> None:
    """Say that another node has sent this step: no survivor on this one has saved it."""
    (run_directory / _BROUGHT).write_text(str(step))


def brought_step(run_directory: Path) -> int | None:
    """The last step that another node has sent; None: none."""
    return _number(run_directory / _BROUGHT)


def note_lost_peers(run_directory: Path, attempt: int, which: str) -> None:
    """Write which peers on other nodes are lost, so that ranks stop waiting: a cut connection may raise no error."""
    _put(_lost_file(run_directory, attempt), which)


def lost_peers(run_directory: Path, attempt: int) -> str | None:
    """Which peers on other nodes are lost, as far as the launcher has said; None: none."""
    return _text(_lost_file(run_directory, attempt))


def _lost_file(run_directory: Path, attempt: int) -> Path:
    return run_directory / f"lost-{attempt}-peers"


def note_virtual_ranks(run_directory: Path, count: int) -> None:
    """Say how many virtual ranks the run has, which the number of ranks has to divide."""
    (run_directory / _VIRTUAL_RANKS).write_text(str(count))


def virtual_ranks_of(run_directory: Path) -> int | None:
    """How many virtual ranks the run has; None: it isn't reproducible, or not that far."""
    return _number(run_directory / _VIRTUAL_RANKS)


def note_losses(run_directory: Path, losses: Losses) -> None:
    """Say what the run has lost so far; ranks may read it meanwhile."""
    _put(run_directory / _LOSSES, json.dumps(asdict(losses)))


def losses_of(run_directory: Path) -> Losses | None:
    """What the run has lost so far; None: nothing."""
    text = _text(run_directory / _LOSSES)
    return None if text is None else Losses(**json.loads(text))


def _put(file: Path, text: str) -> None:
    """Write a file that others may read meanwhile: they find it whole, or as it was."""
    written = file.with_name(f".{file.name}")
    with contextlib.suppress(OSError):  # a full disk is no reason not to go on
        written.write_text(text)
        written.rename(file)


def _text(file: Path) -> str | None:
    with contextlib.suppress(OSError):
        return file.read_text()
    return None


def _number(file: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(file.read_text())
    return None
