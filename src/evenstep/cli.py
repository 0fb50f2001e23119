"""The command line: arguments in, one call out."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import fields

import evenstep
from evenstep.errors import EvenstepError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status.

    Args:
        argv: Arguments without the program's name; None: those of this process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    if not arguments:
        parser.print_help()
        return 2
    try:
        if arguments[0] == "run":
            from evenstep.launcher.run import run

            return run(arguments[1:])
        args = parser.parse_args(arguments)  # --help, --version, or a mistake: ends here
        status: int = args.call(args)
        return status
    except EvenstepError as error:
        if not error.is_users_mistake:
            raise
        print(f"evenstep: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        print("evenstep: interrupted", file=sys.stderr, flush=True)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="evenstep", description=evenstep.__doc__)
    parser.add_argument("--version", action="version", version=f"evenstep {evenstep.__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", required=True, metavar="command")
    # Its own parser is torchrun's, and is made only when it is needed: `evenstep run --help`.
    commands.add_parser("run", help="start a script on several ranks", add_help=False)
    env = commands.add_parser("env", help="what there is to know of this host: for bug reports")
    env.add_argument("--json", action="store_true", help="for programs")
    env.set_defaults(call=_env)
    jobs = commands.add_parser("jobs", help="write a job script for Slurm, PBS or Kubernetes")
    jobs.add_argument("scheduler", choices=("slurm", "pbs", "kubernetes"))
    jobs.add_argument("--name", help="of the job; default: evenstep")
    jobs.add_argument("--nodes", type=int, dest="num_nodes", metavar="N", help="hosts; default: 1")
    jobs.add_argument("--ranks-per-node", type=int, metavar="N", help="default: GPUs, or what fits the cores")
    jobs.add_argument("--gpus-per-node", type=int, metavar="N", help="default: none")
    jobs.add_argument("--cpus-per-node", type=int, metavar="N", help="default: 8")
    jobs.add_argument("--time", dest="walltime", metavar="H:MM:SS", help="default: 4:00:00")
    jobs.add_argument(
        "--save-seconds", type=int, dest="save_s", metavar="N", help="told to save so long before the end"
    )
    jobs.add_argument("--logs", metavar="DIR", help="default: logs")
    jobs.add_argument("--queue", help="partition or queue")
    jobs.add_argument("--account", help="who pays")
    jobs.add_argument("--image", help="container image (kubernetes)")
    jobs.add_argument("--claim", help="volume claim with the script and its checkpoints (kubernetes)")
    jobs.add_argument("script", help="the training script")
    jobs.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    jobs.set_defaults(call=_jobs)
    return parser


def _env(args: argparse.Namespace) -> int:
    from evenstep.about.env import collect, render

    report = collect()
    print(json.dumps(report, indent=2) if args.json else render(report))
    return 0


def _jobs(args: argparse.Namespace) -> int:
    from evenstep.launcher.jobs import KINDS, Job

    given = {name: value for name, value in vars(args).items() if value is not None}
    job = Job(
        **{field.name: given[field.name] for field in fields(Job) if field.name in given}
        | {"script": (args.script, *args.arguments)}
    )
    print(KINDS[args.scheduler](job), end="")
    return 0
