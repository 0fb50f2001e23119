"""A private name of torch whose absence is noticed only at its use. Each theme's `NAMES` lists its own.

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
        what: What it is, or its purpose.
        without: What happens in a torch that lacks it.
        seen: The versions of torch that have it.
    """

    where: str
    what: str
    without: str
    seen: tuple[str, ...] = SEEN
