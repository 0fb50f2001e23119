"""One rank of a measured run: `python -m evenstep.tools.bench.measure.probe SCRIPT ARGS...`, started by `evenstep run`.

The probe counts optimizer steps, ends the run after enough of them, and leaves a record. With several optimizers the
busiest one counts, as on the progress page. Until the first step has ended the script may still be making its models:
the probe looks for them then.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import sys
import threading
import time
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from evenstep.control_groups import count_cpus
from evenstep.errors import ConfigurationError
from evenstep.ground.environment import Measurement, Placement, current_placement, settings
from evenstep.ground.health.telemetry import OPTIMIZER, OPTIMIZER_END
from evenstep.tools.bench.measure.gpu import Inspection
from evenstep.tools.bench.measure.losses import LossWatch
from evenstep.tools.bench.measure.models import ModelWatch, facts_of
from evenstep.tools.bench.measure.records import DATA, DATA_END, Facts, RankRecord, Usage, sorted_marks, write_record
from evenstep.tools.observing.loaders import LoaderWatch, replace_batch_sizes
from evenstep.tools.observing.patching import Patches
from evenstep.tools.observing.scratch import Scratch, idle_checkpointers
from evenstep.tools.observing.script import run_observed
from evenstep.tools.observing.steps import watch_steps

_LONGEST_FAREWELL_S = 60.0


class Probe:
    """Watches this process.

    Args:
        asked: The request: warm-up and measured steps, batch size.
        placement: Which rank this is.
    """

    def __init__(self, asked: Measurement, placement: Placement) -> None:
        self._asked, self._placement = asked, placement
        self._marks: list[int] = []
        self._steps_ns: list[int] = []
        self._rows: list[int] = []
        self._batches: list[int] = []
        self._rows_before = 0
        self._counts: dict[int, int] = {}
        self._loaders = LoaderWatch(self._waited_for_data, lambda: len(self._steps_ns))
        self._models = ModelWatch(self._marks)
        self._losses = LossWatch(lambda: len(self._steps_ns))
        self._scratch = Scratch(Path(asked.directory))
        self._inspection: Inspection | None = None
        self._began: _Clock | None = None
        self._usage = Usage()
        self._is_written = False
        self._backend = ""
        self._blocks: tuple[tuple[str, float, float], ...] = ()

    def install(self, patches: Patches) -> None:
        """Watch this process until the patches are undone."""
        self._loaders.install(patches)
        total = self._asked.global_batch_size
        if total is not None:
            rows = max(1, total // self._placement.world_size)
            # 1 is torch's default; evenstep's own loader gives torch's no batch size.
            replace_batch_sizes(patches, lambda size: rows if size > 1 else size)
        idle_checkpointers(patches)
        self._models.shards.install(patches)
        self._scratch.install(patches)
        watch_steps(patches, self._optimizer_begins, self._optimizer_ended)
        if self._asked.watches_losses:
            self._losses.install(patches)
            # A script that sets no seed begins with the same weights in every run, and so its losses can be compared.
            random.seed(self._placement.rank)
            torch.manual_seed(self._placement.rank)

    # ------------------------------------------------------------------ hooks

    def _waited_for_data(self, began_ns: int, ended_ns: int) -> None:
        self._marks += (DATA, began_ns, DATA_END, ended_ns)

    def _optimizer_begins(self, optimizer: Any) -> None:
        self._marks += (OPTIMIZER, perf_counter_ns())

    def _optimizer_ended(self, optimizer: Any) -> None:
        now = perf_counter_ns()
        self._marks += (OPTIMIZER_END, now)
        self._counts[id(optimizer)] = self._counts.get(id(optimizer), 0) + 1
        if max(self._counts.values()) > len(self._steps_ns) and not self._is_written:
            self._step_ended(optimizer, now)

    def _step_ended(self, optimizer: Any, now: int) -> None:
        asked = self._asked
        enough = asked.num_warmup + asked.num_steps
        if len(self._steps_ns) + 1 in (asked.num_warmup, enough) and _is_on_gpu(self._models.models):
            torch.cuda.synchronize()  # the host runs ahead; between these two moments it may not have
            now = perf_counter_ns()
        if len(self._steps_ns) < enough:
            self._steps_ns.append(now)
            rows = self._models.num_rows or self._loaders.num_rows
            self._rows.append(rows - self._rows_before)
            self._rows_before = rows
            self._batches.append(self._loaders.last_rows)
        else:
            self._counts = dict.fromkeys(self._counts, enough)  # steps that are looked at, and not counted
        number = len(self._steps_ns)
        if number == 1 and dist.is_available() and dist.is_initialized():
            self._backend = str(dist.get_backend())
        if number == 1 and not self._models.models:
            self._models.find(optimizer)
            self._rows_before = 0 if self._models.models else self._rows_before
        if number == asked.num_warmup and self._began is None:
            self._began = _Clock()
            self._models.shards.restart()
        if number < enough:
            return
        if self._inspection is None:
            self._usage = Usage() if self._began is None else self._began.until_now()
            self._blocks = tuple(self._models.shards.blocks(asked.num_steps))
            self._inspection = Inspection()
            self._inspection.is_over = not _is_on_gpu(self._models.models)
        if not self._inspection.is_over:
            self._inspection.step()
        if self._inspection.is_over:
            self.write()
            self._leave()

    # ------------------------------------------------------------------ the end

    def write(self) -> None:
        """Leave the record, once; also that of a script which ended before it had made enough steps."""
        if self._is_written or not self._steps_ns:
            return
        self._is_written = self._loaders.is_over = True
        if self._inspection is None and self._began is not None:
            self._usage = self._began.until_now()
        models = self._models
        facts = Facts(
            backend=self._backend,
            device="cuda" if _is_on_gpu(models.models) else "cpu",
            wrapper=models.wrapper,
            num_threads=torch.get_num_threads(),
            num_cores=count_cpus(),
            num_workers=self._loaders.num_workers,
            has_loader=self._loaders.was_seen,
            loss_dtype=self._losses.dtype,
            **facts_of(models.models),
        )
        record = RankRecord(
            rank=self._placement.rank,
            world_size=self._placement.world_size,
            num_warmup=self._asked.num_warmup,
            steps_ns=tuple(self._steps_ns),
            rows=tuple(self._rows),
            batches=tuple(self._batches),
            marks=tuple(sorted_marks([*self._marks, *_of_passes(models.marks())])),
            facts=facts,
            usage=self._usage,
            syncs=() if self._inspection is None else self._inspection.syncs(),
            device_busy_s=None if self._inspection is None else self._inspection.device_busy_s,
            saved=tuple(self._scratch.saved),
            blocks=self._blocks,
            losses=tuple(self._losses.by_step(len(self._steps_ns))) if self._asked.watches_losses else (),
        )
        write_record(record, record_file(self._asked, self._placement.rank))

    def _leave(self) -> None:
        # A rank that leaves first closes connections that others may still read from.
        files = [record_file(self._asked, rank) for rank in range(self._placement.world_size)]
        deadline = time.monotonic() + _LONGEST_FAREWELL_S
        while not all(file.exists() for file in files) and time.monotonic() < deadline:
            time.sleep(0.01)
        sys.stdout.flush()
        sys.stderr.flush()
        if threading.current_thread() is not threading.main_thread():
            os._exit(0)
        # A script that catches this goes on; nothing is counted any more, and its next step ends it.
        register_optimizer_step_post_hook(lambda *_: os._exit(0))
        raise SystemExit(0)


def record_file(asked: Measurement, rank: int) -> Any:
    """Where a rank leaves its record."""
    return Path(asked.directory) / f"rank-{rank}.json"


class _Clock:
    """Time and processor time from here on."""

    def __init__(self) -> None:
        self._wall_s, self._process_s = time.perf_counter(), time.process_time()
        self._cores, self._workers_s = _cores(), _workers_s()

    def until_now(self) -> Usage:
        """What was used."""
        cores, workers_s = _cores(), _workers_s()
        busy = tuple(
            round(busy / max(total, 1e-9), 4)
            for busy, total in ((b - a, t - s) for (a, s), (b, t) in zip(self._cores, cores, strict=False))
        )
        before = self._workers_s
        return Usage(
            wall_s=time.perf_counter() - self._wall_s,
            process_s=time.process_time() - self._process_s,
            workers_s=None if workers_s is None or before is None else max(0.0, workers_s - before),
            cores=busy,
        )


def _cores() -> list[tuple[float, float]]:
    """(busy, in all) seconds of each core since the host was started; empty without psutil."""
    psutil = _psutil()
    if psutil is None:
        return []
    return [(sum(times) - times.idle - getattr(times, "iowait", 0.0), sum(times)) for times in psutil.cpu_times(True)]


def _workers_s() -> float | None:
    """Seconds that the processes started by this one have computed; None without psutil."""
    psutil = _psutil()
    if psutil is None:
        return None
    seconds = 0.0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            times = child.cpu_times()
            seconds += times.user + times.system
    return seconds


def _psutil() -> Any:
    """An extra; None where it isn't installed."""
    try:
        return importlib.import_module("psutil")
    except ImportError:
        return None


def _is_on_gpu(models: list[torch.nn.Module]) -> bool:
    return any(p.is_cuda for model in models for p in model.parameters())


def _of_passes(marks: list[int]) -> list[int]:
    """Marks of evenstep's models without buckets and optimizers, whose steps the probe has seen itself."""
    kept = [(what, when) for what, when in zip(marks[::2], marks[1::2], strict=True) if what < OPTIMIZER]
    return [number for pair in kept for number in pair]


def main(arguments: list[str]) -> None:
    """Have this process watched, and run the script in it.

    Raises:
        ConfigurationError: No measurement was requested.
    """
    asked = settings().measurement
    if asked is None:
        raise ConfigurationError(
            "evenstep.tools.bench.measure.probe is started by `evenstep bench`, and is no command of its own."
        )
    probe = Probe(asked, current_placement())
    path, *rest = arguments
    with Patches() as patches:
        probe.install(patches)
        try:
            run_observed(path, rest)
        finally:
            probe.write()


if __name__ == "__main__":
    main(sys.argv[1:])
