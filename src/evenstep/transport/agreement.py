"""Are the ranks about to do the same? Asked before they begin, and answered on all of them alike.

An argument that is wrong on one rank alone would leave the others waiting for it: they learn of it here, and raise too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from evenstep.errors import ConfigurationError, EvenstepError, MismatchError
from evenstep.transport.base import Transport
from evenstep.transport.exchange import exchange

ADVICE = "Every rank passes the same arguments."


def agree(
    transport: Transport,
    what: str,
    problem: str | None,
    facts: Callable[[], dict[str, Any]],
    *,
    advice: str = ADVICE,
) -> None:
    """Raise on all ranks if one has a problem, or if what must be equal differs.

    Collective, if there are several ranks: every rank calls this, in the same order.

    Args:
        transport: Carries the messages, on the CPU.
        what: Who asks: "DataLoader".
        problem: What is wrong on this rank; None: nothing.
        facts: What must be equal everywhere, by what people call it, in JSON types; asked only if there is no problem.
        advice: What is said where it differs.

    Raises:
        ConfigurationError: A rank has a problem.
        MismatchError: The facts differ, or other ranks are somewhere else.
    """
    own: dict[str, Any] = {"what": what, "problem": problem, "facts": {} if problem is not None else facts()}
    finding = judge(exchange(transport, own) if transport.world_size > 1 else [own], advice)
    if finding is not None:
        raise finding


def judge(seen: Sequence[Mapping[str, Any]], advice: str = ADVICE) -> EvenstepError | None:
    """The error that all ranks raise; None if they agree. Pure.

    Args:
        seen: What each rank says of itself.
        advice: What is said where facts differ.
    """
    first = seen[0]
    with_problem = [rank for rank, each in enumerate(seen) if each["problem"] is not None]
    if with_problem:
        said = seen[with_problem[0]]
        where = "" if len(with_problem) == len(seen) else f" on rank {with_problem[0]}"
        return ConfigurationError(f"{said['what']}{where}: {said['problem']}")
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
