"""`evenstep bench run`: measures a script on several numbers of replicas, and writes the report."""

from __future__ import annotations

import datetime
import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from evenstep.bench.measure.plan import default_replicas, validate_replicas
from evenstep.console import say
from evenstep.errors import ConfigurationError
from evenstep.health.telemetry import NUM_STEPS_KEPT

if TYPE_CHECKING:
    from evenstep.bench.measure.runs import Launch, Measured


def scaling(args: Namespace, launch: Launch | None = None) -> int:
    """Measure a script on several numbers of replicas, try remedies if that was asked for, and write the report.

    Args:
        args: Of the command line.
        launch: Starts the ranks; None: on this node.

    Raises:
        ConfigurationError: An argument makes no sense.
        UsageError: The script fails, or makes no steps.
    """
    from rich.console import Console

    from evenstep.bench.explain import page, plots
    from evenstep.bench.explain.report import build_report, print_report
    from evenstep.bench.measure.runs import Wish, measure, on_this_node
    from evenstep.bench.remedies.changes import validate_names
    from evenstep.bench.remedies.table import print_trials
    from evenstep.launcher.options.resources import look_at_host

    if args.warmup < 2:
        raise ConfigurationError(f"--warmup {args.warmup}: at least 2; in the first step the models are looked for.")
    if args.warmup + args.steps > NUM_STEPS_KEPT:
        raise ConfigurationError(
            f"--warmup {args.warmup} and --steps {args.steps}: at most {NUM_STEPS_KEPT} together are remembered."
        )
    launch = launch or on_this_node
    only = validate_names(args.only)
    if only is not None and not args.try_remedies:
        raise ConfigurationError("--only names changes for --try: give both, or neither.")
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
    mode = args.mode or ("weak" if args.try_remedies else "both")
    wish = Wish(
        args.script, tuple(args.arguments), replicas, mode, args.batch, args.warmup, args.steps, args.repeats,
        threads, args.device, float(args.limit),
    )  # fmt: skip
    if args.try_remedies and not args.mode:
        wish = replace(wish, replicas=tuple(dict.fromkeys((replicas[0], replicas[-1]))))
    began_at = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    measured = measure(wish, _say, launch)
    report = build_report(measured, version=sys.modules["evenstep"].__version__, began_at=began_at)
    if args.try_remedies:
        _try_remedies(measured, report, only, launch)
    (args.out / "report.json").write_text(json.dumps(report, indent=1))
    print_report(report, Console())
    if args.try_remedies:
        print_trials(report, Console())
    if plots.is_available():
        figures = plots.draw(report)
        for name, figure in figures.items():
            plots.save_png(figure, args.out / f"{name}.png")
        pictures = {name: plots.as_svg(figure, name) for name, figure in figures.items()}
        (args.out / "report.html").write_text(page.render(report, pictures))
        print(f"{args.out}/report.html", flush=True)  # noqa: T201
    return 0


def _try_remedies(measured: Measured, report: dict[str, Any], only: Sequence[str] | None, launch: Launch) -> None:
    from evenstep.bench.explain.report import case_of
    from evenstep.bench.measure.scaling import curve
    from evenstep.bench.remedies.table import add_trials
    from evenstep.bench.remedies.trials import try_changes

    name = "weak" if "weak" in measured.curves else next(iter(measured.curves))
    points = curve(measured.curves[name], measured.rounds)
    case = case_of(points[-1], divides_batch=name == "strong", base=points[0])
    add_trials(report, try_changes(measured.wish, points[-1].setting, case, _say, launch=launch, only=only))


def _say(line: str) -> None:
    say(f"evenstep: {line}")
