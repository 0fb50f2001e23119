"""Sums in a fixed binary tree over ranks, over transports that add in their own order (Gloo, NCCL).

[Note: exchange, add, gather]

Every rank receives one slice of the vector from every other rank, adds the slices in tree order, and sends the sum to
the others: as many bytes as in a ring, in two exchanges. If several ranks share a node they do this inside each node
first, and then between the ranks that have the same slice, one per node, so that every node sends each element once:

                 node A                 node B
             rank 0   rank 1        rank 2   rank 3
    intra-   slice 0  slice 1       slice 0  slice 1       of the node's vectors
    inter-   slice 0 -------------- slice 0
    node              slice 1 --------------- slice 1
    intra-   gather                 gather

If every node has the same number of consecutive ranks, and that is a power of two, both levels together are the tree
over all ranks.

Sums run one after the other in the order of their launch, in whatever order callers wait for them: on the CPU in a
thread of the transport, over its own groups; on a GPU on its own stream.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from evenstep.errors import PeerLostError
from evenstep.transport.base import Collective, Work
from evenstep.transport.core.reduction import HALF, copy_unpadded, divide, padded, plan_tree
from evenstep.transport.core.transport import JointWork, Transport
from evenstep.transport.core.worker_thread import WorkerThread
from evenstep.transport.internode.plan import NodePlan

Steps = Generator[Work, None, None]  # yields works for which to wait before it continues


def in_tree_order(
    transport: Transport, nodes: Sequence[str], subgroup: Callable[[str, Sequence[int]], Transport]
) -> Transport:
    """A transport that adds in a binary tree over ranks: the given one if it does, or an `OrderedTransport` over it.

    Collective: every rank calls this.

    Args:
        transport: The transport; its number of ranks is a power of two.
        nodes: The name of each rank's node.
        subgroup: Opens a transport, given by name ("gloo", "nccl"), between some ranks; called by these ranks alone.
    """
    if transport.is_in_tree_order:
        return transport
    plan = NodePlan(tuple(tuple(r for r, own in enumerate(nodes) if own == node) for node in dict.fromkeys(nodes)))
    levels = None
    if plan.is_regular and 1 < len(plan.nodes) < transport.world_size:
        node, local_rank = plan.node_and_local_rank(transport.rank)
        name = "gloo" if "gloo" in transport.name else transport.name
        levels = [subgroup(name, plan.nodes[node]), subgroup(name, plan.inter_node_group(local_rank))]
    return OrderedTransport(transport, levels or [transport.split()])


class OrderedTransport(Transport):
    """Adds in tree order, and delegates everything else to an inner transport. See [Note: exchange, add, gather].

    Args:
        inner: The inner transport, of the same ranks.
        levels: Transports over the groups of a sum, one after the other: [all ranks], or [the ranks of this node, the
            ranks of all nodes with the same local rank]. Nothing else uses them.
    """

    is_in_tree_order = True

    def __init__(self, inner: Transport, levels: Sequence[Transport]) -> None:
        self.name = inner.name
        super().__init__(inner.rank, inner.world_size, inner.recorded.name)
        self._inner = inner
        self._levels = list(levels)
        self._thread = WorkerThread("evenstep ordered sums", on_close=self._on_close)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @property
    def parts(self) -> list[Transport]:
        """See `Transport.parts`."""
        return [*self._levels, self._inner]

    def _start(self, call: Collective) -> Work:
        if call.op not in ("sum", "mean"):
            return self._inner.run(call)
        ready = self._ready(call.flat)
        if call.kind == "reduce_scatter":
            result = ready.new_empty(call.out.numel())
            steps = self._sum_of_parts(result, ready)
        else:  # a reduce, too
            result, steps = ready, self._sum(ready, self._levels)
        return self._launch(steps, call, result)

    def _ready(self, flat: Tensor) -> Tensor:
        """The tensor to send: 16 bits converted to 32, so that sums are rounded once; for Gloo on the CPU."""
        wide = flat.float() if flat.dtype in HALF else flat
        return wide.cpu() if self.name == "gloo" else wide

    def _launch(self, steps: Steps, call: Collective, result: Tensor) -> Work:
        """Run the steps after those of all earlier calls. The call's outputs become `result`."""

        def finish() -> None:
            if call.divisor is not None:
                divide(result, call.divisor)
            if result is not call.out:
                call.out.copy_(result)
            call.copy_back()

        def run(_: int) -> None:
            for work in steps:
                work.wait()

        if result.device.type == "cpu":
            queued = self._thread.submit(f"a sum of {result.numel()} over {self.name}", run)
            return JointWork([queued], finish)
        device = result.device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            run(0)
            done = stream.record_event()
        on_stream = _OnStream(lambda: torch.cuda.current_stream(device).wait_event(done), done.query)
        return JointWork([on_stream], finish)

    def _sum(self, flat: Tensor, levels: Sequence[Transport]) -> Steps:
        if not levels or not flat.numel():
            return
        level, *rest = levels
        whole = padded(flat, level.world_size)
        mine = yield from _exchange_and_add(level, whole)
        yield from self._sum(mine, rest)
        yield level.all_gather(whole, mine)
        copy_unpadded(flat, whole)

    def _sum_of_parts(self, part: Tensor, flat: Tensor) -> Steps:
        # Part number r belongs to rank r, local rank r % m of node r // m. Order the parts by local rank first.
        num_local = self._levels[0].world_size if len(self._levels) > 1 else 1
        mine = flat
        if flat.numel() and num_local > 1:
            mine = mine.view(-1, num_local, part.numel()).transpose(0, 1).reshape(-1)
        for level in self._levels if flat.numel() else ():
            mine = yield from _exchange_and_add(level, mine)
        part.copy_(mine)

    # ------------------------------------------------------------------ other methods

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Transport.allocate`."""
        return self._inner.allocate(numel, dtype=dtype, device=device)

    def split(self) -> Transport:
        """See `Transport.split`."""
        return OrderedTransport(self._inner.split(), [each.split() for each in self._levels])

    def close(self) -> None:
        """See `Transport.close`."""
        self._thread.close(PeerLostError(f"rank {self.rank}: this {self.name} transport has been closed."))

    def _on_close(self) -> None:
        for each in self.parts:
            each.close()

    def __repr__(self) -> str:
        return f"<OrderedTransport of {' and '.join(str(each.world_size) for each in self._levels)}, {self._inner!r}>"


@dataclass
class _OnStream:
    """A sum on a GPU."""

    wait: Callable[[], None]
    is_completed: Callable[[], bool]


def _exchange_and_add(level: Transport, flat: Tensor) -> Generator[Work, None, Tensor]:
    """Return the sum of this rank's parts of all vectors, in tree order. Works on a GPU, too, unlike `reduce_into`."""
    received = torch.empty_like(flat)
    yield level.all_to_all(received, flat)
    parts = list(received.view(level.world_size, -1).unbind())
    for a, b in plan_tree(level.world_size):
        parts[a].add_(parts[b])  # parts[a] is memory of `received`, which only this sum uses
    return parts[0]
