"""The base class of all transports: one path for every call."""

from __future__ import annotations

import abc
import contextlib
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from evenstep.errors import EvenstepError
from evenstep.ground.health import heartbeat
from evenstep.transport.base import Collective, Op, Work
from evenstep.transport.core.codec import to_tensor
from evenstep.transport.core.header import DTYPES, REFUSED, pack_text
from evenstep.transport.core.last_calls import RecordedGroup, record
from evenstep.transport.core.validation import Arguments, refuse_after_end

_NOTHING = torch.empty(0, device="cpu")


class Transport(abc.ABC):
    """Connects the ranks of one group, which exchange tensors.

    A transport has one purpose (gradients, control, …). Its calls are matched between ranks by their order. So if the
    calls of two purposes may interleave differently on two ranks, each purpose gets its own transport (`split`).
    `tests/transport_cases.py` has the cases that every transport passes.

    Every collective is called by all ranks, in the same order, with equal shapes and dtypes. It returns at once;
    its tensors may not be touched before `Work.wait()` returns. All collectives take the same path:

        all_reduce, …    describe the call (`base.Collective`)
        run              checks the call and makes its tensors flat, the same in every transport
        _start           carries the call, in each transport's own way

    Args:
        rank: This rank.
        world_size: Number of ranks.
        group: The group's name in the record of the last calls, equal on all ranks.

    Attributes:
        name: The name in messages: "local", "shared memory", "shared memory + gloo", "gloo", "nccl".
        rank: This rank.
        world_size: Number of ranks.
        is_in_tree_order: Whether sums are added in a binary tree over ranks.
        divides: Whether it divides a sum that has a row (`Collective.row`); other transports only add.
        compares: Whether the ranks compare their calls, and all raise the same error if the calls differ.
        most_beside_bytes: The most bytes that are sent beside a call; more are sent in a separate call.
        known_as: All ranks' numbers in messages; one list for all parts of a transport.
        timeout_s: Deadline for peers to arrive.
        num_calls: Number of calls that this object has started.
        num_given: Number of calls that were made on this object, including those that its parts carry.
        arguments: Checks the arguments of its calls.
        recorded: This transport's entry in the record of the last calls.
        ended_at: The line of the user's code at which the transport's world ended, after which calls are refused; "":
            the world exists.
    """

    name: str
    is_in_tree_order = False
    divides = False
    compares = False
    most_beside_bytes = 0
    timeout_s = math.inf
    ended_at = ""

    def __init__(self, rank: int, world_size: int, group: str) -> None:
        self.rank = rank
        self.world_size = world_size
        self.known_as = list(range(world_size))
        self.num_calls = self.num_given = 0
        self._compared_as: bytes | None = None
        self.recorded = RecordedGroup(group, self.name)
        self.arguments = Arguments(self.name, rank, world_size, weakref.WeakMethod(self.refuse), self._carries)

    @property
    def parts(self) -> Sequence[Transport]:
        """The transports that carry this transport's calls; empty: it carries them itself."""
        return ()

    @property
    def own_number(self) -> int:
        """This rank's number in messages."""
        return self.known_as[self.rank]

    @staticmethod
    def _carries(tensor: Tensor) -> bool:
        """Whether this kind of transport can carry a tensor."""
        return tensor.layout is torch.strided and tensor.dtype in DTYPES

    @abc.abstractmethod
    def _start(self, call: Collective) -> Work:
        """Start a call that has been checked."""

    @abc.abstractmethod
    def split(self) -> Transport:
        """Collective: make a second transport over the same ranks, whose calls can't mix with this one's."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release sockets and memory. Local: waits for no other rank. A second call does nothing."""

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeroed memory for a bucket: [numel]. Collectives on such tensors need the fewest copies."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def run(self, call: Collective) -> Work:
        """Check a call, and start it.

        Raises:
            ConfigurationError: The arguments are wrong on this rank.
            UsageError: The world has ended.
        """
        if self.ended_at:
            refuse_after_end(self.own_number, self.ended_at)
        self.arguments.prepare(call)
        self.num_given += 1
        if call.beside is None or call.beside.nbytes <= self.most_beside_bytes:
            return self._start(call)
        beside, call.beside = call.beside, None
        return JointWork([self._start(call), self.all_reduce(beside)])

    def set_timeout(self, timeout_s: float) -> None:
        """Change the deadline for peers; in shared memory also of calls in flight. Local."""
        self.timeout_s = timeout_s
        for part in self.parts:
            part.set_timeout(timeout_s)

    def name_ranks(self, known_as: Sequence[int]) -> None:
        """Set the ranks' numbers in messages: their numbers in a larger world."""
        self.known_as[:] = known_as

    def compare_as(self, number: int, name: str, packed: bytes) -> None:
        """Make the next call over this transport show an outer call's fingerprint instead of its own, if it shows one.

        The next call is a part of the outer call, which is made over another transport.

        Args:
            number: The outer call's number.
            name: The outer call's transport.
            packed: The outer call's fingerprint.
        """
        self._compared_as = packed

    def compare_call(self, kind: str, text: bytes = b"") -> Any:
        """Compare a call that something else carries. The work is done when all ranks have made the same call.

        Args:
            kind: A name in `header.COLLECTIVES`.
            text: The text of a refusal (`header.pack_text`).
        """
        said = to_tensor(text) if text else _NOTHING
        return self.run(Collective(kind, said, said))

    def refuse(self, reason: str) -> None:
        """If ranks compare their calls, report to the others that this rank doesn't make its next call."""
        if self.compares:
            with contextlib.suppress(EvenstepError):  # the other ranks notice a failed or closed transport themselves
                self.compare_call(REFUSED, pack_text(reason))

    def _count(self, packed: bytes) -> int:
        """Record the start of a call, for messages about this rank's activity. Returns the call's number, from 1."""
        self.num_calls = number = self.num_calls + 1
        heartbeat.mark_collective(number)
        record((self.recorded, number, packed))
        return number

    def all_reduce(self, tensor: Tensor, op: Op = "sum", *, beside: Tensor | None = None) -> Work:
        """Combine `tensor` (any shape) over the ranks, in place, on every rank. For `beside` see `Collective`."""
        return self.run(Collective("all_reduce", tensor, tensor, op, beside=beside))

    def broadcast(self, tensor: Tensor, src: int) -> Work:
        """Make `tensor` equal to rank `src`'s, in place."""
        return self.run(Collective("broadcast", tensor, tensor, root=src))

    def all_gather(self, out: Tensor, tensor: Tensor) -> Work:
        """Concatenate every rank's `tensor` ([n]) in `out` ([world_size * n]), in order of rank."""
        return self.run(Collective("all_gather", tensor, out))

    def reduce_scatter(self, out: Tensor, tensor: Tensor, op: Op = "sum", *, beside: Tensor | None = None) -> Work:
        """Combine `tensor` ([world_size * n]) over the ranks, and write part number `rank` of it to `out` ([n])."""
        return self.run(Collective("reduce_scatter", tensor, out, op, beside=beside))

    def reduce(self, tensor: Tensor, dst: int, op: Op = "sum", *, beside: Tensor | None = None) -> Work:
        """Like `all_reduce`, on rank `dst` only. Afterwards `tensor` is undefined on the other ranks."""
        return self.run(Collective("reduce", tensor, tensor, op, dst, beside=beside))

    def gather(self, out: Tensor | None, tensor: Tensor, dst: int) -> Work:
        """Like `all_gather`, on rank `dst` only; other ranks pass no `out`."""
        return self.run(Collective("gather", tensor, out, root=dst))

    def scatter(self, out: Tensor, tensor: Tensor | None, src: int) -> Work:
        """Write part `rank` of rank `src`'s `tensor` ([world_size * n]) to `out` ([n]); others pass no `tensor`."""
        return self.run(Collective("scatter", tensor, out, root=src))

    def all_to_all(
        self,
        out: Tensor,
        tensor: Tensor,
        out_splits: Sequence[int] | None = None,
        splits: Sequence[int] | None = None,
    ) -> Work:
        """Send part number r of `tensor` to rank r, and receive rank r's part in part number r of `out`.

        Args:
            out: [sum(out_splits)], or as long as `tensor`.
            tensor: [sum(splits)], or of a length divisible by the number of ranks.
            out_splits: [world_size], the number of elements from each rank; None, on all ranks: equal parts.
            splits: [world_size], the number of elements to each rank.
        """
        sizes = None if out_splits is None or splits is None else (out_splits, splits)
        return self.run(Collective("all_to_all", tensor, out, splits=sizes))

    def barrier(self) -> Work:
        """A call that is done when every rank has made it."""
        return self.compare_call("barrier")  # type: ignore[no-any-return]


class JointWork:
    """Several works in flight as one work.

    Args:
        works: The works, in the order in which to wait for them.
        finish: Called once, by the waiting thread, when all have ended.
    """

    def __init__(self, works: Sequence[Work], finish: Callable[[], object] | None = None) -> None:
        self._works = works
        self._finish = finish

    def wait(self) -> None:
        """See `base.Work.wait`."""
        for work in self._works:
            work.wait()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    def is_completed(self) -> bool:
        """See `base.Work.is_completed`."""
        return all(work.is_completed() for work in self._works)
