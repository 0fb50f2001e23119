"""`evenstep verify`: does a script take the same steps on any number of ranks, and after a resume?"""

from __future__ import annotations

import json
import os
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

from evenstep import console
from evenstep.cli.arguments import add_script, at_least_1, number, numbers
from evenstep.errors import ConfigurationError, UsageError
from evenstep.verify.ranks import verify_ranks
from evenstep.verify.resume import verify_resume

_DESCRIPTION = """\
Run a training script on 1, 2 and 4 ranks and compare losses, gradients and parameters step by step. What differs by
more than rounding is named (step, parameter, virtual rank), with what usually causes it: batch norm without
synchronisation, a loss averaged over the wrong number, a wrong accumulation divisor, random state shared between ranks,
data seen twice, a rank-dependent branch. Rounding is what lies between the script and the script in float64, and no
tolerance.

With --resume: run the script, run it again, kill it and resume it, and compare."""
_EPILOG = """\
examples:
  evenstep verify train.py --epochs 1                  is it the same on 1, 2 and 4 ranks?
  evenstep verify --ranks 2,8 --steps 20 train.py      compare 8 ranks with 2, for 20 steps
  evenstep verify --resume train.py                    does it resume exactly? It needs a Checkpointer

exit status: 0 if nothing is wrong, 1 if something differs, 2 if the script or the command doesn't work."""


def main(arguments: Sequence[str]) -> int:
    """Run the script several times and print what differs; returns the exit status."""
    args = _build_parser().parse_args(arguments)
    try:
        if args.json is not None:  # before the runs, which take minutes
            _validate_target("--json", Path(args.json))
        return _compare_resumed(args) if args.resume else _compare_ranks(args)
    except (ConfigurationError, UsageError) as error:
        console.say(f"evenstep verify: {error}")
        return 2


def _build_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="evenstep verify",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--ranks", type=numbers, metavar="N,N", help="numbers of ranks; 1,2,4 if left out")
    parser.add_argument("--steps", type=number, metavar="N", help="5; with --resume to the script's end, if left out")
    parser.add_argument("--device", metavar="DEVICE", help="as evenstep run --device")
    parser.add_argument("--json", metavar="FILE", help="write the result there, for programs")
    parser.add_argument("--resume", action="store_true", help="kill it and resume it instead, and compare")
    parser.add_argument("--nproc-per-node", "--nproc_per_node", type=at_least_1, metavar="N", help="--resume: ranks; 2")
    parser.add_argument("--kill-at", type=number, metavar="N", help="--resume: in this step; else two thirds through")
    add_script(parser, help="runs unchanged, several times, and ends after --steps", rest_help="of the script")
    return parser


def _validate_target(name: str, path: Path) -> None:
    """Raise a `ConfigurationError` if a file can't be written."""
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigurationError(f"{name} {path}: can't be written. Name a file in a directory that exists.")


def _compare_ranks(args: Namespace) -> int:
    from rich.console import Console

    for name, value in (("--nproc-per-node", args.nproc_per_node), ("--kill-at", args.kill_at)):
        if value is not None:
            raise ConfigurationError(f"{name} goes with --resume; without it say --ranks 1,2,4.")
    report = verify_ranks(
        args.script,
        args.arguments,
        ranks=args.ranks or (1, 2, 4),
        num_steps=5 if args.steps is None else args.steps,
        device=args.device,
        say=console.say,
    )
    report.show(Console())
    if args.json is not None:
        Path(args.json).write_text(report.as_json() + "\n")
    return 0 if report.is_fine else 1


def _compare_resumed(args: Namespace) -> int:
    for name, value in (("--ranks", args.ranks), ("--device", args.device)):
        if value is not None:
            raise ConfigurationError(f"{name} doesn't go with --resume, which runs on --nproc-per-node ranks.")
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    is_same = verify_resume(
        args.script,
        args.arguments,
        num_ranks=2 if args.nproc_per_node is None else args.nproc_per_node,
        kill_at=args.kill_at,
        num_steps=args.steps,
        say=say,
    )
    if args.json is not None:
        result = {"script": args.script, "fine": is_same, "said": lines[-1]}
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n")
    return 0 if is_same else 1
