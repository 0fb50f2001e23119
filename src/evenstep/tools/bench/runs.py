"""Starts the runs of a measurement one after the other, and reads the records of their ranks."""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from evenstep.checks import counted
from evenstep.errors import UsageError
from evenstep.ground.environment import Measurement, with_settings
from evenstep.ground.host.named_files import validate_script
from evenstep.ground.host.temporary import private_directory
from evenstep.tools.bench.plan import NUM_WARMUP, Setting, plan_settings
from evenstep.tools.bench.records import read_record
from evenstep.tools.bench.scaling import Run
from evenstep.tools.observing.launch import Observed, launched
from evenstep.tools.observing.thresholds import MANY_ELSEWHERE

LONGEST_S = 900.0
"""The longest time of a run; then it is ended."""

_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True)
class Wish:
    """A request for a measurement.

    Attributes:
        script: The user's script.
        arguments: The command-line arguments of the script.
        replicas: The numbers of ranks, in order.
        num_steps: The number of steps to count.
        num_rounds: The number of times that each setting is measured.
        num_threads: The number of threads of each rank, the same for all numbers of ranks.
        device: The value of `evenstep run --device`; None: GPUs if there are any.
        has_strong: Whether to measure strong scaling, too: one batch is divided over the replicas.
        watches_losses: Whether to record losses, and not to run the profiler. Then the random generators are seeded,
            for scripts that set no seed.
    """

    script: str
    arguments: tuple[str, ...]
    replicas: tuple[int, ...]
    num_steps: int
    num_rounds: int
    num_threads: int
    device: str | None = None
    has_strong: bool = False
    watches_losses: bool = False


@dataclass(frozen=True)
class Measured:
    """The runs of a measurement.

    Attributes:
        wish: The request.
        curves: The settings of each curve.
        rounds: By round, the runs by setting.
        remarks: Remarks on the figures for the user.
    """

    wish: Wish
    curves: dict[str, tuple[Setting, ...]]
    rounds: tuple[dict[Setting, Run], ...]
    remarks: tuple[str, ...]


class Series:
    """Starts runs one after the other. Announces each with its number and the estimated time that is left.

    Args:
        num_runs: The number of runs to come.
        root: An empty directory for the records of ranks.
        say: Called with each line of progress.
    """

    def __init__(self, num_runs: int, root: Path, say: Callable[[str], None]) -> None:
        self._num_runs, self._root, self._say = num_runs, root, say
        self._num_done, self._began_s = 0, time.monotonic()
        each = f"each of {LONGEST_S / 60:.0f} minutes at most"
        say(f"{counted(num_runs, 'run')}, {each}; after the first you are told how long the others take")

    def run(self, words: str, setting: Setting, wish: Wish, traces: Path | None = None) -> Run:
        """Announce and make one run; see `run_once`. `words` describe it."""
        rest = ""
        if done := self._num_done:
            left_s = (time.monotonic() - self._began_s) / done * (self._num_runs - done)
            rest = f"; about {counted(round(left_s / 60), 'minute') if left_s >= 90 else f'{left_s:.0f} s'} left"
        self._num_done += 1
        self._say(f"run {self._num_done} of {self._num_runs}: {words}{rest}")
        return run_once(setting, wish, self._root / f"run-{self._num_done}", traces)

    def rounds(
        self,
        jobs: Mapping[_Key, tuple[str, Setting, Wish]],
        num_rounds: int,
        *,
        done: Mapping[_Key, Run] | None = None,
        traces: Mapping[_Key, Path] | None = None,
    ) -> list[dict[_Key, Run]]:
        """Make the runs of all rounds: each job once per round, in alternating order. See [Note: rounds] in plan.py.

        Args:
            jobs: By key, a description, the setting and the request.
            num_rounds: The number of rounds.
            done: By key, runs of the first round that were made before.
            traces: By key, the directory for the profiler's traces; other jobs' traces aren't kept.
        """
        found: list[dict[_Key, Run]] = []
        for number in range(num_rounds):
            runs = dict(done or {}) if number == 0 else {}
            for key in list(jobs)[:: -1 if number % 2 else 1]:
                if key not in runs:
                    runs[key] = self.run(*jobs[key], (traces or {}).get(key))
            found.append(runs)
        return found


def measure(wish: Wish, say: Callable[[str], None], traces: Path) -> Measured:
    """Make all runs of a measurement.

    Args:
        wish: The request.
        say: Called with each line of progress.
        traces: The directory for the profiler's traces of the last run on the most replicas.

    Raises:
        ConfigurationError: There is no such script, or a batch can't be divided.
        UsageError: A run failed, made no steps, or took too long.
    """
    validate_script(wish.script)
    fewest, num_curves = wish.replicas[0], 2 if wish.has_strong else 1
    with private_directory("bench") as root:
        series = Series(wish.num_rounds * (num_curves * (len(wish.replicas) - 1) + 1), root, say)
        # The other settings are compared with the script's own batch on the fewest replicas.
        as_it_is = Setting(fewest, None)
        first = series.run(f"{counted(fewest, 'replica')}, {wish.script} as it is", as_it_is, wish, traces)
        batch = first.loader_batch if first.records[0].facts.has_loader else 0
        curves = plan_settings(wish.replicas, batch or None, has_strong=wish.has_strong)
        main = curves["weak"]
        settings = dict.fromkeys(setting for curve in curves.values() for setting in curve)
        jobs = {setting: (describe(setting), setting, wish) for setting in settings}
        done = {main[0]: Run(main[0], first.records)}
        rounds = series.rounds(jobs, wish.num_rounds, done=done, traces={main[-1]: traces})
    return Measured(wish, curves, tuple(rounds), tuple(remarks(rounds, wish)))


def remarks(rounds: Sequence[Mapping[Setting, Run]], wish: Wish) -> list[str]:
    """Remarks on the figures of one script for the user. Pure."""
    every = [run for runs in rounds for run in runs.values()]
    records = [record for run in every for record in run.records]
    found = common_remarks({"the script": every}, wish)
    found += [
        f"on {counted(run.setting.num_replicas, 'replica')} a batch had {run.loader_batch} samples and not the "
        f"{run.setting.global_batch_size} that were asked for: the script decides that itself, or the data set is small"
        for run in every
        if run.setting.global_batch_size not in (None, run.loader_batch)
    ][:1]
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
    return found


def common_remarks(by_script: Mapping[str, Sequence[Run]], wish: Wish) -> list[str]:
    """Remarks that apply to `bench run` and `bench compare` alike. Pure.

    Args:
        by_script: By name of a script, all its runs.
        wish: The request.
    """
    found = []
    if wish.num_rounds == 1:
        found.append("one round: how much rounds differ is unknown, and what is found may be chance; --rounds 3")
    for name, runs in by_script.items():
        fewest = min(record.num_steps for run in runs for record in run.records)
        if fewest < wish.num_steps:
            found.append(f"{name} ended by itself after {fewest} of the {wish.num_steps} steps that were to be counted")
        if not any(run.usual_batch for run in runs):
            found.append(f"no tensor went into a model of {name}, so its samples aren't known")
    every = [run for runs in by_script.values() for run in runs]
    cores = statistics.median([run.cores_elsewhere for run in every])
    if cores > MANY_ELSEWHERE:
        found.append(
            f"other programs kept {cores:.1f} cores of this host busy, so contention, imbalance and communication may "
            f"come from them: measure again when they have ended"
        )
    saved = sorted({path for run in every for record in run.records for path in record.saved})
    return [*found, f"not written, because this was a measurement: {', '.join(saved[:5])}"] if saved else found


def run_once(setting: Setting, wish: Wish, place: Path, traces: Path | None = None) -> Run:
    """Make one run, and read the records of its ranks.

    Args:
        setting: The number of replicas, and the batch size.
        wish: The request.
        place: A directory that doesn't exist yet, for the records.
        traces: The directory for the profiler's traces; None: they aren't kept.

    Raises:
        UsageError: The run failed, made no steps, or took too long.
    """
    place.mkdir()
    asked = Measurement(str(place), wish.num_steps, setting.global_batch_size, setting.growth, wish.watches_losses)
    observed = Observed(
        "evenstep.tools.bench.probe", wish.script, wish.arguments, setting.num_replicas, wish.device, wish.num_threads
    )
    who = f"{describe(setting)}: {wish.script}"
    before = _clocks()
    with launched(observed, place, with_settings(measurement=asked)) as made:
        try:
            status = made.process.wait(LONGEST_S)
        except subprocess.TimeoutExpired:
            raise UsageError(
                f"{who}: not over after {LONGEST_S:g} s. Does the script step a torch optimizer? Fewer --steps if it "
                f"does. It said:\n{made.said()}"
            ) from None
    if status != 0:
        raise UsageError(f"{who} failed with status {status}. It said:\n{made.said()}")
    wall_s, host_s, own_s = (now - then for now, then in zip(_clocks(), before, strict=True))
    try:
        records = tuple(read_record(place / f"rank-{rank}.json") for rank in range(setting.num_replicas))
    except UsageError as error:
        raise UsageError(f"{who}: {error}") from None
    if min(record.num_steps for record in records) < 1:
        steps = min(len(record.steps_ns) for record in records)
        raise UsageError(
            f"{who} ended after {counted(steps, 'step')}, of which {NUM_WARMUP} aren't counted. Give it more to do."
        )
    if traces is not None:
        for trace in place.glob("trace-*"):
            shutil.copy(trace, traces)
    return Run(setting, records, max(0.0, (host_s - own_s) / wall_s))


def _clocks() -> tuple[float, float, float]:
    """(time, CPU time of all programs of the host, CPU time of this process's ended children), in seconds."""
    own = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except OSError:
        ticks = [0] * 8
    # User, nice and system time, interrupts, and time that a hypervisor took; without idle time and waits for disks.
    return time.monotonic(), sum(ticks[:3] + ticks[5:]) / os.sysconf("SC_CLK_TCK"), own.ru_utime + own.ru_stime


def describe(setting: Setting) -> str:
    """A text that describes a setting."""
    batch = "" if setting.global_batch_size is None else f", batches of {setting.global_batch_size} samples"
    return f"{counted(setting.num_replicas, 'replica')}{batch}"
