"""The transport of CPU ranks on several nodes: shared memory inside each, Gloo between them.

Every rank carries its slice between nodes.

[Note: slices and groups]

An all-reduce over two nodes of two ranks, of a vector of two slices:

                 node A                       node B
             rank 0   rank 1              rank 2   rank 3
    intra-   add the node's vectors       add the node's vectors         (shared memory)
    inter-   slice 0 ------------------------ slice 0                    (group 0: ranks 0 and 2)
    node              slice 1 ------------------------- slice 1          (group 1: ranks 1 and 3)
    intra-   spread the slices            spread the slices              (shared memory)

There are as many inter-node groups as the smallest node has ranks; a rank beyond that carries nothing. Within a group
of h nodes each rank receives a part of the slice from every other, adds the parts in tree order and sends the sum back:
2 (h - 1) / h of the vector leaves each node, the least there can be, and the order of summation is fixed. Of two nodes
each sends its slice to the other, which is as much. Two nodes of two ranks let the vector cross once in each direction;
in a ring over the four ranks it crosses 1.5 times.

All of it runs in a thread of the transport, one call after the other, so that the calls of a node's ranks can't mix.
A long vector goes chunk by chunk: while one chunk is on the wire, the next is added inside the node.

Shared memory notices where ranks of one node disagree. Between nodes every call begins with a message whose size
both know, with the call's fingerprint and a short vector; a longer one follows when all agree, or comes along with the
message where the call was predicted (`negotiation`).

16-bit sums accumulate in 32 bits inside each node and again between them, and are rounded once in the middle.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from evenstep.errors import EvenstepError, PeerLostError
from evenstep.transport.base import Op, Transport, Work
from evenstep.transport.core.fallback import fallback
from evenstep.transport.core.header import REASON_BYTES, REFUSED, Fingerprint
from evenstep.transport.core.validation import Arguments
from evenstep.transport.core.worker_thread import QueuedWork, WorkerThread
from evenstep.transport.internode.plan import NodePlan
from evenstep.transport.internode.steps import InternodeSteps, IntraNode
from evenstep.transport.process_group.transport import ProcessGroupTransport

_CLOSE_TIMEOUT_S = 2.0  # how long `close` waits until the others have received the last refusal

Steps = Callable[[int, bytes], object]  # given the call's number and fingerprint


class InternodeTransport:
    """Collectives of ranks of which some share a node. Made by `connect_ranks`, not by calling the class.

    Args:
        plan: Which rank is on which node.
        intra_node: The ranks of this rank's node, in order.
        inter_node: The inter-node group of this rank's slice, one rank per node; None: this rank carries nothing.
        all_ranks: All ranks, for calls without a plan of their own here. Nothing else uses it.
        rank: This rank.
        timeout_s: Deadline for peers to arrive.
    """

    name = "shared memory + gloo"

    def __init__(
        self,
        plan: NodePlan,
        *,
        intra_node: IntraNode,
        inter_node: ProcessGroupTransport | None,
        all_ranks: Transport,
        rank: int,
        timeout_s: float,
    ) -> None:
        self.rank = rank
        self.world_size = plan.world_size
        self.timeout_s = timeout_s
        self._plan = plan
        self._intra_node = intra_node
        self._inter_node = inter_node
        self._all_ranks = all_ranks
        intra_node.name_ranks(plan.nodes[plan.place_of(rank)[0]])
        if inter_node is not None:
            inter_node.known_as = rank
        self._steps = InternodeSteps(plan, intra_node, inter_node, rank=rank, name=self.name)
        self._arguments = Arguments(self.name, rank, self.world_size, refused=weakref.WeakMethod(self.refuse))
        self._refused: QueuedWork | None = None
        self._thread = WorkerThread("evenstep internode", on_close=self._on_close)

    @property
    def is_regular(self) -> bool:
        """Whether every node has equally many, consecutive ranks.

        Sums are then added in a tree over ranks.
        """
        return self._plan.is_regular

    # ------------------------------------------------------------------ the seam

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Transport.allocate`: memory that the ranks of this node share."""
        return self._intra_node.allocate(numel, dtype=dtype, device=device)

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> Work:
        """See `Transport.all_reduce`; also of tensors that aren't contiguous."""
        return self._reduce("all_reduce", tensor, op)

    def broadcast(self, tensor: Tensor, src: int) -> Work:
        """See `Transport.broadcast`; also of tensors that aren't contiguous."""
        self._arguments.check_rank("broadcast", "src", src)
        flat, back = self._arguments.flatten(tensor)
        steps = functools.partial(self._steps.broadcast, raw=flat.view(torch.uint8), src=src)
        return self._launch("broadcast", tensor, steps, root=src, back=back)

    def all_gather(self, out: Tensor, tensor: Tensor) -> Work:
        """See `Transport.all_gather`."""
        self._arguments.check_sizes("all_gather", "out", out, "tensor", tensor)
        flat, _ = self._arguments.flatten(tensor)
        into, back = self._arguments.flatten(out)
        if not self._plan.is_regular:
            return self._by_all_ranks("all_gather", tensor, lambda to: to.all_gather(into, flat), back=back)
        steps = functools.partial(self._steps.all_gather, out=into.view(torch.uint8), raw=flat.view(torch.uint8))
        return self._launch("all_gather", tensor, steps, back=back)

    def reduce_scatter(self, out: Tensor, tensor: Tensor, op: Op = "sum") -> Work:
        """See `Transport.reduce_scatter`."""
        self._arguments.check_sizes("reduce_scatter", "tensor", tensor, "out", out)
        self._arguments.check_op(op, tensor.dtype)
        flat, _ = self._arguments.flatten(tensor)
        into, back = self._arguments.flatten(out)
        steps = functools.partial(self._steps.reduce_scatter, into=into, flat=flat, op=op)
        return self._launch("reduce_scatter", tensor, steps, op=op, back=back)

    def reduce(self, tensor: Tensor, dst: int, op: Op = "sum") -> Work:
        """See `Transport.reduce`."""
        self._arguments.check_rank("reduce", "dst", dst)
        return self._reduce("reduce", tensor, op, root=dst)

    def gather(self, out: Tensor | None, tensor: Tensor, dst: int) -> Work:
        """See `Transport.gather`."""
        self._arguments.check_rank("gather", "dst", dst)
        flat, _ = self._arguments.flatten(tensor)
        into, back = None, None
        if dst == self.rank:
            out = self._arguments.require("gather", "out", out)
            self._arguments.check_sizes("gather", "out", out, "tensor", tensor)
            into, back = self._arguments.flatten(out)
        if not self._steps.fits_header(flat.nbytes):
            return self._by_all_ranks("gather", tensor, lambda to: to.gather(into, flat, dst), root=dst, back=back)

        def take(everybodys: Tensor) -> None:
            if into is not None:
                into.view(torch.uint8).copy_(everybodys.view(-1))

        return self._with_message("gather", tensor, flat, take, root=dst, back=back)

    def scatter(self, out: Tensor, tensor: Tensor | None, src: int) -> Work:
        """See `Transport.scatter`."""
        self._arguments.check_rank("scatter", "src", src)
        into, back = self._arguments.flatten(out)
        flat = None
        if src == self.rank:
            tensor = self._arguments.require("scatter", "tensor", tensor)
            self._arguments.check_sizes("scatter", "tensor", tensor, "out", out)
            flat, _ = self._arguments.flatten(tensor)
        num_bytes = self.world_size * into.nbytes
        if not self._steps.fits_header(num_bytes):
            return self._by_all_ranks("scatter", out, lambda to: to.scatter(into, flat, src), root=src, back=back)
        given = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu") if flat is None else flat

        def take(everybodys: Tensor) -> None:
            into.view(torch.uint8).copy_(everybodys[src].view(self.world_size, into.nbytes)[self.rank])

        return self._with_message("scatter", out, given, take, root=src, back=back)

    def all_to_all(
        self,
        out: Tensor,
        tensor: Tensor,
        out_splits: Sequence[int] | None = None,
        splits: Sequence[int] | None = None,
    ) -> Work:
        """See `Transport.all_to_all`."""
        flat, _ = self._arguments.flatten(tensor)
        into, back = self._arguments.flatten(out)
        self._arguments.check_all_to_all(out, tensor, out_splits, splits)
        is_even = out_splits is None or splits is None
        if not is_even or not self._steps.fits_header(flat.nbytes):
            alike = tensor if is_even else flat[:0]  # each rank may send another amount
            return self._by_all_ranks(
                "all_to_all", alike, lambda to: to.all_to_all(into, flat, out_splits, splits), back=back
            )

        def take(everybodys: Tensor) -> None:
            share = into.nbytes // self.world_size
            mine = everybodys.view(self.world_size, self.world_size, share)[:, self.rank]
            into.view(torch.uint8).view(self.world_size, share).copy_(mine)

        return self._with_message("all_to_all", tensor, flat, take, back=back)

    def barrier(self) -> Work:
        """See `Transport.barrier`."""
        return self.compare_call("barrier")

    def compare_call(self, collective: str) -> QueuedWork:
        """Have the ranks compare a call that something else carries. The work is done when all make the same one."""
        return self._launch(collective, torch.empty(0, device="cpu"), self._steps.compare)

    def refuse(self, reason: str) -> None:
        """See `SharedMemoryTransport.refuse`."""
        shape = torch.empty(REASON_BYTES, dtype=torch.uint8, device="cpu")
        with contextlib.suppress(EvenstepError):  # of a transport that has failed, or been closed, they know
            self._refused = self._launch(REFUSED, shape, functools.partial(self._steps.refuse, reason=reason))

    def split(self) -> Transport:
        """See `Transport.split`."""
        return InternodeTransport(
            self._plan,
            intra_node=self._intra_node.split(),  # type: ignore[arg-type]  # of the same kind
            inter_node=None if self._inter_node is None else self._inter_node.split(),  # type: ignore[arg-type]
            all_ranks=self._all_ranks.split(),
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

    # ------------------------------------------------------------------ launching

    def _launch(
        self,
        collective: str,
        tensor: Tensor,
        steps: Steps,
        *,
        op: Op | None = None,
        root: int = -1,
        back: tuple[Tensor, Tensor] | None = None,
    ) -> QueuedWork:
        if back is not None:
            self._arguments.check_written(collective, back[0])
        packed = Fingerprint(collective, op, tensor.dtype, tuple(tensor.shape), root).pack()

        def prepare(number: int) -> Callable[[], None]:
            def run() -> None:
                steps(number, packed)
                if back is not None:
                    back[0].copy_(back[1])

            return run

        return self._thread.submit(f"{collective} over {self.name}", prepare)

    def _reduce(self, collective: str, tensor: Tensor, op: Op, root: int = -1) -> Work:
        self._arguments.check_op(op, tensor.dtype)
        flat, back = self._arguments.flatten(tensor)
        steps = functools.partial(self._steps.all_reduce, flat=flat, op=op)
        return self._launch(collective, tensor, steps, op=op, root=root, back=back)

    def _with_message(
        self,
        collective: str,
        tensor: Tensor,
        flat: Tensor,
        take: Callable[[Tensor], object],
        *,
        root: int = -1,
        back: tuple[Tensor, Tensor] | None = None,
    ) -> Work:
        """Send every rank's tensor to all ranks with the header; each takes its own part.

        Args:
            collective: Which.
            tensor: What the ranks compare.
            flat: What this rank gives: as much as every other.
            take: Called with [world_size, bytes].
            root: The rank that gives or gets what no other does.
            back: See `_launch`.
        """

        def steps(number: int, packed: bytes) -> None:
            everybodys = torch.empty(self.world_size * flat.nbytes, dtype=torch.uint8, device="cpu")
            self._steps.all_gather(number, packed, everybodys, flat.view(torch.uint8))
            take(everybodys.view(self.world_size, flat.nbytes))

        return self._launch(collective, tensor, steps, root=root, back=back)

    def _by_all_ranks(
        self,
        collective: str,
        tensor: Tensor,
        launch: Callable[[Transport], Work],
        *,
        root: int = -1,
        back: tuple[Tensor, Tensor] | None = None,
    ) -> Work:
        """Fall back to Gloo, after the ranks have compared the call: Gloo can die of wrong sizes."""
        fallback.count(collective)

        def steps(number: int, packed: bytes) -> None:
            self._steps.compare(number, packed)
            launch(self._all_ranks).wait()

        return self._launch(collective, tensor, steps, root=root, back=back)

    def _on_close(self) -> None:
        # The other ranks of this node notice, and through their groups those of the other nodes.
        for transport in self.parts:
            transport.close()

    @property
    def parts(self) -> list[Transport]:
        """The transports that it is made of: intra-node, inter-node, and for the rest."""
        return [each for each in (self._intra_node, self._inter_node, self._all_ranks) if each is not None]
