"""Fault-injection runs of a script with a `Checkpointer`: one rank of them.

The script runs as it is, and what it writes goes elsewhere. As a plan says, its `Checkpointer` uses another directory,
saves at one step and kills this process at another, and a file gets digests of what each step saw and left behind. The
`Checkpointer` knows nothing of this: its constructor and its `step` are replaced for the length of the run.
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
    """What is to be done; `directory` is where checkpoints go instead of where the script puts them.

    Attributes:
        traces: Directory of the digests: a file per rank.
        save_at: Save at this step; 0: never.
        kill_at: Kill this process at this step, with SIGKILL; 0: never.
        stop_at: End well at this step; 0: when the script ends.
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
        """Kill this process if it dies in this step: before anything of it is saved."""
        if step == self._plan.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def end_step(self, step: int) -> None:
        """Write down what this step saw and left behind; end the script if the plan says so."""
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
        """Before a training forward: the digest of each sample."""
        if torch.is_grad_enabled():
            self._rows += [_digest(row) for row in first_samples((inputs, kwargs))]


def _digest(tensor: Tensor) -> int:
    return zlib.crc32(bytes_of(tensor.detach().cpu().contiguous()))


def install(patches: Patches, plan: RehearsalPlan, rank: int) -> None:
    """Have every `Checkpointer` of this process follow a plan, until the patches are undone.

    Args:
        patches: Undoes it.
        plan: What is to be done.
        rank: This rank.
    """
    rehearsals: weakref.WeakKeyDictionary[Checkpointer, Rehearsal] = weakref.WeakKeyDictionary()

    def init(original: Callable[..., None], checkpoint: Checkpointer, directory: Any, **named: Any) -> None:
        if named.get("local") is not None:
            named["local"] = f"{plan.directory}-local"
        # Synchronously: a checkpoint is complete before a later step kills the process.
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
    """Rehearse in this process what the plan in a file says."""
    with Patches() as patches:
        plan = RehearsalPlan.read(file)
        # Beside the checkpoints, so that a run which resumes finds what the run before it has written.
        Scratch(Path(f"{plan.directory}-files")).install(patches)
        install(patches, plan, rank)
        yield
