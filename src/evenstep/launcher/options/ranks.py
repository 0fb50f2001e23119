"""The option for the number of ranks, which all commands that start ranks have."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser
from collections.abc import Callable
from typing import Any

RANKS_ALIASES = ("--nproc_per_node", "--ranks", "--replicas", "--ranks-per-node")


def add_nproc_per_node(
    parser: ArgumentParser,
    *,
    help: str,
    type: Callable[[str], Any] = int,
    default: Any = None,
    metavar: str = "N",
) -> None:
    """Add `--nproc-per-node` and its other names, which the help leaves out.

    Args:
        parser: The parser of a command that starts ranks on this host.
        help: The help text.
        type: The value's type: some commands take several numbers.
        default: The value if the option isn't given.
        metavar: The value's name in the help.
    """
    parser.add_argument("--nproc-per-node", type=type, default=default, metavar=metavar, help=help)
    parser.add_argument(*RANKS_ALIASES, dest="nproc_per_node", type=type, default=SUPPRESS, help=SUPPRESS)
