"""What was looked at in a script, and what its run is judged by. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from evenstep.checks import counted


@dataclass(frozen=True)
class Looked:
    """What was looked at.

    Attributes:
        is_distributed: Several ranks run the script, by calls that the rules know.
        communicates: It names something that communicates between ranks, known to the rules or not.
        num_loaders, num_wrapped: Calls that make loaders, and that wrap models.
        unknown: (text, line) of what wasn't understood, about which rules are silent.
    """

    is_distributed: bool = True
    communicates: bool = True
    num_loaders: int = 0
    num_wrapped: int = 0
    unknown: Sequence[tuple[str, int]] = ()

    def __str__(self) -> str:
        unknown = ", ".join(f"`{text}` (line {line})" for text, line in self.unknown)
        counts = f"{counted(self.num_loaders, 'loader')}, {counted(self.num_wrapped, 'wrapped model')}"
        return counts + (f"; not understood: {unknown}" if unknown else "")


@dataclass(frozen=True)
class Facts:
    """What reading knows of a script that its run is judged by.

    Attributes:
        guarded: (absolute path, line) of calls around which a condition looks like a rank's; None: not known.
        uses_gpus: Tensors may lie on a GPU.
        syncs_norms: Batch normalisation is made to take its statistics of all ranks.
    """

    guarded: Collection[tuple[str, int]] | None = None
    uses_gpus: bool = False
    syncs_norms: bool = False
