"""One rank of `evenstep verify`: records samples, losses, gradients and parameters of each step of a script.

The script runs unchanged, with torch's wrapper, evenstep's or none.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evenstep import world as worlds
from evenstep.errors import EvenstepError
from evenstep.ground.compat.torch_autograd import without_torch_function
from evenstep.ground.compat.torch_modules import BatchNorm
from evenstep.ground.compat.torch_tensors import is_dtensor
from evenstep.ground.environment import current_placement
from evenstep.launcher.spawn.own_ranks import refuse_own_ranks
from evenstep.tools.observing.changes import replace_batch_sizes, same_samples, switch_off_dropout
from evenstep.tools.observing.graphs import is_mean, node_counts
from evenstep.tools.observing.launch import leave_together
from evenstep.tools.observing.models import (
    digest,
    first_samples,
    is_trained,
    ranks_with_the_same_samples,
    uses_fsdp,
)
from evenstep.tools.observing.patching import Patches
from evenstep.tools.observing.record import NO_CALL, Ended, Loop, Recorder, Subscriber
from evenstep.tools.observing.script import Place, Script, run_observed
from evenstep.tools.verify.double import InDouble, widen
from evenstep.tools.verify.evidence import NUM_PROBES, Plan, Seen, probe, thinned, write_step
from evenstep.tools.verify.rehearsal import rehearsing

_MOST_NAMES = 5_000  # recorded modules of a forward pass
_MOST_DRAWS = 8  # recorded states of the random stream in a step
_WAIT_S = 120.0  # longest wait for the other ranks at the end


@contextlib.contextmanager
def recording(file: Path, *, rank: int) -> Iterator[None]:
    """Record this process by the plan in a file. The script ends with the plan's last step."""
    with Patches() as patches:
        plan = Plan.read(file)
        steps = Steps(plan, rank, patches)
        observers = [steps, InDouble(patches, is_sharded=plan.is_sharded)] if plan.in_double else [steps]
        Recorder(*observers).install(patches)
        yield


class Steps(Subscriber):
    """Records the steps of one rank, until the patches are undone."""

    def __init__(self, plan: Plan, rank: int, patches: Patches) -> None:
        self._plan, self._rank, self._patches = plan, rank, patches
        self._script = Script(plan.script)
        self._num_steps = 0
        self._seen = Seen()
        self._batch_sizes: list[int] = []
        self._names: dict[int, str] = {}  # by id of a parameter or module, its name
        self._parameters: dict[str, Tensor] = {}
        self._models: dict[str, nn.Module] = {}  # by the prefix of their parameters' names
        self._wrappers: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._made: weakref.WeakKeyDictionary[Any, list[Place]] = weakref.WeakKeyDictionary()  # by loader
        self._wrapped: list[Place] = []  # where the first wrapper was made
        self._is_back = False
        self._added: dict[str, Tensor] = {}  # by parameter, the gradient that the present backward pass has added
        self._passes: list[dict[str, Tensor]] = []  # by backward pass, probes of the gradients that it added
        self._num_windows = 0  # accumulation windows of this step that have ended
        self._applied: dict[str, Tensor] = {}  # by parameter, a probe of the gradient that the optimizer gets
        self._values: dict[str, Tensor] = {}  # by name, the tensors of this step, on rank 0
        self._num_scaled_steps = 0  # calls of a GradScaler's step
        switch_off_dropout(patches, self._about_to_drop)
        replace_batch_sizes(patches, self._batch_size)
        same_samples(patches)

    # ------------------------------------------------------------------ data

    def _batch_size(self, size: int) -> int:
        """The batch size of a loader for the same global batch as in the run on the most ranks."""
        self._batch_sizes.append(size)
        number = len(self._batch_sizes)
        others = (instead for passed, instead in self._plan.batch_sizes[number - 1 : number] if passed == size)
        return next(others, size)  # if the size differs from that run's, the script has divided the batch itself

    def loader(self, loader: Any, *args: Any, **kwargs: Any) -> None:
        """See base class."""
        self._made.setdefault(loader, self._script.places()[:1])

    def batch(self, loop: Loop, batch: Any) -> None:
        """See base class."""
        if torch.is_grad_enabled():
            self._at("loader", self._made.get(loop.loader))
            self._seen.loaded += [digest(row) for row in first_samples(batch)]

    # ------------------------------------------------------------------ forward

    def wrap(self, wrapper: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        """See base class."""
        self._wrapped = self._wrapped or self._script.places()[:1]

    def module(self, module: nn.Module, args: Any, kwargs: Any, depth: int) -> Ended:
        """See base class."""
        if not torch.is_grad_enabled():  # an evaluation
            return None
        is_wrapper = isinstance(module, nn.parallel.DistributedDataParallel)
        if is_wrapper:
            self._wrappers.add(module)
        if depth == 0 and is_trained(module):
            self._begin_forward(module.module if is_wrapper else module, args, kwargs)
        self._note_module(module)
        if is_wrapper or depth > 1 or not is_trained(module):
            return None
        before = _stream()

        def ended() -> None:
            self._seen.draws |= before != _stream() and not _virtual_ranks()  # dropout is off, and draws nothing

        return ended

    def _begin_forward(self, model: Any, args: Any, kwargs: Any) -> None:
        self._at("model")
        samples = first_samples((args, kwargs))
        self._seen.rows.append([digest(row) for row in samples])
        if not any(known is model for known in self._models.values()):
            if not self._models and samples.dtype != torch.float64:  # a float64 input may be computed
                self._seen.initial["inputs"] = float(probe(samples).abs().sum())
            self._adopt(model)

    def _adopt(self, model: nn.Module) -> None:
        if self._plan.in_double:
            widen(model)
        prefix = f"{type(model).__name__}." if self._models else ""
        if any(name.startswith(prefix) for name in self._parameters if prefix):
            prefix = f"{type(model).__name__}{len(self._models)}."
        self._models[prefix] = model
        for name, module in model.named_modules():
            self._names.setdefault(id(module), prefix + name)
        for name, parameter in model.named_parameters():
            if id(parameter) in self._names:
                continue
            self._names[id(parameter)] = prefix + name
            self._parameters[prefix + name] = parameter
            if type(parameter) is nn.Parameter:
                self._seen.initial[f"param/{prefix}{name}"] = float(probe(parameter).abs().sum())
            if parameter.requires_grad:
                hook = functools.partial(self._arrived, prefix + name)
                handle = parameter.register_hook(hook)  # type: ignore[no-untyped-call]
                self._patches.later(handle.remove)

    def _note_module(self, module: nn.Module) -> None:
        name = self._names.get(id(module))
        if name is None:
            return
        if len(self._seen.rows) == 1 and len(self._seen.modules) < _MOST_NAMES:
            self._seen.modules.append(name)
        if isinstance(module, BatchNorm) and (module.training or not module.track_running_stats):
            names = self._seen.synced if isinstance(module, nn.SyncBatchNorm) else self._seen.unsynced
            if name not in names:
                names.append(name)

    def _about_to_drop(self) -> bool:
        if torch.is_grad_enabled() and not self._is_back and len(self._seen.dropouts) < _MOST_DRAWS:
            self._seen.dropouts.append(_stream())
        return bool(_virtual_ranks()) or not torch.is_grad_enabled()

    # ------------------------------------------------------------------ backward

    def backward(self, root: Any, weight: Any, scale: float) -> Ended:
        """See base class."""
        if not self._models:
            return None
        self._at("loss")
        seen = self._seen
        if not isinstance(root, Tensor) or root.numel() != 1:
            seen.losses.append((float("nan"), 0.0))
        else:
            seen.losses.append((float(root.detach()) / scale, None if weight is None else float(weight)))
            seen.graphs.append(node_counts(root))
            seen.means += weight is None and is_mean(root.grad_fn)
            seen.held_back |= any(not wrapper.require_backward_grad_sync for wrapper in self._wrappers)
        seen.windows.append(self._num_windows)
        self._num_windows += any(wrapper.require_backward_grad_sync for wrapper in self._wrappers)
        self._is_back = True
        return self._ended_backward

    def _ended_backward(self) -> None:
        self._is_back = False
        self._seen.virtual_ranks.append({name: digest(value) for name, value in self._added.items()})
        self._passes.append({name: probe(value) for name, value in self._added.items()})
        self._added = {}

    def _arrived(self, name: str, gradient: Tensor) -> None:
        if is_dtensor(gradient):  # a part of the gradient; `step_begins` reads the whole
            return
        with without_torch_function():
            value = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
            added = self._added.get(name)
            self._added[name] = value.clone() if added is None else added + value

    # ------------------------------------------------------------------ step

    def scaler_step(self, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Ended:
        """Record which steps a GradScaler skips, and skip the same ones in float64, where nothing overflows."""
        call, before = self._num_scaled_steps, self._num_steps
        self._num_scaled_steps += 1
        if call in self._plan.skipped:
            return NO_CALL
        return lambda: self._seen.skipped.append(call) if self._num_steps == before else None

    def step_begins(self, optimizer: Any) -> None:
        """See base class."""
        if _is_skipped(optimizer):
            return
        self._at("optimizer")
        with torch.no_grad():
            scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer divides gradients by it
            if not self._models:  # parameters without a module
                loose = (parameter for group in optimizer.param_groups for parameter in group["params"])
                self._parameters = {f"parameter {i}": p for i, p in enumerate(loose)}
            for name, parameter in self._parameters.items():
                if parameter.grad is None:
                    continue
                grad = _whole(parameter.grad)
                if type(grad) not in (Tensor, nn.Parameter):
                    self._seen.has_hidden = True
                    continue
                with contextlib.suppress(EvenstepError):
                    grad = grad.to_dense() if grad.is_sparse else grad
                    grad = grad if scale is None else grad / scale
                    self._note(f"grad/{name}", grad)
                    self._applied[name] = probe(grad)
            self._seen.settings = [
                {key: float(value) for key, value in group.items() if isinstance(value, int | float | Tensor)}
                for group in optimizer.param_groups
            ]

    def step_ended(self, optimizer: Any, *, is_counted: bool) -> None:
        """Write the record. Each step of each optimizer counts as a step here."""
        if _is_skipped(optimizer):
            return
        seen, self._seen = self._seen, Seen()
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                self._note(f"param/{name}", _whole(parameter), seen)
            for prefix, model in self._models.items():
                for name, buffer in model.named_buffers():
                    self._note(f"buffer/{prefix}{name}", _whole(buffer), seen)
                seen.is_sharded |= uses_fsdp(model)
                seen.shares_with = seen.shares_with or ranks_with_the_same_samples(model, self._rank)
            seen.batch_sizes = list(self._batch_sizes)
            seen.virtual_ranks_of_run = _virtual_ranks()
            if self._wrapped:
                seen.lines["wrapper"] = self._wrapped[0]
            write_step(self._plan, self._rank, self._num_steps, seen, self._values, self._probes())
        self._values, self._applied, self._passes, self._num_windows = {}, {}, [], 0
        self._num_steps += 1
        if self._num_steps == self._plan.num_steps:
            leave_together(Path(self._plan.directory), self._rank, self._plan.world_size, _WAIT_S)

    def _at(self, what: str, places: list[Place] | None = None) -> None:
        """Record the line of the script that is running now, or the given place, for `Seen.lines`."""
        for place in (self._script.places() if places is None else places)[:1]:
            self._seen.lines[what] = place

    def _note(self, name: str, tensor: Tensor, seen: Seen | None = None) -> None:
        (seen or self._seen).digests[name] = digest(tensor)
        if self._rank == 0:
            self._values[name] = thinned(tensor)

    def _probes(self) -> dict[str, Tensor]:
        """One vector for each backward pass, and one for the optimizer's gradient; zeros for missing gradients."""
        names = [name for name, parameter in self._parameters.items() if parameter.requires_grad]
        # Backward passes add nothing to parameters that FSDP2 shards, because they compute with the gathered ones.
        passes = {str(index): given for index, given in enumerate(self._passes) if given}
        if self._applied:
            passes["applied"] = self._applied
        like = {name: _no_probe(self._parameters[name]) for name in names}
        return {key: torch.cat([given.get(name, like[name]) for name in names]) for key, given in passes.items()}


def _stream() -> str:
    """A digest of the states of torch's random generators, on the CPU and the GPU."""
    text = digest(torch.get_rng_state())
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        text += digest(torch.cuda.get_rng_state())
    return text


def _virtual_ranks() -> int:
    """The number of virtual ranks in reproducible mode; 0: it is off."""
    virtual_ranks = getattr(worlds.initialised(), "virtual_ranks", None)
    return int(getattr(virtual_ranks, "num_virtual_ranks", 0))


def _is_skipped(optimizer: Any) -> bool:
    """Whether a fused optimizer skips a step because a GradScaler has found an overflow."""
    return bool(getattr(optimizer, "found_inf", None) or False)


def _whole(tensor: Any) -> Tensor:
    """The full tensor of a DTensor, or another tensor as it is. Collective among the ranks of a DTensor's mesh."""
    whole: Tensor = tensor.full_tensor().detach() if is_dtensor(tensor) else tensor
    return whole


def _no_probe(parameter: Tensor) -> Tensor:
    """Zeros in the place of a missing gradient's probe."""
    numel = parameter.numel() * (2 if parameter.is_complex() else 1)
    return torch.zeros(min(numel, NUM_PROBES), dtype=torch.float64, device="cpu")


def main() -> None:
    """Run the script in this process, and record it or rehearse a resume.

    Command line: the plan's file ("" to record nothing), the rehearsal's file, the script and its arguments.
    """
    plan, rehearsal, script, *arguments = sys.argv[1:]
    rank = current_placement().rank
    refuse_own_ranks()
    with contextlib.ExitStack() as observed:
        if plan:
            observed.enter_context(recording(Path(plan), rank=rank))
        observed.enter_context(rehearsing(Path(rehearsal), rank=rank))
        run_observed(script, arguments)


if __name__ == "__main__":
    main()
