"""`evenstep convert`: a single-process training script becomes a data-parallel one."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from evenstep import checks, console
from evenstep.cli.arguments import Parser
from evenstep.errors import ConfigurationError

if TYPE_CHECKING:
    from evenstep.tools.convert.convert import Conversion

_DESCRIPTION = """\
Convert a training script for one process (or one with DataParallel) to data parallelism. Formatting and comments stay.
Shows what it would change; --write changes the file. What it can't convert it leaves, marks with a comment and
explains."""
_EPILOG = """\
examples:
  evenstep convert train.py                          show the changes
  evenstep convert train.py --write                  change the file
  evenstep convert train.py --verify --epochs 1      does the result compute what the script did, also on three ranks?

exit status: 0 if it was converted, or was data-parallel already; 1 if it can't be converted or doesn't compute the
same; 2 if the script as it was fails under --verify; 78 if the command is wrong."""


def main(arguments: Sequence[str]) -> int:
    """Convert a script; returns the exit status."""
    # Unlike other commands, convert accepts its own options after the script, which it usually doesn't run.
    args, rest = build_parser().parse_known_args(arguments)
    args.arguments = [each for each in rest if each != "--"]
    try:
        from evenstep.tools.convert.convert import convert
    except ModuleNotFoundError as error:
        if error.name != "libcst":
            raise
        raise ConfigurationError(checks.needs("evenstep convert", "LibCST", "convert")) from None
    if args.arguments and not args.verify:
        raise ConfigurationError(
            f"convert: {' '.join(args.arguments)} is no option of convert, so it is the script's, which is run with "
            f"--verify only. See evenstep convert --help."
        )
    found = convert(args.script)
    for remark in (*found.problems, *found.notes):
        console.say(f"{args.script}:{remark.line}: {remark.text}")
    if found.by is not None:
        hint = ""
        if found.by == "torch.distributed":
            hint = " `from evenstep import DistributedDataParallel` is enough: see docs/how-to/migrate/torch-ddp.md."
        console.say(f"{args.script} is data-parallel already, by {found.by}: nothing to do.{hint}")
        return 0
    if found.problems:
        console.say(f"{args.script} can't be converted, and was left as it is.")
        return 1
    sys.stdout.write(found.diff)
    if args.verify and not _verify(args, found):
        return 1
    if args.write:
        try:
            found.write()
        except OSError as error:
            raise ConfigurationError(f"{args.script} can't be written: {error.strerror}. It is as it was.") from None
        console.say(f"{args.script} was changed. Start it with: {found.launch}")
    else:
        console.say("nothing was written: --write changes the file")
    return 0


def build_parser() -> Parser:
    """The parser of the arguments after `evenstep convert`."""
    parser = Parser(
        prog="evenstep convert",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--write", action="store_true", help="change the file; with --verify only if it computes the same"
    )
    parser.add_argument(
        "--verify", action="store_true", help="compare the result with the script, and with itself on three ranks"
    )
    parser.add_argument("script", help="for one process; what follows is the script's own, for --verify")
    return parser


def _verify(args: Namespace, found: Conversion) -> bool:
    shown, report = found.verify(args.arguments, say=console.say)
    for difference in shown.differences:
        console.say(f"{args.script}: {difference}")
    if report is None:
        console.say(f"{args.script}: converted, it doesn't compute what the script computed, so nothing was written")
        return False
    report.show(console.on_stdout())
    if report.is_fine:
        text = f"on one rank what the script did ({shown.num_steps} steps, with its batches), and on three the same"
        console.say(f"{args.script}: converted, it computes {text}")
    else:
        console.say(f"{args.script}: converted, it doesn't compute the same on three ranks, so nothing was written")
    return report.is_fine
