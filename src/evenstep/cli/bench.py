"""`evenstep bench`: how well a script scales, and why not better; its sub-commands measure and predict other things."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from evenstep.bench.command import SUBCOMMANDS, help_lines, run_subcommand, scaling
from evenstep.bench.measure.plan import MODES
from evenstep.cli.arguments import at_least_1, names, numbers

_DESCRIPTION = """\
Measure how well a script scales, and say why not better. The script runs unchanged on 1, 2, 4, ... replicas, in rounds;
every run ends by itself after some steps. What it saves goes elsewhere. Writes report.json, report.html and pictures.
"""


def main(arguments: Sequence[str]) -> int:
    """Run the sub-command that the first argument names, else the measurement of a script; returns the exit status."""
    if arguments and arguments[0] in SUBCOMMANDS:
        return run_subcommand(arguments)
    return scaling(build_parser().parse_args(arguments))


def build_parser() -> ArgumentParser:
    """The parser of what follows `evenstep bench`, where that is no sub-command."""
    parser = ArgumentParser(
        prog="evenstep bench",
        description=_DESCRIPTION,
        epilog="sub-commands, each with its own --help:\n  " + "\n  ".join(help_lines()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # argparse would look for them behind the script, too
    )
    parser.add_argument("--replicas", type=numbers, metavar="1,2,4", help="default: up to the number of GPUs or cores")
    parser.add_argument(
        "--mode", choices=MODES, help="batch that grows with the replicas, or is divided; both, and weak with --try"
    )
    parser.add_argument(
        "--batch", type=at_least_1, metavar="N", help="samples of a step on the fewest replicas; default: the script's"
    )
    parser.add_argument("--steps", type=at_least_1, default=30, metavar="N", help="counted steps of a run; 30")
    parser.add_argument("--warmup", type=at_least_1, default=5, metavar="N", help="steps before those, at least 2; 5")
    parser.add_argument("--repeats", type=at_least_1, default=3, metavar="N", help="rounds; 3")
    parser.add_argument(
        "--threads-per-rank", type=at_least_1, metavar="N", help="of every rank; default: cores by the most replicas"
    )
    parser.add_argument("--device", help="cpu, cuda, or cuda:0 for all; default: GPUs if there are any")
    parser.add_argument("--limit", type=at_least_1, default=900, metavar="S", help="seconds for one run; 900")
    parser.add_argument("--out", type=Path, default=Path("bench-report"), metavar="DIR", help="bench-report")
    parser.add_argument(
        "--try",
        dest="try_remedies",
        action="store_true",
        help="run the script again with one change each (backend, optimizer, loader, ...): what it gains",
    )
    parser.add_argument("--only", type=names, metavar="A,B", help="with --try: these changes, whatever they promise")
    parser.add_argument("script", nargs="?", help="the training script: with evenstep, or torch's own DDP")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser
