"""One rank of a fault-injection run of a script with a `Checkpointer`.

The script runs unchanged, and the files that it writes are redirected. By a plan, its `Checkpointer` uses another
directory and saves at one step, and this process is killed at another step. Digests of each step's samples and state
go to a file. Only the `Checkpointer`'s constructor and `step` are patched during the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evenstep.checkpoint.checkpointer import Checkpointer
from evenstep.checkpoint.format.payload import bytes_of
from evenstep.checkpoint.format.tree import unwrapped
from evenstep.checkpoint.save.snapshot import capture
from evenstep.tools.observing.launch import Plan
from evenstep.tools.observing.models import first_samples
from evenstep.tools.observing.patching import Patches
from evenstep.tools.observing.scratch import Scratch


@dataclass(frozen=True)
class RehearsalPlan(Plan):
    """The instructions for a rank. Checkpoints go to `directory` instead of the script's own directory.

    Attributes:
        traces: The directory of the digests, a file for each rank.
        save_at: The step at which to save; 0: never.
        kill_at: The step at which to kill this process with SIGKILL; 0: never.
        stop_at: The step at which to end the script normally; 0: at its own end.
    """

    traces: str
    save_at: int = 0
    kill_at: int = 0
    stop_at: int = 0


class Rehearsal:
    """Follows a `RehearsalPlan` in one `Checkpointer` of one rank."""

    def __init__(self, plan: RehearsalPlan, rank: int, objects: Mapping[str, Any]) -> None:
        self._plan = plan
        self._objects = objects
        self._trace = Path(plan.traces) / f"rank-{rank}.jsonl"
        self._rows: list[int] = []
        for target in objects.values():
            if isinstance(unwrapped(target), nn.Module):
                unwrapped(target).register_forward_pre_hook(self._saw, with_kwargs=True)

    def begin_step(self, step: int) -> None:
        """Kill this process if the plan says so, before anything of this step is saved."""
        if step == self._plan.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def end_step(self, step: int) -> None:
        """Write digests of the samples and the state of this step. End the script if the plan says so."""
        state = capture(self._objects)
        tensors = {
            f"{owner}/{name}": _digest(tensor) for owner, item in state.items() for name, tensor in item.tensors.items()
        }
        tensors |= {
            f"{owner}/{shard.key}": _digest(shard.values) for owner, item in state.items() for shard in item.shards
        }
        line = {"step": step, "rows": self._rows, "tensors": tensors}
        self._rows = []
        with self._trace.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if step == self._plan.stop_at:
            raise SystemExit(0)

    def _saw(self, module: nn.Module, inputs: Any, kwargs: Any) -> None:
        """Record the digest of each sample before a training forward pass."""
        if torch.is_grad_enabled():
            self._rows += [_digest(row) for row in first_samples((inputs, kwargs))]


def _digest(tensor: Tensor) -> int:
    return zlib.crc32(bytes_of(tensor.detach().cpu().contiguous()))


def install(patches: Patches, plan: RehearsalPlan, rank: int) -> None:
    """Make every `Checkpointer` of this process follow a plan, until the patches are undone.

    Args:
        patches: Undoes the changes.
        plan: The plan.
        rank: This rank.
    """
    rehearsals: weakref.WeakKeyDictionary[Checkpointer, Rehearsal] = weakref.WeakKeyDictionary()

    def init(original: Callable[..., None], checkpoint: Checkpointer, directory: Any, **named: Any) -> None:
        if named.get("local") is not None:
            named["local"] = f"{plan.directory}-local"
        # Synchronous, so that a checkpoint is complete before a later step kills the process.
        original(checkpoint, plan.directory, **{**named, "asynchronous": False})
        rehearsals[checkpoint] = Rehearsal(plan, rank, checkpoint.objects)

    def step(original: Callable[..., None], checkpoint: Checkpointer, **metrics: float) -> None:
        before = checkpoint.num_steps
        rehearsals[checkpoint].begin_step(before + 1)
        original(checkpoint, **metrics)
        if checkpoint.num_steps == before:  # in the middle of an accumulation
            return
        if checkpoint.num_steps == plan.save_at:
            checkpoint.save()
        rehearsals[checkpoint].end_step(checkpoint.num_steps)

    patches.around(Checkpointer, "__init__", init)
    patches.around(Checkpointer, "step", step)


@contextlib.contextmanager
def rehearsing(file: Path, *, rank: int) -> Iterator[None]:
    """Follow the plan in a file in this process."""
    with Patches() as patches:
        plan = RehearsalPlan.read(file)
        # Beside the checkpoints, so that a resuming run finds the files that the run before it wrote.
        Scratch(Path(f"{plan.directory}-files")).install(patches)
        install(patches, plan, rank)
        yield
