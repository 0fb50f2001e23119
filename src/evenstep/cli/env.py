"""`evenstep env`: facts about the host and its software, to paste into a bug report."""

from __future__ import annotations

from collections.abc import Sequence

from evenstep.cli.arguments import Parser
from evenstep.tools.preflight.host_report import collect, render, torchs_report


def main(arguments: Sequence[str]) -> int:
    """Print facts about this host and its software; returns the exit status."""
    build_parser().parse_args(arguments)
    print(torchs_report(), render(collect()), sep="\n\n")
    return 0


def build_parser() -> Parser:
    """The parser of the arguments after `evenstep env`."""
    return Parser(
        prog="evenstep env",
        description="Print this host's hardware and software, for a bug report: what torch.utils.collect_env finds, "
        "and what evenstep adds.",
    )
