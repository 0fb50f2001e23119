"""Does a converted script compute on one rank what the script computed?

The same seed gives other batches and other random numbers to a converted script, so that two runs can't be compared.
The script as it was runs first, under observation: it leaves the weights and buffers that it starts with, each batch
that reaches a loop, and the random streams before it. The converted script is given all three. Gradients and weights
must agree then, step by step. The loop gets the first batches of an epoch and its last one, which may be shorter.

What a replay hides is compared beside it: how many batches a loop over a loader has, their sizes, and their samples.
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

_FIRST = 4  # batches of an epoch that reach the loop, beside the last one
_MOST_STEPS = 40
_LAST = 1 << 60
_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
_MOST_ELEMENTS = 1 << 14  # of a tensor that are compared, evenly drawn
_MOST_APART = 1e-4  # of gradients; with weights given by a number, a loss is multiplied and divided again
_MOST_APART_HALF = 2e-2  # in less than float32
_MOST_APART_WEIGHTS = 2e-2  # of what the steps changed, which some optimizers make much of tiny gradients


@dataclass(frozen=True)
class Replay:
    """What a replay has shown.

    Attributes:
        num_steps: That were compared.
        differences: How the converted script differs from the script as it was.
        epoch_steps: Optimizer steps of the first epoch that is trained on, or of its beginning if it has no end.
    """

    num_steps: int
    differences: tuple[str, ...]
    epoch_steps: int


def replay(script: str, converted: str, arguments: Sequence[str], *, say: Callable[[str], None]) -> Replay:
    """Compare a converted script with the script as it was, on one rank.

    Args:
        script: As it was.
        converted: Beside it.
        arguments: Given to both scripts.
        say: Told what is going on.

    Raises:
        UsageError: One of them fails, or the script as it was makes no steps.
    """
    with private_directory("replay") as root:
        for mode, path in (("record", script), ("replay", converted)):
            say(f"{path} in one process, " + ("as it was" if mode == "record" else "given the same batches"))
            command = [sys.executable, "-m", __name__, str(root), mode, path, *arguments]
            env = {**with_settings(), "TORCHDYNAMO_DISABLE": "1"}
            done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
            if done.returncode:
                # From the script's own line on: those before are of this module.
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
    """The distance of two lists of tensors, as a share of the size of a third one."""
    if [each is None for each in was] != [each is None for each in now]:
        return float("inf")
    pairs = [(one, other) for one, other in zip(was, now, strict=True) if one is not None and other is not None]
    if any(one.shape != other.shape for one, other in pairs):
        return float("inf")
    distance = math.sqrt(sum(float((one - other).square().sum()) for one, other in pairs))
    size = math.sqrt(sum(float(each.square().sum()) for each in by if each is not None))
    return distance / size if size else distance


class _Observed:
    """This process, which becomes one of the two scripts.

    Args:
        root: Where the script as it was leaves what the converted one is given.
        mode: "record" or "replay".
    """

    def __init__(self, root: Path, mode: str) -> None:
        self._root, self._mode = root, mode
        self._num_loops = self._num_steps = 0
        self._loops: list[dict[str, Any]] = []
        self._order: dict[int, int] = {}  # of parameters as modules got them, by id
        self._kept: list[Tensor] = []  # so that an id is no other one's later
        self._start: dict[int, Tensor] = {}  # weights before the first step
        self._grads: list[Tensor | None] = []
        self._is_reading = self._is_half = False

    def install(self, patches: Patches) -> None:
        """Observe from now on, until the patches are undone."""
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
        # Padded to the longest of its batch, a sample looks otherwise in another order.
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
        """The batch that reaches the loop: this one, or the recorded one, with the weights and streams from there."""
        path = self._root / f"batch-{loop}-{index}"
        modules = self._modules() if self._num_steps == 0 else []
        if self._mode == "record":
            states = [module.state_dict() for module in modules]
            torch.save({"batch": batch, "streams": randomness.capture(), "states": states}, path)
        elif path.exists():
            # Files of this program's own, in a directory that nobody else can write to.
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
        """The models of the script, without their wrappers, in the order in which they were made."""
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
        """Leave what loops over loaders were like."""
        torch.save(self._loops, self._root / self._mode)


def _is_of_all(dataset: Any, num_samples: int) -> bool:
    """Whether so many samples are all of a data set, whose samples are the same each time that they are read."""
    try:
        with randomness.preserved():
            first, again = ([first_samples(dataset[k]) for k in range(min(num_samples, 8))] for _ in range(2))
            return len(dataset) == num_samples and all(map(torch.equal, first, again))
    except (TypeError, LookupError, NotImplementedError):  # a stream, or samples without numbers
        return False


def _shapes(state: Mapping[str, Any]) -> dict[str, object]:
    return {name: getattr(value, "shape", None) for name, value in state.items()}


def _drawn(tensor: Tensor) -> Tensor:
    """[at most _MOST_ELEMENTS] float64 elements of a tensor, the same ones of every tensor of that size."""
    with torch.no_grad():
        flat = (tensor.to_dense() if tensor.is_sparse else tensor.detach()).reshape(-1)
        return flat[:: -(-flat.numel() // _MOST_ELEMENTS) or 1].to("cpu", torch.float64, copy=True)


def main() -> None:
    """Become a script that is observed: the directory, "record" or "replay", the script and its arguments."""
    root, mode, script, *arguments = sys.argv[1:]
    observed = _Observed(Path(root), mode)
    if mode == "record":
        # The seed that convert writes where there is none: data drawn at random are the same in both scripts.
        randomness.seed_everything(0)
    with Patches() as patches:
        observed.install(patches)
        try:
            run_observed(script, arguments)
        finally:
            observed.close()


if __name__ == "__main__":
    main()
