"""Starting the runs of a measurement, one after the other, and reading what their ranks have left."""

from __future__ import annotations

import shutil
import statistics
import subprocess
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from evenstep import checks
from evenstep.checks import counted
from evenstep.errors import ConfigurationError, UsageError
from evenstep.ground.environment import Measurement, with_settings
from evenstep.named_files import validate_script
from evenstep.temporary import private_directory
from evenstep.tools.bench.plan import Setting, plan_settings, too_small
from evenstep.tools.bench.records import RankRecord, read_record
from evenstep.tools.bench.scaling import Run
from evenstep.tools.observing.launch import Observed, launched
from evenstep.tools.observing.thresholds import MANY_ELSEWHERE

_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True)
class Wish:
    """What is to be measured.

    Attributes:
        script: The user's.
        arguments: Its own.
        replicas: Numbers of ranks, in order.
        mode: "weak", "strong" or "both".
        batch: Samples of a step on the fewest replicas; None: as the script says.
        num_warmup: Steps that aren't counted.
        num_steps: Steps that are.
        num_rounds: How often each setting is measured.
        num_threads: Of every rank, however many there are.
        device: As for `evenstep run`; None: GPUs if there are any.
        limit_s: A run that takes longer is ended.
        watches_losses: Whether losses are recorded, and not where the time goes. A script that sets no seed begins with
            one then.
    """

    script: str
    arguments: tuple[str, ...]
    replicas: tuple[int, ...]
    mode: str
    batch: int | None
    num_warmup: int
    num_steps: int
    num_rounds: int
    num_threads: int
    device: str | None = None
    limit_s: float = 900.0
    watches_losses: bool = False


@dataclass(frozen=True)
class Measured:
    """What came of it.

    Attributes:
        wish: The request.
        curves: The settings of each curve.
        rounds: The runs of each round.
        remarks: What a reader of the figures should know.
    """

    wish: Wish
    curves: dict[str, tuple[Setting, ...]]
    rounds: tuple[dict[Setting, Run], ...]
    remarks: tuple[str, ...]


def measure(wish: Wish, say: Callable[[str], None], traces: Path) -> Measured:
    """Run everything.

    Args:
        wish: What is to be measured.
        say: Told what is going on, a line each.
        traces: Directory of what the profiler has seen in the last run on the most replicas.

    Raises:
        ConfigurationError: The script isn't there, or a batch can't be divided.
        UsageError: A run failed, made no steps, or took too long.
    """
    validate_script(wish.script)
    with private_directory("bench") as root:
        batch, done = wish.batch, {}
        if batch is None:
            # What the script itself asks for on the fewest replicas is what the others are compared with.
            say(f"round 1 of {wish.num_rounds}: {counted(wish.replicas[0], 'replica')}, {wish.script} as it is")
            first = run_once(Setting(wish.replicas[0], None), wish, root / "first", traces)
            batch = first.loader_batch if first.records[0].facts.has_loader else 0
        # Where nothing divides the batch there is no strong scaling.
        curves = plan_settings(wish.replicas, wish.mode if batch else "weak", batch or None)
        problem = too_small(curves)
        if problem is not None and wish.mode == "both":
            curves = plan_settings(wish.replicas, "weak", batch)  # it always fits; `remarks` says why it's alone
        elif problem is not None:
            raise ConfigurationError(f"evenstep bench: {problem}.")
        main = next(iter(curves.values()))
        if wish.batch is None:
            done[main[0]] = Run(main[0], first.records)
        settings = dict.fromkeys(setting for curve in curves.values() for setting in curve)
        jobs = {setting: (describe(setting), setting, wish) for setting in settings}
        rounds = run_rounds(jobs, wish.num_rounds, say, root, done=done, traces={main[-1]: traces})
    return Measured(wish, curves, tuple(rounds), remarks(curves, rounds, wish))


def run_rounds(
    jobs: Mapping[_Key, tuple[str, Setting, Wish]],
    num_rounds: int,
    say: Callable[[str], None],
    root: Path,
    *,
    done: Mapping[_Key, Run] | None = None,
    traces: Mapping[_Key, Path] | None = None,
) -> list[dict[_Key, Run]]:
    """The runs of each round: each job once, forward in one round and backward in the next one; [Note: rounds].

    Args:
        jobs: What is run: in words, its setting, and the rest.
        num_rounds: How often.
        say: Told what is going on, a line each.
        root: An empty directory for what ranks leave.
        done: Runs of the first round that were made before.
        traces: For which jobs the profiler's traces are kept, and where.

    Raises:
        UsageError: A run failed, made no steps, or took too long.
    """
    rounds: list[dict[_Key, Run]] = []
    for number in range(num_rounds):
        runs = dict(done or {}) if number == 0 else {}
        for place, key in list(enumerate(jobs))[:: -1 if number % 2 else 1]:
            if key not in runs:
                words, setting, wish = jobs[key]
                say(f"round {number + 1} of {num_rounds}: {words}")
                runs[key] = run_once(setting, wish, root / f"round-{number}-{place}", (traces or {}).get(key))
        rounds.append(runs)
    return rounds


def remarks(
    curves: dict[str, tuple[Setting, ...]], rounds: Sequence[dict[Setting, Run]], wish: Wish
) -> tuple[str, ...]:
    """What a reader of the figures should know. Pure."""
    found = []
    if len(rounds) == 1:
        found.append(
            "one round: how much rounds differ is unknown, and a finding may be chance; --repeats 3 measures it"
        )
    every = [run for runs in rounds for run in runs.values()]
    records = [record for run in every for record in run.records]
    found += ended_early("the script", records, wish.num_steps)
    found += [
        f"on {counted(run.setting.num_replicas, 'replica')} a batch had {run.loader_batch} samples and not the "
        f"{run.setting.global_batch_size} that were asked for: the script decides that itself, or the data set is small"
        for run in every
        if run.setting.global_batch_size not in (None, run.loader_batch)
    ][:1]
    if wish.mode != "weak" and "strong" not in curves:
        batch, most = curves["weak"][0].global_batch_size, curves["weak"][-1].num_replicas
        found.append(
            "no loader was seen, so every replica has the batch that the script makes: weak scaling alone"
            if batch is None
            else f"a batch of {batch} samples can't be divided over {most} replicas: weak scaling alone; both need a "
            f"larger --batch"
        )
    if not any(any(record.rows) for record in records):
        found.append("no tensor went into a model, so a sample is a step here")
    found += others_busy(every)
    if any(not record.facts.wrapper and record.world_size > 1 for record in records):
        found.append(
            "no wrapped model was found: the replicas train apart, or exchange gradients in a way that isn't known "
            "here, and communication can't be told from computing"
        )
    if any(run.records[0].facts.device == "cuda" and not run.is_seen_on_device for run in every):
        found.append(
            "torch's profiler saw no collectives on the GPUs, so the parts of a step are the host's, when work was "
            "queued and not when it was done: communication can't be told from computing"
        )
    return (*found, *not_written(records))


def ended_early(script: str, records: Sequence[RankRecord], num_steps: int) -> list[str]:
    """A remark if a script made fewer steps than were to be counted. Pure."""
    fewest = min(record.num_steps for record in records)
    if fewest >= num_steps:
        return []
    return [f"{script} ended by itself after {fewest} of the {num_steps} steps that were to be counted"]


def others_busy(runs: Sequence[Run]) -> list[str]:
    """A remark if other programs kept cores busy, or if nobody knows. Pure."""
    if any(run.records[0].usage.host_s is None for run in runs):
        return [checks.needs("noticing other programs that keep cores busy", "psutil", "bench")]
    cores = statistics.median([run.cores_elsewhere for run in runs])
    if cores <= MANY_ELSEWHERE:
        return []
    return [
        f"other programs kept {cores:.1f} cores of this host busy, and what is told as contention, imbalance and "
        f"communication may be theirs: measure again when it is quiet"
    ]


def not_written(records: Sequence[RankRecord]) -> list[str]:
    """A remark on what scripts wanted to save. Pure."""
    saved = sorted({path for record in records for path in record.saved})
    return [f"not written, because this was a measurement: {', '.join(saved[:5])}"] if saved else []


def run_once(setting: Setting, wish: Wish, place: Path, traces: Path | None = None) -> Run:
    """One run, and what its ranks have left.

    Args:
        setting: Replicas and batch.
        wish: The rest.
        place: A directory that doesn't exist yet; the ranks leave their records in it.
        traces: Where the profiler's traces go; None: nowhere.

    Raises:
        UsageError: It failed, made no steps, or took too long.
    """
    place.mkdir()
    asked = Measurement(
        str(place), wish.num_warmup, wish.num_steps, setting.global_batch_size, setting.growth, wish.watches_losses
    )
    observed = Observed(
        "evenstep.tools.bench.probe", wish.script, wish.arguments, setting.num_replicas, wish.device, wish.num_threads
    )
    who = f"{describe(setting)}: {wish.script}"
    with launched(observed, place, with_settings(measurement=asked)) as made:
        try:
            status = made.process.wait(wish.limit_s)
        except subprocess.TimeoutExpired:
            raise UsageError(
                f"{who}: not over after {wish.limit_s:g} s. Does the script step a torch optimizer? Fewer --steps, or "
                f"a longer --limit, if it does. It said:\n{made.said()}"
            ) from None
    if status != 0:
        raise UsageError(f"{who} failed with status {status}. It said:\n{made.said()}")
    try:
        run = Run(setting, tuple(read_record(place / f"rank-{rank}.json") for rank in range(setting.num_replicas)))
    except UsageError as error:
        raise UsageError(f"{who}: {error}") from None
    if min(record.num_steps for record in run.records) < 1:
        steps = min(len(record.steps_ns) for record in run.records)
        raise UsageError(
            f"{who} ended after {steps} steps, and {wish.num_warmup} are warm-up. Give it more to do, or use a smaller "
            f"--warmup (at least 2)."
        )
    if traces is not None:
        for trace in place.glob("trace-*"):
            shutil.copy(trace, traces)
    return run


def describe(setting: Setting) -> str:
    """A setting in words."""
    batch = "" if setting.global_batch_size is None else f", batches of {setting.global_batch_size} samples"
    return f"{counted(setting.num_replicas, 'replica')}{batch}"
