"""The command line: finds the command, calls its file, and prints the user's mistakes."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import evenstep
from evenstep import console
from evenstep.cli.commands import COMMANDS, list_parser, validate_command
from evenstep.errors import EXIT_NOT_WRITTEN, EXIT_SCRIPT_FAILED, ConfigurationError, EvenstepError, UsageError
from evenstep.ground.host.named_files import OF_THE_DISK
from evenstep.launcher.spawn.child import BecomeRank, keep_ended_children, leave_process_1


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status.

    Args:
        argv: Arguments without the program's name; None: those of this process, which may then become a rank.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        _fill_streams()
        if given[:1] == ["run"]:
            leave_process_1()
        keep_ended_children()
    try:
        status = _main(given, owns_process=argv is None)
    except BecomeRank as order:
        arguments = order.arguments
    else:
        if argv is None and given[:1] == ["run"]:
            _leave_at_once(status)
        return status
    # Here the launcher's frames have left the stack, and no exception is being handled.
    from evenstep.cli.run import run_rank

    run_rank(arguments)
    return 0


def _fill_streams() -> None:
    """Open closed stdin, stdout and stderr on /dev/null: else files opened later would get their descriptors."""
    for descriptor in range(3):
        with contextlib.suppress(OSError):
            os.fstat(descriptor)
            continue
        os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def _leave_at_once(status: int) -> NoReturn:
    """End a launcher whose ranks have all ended, without python's shutdown, which takes half a second or more."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(status)


def _main(arguments: list[str], *, owns_process: bool) -> int:
    parser = list_parser()
    if not arguments:
        parser.print_help()
        return ConfigurationError.exit_code
    try:
        validate_command(arguments[0])
        if arguments[0] not in COMMANDS:
            parser.parse_args(arguments)  # --help, --version, or a mistake: ends here
            parser.error(f"{arguments[0]}: a command comes first")
        name, *rest = arguments
        if name != "doctor":
            _ = evenstep.init  # loads the whole package and its backend: scripts in this process rely on both
        command = importlib.import_module(f"evenstep.cli.{name}")
        if owns_process and sys.stdout is None and name != "run":
            raise ConfigurationError(
                "standard output is closed, and would have the answer. Send it to /dev/null instead."
            )
        status: int = command.main(rest, **({"may_fork": owns_process} if name == "run" else {}))
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where an error can still be reported
        return status
    except EvenstepError as error:
        if not error.is_users_mistake:
            raise
        console.say(f"evenstep: {error}")
        # `run` ends with the status of its ranks. Other commands have a status of their own for a script that failed.
        return EXIT_SCRIPT_FAILED if isinstance(error, UsageError) and arguments[0] != "run" else error.exit_code
    except OSError as error:
        # Checkpoints are on disks that others change, and in object stores, which fail in other ways.
        if arguments[0] == "run" or (error.errno not in OF_THE_DISK and arguments[0] != "checkpoint"):
            raise
        if error.errno != errno.EPIPE:  # EPIPE: the reader of our output has seen enough
            where, done = error.filename or "standard output", "written" if error.errno in OF_THE_DISK else "used"
            console.say(f"evenstep: {where} can't be {done}: {error.strerror or error}.")
        if owns_process:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # discards output that is still buffered
        return EXIT_NOT_WRITTEN
    except KeyboardInterrupt:
        console.say("evenstep: interrupted")
        return 130
