"""`evenstep verify`: does a script take the same steps on any number of ranks, and after a resume?"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence

from evenstep import console
from evenstep.cli.arguments import Parser, add_script, number, numbers
from evenstep.errors import ConfigurationError
from evenstep.ground.host.named_files import write_report
from evenstep.launcher.options.ranks import add_nproc_per_node
from evenstep.tools.verify.ranks import verify_ranks
from evenstep.tools.verify.resume import verify_resume

_DESCRIPTION = """\
Run a training script on 1, 2 and 4 ranks and compare losses, gradients and parameters step by step. What differs by
more than rounding is named (step, parameter, virtual rank), with what usually causes it: batch norm without
synchronisation, a loss averaged over the wrong number, a wrong accumulation divisor, random state shared between ranks,
data seen twice, a rank-dependent branch. Rounding is measured: the script also runs in float64. No
tolerance is set.

With --resume: run the script, run it again, kill it and resume it, and compare."""
_EPILOG = """\
examples:
  evenstep verify train.py --epochs 1                  is it the same on 1, 2 and 4 ranks?
  evenstep verify --nproc-per-node 2,8 train.py        compare 8 ranks with 2
  evenstep verify --resume train.py                    does it resume exactly? It needs a Checkpointer

exit status: 0 if nothing is wrong, 1 if something differs, 2 if the script itself fails, 78 if the command
is wrong."""


def main(arguments: Sequence[str]) -> int:
    """Run the script several times and print the differences; returns the exit status."""
    args = build_parser().parse_args(arguments)
    return _compare_resumed(args) if args.resume else _compare_ranks(args)


def build_parser() -> Parser:
    """The parser of the arguments after `evenstep verify`."""
    parser = Parser(
        prog="evenstep verify",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    add_nproc_per_node(
        parser,
        type=numbers,
        metavar="N,N",
        help="numbers of ranks to compare (default: 1,2,4); with --resume one number (default: 2)",
    )
    parser.add_argument(
        "--steps",
        type=number,
        metavar="N",
        help="steps to compare (default: 5; with --resume to the end of the script)",
    )
    parser.add_argument("--resume", action="store_true", help="kill the script, resume it, and compare")
    parser.add_argument(
        "--kill-at", type=number, metavar="N", help="with --resume: in this step (default: two thirds through)"
    )
    parser.add_report("json", "write the result there, for programs")
    parser.add_argument("--device", help="cpu, cuda, or cuda:0 for all (default: GPUs if there are any)")
    add_script(parser, help="runs unchanged, several times, and ends after --steps", rest_help="of the script")
    return parser


def _compare_ranks(args: Namespace) -> int:
    if args.kill_at is not None:
        raise ConfigurationError("--kill-at goes with --resume.")
    report = verify_ranks(
        args.script,
        args.arguments,
        ranks=args.nproc_per_node or (1, 2, 4),
        num_steps=5 if args.steps is None else args.steps,
        device=args.device,
        say=console.say,
    )
    report.show(console.on_stdout())
    write_report(args.json, report.as_json() + "\n")
    return 0 if report.is_fine else 1


def _compare_resumed(args: Namespace) -> int:
    if args.device is not None:
        raise ConfigurationError("--device doesn't go with --resume.")
    counts = args.nproc_per_node or (2,)
    if len(counts) != 1:
        received = ",".join(map(str, counts))
        raise ConfigurationError(f"--nproc-per-node {received}: with --resume one number of ranks, such as 2.")
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    is_same = verify_resume(
        args.script,
        args.arguments,
        num_ranks=counts[0],
        kill_at=args.kill_at,
        num_steps=args.steps,
        say=say,
    )
    result = {"script": args.script, "fine": is_same, "said": lines[-1]}
    write_report(args.json, json.dumps(result, indent=2) + "\n")
    return 0 if is_same else 1
