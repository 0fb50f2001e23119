"""`evenstep env`: what one pastes into a bug report."""

from __future__ import annotations

import json
from collections.abc import Sequence

from evenstep import console
from evenstep.cli.arguments import Parser


def main(arguments: Sequence[str]) -> int:
    """Print what this host and its software are; returns the exit status, 1 where torch lacks a name."""
    args = build_parser().parse_args(arguments)
    if args.check_torch:
        from evenstep.compat.private_names import check_torch

        found = check_torch()
        print(json.dumps(found.as_json(), indent=2) if args.json else found)
        return 0 if found.is_whole else 1

    import platform

    import torch

    from evenstep.preflight.host_report import collect, render
    from evenstep.preflight.tested_versions import untested

    report = collect()
    print(json.dumps(report, indent=2) if args.json else render(report))
    warning = untested(str(torch.__version__), platform.python_version())
    if warning is not None:
        console.say(f"evenstep: warning: {warning}")
    return 0


def build_parser() -> Parser:
    """The parser of what follows `evenstep env`."""
    parser = Parser(prog="evenstep env", description="Print this host's hardware and software, for a bug report.")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument(
        "--check-torch",
        action="store_true",
        help="list the private names of torch that evenstep uses; exit status 1 if this torch lacks one",
    )
    return parser
