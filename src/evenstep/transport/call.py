"""One call of a collective over shared memory: what this rank gives, and what it gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from evenstep.transport.base import Op
from evenstep.transport.header import Fingerprint
from evenstep.transport.segment import MAX_BESIDE_BYTES, NUM_SLOTS, SMALL_BYTES


@dataclass(eq=False, slots=True)
class Call:
    """One collective of this rank.

    Attributes:
        number: From 0, counting the calls of one transport.
        collective: Its name.
        op: How values are combined; None where they aren't.
        source: The only rank whose data counts; -1: everybody's does.
        flat: [numel], contiguous: what this rank gives, and where `out` is the same also what it gets. Of a scatter,
            on other ranks than the source, only its length counts.
        address: Of `flat`'s first element.
        out: [...], contiguous, flat: what this rank gets.
        packed: The fingerprint.
        place: Where `flat` lies in this rank's zone; None if elsewhere.
        receiver: The only rank that gets the result; -1: all do.
        splits: [world_size, 2, world_size], int64, read when the program starts: how many elements each rank sends to
            and expects from each; None where all are the same.
        beside: [n], numbers that are added over the ranks in the same call, in place; None: there are none.
        places: By rank: where its tensor lies in its zone; None where it has to be copied. Known when all are there.
        head: What this rank announces.
    """

    number: int
    collective: str
    op: Op | None
    source: int
    flat: Tensor
    address: int
    out: Tensor
    packed: bytes
    place: int | None
    receiver: int = -1
    splits: Tensor | None = None
    beside: Tensor | None = None
    places: Sequence[int | None] = ()
    head: bytes = b""

    @property
    def slot(self) -> int:
        """Which of the slots it uses."""
        return self.number % NUM_SLOTS

    @property
    def is_small(self) -> bool:
        """Whether the data travels with the announcement."""
        room = SMALL_BYTES if self.beside is None else SMALL_BYTES - MAX_BESIDE_BYTES
        return self.flat.nbytes <= room and self.splits is None

    def __str__(self) -> str:
        return f"number {self.number + 1}, {Fingerprint.unpack(self.packed)}"
