"""The SyncBatchNorms of one model: what they exchange, in which order, and whether their rows count.

[Note: the recorded sequence]

A rank that has left its loop takes part in the others' exchanges with count 0. It replays the exchanges of the last
*window*: all forward and backward passes since gradients were last averaged. The active ranks announce a window before
its first exchange. Every exchange carries a code of the layer and the direction, so a rank that replays an exchange
which the others no longer make raises an error with the layers' names, instead of adding one layer's sums to another's.
The code is twice the layer's number in the order of `named_modules`, plus 1 for a backward pass.

    forward   forward   backward   backward   forward   ...
    norm 1    norm 2    norm 2     norm 1     norm 1
    |--------------- a window --------------| |- the next
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evenstep.errors import ConfigurationError
from evenstep.ground.compat.torch_autograd import graph_task_id
from evenstep.replica.batches import pad_parts
from evenstep.replica.channels import channel, channel_of
from evenstep.replica.normalization.sync_batchnorm import PURPOSE, SyncBatchNorm
from evenstep.transport.core.staged import for_messages
from evenstep.transport.core.transport import Transport
from evenstep.world import World

Batch = TypeVar("Batch")

_MAX_LAYERS = 1 << 16
_PARTS = 2 * (_MAX_LAYERS - 1)  # the code of no layer: an agreement on the number of micro-batches


class Windows(Protocol):
    """The engine, as these layers see it.

    Attributes:
        num_reductions: How many windows have ended.
    """

    num_reductions: int

    def contribution(self) -> float | Tensor:
        """See `Overseer`."""

    def announce(self) -> None:
        """Collective with ranks that have left their loop, once per window."""


class SyncLayers:
    """The overseer of all SyncBatchNorms of a wrapped module. False where there are none.

    Collective: every rank makes one, for the same model.

    Args:
        module: The model.
        world: The ranks that take part.
        engine: Knows of passes and windows; held weakly.
        is_copy: The other ranks may have no such copy of the model, so nothing can be agreed now: it shares the
            channels of layers without a model.

    Attributes:
        layers: By name.
        world: The ranks that take part.
    """

    def __init__(self, module: nn.Module, world: World, engine: Windows, *, is_copy: bool = False) -> None:
        self.layers = {name: each for name, each in module.named_modules() if isinstance(each, SyncBatchNorm)}
        self.world = world
        self._names = list(self.layers)
        self._index = {layer: index for index, layer in enumerate(self.layers.values())}
        self._engine = weakref.ref(engine)
        self._window = -1  # to which the record belongs
        self._over_dummy = False
        self._running = False
        self._recorded: list[int] = []  # codes of a window's exchanges
        self._replaying = False
        if len(self.layers) >= _MAX_LAYERS:
            raise ConfigurationError(f"{len(self.layers)} SyncBatchNorms in one model; {_MAX_LAYERS - 1} at most.")
        self._is_copy = is_copy
        self._transports: dict[tuple[dist.ProcessGroup | None, torch.device], Transport] = {}
        for layer in self.layers.values():
            layer.overseer = self
            # Now, while all ranks are here: a rank without a batch would not be there when a layer first needs it.
            if not is_copy:
                self.transport(layer, _device_of(layer, world))

    def __bool__(self) -> bool:
        return bool(self.layers)

    def __repr__(self) -> str:
        return f"<SyncLayers {len(self.layers)} layers, {len(self._recorded)} exchanges recorded>"

    # ------------------------------------------------------------------ called by the wrapper

    @contextmanager
    def forward_pass(self, *, over_dummy: bool) -> Iterator[None]:
        """Around the module's forward pass.

        Args:
            over_dummy: It runs on a dummy batch for an empty share: its rows count 0, now and in its backward pass.
        """
        for layer in self.layers.values():
            layer.overseer = self  # a module may have been wrapped twice
        self._over_dummy, self._running = over_dummy, True
        try:
            yield
        finally:
            self._running = False

    def buffers(self) -> list[Tensor]:
        """The running statistics, which are the same on all ranks, also on those whose share was empty."""
        return [buffer for layer in self.layers.values() for buffer in layer.buffers(recurse=False)]

    def pad(self, parts: Sequence[Batch], batch: Batch, dim: int = 0) -> list[Batch]:
        """As many parts of a batch on every rank as on the one that has most of them; the empty ones come first.

        Collective. Statistics are exchanged in every part, so every rank has to run the module equally often.

        Args:
            parts: What this rank's share was divided into.
            batch: The share, for its structure.
            dim: The batch dimension.
        """
        self._record(_PARTS)
        return pad_parts(parts, self._most_parts(len(parts)), batch, dim)

    def _most_parts(self, num_parts: int) -> int:
        device = _device_of(next(iter(self.layers.values())), self.world)
        most = torch.tensor([num_parts], device="cpu")
        for_messages(self._channel(device, None), device).all_reduce(most, "max").wait()
        return int(most)

    def _channel(self, device: torch.device, group: dist.ProcessGroup | None) -> Transport:
        """These layers' own: another model's exchanges may come in another order."""
        if (group, device) not in self._transports:
            args = self.world, PURPOSE, device, group
            self._transports[group, device] = channel(*args) if self._is_copy else channel_of(self, *args)
        return self._transports[group, device]

    # ------------------------------------------------------------------ called by layers, see `Overseer`

    def counts_rows(self) -> bool:
        """See `Overseer`. Outside the wrapper's forward pass, and so also inside `model.module(x)`, rows count."""
        if self._running:
            return not self._over_dummy
        # An activation checkpoint runs the layer again inside the backward pass: as in the forward pass before it.
        recomputed = graph_task_id() != -1
        contribution = self.contribution()
        dropped = isinstance(contribution, float) and contribution == 0
        return not (recomputed and self._over_dummy and dropped)

    def contribution(self) -> float | Tensor:
        """See `Overseer`."""
        engine = self._engine()
        return 1.0 if engine is None else engine.contribution()

    def transport(self, layer: SyncBatchNorm, device: torch.device) -> Transport:
        """See `Overseer`."""
        return self._channel(device, layer.process_group)

    def report(self, layer: SyncBatchNorm, *, is_backward: bool) -> float:
        """See `Overseer`."""
        return self._record(2 * self._index[layer] + is_backward)

    def _record(self, code: int) -> float:
        engine = self._engine()
        if not self._replaying and engine is not None:
            if engine.num_reductions != self._window:
                self._window, self._recorded = engine.num_reductions, []
            engine.announce()
            self._recorded.append(code)
        return float(code)

    def describe(self, code: float) -> str:
        """See `Overseer`."""
        layer, is_backward = divmod(int(code), 2)
        name = repr(self._names[layer]) if layer < len(self._names) else f"number {layer}"
        return f"{'backward' if is_backward else 'forward'} of SyncBatchNorm {name}"

    # ------------------------------------------------------------------ replaying

    def shadow(self) -> None:
        """Collective: take part with count 0 in the exchanges of a window. Running statistics follow.

        Without a record: every layer once, in the order of `named_modules`, and back.

        Raises:
            MismatchError: The other ranks do something else than in the recorded window.
        """
        layers = list(self.layers.values())
        if not self._recorded:
            forward = range(0, 2 * len(layers), 2)
            self._recorded = [*forward, *(code + 1 for code in reversed(forward))]
        self._replaying = True
        try:
            for code in self._recorded:
                if code == _PARTS:
                    self._most_parts(0)
                    continue
                layer = layers[code // 2]
                layer.overseer = self
                device = _device_of(layer, self.world)
                if code % 2:
                    layer.exchange_gradients(torch.zeros(2 * layer.num_features, dtype=torch.float64, device=device))
                else:
                    with torch.no_grad():
                        layer.update_running_statistics(layer.exchange_statistics(layer.no_rows(device)))
        finally:
            self._replaying = False


def _device_of(layer: SyncBatchNorm, world: World) -> torch.device:
    """Where a layer's inputs will be."""
    tensors = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
    return tensors[0].device if tensors else world.device
