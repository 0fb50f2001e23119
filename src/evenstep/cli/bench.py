"""`evenstep bench`: how well a script scales."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from evenstep.bench.command import scaling
from evenstep.bench.measure.plan import MODES
from evenstep.cli.arguments import Parser, add_script, at_least_1, numbers
from evenstep.launcher.options.flags import add_nproc_per_node

_DESCRIPTION = """\
Measure how well training scales on this host, and say why not better. `evenstep bench train.py` is short for
`evenstep bench run train.py`. bench can't tell what 64 ranks would give: it measures ranks, and predicts nothing."""
_RUN = """\
Measure how well a script scales, and say why not better. The script runs unchanged on 1, 2, 4, ... ranks, in several
rounds; every run ends by itself after some steps. What the script saves goes elsewhere. Writes report.json
and a plot. The script may use evenstep or torch's own DistributedDataParallel."""
_EXAMPLES = """\
examples:
  evenstep bench train.py --epochs 1    how well does it scale on this host?

exit status: 0 if it was measured; 2 if the script fails; 78 if the command is wrong."""


def main(arguments: Sequence[str]) -> int:
    """Run a sub-command, `run` if the first argument names none; returns the exit status."""
    parser = build_parser()
    given = list(arguments) or ["--help"]
    if given[0] not in (*_SUBCOMMANDS, "-h", "--help"):
        given.insert(0, "run")
    args = parser.parse_args(given)
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
        "--steps", type=at_least_1, default=30, metavar="N", help="steps that count, of each run (default: %(default)s)"
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
        help="threads of every rank's CPU operations (default: cores divided by the most ranks)",
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
    add_script(parser, help="the training script", rest_help="its own arguments")


_SUBCOMMANDS = {  # carried out by, arguments, description, a few words
    "run": (scaling, _add_run_arguments, _RUN, "how well a script scales, and why not better"),
}
