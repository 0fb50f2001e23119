"""One rank of a run with changes: `python -m evenstep.bench.remedies.probe CHANGES SCRIPT ARGS...`.

It does what `measure/probe` does, makes the changes first, and leaves the losses and what the script uses, too.
CHANGES is JSON: `{"changes": ["fused"], "settings": {}}`.
"""

from __future__ import annotations

import functools
import json
import random
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.utils.data import DataLoader as TorchDataLoader

from evenstep.bench.measure.probe import Probe
from evenstep.bench.remedies.apply import apply_changes
from evenstep.bench.remedies.changes import Uses
from evenstep.environment import Measurement, Placement, current_placement, measurement
from evenstep.errors import ConfigurationError
from evenstep.observe.patching import Patches
from evenstep.observe.script import run_observed

_MOST_LOSSES = 4096
_MOST_SHAPES = 4096


class TryingProbe(Probe):
    """Watches this process, and its losses."""

    def __init__(self, asked: Measurement, placement: Placement) -> None:
        super().__init__(asked, placement)
        self._losses: list[torch.Tensor] = []
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._has_hook = self._pins = False

    def install(self, patches: Patches) -> None:
        """Watch this process until the patches are undone."""
        super().install(patches)
        patches.replace(torch.autograd, "backward", self._watch_losses)
        patches.replace(TorchDistributedDataParallel, "register_comm_hook", self._watch_hooks)
        patches.replace(TorchDataLoader, "__init__", self._watch_loaders)

    def _watch_losses(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            root = tensors if isinstance(tensors, torch.Tensor) else tensors[0] if len(tensors) else None
            if isinstance(root, torch.Tensor) and root.numel() == 1 and len(self._losses) < _MOST_LOSSES:
                self._losses.append(root.detach().clone())
            return original(tensors, *args, **kwargs)

        return backward

    def _watch_hooks(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def register(model: Any, *args: Any, **kwargs: Any) -> Any:
            self._has_hook = True
            return original(model, *args, **kwargs)

        return register

    def _watch_loaders(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def init(loader: Any, *args: Any, **kwargs: Any) -> None:
            original(loader, *args, **kwargs)
            self._pins |= bool(loader.pin_memory)

        return init

    def _step_ended(self, optimizer: Any, now: int) -> None:
        self._optimizers.setdefault(id(optimizer), optimizer)
        super()._step_ended(optimizer, now)

    def write(self) -> None:
        """Leave what was seen, before the record, after which the run is over."""
        if not self._is_written and self._steps_ns:
            seen = {"losses": [float(loss) for loss in self._losses], "uses": asdict(self._uses())}
            seen_file(self._asked.directory, self._placement.rank).write_text(json.dumps(seen))
        super().write()

    def _uses(self) -> Uses:
        optimizer = max(
            self._optimizers.values(),
            key=lambda each: sum(p.numel() for group in each.param_groups for p in group["params"]),
        )
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        kind = type(optimizer)
        models = self._models.models
        options: dict[str, object] = {"hook": self._has_hook}
        if self._models.wrapper == "torch":
            for option in ("gradient_as_bucket_view", "static_graph", "find_unused_parameters"):
                options[option] = bool(getattr(models[0], option, False))
        plain = {
            name: value
            for name, value in optimizer.param_groups[0].items()
            if name != "params" and isinstance(value, bool | int | float | None)
        }
        return Uses(
            backend=self._backend,
            wrapper=self._models.wrapper,
            options=options,
            optimizer=kind.__name__ if kind.__module__.startswith("torch.optim") else "",
            optimizer_options=plain,
            num_optimizers=len(self._optimizers),
            shapes=tuple(tuple(p.shape) for p in parameters[:_MOST_SHAPES]),
            dtype=str(parameters[0].dtype).removeprefix("torch."),
            device=parameters[0].device.type,
            has_loader=self._loaders.was_seen,
            num_workers=self._loaders.num_workers,
            pin_memory=self._pins,
            num_nodes=self._placement.num_nodes,
            dtype_of_loss=str(self._losses[0].dtype).removeprefix("torch.") if self._losses else "",
        )


def seen_file(directory: Path, rank: int) -> Path:
    """Where a rank leaves its losses and what the script uses."""
    return directory / f"seen-{rank}.json"


def main(arguments: list[str]) -> None:
    """Make the changes, have this process watched, and run the script in it.

    Raises:
        ConfigurationError: No measurement was requested.
    """
    asked = measurement()
    if asked is None:
        raise ConfigurationError(
            "evenstep.bench.remedies.probe is started by `evenstep bench --try`, and is no command of its own."
        )
    wanted, path, *rest = arguments
    given = json.loads(wanted)
    placement = current_placement()
    probe = TryingProbe(asked, placement)
    # A script that sets no seed begins with the same weights in every run, and so its losses can be compared.
    random.seed(placement.rank)
    torch.manual_seed(placement.rank)
    with Patches() as patches:
        apply_changes(patches, given["changes"], given["settings"])
        probe.install(patches)
        try:
            run_observed(path, rest)
        finally:
            probe.write()


if __name__ == "__main__":
    main(sys.argv[1:])
