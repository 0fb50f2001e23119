"""One rank of a measured run: `python -m evenstep.tools.bench.probe SCRIPT ARGS...`, started by `evenstep run`.

The probe counts optimizer steps, ends the run after enough of them, and writes a record. Of several optimizers, the one
with the most steps counts. The probe looks for the models when the first step has ended, because the script may make
models until then.
"""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from evenstep import errors
from evenstep.errors import ConfigurationError
from evenstep.ground.compat.torch_profiler import is_profiled, profile_all_threads
from evenstep.ground.environment import Measurement, Placement, current_placement, settings
from evenstep.ground.health.telemetry import OPTIMIZER, OPTIMIZER_END
from evenstep.ground.host.control_groups import count_cpus
from evenstep.tools.bench.plan import NUM_WARMUP
from evenstep.tools.bench.profile import NUM_STEPS, WINDOW, Profile, read_trace
from evenstep.tools.bench.records import DATA, DATA_END, Facts, RankRecord, sorted_marks, write_record
from evenstep.tools.bench.watching import LossWatch, ModelWatch
from evenstep.tools.observing.changes import replace_batch_sizes
from evenstep.tools.observing.devices import Waits
from evenstep.tools.observing.launch import leave_together
from evenstep.tools.observing.models import num_rows, uses_fsdp
from evenstep.tools.observing.patching import Patches
from evenstep.tools.observing.record import Loop, Recorder, Subscriber
from evenstep.tools.observing.scratch import Scratch, idle_checkpointers
from evenstep.tools.observing.script import run_observed

_LONGEST_FAREWELL_S = 60.0


class Probe(Subscriber):
    """Measures the steps of this process.

    Args:
        asked: The request, with the number of steps and the batch size.
        placement: The rank of this process.
    """

    def __init__(self, asked: Measurement, placement: Placement) -> None:
        self._asked, self._placement = asked, placement
        self._marks: list[int] = []
        self._steps_ns: list[int] = []
        self._rows: list[int] = []
        self._batches: list[int] = []
        self._rows_before = 0
        self._num_read = self._last_read = 0  # samples of all batches, and of the newest one
        self._num_workers = 0
        self._keeps_workers = self._is_epochs_first = False
        self._starting_ns = 0  # waits for the first batches of epochs, in counted steps
        self._models = ModelWatch(self._marks)
        self._losses = LossWatch()
        self._scratch = Scratch(Path(asked.directory))
        self._is_written = self._has_loader = False
        self._backend = ""
        self._profiling: Profiling | None = None

    def install(self, patches: Patches) -> None:
        """Start to measure, until the patches are undone."""
        total = self._asked.global_batch_size
        if total is not None:
            rows = max(1, total // self._placement.world_size)
            # 1 is torch's default, which evenstep's loader leaves to torch's inside it.
            replace_batch_sizes(patches, lambda size: rows if size > 1 else size)
        idle_checkpointers(patches)
        self._scratch.install(patches)
        losses = [self._losses] if self._asked.watches_losses else []
        Recorder(self, self._models, *losses).install(patches)
        if losses:
            # So that a script without a seed begins with the same weights in every run, and its losses can be compared.
            random.seed(self._placement.rank)
            torch.manual_seed(self._placement.rank)

    # ------------------------------------------------------------------ hooks

    def loop_begins(self, loop: Loop) -> None:
        """See base class."""
        self._is_epochs_first = True

    def waited(self, began_ns: int, ended_ns: int) -> None:
        """See base class."""
        self._marks += (DATA, began_ns, DATA_END, ended_ns)
        if self._is_epochs_first and NUM_WARMUP <= len(self._steps_ns) < NUM_WARMUP + self._asked.num_steps:
            self._starting_ns += ended_ns - began_ns

    def batch(self, loop: Loop, batch: Any) -> None:
        """See base class."""
        self._is_epochs_first = False
        self._num_workers = loop.loader.num_workers
        of_torch = getattr(loop.loader, "_torch_loader", loop.loader)  # evenstep's loader has a torch loader inside
        self._keeps_workers = of_torch.persistent_workers
        self._last_read = num_rows(batch)
        self._num_read += self._last_read
        self._has_loader = True

    def repeats(self, loop: Loop) -> bool:
        """Give a training loop another epoch, until the run is over."""
        self._is_epochs_first = not self._is_written and self.recorder.num_steps != loop.steps_before
        return self._is_epochs_first

    def step_begins(self, optimizer: Any) -> None:
        """See base class."""
        self._marks += (OPTIMIZER, perf_counter_ns())

    def step_ended(self, optimizer: Any, *, is_counted: bool) -> None:
        """See base class."""
        now = perf_counter_ns()
        self._marks += (OPTIMIZER_END, now)
        if is_counted and not self._is_written:
            self._step_ended(optimizer, now)

    def _step_ended(self, optimizer: Any, now: int) -> None:
        asked = self._asked
        enough = NUM_WARMUP + asked.num_steps
        if len(self._steps_ns) + 1 in (NUM_WARMUP, enough) and self._is_on_gpu():
            torch.cuda.synchronize()  # the host runs ahead of the GPU; the first and last counted times mustn't
            now = perf_counter_ns()
        if len(self._steps_ns) < enough:
            self._steps_ns.append(now)
            rows = self._models.num_rows or self._num_read
            self._rows.append(rows - self._rows_before)
            self._rows_before = rows
            self._batches.append(self._last_read)
        number = len(self._steps_ns)
        if number == 1 and dist.is_available() and dist.is_initialized():
            self._backend = str(dist.get_backend())
        if number == 1 and not self._models.models:
            self._models.find(optimizer)
            self._rows_before = 0 if self._models.models else self._rows_before
        if number < enough:
            return
        if self._profiling is None:
            trace = Path(asked.directory) / f"trace-{self._placement.rank}.json.gz"
            self._profiling = Profiling(trace, self._is_on_gpu(), is_wanted=not asked.watches_losses)
        elif not self._profiling.is_over:
            self._profiling.step_ended()
        if self._profiling.is_over:
            self.write()
            self._leave()

    def _is_on_gpu(self) -> bool:
        return any(p.is_cuda for model in self._models.models for p in model.parameters())

    # ------------------------------------------------------------------ the end

    def write(self) -> None:
        """Write the record, once; also for a script that ended before it made enough steps."""
        if self._is_written or not self._steps_ns:
            return
        self._is_written = True
        models = self._models
        facts = Facts(
            backend=self._backend,
            device="cuda" if self._is_on_gpu() else "cpu",
            wrapper="fsdp" if any(map(uses_fsdp, models.models)) else models.wrapper,
            num_threads=torch.get_num_threads(),
            num_cores=count_cpus(),
            num_workers=self._num_workers,
            has_loader=self._has_loader,
            keeps_workers=self._keeps_workers,
            starting_s=self._starting_ns / 1e9 / max(1, len(self._steps_ns) - NUM_WARMUP),
        )
        record = RankRecord(
            rank=self._placement.rank,
            world_size=self._placement.world_size,
            num_warmup=NUM_WARMUP,
            steps_ns=tuple(self._steps_ns),
            rows=tuple(self._rows),
            batches=tuple(self._batches),
            marks=tuple(sorted_marks([*self._marks, *_of_passes(models.marks())])),
            facts=facts,
            profile=None if self._profiling is None else self._profiling.profile,
            saved=tuple(self._scratch.saved),
            losses=tuple(self._losses.by_step(len(self._steps_ns))) if self._asked.watches_losses else (),
        )
        write_record(record, record_file(self._asked, self._placement.rank))

    def _leave(self) -> None:
        # A script that catches the `SystemExit` goes on. Its next step ends the process.
        register_optimizer_step_post_hook(lambda *_: os._exit(0))
        rank, world_size = self._placement.rank, self._placement.world_size
        leave_together(Path(self._asked.directory), rank, world_size, _LONGEST_FAREWELL_S)


def record_file(asked: Measurement, rank: int) -> Any:
    """The file for the record of a rank."""
    return Path(asked.directory) / f"rank-{rank}.json"


class Profiling:
    """Runs torch's profiler for the next `NUM_STEPS` steps, and on a GPU records the lines where the host waits.

    Args:
        trace: The file for the trace.
        is_on_gpu: Whether the model is on a GPU.
        is_wanted: Whether to profile at all. If not, or if the script runs a profiler itself, this is over at once.

    Attributes:
        is_over: Whether all steps were profiled.
        profile: The profile; None before it is over.
    """

    def __init__(self, trace: Path, is_on_gpu: bool, *, is_wanted: bool) -> None:
        self.is_over = not is_wanted or is_profiled()
        self.profile: Profile | None = None
        self._trace, self._is_on_gpu = trace, is_on_gpu
        self._num_steps = 0
        self._lines = Counter[str]()
        self._waits = Waits(self._hear)
        if self.is_over:
            return
        self._profiler, self._window = profile_all_threads(), torch.profiler.record_function(WINDOW)
        self._profiler.start()
        self._window.__enter__()  # type: ignore[no-untyped-call]
        if is_on_gpu:
            self._waits.listen()

    def step_ended(self) -> None:
        """A step has ended. After the last one, read the profile."""
        self._num_steps += 1
        if self._num_steps < NUM_STEPS:
            return
        self.is_over = True
        if self._is_on_gpu:
            self._waits.stop()
            torch.cuda.synchronize()
        self._window.__exit__(None, None, None)
        self._profiler.stop()
        self._profiler.export_chrome_trace(str(self._trace))
        syncs = tuple((line, count / NUM_STEPS) for line, count in self._lines.most_common())
        self.profile = replace(read_trace(self._trace), syncs=syncs)

    def _hear(self, file: str, line: int) -> None:
        if is_of_the_script(file):
            self._lines[f"{os.path.basename(file)}:{line}"] += 1


def is_of_the_script(filename: str) -> bool:
    """Whether a file is the user's own, and neither torch's nor evenstep's."""
    return not any(Path(filename).is_relative_to(Path(str(each.__file__)).parent) for each in (torch, errors))


def _of_passes(marks: list[int]) -> list[int]:
    """The marks of evenstep's models that belong to passes, without those of buckets and optimizers."""
    kept = [(what, when) for what, when in zip(marks[::2], marks[1::2], strict=True) if what < OPTIMIZER]
    return [number for pair in kept for number in pair]


def main(arguments: list[str]) -> None:
    """Run the script in this process, and measure it.

    Raises:
        ConfigurationError: No measurement was requested.
    """
    asked = settings().measurement
    if asked is None:
        raise ConfigurationError(
            "evenstep.tools.bench.probe is started by `evenstep bench`, and is no command of its own."
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
