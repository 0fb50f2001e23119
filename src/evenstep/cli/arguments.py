"""The class of all commands' parsers, which reports wrong calls, and types of arguments."""

from __future__ import annotations

import argparse
import re
from typing import Any, NoReturn

from evenstep import checks
from evenstep.errors import ConfigurationError
from evenstep.ground.host.named_files import validate_target


class Parser(argparse.ArgumentParser):
    """A parser that reports a wrong call like every other mistake of a user: one line, exit status 78.

    It leaves line breaks of descriptions as they are, and accepts no abbreviations: argparse would look for them among
    the script's own arguments, too. It checks paths of files to write before anything runs.
    """

    _reports: tuple[str, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def add_subparsers(self, **settings: Any) -> Any:
        """As in argparse; `sub_commands` then has the sub-commands' parsers by name."""
        added = super().add_subparsers(**settings)
        self.sub_commands: dict[str, argparse.ArgumentParser] = added.choices
        return added

    def add_report(self, option: str, help: str) -> None:
        """Add an option that names a file to write."""
        self.add_argument(f"--{option}", metavar="FILE", help=help)
        self._reports += (option,)

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        """As in argparse; also refuses a file to write if its path is a script, or can't be written to."""
        found, rest = super().parse_known_args(*args, **kwargs)
        taken = [*getattr(found, "scripts", []), getattr(found, "script", None)]
        for option in self._reports:
            validate_target(f"--{option}", getattr(found, option), *taken)
            taken.append(getattr(found, option))
        return found, rest

    def error(self, message: str) -> NoReturn:
        """Raise a `ConfigurationError`."""
        # argparse's message has all spellings of an option.
        message = re.sub(r"--(\w+)(?:/--[\w-]+)+", lambda found: f"--{found[1].replace('_', '-')}", message)
        guess = checks.option_meant(message, self.format_help())
        raise ConfigurationError(f"{message}.{guess} See `{self.prog} --help`.")


def number(text: str) -> int:
    """A whole number that is not negative."""
    if not text.isdecimal():  # "²" is a digit, but not decimal
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
    return int(text)


def at_least_1(text: str) -> int:
    """A whole number of at least 1."""
    if number(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is less than 1")
    return int(text)


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers of at least 1, separated by commas, as in 1,2,4."""
    return tuple(at_least_1(part.strip()) for part in text.split(","))


def names(text: str) -> tuple[str, ...]:
    """Words separated by commas, as in EV101,EV204."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def size(text: str) -> int:
    """A number of bytes: 80G and 80GiB are 80 * 2**30, and 80GB are 80 * 10**9."""
    parts = re.fullmatch(r"0*([1-9]\d*) *(?:([KMGT])(I?)(B?))?", text.upper(), re.ASCII)
    if parts is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 80G, 500MB or 2GiB")
    base = 1000 if parts[4] and not parts[3] else 1024
    power = "KMGT".index(parts[2]) + 1 if parts[2] else 0
    return int(parts[1]) * int(base**power)


def add_script(parser: argparse.ArgumentParser, *, help: str, rest_help: str) -> None:
    """Add the arguments `script` and `arguments`: everything after the script, perhaps nothing.

    The parser must accept no abbreviations: `Parser` accepts none.
    """
    parser.add_argument("script", help=help)
    # Before python 3.13 argparse reports `arguments` as missing if nothing follows the script.
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=rest_help).required = False
