"""`evenstep checkpoint`: look at checkpoints, compare them, exchange them with other programs."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from typing import Any

from evenstep.checkpoint import exchange, tools
from evenstep.cli.arguments import Parser, number, size
from evenstep.errors import CheckpointError


def main(arguments: Sequence[str]) -> int:
    """Run one action on checkpoints; returns the exit status."""
    return _act(build_parser().parse_args(arguments))


def build_parser() -> Parser:
    """The parser of the arguments after `evenstep checkpoint`."""
    description = "Look at checkpoints, compare them, exchange them with other programs."
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
    exported = action("export", "write objects to files of torch, safetensors or torch.distributed.checkpoint")
    for each in (listed, shown, verified):
        each.add_argument("--json", action="store_true", help="print JSON, for programs")
    for each in (listed, shown, verified, exported):
        each.add_argument("directory", help="of a run, or of one checkpoint")
    compared = action(
        "diff", "the tensors in which two checkpoints differ; exit status 1 if they do", step="of the first"
    )
    compared.add_argument("--second-step", type=number, metavar="N", help="of the second")
    compared.add_argument("first", help="directory of a run, or of one checkpoint")
    compared.add_argument("second", help="the same")
    exported.add_argument("file", help="a new file: of safetensors if it ends so, else one that torch.load reads")
    exported.add_argument(
        "--object", metavar="NAME", help="only the state of this object (default: of all; in safetensors: the model)"
    )
    form = exported.add_mutually_exclusive_group()
    form.add_argument(
        "--max-shard-size",
        type=size,
        metavar="SIZE",
        help="make a directory with safetensors of at most this size, 5GB or 500MB, and their index for model hubs",
    )
    form.add_argument("--dcp", action="store_true", help="make a directory of torch.distributed.checkpoint")
    imported = action(
        "import", "make a checkpoint out of files of other programs", step="number it so; else as the file says"
    )
    imported.add_argument(
        "file",
        help="of torch.save or safetensors; or a directory of safetensors or torch.distributed.checkpoint. Only "
        "tensors and plain data are read",
    )
    imported.add_argument("directory", help="of the run to make")
    imported.add_argument("--object", metavar="NAME", help="the file is the state of this object")
    unlocked = action("unlock", "remove the lock of a job that is gone, and can't be seen from here", step="")
    unlocked.add_argument("directory", help="of the run")
    return parser


def _act(args: Namespace) -> int:
    if args.action == "list":
        if args.json:
            return _print_json(tools.list_checkpoints(args.directory))
        return _print(tools.list_lines(args.directory))
    if args.action == "show":
        if args.json:
            return _print_json(tools.show_checkpoint(args.directory, args.step))
        return _print(tools.show_lines(args.directory, args.step))
    if args.action == "verify":
        findings = tools.verify(args.directory, args.step)
        if args.json:
            _print_json(findings)
        else:
            _print(line for folder, lines in findings.items() for line in lines or [f"{folder}: whole"])
        return CheckpointError.exit_code if any(findings.values()) else 0
    if args.action == "diff":
        lines = tools.difference_lines(args.first, args.second, args.step, args.second_step)
        _print(lines or ["no difference"])
        return 1 if lines else 0
    if args.action == "export":
        shown = exchange.export(
            args.directory,
            args.file,
            args.step,
            args.object,
            max_shard_bytes=args.max_shard_size,
            as_dcp=args.dcp,
        )
        return _print([shown])
    if args.action == "unlock":
        return _print([tools.unlock(args.directory)])
    return _print([exchange.import_file(args.file, args.directory, args.object, args.step)])


def _print_json(content: Any) -> int:
    return _print([json.dumps(content, indent=2)])


def _print(lines: Iterable[str]) -> int:
    for line in lines:
        print(line, flush=True)
    return 0
