"""What a worker sends and receives, and how long it waits. Pure, but for the clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from torch import Tensor

KINDS = ("push", "pull", "lookup")
OnAnswer = Callable[[int], None]
"""Called, in any thread, with the number of a server whose answer has come."""
Answered = TypeVar("Answered")


class Traffic:
    """Counts of one worker. Bytes are those of tensors: RPC's own, of names and numbers, come on top.

    Args:
        num_servers: At least 1.
    """

    def __init__(self, num_servers: int) -> None:
        self.num = dict.fromkeys(KINDS, 0)
        self.sent = [0] * num_servers  # bytes, by server
        self.received = [0] * num_servers
        self.waited_s = 0.0  # for the last of the servers
        self.waited_for_s = [0.0] * num_servers  # by server; these waits overlap
        self._last = self._state()

    def __repr__(self) -> str:
        return f"<Traffic {self.num}, {sum(self.sent)} bytes sent, {sum(self.received)} received>"

    def call(
        self, kind: str, parts: Sequence[object], start: Callable[[OnAnswer], Callable[[], list[Answered]]]
    ) -> Callable[[], list[Answered]]:
        """Start a call of all servers, counted.

        Args:
            kind: One of `KINDS`.
            parts: What is sent to each server.
            start: Sends it, and returns what waits. A server whose answer it doesn't report has answered at the end.

        Returns:
            What waits, counted when it ends.
        """
        came: dict[int, float] = {}

        def note(server: int) -> None:
            came[server] = time.perf_counter()

        finish = start(note)
        self.num[kind] += 1
        for server, part in enumerate(parts):
            self.sent[server] += payload_bytes(part)

        def wait() -> list[Answered]:
            begun = time.perf_counter()
            try:
                answers = finish()
            finally:
                ended = time.perf_counter()
                self.waited_s += ended - begun
                for server in range(len(self.waited_for_s)):
                    self.waited_for_s[server] += min(max(came.get(server, ended) - begun, 0.0), ended - begun)
            for server, answer in enumerate(answers):
                self.received[server] += payload_bytes(answer)
            return answers

        return wait

    def rates(self) -> dict[str, float]:
        """Numbers a second since the last call of this, by name."""
        now, before = self._state(), self._last
        self._last = now
        seconds = max(now[0] - before[0], 1e-9)
        rate = [(new - old) / seconds for new, old in zip(now, before, strict=True)]
        found = {"pushes_per_s": rate[1], "pulls_per_s": rate[2], "lookups_per_s": rate[3], "waiting_share": rate[4]}
        by_server = rate[5:]
        for number, name in enumerate(("sent_bytes_per_s", "received_bytes_per_s", "waiting_share")):
            each = by_server[number * len(self.sent) : (number + 1) * len(self.sent)]
            found |= {f"server_{server}/{name}": value for server, value in enumerate(each)}
            if name != "waiting_share":  # shares overlap
                found[name] = sum(each)
        return found

    def _state(self) -> list[float]:
        return [time.perf_counter(), *self.num.values(), self.waited_s, *self.sent, *self.received, *self.waited_for_s]


def payload_bytes(value: object) -> int:
    """Of the tensors in nested containers."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        value = value.values()
    return sum(map(payload_bytes, value)) if isinstance(value, Iterable) and not isinstance(value, str) else 0
