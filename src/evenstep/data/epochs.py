"""Which epoch comes next: the rule of `DataLoader`, apart from everything else so that it can be read.

epoch     what `loader.epoch` says: the epoch being iterated, or, between two iterations, the one that comes next
coming    the epoch of the next iteration outside of `epochs`: one more than the last that was *begun*, so that
          a loop that always stops early doesn't see the same samples each time
first     where `epochs` starts: one more than the last that was *finished*, so that looking at one batch before
          training doesn't cost an epoch
"""

from __future__ import annotations

from collections.abc import Iterator


class EpochCounter:
    """Counts epochs. `set` moves all three numbers; iterations and loops move them on."""

    def __init__(self) -> None:
        self.epoch = 0
        self._coming = 0
        self._first = 0
        self._in_loop = False

    def set(self, epoch: int) -> None:
        """The next iteration, and the next loop, begin with `epoch`."""
        self.epoch = self._coming = self._first = epoch

    def begin(self) -> int:
        """An iteration begins: returns its epoch. Within a loop that is the loop's, however often one iterates."""
        if not self._in_loop:
            self.epoch = self._coming
        self._coming = self.epoch + 1
        return self.epoch

    def end(self, epoch: int, *, finished: bool) -> None:
        """The iteration of `epoch` ends, with its last batch or before."""
        if finished:
            self._first = max(self._first, epoch + 1)
        if not self._in_loop and self.epoch == epoch:
            self.epoch = self._coming

    def loop(self, num_epochs: int) -> Iterator[int]:
        """Yield `num_epochs` epochs, each being set while the caller has it."""
        for epoch in range(self._first, self._first + num_epochs):
            self.set(epoch)
            self._in_loop = True
            try:
                yield epoch
            finally:
                # Also when the caller's loop is left by `break` or an exception: what has begun is not begun again.
                self._in_loop = False
                self.epoch = self._coming
            self.set(epoch + 1)
