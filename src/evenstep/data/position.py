"""How far a loader has come: what was handed out, and what an optimizer has made use of.

A loader hands out a batch; some lines later an optimizer steps. Only then are its samples consumed: a state that is
saved in between belongs to a model that has not seen them. With accumulation several batches wait for one step. So
each loader notes what it handed out last, and the step of any optimizer of torch commits that, through the hook that
torch calls after every step. Nothing is counted that was only fetched ahead.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakSet

from torch.optim.optimizer import register_optimizer_step_post_hook


class Mark(NamedTuple):
    """A place in the course of training.

    Attributes:
        epoch: Number of the epoch.
        position: Samples of it that all ranks together have consumed.
    """

    epoch: int = 0
    position: int = 0


class Progress:
    """What one loader has handed out and what is committed."""

    def __init__(self) -> None:
        self.handed_out = self.committed = Mark()
        self._num_commits = 0
        self._commits_at_start = 0

    def start(self, mark: Mark) -> None:
        """An epoch begins, or goes on, at `mark`; what was handed out before and not used is given up."""
        _follow(self)
        self._commits_at_start = self._num_commits
        self.handed_out = mark

    def end(self, mark: Mark) -> None:
        """The epoch has ended; `mark` is the beginning of the next.

        Without any optimizer's step since its beginning nothing trains here that could commit: the epoch counts.
        """
        all_used = self.committed == self.handed_out
        self.handed_out = mark
        if all_used or self._num_commits == self._commits_at_start:
            self.committed = mark

    def jump(self, mark: Mark) -> None:
        """Training goes on at `mark`."""
        self.handed_out = self.committed = mark

    def commit(self) -> None:
        """What was handed out has been used."""
        self._num_commits += 1
        self.committed = self.handed_out


_followed: WeakSet[Progress] = WeakSet()
_is_registered = False


def _follow(progress: Progress) -> None:
    """Have the steps of all optimizers commit to it, as long as it lives."""
    global _is_registered
    _followed.add(progress)
    if not _is_registered:
        _is_registered = True
        register_optimizer_step_post_hook(_after_step)


def _after_step(*_: Any) -> None:
    for progress in list(_followed):
        progress.commit()
