"""`evenstep estimate`: how much memory a rank needs, and which parallelism is enough."""

from __future__ import annotations

from collections.abc import Sequence

from evenstep.cli.arguments import Parser, add_script, at_least_1, numbers, size
from evenstep.tools.estimate import estimate

_DESCRIPTION = """\
Compute how much memory a rank needs, and whether data parallelism is enough: for DistributedDataParallel, a sharded
optimizer, and fully sharded training (FSDP2)."""
_EXAMPLES = """\
examples:
  evenstep estimate --ranks 8,64 --memory 80G train.py:build_model   which parallelism does this model need?
  evenstep estimate --ranks 8 train.py --epochs 1                    what the script itself takes, in three steps

exit status: 0 if it was computed; 2 if the script or the function fails; 78 if the command is wrong."""


def main(arguments: Sequence[str]) -> int:
    """Print how much memory a rank needs; returns the exit status."""
    return estimate.run(build_parser().parse_args(arguments))


def build_parser() -> Parser:
    """The parser of the arguments after `evenstep estimate`."""
    parser = Parser(prog="evenstep estimate", description=_DESCRIPTION, epilog=_EXAMPLES)
    parser.add_argument(
        "--ranks",
        type=numbers,
        default=(8,),
        metavar="N,N",
        help="ranks of all hosts to compute it for (default: 8)",
    )
    parser.add_argument(
        "--memory",
        type=size,
        metavar="SIZE",
        help="memory of a rank's device, such as 80G (default: the first GPU's, else this machine's)",
    )
    parser.add_argument(
        "--batch",
        type=at_least_1,
        metavar="N",
        help="for a function: samples of each rank (default: those of its inputs); a script has its own",
    )
    parser.add_argument(
        "--optimizer",
        choices=sorted(estimate.OPTIMIZERS),
        help="for a function; a script has its own (default: adamw)",
    )
    parser.add_report("json", "write the figures there")
    add_script(
        parser,
        help="a script that trains with a torch optimizer: it runs on one rank and ends after three steps. Or "
        "FILE.py:FUNCTION or MODULE:FUNCTION, which returns the model, or (model, inputs of a batch): nothing is "
        "allocated",
        rest_help="of the script",
    )
    return parser
