"""Counts the calls that Gloo carries because shared memory can't."""

from __future__ import annotations

import threading
from collections import Counter


class FallbackCounts:
    """Counts calls of this process with CPU tensors that Gloo carried instead of shared memory.

    NCCL carries all calls with tensors on a GPU; these aren't counted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def count(self, collective: str) -> None:
        """Count one more call."""
        with self._lock:
            self._counts[collective] += 1

    def counts(self) -> dict[str, int]:
        """The number of calls by the name of the process group's method."""
        with self._lock:
            return dict(self._counts)

    @property
    def total(self) -> int:
        """The number of all calls."""
        return sum(self.counts().values())

    def reset(self) -> None:
        """Count from 0 again."""
        with self._lock:
            self._counts.clear()

    def __repr__(self) -> str:
        counts = ", ".join(f"{name} {count}" for name, count in sorted(self.counts().items()))
        return f"<FallbackCounts {counts or 'nothing'}>"


fallback = FallbackCounts()
