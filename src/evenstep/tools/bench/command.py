"""`evenstep bench run` measures a script on several numbers of replicas. `bench compare` compares several scripts."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from typing import TYPE_CHECKING

from evenstep.console import on_stdout, say
from evenstep.errors import ConfigurationError
from evenstep.ground.health.telemetry import NUM_STEPS_KEPT
from evenstep.ground.host.named_files import write_report
from evenstep.tools.bench.plan import NUM_WARMUP, default_replicas, validate_replicas

if TYPE_CHECKING:
    from evenstep.launcher.options.resources import Host
    from evenstep.tools.bench.runs import Wish


def scaling(args: Namespace) -> int:
    """Measure a script on several numbers of replicas, and write the report.

    Args:
        args: The parsed command line.

    Raises:
        ConfigurationError: An argument makes no sense.
        UsageError: The script fails, or makes no steps.
    """
    from evenstep.launcher.options.resources import look_at_host
    from evenstep.tools.bench.report import build_report, print_report
    from evenstep.tools.bench.runs import measure

    host = look_at_host()
    replicas = validate_replicas(args.nproc_per_node or default_replicas(_count_places(host, args.device)))
    # The same number of threads for every number of replicas. Otherwise a single replica would have the whole host.
    wish = _wish(args, replicas, host.num_cores, has_strong=args.strong)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"--out {args.out}: {error.strerror}.") from None
    for trace in args.out.glob("trace-*"):
        trace.unlink()
    measured = measure(wish, _say, args.out)
    report = build_report(measured, sys.modules["evenstep"].__version__)
    write_report(args.out / "report.json", json.dumps(report, indent=1))
    print_report(report, on_stdout())
    print(f"written: {args.out}/report.json and, beside it, traces for Perfetto", flush=True)  # noqa: T201
    return 0


def compare(args: Namespace) -> int:
    """Run scripts in alternating rounds, and print the times of their steps and whether their losses are equal.

    Args:
        args: The parsed command line.

    Raises:
        ConfigurationError: An argument makes no sense.
        UsageError: A script fails, or makes no steps.
    """
    from evenstep.launcher.options.resources import look_at_host
    from evenstep.tools.bench.compare import as_data, remarks, run_all, summarise, table, validate_scripts, verdicts

    names = validate_scripts(args.scripts)
    host = look_at_host()
    num_ranks = args.nproc_per_node or _count_places(host, args.device)
    wish = _wish(args, (num_ranks,), host.num_cores, watches_losses=True)
    rounds = run_all(wish, args.scripts, names, _say)
    sides = summarise(names, rounds)
    told = remarks(wish, sides, rounds)
    write_report(args.json, json.dumps(as_data(sides, told, wish), indent=1))
    console = on_stdout()
    console.print(table(sides, wish))
    for line in [*verdicts(sides), *(f"note: {remark}" for remark in told)]:
        console.print(line, highlight=False, markup=False)
    return 0


def _wish(args: Namespace, replicas: tuple[int, ...], num_cores: int, **more: bool) -> Wish:
    from evenstep.tools.bench.runs import Wish

    if NUM_WARMUP + args.steps > NUM_STEPS_KEPT:
        raise ConfigurationError(f"--steps {args.steps}: at most {NUM_STEPS_KEPT - NUM_WARMUP} are remembered.")
    script = args.script if "script" in args else args.scripts[0]
    threads = max(1, num_cores // replicas[-1])
    return Wish(script, tuple(args.arguments), replicas, args.steps, args.rounds, threads, args.device, **more)


def _count_places(host: Host, device: str | None) -> int:
    """The number of GPUs if there are any and `--device` allows them, else of cores."""
    return host.num_gpus if host.num_gpus > 0 and device != "cpu" else host.num_cores


def _say(line: str) -> None:
    say(f"evenstep: {line}")
