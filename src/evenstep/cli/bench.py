"""`evenstep bench`: how well a script scales, and which of several is the fastest."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from evenstep.bench.command import compare, scaling
from evenstep.bench.measure.plan import MODES
from evenstep.cli.arguments import Parser, add_script, at_least_1, numbers, validate_target
from evenstep.launcher.options.flags import add_nproc_per_node

_DESCRIPTION = """\
Measure how well training scales on this host, and say why not better. `evenstep bench train.py` is short for
`evenstep bench run train.py`. bench can't tell what 64 ranks would give: it measures ranks, and predicts nothing."""
_RUN = """\
Measure how well a script scales, and say why not better. The script runs unchanged on 1, 2, 4, ... ranks, in several
rounds; every run ends by itself after some steps. What the script saves goes elsewhere. Writes report.json
and a plot. The script may use evenstep or torch's own DistributedDataParallel."""
_COMPARE = """\
Compare scripts: is a change worth making? They run in alternating rounds, on as many ranks each, and every run ends by
itself after some steps. Prints the time of a step, the throughput, its ratio to the first script's in the same round
with quartiles, and whether the losses are the same. Seed the scripts, or losses differ by themselves."""
_EXAMPLES = """\
examples:
  evenstep bench train.py --epochs 1                        how well does it scale on this host?
  evenstep bench compare train.py fused.py -- --epochs 1    is the change in fused.py faster? Both get --epochs 1

exit status: 0 if it was measured; 2 if the script fails; 78 if the command is wrong."""


def main(arguments: Sequence[str]) -> int:
    """Run a sub-command, `run` if the first argument names none; returns the exit status."""
    parser = build_parser()
    given = list(arguments) or ["--help"]
    if given[0] not in (*_SUBCOMMANDS, "-h", "--help"):
        given.insert(0, "run")
    rest: list[str] = []
    if given[0] == "compare" and "--" in given:
        at = given.index("--")
        given, rest = given[:at], given[at + 1 :]
    args = parser.parse_args(given)
    if args.action == "compare":
        args.arguments = rest
        validate_target("--json", args.json)
    status: int = _SUBCOMMANDS[args.action][0](args)
    return status


def build_parser() -> Parser:
    """The parser of what follows `evenstep bench`."""
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
    parser.add_argument(
        "--mode",
        choices=MODES,
        default="both",
        help="weak: the batch grows with the ranks; strong: it is divided (default: %(default)s)",
    )
    parser.add_argument(
        "--batch", type=at_least_1, metavar="N", help="samples of a step on the fewest ranks (default: the script's)"
    )
    _add_measuring(parser, threads="cores divided by the most ranks")
    add_script(parser, help="the training script", rest_help="its own arguments")


def _add_compare_arguments(parser: ArgumentParser) -> None:
    add_nproc_per_node(
        parser, type=at_least_1, metavar="N", help="ranks of every run (default: the number of GPUs, or of cores)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the answer to this file, too")
    parser.add_argument(
        "--batch", type=at_least_1, metavar="N", help="samples of a step on all ranks (default: each script's)"
    )
    _add_measuring(parser, threads="cores divided by the ranks")
    parser.add_argument("scripts", nargs="+", metavar="script", help="training scripts; after -- the arguments of all")


def _add_measuring(parser: ArgumentParser, *, threads: str) -> None:
    parser.add_argument(
        "--steps", type=at_least_1, default=30, metavar="N", help="steps that count, of each run (default: %(default)s)"
    )
    parser.add_argument(
        "--warmup",
        type=at_least_1,
        default=5,
        metavar="N",
        help="steps before those that count, at least 2 (default: %(default)s)",
    )
    parser.add_argument("--repeats", type=at_least_1, default=3, metavar="N", help="rounds (default: %(default)s)")
    parser.add_argument(
        "--threads-per-rank",
        type=at_least_1,
        metavar="N",
        help=f"threads of every rank's CPU operations (default: {threads})",
    )
    parser.add_argument(
        "--device", help="cpu, cuda (a GPU for each rank), or cuda:0 for all (default: GPUs if there are any)"
    )
    parser.add_argument(
        "--limit",
        type=at_least_1,
        default=900,
        metavar="S",
        help="seconds that one run may take (default: %(default)s)",
    )


_SUBCOMMANDS = {  # carried out by, arguments, description, a few words
    "run": (scaling, _add_run_arguments, _RUN, "how well a script scales, and why not better"),
    "compare": (
        compare,
        _add_compare_arguments,
        _COMPARE,
        "which of several scripts is the fastest, and are losses equal",
    ),
}
