"""`evenstep estimate`: how much memory a rank needs; nothing is allocated."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence

from evenstep.bench.predict import memory


def main(arguments: Sequence[str]) -> int:
    """Print the estimate; returns the exit status."""
    description = "How much memory a rank needs, and whether data parallelism is enough; nothing is allocated."
    parser = ArgumentParser(prog="evenstep estimate", description=description)
    memory.add_estimate_arguments(parser)
    return memory.estimate(parser.parse_args(arguments))
