"""Whether a converted script computes on one rank what the original script computes.

With the same seed, a converted script gets other batches and other random numbers, so two plain runs can't be compared.
Instead, the original script runs first and records the weights and buffers that it starts with, each batch that reaches
a loop, and the state of the random generators before the batch. The converted script runs with these. Gradients and
weights must then agree step by step. A loop gets the first batches of an epoch and the last one, which may be shorter.

A replay would hide differences of the loaders, so their batches are compared as well: number, sizes and samples.
"""

from __future__ import annotations

import gc
import hashlib
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader as TorchDataLoader

from evenstep.data.loader import DataLoader
from evenstep.errors import UsageError
from evenstep.ground.computing import randomness
from evenstep.ground.computing.pytrees import flatten_tensors
from evenstep.ground.environment import with_settings
from evenstep.ground.host.temporary import private_directory
from evenstep.tools.observing.models import first_samples
from evenstep.tools.observing.patching import Patches
from evenstep.tools.observing.script import run_observed

_FIRST = 4  # batches of an epoch that reach the loop before the last one
_MOST_STEPS = 40
_LAST = 1 << 60
_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
_MOST_ELEMENTS = 1 << 14  # compared elements of a tensor, evenly spaced
_MOST_APART = 1e-4  # tolerance for gradients: a weighted loss is multiplied and divided again
_MOST_APART_HALF = 2e-2  # tolerance for gradients in less than float32
_MOST_APART_WEIGHTS = 2e-2  # tolerance for changes of weights: some optimizers amplify tiny gradients


@dataclass(frozen=True)
class Replay:
    """The result of a replay.

    Attributes:
        num_steps: The number of steps compared.
        differences: How the converted script differs from the original.
        epoch_steps: The optimizer steps of the first training epoch, or of the batches read of it.
    """

    num_steps: int
    differences: tuple[str, ...]
    epoch_steps: int


def replay(script: str, converted: str, arguments: Sequence[str], *, say: Callable[[str], None]) -> Replay:
    """Compare a converted script with the original on one rank.

    Args:
        script: The path of the original.
        converted: The path of the converted script, in the same folder.
        arguments: The command-line arguments of both scripts.
        say: Called with each line of progress.

    Raises:
        UsageError: A script fails, or the original makes no optimizer steps.
    """
    with private_directory("replay") as root:
        for mode, path in (("record", script), ("replay", converted)):
            say(f"{path} in one process, " + ("as it was" if mode == "record" else "given the same batches"))
            command = [sys.executable, "-m", __name__, str(root), mode, path, *arguments]
            env = {**with_settings(), "TORCHDYNAMO_DISABLE": "1"}
            done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
            if done.returncode:
                # Begin the traceback at the script's own line: the lines before are of this module.
                said = done.stderr[max(0, done.stderr.find(f'  File "{path}"')) :][-4000:].rstrip()
                raise UsageError(f"{path} in one process failed with status {done.returncode}. It said:\n{said}")
        numbers = [len(list(root.glob(f"{mode}-step-*"))) for mode in ("record", "replay")]
        if not numbers[0]:
            raise UsageError(f"{script} has made no step that could be seen: a call of a torch optimizer's step().")
        loop = max(torch.load(root / "record", weights_only=True), key=lambda each: each["steps"])
        epoch = round(loop["steps"] * len(loop["sizes"]) / max(1, loop["given"]))  # some batches didn't reach the loop
        return Replay(min(numbers), tuple(_differences(root, numbers)), epoch)


def _differences(root: Path, numbers: Sequence[int]) -> Iterator[str]:
    loops = [torch.load(root / mode, weights_only=True) for mode in ("record", "replay")]
    for number, (was, now) in enumerate(zip(*loops, strict=False)):
        if was["is_whole"] and now["is_whole"] and was["sizes"] != now["sizes"]:
            sizes = [f"{len(each['sizes'])} batches, {sum(each['sizes'])} samples" for each in (was, now)]
            yield f"loop {number + 1} over a loader has {sizes[1]}; as the script was, {sizes[0]}"
            return
        shared = (Counter(was["samples"]) & Counter(now["samples"])).total()
        if was["is_of_all"] and now["is_of_all"] and shared < len(was["samples"]):
            yield f"loop {number + 1} over a loader: {len(was['samples']) - shared} samples are missing or are others"
    if numbers[0] != numbers[1]:
        yield f"the script makes {numbers[0]} steps with these batches, the converted one {numbers[1]}"
    for step in range(min(numbers)):
        was, now = (torch.load(root / f"{mode}-step-{step}", weights_only=True) for mode in ("record", "replay"))
        most = _MOST_APART_HALF if was["is_half"] else _MOST_APART
        for what, limit, by in (("grads", most, "grads"), ("weights", _MOST_APART_WEIGHTS, "changes")):
            apart = _apart(was[what], now[what], was[by])
            if not apart <= limit:
                name = "the gradient" if what == "grads" else "the change of the weights"
                yield f"step {step + 1}: {name} differs by {apart:.1e} of its size, with the same weights and batches"
                return


def _apart(was: Sequence[Tensor | None], now: Sequence[Tensor | None], by: Sequence[Tensor | None]) -> float:
    """The Euclidean distance of two lists of tensors, divided by the norm of a third list."""
    if [each is None for each in was] != [each is None for each in now]:
        return float("inf")
    pairs = [(one, other) for one, other in zip(was, now, strict=True) if one is not None and other is not None]
    if any(one.shape != other.shape for one, other in pairs):
        return float("inf")
    distance = math.sqrt(sum(float((one - other).square().sum()) for one, other in pairs))
    size = math.sqrt(sum(float(each.square().sum()) for each in by if each is not None))
    return distance / size if size else distance


class _Observed:
    """Observes the script that runs in this process: the original or the converted one.

    Args:
        root: The directory in which the original leaves batches and states for the converted script.
        mode: "record" for the original, "replay" for the converted script.
    """

    def __init__(self, root: Path, mode: str) -> None:
        self._root, self._mode = root, mode
        self._num_loops = self._num_steps = 0
        self._loops: list[dict[str, Any]] = []
        self._order: dict[int, int] = {}  # by id of a parameter, when a module registered it
        self._kept: list[Tensor] = []  # keeps parameters alive, so that no id is reused
        self._start: dict[int, Tensor] = {}  # weights before the first step
        self._grads: list[Tensor | None] = []
        self._is_reading = self._is_half = False

    def install(self, patches: Patches) -> None:
        """Start to observe loaders, modules and optimizers, until the patches are undone."""
        for kind in (TorchDataLoader, DataLoader):
            patches.replace(kind, "__iter__", lambda original: lambda loader: self._loop(original, loader))
        for handle in (
            register_module_parameter_registration_hook(self._registered),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ):
            patches.later(handle.remove)

    # ------------------------------------------------------------------ batches

    def _loop(self, original: Callable[[Any], Iterator[Any]], loader: Any) -> Iterator[Any]:
        if self._is_reading:  # a loader inside a loader
            return original(loader)
        return self._batches(original(loader), loader.dataset)

    def _batches(self, batches: Iterator[Any], dataset: Any) -> Iterator[Any]:
        number, steps = self._num_loops, self._num_steps
        self._num_loops += 1
        loop: dict[str, Any] = {"sizes": [], "samples": [], "shapes": [], "is_whole": False, "given": 0, "steps": 0}
        loop["is_of_all"] = False
        self._loops.append(loop)
        while (batch := self._next(batches, loop)) is not None:
            if len(loop["sizes"]) > _FIRST:  # the last one reaches the loop, too
                while (following := self._next(batches, loop)) is not None:
                    batch = following
            loop["given"] += 1
            yield self._given(number, len(loop["sizes"]), batch[0])
            loop["steps"] = self._num_steps - steps
        # Samples that are padded to the longest of their batch look different in another order.
        is_padded = len(set(loop["shapes"])) > 1
        loop |= {"is_whole": True, "is_of_all": not is_padded and _is_of_all(dataset, sum(loop["sizes"]))}
        if self._num_steps > steps:
            raise SystemExit(0)  # an epoch was trained on

    def _next(self, batches: Iterator[Any], loop: dict[str, Any]) -> tuple[Any] | None:
        self._is_reading = True
        try:
            batch = next(batches)
        except StopIteration:
            return None
        finally:
            self._is_reading = False
        samples = first_samples(batch)
        loop["sizes"].append(len(samples))
        loop["shapes"].append(str(samples.shape[1:]))
        loop["samples"] += [hashlib.sha256(str(row.tolist()).encode()).hexdigest() for row in samples.cpu()]
        return (batch,)

    def _given(self, loop: int, index: int, batch: Any) -> Any:
        """Record a batch, weights and generators, or restore the recorded ones. Returns the batch for the loop."""
        path = self._root / f"batch-{loop}-{index}"
        modules = self._modules() if self._num_steps == 0 else []
        if self._mode == "record":
            states = [module.state_dict() for module in modules]
            torch.save({"batch": batch, "streams": randomness.capture(), "states": states}, path)
        elif path.exists():
            # The recording run wrote this file, in a directory that nobody else can write to.
            given = torch.load(path, weights_only=False, map_location="cpu")
            for module, state in zip(modules, given["states"], strict=False):
                if _shapes(state) == _shapes(module.state_dict()):
                    module.load_state_dict(state)
            randomness.restore(given["streams"])
            tensors, rebuild = flatten_tensors(given["batch"])
            batch = rebuild([each.to(first_samples(batch).device) for each in tensors])
        return batch

    # ------------------------------------------------------------------ models

    def _registered(self, module: nn.Module, name: str, parameter: Any) -> None:
        if parameter is not None and id(parameter) not in self._order:
            self._order[id(parameter)] = len(self._order)
            self._kept.append(parameter)

    def _modules(self) -> list[nn.Module]:
        """The outermost modules of the script, without wrappers, in the order in which they were made."""
        modules = [each for each in gc.get_objects() if isinstance(each, nn.Module)]
        modules = [each for each in modules if not isinstance(each, _WRAPPERS) and [*each.parameters()]]
        inner = {id(child) for each in modules for child in each.children()}
        outer = [each for each in modules if id(each) not in inner]
        return sorted(outer, key=lambda each: min(self._order.get(id(by), _LAST) for by in each.parameters()))

    # ------------------------------------------------------------------ steps

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        for each in parameters:
            self._start.setdefault(id(each), _drawn(each))
        self._grads = [None if each.grad is None else _drawn(each.grad) for each in parameters]
        self._is_half = any(each.dtype.itemsize < 4 for each in parameters) or torch.is_autocast_enabled()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        weights = [_drawn(each) for each in parameters]
        changes = [now - self._start[id(each)] for now, each in zip(weights, parameters, strict=True)]
        step = {"grads": self._grads, "weights": weights, "changes": changes, "is_half": self._is_half}
        torch.save(step, self._root / f"{self._mode}-step-{self._num_steps}")
        self._num_steps += 1
        if self._num_steps == _MOST_STEPS:
            raise SystemExit(0)

    def close(self) -> None:
        """Save the records of all loops over loaders."""
        torch.save(self._loops, self._root / self._mode)


def _is_of_all(dataset: Any, num_samples: int) -> bool:
    """Whether a data set has exactly `num_samples` samples, and returns the same ones each time."""
    try:
        with randomness.preserved():
            first, again = ([first_samples(dataset[k]) for k in range(min(num_samples, 8))] for _ in range(2))
            return len(dataset) == num_samples and all(map(torch.equal, first, again))
    except (TypeError, LookupError, NotImplementedError):  # a stream, or samples without numbers
        return False


def _shapes(state: Mapping[str, Any]) -> dict[str, object]:
    return {name: getattr(value, "shape", None) for name, value in state.items()}


def _drawn(tensor: Tensor) -> Tensor:
    """At most `_MOST_ELEMENTS` evenly spaced elements of a tensor: a flat float64 tensor on the CPU."""
    with torch.no_grad():
        flat = (tensor.to_dense() if tensor.is_sparse else tensor.detach()).reshape(-1)
        return flat[:: -(-flat.numel() // _MOST_ELEMENTS) or 1].to("cpu", torch.float64, copy=True)


def main() -> None:
    """Run a script under observation. Command line: the directory, "record" or "replay", the script, its arguments."""
    root, mode, script, *arguments = sys.argv[1:]
    observed = _Observed(Path(root), mode)
    if mode == "record":
        # The seed that convert writes where there is none, so that both scripts draw the same random data.
        randomness.seed_everything(0)
    with Patches() as patches:
        observed.install(patches)
        try:
            run_observed(script, arguments)
        finally:
            observed.close()


if __name__ == "__main__":
    main()
