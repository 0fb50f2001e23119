"""The header exchange that begins every call between nodes, if possible with the data.

[Note: first intra-node, then inter-node]

A node's ranks compare what they call over shared memory, and only then with other nodes. So a message speaks for the
whole node, and all inter-node groups come to the same end: where the ranks of one node disagree, each of them sends a
report of that to its group instead of its call, and all ranks of all nodes raise the same error, at once. A rank
without a group gets the report over shared memory.

[Note: predicted calls]

Gloo can't receive a message of unknown length, and a node learns how long a vector is only from a message. So a call is
two exchanges: a message of fixed length with the call's fingerprint, and then the vector. But training makes the same
calls again and again. Nodes that have agreed on all calls so far predict the same call next: the one that came after
the same last `_CONTEXT` calls before. The message is made as long as that one needs, and if it comes, one exchange does
it all. If another one comes, the message has its fingerprint and nothing worth reading, and the data follows as always.
The prediction needs no message: it follows from what has been agreed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from evenstep.errors import MismatchError
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

MESSAGE_BYTES = 4096  # where nothing is expected
PAYLOAD_AT = 128  # behind the fingerprint
EAGER_BYTES = MESSAGE_BYTES - PAYLOAD_AT  # so much travels with every message
_ALIGN_BYTES = 64
_CONTEXT = 8
_MAX_CONTEXTS = 4096
_REPORT = Fingerprint(REPORT, None, torch.uint8, (REPORT_BYTES,)).pack()


class CallPrediction:
    """Predicts the next call from the calls before it.

    All nodes that have made the same calls predict the same.
    """

    def __init__(self) -> None:
        self._last: deque[bytes] = deque(maxlen=_CONTEXT)
        self._after: dict[tuple[bytes, ...], tuple[bytes, int]] = {}

    @property
    def expected(self) -> tuple[bytes, int] | None:
        """(fingerprint, bytes that can travel with it) of the next call; None if unknown."""
        return self._after.get(tuple(self._last))

    def record(self, packed: bytes, num_bytes: int) -> None:
        """Add a call that all nodes have agreed on.

        Args:
            packed: Its fingerprint.
            num_bytes: What could have travelled with its message, had it been expected.
        """
        if len(self._after) >= _MAX_CONTEXTS:
            self._after.clear()
        self._after[tuple(self._last)] = packed, num_bytes
        self._last.append(packed)


class HeaderExchange:
    """Exchanges the headers of calls within one inter-node group.

    Args:
        inter_node: One rank per node, in order of node; None: this rank carries nothing.
        node_of: By rank, the number of its node.
        name: What the transport is called.
        report_intra_node: Called with the message when the nodes disagree, for the ranks of this node without an
            inter-node group.

    Attributes:
        num_predicted: How many calls had their data in their header because they were predicted.
    """

    def __init__(
        self,
        inter_node: Transport | None,
        node_of: Sequence[int],
        name: str,
        report_intra_node: Callable[[str], object],
    ) -> None:
        self.num_predicted = 0
        self._inter_node = inter_node
        self._node_of = node_of
        self._name = name
        self._report_intra_node = report_intra_node
        self._prediction = CallPrediction()

    def predicts(self, packed: bytes) -> bool:
        """Whether this call's data can travel with its header."""
        expected = self._prediction.expected
        return self._inter_node is not None and expected is not None and expected[0] == packed and expected[1] > 0

    def exchange(self, number: int, packed: bytes, payload: Tensor | None = None, *, later: int = 0) -> list[Tensor]:
        """Compare the nodes' calls.

        Args:
            number: Of the call.
            packed: Its fingerprint, on which the ranks of this node agree.
            payload: Bytes that travel along, the same number on all nodes: at most `EAGER_BYTES`, or `later`
                where the call is predicted.
            later: How many bytes of this rank could travel along when the call is predicted.

        Returns:
            Every node's payload, in order of node; nothing without an inter-node group.

        Raises:
            MismatchError: They call different things.
        """
        return self.start(number, packed, payload, later=later)()

    def start(
        self, number: int, packed: bytes, payload: Tensor | None = None, *, later: int = 0
    ) -> Callable[[], list[Tensor]]:
        """Start an exchange.

        Returns:
            Waits for the other nodes and returns as `exchange` does; called before another exchange starts.
        """
        if self._inter_node is None:
            return list
        num_nodes, last = max(self._node_of) + 1, PAYLOAD_AT
        self.num_predicted += payload is not None and later > 0
        expected = self._prediction.expected
        length = MESSAGE_BYTES
        if expected is not None:
            length = max(length, round_up(PAYLOAD_AT + expected[1], _ALIGN_BYTES))
        message = torch.zeros(length, dtype=torch.uint8, device="cpu")
        message[: len(packed)] = to_tensor(packed)
        if payload is not None:
            last += payload.numel()
            message[PAYLOAD_AT:last] = payload
        messages = torch.empty(num_nodes * length, dtype=torch.uint8, device="cpu")
        work = self._inter_node.all_gather(messages, message)

        def finish() -> list[Tensor]:
            work.wait()
            rows = messages.view(num_nodes, length)
            of_nodes = [to_bytes(row[: len(packed)]) for row in rows]
            if any(each != packed for each in of_nodes) or packed[0] == _REPORT[0]:
                self._raise_mismatch(number, rows, of_nodes)
            self._prediction.record(packed, later)
            return [row[PAYLOAD_AT:last] for row in rows]

        return finish

    def disagree(self, number: int, message: str) -> None:
        """Report to the other nodes that the ranks of this one disagree.

        Nothing happens without an inter-node group.

        Args:
            number: Of the call.
            message: The report.

        Raises:
            MismatchError: This report, or that of an earlier node.
        """
        self.exchange(number, _REPORT, to_tensor(pack_text(message, REPORT_BYTES)))

    def _raise_mismatch(self, number: int, rows: Tensor, of_nodes: Sequence[bytes]) -> NoReturn:
        texts = {
            self._node_of.index(node): unpack_text(to_bytes(rows[node, PAYLOAD_AT : PAYLOAD_AT + num_bytes]))
            for node, each in enumerate(of_nodes)
            if (num_bytes := text_bytes(each))
        }
        problem = explain_mismatch(number, self._name, [of_nodes[node] for node in self._node_of], texts)
        assert problem is not None
        self._report_intra_node(problem)
        raise MismatchError(problem)
