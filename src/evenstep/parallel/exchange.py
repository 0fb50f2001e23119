"""How the windows of a divided model end.

[Note: one division]

    FSDP2's parameters      its reduce-scatter (with replicas, all-reduce, too) adds `weight * gradient` over the data
                            ranks while autograd runs. Gradients without weights are divided by the number of ranks,
                            16-bit gradients partly before they are added
    other parameters        whole on each rank, or divided by tensor parallelism: their local parts are added over the
                            data ranks when the window ends
    then                    a header with the weights, as for replicated models, and one division

The header is added over all ranks that have parts of the model, because ranks of tensor parallelism have different
elements of the same gradients and must make the same decisions. Each of these ranks contributes the weight of the
samples that they share, so sums of weights are divided by their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from evenstep.ground.compat.torch_ddp import ShardedParts
from evenstep.ground.compat.torch_tensors import is_dtensor, local_part
from evenstep.ground.computing.device import by_kind
from evenstep.ground.health.telemetry import REDUCED, WAITING
from evenstep.replica.gradients.division import divide, zero_where
from evenstep.replica.gradients.exchange.across_ranks import AcrossRanks
from evenstep.replica.gradients.exchange.base import Trained
from evenstep.replica.gradients.window import Kind, SavedGradients, Window
from evenstep.transport.core.transport import Transport


class MeshExchange(AcrossRanks):
    """Ends the windows of a model that FSDP2 or tensor parallelism has divided; see [Note: one division].

    Args:
        trained: The model's parameters; `world` and `transport` connect all ranks that have parts of the model.
        sharded: The part of the model that FSDP2 manages.
        data_transport: Connects the data ranks, for the gradients that FSDP2 doesn't add.
    """

    def __init__(self, trained: Trained, sharded: ShardedParts, data_transport: Transport) -> None:
        super().__init__(trained, trained.world.device)
        self.takes_every_pass = bool(sharded)
        self._sharded = sharded
        self._data = data_transport
        self._num_copies = trained.world.world_size // data_transport.world_size
        # Read `parameters` once: reading it frees gathered parameters that autograd may need.
        managed = set(map(id, sharded.parameters))
        self._managed = [p for p in trained.parameters if id(p) in managed]
        self._others = [p for p in trained.parameters if id(p) not in managed]
        self._scale_weights({*sharded.dtypes, *(p.dtype for p in trained.parameters)}, sharded.rescale)

    # ------------------------------------------------------------------ while a window runs

    def begin_pass(self, kind: Kind, *, travels: bool) -> None:
        """See `Exchange`."""
        self._sharded.synchronise(is_on=travels)
        self._sharded.divide_by(self._ending.num_shares if kind is Kind.PLAIN else 1)

    def when_added(self, then: Callable[[], None]) -> None:
        """See `Exchange`. FSDP2 finishes in an autograd callback, which may run after this one."""
        self._sharded.when_ended(then)

    def open_window(self, saved: SavedGradients, *, is_running: bool) -> None:
        """See `Exchange`. Gradients of an earlier window are saved, so that they aren't divided again."""
        left = [parameter for parameter in self._parameters if parameter.grad is not None]
        if left and not is_running:
            saved.save(left, is_copied=False)
        elif left:  # in `loss.backward()`, parameters that the loss uses directly may already have new gradients
            saved.save([parameter for parameter in self._managed if parameter.grad is not None], is_copied=False)

    # ------------------------------------------------------------------ when it ends

    def finish(self, window: Window) -> None:
        """See `Exchange`."""
        self.scale.start_agreement()
        scale = self.scale.end_window(window.kind)
        self._recorder.mark(WAITING)
        used = self._used_here()
        self._header.fill(window, used, scale=scale)
        self._transport.all_reduce(self._header.tensor).wait()
        self._read_header(window)
        self._used = used
        if used is not self._all_used:
            self._used = self._header.used_anywhere()
            self._publish()
        sent_buffers = self._module_buffers.start()
        self._add_others(window)
        self._recorder.mark(REDUCED)
        self._divide()
        self._module_buffers.finish(sent_buffers)

    def _used_here(self) -> list[bool]:
        """For each parameter, whether it has a gradient on this rank."""
        found, self._sharded.used = self._sharded.used, set()
        found |= {id(parameter) for parameter in self._others if parameter.grad is not None}
        used = [id(parameter) in found for parameter in self._parameters]
        return self._all_used if all(used) else used

    def _publish(self) -> None:
        """Set `p.grad` to None if no rank has a gradient; if any rank has one, give zeros to the ranks without."""
        for parameter, is_used in zip(self._parameters, self._used, strict=True):
            if not is_used:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _add_others(self, window: Window) -> None:
        """Add over the data ranks the gradients that FSDP2 doesn't manage, all gradients of a dtype at once."""
        with_placements_of(self._others)
        if isinstance(window.weight, Tensor):  # a tensor isn't read: a window of weight 0 may have left any gradient
            zero_where(window.weight == 0, [local_part(p.grad) for p in self._others if p.grad is not None])
        if self._data.world_size == 1:
            return
        started = []
        for parts in by_kind(local_part(p.grad) for p in self._others if p.grad is not None):
            flat = torch.cat([part.reshape(-1) for part in parts])
            started.append((self._data.all_reduce(flat), flat, parts))
        for work, flat, parts in started:
            work.wait()
            pieces = torch.split(flat, [part.numel() for part in parts])
            torch._foreach_copy_(parts, [piece.view_as(part) for piece, part in zip(pieces, parts, strict=True)])

    def _divide(self) -> None:
        for parameters, plain in ((self._managed, 1), (self._others, self._ending.num_shares)):
            divisor = self._header.divisor(plain * self._num_copies) / self._num_copies
            divide([local_part(p.grad) for p in parameters if p.grad is not None], divisor)


def with_placements_of(parameters: Iterable[nn.Parameter]) -> None:
    """Bring gradients of DTensors to the layout of their parameters.

    Collective for gradients that still have to be added over the ranks of tensor parallelism (`Partial`).
    """
    for parameter in parameters:
        grad: Any = parameter.grad
        if grad is not None and is_dtensor(grad) and grad.placements != parameter.placements:  # type: ignore[attr-defined]
            parameter.grad = grad.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
