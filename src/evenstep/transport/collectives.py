"""The collectives of a host, as programs over a shared segment.

A program is a generator. It yields (phase, count) where it can't go on before every other rank has announced that
phase so often; whoever runs it decides whether to wait or to come back later. Programs of one transport run one after
the other, in the order of the calls, on every rank.

[Note: three ways]

small      Data travels with the announcement: every rank copies its tensor into its slot when the call begins, and
           afterwards reads all slots. One meeting. So do numbers that travel beside a tensor, however large that is.
in place   Every tensor lies in its rank's zone. Ranks read and write each other's tensors where they are: each
           reduces one slice over all ranks and writes it to all. Two meetings, no copy.
pieces     Otherwise a tensor travels through slots that stay in the cache, piece by piece. Tensors that do lie in a
           zone are still used where they are.

[Note: three pieces]

Piece t is put into slot t % 3 as soon as every rank has announced FILLED for piece t - 1. A rank announces that
after it has put its own piece t - 1, and so after it has copied the result of piece t - 3 out: nobody needs slot
t % 3 any more. With two slots a fast rank would overwrite what a slow one still copies out.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Generator, Mapping, Sequence

import torch
from torch import Tensor

from evenstep.errors import MismatchError
from evenstep.health import peer_pages
from evenstep.transport.arena import Arena, Views
from evenstep.transport.arrivals import Arrivals, Phase
from evenstep.transport.call import Call
from evenstep.transport.header import (
    COLLECTIVES,
    OVER_GLOO,
    REFUSED,
    TOLD,
    explain_mismatch,
    pack_place,
    text_bytes,
    unpack_header,
    unpack_text,
)
from evenstep.transport.looking import look_for
from evenstep.transport.reduction import Arithmetic, Scratch, plan_arithmetic, plan_slices, reduce_into
from evenstep.transport.segment import (
    NUM_PIECES,
    NUM_SLOTS,
    PIECE_BYTES,
    Segment,
)

Program = Generator[tuple[Phase, int], None, None]
# By collective: what is done of a small tensor, once all are there, and the program for a large one.
Programs = Mapping[str, tuple[Callable[["Exchange", "Call"], None], Callable[["Exchange", "Call"], Program]]]

_memmove = ctypes.memmove
_MAX_SMALL_VIEWS = 1024
_MAX_AGREED = 1024


class Exchange:
    """A rank's hands in the segment: what programs do there.

    Attributes:
        segment: The shared memory.
        arrivals: Announcements and meetings.
        arena: This rank's zone.
        programs: By collective, what is done of a small and of a large tensor.
        rank: This rank.
        world_size: Number of ranks.
        part_of: Number and transport of the call that the calls are now made for; None: they are made for themselves.
    """

    def __init__(
        self, segment: Segment, arrivals: Arrivals, programs: Programs, *, rank: int, world_size: int, name: str
    ) -> None:
        self.segment = segment
        self.arrivals = arrivals
        self.arena = Arena(segment, rank)
        self.rank = rank
        self.world_size = world_size
        self.ranks = range(world_size)
        self.part_of: tuple[int, str] | None = None
        self._name = name
        self._programs = programs
        self._views = Views(segment)
        self._scratch = Scratch()
        self._small_views: dict[tuple[int, torch.dtype, int], list[Tensor]] = {}
        self._agreed: dict[tuple[bytes, ...], Sequence[int | None]] = {}  # by what all announced: their places
        self._num_pieces = 0

    # ------------------------------------------------------------------ the beginning of a call

    def has_slot(self, number: int) -> bool:
        """Whether everybody, this rank included, has finished with the call that used the same slot before."""
        count = number - NUM_SLOTS + 1
        if count <= 0:
            return True
        arrivals = self.arrivals
        return arrivals.announced(Phase.FINISHED) >= count and arrivals.all_here(Phase.FINISHED, count)

    def arrive(self, call: Call) -> None:
        """Show the others what is called, with the data if there is little."""
        layout, slot = self.segment.layout, call.slot
        num_bytes = call.flat.nbytes
        if num_bytes and call.is_small and call.source in (-1, self.rank):
            _memmove(self.segment.common.address + layout.small_slot(self.rank, slot), call.address, num_bytes)
        if call.beside is not None:
            there = self.segment.common.address + layout.beside(self.rank, slot)
            _memmove(there, call.beside.data_ptr(), call.beside.nbytes)
        call.head = pack_place(call.place) + call.packed
        self.segment.write(layout.header(self.rank, slot), call.head)
        self.arrivals.announce(Phase.ARRIVED)

    def run_small(self, call: Call) -> None:
        """Everything that remains to be done of a small call, when all have arrived."""
        self._read_headers(call)
        self._programs[call.collective][0](self, call)
        if call.beside is not None:
            self._add_beside(call, call.beside)
        self.arrivals.announce(Phase.FINISHED)

    def program(self, call: Call) -> Program:
        """What remains to be done of a large call, when all have arrived."""
        self._read_headers(call)
        if call.beside is not None:
            self._add_beside(call, call.beside)
        yield from self._programs[call.collective][1](self, call)
        self.arrivals.announce(Phase.FINISHED)

    def _add_beside(self, call: Call, numbers: Tensor) -> None:
        key = (call.slot + NUM_SLOTS, numbers.dtype, numbers.numel())
        views = self._slots(key, self.segment.layout.beside)
        reduce_into([numbers], views, plan_arithmetic("sum", numbers.dtype), self._scratch)

    def _read_headers(self, call: Call) -> None:
        layout, slot, own = self.segment.layout, call.slot, call.head
        heads = tuple(
            own if r == self.rank else self.segment.read(layout.header(r, slot), len(own)) for r in self.ranks
        )
        places = self._agreed.get(heads)  # a bucket is announced alike step after step
        if places is not None:
            call.places = places
            return
        headers = [unpack_header(head) for head in heads]
        call.places = tuple(place for place, _ in headers)
        fingerprints = [packed for _, packed in headers]
        texts = {
            r: unpack_text(self.segment.read(layout.small_slot(r, slot), num_bytes))
            for r, packed in enumerate(fingerprints)
            if (num_bytes := text_bytes(packed))
        }
        number, name = self.part_of or (call.number + 1, self._name)
        known_as = self.arrivals.known_as
        problem = explain_mismatch(number, name, fingerprints, texts, known_as)
        if problem is not None and texts:
            raise MismatchError(problem)
        if problem is not None:
            pids = {known_as[rank]: self.arrivals.pid(rank) for rank in self.ranks}
            raise MismatchError(problem + peer_pages.tell_sites(f"{name} {number}", pids))
        if len(self._agreed) >= _MAX_AGREED:
            self._agreed.clear()
        self._agreed[heads] = call.places

    # ------------------------------------------------------------------ what programs are made of

    def small(self, call: Call) -> list[Tensor]:
        """[numel] of every rank: the data of a small call."""
        key = (call.slot, call.flat.dtype, call.flat.numel())
        return self._slots(key, self.segment.layout.small_slot)

    def _slots(self, key: tuple[int, torch.dtype, int], place: Callable[[int, int], int]) -> list[Tensor]:
        views = self._small_views.get(key)
        if views is None:
            slots = [place(rank, key[0] % NUM_SLOTS) for rank in self.ranks]
            views = [self._views.common(slot, key[1], key[2]) for slot in slots]
            if len(self._small_views) >= _MAX_SMALL_VIEWS:
                self._small_views.clear()
            self._small_views[key] = views
        return views

    def home(self, call: Call, rank: int, piece: int, begin: int, end: int) -> Tensor:
        """[end - begin], elements of a rank's tensor, where the ranks meet over it.

        Args:
            call: The call.
            rank: Whose tensor.
            piece: Number of the piece, from 0 in this call.
            begin: First element, counted from the start of the piece.
            end: Behind the last.
        """
        dtype = call.flat.dtype
        place = call.places[rank]
        if place is None:
            slot = self.segment.layout.piece(rank, (self._num_pieces + piece) % NUM_PIECES)
            return self._views.common(slot + begin * dtype.itemsize, dtype, end - begin)
        first = begin + (piece and piece * self.piece_numel(call))
        if rank == self.rank:
            return call.flat[first : first + end - begin]
        return self._views.zone(rank, place + first * dtype.itemsize, dtype, end - begin)

    def piece_numel(self, call: Call) -> int:
        """Elements of one piece: all of the tensor if nobody's has to be copied."""
        if call.source >= 0:
            in_place = call.places[call.source] is not None
        else:
            in_place = None not in call.places
        return call.flat.numel() if in_place else PIECE_BYTES // call.flat.dtype.itemsize

    def put(self, call: Call, piece: int) -> int:
        """Copy a piece of this rank's tensor to where the others read it, and announce it. Returns the count."""
        if call.places[self.rank] is None and call.source in (-1, self.rank):
            begin, end = self.piece_bounds(call, piece)
            self.home(call, self.rank, piece, 0, end - begin).copy_(call.flat[begin:end])
        return self.arrivals.announce(Phase.FILLED)

    def piece_bounds(self, call: Call, piece: int) -> tuple[int, int]:
        """The elements of a piece: (begin, end)."""
        length = self.piece_numel(call)
        return piece * length, min(call.flat.numel(), (piece + 1) * length)

    def count_pieces(self, call: Call) -> int:
        """How many pieces a call has."""
        return -(-call.flat.numel() // self.piece_numel(call))

    def pieces_done(self, count: int) -> None:
        """The slots go on where this call has ended."""
        self._num_pieces += count

    def meet(self) -> Program:
        """Go on when everybody has come here."""
        yield Phase.REDUCED, self.arrivals.announce(Phase.REDUCED)

    def reduce(self, call: Call, outputs: list[Tensor], inputs: list[Tensor], begin: int = 0) -> None:
        """See `reduce_into`; `begin` is the first element's number in the call's tensor."""
        reduce_into(outputs, inputs, self.arithmetic(call), self._scratch, look_for(call.flat), begin)

    def arithmetic(self, call: Call) -> Arithmetic:
        """How the call combines."""
        assert call.op is not None
        return plan_arithmetic(call.op, call.flat.dtype)


# ---------------------------------------------------------------------- small


def _small_all_reduce(at: Exchange, call: Call) -> None:
    at.reduce(call, [call.out], at.small(call))


def _small_broadcast(at: Exchange, call: Call) -> None:
    if call.source != at.rank and call.out.numel():
        call.out.copy_(at.small(call)[call.source])


def _small_all_gather(at: Exchange, call: Call) -> None:
    numel = call.flat.numel()
    if numel and call.receiver in (-1, at.rank):
        for rank, small in enumerate(at.small(call)):
            call.out[rank * numel : (rank + 1) * numel].copy_(small)


def _small_reduce_scatter(at: Exchange, call: Call) -> None:
    numel = call.out.numel()
    begin, end = at.rank * numel, (at.rank + 1) * numel
    at.reduce(call, [call.out], [small[begin:end] for small in at.small(call)], begin)


def _small_barrier(at: Exchange, call: Call) -> None:
    pass


# ---------------------------------------------------------------------- large


def all_reduce_program(at: Exchange, call: Call) -> Program:
    """Each rank reduces its slice, in place or piece by piece."""
    if None in call.places:
        yield from _all_reduce_in_pieces(at, call)
        return
    # In place, the meeting at the beginning has shown that everything is there.
    begin, end = plan_slices(call.flat.numel(), at.world_size, call.flat.dtype.itemsize)[at.rank]
    if begin < end:
        homes = [at.home(call, rank, 0, begin, end) for rank in at.ranks]
        at.reduce(call, [homes[at.rank], *homes[: at.rank], *homes[at.rank + 1 :]], homes, begin)
    yield Phase.REDUCED, at.arrivals.announce(Phase.REDUCED)


def _all_reduce_in_pieces(at: Exchange, call: Call) -> Program:
    num_pieces = at.count_pieces(call)
    yield Phase.FILLED, at.put(call, 0)
    for piece in range(num_pieces):
        first, last = at.piece_bounds(call, piece)
        slices = plan_slices(last - first, at.world_size, call.flat.dtype.itemsize)
        begin, end = slices[at.rank]
        if begin < end:
            homes = [at.home(call, rank, piece, begin, end) for rank in at.ranks]
            written = [h for r, h in enumerate(homes) if r != at.rank and call.places[r] is not None]
            at.reduce(call, [homes[at.rank], *written], homes, first + begin)
        reduced = at.arrivals.announce(Phase.REDUCED)
        has_next = piece + 1 < num_pieces
        filled = at.put(call, piece + 1) if has_next else 0
        yield Phase.REDUCED, reduced
        if call.place is None and call.receiver in (-1, at.rank):
            for owner, (begin, end) in enumerate(slices):
                if begin < end:
                    call.out[first + begin : first + end].copy_(at.home(call, owner, piece, begin, end))
        if has_next:
            yield Phase.FILLED, filled
    at.pieces_done(num_pieces)
    if any(place is not None for place in call.places):
        yield from at.meet()  # whose result lies in place may not change it before those who copy have read it


def _broadcast(at: Exchange, call: Call) -> Program:
    num_pieces = at.count_pieces(call)
    is_copied = call.places[call.source] is None
    if is_copied:
        filled = at.put(call, 0)
    for piece in range(num_pieces):
        if is_copied:
            yield Phase.FILLED, filled
            if piece + 1 < num_pieces:
                filled = at.put(call, piece + 1)
        if at.rank != call.source:
            begin, end = at.piece_bounds(call, piece)
            call.out[begin:end].copy_(at.home(call, call.source, piece, 0, end - begin))
    if is_copied:
        at.pieces_done(num_pieces)
    else:
        yield from at.meet()  # the root may not change its tensor before all have read it


def _all_gather(at: Exchange, call: Call) -> Program:
    num_pieces, numel = at.count_pieces(call), call.flat.numel()
    is_copied = None in call.places
    if is_copied:
        filled = at.put(call, 0)
    for piece in range(num_pieces):
        if is_copied:
            yield Phase.FILLED, filled
            if piece + 1 < num_pieces:
                filled = at.put(call, piece + 1)
        if call.receiver in (-1, at.rank):
            begin, end = at.piece_bounds(call, piece)
            for rank in at.ranks:
                call.out[rank * numel + begin : rank * numel + end].copy_(at.home(call, rank, piece, 0, end - begin))
    if is_copied:
        at.pieces_done(num_pieces)
    if any(place is not None for place in call.places):
        yield from at.meet()


def _reduce_scatter(at: Exchange, call: Call) -> Program:
    numel = call.out.numel()
    if None not in call.places:
        begin, end = at.rank * numel, (at.rank + 1) * numel
        at.reduce(call, [call.out], [at.home(call, rank, 0, begin, end) for rank in at.ranks], begin)
        yield from at.meet()
        return
    call.places = (None,) * at.world_size  # a piece holds a part of every rank's share, so all are copied
    length = PIECE_BYTES // call.flat.dtype.itemsize // at.world_size
    num_pieces = -(-numel // length)

    def put(piece: int) -> int:
        begin, end = piece * length, min(numel, (piece + 1) * length)
        for rank in at.ranks:
            into = at.home(call, at.rank, piece, rank * length, rank * length + end - begin)
            into.copy_(call.flat[rank * numel + begin : rank * numel + end])
        return at.arrivals.announce(Phase.FILLED)

    filled = put(0)
    for piece in range(num_pieces):
        yield Phase.FILLED, filled
        if piece + 1 < num_pieces:
            filled = put(piece + 1)
        begin, end = piece * length, min(numel, (piece + 1) * length)
        first = at.rank * length
        inputs = [at.home(call, rank, piece, first, first + end - begin) for rank in at.ranks]
        at.reduce(call, [call.out[begin:end]], inputs, at.rank * numel + begin)
    at.pieces_done(num_pieces)


def _barrier(at: Exchange, call: Call) -> Program:
    yield from ()


# The first is for tensors whose data travels with the announcement.
PROGRAMS: Programs = {
    "all_reduce": (_small_all_reduce, all_reduce_program),
    "broadcast": (_small_broadcast, _broadcast),
    "all_gather": (_small_all_gather, _all_gather),
    "reduce_scatter": (_small_reduce_scatter, _reduce_scatter),
    "barrier": (_small_barrier, _barrier),
    "gather": (_small_all_gather, _all_gather),
    **{name: (_small_barrier, _barrier) for name in COLLECTIVES if name in (REFUSED, TOLD) or name.endswith(OVER_GLOO)},
}
