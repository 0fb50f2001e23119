"""`evenstep bench`: its arguments, and what is called."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from evenstep.bench.modes import help_lines
from evenstep.bench.plan import MODES, default_replicas, validate_replicas
from evenstep.errors import ConfigurationError
from evenstep.health.telemetry import NUM_STEPS_KEPT

_DESCRIPTION = """\
Measure how well a script scales, and say why not better. The script runs unchanged on 1, 2, 4, ... replicas, in rounds;
every run ends by itself after some steps. What it saves goes elsewhere. Writes report.json, report.html and pictures.
"""


def add_bench(commands: Any) -> None:
    """Add the subcommand to the command line."""
    parser: ArgumentParser = commands.add_parser(
        "bench",
        help="how well a script scales on this host, and why not better",
        description=_DESCRIPTION,
        epilog="besides, each with its own --help:\n  " + "\n  ".join(help_lines()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # argparse would look for them behind the script, too
    )
    parser.add_argument("--replicas", type=_numbers, metavar="1,2,4", help="default: up to the number of GPUs or cores")
    parser.add_argument(
        "--mode", choices=MODES, default="both", help="batch that grows with the replicas, or is divided"
    )
    parser.add_argument(
        "--batch", type=_positive, metavar="N", help="samples of a step on the fewest replicas; default: the script's"
    )
    parser.add_argument("--steps", type=_positive, default=30, metavar="N", help="counted steps of a run; 30")
    parser.add_argument("--warmup", type=_positive, default=5, metavar="N", help="steps before those, at least 2; 5")
    parser.add_argument("--repeats", type=_positive, default=3, metavar="N", help="rounds; 3")
    parser.add_argument(
        "--threads-per-rank", type=_positive, metavar="N", help="of every rank; default: cores by the most replicas"
    )
    parser.add_argument("--device", help="cpu, cuda, or cuda:0 for all; default: GPUs if there are any")
    parser.add_argument("--limit", type=_positive, default=900, metavar="S", help="seconds for one run; 900")
    parser.add_argument("--out", type=Path, default=Path("bench-report"), metavar="DIR", help="bench-report")
    parser.add_argument("script", nargs="?", help="the training script: with evenstep, or torch's own DDP")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    parser.set_defaults(call=scaling)


def scaling(args: Namespace) -> int:
    """Measure a script on several numbers of replicas, and write the report.

    Raises:
        ConfigurationError: An argument makes no sense.
        UsageError: The script fails, or makes no steps.
    """
    from rich.console import Console

    from evenstep.bench import page, plots
    from evenstep.bench.report import build_report, print_report
    from evenstep.bench.runs import Wish, measure
    from evenstep.launcher.cores import look_at_host

    if args.script is None:
        raise ConfigurationError("evenstep bench: name a script. See `evenstep bench --help`.")
    if args.warmup < 2:
        raise ConfigurationError(f"--warmup {args.warmup}: at least 2; in the first step the models are looked for.")
    if args.warmup + args.steps > NUM_STEPS_KEPT:
        raise ConfigurationError(
            f"--warmup {args.warmup} and --steps {args.steps}: at most {NUM_STEPS_KEPT} together are remembered."
        )
    host = look_at_host()
    uses_gpus = host.num_gpus > 0 and args.device != "cpu"
    places = host.num_gpus if uses_gpus else host.num_cores
    replicas = validate_replicas(args.replicas or default_replicas(places))
    # The same for every number of replicas: else one would have the whole host, and all of them a part each.
    threads = args.threads_per_rank or max(1, host.num_cores // replicas[-1])
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"--out {args.out}: {error.strerror}.") from None
    if not plots.is_available():
        print(f"evenstep: {plots.MISSING}", file=sys.stderr, flush=True)  # noqa: T201
    wish = Wish(
        args.script, tuple(args.arguments), replicas, args.mode, args.batch, args.warmup, args.steps, args.repeats,
        threads, args.device, float(args.limit),
    )  # fmt: skip
    began_at = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    measured = measure(wish, lambda line: print(f"evenstep: {line}", file=sys.stderr, flush=True))  # noqa: T201
    report = build_report(measured, version=sys.modules["evenstep"].__version__, began_at=began_at)
    (args.out / "report.json").write_text(json.dumps(report, indent=1))
    print_report(report, Console())
    if plots.is_available():
        figures = plots.draw(report)
        for name, figure in figures.items():
            plots.save_png(figure, args.out / f"{name}.png")
        pictures = {name: plots.as_svg(figure, name) for name, figure in figures.items()}
        (args.out / "report.html").write_text(page.render(report, pictures))
        print(f"{args.out}/report.html", flush=True)  # noqa: T201
    return 0


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: whole numbers with commas, as in 1,2,4") from None


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)
