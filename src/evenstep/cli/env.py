"""`evenstep env`: what one pastes into a bug report."""

from __future__ import annotations

import json
from collections.abc import Sequence

from evenstep.cli.arguments import Parser


def main(arguments: Sequence[str]) -> int:
    """Print what this host and its software are; returns the exit status."""
    args = build_parser().parse_args(arguments)

    from evenstep.tools.preflight.host_report import collect, collect_torchs, render

    text, torchs = collect_torchs()
    ours = collect()
    if args.json:
        print(json.dumps({"torch.utils.collect_env": torchs, **ours}, indent=2))
    else:
        print(text, render(ours), sep="\n\n")
    return 0


def build_parser() -> Parser:
    """The parser of what follows `evenstep env`."""
    parser = Parser(
        prog="evenstep env",
        description="Print this host's hardware and software, for a bug report: what torch.utils.collect_env finds, "
        "and what evenstep adds.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    return parser
