"""The message that begins every call between nodes, of one length for all calls.

[Note: first intra-node, then inter-node]

A node's ranks compare what they call over shared memory, and only then with other nodes. So a message speaks for the
whole node, and all inter-node groups come to the same end: where the ranks of one node disagree, each of them sends a
report of that to its group instead of its call, and all ranks of all nodes raise the same error, at once.

[Note: one length]

Gloo can't receive a message of unknown length, and ends the process where a message is longer than its receiver
expects. So every message is as long as every other, whatever the call: it holds the call's fingerprint, and the data of
a call that fits. Larger data follows when all messages have come and are equal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from evenstep.errors import CollectiveTimeoutError, MismatchError, PeerLostError
from evenstep.transport.base import Work
from evenstep.transport.core.codec import to_bytes, to_tensor
from evenstep.transport.core.header import (
    REPORT,
    REPORT_BYTES,
    Fingerprint,
    explain_mismatch,
    pack_text,
    text_bytes,
    unpack_text,
)
from evenstep.transport.core.reduction import round_up
from evenstep.transport.core.transport import Transport

PAYLOAD_AT = 128  # behind the fingerprint; messages are as long as several, so that their data can be viewed as numbers
_LEAST_PAYLOAD_BYTES, _MOST_PAYLOAD_BYTES = 4 << 10, 16 << 10
_REPORT = Fingerprint(REPORT, None, torch.uint8, (REPORT_BYTES,)).pack()


def plan_payload_bytes(num_nodes: int) -> int:
    """How much data travels with every message. Pure.

    Every call sends it to every other node, also a barrier; larger data costs one more exchange.
    """
    return round_up(max(_LEAST_PAYLOAD_BYTES, _MOST_PAYLOAD_BYTES // (num_nodes - 1)), PAYLOAD_AT)


class Negotiation:
    """Compares calls: within this node, then between the nodes, within one inter-node group.

    Args:
        intra_node: The ranks of this rank's node, in order.
        inter_node: One rank per node, in order of node.
        node_of: By rank, the number of its node.
        name: What the transport is called.

    Attributes:
        eager_bytes: How much data travels with every message.
    """

    def __init__(self, intra_node: Transport, inter_node: Transport, node_of: Sequence[int], name: str) -> None:
        self._intra_node = intra_node
        self._inter_node = inter_node
        self._node_of = node_of
        self._name = name
        self.eager_bytes = plan_payload_bytes(inter_node.world_size)

    def agree(self, number: int, packed: bytes, launch: Callable[[], Work] | None = None) -> None:
        """Make the first intra-node call, in which the node's ranks compare what they call.

        See [Note: first intra-node, then inter-node].

        Args:
            number: Of the call.
            packed: Its fingerprint.
            launch: Makes that first call; None: one that only compares.

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
            number: Of the call.
            packed: Its fingerprint, on which the ranks of this node agree.
            payload: At most `eager_bytes` that travel along, the same number on all nodes.

        Returns:
            Every node's payload, in order of node.

        Raises:
            MismatchError: They call different things.
        """
        return self.start(number, packed, payload)()

    def start(self, number: int, packed: bytes, payload: Tensor | None = None) -> Callable[[], list[Tensor]]:
        """Start an exchange.

        Returns:
            Waits for the other nodes and returns as `exchange` does; called before anything else is sent to them.
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
