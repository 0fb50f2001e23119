"""Programs of collectives that treat ranks differently: reduce, scatter, all_to_all. See `collectives`."""

from __future__ import annotations

from torch import Tensor

from evenstep.errors import MismatchError
from evenstep.transport.arrivals import Phase
from evenstep.transport.call import Call
from evenstep.transport.collectives import PROGRAMS, Exchange, Program, Programs, all_reduce_program
from evenstep.transport.segment import PIECE_BYTES


def explain_splits(splits: Tensor) -> str | None:
    """What to tell when a rank expects other amounts than it is sent; None if all fits. Pure, equal on all ranks.

    Args:
        splits: [world_size, 2, world_size]: of each rank, how much it sends to and expects from each.
    """
    sent, expected = splits[:, 0], splits[:, 1].t()
    wrong = (sent != expected).nonzero()
    if not len(wrong):
        return None
    source, target = wrong[0].tolist()
    return (
        f"the ranks disagree in an all_to_all: rank {source} sends {int(sent[source, target])} elements to rank "
        f"{target}, which expects {int(expected[source, target])}. What a rank sends to another is what that one "
        f"expects from it."
    )


def _small_reduce(at: Exchange, call: Call) -> None:
    if call.receiver == at.rank:
        at.reduce(call, [call.out], at.small(call))


def _reduce(at: Exchange, call: Call) -> Program:
    # Through the slots also what lies in a zone: nobody but the receiver gets his tensor changed.
    call.place, call.places = None, [None] * at.world_size
    yield from all_reduce_program(at, call)


def _small_scatter(at: Exchange, call: Call) -> None:
    numel = call.out.numel()
    if numel:
        call.out.copy_(at.small(call)[call.source][at.rank * numel : (at.rank + 1) * numel])


def _scatter(at: Exchange, call: Call) -> Program:
    num_pieces, numel = at.count_pieces(call), call.out.numel()
    first, last = at.rank * numel, (at.rank + 1) * numel
    is_copied = call.places[call.source] is None
    if is_copied:
        filled = at.put(call, 0)
    for piece in range(num_pieces):
        if is_copied:
            yield Phase.FILLED, filled
            if piece + 1 < num_pieces:
                filled = at.put(call, piece + 1)
        start, stop = at.piece_bounds(call, piece)
        begin, end = max(start, first), min(stop, last)
        if begin < end:
            call.out[begin - first : end - first].copy_(at.home(call, call.source, piece, begin - start, end - start))
    if is_copied:
        at.pieces_done(num_pieces)
    else:
        yield from at.meet()


def _small_all_to_all(at: Exchange, call: Call) -> None:
    numel = call.flat.numel() // at.world_size
    if numel:
        for rank, small in enumerate(at.small(call)):
            mine = small[at.rank * numel : (at.rank + 1) * numel]
            call.out[rank * numel : (rank + 1) * numel].copy_(mine)


def _all_to_all(at: Exchange, call: Call) -> Program:
    """A piece holds a part of what its rank sends to every other."""
    if call.splits is None:
        sent = [[call.flat.numel() // at.world_size] * at.world_size] * at.world_size
    else:
        problem = explain_splits(call.splits)
        if problem is not None:
            raise MismatchError(problem)
        sent = call.splits[:, 0].tolist()
    call.place, call.places = None, [None] * at.world_size
    length = PIECE_BYTES // call.flat.dtype.itemsize // at.world_size
    num_pieces = -(-max(max(row) for row in sent) // length)

    def put(piece: int) -> int:
        start = 0
        for rank, numel in enumerate(sent[at.rank]):
            begin, end = piece * length, min(numel, (piece + 1) * length)
            if begin < end:
                into = at.home(call, at.rank, piece, rank * length, rank * length + end - begin)
                into.copy_(call.flat[start + begin : start + end])
            start += numel
        return at.arrivals.announce(Phase.FILLED)

    if num_pieces:
        filled = put(0)
    for piece in range(num_pieces):
        yield Phase.FILLED, filled
        if piece + 1 < num_pieces:
            filled = put(piece + 1)
        start = 0
        for rank in at.ranks:
            numel = sent[rank][at.rank]
            begin, end = piece * length, min(numel, (piece + 1) * length)
            if begin < end:
                mine = at.home(call, rank, piece, at.rank * length, at.rank * length + end - begin)
                call.out[start + begin : start + end].copy_(mine)
            start += numel
    at.pieces_done(num_pieces)


ALL_PROGRAMS: Programs = {
    **PROGRAMS,
    "reduce": (_small_reduce, _reduce),
    "scatter": (_small_scatter, _scatter),
    "all_to_all": (_small_all_to_all, _all_to_all),
}
