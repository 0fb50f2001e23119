"""What can go wrong, as a tree.

    EvenstepError                     everything that evenstep raises on purpose
    ├── ConfigurationError            an argument, a flag or a variable is wrong (also a ValueError)   exit 78
    ├── UsageError                    calls that don't fit together, found while running               exit 1
    ├── DataError                     a sample can't be had: a damaged file, a worker that died        exit 1
    ├── MismatchError                 the ranks disagree: parameters, shapes, lengths                  exit 72
    ├── NonFiniteError                a gradient is infinite or not a number                           exit 73
    ├── DriftError                    replicas have other parameters than they should                  exit 73
    ├── PeerLostError                 another rank died or left while this one needed it               exit 76
    ├── CollectiveTimeoutError        the others did not arrive in time                                exit 71
    ├── CheckpointError               a checkpoint can't be saved, read, or doesn't fit                exit 74
    └── RankFailedError               a rank of `evenstep.launch` died without an exception of its own

`PeerLostError` and `CollectiveTimeoutError` are *consequences*: whoever raises them is a witness, not the culprit.
A `ConfigurationError`, `UsageError`, `DataError`, `MismatchError`, `DriftError` or `CheckpointError` is explained by
its message, so it is shown without a traceback. A run that was asked to stop, and has saved, ends with
`SystemExit(75)`: no error.
"""

from __future__ import annotations

from typing import ClassVar

# Exit status of a rank that was asked to stop and has saved its checkpoint: nothing failed, and start it again later.
EXIT_PREEMPTED = 75


class EvenstepError(Exception):
    """Base of everything that evenstep raises on purpose.

    Attributes:
        exit_code: Status with which a process ends when nobody catches the error.
        is_users_mistake: The message says all there is to know; a traceback would only bury it.
        is_consequence: Raised because another rank failed first.
    """

    exit_code: ClassVar[int] = 1
    is_users_mistake: ClassVar[bool] = False
    is_consequence: ClassVar[bool] = False


class ConfigurationError(EvenstepError, ValueError):
    """An argument, a flag or an environment variable is wrong; nothing was started."""

    exit_code = 78
    is_users_mistake = True


class UsageError(EvenstepError, RuntimeError):
    """Calls that don't fit together, found while running: what, where, and what to write instead."""

    exit_code = 1
    is_users_mistake = True


class DataError(EvenstepError, RuntimeError):
    """A sample can't be had: its file is damaged, or the worker that loaded it died. Data sets may raise it, too."""

    exit_code = 1
    is_users_mistake = True


class MainFailedError(UsageError):
    """The block of `world.main_first()` raised on rank 0; raised on the others, which waited for it."""

    is_consequence = True


class MismatchError(EvenstepError, RuntimeError):
    """The ranks disagree about something that must be equal. Raised on every rank with the same text."""

    exit_code = 72
    is_users_mistake = True


class NonFiniteError(EvenstepError, ArithmeticError):
    """A gradient is infinite or not a number. Raised on every rank with the same text."""

    exit_code = 73


class DriftError(EvenstepError, RuntimeError):
    """Parameters that must be the same on all ranks no longer are. Raised on every rank with the same text."""

    exit_code = 73
    is_users_mistake = True


class PeerLostError(EvenstepError, ConnectionError):
    """Another rank died or left. The transport that raised this can't be used any more."""

    exit_code = 76
    is_consequence = True


class CollectiveTimeoutError(EvenstepError, TimeoutError):
    """The other ranks did not arrive before the deadline. The transport can't be used any more."""

    exit_code = 71
    is_consequence = True


class CheckpointError(EvenstepError, RuntimeError):
    """A checkpoint can't be saved or read, is damaged, or isn't one of these objects. Raised on every rank."""

    exit_code = 74
    is_users_mistake = True


class RankFailedError(EvenstepError, RuntimeError):
    """A rank that `evenstep.launch` started died without raising an exception that could be passed on.

    Attributes:
        rank: The rank that failed first.
        exitcode: Its exit status; negative for a signal, as in `multiprocessing`.
    """

    def __init__(self, message: str, *, rank: int, exitcode: int | None) -> None:
        super().__init__(message)
        self.rank = rank
        self.exitcode = exitcode

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_rank_failed, (str(self), self.rank, self.exitcode)


def _rebuild_rank_failed(message: str, rank: int, exitcode: int | None) -> RankFailedError:
    return RankFailedError(message, rank=rank, exitcode=exitcode)
