"""Types of arguments that several commands share."""

from __future__ import annotations

import argparse


def number(text: str) -> int:
    """A whole number that is not negative."""
    if not text.isdecimal():  # which "²" isn't, though a digit
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
    return int(text)


def at_least_1(text: str) -> int:
    """A whole number of at least 1."""
    if number(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is less than 1")
    return int(text)


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers with commas, as in 1,2,4."""
    return tuple(number(part.strip()) for part in text.split(","))


def names(text: str) -> tuple[str, ...]:
    """Words with commas, as in fused,backend."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def add_script(parser: argparse.ArgumentParser, *, help: str, rest_help: str) -> None:
    """Add `script` and `arguments`: all that follows the script, perhaps nothing.

    The parser must have `allow_abbrev=False`: argparse would look for abbreviations behind the script, too.
    """
    parser.add_argument("script", help=help)
    # Before python 3.13 argparse lists what follows as missing where nothing does.
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=rest_help).required = False
