"""What a rank does in a call over several hosts, step by step; see [Note: slices and lanes] in `several_hosts`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from evenstep.errors import CollectiveTimeoutError, EvenstepError, MismatchError, PeerLostError
from evenstep.transport.base import Op, Transport, Work
from evenstep.transport.codec import to_tensor
from evenstep.transport.header import REFUSED, TOLD, TOLD_BYTES, pack_text
from evenstep.transport.host_meetings import SMALL_BYTES, HostMeetings
from evenstep.transport.host_plan import HostPlan, may_be_foreseen, plan_piece_bytes
from evenstep.transport.reduction import Scratch, plan_arithmetic, plan_slices, reduce_into


class Inside(Transport, Protocol):
    """The ranks of one host: `SharedMemoryTransport`, or `LocalTransport` where there is only one."""

    def announce(self, collective: str, text: bytes = b"") -> Work:
        """See `SharedMemoryTransport.announce`."""

    def begin(self, number: int, name: str, packed: bytes) -> None:
        """See `SharedMemoryTransport.begin`."""

    def serve(self, known_as: Sequence[int]) -> None:
        """See `SharedMemoryTransport.serve`."""


class HostSteps:
    """One rank's part. All of it runs in one thread, call after call; every call begins with number and fingerprint.

    Args:
        plan: Which rank is on which host.
        inside: The ranks of this rank's host, in order.
        lane: The ranks that carry the same slice as this one, one per host in order of host; None: it carries nothing.
        rank: This rank.
        name: What the transport is called.

    Attributes:
        meetings: What hosts tell one another.
    """

    def __init__(self, plan: HostPlan, inside: Inside, lane: Transport | None, *, rank: int, name: str) -> None:
        self._plan = plan
        self._inside = inside
        self._lane = lane
        self._rank = rank
        self._name = name
        self._host, self._local_rank = plan.place_of(rank)
        self._num_local, self._num_hosts = len(plan.hosts[self._host]), len(plan.hosts)
        self._has_idle_ranks = plan.has_idle_ranks(self._host)
        self._scratch = Scratch()
        host_of = [plan.place_of(each)[0] for each in range(plan.world_size)]
        self.meetings = HostMeetings(lane, host_of, name, self._tell_inside)

    # ------------------------------------------------------------------ comparing

    def compare(self, number: int, packed: bytes) -> None:
        """Nothing but a comparison: all ranks make the same call."""
        self._agree(number, packed)
        self.meetings.meet(number, packed)
        self._hear()

    def refuse(self, number: int, packed: bytes, reason: str) -> None:
        """Say that this rank doesn't make this call; nothing happens where no rank makes it."""
        said = pack_text(reason)
        self._agree(number, packed, lambda: self._inside.announce(REFUSED, said))
        first = to_tensor(said)  # all lanes tell the same reason: that of the host's first rank
        self._inside.broadcast(first, 0).wait()
        self.meetings.meet(number, packed, first)
        self._hear()

    def _agree(self, number: int, packed: bytes, launch: Callable[[], Work] | None = None) -> None:
        """The first call inside the host, in which its ranks compare what they call. See [Note: first inside].

        Args:
            number: Of the call.
            packed: Its fingerprint.
            launch: Makes that first call; None: one that only compares.
        """
        self._inside.begin(number, self._name, packed)
        try:
            (self._inside.barrier if launch is None else launch)().wait()
        except MismatchError as error:
            with contextlib.suppress(PeerLostError, CollectiveTimeoutError):
                self.meetings.disagree(number, str(error))
            raise

    def _hear(self) -> None:
        """After a meeting of which nothing comes to the ranks without a lane: they are told here if hosts disagree."""
        if self._has_idle_ranks:
            self._inside.barrier().wait()

    def _tell_inside(self, message: str) -> None:
        if self._has_idle_ranks:
            with contextlib.suppress(EvenstepError):  # if the ranks of this host disagree, they know
                self._inside.announce(TOLD, pack_text(message, TOLD_BYTES))

    # ------------------------------------------------------------------ moving

    def broadcast(self, number: int, packed: bytes, raw: Tensor, src: int) -> None:
        """Bytes of one rank to all."""
        source_host, source = self._plan.place_of(src)
        is_source = self._host == source_host
        self._agree(number, packed, (lambda: self._inside.broadcast(raw, source)) if is_source else None)
        self.meetings.meet(number, packed)
        slices = plan_slices(raw.numel(), self._plan.num_lanes, 1)
        if self._lane is not None:
            begin, end = slices[self._local_rank]
            if begin < end:
                self._lane.broadcast(raw[begin:end], source_host).wait()
        if is_source:
            self._hear()
        else:
            _wait(self._spread(raw, slices))

    def goes_with_message(self, num_bytes: int) -> bool:
        """Whether so many bytes of every rank go with the first message, those of a whole host in every lane."""
        return self._plan.is_regular and self._num_local * num_bytes <= SMALL_BYTES

    def all_gather(self, number: int, packed: bytes, out: Tensor, raw: Tensor) -> None:
        """Bytes of every rank to all, where hosts are regular."""
        num_bytes = raw.numel()
        if self.goes_with_message(num_bytes):
            of_host = torch.empty(self._num_local * num_bytes, dtype=torch.uint8, device="cpu")
            self._agree(number, packed, lambda: self._inside.all_gather(of_host, raw))
            torch.cat(self.meetings.meet(number, packed, of_host), out=out)
            return
        of_lane = torch.empty(self._num_hosts * num_bytes, dtype=torch.uint8, device="cpu")
        self.gather_lane(number, packed, of_lane, raw)
        of_all = torch.empty(self._num_local * of_lane.numel(), dtype=torch.uint8, device="cpu")
        self._inside.all_gather(of_all, of_lane).wait()
        by_host = of_all.view(self._num_local, self._num_hosts, num_bytes).transpose(0, 1)
        out.view(self._num_hosts, self._num_local, num_bytes).copy_(by_host)

    def gather_lane(self, number: int, packed: bytes, out: Tensor, raw: Tensor) -> None:
        """Bytes of every rank of the lane, where hosts are regular."""
        self._agree(number, packed)
        if raw.numel() <= SMALL_BYTES:
            torch.cat(self.meetings.meet(number, packed, raw), out=out)
        else:
            self.meetings.meet(number, packed)
            assert self._lane is not None
            self._lane.all_gather(out, raw).wait()

    # ------------------------------------------------------------------ combining

    def all_reduce(self, number: int, packed: bytes, flat: Tensor, op: Op) -> None:
        """In place, on all ranks."""
        if flat.nbytes <= SMALL_BYTES:
            self._all_reduce_small(number, packed, flat, op)
        elif self.meetings.expects(packed):
            self._all_reduce_foreseen(number, packed, flat, op)
        else:
            self._all_reduce_large(number, packed, flat, op, later=self.own_slice(flat).nbytes)

    def reduce_scatter(self, number: int, packed: bytes, into: Tensor, flat: Tensor, op: Op) -> None:
        """To every rank its part."""
        numel = into.numel()
        if numel == 0:
            self.compare(number, packed)
            return
        if not self._plan.is_regular:
            whole = flat.clone()
            self._all_reduce_large(number, packed, whole, op)
            into.copy_(whole[self._rank * numel : (self._rank + 1) * numel])
            return
        assert self._lane is not None
        by_lane = flat.view(self._num_hosts, self._num_local, numel).transpose(0, 1).reshape(-1)
        of_lane = torch.empty(self._num_hosts * numel, dtype=flat.dtype, device="cpu")
        self._begin(number, packed, flat.nbytes, lambda: self._inside.reduce_scatter(of_lane, by_lane, _undivided(op)))
        parts = torch.empty_like(of_lane)
        self._lane.all_to_all(parts, of_lane).wait()
        self._add(into, list(parts.view(self._num_hosts, numel).unbind()), op)

    def _begin(self, number: int, packed: bytes, num_bytes: int, launch: Callable[[], Work], *, later: int = 0) -> None:
        """The first call inside, and the meeting: of a long vector, hosts compare while the host's ranks add."""
        if num_bytes <= plan_piece_bytes(num_bytes):
            self._agree(number, packed, launch)
            self.meetings.meet(number, packed, later=later)
        else:
            self._agree(number, packed)
            met = self.meetings.start(number, packed, later=later)
            launch().wait()
            met()

    def _all_reduce_small(self, number: int, packed: bytes, flat: Tensor, op: Op) -> None:
        self._agree(number, packed, lambda: self._inside.all_reduce(flat, _undivided(op)))
        sums = self.meetings.meet(number, packed, flat.view(torch.uint8))
        if sums:
            self._add(flat, [each.view(flat.dtype) for each in sums], op)
        if self._has_idle_ranks:
            self._inside.broadcast(flat, 0).wait()

    def own_slice(self, flat: Tensor) -> Tensor:
        """This lane's slice, if it may travel with a message; else, and where there is no lane, nothing."""
        begin, end = 0, 0
        if self._lane is not None:
            slices = plan_slices(flat.numel(), self._plan.num_lanes, flat.itemsize)
            if may_be_foreseen(flat.nbytes, slices[0][1] * flat.itemsize, self._num_hosts):
                begin, end = slices[self._local_rank]
        return flat[begin:end]

    def _all_reduce_foreseen(self, number: int, packed: bytes, flat: Tensor, op: Op) -> None:
        """As `_all_reduce_large` of one piece, with the slice in the first message."""
        self._agree(number, packed, lambda: self._inside.all_reduce(flat, _undivided(op)))
        mine = self.own_slice(flat)
        sums = self.meetings.meet(number, packed, mine.view(torch.uint8), later=mine.nbytes)
        self._add(mine, [each.view(flat.dtype) for each in sums], op)
        _wait(self._spread(flat, plan_slices(flat.numel(), self._plan.num_lanes, flat.itemsize)))

    def _all_reduce_large(self, number: int, packed: bytes, flat: Tensor, op: Op, *, later: int = 0) -> None:
        """Piece by piece."""
        length = plan_piece_bytes(flat.nbytes) // flat.itemsize

        def first(launch: Callable[[], Work]) -> None:
            self._begin(number, packed, flat.nbytes, launch, later=later)

        _in_turns(
            self._reduce_piece(flat[begin : begin + length], op, _do if begin else first)
            for begin in range(0, flat.numel(), length)
        )

    def _reduce_piece(
        self, piece: Tensor, op: Op, inside: Callable[[Callable[[], Work]], object]
    ) -> Iterator[Sequence[Work]]:
        inside(lambda: self._inside.all_reduce(piece, _undivided(op)))
        slices = plan_slices(piece.numel(), self._plan.num_lanes, piece.itemsize)
        mine = piece[:0]
        if self._lane is not None:
            begin, end = slices[self._local_rank]
            mine = piece[begin:end]
        if self._num_hosts == 2:
            yield from self._swap(mine, op)
        else:
            yield from self._share_out(mine, op)
        yield self._spread(piece, slices)

    def _swap(self, mine: Tensor, op: Op) -> Iterator[Sequence[Work]]:
        """Between two hosts: each sends its whole slice. The same bytes as in parts, in one step."""
        both = torch.empty(2 * mine.numel(), dtype=mine.dtype, device="cpu")
        yield [self._lane.all_gather(both, mine)] if self._lane is not None and mine.numel() else []
        if mine.numel():
            self._add(mine, list(both.view(2, -1).unbind()), op)

    def _share_out(self, mine: Tensor, op: Op) -> Iterator[Sequence[Work]]:
        """Between more hosts: each adds a part of the slice, and tells the others."""
        parts = plan_slices(mine.numel(), self._num_hosts, mine.itemsize)
        begin, end = parts[self._host]
        sizes = [stop - start for start, stop in parts]
        received = torch.empty(len(parts) * (end - begin), dtype=mine.dtype, device="cpu")
        works: list[Work] = []
        if self._lane is not None and mine.numel():
            works.append(self._lane.all_to_all(received, mine, [end - begin] * len(parts), sizes))
        yield works
        padded = torch.empty(parts[0][1], dtype=mine.dtype, device="cpu")
        if begin < end:
            self._add(padded[: end - begin], list(received.view(len(parts), -1).unbind()), op)
        added = torch.empty(len(parts) * padded.numel(), dtype=mine.dtype, device="cpu")
        works = []
        if self._lane is not None and mine.numel():
            works.append(self._lane.all_gather(added, padded))
        yield works
        mine.copy_(added[: mine.numel()])

    def _add(self, into: Tensor, parts: list[Tensor], op: Op) -> None:
        reduce_into([into], parts, plan_arithmetic(_undivided(op), into.dtype), self._scratch)
        if op == "mean":
            into.div_(self._plan.world_size)

    def _spread(self, flat: Tensor, slices: Sequence[tuple[int, int]]) -> list[Work]:
        """Inside the host: from each carrier its slice."""
        return [
            self._inside.broadcast(flat[begin:end], carrier)
            for carrier, (begin, end) in enumerate(slices)
            if begin < end
        ]


def _in_turns(pieces: Iterable[Iterator[Sequence[Work]]]) -> None:
    """Go through the steps of every piece, one step behind the piece before it.

    A step yields what has to be awaited before the piece's next one. All ranks take the same steps in the same order.
    """
    under_way: list[tuple[Iterator[Sequence[Work]], Sequence[Work]]] = []
    waiting = iter(pieces)
    while True:
        new = next(waiting, None)
        turns = [*([] if new is None else [(new, ())]), *under_way]
        if not turns:
            return
        under_way = []
        for piece, works in turns:
            _wait(works)
            next_works = next(piece, None)
            if next_works is not None:
                under_way.append((piece, next_works))


def _do(launch: Callable[[], Work]) -> None:
    launch().wait()


def _wait(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()


def _undivided(op: Op) -> Op:
    """A mean is a sum until all hosts have been added."""
    return "sum" if op == "mean" else op
