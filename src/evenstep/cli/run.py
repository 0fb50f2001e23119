"""`evenstep run`: start a script on several ranks. It has torchrun's flags and more: `launcher.options.flags`."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence

from evenstep.launcher import run
from evenstep.launcher.options.flags import make_parser
from evenstep.launcher.spawn import script_runner

# Imported here, before the zygote is forked, so that forked ranks have it.
run_rank = script_runner.main


def main(arguments: Sequence[str], *, may_fork: bool = False) -> int:
    """Run the command and return its exit status.

    Args:
        arguments: The arguments after `evenstep run`.
        may_fork: Ranks may be forked from this process.

    Raises:
        BecomeRank: Raised in forked ranks; the caller then calls `run_rank`, with nothing else on the stack.
    """
    return run.run(arguments, may_fork=may_fork)


def build_parser() -> ArgumentParser:
    """The parser of the arguments after `evenstep run`."""
    return make_parser()
