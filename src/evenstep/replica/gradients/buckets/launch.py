"""The order in which buckets are launched: by index, because ranks match collectives by order. Pure."""

from __future__ import annotations


class LaunchOrderError(AssertionError):
    """A bucket was completed twice, or a pass ended twice: a bug in evenstep."""


class LaunchOrder:
    """Decides which buckets of a backward pass to launch next.

    A bucket that is complete before its turn waits until the buckets before it have been launched.

    Args:
        num_buckets: Number of buckets.
        keeps_last: Launch the last bucket only when the pass has ended: the header is sent with it.

    Attributes:
        num_launched: Buckets below this index have been launched in the current pass.
    """

    def __init__(self, num_buckets: int, *, keeps_last: bool = False) -> None:
        self.num_launched = 0
        self._num_buckets = num_buckets
        self._num_early = num_buckets - keeps_last
        self._complete: set[int] = set()  # complete, and not launched
        self._is_finished = False

    def complete(self, bucket: int) -> range:
        """Record that a bucket has all its gradients. Returns the indices to launch now, in order."""
        if bucket < self.num_launched or bucket in self._complete:
            raise LaunchOrderError(f"bucket {bucket} is complete for the second time: {self!r}")
        self._complete.add(bucket)
        begin = end = self.num_launched
        while end < self._num_early and end in self._complete:
            self._complete.remove(end)
            end += 1
        self.num_launched = end
        return range(begin, end)

    def finish(self) -> range:
        """End the pass: parameters that have no gradient now were not used.

        Returns the indices of the remaining launches.
        """
        if self._is_finished:
            raise LaunchOrderError(f"a pass ends for the second time: {self!r}")
        self._is_finished = True
        begin, self.num_launched = self.num_launched, self._num_buckets
        self._complete.clear()
        return range(begin, self._num_buckets)

    def reset(self) -> None:
        """Prepare for the next synchronised backward pass."""
        self.num_launched, self._is_finished = 0, False
        self._complete.clear()

    def __repr__(self) -> str:
        waiting = "".join(f" {bucket}" for bucket in sorted(self._complete))
        return f"<LaunchOrder {self.num_launched}/{self._num_buckets} launched, complete:{waiting or ' none'}>"
