"""Whether the ranks' data sets hold the same samples under the same numbers.

If a data set lists its files in the file system's order, its samples may have other numbers on another rank: some
samples never come, without a message. If the data set has the file names, these are compared when the loader is made.
Else each rank reads a few fixed samples with its first batch, twice.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from evenstep.errors import EvenstepError
from evenstep.ground.health.users_code import warn
from evenstep.transport.base import Work
from evenstep.transport.core.transport import Transport

_MOST_NAMES = 1 << 20  # the most file names to compare; of more names, some at even distances


def digest_of_names(dataset: Any) -> str:
    """A digest of the names of a data set's files below their common folder; "": it has no names. Pure.

    The names are in an attribute with one entry for each sample: a path, or a tuple that begins with a path, as in
    torchvision's data sets.
    """
    held = getattr(dataset, "__dict__", {})
    for name in sorted(held):
        names = _names_in(held[name], len(dataset))
        if names:
            common = os.path.commonprefix([min(names), max(names)])  # noqa: RUF071 - cut at the last folder here
            folder = len(common.rpartition("/")[0])
            return hashlib.blake2b("\0".join(each[folder:] for each in names).encode(), digest_size=8).hexdigest()
    return ""


def _names_in(held: Any, size: int) -> list[str]:
    if not isinstance(held, list | tuple) or len(held) != size or not size:
        return []
    first = [each[0] if isinstance(each, tuple) and each else each for each in held[:: -(-size // _MOST_NAMES)]]
    is_named = all(isinstance(each, str | os.PathLike) for each in first)
    names = [os.fsdecode(each).replace(os.sep, "/") for each in first] if is_named else []
    return names if any("/" in each for each in names) else []


class SameData:
    """Compares once whether all ranks read the same content for the same sample numbers.

    The comparison never waits, since a rank may iterate alone.
    """

    def __init__(self) -> None:
        self._has_begun = False
        self._found: Tensor | None = None  # [world_size, 2], int64: the digests of the two reads
        self._work: Work | None = None

    def begins(self, world_size: int) -> bool:
        """Whether to read samples for the comparison now: True once, if there are several ranks."""
        begins, self._has_begun = world_size > 1 and not self._has_begun, True
        return begins

    def start(self, digests: Iterable[int], transport: Transport) -> None:
        """Send this rank's digests. Collective."""
        self._found = torch.empty(transport.world_size, 2, dtype=torch.int64, device="cpu")
        own = torch.tensor(list(digests), dtype=torch.int64, device="cpu")
        self._work = transport.all_gather(self._found.view(-1), own)

    def poll(self) -> None:
        """Warn of ranks that differ, as soon as all digests have arrived.

        If some don't arrive in time, there is no verdict.
        """
        if self._work is None or self._found is None or not self._work.is_completed():
            return
        work, self._work = self._work, None
        try:
            work.wait()
        except (EvenstepError, RuntimeError):
            return
        digests = self._found.tolist()
        sure = {rank: first for rank, (first, second) in enumerate(digests) if first == second}
        one = min(sure, default=0)
        other = next((rank for rank, digest in sure.items() if digest != sure[one]), None)
        if other is not None:
            warn(
                f"DataLoader: the data set isn't the same on rank {one} and rank {other}: they read other samples "
                f"under the same numbers (digests {sure[one]:x} and {sure[other]:x}), so some samples come twice and "
                f"others never. Sort lists of files. If only augmentation differs by rank, ignore this warning.",
            )
