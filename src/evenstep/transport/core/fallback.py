"""What the backend "evenstep" left to Gloo: counted, so that nobody has to guess whether it is in use."""

from __future__ import annotations

import threading
from collections import Counter


class FallThrough:
    """Calls of this process with CPU tensors that Gloo carried instead of shared memory.

    Calls with tensors on a GPU are NCCL's from the start, and don't count.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def count(self, collective: str) -> None:
        """One more."""
        with self._lock:
            self._counts[collective] += 1

    def counts(self) -> dict[str, int]:
        """How often, by the name of the process group's method."""
        with self._lock:
            return dict(self._counts)

    @property
    def total(self) -> int:
        """How often, all together."""
        return sum(self.counts().values())

    def reset(self) -> None:
        """Count from 0 again."""
        with self._lock:
            self._counts.clear()

    def __repr__(self) -> str:
        told = ", ".join(f"{name} {count}" for name, count in sorted(self.counts().items()))
        return f"<FallThrough {told or 'nothing'}>"


fall_through = FallThrough()
