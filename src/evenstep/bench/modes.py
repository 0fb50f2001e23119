"""What `evenstep bench` does besides running a script: --network, --predict, --memory, --published."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from importlib import import_module
from typing import Any

_MODES = {
    "--network": ("network", "latency and bandwidth of the world's transport, by size, as nccl-tests measure them"),
    "--predict": ("predict", "a measured step, simulated on ranks that one doesn't have"),
    "--memory": ("memory", "what a script's model, optimizer and activations take, and who would need how much"),
    "--published": ("published", "cases that others have measured, simulated from data sheets"),
}
MODES = tuple(_MODES)


def parser_of(flag: str) -> ArgumentParser:
    """The parser of what comes after one of `MODES`."""
    module, text = _MODES[flag]
    # Without abbreviations: argparse would look for them among a script's own arguments, too.
    description = text[0].upper() + text[1:] + "."
    parser = ArgumentParser(prog=f"evenstep bench {flag}", description=description, allow_abbrev=False)
    _mode(module).add_arguments(parser)
    return parser


def run_mode(arguments: Sequence[str]) -> int:
    """Run `evenstep bench` with one of `MODES` as its first argument, and return the exit status.

    Args:
        arguments: What comes after "bench".

    Raises:
        ConfigurationError: A flag or a file makes no sense.
    """
    flag, *rest = arguments
    status: int = _mode(_MODES[flag][0]).main(parser_of(flag).parse_args(rest))
    return status


def _mode(module: str) -> Any:
    return import_module(f"evenstep.bench.{module}")  # it imports what it needs


def help_lines() -> list[str]:
    """One line for each mode."""
    return [f"{flag:<14}{text}" for flag, (_, text) in _MODES.items()]
