"""The actions of one rank in inter-node collectives: see [Note: slices and groups] in `transport`.

Every call begins with a message. All messages have the same length.

[Note: first intra-node, then inter-node]

A node's ranks compare their calls over shared memory first, and only then with other nodes. So a message stands for the
whole node, and all inter-node groups get the same result. If the ranks of one node disagree, each of them sends a
report of this to its group instead of its call, and all ranks of all nodes raise the same error at once.

[Note: one length]

Gloo can't receive a message of unknown length, and ends the process if a message is longer than its receiver expects.
So all messages have the same length, for every call: a message holds the call's fingerprint, and the call's data if it
fits. Larger data follows when all messages have come and are equal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from evenstep.errors import CollectiveTimeoutError, MismatchError, PeerLostError
from evenstep.transport.base import Op, Work
from evenstep.transport.core.codec import to_bytes, to_tensor
from evenstep.transport.core.header import (
    REFUSED,
    REPORT,
    REPORT_BYTES,
    Fingerprint,
    explain_mismatch,
    pack_text,
    text_bytes,
    unpack_text,
)
from evenstep.transport.core.reduction import (
    Scratch,
    copy_unpadded,
    divide,
    padded,
    plan_arithmetic,
    reduce_into,
    round_up,
)
from evenstep.transport.core.transport import Transport
from evenstep.transport.internode.plan import NodePlan, plan_chunk_bytes

PAYLOAD_AT = 128  # after the fingerprint; lengths are multiples of this, so that data can be viewed as numbers
_LEAST_PAYLOAD_BYTES, _MOST_PAYLOAD_BYTES = 4 << 10, 16 << 10
_REPORT = Fingerprint(REPORT, None, torch.uint8, (REPORT_BYTES,)).pack()


def plan_payload_bytes(num_nodes: int) -> int:
    """The number of data bytes in every message. Pure.

    Every call, even a barrier, sends this number of bytes to every other node; larger data costs one more exchange.
    """
    return round_up(max(_LEAST_PAYLOAD_BYTES, _MOST_PAYLOAD_BYTES // (num_nodes - 1)), PAYLOAD_AT)


class InternodeSteps:
    """One rank's actions in each call, given its number and fingerprint. They run in one thread, call after call.

    Args:
        plan: The node of each rank; all nodes have the same number of ranks.
        intra_node: The ranks of this rank's node, in order.
        inter_node: The inter-node group of this rank's slice, one rank per node.
        rank: This rank.
        name: The transport's name.

    Attributes:
        eager_bytes: The number of data bytes in every message.
    """

    def __init__(self, plan: NodePlan, intra_node: Transport, inter_node: Transport, *, rank: int, name: str) -> None:
        self._intra_node = intra_node
        self._inter_node = inter_node
        self._name = name
        self._rank = rank
        self._node_and_local_rank = plan.node_and_local_rank
        self._node, self._local_rank = plan.node_and_local_rank(rank)
        self._num_local, self._num_nodes = intra_node.world_size, inter_node.world_size
        self._world_size = self._num_local * self._num_nodes
        self._node_of = [plan.node_and_local_rank(each)[0] for each in range(self._world_size)]
        self._by_group = [rank for number in range(self._num_local) for rank in plan.inter_node_group(number)]
        self._by_node = [rank for node in plan.nodes for rank in node]
        self._scratch = Scratch()
        self.eager_bytes = plan_payload_bytes(inter_node.world_size)

    # ------------------------------------------------------------------ comparing

    def agree(self, number: int, packed: bytes, launch: Callable[[], Work] | None = None) -> None:
        """Make the first intra-node call, in which the node's ranks compare their calls.

        See [Note: first intra-node, then inter-node].

        Args:
            number: The call's number.
            packed: The call's fingerprint.
            launch: Makes the first intra-node call; None: a call that only compares.

        Raises:
            MismatchError: The ranks of this node disagree. The other nodes have been informed.
        """
        self._intra_node.compare_as(number, self._name, packed)
        try:
            (self._intra_node.barrier if launch is None else launch)().wait()
        except MismatchError as error:
            with contextlib.suppress(PeerLostError, CollectiveTimeoutError):
                self.exchange(number, _REPORT, to_tensor(pack_text(str(error), REPORT_BYTES)))
            raise

    def exchange(self, number: int, packed: bytes, payload: Tensor | None = None) -> list[Tensor]:
        """Compare the nodes' calls.

        Args:
            number: The call's number.
            packed: The call's fingerprint, on which the ranks of this node agree.
            payload: Data to send with the message, at most `eager_bytes`, the same length on all nodes.

        Returns:
            Every node's payload, in order of node.

        Raises:
            MismatchError: The nodes make different calls.
        """
        return self.start(number, packed, payload)()

    def start(self, number: int, packed: bytes, payload: Tensor | None = None) -> Callable[[], list[Tensor]]:
        """Start an exchange.

        Returns:
            A function that waits for the other nodes and returns the result of `exchange`. Call it before sending
            anything else to these nodes.
        """
        message = torch.zeros(PAYLOAD_AT + self.eager_bytes, dtype=torch.uint8, device="cpu")
        message[: len(packed)] = to_tensor(packed)
        last = PAYLOAD_AT
        if payload is not None:
            last += payload.numel()
            message[PAYLOAD_AT:last] = payload
        rows = message.new_empty(self._inter_node.world_size, message.numel())
        work = self._inter_node.all_gather(rows, message)

        def finish() -> list[Tensor]:
            work.wait()
            of_nodes = [to_bytes(row[: len(packed)]) for row in rows]
            texts = {
                self._node_of.index(node): unpack_text(to_bytes(rows[node, PAYLOAD_AT : PAYLOAD_AT + num_bytes]))
                for node, each in enumerate(of_nodes)
                if (num_bytes := text_bytes(each))
            }
            fingerprints = [of_nodes[node] for node in self._node_of]
            problem = explain_mismatch(number, self._name, fingerprints, texts, range(len(fingerprints)))
            if problem is not None:
                raise MismatchError(problem)
            return [row[PAYLOAD_AT:last] for row in rows]

        return finish

    def compare(self, number: int, packed: bytes) -> None:
        """Compare a call, and send nothing else."""
        self.agree(number, packed)
        self.exchange(number, packed)

    def refuse(self, number: int, packed: bytes, said: Tensor) -> None:
        """Report that this rank doesn't make this call, and why. If no rank makes the call, nothing happens."""
        self.agree(number, packed, lambda: self._intra_node.compare_call(REFUSED, to_bytes(said)))
        first = said.clone()  # all groups send the reason of the node's first rank
        self._intra_node.broadcast(first, 0).wait()
        self.exchange(number, packed, first)

    # ------------------------------------------------------------------ sending

    def broadcast(self, number: int, packed: bytes, raw: Tensor, src: int) -> None:
        """Send one rank's bytes to all ranks."""
        source_node, source = self._node_and_local_rank(src)
        is_source = self._node == source_node
        self.agree(number, packed, (lambda: self._intra_node.broadcast(raw, source)) if is_source else None)
        if raw.numel() <= self.eager_bytes:
            raw.copy_(self.exchange(number, packed, raw)[source_node])
            return
        self.exchange(number, packed)
        whole, mine = self._sliced(raw)
        self._inter_node.broadcast(mine, source_node).wait()
        if not is_source:
            self._intra_node.all_gather(whole, mine).wait()
            copy_unpadded(raw, whole)

    def fits_message(self, num_bytes: int) -> bool:
        """Whether this number of bytes from every rank of a node fits into one message."""
        return self._num_local * num_bytes <= self.eager_bytes

    def all_gather(self, number: int, packed: bytes, out: Tensor, raw: Tensor) -> None:
        """Send every rank's bytes to all ranks."""
        num_bytes = raw.numel()
        if self.fits_message(num_bytes):
            order, of_node = self._by_node, torch.empty(self._num_local * num_bytes, dtype=torch.uint8, device="cpu")
            self.agree(number, packed, lambda: self._intra_node.all_gather(of_node, raw))
            of_all = torch.cat(self.exchange(number, packed, of_node))
        else:
            order, of_group = self._by_group, torch.empty(self._num_nodes * num_bytes, dtype=torch.uint8, device="cpu")
            self.compare(number, packed)
            self._inter_node.all_gather(of_group, raw).wait()
            of_all = torch.empty_like(out)
            self._intra_node.all_gather(of_all, of_group).wait()
        out.view(self._world_size, num_bytes)[order] = of_all.view(self._world_size, num_bytes)

    # ------------------------------------------------------------------ combining

    def all_reduce(self, number: int, packed: bytes, flat: Tensor, op: Op) -> None:
        """Reduce in place, on all ranks. A long vector is reduced chunk by chunk."""
        if flat.nbytes <= self.eager_bytes:
            self.agree(number, packed, lambda: self._intra_node.all_reduce(flat, _undivided(op)))
            sums = self.exchange(number, packed, flat.view(torch.uint8))
            self._add(flat, [each.view(flat.dtype) for each in sums], op)
            return
        self.agree(number, packed)
        compared = self.start(number, packed)
        length = plan_chunk_bytes(flat.nbytes) // flat.itemsize
        _in_turns(
            self._reduce_chunk(flat[begin : begin + length], op, None if begin else compared)
            for begin in range(0, flat.numel(), length)
        )

    def reduce_scatter(self, number: int, packed: bytes, into: Tensor, flat: Tensor, op: Op) -> None:
        """Reduce, and store each rank's part in its `into`."""
        numel = into.numel()
        if flat.nbytes <= self.eager_bytes:
            whole = flat.clone()
            self.all_reduce(number, packed, whole, op)
            into.copy_(whole[self._rank * numel : (self._rank + 1) * numel])
            return
        self.agree(number, packed)
        compared = self.start(number, packed)
        by_group = flat.view(self._world_size, numel)[self._by_group].view(-1)
        of_group = torch.empty(self._num_nodes * numel, dtype=flat.dtype, device="cpu")
        self._intra_node.reduce_scatter(of_group, by_group, _undivided(op)).wait()
        compared()
        self._inter_node.reduce_scatter(into, of_group, _undivided(op)).wait()
        self._divide(into, op)

    def _reduce_chunk(self, chunk: Tensor, op: Op, compared: Callable[[], object] | None) -> Iterator[Sequence[Work]]:
        whole, mine = self._sliced(chunk)
        self._intra_node.reduce_scatter(mine, whole, _undivided(op)).wait()
        if compared is not None:  # the messages were in flight while the node's ranks added
            compared()
        yield from (self._swap if self._num_nodes == 2 else self._share_out)(mine, op)
        yield [self._intra_node.all_gather(whole, mine)]
        copy_unpadded(chunk, whole)

    def _sliced(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """The vector, or a longer copy that the node's ranks can divide equally; and this rank's slice of it."""
        whole = padded(flat, self._num_local)
        is_all = self._num_local == 1
        return whole, whole if is_all else whole.view(self._num_local, -1)[self._local_rank]

    def _swap(self, mine: Tensor, op: Op) -> Iterator[Sequence[Work]]:
        """Between two nodes: each sends its whole slice. As many bytes as with `_share_out`, in one exchange."""
        both = torch.empty(2 * mine.numel(), dtype=mine.dtype, device="cpu")
        yield [self._inter_node.all_gather(both, mine)]
        self._add(mine, list(both.view(2, -1).unbind()), op)

    def _share_out(self, mine: Tensor, op: Op) -> Iterator[Sequence[Work]]:
        """Between more than two nodes: each adds one part of the slice, and sends the sum to the others."""
        whole = padded(mine, self._num_nodes)
        part = mine.new_empty(whole.numel() // self._num_nodes)
        yield [self._inter_node.reduce_scatter(part, whole, _undivided(op))]
        self._divide(part, op)
        yield [self._inter_node.all_gather(whole, part)]
        copy_unpadded(mine, whole)

    def _add(self, into: Tensor, parts: list[Tensor], op: Op) -> None:
        reduce_into([into], parts, plan_arithmetic(op, into.dtype), self._scratch)
        self._divide(into, op)

    def _divide(self, total: Tensor, op: Op) -> None:
        if op == "mean":
            divide(total, self._world_size)


def _in_turns(chunks: Iterable[Iterator[Sequence[Work]]]) -> None:
    """Run all chunks interleaved: each chunk is one exchange behind the chunk before it.

    A chunk's generator yields the works for which to wait before it continues. All ranks make the same exchanges in the
    same order.
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
            for work in works:
                work.wait()
            next_works = next(chunk, None)
            if next_works is not None:
                under_way.append((chunk, next_works))


def _undivided(op: Op) -> Op:
    """The op to use before all nodes have been added: a mean is a sum until then."""
    return "sum" if op == "mean" else op
