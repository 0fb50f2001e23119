"""`evenstep jobs`: write a job script for Slurm, PBS or Kubernetes."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import fields

from evenstep.cli.arguments import add_script
from evenstep.jobs.scripts import KINDS, Job


def main(arguments: Sequence[str]) -> int:
    """Print the job script; returns the exit status."""
    parser = ArgumentParser(prog="evenstep jobs", allow_abbrev=False)
    parser.add_argument("scheduler", choices=tuple(KINDS))
    parser.add_argument("--name", help="of the job; default: evenstep")
    parser.add_argument("--nodes", type=int, dest="num_nodes", metavar="N", help="default: 1")
    parser.add_argument("--ranks-per-node", type=int, metavar="N", help="default: GPUs, or what fits the cores")
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="default: none")
    parser.add_argument("--cpus-per-node", type=int, metavar="N", help="default: 8")
    parser.add_argument("--time", dest="walltime", metavar="H:MM:SS", help="default: 4:00:00")
    parser.add_argument(
        "--save-seconds", type=int, dest="save_s", metavar="N", help="signal it to save so long before the end"
    )
    parser.add_argument("--logs", metavar="DIR", help="default: logs")
    parser.add_argument("--queue", help="partition or queue")
    parser.add_argument("--account", help="the account that is charged")
    parser.add_argument("--image", help="container image (kubernetes)")
    parser.add_argument("--claim", help="volume claim with the script and its checkpoints (kubernetes)")
    add_script(parser, help="the training script", rest_help="its arguments")
    args = parser.parse_args(arguments)

    given = {name: value for name, value in vars(args).items() if value is not None}
    chosen = {field.name: given[field.name] for field in fields(Job) if field.name in given}
    print(KINDS[args.scheduler](Job(**chosen | {"script": (args.script, *args.arguments)})), end="")
    return 0
