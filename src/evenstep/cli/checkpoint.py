"""`evenstep checkpoint`: look at checkpoints, compare them, exchange them with plain torch files."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence

from evenstep.checkpoint import tools
from evenstep.cli.arguments import Parser, number
from evenstep.errors import CheckpointError


def main(arguments: Sequence[str]) -> int:
    """Run one action on checkpoints; returns the exit status.

    Raises:
        CheckpointError: A directory can't be read or written.
    """
    args = build_parser().parse_args(arguments)
    try:
        return _act(args)
    except BrokenPipeError:
        raise
    except OSError as error:  # of a directory that can't be read, a disk that is full
        remedy = " Run this as a user who may read and write there." if isinstance(error, PermissionError) else ""
        raise CheckpointError(f"{error.filename or args.action}: {error.strerror or error}.{remedy}") from None


def build_parser() -> Parser:
    """The parser of what follows `evenstep checkpoint`."""
    description = "Look at checkpoints, compare them, exchange them with plain torch files."
    parser = Parser(prog="evenstep checkpoint", description=description)
    actions = parser.add_subparsers(title="actions", dest="action", required=True, metavar="action")

    def action(name: str, text: str, *, step: str = "which one (default: the newest)") -> ArgumentParser:
        added: ArgumentParser = actions.add_parser(name, help=text, description=text.capitalize() + ".")
        if step:
            added.add_argument("--step", type=number, metavar="N", help=step)
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
    compared.add_argument("--second-step", type=number, metavar="N", help="of the second")
    compared.add_argument("first", help="directory of a run, or of one checkpoint")
    compared.add_argument("second", help="the same")
    exported.add_argument("file", help="a new file")
    exported.add_argument("--object", metavar="NAME", help="only the state of this object (default: of all)")
    imported = action(
        "import", "make a checkpoint out of a file of torch.save", step="number it so; else as the file says"
    )
    imported.add_argument("file", help="tensors and plain data only: it is read with weights_only=True")
    imported.add_argument("directory", help="of the run to make")
    imported.add_argument("--object", metavar="NAME", help="the file is the state of this object")
    unlocked = action("unlock", "remove the lock of a job that is gone, and can't be seen from here", step="")
    unlocked.add_argument("directory", help="of the run")
    return parser


def _act(args: Namespace) -> int:
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
    if args.action == "unlock":
        return _print([tools.unlock(args.directory)])
    return _print([tools.import_file(args.file, args.directory, args.object, args.step)])


def _print(lines: Iterable[str]) -> int:
    for line in lines:
        print(line, flush=True)
    return 0
