"""Checks of single arguments. All their error messages have one form. Pure.

Each function returns the value in python's type, or raises a `ConfigurationError` that begins with `what`: the class or
function, and the argument, as in "DataLoader: timeout". Numbers and switches may be numpy's.
"""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from evenstep.errors import ConfigurationError

_LONGEST = 60  # the most characters of a value that are shown


def shown(value: object) -> str:
    """A value as messages show it: in one line, of at most `_LONGEST` characters."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a foreign __repr__
        text = f"a {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."


def meant(name: str, known: Iterable[str]) -> str:
    """A suggestion, " Did you mean cpu?", if an unknown name is close to a known one; else ""."""
    names = list(known)
    close = [each for each in names if each.startswith(name)] or difflib.get_close_matches(name, names, n=1)
    return f" Did you mean {close[0]}?" if close else ""


def option_meant(message: str, help: str) -> str:
    """Like `meant`, for an option that argparse refuses. Known options begin a line of `help`."""
    wrong = re.match(r"(?:unrecognized arguments|ambiguous option): (--[\w-]+)", message)
    return meant(wrong[1], re.findall(r"^  (?:-\w[^-]*)?(--[a-z-]+)", help, re.MULTILINE)) if wrong else ""


def counted(count: int, noun: str) -> str:
    """A count with its noun: "1 rank", "2 ranks"."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def needs(what: str, package: str, extra: str) -> str:
    """How to install a missing package: "evenstep doctor needs LibCST: pip install 'evenstep[doctor]'".

    The name is in quotes, because a shell expands brackets. The command also works if evenstep was installed from a
    checkout.
    """
    return f"{what} needs {package}: pip install 'evenstep[{extra}]'"


def refuse(what: str, value: object, wanted: str) -> ConfigurationError:
    """The error for a value that isn't allowed.

    Args:
        what: The function and the argument, for messages.
        value: The given value.
        wanted: The values that are allowed, in words.
    """
    return ConfigurationError(f"{what}={shown(value)}; {wanted}.")


def whole(what: str, value: Any, *, least: int | None = None, most: int | None = None, otherwise: str = "") -> int:
    """Check a whole number.

    Args:
        what: The function and the argument, for messages.
        value: The given value.
        least: The smallest allowed value; None: any.
        most: The largest allowed value; None: any.
        otherwise: Another value that is allowed, for the message: "None for all".

    Raises:
        ConfigurationError: The value isn't a whole number, or is out of range.
    """
    try:
        number = None if is_switch_type(value) else operator.index(value)
    except Exception:  # a tensor of several numbers has an error of its own
        number = None
    if number is None or (least is not None and number < least) or (most is not None and number > most):
        raise refuse(what, value, f"a whole number{_range(least, most)}{_or(otherwise)}")
    return number


def number(
    what: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    finite: bool = True,
    otherwise: str = "",
) -> float:
    """Check a real number.

    Args:
        what: The function and the argument, for messages.
        value: The given value; NaN is always refused.
        least: The smallest allowed value.
        above: The number must be greater than this.
        most: The largest allowed.
        below: The number must be less than this.
        finite: False: the number may be infinite.
        otherwise: Another value that is allowed, for the message.

    Raises:
        ConfigurationError: The value isn't a number, or is out of range.
    """
    found = as_float(value)
    if (
        found is None
        or math.isnan(found)
        or (finite and math.isinf(found))
        or (least is not None and found < least)
        or (above is not None and found <= above)
        or (most is not None and found > most)
        or (below is not None and found >= below)
    ):
        bounds = [
            f"{word} {bound:g}"
            for word, bound in (("greater than", above), ("at least", least), ("less than", below), ("at most", most))
            if bound is not None
        ]
        kind = "a finite number" if finite and not bounds else "a number"
        raise refuse(what, value, f"{kind}{', ' if bounds else ''}{' and '.join(bounds)}{_or(otherwise)}")
    return found


def as_float(value: Any) -> float | None:
    """A real number of any kind as a float, also NaN and infinities; None for anything else.

    A text or a bool isn't a number here.
    """
    if isinstance(value, str | bytes | bytearray | complex) or is_switch_type(value):
        return None
    try:
        return float(value)
    except Exception:  # a tensor of several numbers, an object without a number, an integer beyond all floats
        return None


def switch(what: str, value: Any, *, otherwise: str = "") -> bool:
    """Check a switch: True or False, or 1 or 0.

    Raises:
        ConfigurationError: The value is none of these.
    """
    if is_switch_type(value) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise refuse(what, value, f"True or False{_or(otherwise)}")


def switches(who: str, otherwise: str = "", **given: Any) -> None:
    """Check several switches; with `otherwise` each may be None.

    Raises:
        ConfigurationError: A value isn't a switch.
    """
    for name, value in given.items():
        if not (value is None and otherwise):
            switch(f"{who}{name}", value, otherwise=otherwise)


def choice(what: str, value: Any, choices: Sequence[str], *, otherwise: str = "") -> str:
    """Check that a value is one of some words.

    Raises:
        ConfigurationError: The value is none of these words.
    """
    if isinstance(value, str) and value in choices:
        return value
    words = [repr(each) for each in choices]
    raise refuse(what, value, f"{', '.join(words[:-1])} or {words[-1]}{_or(otherwise)}")


def text(what: str, value: Any, *, wanted: str = "a text", otherwise: str = "") -> str:
    """Check a text that isn't empty.

    Raises:
        ConfigurationError: The value isn't a text, or is empty.
    """
    if isinstance(value, str) and value:
        return value
    raise refuse(what, value, f"{wanted}{_or(otherwise)}")


def function(what: str, value: Any, *, otherwise: str = "") -> Callable[..., Any]:
    """Check a function, or another object that can be called.

    Raises:
        ConfigurationError: The value can't be called.
    """
    if callable(value):
        return value  # type: ignore[no-any-return]
    raise refuse(what, value, f"a function{_or(otherwise)}")


def is_switch_type(value: Any) -> bool:
    """Whether a value is python's or numpy's bool, which numpy 1 names "bool_"."""
    return isinstance(value, bool) or type(value).__name__ in ("bool", "bool_")


def _range(least: int | None, most: int | None) -> str:
    if most is None:
        return "" if least is None else f", at least {least}"
    return f", at most {most}" if least is None else f" from {least} to {most}"


def _or(otherwise: str) -> str:
    return f", or {otherwise}" if otherwise else ""
