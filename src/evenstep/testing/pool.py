"""Rank processes that stay alive between tests, so that a multi-rank case costs milliseconds instead of seconds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from types import TracebackType
from typing import Any

from evenstep.errors import ConfigurationError
from evenstep.launcher.pool import RankGroup

_START_S = 110.0  # long enough for processes that import torch on a busy machine


class RankPool:
    """A pool of rank processes: one group per number of ranks, made on first use, and again after a failure.

    A world that a function leaves open stays the current one for later functions on that number of ranks, so that
    `evenstep.init()` costs nothing the next time. Functions are sent by name: put them at the top level of a module.

    Args:
        max_ranks: The most processes alive at once; the least recently used groups are closed to stay within this
            limit.
        device: Default of `evenstep.init(device=...)` in the ranks.

    Attributes:
        num_cases: Number of calls of `run`.
        num_groups: Number of groups that were started.
    """

    def __init__(self, *, max_ranks: int = 10, device: str | None = "cpu") -> None:
        self.max_ranks = max_ranks
        self.num_cases = 0
        self.num_groups = 0
        self._device = device
        self._groups: OrderedDict[int, RankGroup] = OrderedDict()

    def __repr__(self) -> str:
        alive = ", ".join(str(size) for size in self._groups)
        return f"<RankPool {self.num_cases} cases, {self.num_groups} groups started, sizes alive: {alive or 'none'}>"

    @property
    def pids(self) -> set[int]:
        """The process ids of the ranks that are alive."""
        return {pid for group in self._groups.values() for pid in group.pids}

    def run(self, fn: Callable[..., Any], nproc: int, *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """Call `fn(*args)` on `nproc` ranks and return the results, in order of rank.

        Args:
            fn: A function of an importable module.
            nproc: Number of ranks.
            args: Arguments, equal on all ranks.
            timeout_s: Seconds after which the ranks are stopped. The start of new processes has a separate limit.

        Raises:
            Exception: As in `RankGroup.run`. The processes then end, and new ones are made on the next use: a function
                that expects an exception should catch it itself.
        """
        if nproc < 1 or nproc > self.max_ranks:
            raise ConfigurationError(f"RankPool.run: nproc={nproc}; this pool has 1 to {self.max_ranks} ranks.")
        self.num_cases += 1
        group = self._group(nproc)
        try:
            return group.run(fn, args, timeout_s=timeout_s)
        finally:
            if group.is_closed:
                del self._groups[nproc]

    def close(self) -> None:
        """End all processes. The pool can be used again afterwards."""
        while self._groups:
            self._groups.popitem()[1].close()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _group(self, nproc: int) -> RankGroup:
        if nproc not in self._groups:
            while self._groups and sum(self._groups) + nproc > self.max_ranks:
                self._groups.popitem(last=False)[1].close()
            group = RankGroup(nproc, num_threads=1, device=self._device)
            group.run(_begin, timeout_s=_START_S)  # else the start would count towards the first case's time
            self._groups[nproc] = group
            self.num_groups += 1
        self._groups.move_to_end(nproc)
        return self._groups[nproc]


def _begin() -> None:
    """On a rank: does nothing, so that the start is complete."""
