"""Are the ranks about to do the same? Asked before they begin, and answered on all of them alike.

An argument that is wrong on one rank alone would leave the others waiting for it: they learn of it here, and raise too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from evenstep.errors import ConfigurationError, DataError, EvenstepError, MismatchError, UsageError

_ADVICE = "Every rank passes the same arguments."
_KINDS: dict[str, type[EvenstepError]] = {
    kind.__name__: kind for kind in (ConfigurationError, UsageError, DataError, MismatchError)
}


class Ranks(Protocol):
    """Those who have to agree."""

    world_size: int

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, in order of rank, on every rank. Collective."""


def validate_together(
    ranks: Ranks, what: str, validate: Callable[[], dict[str, Any]], *, advice: str = _ADVICE
) -> None:
    """Raise on all ranks if what one of them was given is wrong, or differs from what the others were given.

    Collective: every rank calls this, in the same order. One rank alone asks nobody.

    Args:
        ranks: Their world.
        what: Who asks: "DataLoader".
        validate: Returns what must be equal everywhere, by what people call it, in JSON types. Raises an
            `EvenstepError` if something is wrong on this rank.
        advice: What is said where something differs.

    Raises:
        EvenstepError: Of the kind that a rank's `validate` raised, with its text.
        MismatchError: The facts differ, or other ranks are somewhere else.
    """
    own: dict[str, Any] = {"what": what, "kind": "", "problem": "", "facts": {}}
    try:
        own["facts"] = validate()
    except EvenstepError as error:
        kind = next((name for name, kind in _KINDS.items() if isinstance(error, kind)), ConfigurationError.__name__)
        own |= {"kind": kind, "problem": str(error).removeprefix(f"{what}: ")}
    finding = judge(ranks.exchange(own) if ranks.world_size > 1 else [own], advice)
    if finding is not None:
        raise finding


def judge(seen: Sequence[Mapping[str, Any]], advice: str = _ADVICE) -> EvenstepError | None:
    """The error that all ranks raise; None if they agree. Pure.

    Args:
        seen: What each rank says of itself.
        advice: What is said where facts differ.
    """
    first = seen[0]
    with_problem = [rank for rank, each in enumerate(seen) if each["kind"]]
    if with_problem:
        said = seen[with_problem[0]]
        where = "" if len(with_problem) == len(seen) else f" on rank {with_problem[0]}"
        return _KINDS[said["kind"]](f"{said['what']}{where}: {said['problem']}")
    for rank, each in enumerate(seen):
        if each["what"] != first["what"]:
            return MismatchError(
                f"rank 0 is at {first['what']}, and rank {rank} at {each['what']}. Every rank calls the same, in the "
                f"same order."
            )
        for name in (*first["facts"], *each["facts"]):
            one, other = first["facts"].get(name), each["facts"].get(name)
            if one != other:
                return MismatchError(f"{first['what']}: {name} is {one} on rank 0 and {other} on rank {rank}. {advice}")
    return None
