"""`evenstep bench`: how well a script scales, and which of several scripts is faster."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from evenstep.cli.arguments import Parser, add_script, at_least_1, numbers
from evenstep.launcher.options.ranks import add_nproc_per_node
from evenstep.tools.bench.command import compare, scaling

_DESCRIPTION = """\
Measure how well training scales on this host, and say why not better; or which of several scripts is faster.
`evenstep bench train.py` is short for `evenstep bench run train.py`.

bench measures the ranks that there are. It can't tell what 64 ranks would give: for that, measure on some nodes of
that kind."""
_RUN = """\
Measure how well a script scales, and say why not better. The script runs unchanged on 1, 2, 4, ... ranks, in several
rounds; every run ends by itself after some steps. What the script saves goes elsewhere. Writes report.json and a plot.
The script may use evenstep or torch's own DistributedDataParallel."""
_COMPARE = """\
Run scripts in alternating rounds (a b, b a, a b, ...) on as many ranks each, and compare the time of their steps and
their losses. To try a change, make it in a copy of the script. A script beside itself shows how much rounds differ.

Arguments behind -- go to every script: evenstep bench compare a.py b.py -- --epochs 1

Ratios are taken within a round, and shown with their quartiles. Losses are those that backward passes begin with,
averaged over ranks. A script that sets no seed begins with a fixed one."""
_EXAMPLES = """\
examples:
  evenstep bench train.py --epochs 1                   how well does it scale on this host?
  evenstep bench compare train.py train_changed.py     is the changed script faster, and are its losses the same?

exit status: 0 if it was measured; 2 if a script fails; 78 if the command is wrong."""


def main(arguments: Sequence[str]) -> int:
    """Run a sub-command, `run` if the first argument names none; returns the exit status."""
    parser = build_parser()
    given = list(arguments) or ["--help"]
    if given[0] not in (*_SUBCOMMANDS, "-h", "--help"):
        given.insert(0, "run")
    behind: list[str] = []
    if given[0] == "compare" and "--" in given:
        # argparse would take the arguments after "--" for more scripts.
        at = given.index("--")
        given, behind = given[:at], given[at + 1 :]
    args = parser.parse_args(given)
    if args.action == "compare":
        args.arguments = behind
    status: int = _SUBCOMMANDS[args.action][0](args)
    return status


def build_parser() -> Parser:
    """The parser of the arguments after `evenstep bench`."""
    parser = Parser(prog="evenstep bench", description=_DESCRIPTION, epilog=_EXAMPLES)
    actions = parser.add_subparsers(title="sub-commands", dest="action", required=True, metavar="sub-command")
    for name, (_, add_arguments, description, text) in _SUBCOMMANDS.items():
        add_arguments(actions.add_parser(name, help=text, description=description))
    return parser


def _add_run_arguments(parser: ArgumentParser) -> None:
    add_nproc_per_node(
        parser,
        type=numbers,
        metavar="N,N",
        help="numbers of ranks to compare (default: 1,2,4,... up to the number of GPUs, or of cores)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("bench-report"),
        metavar="DIR",
        help="where the report goes (default: %(default)s)",
    )
    _add_common(parser, rounds=3)
    parser.add_argument(
        "--strong",
        action="store_true",
        help="also with one batch divided over the ranks; else the batch grows with the ranks, and no more is measured",
    )
    add_script(parser, help="the training script", rest_help="its own arguments")


def _add_compare_arguments(parser: Parser) -> None:
    add_nproc_per_node(parser, type=at_least_1, help="ranks of every script (default: the GPUs, or the cores)")
    _add_common(parser, rounds=5)
    parser.add_report("json", "write the figures there")
    parser.add_argument(
        "scripts", nargs="+", metavar="script", help="two training scripts or more; the first is the base"
    )


def _add_common(parser: ArgumentParser, *, rounds: int) -> None:
    parser.add_argument(
        "--steps", type=at_least_1, default=30, metavar="N", help="steps that count, of each run (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=at_least_1, default=rounds, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--device", help="cpu, cuda (a GPU for each rank), or cuda:0 for all (default: GPUs if there are any)"
    )


_SUBCOMMANDS = {  # function, arguments, description, summary
    "run": (scaling, _add_run_arguments, _RUN, "how well a script scales, and why not better"),
    "compare": (
        compare,
        _add_compare_arguments,
        _COMPARE,
        "which of several scripts is faster, and whether losses are the same",
    ),
}
