"""Reading single variables, and showing them in errors. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from evenstep.errors import ConfigurationError

REMEDY = "Start with `evenstep run` or `torchrun`, or unset them to run as one process."


def shown(variables: Mapping[str, str], names: Iterable[str]) -> str:
    """The variables of these names that are set, for people: "A=1, B=2"."""
    return ", ".join(f"{name}={variables[name]}" for name in names if name in variables)


def integer(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    """A variable's whole number; `default` if it isn't set.

    Raises:
        ConfigurationError: The value isn't a whole number, or the variable is unset and has no default.
    """
    text = variables.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ConfigurationError(f"{name}={text!r} is not a whole number. {REMEDY}") from None


def master_port(variables: Mapping[str, str], default: int) -> int:
    """The value of MASTER_PORT; `default` if it isn't set.

    Raises:
        ConfigurationError: It isn't a port.
    """
    found = integer(variables, "MASTER_PORT", default)
    if not 0 <= found < 1 << 16:
        raise ConfigurationError(f"MASTER_PORT={found} is no port: these are at most 65535. {REMEDY}")
    return found


def first_set(variables: Mapping[str, str], *names: str) -> str | None:
    """The first name whose variable has a value; None: there is none."""
    return next((name for name in names if variables.get(name)), None)
