"""The command line: arguments in, one call out."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import evenstep
from evenstep.bench.command import add_bench
from evenstep.errors import CheckpointError, ConfigurationError, EvenstepError, UsageError
from evenstep.launcher.template import BecomeRank
from evenstep.launcher.worker import main as become_rank

_COMMANDS = ("run", "estimate", "env", "jobs", "checkpoint", "verify", "bench")  # as `_parser` has them
_ESTIMATE = "how much memory a rank needs, and whether data parallelism is enough; nothing is allocated"
_VERIFY = """\
Run a training script on 1, 2 and 4 ranks and compare losses, gradients and parameters step by step. What differs by
more than rounding is named (step, parameter, lane), with what usually causes it: batch norm without synchronisation, a
loss averaged over the wrong number, a wrong accumulation divisor, random state shared between ranks, data seen twice,
a rank-dependent branch. Rounding is what lies between the script and the script in float64, and no tolerance.

With --resume: run the script, run it again, kill it and resume it, and compare."""
_VERIFY_EPILOG = """\
examples:
  evenstep verify train.py --epochs 1                  is it the same on 1, 2 and 4 ranks?
  evenstep verify --ranks 2,8 --steps 20 train.py      compare 8 ranks with 2, for 20 steps
  evenstep verify --resume train.py                    does it resume exactly? It needs a Checkpointer

exit status: 0 if nothing is wrong, 1 if something differs, 2 if the script or the command doesn't work."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status.

    Args:
        argv: Arguments without the program's name; None: those of this process, which may then become a rank.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _main(given, owns_process=argv is None)
    except BecomeRank as order:
        arguments = order.arguments
    else:
        if argv is None and given[:1] == ["run"]:
            _leave_at_once(status)
        return status
    # Out here nothing of the launcher is left, and no exception is being handled.
    become_rank(arguments)
    return 0


def _leave_at_once(status: int) -> NoReturn:
    """End a launcher whose ranks have all ended. Taking python and torch to pieces takes half a second and more."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(status)


def _main(arguments: list[str], *, owns_process: bool) -> int:
    parser = _parser()
    if not arguments:
        parser.print_help()
        return 2
    try:
        if arguments[0] == "run":
            from evenstep.launcher.run import run

            return run(arguments[1:], may_fork=owns_process)
        if arguments[0] == "bench" and arguments[1:2] and arguments[1].startswith("--"):
            from evenstep.bench.modes import MODES, run_mode

            if arguments[1] in MODES:
                return run_mode(arguments[1:])
        if arguments[0] == "estimate":
            return _estimate(arguments[1:])
        _validate_command(arguments[0])
        args = parser.parse_args(arguments)  # --help, --version, or a mistake: ends here
        status: int = args.call(args)
        return status
    except EvenstepError as error:
        if not error.is_users_mistake:
            raise
        print(f"evenstep: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("evenstep: interrupted", file=sys.stderr, flush=True)
        return 130


def _validate_command(name: str) -> None:
    """Refuse what is no command.

    Raises:
        ConfigurationError: With the command that was meant, perhaps.
    """
    if name.startswith("-") or name in _COMMANDS:
        return
    meant = difflib.get_close_matches(name, _COMMANDS, n=1)
    guess = f" Did you mean {meant[0]}?" if meant else ""
    if name.endswith(".py"):
        guess = f" Did you mean evenstep run {name}?"
    raise ConfigurationError(f"{name} is no command.{guess} There are {', '.join(_COMMANDS)}: see evenstep --help.")


def _estimate(arguments: Sequence[str]) -> int:
    from evenstep.bench.memory import add_estimate_arguments, estimate

    parser = ArgumentParser(prog="evenstep estimate", description=_ESTIMATE[0].upper() + _ESTIMATE[1:] + ".")
    add_estimate_arguments(parser)
    return estimate(parser.parse_args(arguments))


def _checkpoint(args: Namespace) -> int:
    try:
        return _act_on_checkpoint(args)
    except BrokenPipeError:
        raise
    except OSError as error:  # of a directory that can't be read, a disk that is full
        remedy = " Run this as a user who may read and write there." if isinstance(error, PermissionError) else ""
        raise CheckpointError(f"{error.filename or args.action}: {error.strerror or error}.{remedy}") from None


def _act_on_checkpoint(args: Namespace) -> int:
    from evenstep.checkpoint import tools

    if args.action == "list":
        return _print(tools.list_lines(args.directory))
    if args.action == "show":
        return _print(tools.show_lines(args.directory, args.step))
    if args.action == "verify":
        lines, all_well = tools.verify(args.directory, args.step)
        _print(lines)
        return 0 if all_well else CheckpointError.exit_code
    if args.action == "diff":
        lines = tools.difference_lines(args.first, args.second, args.step, args.second_step)
        _print(lines or ["no difference"])
        return 1 if lines else 0
    if args.action == "export":
        return _print([tools.export(args.directory, args.file, args.step, args.object)])
    return _print([tools.import_file(args.file, args.directory, args.object, args.step)])


def _verify(args: Namespace) -> int:
    try:
        if args.json is not None:  # before the runs, which take minutes
            _validate_target("--json", Path(args.json))
        return _verify_resume(args) if args.resume else _verify_ranks(args)
    except (ConfigurationError, UsageError) as error:
        print(f"evenstep verify: {error}", file=sys.stderr, flush=True)
        return 2


def _validate_target(name: str, path: Path) -> None:
    """Raise a `ConfigurationError` if a file can't be written."""
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigurationError(f"{name} {path}: can't be written. Name a file in a directory that exists.")


def _verify_ranks(args: Namespace) -> int:
    from rich.console import Console

    from evenstep.verify.ranks import verify_ranks

    for name, value in (("--nproc-per-node", args.nproc_per_node), ("--kill-at", args.kill_at)):
        if value is not None:
            raise ConfigurationError(f"{name} goes with --resume; without it say --ranks 1,2,4.")
    report = verify_ranks(
        args.script,
        args.arguments,
        ranks=args.ranks or (1, 2, 4),
        num_steps=5 if args.steps is None else args.steps,
        device=args.device,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    report.show(Console())
    if args.json is not None:
        Path(args.json).write_text(report.as_json() + "\n")
    return 0 if report.is_fine else 1


def _verify_resume(args: Namespace) -> int:
    from evenstep.verify.resume import verify_resume

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
        told = {"script": args.script, "fine": is_same, "said": lines[-1]}
        Path(args.json).write_text(json.dumps(told, indent=2) + "\n")
    return 0 if is_same else 1


def _print(lines: Any) -> int:
    for line in lines:
        print(line, flush=True)
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="evenstep", description=evenstep.__doc__)
    parser.add_argument("--version", action="version", version=f"evenstep {evenstep.__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", required=True, metavar="command")
    # Its own parser is torchrun's, and is made only when it is needed: `evenstep run --help`.
    commands.add_parser("run", help="start a script on several ranks", add_help=False)
    # Parsed where its flags are known.
    commands.add_parser("estimate", help=_ESTIMATE, add_help=False)
    env = commands.add_parser("env", help="what there is to know of this host: for bug reports")
    env.add_argument("--json", action="store_true", help="for programs")
    env.set_defaults(call=_env)
    # Without abbreviations: argparse would look for them among a script's own arguments, too.
    jobs = commands.add_parser("jobs", help="write a job script for Slurm, PBS or Kubernetes", allow_abbrev=False)
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
    _add_rest(jobs, help="its arguments")
    jobs.set_defaults(call=_jobs)
    _add_checkpoint(commands)
    _add_verify(commands)
    add_bench(commands)
    return parser


def _add_rest(parser: argparse.ArgumentParser, *, help: str) -> None:
    """Whatever follows; nothing, as well, which argparse before python 3.13 lists as missing."""
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=help).required = False


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


def _add_checkpoint(commands: Any) -> None:
    text = "look at checkpoints, compare them, exchange them with plain torch files"
    parser: ArgumentParser = commands.add_parser("checkpoint", help=text, description=text.capitalize() + ".")
    actions = parser.add_subparsers(title="actions", dest="action", required=True, metavar="action")

    def action(name: str, text: str, *, step: str = "which one; the newest if left out") -> ArgumentParser:
        added: ArgumentParser = actions.add_parser(name, help=text, description=text.capitalize() + ".")
        if step:
            added.add_argument("--step", type=_step, metavar="N", help=step)
        return added

    listed = action("list", "one line for each checkpoint of a run", step="")
    shown = action("show", "what a checkpoint holds: objects, tensors, files, metrics, versions")
    verified = action("verify", "read every byte; exit status 74 if something is wrong", step="only this one")
    exported = action("export", "write objects to one file that torch.load reads")
    for each in (listed, shown, verified, exported):
        each.add_argument("directory", help="of a run, or of one checkpoint")
    compared = action(
        "diff", "the tensors in which two checkpoints differ; exit status 1 if they do", step="of the first"
    )
    compared.add_argument("--second-step", type=_step, metavar="N", help="of the second")
    compared.add_argument("first", help="directory of a run, or of one checkpoint")
    compared.add_argument("second", help="the same")
    exported.add_argument("file", help="a new file")
    exported.add_argument("--object", metavar="NAME", help="this object's state alone; all of them if left out")
    imported = action(
        "import", "make a checkpoint out of a file of torch.save", step="number it so; else as the file says"
    )
    imported.add_argument("file", help="tensors and plain data only: it is read with weights_only=True")
    imported.add_argument("directory", help="of the run to make")
    imported.add_argument("--object", metavar="NAME", help="the file is the state of this object")
    parser.set_defaults(call=_checkpoint)


def _add_verify(commands: Any) -> None:
    parser: ArgumentParser = commands.add_parser(
        "verify",
        help="does a script take the same steps on any number of ranks, and after a resume?",
        description=_VERIFY,
        epilog=_VERIFY_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--ranks", type=_numbers, metavar="N,N", help="numbers of ranks; 1,2,4 if left out")
    parser.add_argument("--steps", type=_step, metavar="N", help="5; with --resume to the script's end, if left out")
    parser.add_argument("--device", metavar="DEVICE", help="as evenstep run --device")
    parser.add_argument("--json", metavar="FILE", help="write the result there, for programs")
    parser.add_argument("--resume", action="store_true", help="kill it and resume it instead, and compare")
    parser.add_argument(
        "--nproc-per-node", "--nproc_per_node", type=_at_least_1, metavar="N", help="--resume: ranks; 2"
    )
    parser.add_argument("--kill-at", type=_step, metavar="N", help="--resume: in this step; else two thirds through")
    parser.add_argument("script", help="runs unchanged, several times, and ends after --steps")
    _add_rest(parser, help="of the script")
    parser.set_defaults(call=_verify)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(_step(part.strip()) for part in text.split(","))


def _step(text: str) -> int:
    if not text.isdecimal():  # which "²" isn't, though a digit
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
    return int(text)


def _at_least_1(text: str) -> int:
    if _step(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is less than 1")
    return int(text)
