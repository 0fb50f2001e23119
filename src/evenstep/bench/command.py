"""`evenstep bench run` and `evenstep bench compare`: what the command line asks for becomes runs and an answer."""

from __future__ import annotations

import datetime
import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from evenstep.bench.measure.plan import default_replicas, validate_replicas
from evenstep.console import say
from evenstep.errors import ConfigurationError
from evenstep.health.telemetry import NUM_STEPS_KEPT

if TYPE_CHECKING:
    from evenstep.launcher.options.resources import Host


def scaling(args: Namespace) -> int:
    """Measure a script on several numbers of replicas, and write the report.

    Args:
        args: Of the command line.

    Raises:
        ConfigurationError: An argument makes no sense.
        UsageError: The script fails, or makes no steps.
    """
    from rich.console import Console

    from evenstep.bench.explain import plots
    from evenstep.bench.explain.report import build_report, print_report
    from evenstep.bench.measure.runs import Wish, measure
    from evenstep.launcher.options.resources import look_at_host

    _validate_steps(args)
    host = look_at_host()
    replicas = validate_replicas(args.nproc_per_node or default_replicas(_num_places(host, args.device)))
    # The same for every number of replicas: else one would have the whole host, and all of them a part each.
    threads = args.threads_per_rank or max(1, host.num_cores // replicas[-1])
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"--out {args.out}: {error.strerror}.") from None
    if not plots.is_available():
        say(f"evenstep: {plots.MISSING}")
    wish = Wish(
        args.script, tuple(args.arguments), replicas, args.mode, args.batch, args.warmup, args.steps, args.repeats,
        threads, args.device, float(args.limit),
    )  # fmt: skip
    began_at = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    measured = measure(wish, _say)
    report = build_report(measured, version=sys.modules["evenstep"].__version__, began_at=began_at)
    (args.out / "report.json").write_text(json.dumps(report, indent=1))
    print_report(report, Console())
    if plots.is_available():
        plots.draw_efficiency(report["curves"], args.out / "efficiency.png")
    print(f"{args.out}/report.json", flush=True)  # noqa: T201
    return 0


def compare(args: Namespace) -> int:
    """Run several scripts in alternating rounds, and print how fast each is and whether losses are the same.

    Args:
        args: Of the command line.

    Raises:
        ConfigurationError: An argument makes no sense.
        UsageError: A script fails, or makes no steps.
    """
    from rich.console import Console

    from evenstep.bench.compare import as_data, compare, print_compared
    from evenstep.bench.measure.runs import Wish
    from evenstep.launcher.options.resources import look_at_host

    if len(args.scripts) < 2:
        raise ConfigurationError(
            f"one script, {args.scripts[0]}: name those to compare it with. The same script twice shows how much runs "
            f"differ by themselves; `evenstep bench run` measures one."
        )
    _validate_steps(args)
    host = look_at_host()
    num_ranks = args.nproc_per_node or default_replicas(_num_places(host, args.device))[-1]
    threads = args.threads_per_rank or max(1, host.num_cores // num_ranks)
    wish = Wish(
        args.scripts[0], tuple(args.arguments), (num_ranks,), "strong", args.batch, args.warmup, args.steps,
        args.repeats, threads, args.device, float(args.limit),
    )  # fmt: skip
    found = compare(wish, args.scripts, _say)
    print_compared(found, wish, Console())
    if args.json is not None:
        Path(args.json).write_text(json.dumps(as_data(found, wish), indent=1))
    return 0


def _validate_steps(args: Namespace) -> None:
    if args.warmup < 2:
        raise ConfigurationError(f"--warmup {args.warmup}: at least 2; in the first step the models are looked for.")
    if args.warmup + args.steps > NUM_STEPS_KEPT:
        raise ConfigurationError(
            f"--warmup {args.warmup} and --steps {args.steps}: at most {NUM_STEPS_KEPT} together are remembered."
        )


def _num_places(host: Host, device: str | None) -> int:
    return host.num_gpus if host.num_gpus > 0 and device != "cpu" else host.num_cores


def _say(line: str) -> None:
    say(f"evenstep: {line}")
