"""Which epoch comes next: the rule of `DataLoader`, apart from everything else so that it can be read.

epoch     what `loader.epoch` says: the epoch being iterated, or, between two iterations, the one that comes next
coming    the epoch of the next iteration outside of `epochs`: one more than the last that was *begun*, so that
          a loop that always stops early doesn't see the same samples each time
first     where `epochs` starts: one more than the last that was *finished*, so that looking at one batch before
          training doesn't cost an epoch
base      what `first` was when the run began. A resumed run starts there again and leaves out what is done, so
          that the loops of the script, `epochs(2)` and then `epochs(8)`, yield what they would have yielded

After `resume` the epoch that was interrupted begins in the middle, until it is finished or another one is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator

from evenstep.data.position import Mark


class EpochCounter:
    """Counts epochs. `set` moves all numbers; iterations and loops move them on."""

    def __init__(self) -> None:
        self.epoch = 0
        self.base = 0
        self._coming = 0
        self._first = 0
        self._in_loop = False
        self._has_looped = False
        self._resumed = Mark()
        self.waits: Mark | None = None  # where a resumed run goes on, as long as it hasn't

    def set(self, epoch: int) -> Mark:
        """The next iteration, and the next loop, begin with `epoch`; where in it, is returned."""
        if epoch != self._resumed.epoch:
            self._resumed = Mark(epoch)
        if not self._has_looped:
            self.base = epoch
        self.waits = None
        self._move(epoch)
        return self._resumed

    def resume(self, mark: Mark, base: int) -> None:
        """As in a run that began with `base` and was interrupted at `mark`."""
        self.epoch = self._coming = mark.epoch
        self._first = self.base = base
        self._has_looped = False
        self._resumed = self.waits = mark

    def begin(self) -> Mark:
        """An iteration begins: returns where. Within a loop that is the loop's epoch, however often one iterates."""
        if not self._in_loop:
            self.epoch = self._coming
        self._coming = self.epoch + 1
        return self._resumed if self._resumed.epoch == self.epoch else Mark(self.epoch)

    def end(self, epoch: int, *, finished: bool) -> None:
        """The iteration of `epoch` ends, with its last batch or before."""
        if finished:
            self.waits = None
            self._first = max(self._first, epoch + 1)
            if self._resumed.epoch == epoch:
                self._resumed = Mark(epoch)
        if not self._in_loop and self.epoch == epoch:
            self.epoch = self._coming

    def loop(self, num_epochs: int) -> Iterator[int]:
        """Yield `num_epochs` epochs, less those that are done, each being set while the caller has it."""
        if not self._has_looped:
            self._has_looped = True
            self.base = self._first
        for epoch in range(self._first, self._first + num_epochs):
            if epoch < self._resumed.epoch:
                self._first = epoch + 1
                continue
            self._move(epoch)
            self._in_loop = True
            try:
                yield epoch
            finally:
                # Also when the caller's loop is left by `break` or an exception: what has begun is not begun again.
                self._in_loop = False
                self.epoch = self._coming
            self._move(epoch + 1)

    def _move(self, epoch: int) -> None:
        self.epoch = self._coming = self._first = epoch
