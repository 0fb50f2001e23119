"""What ranks leave in the run's directory for those who go on after a rank is lost: see `checkpoint.save.survivors`.

memory/KEY/step-0000090     a checkpoint in the page cache, written by a survivor; KEY: of a `Checkpointer`
kept-ATTEMPT-RANK-KEY       which step of it a survivor has saved there; empty: it has one to save, if another is lost
streams-ATTEMPT-RANK-KEY    a rank's random streams of its last steps
lost-ATTEMPT-peers          which peers on other nodes are lost, written by the launcher for ranks that wait for them
saved-KEY                   when the last whole save to the disk began: the next one is due some minutes after it
losses                      what the run has lost so far, written by the launcher
virtual-ranks               how many there are in reproducible mode
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

_STEP = re.compile(r"step-(\d{7,})")
_MEMORY, _VIRTUAL_RANKS, _LOSSES = "memory", "virtual-ranks", "losses"


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
    return max((step for _, _, step in _in_memory(run_directory)), default=None)


def _in_memory(run_directory: Path) -> list[tuple[Path, str, int]]:
    """(where it lies, key, step) of each checkpoint that survivors have saved whole."""
    return [
        (path, path.parent.name, int(found[1]))
        for path in run_directory.glob(f"{_MEMORY}/*/step-*")
        if (found := _STEP.fullmatch(path.name)) is not None
    ]


def note_kept(run_directory: Path, rank: int, attempt: int, key: str, step: int | None) -> None:
    """Say which step of a `Checkpointer` this survivor has saved; None: one is to be saved, if another rank is lost."""
    _put(_kept_file(run_directory, rank, attempt, key), "" if step is None else str(step))


def forget_kept(run_directory: Path, rank: int, attempt: int, key: str) -> None:
    """A `Checkpointer` has ended: nothing more of it is to be saved. What has been, stays."""
    file = _kept_file(run_directory, rank, attempt, key)
    if _number(file) is None:
        file.unlink(missing_ok=True)


def kept_by_survivors(run_directory: Path, attempt: int) -> tuple[dict[str, int] | None, bool]:
    """What one survivor has saved of all its `Checkpointer`s: their steps belong together.

    Returns:
        Steps by key, of the survivor that was ahead; None: none has saved all. And whether anything at all was saved.
    """
    by_rank: dict[str, dict[str, int | None]] = {}
    for file in run_directory.glob(f"kept-{attempt}-*-*"):
        rank, _, key = file.name.removeprefix(f"kept-{attempt}-").partition("-")
        by_rank.setdefault(rank, {})[key] = _number(file)
    whole = [
        {key: step for key, step in steps.items() if step is not None}
        for steps in by_rank.values()
        if None not in steps.values()
    ]
    has_any = any(step is not None for steps in by_rank.values() for step in steps.values())
    return max(whole, key=lambda steps: sum(steps.values()), default=None), has_any


def keep_what_belongs_together(run_directory: Path, attempt: int) -> None:
    """Leave in memory what one survivor has saved. A part of it would be a state that the run never had.

    Whoever died over its second save has left such a part; then the run goes on from the disk.
    """
    steps, has_any = kept_by_survivors(run_directory, attempt)
    if not has_any:
        return  # what an earlier loss has left is still whole
    for path, key, step in _in_memory(run_directory):
        if steps is None or steps.get(key, step) != step:
            shutil.rmtree(path, ignore_errors=True)


def _kept_file(run_directory: Path, rank: int, attempt: int, key: str) -> Path:
    return run_directory / f"kept-{attempt}-{rank}-{key}"


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
