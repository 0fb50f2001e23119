"""`evenstep estimate`: how much memory a rank needs, and which parallelism is enough."""

from __future__ import annotations

from collections.abc import Sequence

from evenstep.cli.arguments import Parser
from evenstep.tools.estimate import estimate

_DESCRIPTION = """\
Compute how much memory a rank needs, and whether data parallelism is enough: for DistributedDataParallel, a sharded
optimizer, and fully sharded training (FSDP2)."""
_EXAMPLES = """\
examples:
  evenstep estimate train.py:build_model --ranks 8,64 --memory 80G   which parallelism does this model need?
  evenstep estimate --ranks 8 train.py --epochs 1                    what the script itself takes, in three steps

exit status: 0 if it was computed; 2 if the script or the function fails; 78 if the command is wrong."""


def main(arguments: Sequence[str]) -> int:
    """Print what a rank needs; returns the exit status."""
    return estimate.run(build_parser().parse_args(arguments))


def build_parser() -> Parser:
    """The parser of what follows `evenstep estimate`."""
    parser = Parser(prog="evenstep estimate", description=_DESCRIPTION, epilog=_EXAMPLES)
    estimate.add_arguments(parser)
    return parser
