"""CPU ranks of several hosts: shared memory inside each, Gloo between them, every rank carrying its slice.

[Note: slices and lanes]

An all-reduce over two hosts of two ranks, of a vector of two slices:

                 host A                       host B
             rank 0   rank 1              rank 2   rank 3
    inside   add the host's vectors       add the host's vectors         (shared memory)
    between  slice 0 ------------------------ slice 0                    (lane 0: ranks 0 and 2)
                      slice 1 ------------------------- slice 1          (lane 1: ranks 1 and 3)
    inside   spread the slices            spread the slices              (shared memory)

There are as many lanes as the smallest host has ranks; a rank beyond that carries nothing. Within a lane of h hosts
each rank receives a part of the slice from every other, adds the parts in tree order and tells the others the sum:
2 (h - 1) / h of the vector leaves each host, the least there can be, and the order of summation is fixed. Of two hosts
each sends its slice to the other, which is as much. Two hosts of two ranks let the vector cross once in each direction;
in a ring over the four ranks it crosses 1.5 times.

All of it runs in a thread of the transport, one call after the other, so that the calls of a host's ranks can't mix.
A long vector goes piece by piece: while one piece is on the wire, the next is added inside the host.

What ranks of one host disagree on, shared memory notices. Between hosts every call begins with a message whose size
both know, with the call's fingerprint and a short vector; a longer one follows when all agree, or comes along with the
message where the call was expected (`host_meetings`).

16-bit sums accumulate in 32 bits inside each host and again between them, and are rounded once in the middle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from evenstep.errors import PeerLostError
from evenstep.transport.arguments import Arguments
from evenstep.transport.base import Op, Transport, Work
from evenstep.transport.call_thread import CallThread
from evenstep.transport.fall_through import fall_through
from evenstep.transport.header import Fingerprint
from evenstep.transport.host_meetings import SMALL_BYTES, HostMeetings
from evenstep.transport.host_plan import HostPlan
from evenstep.transport.reduction import Scratch, plan_arithmetic, plan_slices, reduce_into
from evenstep.transport.segment import PAGE_BYTES, round_up

_MIN_PIECE_BYTES = 1 << 20  # a shorter one takes longer to start than to send
_MAX_PIECE_BYTES = 4 << 20
_PIECES_IN_FLIGHT = 4
# What may travel with a call's first message: of two hosts each sends as much as otherwise, of more hosts more, in
# fewer steps. Never more than a piece, so that all ranks of a host call the same inside, whichever way their lanes go.
_MAX_FORESEEN_BYTES = _MIN_PIECE_BYTES
_MAX_FORESEEN_LANE_BYTES = 64 << 10  # of more than two hosts, what a rank sends: its slice, and those it passes on


Steps = Callable[[], None]


class SeveralHostsTransport:
    """Collectives of ranks of which some share a host. Made by `connect_ranks`, not by calling the class.

    Args:
        plan: Which rank is on which host.
        inside: The ranks of this rank's host, in order.
        lane: The ranks that carry the same slice as this one, one per host in order of host; None: it carries nothing.
        everybody: All ranks, for what has no way of its own here.
        rank: This rank.
        timeout_s: Deadline for peers to arrive.
    """

    name = "shared memory + gloo"

    def __init__(
        self,
        plan: HostPlan,
        *,
        inside: Transport,
        lane: Transport | None,
        everybody: Transport,
        rank: int,
        timeout_s: float,
    ) -> None:
        self.rank = rank
        self.world_size = plan.world_size
        self.timeout_s = timeout_s
        self._plan = plan
        self._host, self._local_rank = plan.place_of(rank)
        self._inside = inside
        self._lane = lane
        self._everybody = everybody
        self._arguments = Arguments(self.name, rank, self.world_size)
        self._scratch = Scratch()
        self._meetings = HostMeetings(lane, [plan.place_of(each)[0] for each in range(plan.world_size)], self.name)
        self._thread = CallThread("evenstep several hosts", let_go=self._let_go)

    @property
    def is_regular(self) -> bool:
        """Whether every host has equally many, consecutive ranks: sums are then added in a tree over ranks."""
        return self._plan.is_regular

    @property
    def memory_ranks(self) -> Sequence[int]:
        """See `common.ranks_in_reach`: those of this host."""
        return self._plan.hosts[self._host]

    # ------------------------------------------------------------------ the seam

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Transport.allocate`: memory that the ranks of this host share."""
        return self._inside.allocate(numel, dtype=dtype, device=device)

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> Work:
        """See `Transport.all_reduce`; also of tensors that aren't contiguous."""
        return self._reduce("all_reduce", tensor, op)

    def broadcast(self, tensor: Tensor, src: int) -> Work:
        """See `Transport.broadcast`; also of tensors that aren't contiguous."""
        self._arguments.check_rank("broadcast", "src", src)
        flat, back = self._arguments.flatten(tensor)

        def steps(number: int, packed: bytes) -> None:
            raw = flat.view(torch.uint8)
            source_host, source = self._plan.place_of(src)
            if self._host == source_host:
                self._inside.broadcast(raw, source).wait()
            self._meetings.meet(number, packed)
            slices = plan_slices(raw.numel(), self._plan.num_lanes, 1)
            if self._lane is not None:
                begin, end = slices[self._local_rank]
                if begin < end:
                    self._lane.broadcast(raw[begin:end], source_host).wait()
            if self._host != source_host:
                _wait(self._spread(raw, slices))

        return self._launch("broadcast", tensor, steps, root=src, back=back)

    def all_gather(self, out: Tensor, tensor: Tensor) -> Work:
        """See `Transport.all_gather`."""
        self._arguments.check_sizes("all_gather", "out", out, "tensor", tensor)
        if not self._plan.is_regular:
            return self._by_everybody("all_gather", lambda to: to.all_gather(out, tensor))
        flat, _ = self._arguments.flatten(tensor)
        into, back = self._arguments.flatten(out)

        def steps(number: int, packed: bytes) -> None:
            raw, num_hosts, num_local = flat.view(torch.uint8), len(self._plan.hosts), self._plan.num_lanes
            of_lane = torch.empty(num_hosts * raw.numel(), dtype=torch.uint8, device="cpu")
            self._gather_lane(number, packed, of_lane, raw)
            of_all = torch.empty(num_local * of_lane.numel(), dtype=torch.uint8, device="cpu")
            self._inside.all_gather(of_all, of_lane).wait()
            by_host = of_all.view(num_local, num_hosts, raw.numel()).transpose(0, 1)
            into.view(torch.uint8).view(num_hosts, num_local, raw.numel()).copy_(by_host)

        return self._launch("all_gather", tensor, steps, back=back)

    def all_gather_over_hosts(self, out: Tensor, tensor: Tensor) -> Work:
        """As `all_gather`, from the ranks that have this one's place on their hosts only; hosts are regular.

        Args:
            out: [number of hosts * n], contiguous.
            tensor: [n], contiguous.
        """

        def steps(number: int, packed: bytes) -> None:
            self._gather_lane(number, packed, out.view(torch.uint8), tensor.view(torch.uint8))

        return self._launch("all_gather", tensor, steps)

    def reduce_scatter(self, out: Tensor, tensor: Tensor, op: Op = "sum") -> Work:
        """See `Transport.reduce_scatter`."""
        plan_arithmetic(op, tensor.dtype)
        self._arguments.check_sizes("reduce_scatter", "tensor", tensor, "out", out)
        flat, _ = self._arguments.flatten(tensor)
        into, back = self._arguments.flatten(out)

        def steps(number: int, packed: bytes) -> None:
            met = self._meetings.start(number, packed)
            num_hosts, num_local, numel = len(self._plan.hosts), self._plan.num_lanes, into.numel()
            if numel == 0:
                met()
                return
            if not self._plan.is_regular:
                whole = flat.clone()
                self._all_reduce_large(whole, op, met)
                into.copy_(whole[self.rank * numel : (self.rank + 1) * numel])
                return
            assert self._lane is not None
            by_lane = flat.view(num_hosts, num_local, numel).transpose(0, 1).reshape(-1)
            of_lane = torch.empty(num_hosts * numel, dtype=flat.dtype, device="cpu")
            self._inside.reduce_scatter(of_lane, by_lane, _undivided(op)).wait()
            met()
            parts = torch.empty_like(of_lane)
            self._lane.all_to_all(parts, of_lane).wait()
            self._add(into, list(parts.view(num_hosts, numel).unbind()), op)

        return self._launch("reduce_scatter", tensor, steps, op=op, back=back)

    def reduce(self, tensor: Tensor, dst: int, op: Op = "sum") -> Work:
        """See `Transport.reduce`."""
        self._arguments.check_rank("reduce", "dst", dst)
        return self._reduce("reduce", tensor, op, root=dst)

    def gather(self, out: Tensor | None, tensor: Tensor, dst: int) -> Work:
        """See `Transport.gather`."""
        return self._by_everybody("gather", lambda to: to.gather(out, tensor, dst))

    def scatter(self, out: Tensor, tensor: Tensor | None, src: int) -> Work:
        """See `Transport.scatter`."""
        return self._by_everybody("scatter", lambda to: to.scatter(out, tensor, src))

    def all_to_all(
        self,
        out: Tensor,
        tensor: Tensor,
        out_splits: Sequence[int] | None = None,
        splits: Sequence[int] | None = None,
    ) -> Work:
        """See `Transport.all_to_all`."""
        self._arguments.check_all_to_all(out, tensor, out_splits, splits)
        return self._by_everybody("all_to_all", lambda to: to.all_to_all(out, tensor, out_splits, splits))

    def barrier(self) -> Work:
        """See `Transport.barrier`."""
        nothing = torch.zeros(1, dtype=torch.uint8, device="cpu")
        return self._launch(
            "barrier", nothing, lambda number, packed: self._all_reduce_small(number, packed, nothing, "max")
        )

    def split(self) -> Transport:
        """See `Transport.split`."""
        return SeveralHostsTransport(
            self._plan,
            inside=self._inside.split(),
            lane=None if self._lane is None else self._lane.split(),
            everybody=self._everybody.split(),
            rank=self.rank,
            timeout_s=self.timeout_s,
        )

    def close(self) -> None:
        """See `Transport.close`."""
        self._thread.close(PeerLostError(f"rank {self.rank}: this {self.name} transport has been closed."))

    def __repr__(self) -> str:
        thread = self._thread
        state = "closed" if thread.is_closed else "failed" if thread.failure else f"{thread.num_calls} calls"
        return f"<SeveralHostsTransport rank {self.rank}/{self.world_size} on {len(self._plan.hosts)} hosts, {state}>"

    # ------------------------------------------------------------------ launching

    def _launch(
        self,
        collective: str,
        tensor: Tensor,
        steps: Callable[[int, bytes], None],
        *,
        op: Op | None = None,
        root: int = -1,
        back: tuple[Tensor, Tensor] | None = None,
    ) -> Work:
        if back is not None:
            self._arguments.check_written(collective, back[0])
        packed = Fingerprint(collective, op, tensor.dtype, tuple(tensor.shape), root).pack()

        def prepare(number: int) -> Steps:
            def run() -> None:
                steps(number, packed)
                if back is not None:
                    back[0].copy_(back[1])

            return run

        return self._thread.submit(f"{collective} over {self.name}", prepare)

    def _reduce(self, collective: str, tensor: Tensor, op: Op, root: int = -1) -> Work:
        plan_arithmetic(op, tensor.dtype)  # refuses what has no meaning, before anything is sent
        flat, back = self._arguments.flatten(tensor)

        def steps(number: int, packed: bytes) -> None:
            if flat.nbytes <= SMALL_BYTES:
                self._all_reduce_small(number, packed, flat, op)
            elif self._meetings.expects(packed):
                self._all_reduce_foreseen(number, packed, flat, op)
            else:
                met = self._meetings.start(number, packed, later=self._own_slice(flat).nbytes)
                self._all_reduce_large(flat, op, met)

        return self._launch(collective, tensor, steps, op=op, root=root, back=back)

    def _by_everybody(self, collective: str, launch: Callable[[Transport], Work]) -> Work:
        fall_through.count(collective)
        # Launched in the caller's thread, whose error it is if that can't be done.
        return self._thread.submit(f"{collective} over gloo", lambda number: launch(self._everybody).wait)

    def _let_go(self) -> None:
        # The other ranks of this host notice, and through their lanes those of the other hosts.
        for transport in self.parts:
            transport.close()

    @property
    def parts(self) -> list[Transport]:
        """What it is made of: inside this host, between hosts, and for the rest."""
        return [each for each in (self._inside, self._lane, self._everybody) if each is not None]

    # ------------------------------------------------------------------ steps

    def _gather_lane(self, number: int, packed: bytes, out: Tensor, raw: Tensor) -> None:
        """What every rank of the lane has: bytes."""
        if raw.numel() <= SMALL_BYTES:
            torch.cat(self._meetings.meet(number, packed, raw), out=out)
        else:
            self._meetings.meet(number, packed)
            assert self._lane is not None
            self._lane.all_gather(out, raw).wait()

    def _all_reduce_small(self, number: int, packed: bytes, flat: Tensor, op: Op) -> None:
        self._inside.all_reduce(flat, _undivided(op)).wait()
        sums = self._meetings.meet(number, packed, flat.view(torch.uint8))
        if sums:
            self._add(flat, [each.view(flat.dtype) for each in sums], op)
        if self._plan.has_idle_ranks(self._host):
            self._inside.broadcast(flat, 0).wait()

    def _own_slice(self, flat: Tensor) -> Tensor:
        """This lane's slice, if it may travel with a message; else, and where there is no lane, nothing."""
        begin, end = 0, 0
        if self._lane is not None:
            slices = plan_slices(flat.numel(), self._plan.num_lanes, flat.itemsize)
            if may_be_foreseen(flat.nbytes, slices[0][1] * flat.itemsize, len(self._plan.hosts)):
                begin, end = slices[self._local_rank]
        return flat[begin:end]

    def _all_reduce_foreseen(self, number: int, packed: bytes, flat: Tensor, op: Op) -> None:
        """As `_all_reduce_large` of one piece, with the slice in the first message."""
        self._inside.all_reduce(flat, _undivided(op)).wait()
        mine = self._own_slice(flat)
        sums = self._meetings.meet(number, packed, mine.view(torch.uint8), later=mine.nbytes)
        self._add(mine, [each.view(flat.dtype) for each in sums], op)
        _wait(self._spread(flat, plan_slices(flat.numel(), self._plan.num_lanes, flat.itemsize)))

    def _all_reduce_large(self, flat: Tensor, op: Op, met: Callable[[], object]) -> None:
        """Piece by piece; `met`, called once, returns when the hosts have compared what they call."""
        length = plan_piece_bytes(flat.nbytes) // flat.itemsize
        _in_turns(
            self._reduce_piece(flat[begin : begin + length], op, list if begin else met)
            for begin in range(0, flat.numel(), length)
        )

    def _reduce_piece(self, piece: Tensor, op: Op, met: Callable[[], object]) -> Iterator[Sequence[Work]]:
        self._inside.all_reduce(piece, _undivided(op)).wait()
        met()
        slices = plan_slices(piece.numel(), self._plan.num_lanes, piece.itemsize)
        mine = piece[:0]
        if self._lane is not None:
            begin, end = slices[self._local_rank]
            mine = piece[begin:end]
        if len(self._plan.hosts) == 2:
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
        parts = plan_slices(mine.numel(), len(self._plan.hosts), mine.itemsize)
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
            into.div_(self.world_size)

    def _spread(self, flat: Tensor, slices: Sequence[tuple[int, int]]) -> list[Work]:
        """Inside the host: from each carrier its slice."""
        return [
            self._inside.broadcast(flat[begin:end], carrier)
            for carrier, (begin, end) in enumerate(slices)
            if begin < end
        ]


def may_be_foreseen(num_bytes: float, slice_bytes: float, num_hosts: int) -> bool:
    """Whether a vector, of which each rank carries a slice, travels with the message of an expected call. Pure."""
    is_short = num_hosts == 2 or (num_hosts - 1) * slice_bytes <= _MAX_FORESEEN_LANE_BYTES
    return num_bytes <= _MAX_FORESEEN_BYTES and is_short


def plan_piece_bytes(num_bytes: int) -> int:
    """How long the pieces of a vector are: some are in flight at once, and none is too short to be worth it. Pure."""
    return min(max(round_up(num_bytes // _PIECES_IN_FLIGHT, PAGE_BYTES), _MIN_PIECE_BYTES), _MAX_PIECE_BYTES)


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


def _wait(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()


def _undivided(op: Op) -> Op:
    """A mean is a sum until all hosts have been added."""
    return "sum" if op == "mean" else op
