"""The command line: arguments in, one call out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import evenstep
from evenstep.errors import EvenstepError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status.

    Args:
        argv: Arguments without the program's name; None: those of this process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    if not arguments:
        parser.print_help()
        return 2
    if arguments[0] != "run":
        parser.parse_args(arguments)  # --help, --version, or a mistake: ends here
        return 2
    from evenstep.launcher.run import run

    try:
        return run(arguments[1:])
    except EvenstepError as error:
        if not error.is_users_mistake:
            raise
        print(f"evenstep: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        print("evenstep: interrupted", file=sys.stderr, flush=True)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="evenstep", description=evenstep.__doc__)
    parser.add_argument("--version", action="version", version=f"evenstep {evenstep.__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", required=True, metavar="command")
    # Its own parser is torchrun's, and is made only when it is needed: `evenstep run --help`.
    commands.add_parser("run", help="start a script on several ranks", add_help=False)
    return parser
