"""A rehearsal of a resume: what `evenstep verify --resume` has a script's own `Checkpointer` do.

The script runs as it is. A file named by a variable tells its `Checkpointer` to use another directory, to save at one
step, to kill this process at another, and to write down digests of what each step saw and left behind.
"""

from __future__ import annotations

import json
import os
import signal
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from evenstep.checkpoint.snapshot import bytes_of, capture, unwrapped
from evenstep.environment import rehearsal_file
from evenstep.world import World


@dataclass(frozen=True)
class Script:
    """What is to be done.

    Attributes:
        directory: Where checkpoints go instead of where the script puts them.
        traces: Directory of the digests: a file per rank.
        save_at: Save at this step; 0: never.
        kill_at: Kill this process at this step, with SIGKILL; 0: never.
        stop_at: End well at this step; 0: when the script ends.
    """

    directory: str
    traces: str
    save_at: int = 0
    kill_at: int = 0
    stop_at: int = 0

    def write(self, path: Path) -> None:
        """Leave it for the ranks."""
        path.write_text(json.dumps(asdict(self)))


class Rehearsal:
    """Follows a `Script` on one rank."""

    def __init__(self, script: Script, world: World, objects: Mapping[str, Any]) -> None:
        self._script = script
        self._objects = objects
        self._trace = Path(script.traces) / f"rank-{world.rank}.jsonl"
        self._rows: list[int] = []
        self.directory = script.directory
        for target in objects.values():
            if isinstance(unwrapped(target), nn.Module):
                unwrapped(target).register_forward_pre_hook(self._saw, with_kwargs=True)

    @classmethod
    def of_this_process(cls, world: World, objects: Mapping[str, Any]) -> Rehearsal | None:
        """The rehearsal that this process is part of; None, as always but under `evenstep verify`."""
        path = rehearsal_file()
        return None if path is None else cls(Script(**json.loads(path.read_text())), world, objects)

    def saves_at(self, step: int) -> bool:
        """Whether to save now."""
        return step == self._script.save_at

    def step(self, step: int) -> None:
        """Write down what this step saw and left; end here if that is due."""
        state = capture(self._objects)
        tensors = {
            f"{owner}/{name}": _digest(tensor) for owner, item in state.items() for name, tensor in item.tensors.items()
        }
        tensors |= {
            f"{owner}/{piece.key}": _digest(piece.values) for owner, item in state.items() for piece in item.pieces
        }
        line = {"step": step, "rows": self._rows, "tensors": tensors}
        self._rows = []
        with self._trace.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if step == self._script.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == self._script.stop_at:
            raise SystemExit(0)

    def _saw(self, module: nn.Module, inputs: Any, kwargs: Any) -> None:
        """Before a training forward: the digest of each sample."""
        if not torch.is_grad_enabled():
            return
        tensors = [leaf for leaf in pytree.tree_leaves((inputs, kwargs)) if isinstance(leaf, Tensor) and leaf.dim()]
        if tensors:
            self._rows += [_digest(row) for row in tensors[0].detach()]


def _digest(tensor: Tensor) -> int:
    return zlib.crc32(bytes_of(tensor.detach().cpu().contiguous()))
