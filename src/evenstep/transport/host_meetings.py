"""What hosts tell one another at the beginning of every call: what they call, and if they can, the data along with it.

[Note: first inside, then between]

A host's ranks compare what they call inside the host, over shared memory, and only then tell other hosts. So a message
speaks for the whole host, and all lanes come to the same end: where the ranks of one host disagree, each of them tells
its lane that instead of what it calls, and all ranks of all hosts raise the same error, at once. A rank without a lane
is told inside its host.

[Note: data that is foreseen]

Gloo can't receive a message whose length it doesn't know, and how long a vector is, another host only knows when it has
been told. So a call is two exchanges: a message of fixed length that says what is called, and then the vector. But
training calls the same things again and again. Hosts that have agreed on all calls so far expect the same call next:
the one that came after the same last `_CONTEXT` calls before. The message is made as long as that one needs, and if it
comes, one exchange does it all. If another one comes, the message has its fingerprint and nothing worth reading, and
the data follows as always. Nobody is ever asked what he expects: it follows from what has been agreed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from evenstep.errors import MismatchError
from evenstep.transport.base import Transport
from evenstep.transport.codec import to_bytes, to_tensor
from evenstep.transport.header import (
    TOLD,
    TOLD_BYTES,
    Fingerprint,
    explain_mismatch,
    pack_text,
    text_bytes,
    unpack_text,
)
from evenstep.transport.segment import round_up

MESSAGE_BYTES = 4096  # where nothing is expected
PAYLOAD_AT = 128  # behind the fingerprint
SMALL_BYTES = MESSAGE_BYTES - PAYLOAD_AT  # so much travels with every message
_ALIGN_BYTES = 64
_CONTEXT = 8
_MAX_CONTEXTS = 4096
_TOLD = Fingerprint(TOLD, None, torch.uint8, (TOLD_BYTES,)).pack()


class Foresight:
    """What is called next, as far as the calls before tell. Who has the same calls behind him expects the same."""

    def __init__(self) -> None:
        self._last: deque[bytes] = deque(maxlen=_CONTEXT)
        self._after: dict[tuple[bytes, ...], tuple[bytes, int]] = {}

    @property
    def expected(self) -> tuple[bytes, int] | None:
        """(fingerprint, bytes that can travel with it) of the next call; None if nothing is known."""
        return self._after.get(tuple(self._last))

    def happened(self, packed: bytes, num_bytes: int) -> None:
        """A call has been agreed on.

        Args:
            packed: Its fingerprint.
            num_bytes: What could have travelled with its message, had it been expected.
        """
        if len(self._after) >= _MAX_CONTEXTS:
            self._after.clear()
        self._after[tuple(self._last)] = packed, num_bytes
        self._last.append(packed)


class HostMeetings:
    """The beginnings of the calls of one lane.

    Args:
        lane: One rank per host, in order of host; None: this rank carries nothing, and meets nobody.
        host_of: By rank, the number of its host.
        name: What the transport is called.
        tell_inside: Called with the message when the hosts disagree, for the ranks of this host that have no lane.

    Attributes:
        num_foreseen: How many calls had their data in their first message because it was expected.
    """

    def __init__(
        self, lane: Transport | None, host_of: Sequence[int], name: str, tell_inside: Callable[[str], object]
    ) -> None:
        self.num_foreseen = 0
        self._lane, self._host_of, self._name, self._tell_inside = lane, host_of, name, tell_inside
        self._foresight = Foresight()

    def expects(self, packed: bytes) -> bool:
        """Whether this call's data can travel with its message."""
        expected = self._foresight.expected
        return self._lane is not None and expected is not None and expected[0] == packed and expected[1] > 0

    def meet(self, number: int, packed: bytes, payload: Tensor | None = None, *, later: int = 0) -> list[Tensor]:
        """Compare what the hosts call. Returns every host's payload, in order of host; nothing where there is no lane.

        Args:
            number: Of the call.
            packed: Its fingerprint, on which the ranks of this host agree.
            payload: Bytes that travel along, the same number on all hosts: at most `SMALL_BYTES`, or `later`
                where the call is expected.
            later: How many bytes of this lane could travel along when the call is expected.

        Raises:
            MismatchError: They call different things.
        """
        return self.start(number, packed, payload, later=later)()

    def start(
        self, number: int, packed: bytes, payload: Tensor | None = None, *, later: int = 0
    ) -> Callable[[], list[Tensor]]:
        """`meet`, in two: what this returns waits for the other hosts. It is called before another meeting starts."""
        if self._lane is None:
            return list
        num_hosts, last = max(self._host_of) + 1, PAYLOAD_AT
        self.num_foreseen += payload is not None and later > 0
        expected = self._foresight.expected
        length = MESSAGE_BYTES
        if expected is not None:
            length = max(length, round_up(PAYLOAD_AT + expected[1], _ALIGN_BYTES))
        message = torch.zeros(length, dtype=torch.uint8, device="cpu")
        message[: len(packed)] = to_tensor(packed)
        if payload is not None:
            last += payload.numel()
            message[PAYLOAD_AT:last] = payload
        messages = torch.empty(num_hosts * length, dtype=torch.uint8, device="cpu")
        work = self._lane.all_gather(messages, message)

        def finish() -> list[Tensor]:
            work.wait()
            rows = messages.view(num_hosts, length)
            of_hosts = [to_bytes(row[: len(packed)]) for row in rows]
            if any(each != packed for each in of_hosts) or packed[0] == _TOLD[0]:
                self._raise_mismatch(number, rows, of_hosts)
            self._foresight.happened(packed, later)
            return [row[PAYLOAD_AT:last] for row in rows]

        return finish

    def disagree(self, number: int, message: str) -> None:
        """Tell the other hosts that the ranks of this one call different things; nothing where there is no lane.

        Args:
            number: Of the call.
            message: What they are told.

        Raises:
            MismatchError: What all are told: this, or what an earlier host tells.
        """
        self.meet(number, _TOLD, to_tensor(pack_text(message, TOLD_BYTES)))

    def _raise_mismatch(self, number: int, rows: Tensor, of_hosts: Sequence[bytes]) -> NoReturn:
        texts = {
            self._host_of.index(host): unpack_text(to_bytes(rows[host, PAYLOAD_AT : PAYLOAD_AT + num_bytes]))
            for host, each in enumerate(of_hosts)
            if (num_bytes := text_bytes(each))
        }
        problem = explain_mismatch(number, self._name, [of_hosts[host] for host in self._host_of], texts)
        assert problem is not None
        self._tell_inside(problem)
        raise MismatchError(problem)
