"""`evenstep jobs`: write a job script for Slurm, PBS or Kubernetes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from evenstep.cli.arguments import Parser, add_script
from evenstep.jobs.scripts import KINDS, Job
from evenstep.launcher.options.flags import add_nproc_per_node

_DESCRIPTION = """\
Print a job script for a scheduler. Every host of the job runs `evenstep run`. The script asks the scheduler for a
signal before the time is up: the run then saves a checkpoint, ends with status 75, and is queued again."""
_EPILOG = """\
examples:
  evenstep jobs slurm --nodes 2 --gpus-per-node 8 --time 12:00:00 train.py --epochs 90 > job.sh
  evenstep jobs kubernetes --nodes 2 --image my/image:1 --claim my-data train.py > job.yaml"""


def main(arguments: Sequence[str]) -> int:
    """Print the job script; returns the exit status."""
    args = build_parser().parse_args(arguments)
    given = {name: value for name, value in vars(args).items() if value is not None}
    chosen = {field.name: given[field.name] for field in fields(Job) if field.name in given}
    print(KINDS[args.scheduler](Job(**chosen | {"script": (args.script, *args.arguments)})), end="")
    return 0


def build_parser() -> Parser:
    """The parser of what follows `evenstep jobs`."""
    parser = Parser(prog="evenstep jobs", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("scheduler", choices=tuple(KINDS), help="for which scheduler")
    parser.add_argument("--nodes", type=int, dest="num_nodes", metavar="N", help="hosts (default: 1)")
    add_nproc_per_node(
        parser, dest="ranks_per_node", help="ranks on each host (default: its GPUs, or what fits its cores)"
    )
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="GPUs of each host (default: 0)")
    parser.add_argument("--time", dest="walltime", metavar="H:MM:SS", help="how long it may run (default: 4:00:00)")
    parser.add_argument("--queue", help="partition (Slurm) or queue (PBS) (default: the scheduler's)")
    parser.add_argument("--account", help="account that is charged (default: the scheduler's)")
    parser.add_argument("--cpus-per-node", type=int, metavar="N", help="cores of each host (default: 8)")
    parser.add_argument("--name", help="of the job (default: evenstep)")
    parser.add_argument("--logs", metavar="DIR", help="where the output goes (default: logs)")
    parser.add_argument(
        "--save-seconds",
        type=int,
        dest="save_s",
        metavar="N",
        help="ask the run to save this long before the time is up (default: 120)",
    )
    parser.add_argument("--image", help="container image, for Kubernetes (default: a name to replace)")
    parser.add_argument(
        "--claim", help="volume claim with the script and its checkpoints, for Kubernetes (default: a name to replace)"
    )
    add_script(parser, help="the training script", rest_help="its own arguments")
    return parser
