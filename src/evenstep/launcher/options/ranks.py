"""The option that says how many ranks there are, in all commands that start some."""

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
        parser: Of a command that starts ranks on this host.
        help: What it says.
        type: Of the value: some commands take several numbers.
        default: If it isn't given.
        metavar: How the help shows the value.
    """
    parser.add_argument("--nproc-per-node", type=type, default=default, metavar=metavar, help=help)
    parser.add_argument(*RANKS_ALIASES, dest="nproc_per_node", type=type, default=SUPPRESS, help=SUPPRESS)
