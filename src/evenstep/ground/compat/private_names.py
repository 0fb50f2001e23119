"""A private name of torch whose absence is noticed only when it is used. Each theme lists its own in `NAMES`.

All other private names are bound when the modules beside this one are imported, and so must be in every torch that
evenstep allows: see the package.
"""

from __future__ import annotations

from dataclasses import dataclass

SEEN = ("2.11", "2.12", "2.13", "2.14", "2.15")
"""The versions of torch in which private names were looked for, and found unless a row says otherwise."""
NOTHING = "nothing changes"


@dataclass(frozen=True)
class PrivateName:
    """A name that torch doesn't document.

    Args:
        where: "module:attributes". "~name" at the end is an attribute or variable that the function before it uses.
        what: The meaning or the purpose of the name.
        without: What happens in a torch that lacks it.
        seen: The versions of torch that have it.
    """

    where: str
    what: str
    without: str
    seen: tuple[str, ...] = SEEN
