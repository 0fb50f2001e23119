"""Reading single variables, and showing them in errors. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from evenstep.errors import ConfigurationError

REMEDY = "Start with `evenstep run` or `torchrun`, or unset them to run as one process."


def shown(variables: Mapping[str, str], names: Iterable[str]) -> str:
    """ "A=1, B=2": those of the names that are set, for people."""
    return ", ".join(f"{name}={variables[name]}" for name in names if name in variables)


def integer(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    """A variable's whole number; `default` if it isn't set.

    Raises:
        ConfigurationError: It isn't a number, or is unset without a default.
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
    """The first of the names that has a value."""
    return next((name for name in names if variables.get(name)), None)
