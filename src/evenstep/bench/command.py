"""`evenstep bench run`: measures a script on several numbers of replicas, and writes the report."""

from __future__ import annotations

import datetime
import json
import sys
from argparse import Namespace

from evenstep.bench.measure.plan import default_replicas, validate_replicas
from evenstep.console import say
from evenstep.errors import ConfigurationError
from evenstep.health.telemetry import NUM_STEPS_KEPT


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

    if args.warmup < 2:
        raise ConfigurationError(f"--warmup {args.warmup}: at least 2; in the first step the models are looked for.")
    if args.warmup + args.steps > NUM_STEPS_KEPT:
        raise ConfigurationError(
            f"--warmup {args.warmup} and --steps {args.steps}: at most {NUM_STEPS_KEPT} together are remembered."
        )
    host = look_at_host()
    uses_gpus = host.num_gpus > 0 and args.device != "cpu"
    places = host.num_gpus if uses_gpus else host.num_cores
    replicas = validate_replicas(args.nproc_per_node or default_replicas(places))
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


def _say(line: str) -> None:
    say(f"evenstep: {line}")
