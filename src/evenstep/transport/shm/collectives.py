"""The collectives of a node, as programs over a shared segment.

A program is a generator. It yields (phase, count) when every other rank must have signalled this phase `count` times
before it continues; `queue` decides whether to wait or to come back later. Programs of one transport run one after the
other, in the order of the calls, on every rank.

`ProgramContext` has the primitives that programs are made of; `PROGRAMS` lists the programs by collective.

[Note: three protocols]

eager       Every rank copies its tensor into its slot when the call begins, and reads all slots afterwards. One sync
            point. The numbers beside a call are always sent in this way, also in large calls.
zero-copy   Every tensor lies in its rank's zone. Ranks read and write each other's tensors in place: each reduces
            one slice over all ranks and writes it to all. Two sync points, no copy.
chunked     Otherwise a tensor is copied chunk by chunk through slots that stay in the cache. Tensors in a zone are
            still used in place. In reductions a rank's own slice isn't copied: only that rank reads it, from the
            caller's tensor, and writes the sum both to the caller's tensor and to the slot. Small tensors
            (`ProgramContext.sums_whole`) are summed by every rank itself, from all slots: one sync point less.

[Note: three chunks]

A rank stages chunk t in slot t % 3 under two conditions: it has read its data of all chunks up to t - 2, and it knows
that every other rank has begun with chunk t - 1, because that rank has signalled FILLED for it or, in an all_reduce,
REDUCED for chunk t - 2. A rank that has begun with chunk t - 1 doesn't read chunk t - 3 any more, so slot t % 3 is
free. With two slots a fast rank would overwrite data that a slow rank still reads.

A rank whose earlier calls are done is *ready*: it stages the first chunk of its next call when it shows the call
header, which has a flag for that. If all ranks were ready no rank waits for FILLED signals of that chunk: once all have
arrived, all have staged it and are done with every earlier call.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from evenstep.errors import MismatchError, PeerLostError
from evenstep.ground.health import peer_heartbeats
from evenstep.transport.base import Collective, Row
from evenstep.transport.core.header import (
    COLLECTIVES,
    COMPARED_BYTES,
    NUMBER_OFFSET,
    OVER_GLOO,
    REFUSED,
    Fingerprint,
    explain_mismatch,
    pack_place,
    text_bytes,
    unpack_header,
    unpack_text,
)
from evenstep.transport.core.nonfinite_monitor import monitor_of
from evenstep.transport.core.reduction import Scratch, divisor_of, plan_arithmetic, plan_slices, reduce_into
from evenstep.transport.shm.allocator import Arena, Views
from evenstep.transport.shm.segment import (
    CHUNK_BYTES,
    EAGER_BYTES,
    MAX_BESIDE_BYTES,
    NUM_CHUNKS,
    NUM_SLOTS,
    ROW_OFFSET,
    Segment,
    allocate_range,
)
from evenstep.transport.shm.sync import Phase, ProgressCounters, Waiting


class Call:
    """One collective of this rank, while it runs.

    Args:
        checked: The call, after the check of its arguments.

    Attributes:
        number: The call's number, from 0, among the calls of one transport.
        kind: The collective's name, one of `header.COLLECTIVES`.
        arithmetic: How values are combined; None if they aren't.
        source: The only rank whose data is used; -1: all ranks' data is used.
        receiver: The only rank that gets the result; -1: all ranks get it.
        flat: [numel], contiguous: this rank's input; also its output if `out` is the same tensor. In a scatter, on
            ranks other than the source, only the length matters.
        address: Address of `flat`'s first element.
        num_bytes: Size of `flat`.
        out: [...], contiguous, flat: this rank's output.
        packed: The fingerprint.
        place: Offset of `flat` in this rank's zone; None if it is elsewhere.
        splits: [world_size, 2, world_size], int64, read when the program starts: the numbers of elements that each rank
            sends to, and expects from, each other rank; None if all numbers are equal.
        beside: [n], numbers that are added over the ranks in the same call, in place; None: there are none.
        row: This rank's row for the divisor; None: no rank has one.
        divisor: The divisor of the result; None: it isn't divided. If ranks have rows, it is known when all ranks have
            arrived.
        back: (to, from): a copy to make at the end if the caller's tensor isn't contiguous.
        is_eager: The data is in the slot when the rank signals that the call has begun.
        is_inference: Whether the result may be written only in torch's inference mode, in any thread.
        slot: The number of the slot that the call uses.
        is_staged: Whether this rank has staged its first chunk.
        all_ready: Whether every rank, when it arrived, had staged its first chunk and was done with all earlier calls.
            Known when all have arrived.
        places: For each rank, the offset of its tensor in its zone; None if the tensor has to be copied. Known when all
            have arrived. If the result would overwrite a tensor that another rank still reads, the program sets all
            places to None, and so uses slots. It sets `place` to None, too, if this rank's result may not be written in
            the zone.
        head: The call header that this rank shows to the others.
    """

    source = -1
    receiver = -1
    number = 0
    slot = 0
    place: int | None = None
    splits: Tensor | None = None
    is_staged = False
    all_ready = False
    places: Sequence[int | None] = ()
    head = b""

    def __init__(self, checked: Collective) -> None:
        self.kind = kind = checked.kind
        if checked.root >= 0:
            self.source = checked.root if kind in ("broadcast", "scatter") else -1
            self.receiver = checked.root if kind in ("reduce", "gather") else -1
        self.flat = flat = checked.flat
        self.address = flat.data_ptr()
        self.num_bytes = num_bytes = flat.nbytes
        self.out = out = checked.out
        self.packed = checked.packed
        self.arithmetic = checked.arithmetic
        self.beside = beside = checked.beside
        self.row = checked.row
        self.plain = checked.plain
        self.divisor = checked.divisor
        self.back = back = checked.back
        self.is_eager = num_bytes <= (EAGER_BYTES if beside is None else EAGER_BYTES - MAX_BESIDE_BYTES)
        self.is_inference = out.is_inference() or (back is not None and back[0].is_inference())

    def __str__(self) -> str:
        return f"number {self.number + 1}, {Fingerprint.unpack(self.packed)}"


Program = Generator[tuple[Phase, int], None, None]
Stage = Callable[["ProgramContext", "Call", int], None]  # copies a chunk to the slot in which the others read it
# The function of an eager call, called once all ranks have arrived; the program of a large call; and the function that
# stages a large call's first chunk, if a rank may do so before the others have arrived.
_Programs = tuple[
    Callable[["ProgramContext", "Call"], None], Callable[["ProgramContext", "Call"], Program] | None, Stage | None
]

_memmove = ctypes.memmove
_MAX_AGREED = 1024
SLOTS_AT_ONCE = 4  # number of slots that become free together
_NO_PLACE = pack_place(None)


class _Shown(NamedTuple):
    """Addresses at which a rank shows its data of a call: see `segment`.

    Attributes:
        eager: Address of the slot for the rank's tensor.
        beside: Address of the numbers beside the tensor.
        begin: First byte of the rank's call header.
        end: One past the last byte that ranks compare.
        number: Index of the word with the call's number.
        row: Index of the first double of the rank's row.
    """

    eager: int
    beside: int
    begin: int
    end: int
    number: int
    row: int

    @classmethod
    def of(cls, segment: Segment, rank: int, slot: int) -> _Shown:
        """The addresses of one rank, for calls in one slot."""
        layout, address = segment.layout, segment.common.address
        begin = layout.header(rank, slot)
        return cls(
            eager=address + layout.eager_slot(rank, slot),
            beside=address + layout.beside(rank, slot),
            begin=begin,
            end=begin + COMPARED_BYTES,
            number=(begin + NUMBER_OFFSET) >> 3,
            row=(begin + ROW_OFFSET) >> 3,
        )


class ProgramContext:
    """Per-rank state and primitives that collective programs use.

    Attributes:
        segment: The shared memory.
        counters: Signals between the ranks, and waiting for them.
        arena: This rank's zone.
        rank: This rank.
        world_size: Number of ranks.
        num_chunks: Number of chunks of all earlier calls, which determines the next chunk's slot.
        part_of: Number and transport of the outer call of which the next calls are a part; None: there is no outer
            call.
    """

    def __init__(self, segment: Segment, counters: ProgressCounters, *, rank: int, world_size: int, name: str) -> None:
        self.segment = segment
        self.counters = counters
        self.arena = Arena(segment, rank)
        self.rank = rank
        self.world_size = world_size
        self.ranks = range(world_size)
        self.part_of: tuple[int, str] | None = None
        self._name = name
        self.views = Views(segment)
        self.scratch = Scratch()
        # Addresses of each rank's data, by slot and rank.
        self._slots = [[_Shown.of(segment, r, slot) for r in self.ranks] for slot in range(NUM_SLOTS)]
        # Results of `_agree`, by the call headers of all ranks: places, and whether all are ready.
        self._agreed: dict[tuple[bytes, ...], tuple[Sequence[int | None], bool]] = {}
        self.num_chunks = 0
        self._has_chunks = False  # whether this rank's chunk slots have memory

    # ------------------------------------------------------------------ the beginning of a call

    def count_to_arrive(self, number: int) -> int:
        """The number of FINISHED signals of all ranks after which a call may use its slot; 0: the slot is free.

        Slots become free `SLOTS_AT_ONCE` at a time, so only one in `SLOTS_AT_ONCE` calls has to wait.
        """
        return 0 if number % SLOTS_AT_ONCE else max(0, (number - NUM_SLOTS) // SLOTS_AT_ONCE + 1)

    def has_slot(self, number: int, *, takes: bool) -> bool:
        """Whether all ranks, including this one, have finished the call that used the same slot before.

        Args:
            number: Number of the call that needs the slot.
            takes: Whether to take the other ranks' signals. If False, only signals taken before are counted.
        """
        if number % SLOTS_AT_ONCE:
            return True
        count = self.count_to_arrive(number)
        counters = self.counters
        if counters.num_signals[Phase.FINISHED] < count:
            return False
        return counters.all_here(Phase.FINISHED, count) if takes else not counters.missing(Phase.FINISHED, count)

    def arrive(self, call: Call, *, is_next: bool) -> None:
        """Show the call header, with the data of an eager call or the first chunk, and signal ARRIVED.

        Args:
            call: The call that arrives.
            is_next: Whether all earlier calls of this rank are done.
        """
        segment, shown = self.segment, self._slots[call.slot][self.rank]
        is_ready = False
        if call.is_eager:
            if call.num_bytes and (call.source < 0 or call.source == self.rank):
                _memmove(shown.eager, call.address, call.num_bytes)
        elif is_next and call.place is None and (stage := PROGRAMS[call.kind][2]) is not None:
            call.places = (None,) * self.world_size  # the other ranks' places aren't known yet
            with torch.no_grad() if call.flat.requires_grad else contextlib.nullcontext():
                stage(self, call, 0)
            is_ready = call.is_staged = True
        if call.beside is not None:
            _memmove(shown.beside, call.beside.data_ptr(), call.beside.nbytes)
        if call.row is not None:
            for index, number in enumerate(call.row):
                segment.doubles[shown.row + index] = number
        elsewhere = call.place is None and not is_ready
        call.head = head = (_NO_PLACE if elsewhere else pack_place(call.place, is_ready=is_ready)) + call.packed
        segment.bytes[shown.begin : shown.end] = head
        segment.words[shown.number] = call.number
        self.counters.signal(Phase.ARRIVED)

    def begin(self, call: Call) -> None:
        """Called when all ranks have arrived: read and compare their call headers, and read their rows and numbers.

        Raises:
            MismatchError: The ranks make different calls.
            PeerLostError: An exception interrupted a call on a rank.
        """
        number, segment, slots = call.number, self.segment, self._slots[call.slot]
        heads = []
        for r, shown in enumerate(slots):
            if r == self.rank:
                heads.append(call.head)
                continue
            # A rank on which a signal handler raised in the middle of a call may show an earlier call's header and
            # data.
            if segment.words[shown.number] != number:
                self._refuse_number(call, r)
            heads.append(bytes(segment.bytes[shown.begin : shown.end]))
        key = tuple(heads)
        agreed = self._agreed.get(key)  # a bucket has the same header in every step
        call.places, call.all_ready = agreed or self._agree(call, key)
        if call.row is not None:
            rows = [Row(*segment.doubles[shown.row : shown.row + len(call.row)]) for shown in slots]
            call.divisor = divisor_of(rows, call.plain)
        if call.beside is not None:
            numbers = call.beside
            views = self.views.beside(call.slot, numbers.dtype, numbers.numel())
            reduce_into([numbers], views, plan_arithmetic("sum", numbers.dtype), self.scratch)

    def _agree(self, call: Call, heads: tuple[bytes, ...]) -> tuple[Sequence[int | None], bool]:
        """Compare a new combination of call headers. Returns the places, and whether all ranks are ready."""
        headers = [unpack_header(head) for head in heads]
        fingerprints = [packed for _, _, packed in headers]
        texts = {
            r: unpack_text(ctypes.string_at(self._slots[call.slot][r].eager, num_bytes))
            for r, packed in enumerate(fingerprints)
            if (num_bytes := text_bytes(packed))
        }
        nth, name = self.part_of or (call.number + 1, self._name)
        known_as = self.counters.known_as
        problem = explain_mismatch(nth, name, fingerprints, texts, known_as)
        if problem is not None and texts:
            raise MismatchError(problem)
        if problem is not None:
            pids = {known_as[rank]: self.counters.watch.pid(rank) for rank in self.ranks}
            key = f"{self.segment.nonce.hex()} {nth}"  # unique to this transport
            raise MismatchError(problem + peer_heartbeats.exchange_sites(key, pids))
        if len(self._agreed) >= _MAX_AGREED:
            self._agreed.clear()
        agreed = tuple(place for place, _, _ in headers), all(is_ready for _, is_ready, _ in headers)
        self._agreed[heads] = agreed
        return agreed

    def _refuse_number(self, call: Call, rank: int) -> None:
        known_as = self.counters.known_as
        raise PeerLostError(
            f"rank {known_as[self.rank]} is in {self._name} collective {call}, and rank {known_as[rank]} is in another "
            f"one: an exception interrupted a call there, or here. Start again."
        )

    # ------------------------------------------------------------------ primitives of programs

    def eager_data(self, call: Call) -> list[Tensor]:
        """Every rank's data of an eager call: [numel] each."""
        return self.views.eager(call.slot, call.flat.dtype, call.flat.numel())

    def shared_view(self, call: Call, rank: int, chunk: int, begin: int, end: int) -> Tensor:
        """Elements of a rank's tensor, in memory that all ranks share: [end - begin].

        Args:
            call: The call.
            rank: The rank that has the tensor.
            chunk: Number of the chunk, from 0 in this call.
            begin: First element, counted from the start of the chunk.
            end: One past the last element.
        """
        dtype = call.flat.dtype
        place = call.places[rank]
        if place is None:
            return self.slot_view(call, rank, chunk, begin, end)
        first = begin + (chunk and chunk * self.chunk_numel(call))
        if rank == self.rank:
            return call.flat[first : first + end - begin]
        return self.views.zone(rank, place + first * dtype.itemsize, dtype, end - begin)

    def slot_view(self, call: Call, rank: int, chunk: int, begin: int, end: int) -> Tensor:
        """Elements of a chunk in a rank's slot: [end - begin]. See `shared_view`.

        Raises:
            ConfigurationError: There isn't enough memory for this rank's slots, which are allocated here.
        """
        if rank == self.rank and not self._has_chunks:
            segment, num_bytes = self.segment, NUM_CHUNKS * CHUNK_BYTES
            allocate_range(segment.fd, segment.layout.chunk(rank, 0), num_bytes, what="exchange of long tensors")
            self._has_chunks = True
        dtype = call.flat.dtype
        slot = self.segment.layout.chunk(rank, (self.num_chunks + chunk) % NUM_CHUNKS)
        return self.views.common(slot + begin * dtype.itemsize, dtype, end - begin)

    def chunk_numel(self, call: Call) -> int:
        """Number of elements in a chunk: the whole tensor if no rank's tensor has to be copied."""
        if call.source >= 0:
            in_place = call.places[call.source] is not None
        else:
            in_place = None not in call.places
        return call.flat.numel() if in_place else CHUNK_BYTES // call.flat.dtype.itemsize

    def fill_first(self, call: Call, stage: Stage) -> Program:
        """Stage the first chunk, and wait until every rank has done so."""
        if not call.is_staged:
            stage(self, call, 0)
        if not call.all_ready:
            yield Phase.FILLED, self.counters.signal(Phase.FILLED)

    def chunk_bounds(self, call: Call, chunk: int) -> tuple[int, int]:
        """The elements of a chunk: (begin, end)."""
        length = self.chunk_numel(call)
        return chunk * length, min(call.flat.numel(), (chunk + 1) * length)

    def sums_whole(self, call: Call) -> bool:
        """Whether every rank sums the whole tensor of a chunked all_reduce: if all ranks' data is at most one chunk.

        The amount that each rank reads grows with the number of ranks, and data that another core has written is slow
        to read.
        """
        return call.flat.nbytes * self.world_size <= CHUNK_BYTES

    def count_chunks(self, call: Call) -> int:
        """Number of chunks in a call."""
        return -(-call.flat.numel() // self.chunk_numel(call))

    def sync_point(self, call: Call) -> Program:
        """Wait until every rank has reached this point. This rank has finished reading from the others' zones.

        Raises:
            PeerLostError: A rank has left before, so the memory that was read may no longer have held its tensor.
        """
        left = [rank for rank in self.ranks if rank != self.rank and self.counters.has_left(rank)]
        if left:
            what = f"{self._name} collective {call}"
            self.counters.check(Waiting(time.monotonic()), left, lambda: what, lambda: left)
        yield Phase.REDUCED, self.counters.signal(Phase.REDUCED)

    def reduce(self, call: Call, outputs: list[Tensor], inputs: list[Tensor], begin: int = 0) -> None:
        """See `reduce_into`; `begin` is the first element's number in the call's tensor."""
        assert call.arithmetic is not None
        reduce_into(outputs, inputs, call.arithmetic, self.scratch, monitor_of(call.flat), begin, call.divisor)


# ---------------------------------------------------------------------- eager calls: all data lies in the slots


def _eager_all_reduce(at: ProgramContext, call: Call) -> None:
    flat = call.flat  # `at.eager_data` inlined: this is the most frequent call
    at.reduce(call, [call.out], at.views.eager(call.slot, flat.dtype, flat.numel()))


def _eager_broadcast(at: ProgramContext, call: Call) -> None:
    if call.source != at.rank and call.out.numel():
        call.out.copy_(at.eager_data(call)[call.source])


def _eager_all_gather(at: ProgramContext, call: Call) -> None:
    if call.flat.numel() and call.receiver in (-1, at.rank):
        torch.cat(at.eager_data(call), out=call.out)


def _eager_reduce_scatter(at: ProgramContext, call: Call) -> None:
    numel = call.out.numel()
    begin, end = at.rank * numel, (at.rank + 1) * numel
    at.reduce(call, [call.out], [data[begin:end] for data in at.eager_data(call)], begin)


def _eager_reduce(at: ProgramContext, call: Call) -> None:
    if call.receiver == at.rank:
        at.reduce(call, [call.out], at.eager_data(call))


def _eager_scatter(at: ProgramContext, call: Call) -> None:
    numel = call.out.numel()
    if numel:
        call.out.copy_(at.eager_data(call)[call.source][at.rank * numel : (at.rank + 1) * numel])


def _eager_all_to_all(at: ProgramContext, call: Call) -> None:
    numel = call.flat.numel() // at.world_size
    if numel:
        begin, end = at.rank * numel, (at.rank + 1) * numel
        torch.cat([data[begin:end] for data in at.eager_data(call)], out=call.out)


# ---------------------------------------------------------------------- large calls: the loop over chunks


def _chunk_by_chunk(
    at: ProgramContext, call: Call, num_chunks: int, stage: Stage, read: Callable[[int], object]
) -> Program:
    """Run through the chunks of a call: every rank stages the next chunk before it reads the present chunk.

    Args:
        at: Has the chunk slots. See [Note: three chunks].
        call: The call.
        num_chunks: Number of chunks in the call.
        stage: Copies this rank's part of a chunk to its slot.
        read: Reads a chunk that all ranks have staged.
    """
    if num_chunks:
        yield from at.fill_first(call, stage)
    for chunk in range(num_chunks):
        filled = 0
        if chunk + 1 < num_chunks:
            stage(at, call, chunk + 1)
            filled = at.counters.signal(Phase.FILLED)
        read(chunk)
        if filled:
            yield Phase.FILLED, filled
    at.num_chunks += num_chunks


def _stage(at: ProgramContext, call: Call, chunk: int) -> None:
    """Stage a chunk of this rank's tensor, unless the others read it in the zone."""
    if call.place is None and call.source in (-1, at.rank):
        begin, end = at.chunk_bounds(call, chunk)
        at.slot_view(call, at.rank, chunk, 0, end - begin).copy_(call.flat[begin:end])


def _read_chunks(at: ProgramContext, call: Call, read: Callable[[int], object]) -> Program:
    """Read all of a call's tensors: in place if all are in zones, else chunk by chunk."""
    places = call.places if call.source < 0 else [call.places[call.source]]
    if None in places:
        yield from _chunk_by_chunk(at, call, at.count_chunks(call), _stage, read)
    else:
        read(0)
    if any(place is not None for place in places):
        yield from at.sync_point(call)  # a rank may change a tensor in its zone only when all others have read it


# ---------------------------------------------------------------------- large calls: the programs


def _all_reduce(at: ProgramContext, call: Call) -> Program:
    """Each rank reduces its slice, zero-copy or chunk by chunk.

    Every rank sums small tensors in slots as a whole.
    """
    if None in call.places:
        yield from (_whole_all_reduce if at.sums_whole(call) else _chunked_all_reduce)(at, call)
        return
    # Zero-copy: all ranks have arrived, so all tensors are complete.
    begin, end = plan_slices(call.flat.numel(), at.world_size, call.flat.dtype.itemsize)[at.rank]
    if begin < end:
        views = [at.shared_view(call, rank, 0, begin, end) for rank in at.ranks]
        at.reduce(call, [views[at.rank], *views[: at.rank], *views[at.rank + 1 :]], views, begin)
    yield from at.sync_point(call)


def _stage_slices(at: ProgramContext, call: Call, chunk: int) -> None:
    """Like `_stage`, without this rank's own slice, which only this rank reads."""
    if call.place is None:
        first, last = at.chunk_bounds(call, chunk)
        begin, end = plan_slices(last - first, at.world_size, call.flat.dtype.itemsize)[at.rank]
        for start, stop in ((0, begin), (end, last - first)):
            if start < stop:
                slot = at.slot_view(call, at.rank, chunk, start, stop)
                slot.copy_(call.flat[first + start : first + stop])


def _stage_summands(at: ProgramContext, call: Call, chunk: int) -> None:
    """Stage the data that the other ranks read in a chunked all_reduce."""
    (_stage if at.sums_whole(call) else _stage_slices)(at, call, chunk)


def _whole_all_reduce(at: ProgramContext, call: Call) -> Program:
    # Tensors in zones are copied to the slots, too: the result overwrites them while other ranks may still read.
    call.place, call.places = None, (None,) * at.world_size

    def read(chunk: int) -> None:
        if call.receiver in (-1, at.rank):
            inputs = [at.slot_view(call, rank, chunk, 0, call.flat.numel()) for rank in at.ranks]
            inputs[at.rank] = call.flat
            at.reduce(call, [call.out], inputs)

    yield from _chunk_by_chunk(at, call, 1, _stage, read)


def _chunked_all_reduce(at: ProgramContext, call: Call) -> Program:
    num_chunks = at.count_chunks(call)
    gets_result = call.receiver in (-1, at.rank)
    yield from at.fill_first(call, _stage_slices)
    for chunk in range(num_chunks):
        first, last = at.chunk_bounds(call, chunk)
        slices = plan_slices(last - first, at.world_size, call.flat.dtype.itemsize)
        begin, end = slices[at.rank]
        if begin < end:
            views = [at.shared_view(call, rank, chunk, begin, end) for rank in at.ranks]
            written = [h for r, h in enumerate(views) if r != at.rank and call.places[r] is not None]
            outputs = [views[at.rank], *written]
            if call.place is None:
                views[at.rank] = call.flat[first + begin : first + end]
                if gets_result:  # copy now, while the sum is in the cache
                    outputs.append(call.out[first + begin : first + end])
            at.reduce(call, outputs, views, first + begin)
        if chunk + 1 < num_chunks:
            _stage_slices(at, call, chunk + 1)
        yield Phase.REDUCED, at.counters.signal(Phase.REDUCED)  # this rank has reduced this chunk and staged the next
        if call.place is None and gets_result:
            for owner, (begin, end) in enumerate(slices):
                if begin < end and owner != at.rank:
                    call.out[first + begin : first + end].copy_(at.shared_view(call, owner, chunk, begin, end))
    at.num_chunks += num_chunks
    if any(place is not None for place in call.places):
        # A rank whose result is in its zone may change it only when the others have copied it.
        yield from at.sync_point(call)


def _reduce(at: ProgramContext, call: Call) -> Program:
    # Use the slots, even for tensors in zones: only the receiver's tensor may change.
    call.place, call.places = None, [None] * at.world_size
    yield from _all_reduce(at, call)


def _broadcast(at: ProgramContext, call: Call) -> Program:
    def read(chunk: int) -> None:
        if at.rank != call.source:
            begin, end = at.chunk_bounds(call, chunk)
            call.out[begin:end].copy_(at.shared_view(call, call.source, chunk, 0, end - begin))

    yield from _read_chunks(at, call, read)


def _all_gather(at: ProgramContext, call: Call) -> Program:
    numel = call.flat.numel()

    def read(chunk: int) -> None:
        if call.receiver in (-1, at.rank):
            begin, end = at.chunk_bounds(call, chunk)
            # Copy this rank's part first: its memory may be the place of another rank's part in the result.
            for rank in (at.rank, *(each for each in at.ranks if each != at.rank)):
                out = call.out[rank * numel + begin : rank * numel + end]
                given = call.flat[begin:end] if rank == at.rank else at.shared_view(call, rank, chunk, 0, end - begin)
                if given.data_ptr() != out.data_ptr():  # this rank's part is often at its place already
                    out.copy_(given)

    yield from _read_chunks(at, call, read)


def _scatter(at: ProgramContext, call: Call) -> Program:
    numel = call.out.numel()
    first, last = at.rank * numel, (at.rank + 1) * numel

    def read(chunk: int) -> None:
        start, stop = at.chunk_bounds(call, chunk)
        begin, end = max(start, first), min(stop, last)
        if begin < end:
            out = call.out[begin - first : end - first]
            out.copy_(at.shared_view(call, call.source, chunk, begin - start, end - start))

    yield from _read_chunks(at, call, read)


def _reduce_scatter(at: ProgramContext, call: Call) -> Program:
    numel = call.out.numel()
    if None not in call.places:
        begin, end = at.rank * numel, (at.rank + 1) * numel
        at.reduce(call, [call.out], [at.shared_view(call, rank, 0, begin, end) for rank in at.ranks], begin)
        yield from at.sync_point(call)
        return
    call.places = (None,) * at.world_size  # a chunk has a piece of every rank's part, so all tensors are copied
    length = _part_numel(at, call)

    def read(chunk: int) -> None:
        begin, end = chunk * length, min(numel, (chunk + 1) * length)
        first = at.rank * length
        inputs = [at.slot_view(call, rank, chunk, first, first + end - begin) for rank in at.ranks]
        inputs[at.rank] = call.flat[at.rank * numel + begin : at.rank * numel + end]
        at.reduce(call, [call.out[begin:end]], inputs, at.rank * numel + begin)

    yield from _chunk_by_chunk(at, call, -(-numel // length), _stage_parts, read)


def _part_numel(at: ProgramContext, call: Call) -> int:
    """Elements of each rank's part in a chunk that has a piece of every rank's part."""
    return CHUNK_BYTES // call.flat.dtype.itemsize // at.world_size


def _stage_parts(at: ProgramContext, call: Call, chunk: int, numels: Sequence[int] | None = None) -> None:
    """Stage a piece of every other rank's part. `numels` has the parts' lengths; None: all are equal."""
    length, start = _part_numel(at, call), 0
    for rank, numel in enumerate(numels or [call.out.numel()] * at.world_size):
        begin, end = chunk * length, min(numel, (chunk + 1) * length)
        if begin < end and rank != at.rank:
            into = at.slot_view(call, at.rank, chunk, rank * length, rank * length + end - begin)
            into.copy_(call.flat[start + begin : start + end])
        start += numel


def _all_to_all(at: ProgramContext, call: Call) -> Program:
    """Exchange parts. A rank's chunk has a piece of its part for every other rank."""
    if call.splits is None:
        sent = [[call.flat.numel() // at.world_size] * at.world_size] * at.world_size
    else:
        problem = explain_splits(call.splits)
        if problem is not None:
            raise MismatchError(problem)
        sent = call.splits[:, 0].tolist()
    call.place, call.places = None, [None] * at.world_size
    length = _part_numel(at, call)
    own = call.flat[sum(sent[at.rank][: at.rank]) :]

    def read(chunk: int) -> None:
        start = 0
        for rank in at.ranks:
            numel = sent[rank][at.rank]
            begin, end = chunk * length, min(numel, (chunk + 1) * length)
            if begin < end:
                first = at.rank * length
                mine = (
                    at.slot_view(call, rank, chunk, first, first + end - begin) if rank != at.rank else own[begin:end]
                )
                call.out[start + begin : start + end].copy_(mine)
            start += numel

    num_chunks = -(-max(max(row) for row in sent) // length)
    stage = functools.partial(_stage_parts, numels=sent[at.rank])
    yield from _chunk_by_chunk(at, call, num_chunks, stage, read)


def splits_row(splits: tuple[Sequence[int], Sequence[int]]) -> Tensor:
    """A rank's row of `explain_splits`' argument, from `Collective.splits`: [2, world_size], int64. Pure."""
    expected, sent = splits
    return torch.tensor([list(sent), list(expected)], dtype=torch.int64, device="cpu")


def explain_splits(splits: Tensor) -> str | None:
    """The message if a rank expects more or fewer elements than it is sent, or None. Pure, and equal on all ranks.

    Args:
        splits: [world_size, 2, world_size]: numbers of elements that each rank sends to, and expects from, each other
            rank.
    """
    sent, expected = splits[:, 0], splits[:, 1].t()
    wrong = (sent != expected).nonzero()
    if not len(wrong):
        return None
    source, target = wrong[0].tolist()
    return (
        f"the ranks disagree in an all_to_all: rank {source} sends {int(sent[source, target])} elements to rank "
        f"{target}, which expects {int(expected[source, target])}. Pass splits on the sending rank that equal "
        f"out_splits on the receiving one."
    )


# A call that ranks only compare does nothing; it is short enough to be eager.
_COMPARED: _Programs = (lambda at, call: None, None, None)
# Programs by collective.
PROGRAMS: Mapping[str, _Programs] = {
    "all_reduce": (_eager_all_reduce, _all_reduce, _stage_summands),
    "broadcast": (_eager_broadcast, _broadcast, _stage),
    "all_gather": (_eager_all_gather, _all_gather, _stage),
    "reduce_scatter": (_eager_reduce_scatter, _reduce_scatter, _stage_parts),
    "reduce": (_eager_reduce, _reduce, _stage_summands),
    "gather": (_eager_all_gather, _all_gather, _stage),
    "scatter": (_eager_scatter, _scatter, None),
    "all_to_all": (_eager_all_to_all, _all_to_all, None),
    **{name: _COMPARED for name in COLLECTIVES if name in ("barrier", REFUSED) or name.endswith(OVER_GLOO)},
}
