"""`evenstep doctor`: finds mistakes in a training script."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import evenstep
from evenstep import console
from evenstep.cli.arguments import Parser, add_script, at_least_1, names
from evenstep.ground.host.named_files import write_report
from evenstep.launcher.options.ranks import add_nproc_per_node
from evenstep.tools.doctor.examination import chosen_rules, examine
from evenstep.tools.doctor.fixes import fix
from evenstep.tools.doctor.report import explained
from evenstep.tools.doctor.rules import all_rules

_DESCRIPTION = """\
Look for the usual mistakes of data-parallel training: every rank trains on the same samples, set_epoch is forgotten,
all ranks print and save, a collective is called on some ranks only, the accumulation divisor is wrong, and so on. The
script is read, then run unchanged for some steps on two ranks; what it would save is kept apart. Where that finds
nothing, it is compared with one process, as by evenstep verify. It may use torch's own classes, accelerate, Lightning
Fabric, or evenstep's. Each finding says what was seen, what it costs and how to mend it."""
_OWN = ("--no-run", "--no-verify", "--fix", "--select", "--ignore", "--json", "--sarif")
_EPILOG = """\
examples:
  evenstep doctor train.py --epochs 1              what follows the script belongs to the script
  evenstep doctor --no-run train.ipynb             only read it
  evenstep doctor --select data,EV401 train.py     a group of rules, and one rule
  evenstep doctor --sarif doctor.sarif train.py    for code review tools
  evenstep doctor --fix --no-run train.py          write the mends that are certain
  evenstep doctor --explain EV101                  the rule's page

A comment in a line switches rules off there: # evenstep: ignore[EV305], or all: # evenstep: ignore

exit status: 0 without findings (notes may be there), 1 with findings, 2 if the script itself fails
before its first step and nothing was found, 78 if the command is wrong, or the script isn't python."""


def main(arguments: Sequence[str]) -> int:
    """Examine a script and print its mistakes; returns the exit status."""
    args = build_parser().parse_args(arguments)
    if args.fix:
        diff = fix(args.script, chosen_rules(args.select, args.ignore))
        print(diff or f"{args.script}: no mend that is certain, so nothing was changed.")
    report = examine(
        args.script,
        args.arguments,
        runs=args.runs,
        compares=args.compares,
        num_ranks=args.nproc_per_node,
        num_steps=args.steps,
        select=args.select,
        ignore=args.ignore,
        say=console.say,
    )
    report.show(console.on_stdout(soft_wrap=True))
    misplaced = [each for each in args.arguments if each in _OWN]
    if misplaced:
        console.say(
            f"evenstep: {misplaced[0]} stands behind the script, so it was given to the script. An option of doctor "
            f"stands before it: evenstep doctor {misplaced[0]} ... {args.script}"
        )
    write_report(args.json, report.as_json() + "\n")
    write_report(args.sarif, report.as_sarif(evenstep.__version__) + "\n")
    return report.status


class _Explain(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: Any = None) -> None:
        for rule in sorted(chosen_rules([values], [])):
            sys.stdout.write(explained(all_rules()[rule]))
        sys.stdout.flush()
        parser.exit()


def build_parser() -> Parser:
    """The parser of the arguments after `evenstep doctor`."""
    parser = Parser(
        prog="evenstep doctor",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument("--no-run", dest="runs", action="store_false", help="only read the script")
    parser.add_argument(
        "--no-verify", dest="compares", action="store_false", help="don't compare it with one process at the end"
    )
    parser.add_argument(
        "--fix", action="store_true", help="first mend the script where that is certain, and show what was changed"
    )
    add_nproc_per_node(parser, type=at_least_1, default=2, help="ranks of the run (default: 2)")
    parser.add_argument("--steps", type=at_least_1, default=12, metavar="N", help="steps of the run (default: 12)")
    parser.add_argument(
        "--select", type=names, default=(), metavar="RULE,...", help="only these rules or groups (default: all)"
    )
    parser.add_argument(
        "--ignore", type=names, default=(), metavar="RULE,...", help="not these rules or groups (default: none)"
    )
    parser.add_argument("--explain", action=_Explain, metavar="RULE", help="print what a rule is about, and end")
    parser.add_report("json", "write the findings there, for programs")
    parser.add_report("sarif", "write them as SARIF 2.1.0, for code review tools")
    add_script(parser, help="a python file, or a notebook, which is only read", rest_help="of the script")
    return parser
