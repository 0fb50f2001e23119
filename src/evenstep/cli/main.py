"""The command line: finds the command, calls its file, and prints the user's mistakes."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import NoReturn

import evenstep
from evenstep import console
from evenstep.errors import ConfigurationError, EvenstepError
from evenstep.launcher.spawn.child import keep_ended_children
from evenstep.launcher.spawn.zygote import BecomeRank

COMMANDS = {  # each is a module beside this one, imported when it is called
    "run": "start a script on several ranks",
    "estimate": "how much memory a rank needs, and whether data parallelism is enough; nothing is allocated",
    "env": "what there is to know of this host: for bug reports",
    "jobs": "write a job script for Slurm, PBS or Kubernetes",
    "checkpoint": "look at checkpoints, compare them, exchange them with plain torch files",
    "verify": "does a script take the same steps on any number of ranks, and after a resume?",
    "doctor": "what is wrong with a script: the usual mistakes of data-parallel training",
    "convert": "a training script for one process becomes a data-parallel one",
    "bench": "how well a script scales on this host, and why not better",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status.

    Args:
        argv: Arguments without the program's name; None: those of this process, which may then become a rank.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        keep_ended_children()
    try:
        status = _main(given, owns_process=argv is None)
    except BecomeRank as order:
        arguments = order.arguments
    else:
        if argv is None and given[:1] == ["run"]:
            _leave_at_once(status)
        return status
    # Out here nothing of the launcher is left, and no exception is being handled.
    from evenstep.cli.run import run_rank

    run_rank(arguments)
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
        _validate_command(arguments[0])
        if arguments[0] not in COMMANDS:
            parser.parse_args(arguments)  # --help, --version, or a mistake: ends here
            parser.error(f"{arguments[0]}: a command comes first")
        command = importlib.import_module(f"evenstep.cli.{arguments[0]}")
        status: int = command.main(arguments[1:], **({"may_fork": owns_process} if arguments[0] == "run" else {}))
        return status
    except EvenstepError as error:
        if not error.is_users_mistake:
            raise
        console.say(f"evenstep: {error}")
        return error.exit_code
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        console.say("evenstep: interrupted")
        return 130


def _validate_command(name: str) -> None:
    """Refuse what is no command.

    Raises:
        ConfigurationError: With the command that was meant, perhaps.
    """
    if name.startswith("-") or name in COMMANDS:
        return
    meant = difflib.get_close_matches(name, COMMANDS, n=1)
    guess = f" Did you mean {meant[0]}?" if meant else ""
    if name.endswith(".py"):
        guess = f" Did you mean evenstep run {name}?"
    raise ConfigurationError(f"{name} is no command.{guess} There are {', '.join(COMMANDS)}: see evenstep --help.")


def _parser() -> ArgumentParser:
    """Lists the commands; each parses its own arguments."""
    parser = ArgumentParser(prog="evenstep", description=evenstep.__doc__)
    parser.add_argument("--version", action="version", version=f"evenstep {evenstep.__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", required=True, metavar="command")
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    return parser
