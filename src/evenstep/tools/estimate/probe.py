"""Measures the sizes of a model, its optimizer and a step, with real tensors or with tensors without memory."""

from __future__ import annotations

import functools
import json
import resource
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from evenstep.errors import UsageError
from evenstep.ground.compat import torch_pytree as pytree
from evenstep.ground.compat.torch_profiler import FakeTensor, TorchDispatchMode
from evenstep.optim.sharded.sharded_optimizer import ShardedOptimizer
from evenstep.replica.gradients.buckets.layout import ParameterSpec
from evenstep.tools.estimate.footprint import Sizes
from evenstep.tools.observing.models import num_rows
from evenstep.tools.observing.patching import Patches
from evenstep.tools.observing.record import Recorder, Subscriber
from evenstep.tools.observing.scratch import Scratch, idle_checkpointers
from evenstep.tools.observing.script import run_observed

NUM_STEPS = 3  # the state exists after the first step, all parameters are known in the second, the third is measured

_PLAIN = {Tensor, nn.Parameter, FakeTensor}


class MadeBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the memory of tensors that operations make inside the context, as long as the tensors live.

    Args:
        parameters: Parameters whose gradients no longer count once they are complete.

    Attributes:
        peak: The largest sum so far, without complete gradients; may be set.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self._now = 0
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._alive: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}  # by address of a storage
        self._handles: list[Any] = []

    def __enter__(self) -> MadeBytes:
        self._handles = [
            p.register_post_accumulate_grad_hook(self._is_whole)  # type: ignore[no-untyped-call]
            for p in self._parameters
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()

    def restart(self) -> None:
        """Start to count again from zero."""
        self.peak = self._now = 0

    def add(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Count these storages, too."""
        for storage in storages:
            if (key := storage._cdata) not in self._alive:
                self._alive[key] = storage.nbytes(), weakref.ref(storage, functools.partial(self._forget, key))
                self._now += storage.nbytes()
        self.peak = max(self.peak, self._now)

    def _forget(self, key: int, _: object = None) -> None:
        self._now -= self._alive.pop(key, (0, None))[0]

    def _is_whole(self, parameter: Tensor) -> None:
        for storage in _storages(parameter.grad):
            self._forget(storage._cdata)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if set(types) - _PLAIN:
            return NotImplemented  # a subclass such as DTensor: the operations on its local tensors come here
        result = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _storages((args, kwargs))}
        self.add(storage for storage in _storages(result) if storage._cdata not in given)
        return result


def _storages(tensors: object) -> list[torch.UntypedStorage]:
    """The storages of all plain dense tensors in a pytree, without sparse and distributed ones."""
    dense = (leaf for leaf in pytree.tree_leaves(tensors) if type(leaf) in _PLAIN and leaf.layout is torch.strided)
    return [leaf.untyped_storage() for leaf in dense]


def storage_bytes(tensors: Iterable[object]) -> int:
    """The bytes of tensors; a storage that several tensors share counts once."""
    return sum({storage._cdata: storage.nbytes() for storage in _storages(list(tensors))}.values())


def state_tensors(optimizer: Optimizer) -> list[object]:
    """All tensors of an optimizer's state."""
    return [leaf for state in optimizer.state.values() for leaf in pytree.tree_leaves(state)]


def specs_of(named: Iterable[tuple[str, Tensor]]) -> tuple[ParameterSpec, ...]:
    """The shapes, dtypes and devices of parameters, as a layout needs them."""
    return tuple(ParameterSpec(name, tuple(p.shape), p.dtype, p.device) for name, p in named)


# ---------------------------------------------------------------------- a model without memory


def sizes_of(
    model: nn.Module,
    build_optimizer: Callable[[Sequence[nn.Parameter]], Optimizer],
    inputs: Sequence[Any] = (),
) -> Sizes:
    """Measure the sizes of a model whose tensors have shapes but no memory: fake tensors, or those on "meta".

    Args:
        model: The model, made of such tensors.
        build_optimizer: Makes the optimizer from the trained parameters.
        inputs: The arguments of the model; their first dimension is the batch. Empty: activations aren't counted.

    Raises:
        UsageError: The model or the optimizer reads values of tensors, or the model has no trained parameters.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise UsageError("the model has no parameter that is trained.")
    trained = [p for _, p in named]
    frozen = [p for p in model.parameters() if not p.requires_grad]
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    try:
        with torch.device("cpu"):  # optimizers make counters of steps, and read them
            optimizer = build_optimizer(trained)
            optimizer.step()
            with MadeBytes([]) as made:
                optimizer.step()
    except (RuntimeError, NotImplementedError) as error:
        raise UsageError(f"the optimizer can't step tensors that have no values: {error}") from error
    optimizer.zero_grad()
    batch = num_rows(list(inputs))
    return Sizes(
        parameters=specs_of(named),
        fixed_bytes=storage_bytes([*frozen, *model.buffers()]),
        state_bytes=storage_bytes(state_tensors(optimizer)),
        activation_bytes=_held_by(model, inputs) if batch else 0,
        num_samples=batch,
        largest_unit_bytes=largest_unit_bytes(model),
        stepping_bytes=made.peak,
    )


def largest_unit_bytes(model: nn.Module) -> int:
    """The bytes of the largest unit that FSDP2 gathers at once: an item of a list of layers, or all the rest."""
    sizes, inside = [], set[int]()
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and id(module) not in inside:
            for layer in module:
                inside |= {id(each) for each in layer.modules()}
                sizes.append(storage_bytes(layer.parameters()))
    return max([*sizes, storage_bytes(model.parameters()) - sum(sizes)])


def with_batch(inputs: Sequence[Any], size: int) -> list[Any]:
    """The inputs of a model, resized to another batch size."""
    batch = num_rows(list(inputs))

    def resized(leaf: Tensor) -> Tensor:
        return leaf.new_empty((size, *leaf.shape[1:])) if leaf.dim() > 0 and leaf.shape[0] == batch else leaf

    found: list[Any] = pytree.tree_map_only(Tensor, resized, list(inputs))
    return found


def _held_by(model: nn.Module, inputs: Sequence[Any]) -> int:
    """The peak bytes of a forward and backward pass, with the inputs and without gradients of parameters."""
    try:
        with MadeBytes(model.parameters()) as made:
            made.add(_storages(inputs))
            leaves = [leaf for leaf in pytree.tree_leaves(model(*inputs)) if isinstance(leaf, Tensor)]
            # Like a loss over labels: logits, their logarithms and the gradients of both are often the largest tensors.
            losses = [leaf.float().log_softmax(-1).mean() for leaf in leaves if leaf.requires_grad]
            if losses:
                torch.autograd.backward(losses)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise UsageError(f"the model can't run on tensors that have no values: {error}") from error
    model.zero_grad()
    return made.peak


# ---------------------------------------------------------------------- a script in its own process


@dataclass
class _Watch(Subscriber):
    """Measures a script while it runs.

    Attributes:
        out: The file for the results.
        num_samples: The rows of the first tensor that the model was called with; 0 if there was none.
        model: The first module that was called in a step.
        num_steps: The number of steps of the optimizer that stepped first.
        gradient_bytes: The gradients before its newest step.
        activation_bytes: The peak of the passes before that step.
        optimizers: By id, the optimizers that have stepped, in order.
        made: Counts the memory that the last step makes.
    """

    out: Path
    num_samples: int = 0
    model: nn.Module | None = None
    num_steps: int = 0
    gradient_bytes: int = 0
    activation_bytes: int = 0
    optimizers: dict[int, Optimizer] = field(default_factory=dict)
    made: MadeBytes | None = None

    def module(self, module: nn.Module, args: Any, kwargs: Any, depth: int) -> None:
        """A module is called. The first call of a step is that of the whole model."""
        if self.model is None:
            self.model, self.num_samples = module, num_rows(list(args))

    def step_begins(self, optimizer: Any) -> None:
        """Record the optimizer, and the sizes of gradients and activations."""
        self.optimizers.setdefault(id(optimizer), optimizer)
        if self._is_first(optimizer):
            self.gradient_bytes = storage_bytes(p.grad for p in self._parameters())
            if self.made is not None:
                self.activation_bytes = self.made.peak
                self.made.restart()

    def step_ended(self, optimizer: Any, *, is_counted: bool) -> None:
        """After enough steps of the first optimizer, write the results and end the script."""
        if not self._is_first(optimizer):
            return
        self.num_steps += 1
        if self.num_steps < NUM_STEPS:
            self.model = None
            if self.num_steps == NUM_STEPS - 1:
                self.made = MadeBytes(self._parameters()).__enter__()
            return
        assert self.made is not None
        self.made.__exit__(None, None, None)
        parameters, model = self._parameters(), self.model or nn.Module()
        trained = {id(p) for p in parameters}
        on_gpu = int(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else 0
        received = {
            "fixed_bytes": storage_bytes(
                each for each in (*model.parameters(), *model.buffers()) if id(each) not in trained
            ),
            "largest_unit_bytes": largest_unit_bytes(model),
            "parameters": [[list(p.shape), str(p.dtype).removeprefix("torch.")] for p in parameters],
            "state_bytes": self._count_state(),
            "gradient_bytes": self.gradient_bytes,
            "activation_bytes": self.activation_bytes,
            "stepping_bytes": self.made.peak,
            "num_samples": self.num_samples,
            "peak_bytes": on_gpu or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        self.out.write_text(json.dumps(received))
        raise SystemExit(0)

    def _count_state(self) -> int:
        """The bytes of all optimizers' states. A `ShardedOptimizer` counts its own."""
        plain = [each for each in self.optimizers.values() if not isinstance(each, ShardedOptimizer)]
        divided = sum(each.state_bytes for each in self.optimizers.values() if isinstance(each, ShardedOptimizer))
        return divided + storage_bytes(tensor for each in plain for tensor in state_tensors(each))

    def _is_first(self, optimizer: Optimizer) -> bool:
        return next(iter(self.optimizers)) == id(optimizer)

    def _parameters(self) -> list[nn.Parameter]:
        """The parameters of all optimizers. Views of parameters that an earlier optimizer has are left out."""
        found: dict[int, list[nn.Parameter]] = {}
        for optimizer in self.optimizers.values():
            new: dict[int, list[nn.Parameter]] = {}
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                new.setdefault(parameter.untyped_storage()._cdata, []).append(parameter)
            found |= {key: parameters for key, parameters in new.items() if key not in found}
        return [parameter for parameters in found.values() for parameter in parameters]


def main(out: str, script: str, arguments: Sequence[str]) -> None:
    """Run a script until its third optimizer step has ended, and write the measured sizes."""
    watch = _Watch(Path(out))
    with Patches() as patches:
        # The three steps mustn't resume a training or replace its files.
        idle_checkpointers(patches)
        Scratch(Path(out).parent).install(patches)
        Recorder(watch).install(patches)
        run_observed(script, arguments)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
