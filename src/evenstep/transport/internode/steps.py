"""The steps of one rank in inter-node collectives: see [Note: slices and groups] in `transport`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from evenstep.errors import CollectiveTimeoutError, EvenstepError, MismatchError, PeerLostError
from evenstep.transport.base import Op, Work
from evenstep.transport.core.codec import to_bytes
from evenstep.transport.core.header import REFUSED, REPORT, REPORT_BYTES, pack_text
from evenstep.transport.core.reduction import Scratch, divide, plan_arithmetic, plan_slices, reduce_into
from evenstep.transport.core.transport import Transport
from evenstep.transport.internode.negotiation import EAGER_BYTES, HeaderExchange
from evenstep.transport.internode.plan import NodePlan, is_predictable, plan_chunk_bytes


class InternodeSteps:
    """One rank's part. All of it runs in one thread, call after call; every call begins with number and fingerprint.

    Args:
        plan: Which rank is on which node.
        intra_node: The ranks of this rank's node, in order.
        inter_node: The inter-node group of this rank's slice, one rank per node; None: this rank carries nothing.
        rank: This rank.
        name: What the transport is called.

    Attributes:
        headers: What nodes send one another at the beginning of a call.
    """

    def __init__(
        self, plan: NodePlan, intra_node: Transport, inter_node: Transport | None, *, rank: int, name: str
    ) -> None:
        self._plan = plan
        self._intra_node = intra_node
        self._inter_node = inter_node
        self._rank = rank
        self._name = name
        self._node, self._local_rank = plan.place_of(rank)
        self._num_local, self._num_nodes = len(plan.nodes[self._node]), len(plan.nodes)
        self._has_idle_ranks = plan.has_idle_ranks(self._node)
        self._scratch = Scratch()
        node_of = [plan.place_of(each)[0] for each in range(plan.world_size)]
        self.headers = HeaderExchange(inter_node, node_of, name, self._report_intra_node)

    # ------------------------------------------------------------------ comparing

    def compare(self, number: int, packed: bytes) -> None:
        """Compare a call, and do nothing else."""
        self._agree(number, packed)
        self.headers.exchange(number, packed)
        self._sync_idle_ranks()

    def refuse(self, number: int, packed: bytes, said: Tensor) -> None:
        """Report that this rank doesn't make this call, and why; nothing happens where no rank makes it."""
        self._agree(number, packed, lambda: self._intra_node.compare_call(REFUSED, to_bytes(said)))
        first = said.clone()  # all groups send the same reason: that of the node's first rank
        self._intra_node.broadcast(first, 0).wait()
        self.headers.exchange(number, packed, first)
        self._sync_idle_ranks()

    def _agree(self, number: int, packed: bytes, launch: Callable[[], Work] | None = None) -> None:
        """Make the first intra-node call, in which the node's ranks compare what they call.

        See [Note: first intra-node, then inter-node].

        Args:
            number: Of the call.
            packed: Its fingerprint.
            launch: Makes that first call; None: one that only compares.
        """
        self._intra_node.compare_as(number, self._name, packed)
        try:
            (self._intra_node.barrier if launch is None else launch)().wait()
        except MismatchError as error:
            with contextlib.suppress(PeerLostError, CollectiveTimeoutError):
                self.headers.disagree(number, str(error))
            raise

    def _sync_idle_ranks(self) -> None:
        """After a header exchange: let ranks without an inter-node group learn its result."""
        if self._has_idle_ranks:
            self._intra_node.barrier().wait()

    def _report_intra_node(self, message: str) -> None:
        if self._has_idle_ranks:
            with contextlib.suppress(EvenstepError):  # if the ranks of this node disagree, they know
                self._intra_node.compare_call(REPORT, pack_text(message, REPORT_BYTES))

    # ------------------------------------------------------------------ moving

    def broadcast(self, number: int, packed: bytes, raw: Tensor, src: int) -> None:
        """Send one rank's bytes to all."""
        source_node, source = self._plan.place_of(src)
        is_source = self._node == source_node
        self._agree(number, packed, (lambda: self._intra_node.broadcast(raw, source)) if is_source else None)
        self.headers.exchange(number, packed)
        slices = plan_slices(raw.numel(), self._plan.num_inter_node_groups, 1)
        if self._inter_node is not None:
            begin, end = slices[self._local_rank]
            if begin < end:
                self._inter_node.broadcast(raw[begin:end], source_node).wait()
        if is_source:
            self._sync_idle_ranks()
        else:
            _wait(self._spread(raw, slices))

    def fits_header(self, num_bytes: int) -> bool:
        """Whether so many bytes of every rank of a node fit into one header."""
        return self._plan.is_regular and self._num_local * num_bytes <= EAGER_BYTES

    def all_gather(self, number: int, packed: bytes, out: Tensor, raw: Tensor) -> None:
        """Send every rank's bytes to all, where nodes are regular."""
        num_bytes = raw.numel()
        if self.fits_header(num_bytes):
            of_node = torch.empty(self._num_local * num_bytes, dtype=torch.uint8, device="cpu")
            self._agree(number, packed, lambda: self._intra_node.all_gather(of_node, raw))
            torch.cat(self.headers.exchange(number, packed, of_node), out=out)
            return
        of_group = torch.empty(self._num_nodes * num_bytes, dtype=torch.uint8, device="cpu")
        self._gather_inter_node(number, packed, of_group, raw)
        of_all = torch.empty(self._num_local * of_group.numel(), dtype=torch.uint8, device="cpu")
        self._intra_node.all_gather(of_all, of_group).wait()
        by_node = of_all.view(self._num_local, self._num_nodes, num_bytes).transpose(0, 1)
        out.view(self._num_nodes, self._num_local, num_bytes).copy_(by_node)

    def _gather_inter_node(self, number: int, packed: bytes, out: Tensor, raw: Tensor) -> None:
        """Gather the bytes of the inter-node group, where nodes are regular."""
        self._agree(number, packed)
        if raw.numel() <= EAGER_BYTES:
            torch.cat(self.headers.exchange(number, packed, raw), out=out)
        else:
            self.headers.exchange(number, packed)
            assert self._inter_node is not None
            self._inter_node.all_gather(out, raw).wait()

    # ------------------------------------------------------------------ combining

    def all_reduce(self, number: int, packed: bytes, flat: Tensor, op: Op) -> None:
        """Reduce in place, on all ranks."""
        if flat.nbytes <= EAGER_BYTES:
            self._all_reduce_eager(number, packed, flat, op)
        elif self.headers.predicts(packed):
            self._all_reduce_predicted(number, packed, flat, op)
        else:
            self._all_reduce_large(number, packed, flat, op, later=self.own_slice(flat).nbytes)

    def reduce_scatter(self, number: int, packed: bytes, into: Tensor, flat: Tensor, op: Op) -> None:
        """Reduce, and leave every rank its part."""
        numel = into.numel()
        if numel == 0:
            self.compare(number, packed)
            return
        if not self._plan.is_regular:
            whole = flat.clone()
            self._all_reduce_large(number, packed, whole, op)
            into.copy_(whole[self._rank * numel : (self._rank + 1) * numel])
            return
        assert self._inter_node is not None
        by_group = flat.view(self._num_nodes, self._num_local, numel).transpose(0, 1).reshape(-1)
        of_group = torch.empty(self._num_nodes * numel, dtype=flat.dtype, device="cpu")
        self._begin(
            number, packed, flat.nbytes, lambda: self._intra_node.reduce_scatter(of_group, by_group, _undivided(op))
        )
        parts = torch.empty_like(of_group)
        self._inter_node.all_to_all(parts, of_group).wait()
        self._add(into, list(parts.view(self._num_nodes, numel).unbind()), op)

    def _begin(self, number: int, packed: bytes, num_bytes: int, launch: Callable[[], Work], *, later: int = 0) -> None:
        """Make the first intra-node call and the header exchange.

        Of a long vector, the nodes compare while the node's ranks add.
        """
        if num_bytes <= plan_chunk_bytes(num_bytes):
            self._agree(number, packed, launch)
            self.headers.exchange(number, packed, later=later)
        else:
            self._agree(number, packed)
            finish = self.headers.start(number, packed, later=later)
            launch().wait()
            finish()

    def _all_reduce_eager(self, number: int, packed: bytes, flat: Tensor, op: Op) -> None:
        self._agree(number, packed, lambda: self._intra_node.all_reduce(flat, _undivided(op)))
        sums = self.headers.exchange(number, packed, flat.view(torch.uint8))
        if sums:
            self._add(flat, [each.view(flat.dtype) for each in sums], op)
        if self._has_idle_ranks:
            self._intra_node.broadcast(flat, 0).wait()

    def own_slice(self, flat: Tensor) -> Tensor:
        """This rank's slice if it may travel with a header; else, or without one, an empty tensor."""
        begin, end = 0, 0
        if self._inter_node is not None:
            slices = plan_slices(flat.numel(), self._plan.num_inter_node_groups, flat.itemsize)
            if is_predictable(flat.nbytes, slices[0][1] * flat.itemsize, self._num_nodes):
                begin, end = slices[self._local_rank]
        return flat[begin:end]

    def _all_reduce_predicted(self, number: int, packed: bytes, flat: Tensor, op: Op) -> None:
        """Do as `_all_reduce_large` of one chunk, with the slice in the header."""
        self._agree(number, packed, lambda: self._intra_node.all_reduce(flat, _undivided(op)))
        mine = self.own_slice(flat)
        sums = self.headers.exchange(number, packed, mine.view(torch.uint8), later=mine.nbytes)
        self._add(mine, [each.view(flat.dtype) for each in sums], op)
        _wait(self._spread(flat, plan_slices(flat.numel(), self._plan.num_inter_node_groups, flat.itemsize)))

    def _all_reduce_large(self, number: int, packed: bytes, flat: Tensor, op: Op, *, later: int = 0) -> None:
        """Chunk by chunk."""
        length = plan_chunk_bytes(flat.nbytes) // flat.itemsize

        def begin_call(launch: Callable[[], Work]) -> None:
            self._begin(number, packed, flat.nbytes, launch, later=later)

        _in_turns(
            self._reduce_chunk(flat[begin : begin + length], op, _do if begin else begin_call)
            for begin in range(0, flat.numel(), length)
        )

    def _reduce_chunk(
        self, chunk: Tensor, op: Op, run: Callable[[Callable[[], Work]], object]
    ) -> Iterator[Sequence[Work]]:
        run(lambda: self._intra_node.all_reduce(chunk, _undivided(op)))
        slices = plan_slices(chunk.numel(), self._plan.num_inter_node_groups, chunk.itemsize)
        mine = chunk[:0]
        if self._inter_node is not None:
            begin, end = slices[self._local_rank]
            mine = chunk[begin:end]
        if self._num_nodes == 2:
            yield from self._swap(mine, op)
        else:
            yield from self._share_out(mine, op)
        yield self._spread(chunk, slices)

    def _swap(self, mine: Tensor, op: Op) -> Iterator[Sequence[Work]]:
        """Between two nodes: each sends its whole slice. The same bytes as in parts, in one step."""
        both = torch.empty(2 * mine.numel(), dtype=mine.dtype, device="cpu")
        yield [self._inter_node.all_gather(both, mine)] if self._inter_node is not None and mine.numel() else []
        if mine.numel():
            self._add(mine, list(both.view(2, -1).unbind()), op)

    def _share_out(self, mine: Tensor, op: Op) -> Iterator[Sequence[Work]]:
        """Between more nodes: each adds a part of the slice, and sends the others its sum."""
        parts = plan_slices(mine.numel(), self._num_nodes, mine.itemsize)
        begin, end = parts[self._node]
        sizes = [stop - start for start, stop in parts]
        received = torch.empty(len(parts) * (end - begin), dtype=mine.dtype, device="cpu")
        works: list[Work] = []
        if self._inter_node is not None and mine.numel():
            works.append(self._inter_node.all_to_all(received, mine, [end - begin] * len(parts), sizes))
        yield works
        padded = torch.empty(parts[0][1], dtype=mine.dtype, device="cpu")
        if begin < end:
            self._add(padded[: end - begin], list(received.view(len(parts), -1).unbind()), op)
        added = torch.empty(len(parts) * padded.numel(), dtype=mine.dtype, device="cpu")
        works = []
        if self._inter_node is not None and mine.numel():
            works.append(self._inter_node.all_gather(added, padded))
        yield works
        mine.copy_(added[: mine.numel()])

    def _add(self, into: Tensor, parts: list[Tensor], op: Op) -> None:
        reduce_into([into], parts, plan_arithmetic(op, into.dtype), self._scratch)
        if op == "mean":
            divide(into, self._plan.world_size)

    def _spread(self, flat: Tensor, slices: Sequence[tuple[int, int]]) -> list[Work]:
        """Inside the node: from each carrier its slice."""
        return [
            self._intra_node.broadcast(flat[begin:end], carrier)
            for carrier, (begin, end) in enumerate(slices)
            if begin < end
        ]


def _in_turns(chunks: Iterable[Iterator[Sequence[Work]]]) -> None:
    """Go through the steps of every chunk, one step behind the chunk before it.

    A step yields what has to be awaited before the chunk's next one. All ranks take the same steps in the same order.
    """
    under_way: list[tuple[Iterator[Sequence[Work]], Sequence[Work]]] = []
    waiting = iter(chunks)
    while True:
        new = next(waiting, None)
        turns = [*([] if new is None else [(new, ())]), *under_way]
        if not turns:
            return
        under_way = []
        for chunk, works in turns:
            _wait(works)
            next_works = next(chunk, None)
            if next_works is not None:
                under_way.append((chunk, next_works))


def _do(launch: Callable[[], Work]) -> None:
    launch().wait()


def _wait(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()


def _undivided(op: Op) -> Op:
    """A mean is a sum until all nodes have been added."""
    return "sum" if op == "mean" else op
