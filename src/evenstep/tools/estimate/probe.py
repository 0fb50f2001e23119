"""What a model, its optimizer and a step take: counted on tensors that exist, or on "meta", where none do."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer

from evenstep.errors import UsageError
from evenstep.ground.compat import torch_pytree as pytree
from evenstep.optim.sharded.sharded_optimizer import ShardedOptimizer
from evenstep.replica.gradients.buckets.layout import ParameterSpec
from evenstep.tools.estimate.footprint import Sizes
from evenstep.tools.observing.patching import Patches
from evenstep.tools.observing.scratch import Scratch, idle_checkpointers
from evenstep.tools.observing.script import run_observed
from evenstep.tools.observing.steps import watch_steps

NUM_STEPS = 3  # states exist after the first, parameters are known in the second, all is counted in the third


class _Saved:
    """A tensor that autograd has saved; its storage counts for as long as it is referenced."""

    __slots__ = ("_count", "tensor")

    def __init__(self, tensor: Tensor, count: SavedBytes) -> None:
        # An operation that saves its own output would hold itself alive through the output's graph.
        self.tensor = tensor.detach()
        self._count = count
        count.add(self.tensor)

    def __del__(self) -> None:
        self._count.remove(self.tensor)


class SavedBytes:
    """Bytes that autograd holds for the backward pass. A context manager: counts what is saved inside.

    Attributes:
        now: Held at this moment.
        peak: The most that was held at once since `restart`.
    """

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0
        self._holders: dict[int, tuple[int, int]] = {}  # by storage: how many hold it, the bytes that were counted
        self._excluded: set[int] = set()
        self._hooks = saved_tensors_hooks(lambda tensor: _Saved(tensor, self), lambda saved: saved.tensor)

    def exclude(self, tensors: Iterable[Tensor]) -> None:
        """From now on don't count the storages of these: parameters and module buffers, which are there anyway."""
        self._excluded |= {_key(tensor) for tensor in tensors if _has_storage(tensor)}

    def restart(self) -> None:
        """Forget the peak."""
        self.peak = self.now

    def add(self, tensor: Tensor) -> None:
        """One more holder of a tensor's storage."""
        if not _has_storage(tensor):
            return
        key = _key(tensor)
        holders, counted = self._holders.get(key, (0, 0))
        if holders == 0 and key not in self._excluded:
            counted = tensor.untyped_storage().nbytes()
            self.now += counted
            self.peak = max(self.peak, self.now)
        self._holders[key] = holders + 1, counted

    def remove(self, tensor: Tensor) -> None:
        """One holder less."""
        if not _has_storage(tensor):
            return
        holders, counted = self._holders.pop(_key(tensor))
        if holders > 1:
            self._holders[_key(tensor)] = holders - 1, counted
        else:
            self.now -= counted

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and type(tensor) in (Tensor, nn.Parameter)


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def storage_bytes(tensors: Iterable[object]) -> int:
    """Of tensors, a storage that several share once."""
    found = {_key(each): each for each in tensors if isinstance(each, Tensor) and _has_storage(each)}
    return sum(each.untyped_storage().nbytes() for each in found.values())


def state_tensors(optimizer: Optimizer) -> list[object]:
    """All tensors of an optimizer's state."""
    return [leaf for state in optimizer.state.values() for leaf in pytree.tree_leaves(state)]


def specs_of(named: Iterable[tuple[str, Tensor]]) -> tuple[ParameterSpec, ...]:
    """What a layout has to know of parameters."""
    return tuple(ParameterSpec(name, tuple(p.shape), p.dtype, p.device) for name, p in named)


# ---------------------------------------------------------------------- a model, nowhere


def sizes_of(
    model: nn.Module,
    build_optimizer: Callable[[Sequence[nn.Parameter]], Optimizer],
    inputs: Sequence[Any] = (),
) -> Sizes:
    """Sizes of a model on the device "meta", where tensors have shapes and no memory.

    Args:
        model: On "meta".
        build_optimizer: Makes the optimizer from the trained parameters.
        inputs: Arguments of the model on "meta"; their first dimension is the batch. Empty: activations aren't counted.

    Raises:
        UsageError: The model can't run on "meta", or nothing in it is trained.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise UsageError("the model has no parameter that is trained.")
    frozen = [p for p in model.parameters() if not p.requires_grad]
    fixed_bytes = storage_bytes([*frozen, *model.buffers()])
    trained = [p for _, p in named]
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    try:
        with torch.device("cpu"):  # counters of steps, which optimizers read
            optimizer = build_optimizer(trained)
            optimizer.step()
    except (RuntimeError, NotImplementedError) as error:
        raise UsageError(f'the optimizer can\'t step on the device "meta": {error}') from error
    state_bytes = storage_bytes(state_tensors(optimizer))
    optimizer.zero_grad()
    batch = _batch_of(inputs)
    whole = fixed = 0
    if batch:
        whole = _saved_by(model, inputs)
        part = max(2, batch // 2)  # batch normalisation refuses to train on one sample
        if batch > part:
            half = _saved_by(model, _cut(inputs, batch, part))
            per_sample = (whole - half) / (batch - part)
            fixed = max(0, round(whole - per_sample * batch))
    return Sizes(
        parameters=specs_of(named),
        fixed_bytes=fixed_bytes,
        state_bytes=state_bytes,
        activation_bytes=whole,
        num_samples=batch,
        activation_fixed_bytes=fixed,
        largest_unit_bytes=largest_unit_bytes(model),
    )


def largest_unit_bytes(model: nn.Module) -> int:
    """Parameters of the largest part that FSDP2 gathers at once, where each item of a list of layers is a part, and
    what is left is another."""
    sizes, inside = [], set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and id(module) not in inside:
            for layer in module:
                inside |= {id(each) for each in layer.modules()}
                sizes.append(storage_bytes(layer.parameters()))
    rest = storage_bytes(model.parameters()) - sum(sizes)
    return max([*sizes, rest])


def _batch_of(inputs: Sequence[Any]) -> int:
    first = next((leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim()), None)
    return 0 if first is None else int(first.shape[0])


def _cut(inputs: Sequence[Any], batch: int, length: int) -> Any:
    def cut(leaf: Any) -> Any:
        is_batch = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch
        return leaf[:length].clone() if is_batch else leaf

    return pytree.tree_map(cut, list(inputs))


def _saved_by(model: nn.Module, inputs: Sequence[Any]) -> int:
    """Bytes that a forward pass and a loss leave for the backward pass."""
    counted = SavedBytes()
    counted.exclude([*model.parameters(), *model.buffers()])
    try:
        with counted:
            leaves = [leaf for leaf in pytree.tree_leaves(model(*inputs)) if isinstance(leaf, Tensor)]
            loss = sum(
                (leaf.float().square().mean() for leaf in leaves if leaf.requires_grad), torch.zeros((), device="cpu")
            )
        del loss
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise UsageError(
            f'the model can\'t run on the device "meta", where activations are counted: {error}'
        ) from error
    return counted.peak


# ---------------------------------------------------------------------- a script, in its own process


@dataclass
class _Watch:
    """What is learned while a script runs.

    Attributes:
        out: Where it is written.
        saved: What autograd holds.
        batch: Rows of the first tensor that the model was called with; 0 if there was none.
        model: The module that was called first in a step.
        num_steps: Of the optimizer that stepped first.
        gradient_bytes: Before its newest step.
        optimizers: That have stepped, in order.
    """

    out: Path
    saved: SavedBytes
    batch: int = 0
    model: nn.Module | None = None
    num_steps: int = 0
    gradient_bytes: int = 0
    optimizers: dict[int, Optimizer] = field(default_factory=dict)

    def called(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Of the first call in a step: that is the whole model's."""
        if self.model is None:
            self.model, self.batch = module, _batch_of(args)
            self.saved.exclude([*module.parameters(), *module.buffers()])

    def stepping(self, optimizer: Optimizer) -> None:
        """Gradients are there, and an optimizer is known."""
        self.optimizers.setdefault(id(optimizer), optimizer)
        if self._is_first(optimizer):
            self.gradient_bytes = storage_bytes(p.grad for p in self._parameters())

    def stepped(self, optimizer: Optimizer) -> None:
        """After enough steps of the first optimizer write what there is, and end the script."""
        if not self._is_first(optimizer):
            return
        self.num_steps += 1
        if self.num_steps < NUM_STEPS:
            self.model = None
            self.saved.restart()
            return
        parameters = self._parameters()
        model = nn.Module() if self.model is None else self.model
        trained = {id(p) for p in parameters}
        fixed = [each for each in (*model.parameters(), *model.buffers()) if id(each) not in trained]
        received = {
            "fixed_bytes": storage_bytes(fixed),
            "largest_unit_bytes": largest_unit_bytes(model),
            "parameters": [[list(p.shape), str(p.dtype).removeprefix("torch.")] for p in parameters],
            "state_bytes": self._count_state(),
            "gradient_bytes": self.gradient_bytes,
            "activation_bytes": self.saved.peak,
            "num_samples": self.batch,
            "peak_bytes": _peak_bytes(),
        }
        self.out.write_text(json.dumps(received))
        raise SystemExit(0)

    def _count_state(self) -> int:
        """Bytes; an optimizer that steps a shard keeps its state elsewhere than torch's do."""
        flat = [each for each in self.optimizers.values() if isinstance(each, ShardedOptimizer)]
        plain = [each for each in self.optimizers.values() if not isinstance(each, ShardedOptimizer)]
        of_plain = storage_bytes([tensor for each in plain for tensor in state_tensors(each)])
        return of_plain + sum(each.state_bytes for each in flat)

    def _is_first(self, optimizer: Optimizer) -> bool:
        return next(iter(self.optimizers)) == id(optimizer)

    def _parameters(self) -> list[nn.Parameter]:
        """Of all optimizers. One inside another one steps memory that the outer one's parameters are views of."""
        found: list[nn.Parameter] = []
        seen: set[int] = set()
        for optimizer in self.optimizers.values():
            new = [p for group in optimizer.param_groups for p in group["params"] if _key(p) not in seen]
            seen |= {_key(p) for p in new}
            found += new
        return found


def _peak_bytes() -> int:
    on_gpu = int(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else 0
    return on_gpu or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(out: str, script: str, arguments: Sequence[str]) -> None:
    """Run a script for some steps, and write what it takes. It ends where its third optimizer step has ended."""
    watch = _Watch(Path(out), SavedBytes())
    with Patches() as patches:
        # Three steps neither resume a training nor replace its files.
        idle_checkpointers(patches)
        Scratch(Path(out).parent).install(patches)
        watch_steps(patches, watch.stepping, watch.stepped)
        patches.later(register_module_forward_pre_hook(watch.called).remove)
        with watch.saved:
            run_observed(script, arguments)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
