"""Argument consistency: ranks compare their arguments before they begin.

If an argument is wrong on one rank only, the other ranks would wait for that rank. Here all ranks raise the same error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from evenstep.errors import (
    ConfigurationError,
    DataError,
    EvenstepError,
    MismatchError,
    OtherRankFailedError,
    UsageError,
)

_ADVICE = "Pass the same arguments on all ranks."
_KINDS: dict[str, type[EvenstepError]] = {
    kind.__name__: kind for kind in (ConfigurationError, OtherRankFailedError, UsageError, DataError, MismatchError)
}


class Ranks(Protocol):
    """The ranks that have to agree: a `World`, or a part of one."""

    world_size: int

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, in order of rank, on every rank. Collective."""


def validate_on_all_ranks(
    ranks: Ranks, what: str, validate: Callable[[], dict[str, Any]], *, advice: str = _ADVICE
) -> None:
    """Raise on all ranks if one rank's arguments are wrong or differ from the others'.

    Collective: every rank calls this, in the same order. A world of one sends nothing.

    Args:
        ranks: The world of the ranks.
        what: The caller, for messages: "DataLoader".
        validate: Returns values that must be equal on all ranks, by their names for people, in JSON types. Raises an
            `EvenstepError` if something is wrong on this rank.
        advice: The end of the message if something differs.

    Raises:
        EvenstepError: The error that `validate` raised on a rank: the same class and text on all ranks, and the cause
            on that rank.
        OtherRankFailedError: On another rank the user's code in `validate` raised an exception of another kind. That
            rank raises the exception itself, with its traceback.
        MismatchError: The values differ, or some ranks have made another call.
    """
    own: dict[str, Any] = {"what": what, "kind": "", "problem": "", "facts": {}}
    cause: BaseException | None = None
    foreign: Exception | None = None
    try:
        own["facts"] = validate()
    except EvenstepError as error:
        kind = next((name for name, kind in _KINDS.items() if isinstance(error, kind)), ConfigurationError.__name__)
        own |= {"kind": kind, "problem": str(error).removeprefix(f"{what}: ")}
        cause = error.__cause__
    except Exception as error:
        foreign = error
        own |= {"kind": OtherRankFailedError.__name__, "problem": f"{type(error).__name__}: {error}"}
    finding = judge(ranks.exchange(own) if ranks.world_size > 1 else [own], advice)
    if foreign is not None:
        raise foreign
    if finding is not None:
        raise finding from cause


def judge(seen: Sequence[Mapping[str, Any]], advice: str = _ADVICE) -> EvenstepError | None:
    """The error that all ranks raise; None if they agree. Pure.

    Args:
        seen: The record of each rank.
        advice: The end of the message if values differ.
    """
    first = seen[0]
    with_problem = [rank for rank, each in enumerate(seen) if each["kind"]]
    if with_problem:
        problem = seen[with_problem[0]]
        where = "" if len(with_problem) == len(seen) else f" on rank {with_problem[0]}"
        return _KINDS[problem["kind"]](f"{problem['what']}{where}: {problem['problem']}")
    for rank, each in enumerate(seen):
        if each["what"] != first["what"]:
            return MismatchError(
                f"rank 0 is at {first['what']}, and rank {rank} at {each['what']}. Make the same calls on all ranks, "
                f"in the same order."
            )
        for name in (*first["facts"], *each["facts"]):
            one, other = first["facts"].get(name), each["facts"].get(name)
            if one != other:
                return MismatchError(f"{first['what']}: {name} is {one} on rank 0 and {other} on rank {rank}. {advice}")
    return None
