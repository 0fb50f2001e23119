"""The errors that evenstep raises, as a tree.

    EvenstepError                     everything that evenstep raises on purpose (a RuntimeError)
    ├── ConfigurationError            an argument, a flag or a variable is wrong                       exit 78
    ├── UsageError                    calls that don't fit together, found while running               exit 1
    ├── DataError                     a sample can't be loaded: a damaged file, a worker that died     exit 1
    ├── MismatchError                 the ranks disagree: parameters, shapes, lengths                  exit 72
    ├── NonFiniteError                a gradient is infinite or not a number                           exit 73
    ├── DriftError                    replicas have other parameters than they should                  exit 73
    ├── PeerLostError                 another rank died or left while this one needed it               exit 76
    ├── CollectiveTimeoutError        the others did not arrive in time                                exit 71
    ├── CheckpointError               a checkpoint can't be saved, read, or doesn't fit                exit 74
    └── RankFailedError               a rank of `evenstep.launch` died without an exception of its own

Programs written for torch catch torch's exceptions. For the same mistake, one part of torch raises a RuntimeError and
another a ValueError or a TypeError. So all errors here are RuntimeErrors, and a `ConfigurationError` is a ValueError
and a TypeError, too; docs/reference/ddp-compatibility.md has the list.

`PeerLostError` and `CollectiveTimeoutError` are *consequences*: they show a secondary failure, not the root cause.
A `ConfigurationError`, `UsageError`, `DataError`, `MismatchError`, `DriftError` or `CheckpointError` is explained by
its message, so it is shown without a traceback. A run that has saved after a request to stop ends with
`SystemExit(75)`: no error.
"""

from __future__ import annotations

from typing import ClassVar

# Exit status of a rank that has saved a checkpoint after a request to stop: nothing failed, and the run can be resumed.
EXIT_PREEMPTED = 75
# Exit status of a command that examines a script (bench, verify, convert) when the script itself fails.
EXIT_SCRIPT_FAILED = 2
# Exit status of a command whose output can't be written: the disk is full, or the reader of a pipe has closed it.
EXIT_NOT_WRITTEN = 74


class EvenstepError(RuntimeError):
    """Base class of the errors that evenstep raises on purpose.

    Attributes:
        exit_code: Status with which a process ends when the error isn't caught.
        is_users_mistake: The error is shown without a traceback, because its message explains it.
        is_consequence: The error was raised because another rank failed first.
    """

    exit_code: ClassVar[int] = 1
    is_users_mistake: ClassVar[bool] = False
    is_consequence: ClassVar[bool] = False


class ConfigurationError(EvenstepError, ValueError, TypeError):
    """An argument, a flag or an environment variable is wrong; nothing was started."""

    exit_code = 78
    is_users_mistake = True


class UsageError(EvenstepError):
    """Calls that don't fit together, found while running. The message says which, where, and what to write instead."""

    is_users_mistake = True


class DataError(EvenstepError):
    """A sample can't be loaded: its file is damaged, or its worker died. Data sets may raise this error, too."""

    is_users_mistake = True


class OtherRankFailedError(UsageError):
    """The user's code failed on one rank while the others waited for it. Raised on the others."""

    is_consequence = True


class MismatchError(EvenstepError):
    """The ranks disagree about something that must be equal. Raised on every rank with the same text."""

    exit_code = 72
    is_users_mistake = True


class NonFiniteError(EvenstepError, ArithmeticError):
    """A gradient is infinite or not a number. Raised on every rank with the same text."""

    exit_code = 73


class DriftError(EvenstepError):
    """Parameters that must be equal on all ranks differ. Raised on every rank with the same text."""

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


class CheckpointError(EvenstepError):
    """A checkpoint can't be saved or read, is damaged, or belongs to other objects. Raised on every rank."""

    exit_code = 74
    is_users_mistake = True


class RankFailedError(EvenstepError):
    """A rank that `evenstep.launch` started died without raising an exception that could be passed on.

    Attributes:
        rank: The rank that failed first.
        exitcode: The rank's exit status; negative for a signal, as in `multiprocessing`.
    """

    def __init__(self, message: str, *, rank: int, exitcode: int | None) -> None:
        super().__init__(message)
        self.rank = rank
        self.exitcode = exitcode

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_rank_failed, (str(self), self.rank, self.exitcode)


def _rebuild_rank_failed(message: str, rank: int, exitcode: int | None) -> RankFailedError:
    return RankFailedError(message, rank=rank, exitcode=exitcode)
