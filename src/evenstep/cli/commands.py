"""The list of commands, the commands meant by other names, and the parser of all commands."""

from __future__ import annotations

import difflib
import importlib

import evenstep
from evenstep.cli.arguments import Parser
from evenstep.errors import ConfigurationError

COMMANDS = {  # each is a module beside this one, imported when the command is called
    "run": "start a training script on several ranks",
    "doctor": "find the usual mistakes of data-parallel training in a script",
    "verify": "check that a script takes the same steps on any number of ranks, and after a resume",
    "bench": "measure how well a script scales, and why not better; compare scripts",
    "convert": "make a training script for one process data-parallel",
    "checkpoint": "list, check and compare checkpoints; exchange them with plain torch files",
    "estimate": "how much memory a rank needs, and which parallelism is enough",
    "env": "print this host's hardware and software, for a bug report",
}
_MEANT = {  # names that other launchers and tools use
    **dict.fromkeys(("launch", "torchrun", "start", "exec", "train", "mpiexec", "mpirun", "srun"), "run"),
    **dict.fromkeys(("benchmark", "profile", "measure", "scale"), "bench"),
    **dict.fromkeys(("estimate-memory", "memory", "mem"), "estimate"),
    **dict.fromkeys(("check", "lint", "diagnose"), "doctor"),
    "test": "verify",
    "compare": "bench compare",
    **dict.fromkeys(("info", "report", "version"), "env"),
    **dict.fromkeys(("migrate", "to-ddp"), "convert"),
}

_EPILOG = """\
`evenstep COMMAND --help` shows the flags of a command.

exit status of every command: 0 if all is well; 1 if something was found: mistakes, differences; 2 if the script that is
examined fails; 78 if the command is wrong. `run` and `checkpoint` have more: see their --help."""


def validate_command(name: str) -> None:
    """Refuse a name that is no command.

    Raises:
        ConfigurationError: The name is no command; the message may suggest one.
    """
    if name.startswith("-") or name in COMMANDS:
        return
    close = difflib.get_close_matches(name, (*COMMANDS, *_MEANT), n=1)
    meant = [_MEANT.get(each, each).format(each) for each in close]
    guess = f" Did you mean evenstep {meant[0]}?" if meant else ""
    if name.endswith(".py"):
        guess = f" Did you mean evenstep run {name}?"
    raise ConfigurationError(f"{name} is no command.{guess} There are {', '.join(COMMANDS)}: see evenstep --help.")


def list_parser() -> Parser:
    """The parser that lists the commands; each command parses its own arguments."""
    parser = Parser(prog="evenstep", description=evenstep.__doc__, epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"evenstep {evenstep.__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", required=True, metavar="command")
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    return parser


def whole_parser() -> Parser:
    """The parser of all commands with their flags, for the documentation."""
    parser = list_parser()
    for name in COMMANDS:
        parser.sub_commands[name] = importlib.import_module(f"evenstep.cli.{name}").build_parser()
    return parser
