"""The buffers of a module (running statistics and the like): rank 0's are everybody's."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from evenstep.ground.compat.torch_tensors import flatten_dense, unflatten_dense
from evenstep.transport.base import Work
from evenstep.transport.core.transport import Transport


def start_broadcast(
    tensors: Iterable[Tensor], transport: Transport, *, src: int = 0
) -> list[tuple[Work, Tensor, Tensor]]:
    """Collective: begin to make tensors equal to rank `src`'s. `finish_broadcast` ends it."""
    started = []
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        flat = tensor.detach().contiguous().reshape(-1)
        raw = flat.view(torch.uint8)  # bytes: whatever the dtype, every backend carries them
        started.append((transport.broadcast(raw, src), flat, tensor))
    return started


def finish_broadcast(started: Sequence[tuple[Work, Tensor, Tensor]]) -> None:
    """Wait for what `start_broadcast` began."""
    for work, flat, tensor in started:
        work.wait()
        if flat.data_ptr() != tensor.data_ptr():
            # Through `.data`: autograd may have saved the buffer for a graph that is kept, and would take a new
            # version for a change of the user's.
            tensor.data.copy_(flat.view(tensor.shape))


def places_of(module: nn.Module, ignored: Collection[str] = ()) -> list[tuple[nn.Module, str]]:
    """(owner, name in it) of every module buffer, also of those that are None.

    Args:
        module: Whose, with those of its parts, some of which may be TorchScript's.
        ignored: Names that are left out.
    """
    return [
        (owner, name)
        for prefix, owner in module.named_modules()
        for name, _ in owner._buffers.items()  # a module of TorchScript's has no iterator and no `get` there
        if (f"{prefix}.{name}" if prefix else name) not in ignored
    ]


def buffer_at(owner: nn.Module, name: str) -> Tensor | None:
    """What is at a place now."""
    return owner._buffers[name] if name in owner._buffers else None  # noqa: SIM401


class BufferBroadcast:
    """Sends the persistent buffers of a module at the end of a step, packed by device and dtype.

    Args:
        module: Whose buffers; they may be replaced later, not added.
        transport: Carries them, in order with the gradients.
        ignored: Names of those that every rank keeps for itself.
        is_on: Whether they are sent. Scripts switch it between steps, on all ranks.
    """

    def __init__(
        self, module: nn.Module, transport: Transport, ignored: Collection[str] = (), *, is_on: bool = True
    ) -> None:
        self.is_on = is_on
        self._transport = transport
        self._places = [
            (owner, name)
            for owner, name in places_of(module, ignored)
            if name not in getattr(owner, "_non_persistent_buffers_set", ())  # caches, which grow as each rank needs
        ]
        self._src = 0

    def start(self, src: int = 0) -> list[tuple[Work, Tensor, list[Tensor]]]:
        """Collective: pack the buffers and send rank `src`'s. Nothing, where that is switched off."""
        self._src = src
        if not self.is_on:
            return []
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for owner, name in self._places:
            buffer = buffer_at(owner, name)
            if buffer is not None and buffer.numel():
                groups.setdefault((buffer.device, buffer.dtype), []).append(buffer)
        started = []
        for tensors in groups.values():
            packed = self._pack(tensors)
            started.append((self._transport.broadcast(packed.view(torch.uint8), src), packed, tensors))
        return started

    def finish(self, started: Sequence[tuple[Work, Tensor, list[Tensor]]]) -> None:
        """Wait, and write what was sent into the module."""
        for work, packed, tensors in started:
            work.wait()
            if self._transport.rank == self._src:
                continue
            # Through `.data`: see `finish_broadcast`.
            torch._foreach_copy_([tensor.data for tensor in tensors], unflatten_dense(packed, tensors))  # type: ignore[no-untyped-call]

    def _pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """[numel of all], with their values where they are sent from."""
        if self._transport.rank == self._src:
            with torch.no_grad():
                return flatten_dense(tensors)  # type: ignore[no-any-return, no-untyped-call]
        numel = sum([tensor.numel() for tensor in tensors])
        return torch.empty(numel, dtype=tensors[0].dtype, device=tensors[0].device)


@contextmanager
def untouched(module: nn.Module, *, but: Sequence[Tensor] = ()) -> Iterator[None]:
    """Whatever happens to the module's buffers inside is undone, except to those named in `but`."""
    kept = {id(buffer) for buffer in but}
    saved = [(buffer, buffer.detach().clone()) for buffer in module.buffers() if id(buffer) not in kept]
    try:
        yield
    finally:
        for buffer, value in saved:
            buffer.data.copy_(value)
