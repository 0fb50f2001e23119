"""The folders of a storage: which of them are checkpoints, and the renames by which these come and go.

step-0000090                  a checkpoint, whole
.saving-step-0000090-...      being written: removed when the next job begins
.replaced-step-0000090        the former one of that step, while a new one takes its place: put back, or removed
.removing-step-0000060        no checkpoint any more
damaged-step-0000090          set aside by a resume that fell back to an earlier one; kept for a person to look at
"""

from __future__ import annotations

import contextlib
import re

from evenstep.checkpoint.storage import Storage

_STEP = re.compile(r"step-(\d{7,})")
_ASIDE = re.compile(r"damaged-step-(\d{7,})(-\d+)?")


def folder_of(step: int) -> str:
    """The folder of a step's checkpoint."""
    return f"step-{step:07d}"


def steps_in(storage: Storage) -> list[int]:
    """The steps that have a checkpoint, in ascending order; whether they are good is another question."""
    found = (_STEP.fullmatch(name) for name in storage.list())
    return sorted(int(match[1]) for match in found if match is not None)


def set_aside_in(storage: Storage) -> list[str]:
    """The folders that `set_aside` has made."""
    return [name for name in storage.list() if _ASIDE.fullmatch(name)]


def saving_folder(step: int, key: str) -> str:
    """Where a save is written until it is whole.

    Args:
        step: Of the save.
        key: Tells it from every other attempt.
    """
    return f".saving-{folder_of(step)}-{key}"


def put_in_place(storage: Storage, temporary: str, step: int) -> None:
    """Turn a written folder into the checkpoint of its step; one that was there before goes."""
    final = folder_of(step)
    former = f".replaced-{final}"
    if final in storage.list():
        storage.remove(former)
        storage.rename(final, former)
    storage.rename(temporary, final)
    with contextlib.suppress(OSError):  # what stays of it is swept when the next job begins
        storage.remove(former)


def remove_step(storage: Storage, step: int) -> None:
    """Remove a checkpoint, so that at no moment a part of it looks like one."""
    going = f".removing-{folder_of(step)}"
    storage.remove(going)
    storage.rename(folder_of(step), going)
    storage.remove(going)


def set_aside(storage: Storage, step: int) -> str | None:
    """Rename a damaged checkpoint; its new name, or None if that is not possible."""
    names = (f"damaged-{folder_of(step)}" + (f"-{number}" if number else "") for number in range(1000))
    with contextlib.suppress(OSError):
        taken = storage.list()
        name = next(name for name in names if name not in taken)
        storage.rename(folder_of(step), name)
        return name
    return None


def sweep(storage: Storage) -> None:
    """Clear up what a job left that was killed; only for who holds the lock."""
    names = storage.list()
    for name in names:
        if name.startswith(".replaced-"):
            final = name.removeprefix(".replaced-")
            if final not in names:
                storage.rename(name, final)
                continue
        if name.startswith((".saving-", ".removing-", ".replaced-")):
            storage.remove(name)
