"""What doctor examined in a script, and the facts by which it judges a run. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from evenstep.checks import counted


@dataclass(frozen=True)
class Looked:
    """What doctor examined in a script.

    Attributes:
        is_distributed: Several ranks run the script, judging by calls that the rules know.
        communicates: The script names something that communicates between ranks, known to the rules or not.
        num_loaders, num_wrapped: The number of calls that make loaders, and of calls that wrap models.
        unknown: (text, line) of code that wasn't understood. Rules report nothing about it.
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
    """Facts of a script's source by which its run is judged.

    Attributes:
        guarded: (absolute path, line) of calls inside a condition that may depend on the rank. None: not known.
        uses_gpus: Tensors may lie on a GPU.
        syncs_norms: The script names `SyncBatchNorm` or its conversion: batch norm may use statistics of all ranks.
    """

    guarded: Collection[tuple[str, int]] | None = None
    uses_gpus: bool = False
    syncs_norms: bool = False
