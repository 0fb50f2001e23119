"""`evenstep completion`: a script with which a shell completes commands and flags."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from evenstep.cli.arguments import Parser
from evenstep.cli.commands import whole_parser
from evenstep.errors import ConfigurationError

_DESCRIPTION = """\
Print a script with which your shell completes evenstep's commands and flags. Nothing runs while you type: the script
holds all names. Needs shtab: pip install 'evenstep[completion]'"""
_EPILOG = """\
examples:
  evenstep completion bash > ~/.local/share/bash-completion/completions/evenstep
  evenstep completion zsh > ~/.zfunc/_evenstep       with fpath+=~/.zfunc before compinit in ~/.zshrc

Start a new shell afterwards, and run it again after an upgrade of evenstep."""


def main(arguments: Sequence[str]) -> int:
    """Print the script; returns the exit status."""
    args = build_parser().parse_args(arguments)
    try:
        import shtab
    except ModuleNotFoundError:
        raise ConfigurationError("completion needs shtab: pip install 'evenstep[completion]'.") from None
    sys.stdout.write(shtab.complete(whole_parser(), shell=args.shell) + "\n")
    return 0


def build_parser() -> Parser:
    """The parser of what follows `evenstep completion`."""
    parser = Parser(prog="evenstep completion", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("shell", choices=("bash", "zsh"), help="which shell")
    return parser
