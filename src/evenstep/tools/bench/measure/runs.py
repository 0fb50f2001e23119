"""Starting the runs of a measurement, one after the other, and reading what their ranks have left."""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from evenstep import checks
from evenstep.checks import counted
from evenstep.errors import ConfigurationError, UsageError
from evenstep.ground.environment import Measurement, with_settings
from evenstep.named_files import validate_script
from evenstep.temporary import private_directory
from evenstep.tools.bench.measure.plan import Setting, in_order, plan_settings, too_small
from evenstep.tools.bench.measure.records import RankRecord, read_record
from evenstep.tools.bench.measure.scaling import Run, cores_elsewhere
from evenstep.tools.observing.thresholds import MANY_ELSEWHERE

_LONGEST_TAIL = 4000
_STOPS_WITHIN_S = 30.0


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
        watches_losses: Whether losses are recorded. A script that sets no seed begins with one then.
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


def measure(wish: Wish, say: Callable[[str], None]) -> Measured:
    """Run everything.

    Args:
        wish: What is to be measured.
        say: Told what is going on, a line each.

    Raises:
        ConfigurationError: The script isn't there, or a batch can't be divided.
        UsageError: A run failed, made no steps, or took too long.
    """
    validate_script(wish.script)
    with private_directory("bench") as root:
        batch = wish.batch
        first: Run | None = None
        if batch is None:
            # What the script itself asks for on the fewest replicas is what the others are compared with.
            say(f"round 1 of {wish.num_rounds}: {counted(wish.replicas[0], 'replica')}, {wish.script} as it is")
            first = run_once(Setting(wish.replicas[0], None), wish, root / "first")
            batch = first.loader_batch
        if first is not None and not (first.records[0].facts.has_loader and batch):
            # Nothing divides the batch, so there is no strong scaling.
            curves = plan_settings(wish.replicas, "weak", None)
        else:
            curves = plan_settings(wish.replicas, wish.mode, batch)
        problem = too_small(curves)
        if problem is not None and wish.mode == "both":
            curves = plan_settings(wish.replicas, "weak", batch)  # it always fits; `remarks` says why it's alone
        elif problem is not None:
            raise ConfigurationError(f"evenstep bench: {problem}.")
        curves_begin = next(iter(curves.values()))[0]
        rounds: list[dict[Setting, Run]] = []
        for number in range(wish.num_rounds):
            runs = {}
            for setting in in_order(curves, number):
                if first is not None and number == 0 and setting == curves_begin:
                    runs[setting] = Run(setting, first.records)
                    continue
                say(f"round {number + 1} of {wish.num_rounds}: {_told(setting)}")
                place = root / f"round-{number}-{setting.num_replicas}-{setting.global_batch_size}-{setting.growth}"
                runs[setting] = run_once(setting, wish, place)
            rounds.append(runs)
    return Measured(wish, curves, tuple(rounds), remarks(curves, rounds, wish))


def remarks(
    curves: dict[str, tuple[Setting, ...]], rounds: Sequence[dict[Setting, Run]], wish: Wish
) -> tuple[str, ...]:
    """What a reader of the figures should know. Pure."""
    found = []
    if len(rounds) == 1:
        found.append(
            "one round: how much rounds differ is unknown, and a finding may be chance; --repeats 3 measures it"
        )
    records = [record for runs in rounds for run in runs.values() for record in run.records]
    found += ended_early("the script", records, wish.num_steps)
    off = [
        run
        for runs in rounds
        for setting, run in runs.items()
        if setting.global_batch_size is not None and run.loader_batch != setting.global_batch_size
    ]
    if off:
        run = off[0]
        found.append(
            f"on {counted(run.setting.num_replicas, 'replica')} a batch had {run.loader_batch} samples and not the "
            f"{run.setting.global_batch_size} that were asked for: the script decides that itself, or the data set is "
            f"small"
        )
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
    if any(record.usage.workers_s is None for record in records):
        found.append(checks.needs("utilisation by core", "psutil", "bench"))
    found += others_busy([run for runs in rounds for run in runs.values()])
    unseen = [record for record in records if not record.facts.wrapper and record.world_size > 1]
    if unseen:
        found.append(
            "no wrapped model was found: the replicas train apart, or exchange gradients in a way that isn't known "
            "here, and communication can't be told from computing"
        )
    if any(record.facts.device == "cuda" for record in records):
        found.append(
            "parts of a step on a GPU are the host's, when work was queued and not when it was done: communication "
            "can't be told from computing"
        )
    return (*found, *not_written(records))


def ended_early(script: str, records: Sequence[RankRecord], num_steps: int) -> list[str]:
    """A remark if a script made fewer steps than were to be counted. Pure."""
    fewest = min(record.num_steps for record in records)
    if fewest >= num_steps:
        return []
    return [f"{script} ended by itself after {fewest} of the {num_steps} steps that were to be counted"]


def others_busy(runs: Sequence[Run]) -> list[str]:
    """A remark if other programs kept cores busy. Pure."""
    cores = statistics.median([cores_elsewhere(run) for run in runs])
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


def run_once(setting: Setting, wish: Wish, place: Path) -> Run:
    """One run, and what its ranks have left.

    Args:
        setting: Replicas and batch.
        wish: The rest.
        place: A directory that doesn't exist yet; the ranks leave their records in it.

    Raises:
        UsageError: It failed, made no steps, or took too long.
    """
    place.mkdir()
    asked = Measurement(
        str(place), wish.num_warmup, wish.num_steps, setting.global_batch_size, setting.growth, wish.watches_losses
    )
    command = [sys.executable, "-m", "evenstep", "run", "--nproc-per-node", str(setting.num_replicas)]
    command += ["--threads-per-rank", str(wish.num_threads), "--log-dir", str(place / "logs")]
    command += [] if wish.device is None else ["--device", wish.device]
    command += ["-m", "evenstep.tools.bench.measure.probe", wish.script, *wish.arguments]
    log = place / "output.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=with_settings(measurement=asked),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            status = process.wait(wish.limit_s)
        except subprocess.TimeoutExpired:
            said = _tail(log)
            raise UsageError(
                f"{_told(setting)}: {wish.script}: not over after {wish.limit_s:g} s. Does the script step a torch "
                f"optimizer? Fewer --steps, or a longer --limit, if it does. It said:\n{said}"
            ) from None
        finally:
            _stop(process)
    if status != 0:
        raise UsageError(f"{_told(setting)}: {wish.script} failed with status {status}. It said:\n{_tail(log)}")
    try:
        run = Run(setting, tuple(read_record(place / f"rank-{rank}.json") for rank in range(setting.num_replicas)))
    except UsageError as error:
        raise UsageError(f"{_told(setting)}: {wish.script}: {error}") from None
    fewest = min(record.num_steps for record in run.records)
    if fewest < 1:
        made = min(len(record.steps_ns) for record in run.records)
        raise UsageError(
            f"{_told(setting)}: {wish.script} ended after {made} steps, and {wish.num_warmup} are warm-up. Give it "
            f"more to do, or use a smaller --warmup (at least 2)."
        )
    return run


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End it and, with it, its ranks; nothing to do where it has ended."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(_STOPS_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()  # its ranks die with it
        process.wait()


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-_LONGEST_TAIL:].rstrip()


def _told(setting: Setting) -> str:
    batch = "" if setting.global_batch_size is None else f", batches of {setting.global_batch_size} samples"
    return f"{counted(setting.num_replicas, 'replica')}{batch}"
