"""`evenstep doctor`: what is wrong with a training script?"""

from __future__ import annotations

import os
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import evenstep
from evenstep import console
from evenstep.cli.arguments import add_script, at_least_1
from evenstep.doctor.examination import examine
from evenstep.errors import ConfigurationError

_DESCRIPTION = """\
Look for the usual mistakes of data-parallel training: every rank trains on the same samples, set_epoch is forgotten,
all ranks print and save, a collective is called on some ranks only, the accumulation divisor is wrong, and so on. The
script is read, then run unchanged for some steps on two ranks; what it would save is kept apart. It may use torch's
own classes, accelerate, Lightning Fabric, or evenstep's. Each finding says what was seen, what it costs and how to mend
it."""
_EPILOG = """\
examples:
  evenstep doctor train.py --epochs 1              what follows the script belongs to the script
  evenstep doctor --no-run train.ipynb             only read it
  evenstep doctor --select data,EV401 train.py     a group of rules, and one rule
  evenstep doctor --sarif doctor.sarif train.py    for code review tools

A comment in a line switches rules off there: # evenstep: ignore[EV305], or all: # evenstep: ignore

exit status: 0 without findings (notes may be there), 1 with findings, 78 if the call or the script's text is wrong."""


class _Parser(ArgumentParser):
    """Reports a wrong call as the other mistakes of a user, with their exit status."""

    def error(self, message: str) -> NoReturn:
        """Raise a `ConfigurationError`."""
        raise ConfigurationError(f"doctor: {message}. See evenstep doctor --help.")


def main(arguments: Sequence[str]) -> int:
    """Examine a script and print what is wrong with it; returns the exit status."""
    from rich.console import Console

    args = _build_parser().parse_args(arguments)
    for name, value in (("--json", args.json), ("--sarif", args.sarif)):
        if value is not None:
            _validate_target(name, Path(value))
    report = examine(
        args.script,
        args.arguments,
        runs=args.runs,
        num_ranks=args.ranks,
        num_steps=args.steps,
        select=args.select,
        ignore=args.ignore,
        say=console.say,
    )
    misplaced = [each for each in args.arguments if each in ("--no-run", "--select", "--ignore", "--json", "--sarif")]
    if misplaced:
        console.say(f"evenstep: {misplaced[0]} stands behind the script, so it was given to the script.")
    report.show(Console(soft_wrap=True))
    if args.json is not None:
        Path(args.json).write_text(report.as_json() + "\n")
    if args.sarif is not None:
        Path(args.sarif).write_text(report.as_sarif(evenstep.__version__) + "\n")
    return 0 if report.is_fine else 1


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _build_parser() -> ArgumentParser:
    parser = _Parser(
        prog="evenstep doctor",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--no-run", dest="runs", action="store_false", help="only read the script")
    parser.add_argument("--ranks", type=at_least_1, default=2, metavar="N", help="ranks of the run; 2 if left out")
    parser.add_argument("--steps", type=at_least_1, default=12, metavar="N", help="steps of the run; 12 if left out")
    parser.add_argument("--select", type=_names, default=[], metavar="RULE,...", help="only these rules or groups")
    parser.add_argument("--ignore", type=_names, default=[], metavar="RULE,...", help="not these rules or groups")
    parser.add_argument("--json", metavar="FILE", help="write the findings there, for programs")
    parser.add_argument("--sarif", metavar="FILE", help="write them as SARIF 2.1.0, for code review tools")
    add_script(parser, help="a python file, or a notebook, which is only read", rest_help="of the script")
    return parser


def _validate_target(name: str, path: Path) -> None:
    """Raise a `ConfigurationError` if a file can't be written."""
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigurationError(f"{name} {path}: can't be written. Name a file in a directory that exists.")
