"""`evenstep bench`: measures a script, or runs the sub-command that the first argument names."""

from __future__ import annotations

import datetime
import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from evenstep.bench.measure.plan import default_replicas, validate_replicas
from evenstep.console import say
from evenstep.errors import ConfigurationError
from evenstep.health.telemetry import NUM_STEPS_KEPT

if TYPE_CHECKING:
    from evenstep.bench.measure.runs import Launch, Measured

_SUBCOMMANDS = {
    "--network": ("network", "latency and bandwidth of the world's transport by size, as in nccl-tests"),
    "--predict": ("predict", "a measured step, simulated on ranks that one doesn't have"),
    "--memory": ("memory", "what a script's model, optimizer and activations take, by way of sharding"),
}
SUBCOMMANDS = tuple(_SUBCOMMANDS)


def help_lines() -> list[str]:
    """One line for each sub-command."""
    return [f"{flag:<14}{text}" for flag, (_, text) in _SUBCOMMANDS.items()]


def parser_of(flag: str) -> ArgumentParser:
    """The parser of the arguments after one of `SUBCOMMANDS`."""
    _, text = _SUBCOMMANDS[flag]
    # Without abbreviations: argparse would look for them among a script's own arguments, too.
    description = text[0].upper() + text[1:] + "."
    parser = ArgumentParser(prog=f"evenstep bench {flag}", description=description, allow_abbrev=False)
    _module_of(flag).add_arguments(parser)
    return parser


def run_subcommand(arguments: Sequence[str]) -> int:
    """Run `evenstep bench` with one of `SUBCOMMANDS` as its first argument, and return the exit status.

    Args:
        arguments: All that follows "bench".

    Raises:
        ConfigurationError: A flag or a file makes no sense.
    """
    flag, *rest = arguments
    status: int = _module_of(flag).main(parser_of(flag).parse_args(rest))
    return status


def _module_of(flag: str) -> Any:
    return import_module(f"evenstep.bench.predict.{_SUBCOMMANDS[flag][0]}")  # imported late: only one is needed


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

    if args.script is None:
        raise ConfigurationError("evenstep bench: name a script. See `evenstep bench --help`.")
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
    replicas = validate_replicas(args.replicas or default_replicas(places))
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
