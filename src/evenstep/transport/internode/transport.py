"""The transport of CPU ranks on several nodes: shared memory inside each node, Gloo between nodes.

Every rank exchanges its slice with other nodes.

[Note: slices and groups]

An all-reduce over two nodes of two ranks, of a vector of two slices:

                 node A                       node B
             rank 0   rank 1              rank 2   rank 3
    intra-   add the node's vectors       add the node's vectors         (shared memory)
    inter-   slice 0 ------------------------ slice 0                    (group 0: ranks 0 and 2)
    node              slice 1 ------------------------- slice 1          (group 1: ranks 1 and 3)
    intra-   spread the slices            spread the slices              (shared memory)

There are as many inter-node groups as a node has ranks. Within a group of h nodes each rank receives a part of the
slice from every other rank, adds the parts in tree order and sends the sum back. So 2 (h - 1) / h of the vector leaves
each node, which is the minimum, and the order of summation is fixed. With two nodes each rank sends its slice to the
other node, which is the same amount. With two nodes of two ranks the vector crosses the wire once in each direction; in
a ring over the four ranks it would cross 1.5 times. If nodes have different numbers of ranks, each rank is treated as a
separate node.

Calls run in a thread of the transport, one after the other, so that the calls of a node's ranks can't mix. A long
vector is sent chunk by chunk: while one chunk is on the wire, the next chunk is added inside the node.

Shared memory notices if ranks of one node disagree. Between nodes every call begins with a message of fixed length,
with the call's fingerprint and the data, if it fits (`steps`). If the data doesn't fit, the node's ranks add while the
messages are in flight, and the data follows when all nodes have agreed.

16-bit sums accumulate in 32 bits inside each node and again between them, and are rounded once in the middle.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from evenstep.errors import EvenstepError, MismatchError, PeerLostError
from evenstep.transport.base import Collective
from evenstep.transport.core.fallback import fallback
from evenstep.transport.core.header import REFUSED
from evenstep.transport.core.transport import Transport
from evenstep.transport.core.validation import flat_view, is_carried
from evenstep.transport.core.worker_thread import QueuedWork, WorkerThread
from evenstep.transport.internode.plan import NodePlan
from evenstep.transport.internode.steps import InternodeSteps
from evenstep.transport.shm.collectives import explain_splits, splits_row

_CLOSE_TIMEOUT_S = 2.0  # how long `close` waits for the other ranks to receive the last refusal

Steps = Callable[[int, bytes], object]  # called with the call's number and fingerprint


class InternodeTransport(Transport):
    """Collectives of ranks on several nodes. `connect_ranks` makes it.

    Args:
        plan: The node of each rank.
        intra_node: The ranks of this rank's node, in order.
        inter_node: The inter-node group of this rank's slice, one rank per node.
        all_ranks: A transport over all ranks, for calls that this class doesn't implement; the same as `inter_node` if
            that has all ranks.
        rank: This rank.
        timeout_s: Deadline for peers to arrive.
    """

    compares = True
    _carries = staticmethod(is_carried)

    def __init__(
        self,
        plan: NodePlan,
        *,
        intra_node: Transport,
        inter_node: Transport,
        all_ranks: Transport,
        rank: int,
        timeout_s: float,
    ) -> None:
        self.name = "gloo" if intra_node.world_size == 1 else "shared memory + gloo"
        super().__init__(rank, all_ranks.world_size, "between nodes")
        self.is_in_tree_order = plan.is_regular  # the same number of consecutive ranks on every node
        self.timeout_s = timeout_s
        self._plan = plan
        self._intra_node = intra_node
        self._inter_node = inter_node
        self._all_ranks = all_ranks
        node, number = plan.node_and_local_rank(rank)
        intra_node.name_ranks(plan.nodes[node])
        inter_node.name_ranks(plan.inter_node_group(number))
        self._steps = InternodeSteps(plan, intra_node, inter_node, rank=rank, name=self.name)
        self._refused: QueuedWork | None = None
        self._thread = WorkerThread("evenstep internode", on_close=self._on_close)

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Transport.allocate`: memory that the ranks of this node share."""
        return self._intra_node.allocate(numel, dtype=dtype, device=device)

    def _start(self, call: Collective) -> QueuedWork:
        steps = self._steps_of(call)

        def run(number: int) -> None:
            steps(number, call.packed)
            call.copy_back()

        work = self._thread.submit(f"{call.kind} over {self.name}", run)
        if call.kind == REFUSED:
            self._refused = work
        return work

    def _steps_of(self, call: Collective) -> Steps:
        """The function that runs a call, by the call's kind."""
        flat, out, op, steps = call.flat, call.out, call.op or "sum", self._steps
        fits = steps.fits_message(flat.nbytes) and call.splits is None
        match call.kind:
            case "all_reduce" | "reduce":
                return functools.partial(steps.all_reduce, flat=flat, op=op)
            case "reduce_scatter":
                return functools.partial(steps.reduce_scatter, into=out, flat=flat, op=op)
            case "broadcast":
                return functools.partial(steps.broadcast, raw=flat.view(torch.uint8), src=call.root)
            case "all_gather":
                return functools.partial(steps.all_gather, out=out.view(torch.uint8), raw=flat.view(torch.uint8))
            case "gather" | "scatter" | "all_to_all" if fits:
                return functools.partial(self._with_message, call)
            case "gather" | "scatter" | "all_to_all":
                return functools.partial(self._by_all_ranks, call)
            case kind if kind == REFUSED:
                return functools.partial(steps.refuse, said=flat)
            case _:
                return steps.compare

    def _with_message(self, call: Collective, number: int, packed: bytes) -> None:
        """Send every rank's tensor to all ranks in the message. Each rank copies the part that it needs."""
        raw = flat_view(call.flat.contiguous()).view(torch.uint8)
        out, size = call.out.view(torch.uint8), self.world_size
        everybodys = torch.empty(size * raw.numel(), dtype=torch.uint8, device="cpu")
        self._steps.all_gather(number, packed, everybodys, raw)
        if call.kind == "all_to_all":
            share = raw.numel() // size
            out.view(size, share).copy_(everybodys.view(size, size, share)[:, self.rank])
        elif call.kind == "scatter":
            out.copy_(everybodys.view(size, size, out.numel())[call.root, self.rank])
        elif call.root == self.rank:
            out.copy_(everybodys)

    def _by_all_ranks(self, call: Collective, number: int, packed: bytes) -> None:
        """Fall back to Gloo, after the ranks have compared the call: wrong sizes can crash Gloo.

        Raises:
            MismatchError: A rank expects more or fewer elements than it is sent. Raised on every rank.
        """
        fallback.count(call.kind)
        if call.splits is None:
            self._steps.compare(number, packed)
        else:
            mine = splits_row(call.splits)
            of_all = mine.new_empty(self.world_size, *mine.shape)
            self._steps.all_gather(
                number, packed, flat_view(of_all).view(torch.uint8), flat_view(mine).view(torch.uint8)
            )
            if (problem := explain_splits(of_all)) is not None:
                raise MismatchError(problem)
        self._all_ranks.run(dataclasses.replace(call, inputs=call.flat, outputs=call.out)).wait()

    def split(self) -> Transport:
        """See `Transport.split`."""
        inter_node = self._inter_node.split()
        return InternodeTransport(
            self._plan,
            intra_node=self._intra_node.split(),
            inter_node=inter_node,
            all_ranks=inter_node if self._all_ranks is self._inter_node else self._all_ranks.split(),
            rank=self.rank,
            timeout_s=self.timeout_s,
        )

    def close(self) -> None:
        """See `Transport.close`. The other ranks receive this rank's last refusal first."""
        if self._refused is not None:
            with contextlib.suppress(EvenstepError):
                self._refused.wait(_CLOSE_TIMEOUT_S)
        self._thread.close(PeerLostError(f"rank {self.rank}: this {self.name} transport has been closed."))

    def __repr__(self) -> str:
        thread = self._thread
        state = "closed" if thread.is_closed else "failed" if thread.failure else f"{thread.num_calls} calls"
        return f"<InternodeTransport rank {self.rank}/{self.world_size} on {len(self._plan.nodes)} nodes, {state}>"

    def _on_close(self) -> None:
        # The other ranks of this node notice this, and so do the ranks of other nodes through their groups.
        for transport in self.parts:
            transport.close()

    @property
    def parts(self) -> list[Transport]:
        """The transports that carry its calls: intra-node, inter-node, and all ranks."""
        return [self._intra_node, self._inter_node, self._all_ranks]
