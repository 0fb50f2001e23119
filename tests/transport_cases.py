"""The cases that a transport passes: what every implementation of `transport.core.transport.Transport` does.

    def on_a_rank():
        return check_transport(lambda: MyTransport(...))     # called by every rank

Every rank draws the inputs of all ranks from one seed. So each rank can compute the expected result itself, in plain
double precision or exact integers.
"""

from __future__ import annotations

import itertools
import math
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from evenstep.transport.base import Collective, Op, Row, Work
from evenstep.transport.core.codec import to_bytes
from evenstep.transport.core.object_collectives import exchange
from evenstep.transport.core.transport import Transport

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
COMPLEX = (torch.complex64, torch.complex128)
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
DTYPES: tuple[torch.dtype, ...] = (*FLOATS, *COMPLEX, *SIGNED, *UNSIGNED, torch.bool)
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (7,), (3, 5), (2, 1, 4, 3), (1000,), (16_385,), (300_001,))

_MANY = 10_000

_ARITHMETIC: tuple[Op, ...] = ("sum", "product", "mean")
_ORDER: tuple[Op, ...] = ("max", "min")
_BITS: tuple[Op, ...] = ("band", "bor", "bxor")


@dataclass(frozen=True)
class Coverage:
    """The cases to check.

    Attributes:
        dtypes: The dtypes of the tensors.
        shapes: The shapes of the tensors.
        shapes_of_all_ops: The shapes with which every op is checked; with other shapes the ops take turns.
        carries: Whether a transport claims to combine values of a dtype with an op; other cases are left out.
        bits_are_equal: The result has the same bits on every rank, also where rounding is involved.
        seed: The seed of the values.
    """

    dtypes: Sequence[torch.dtype] = DTYPES
    shapes: Sequence[tuple[int, ...]] = SHAPES
    shapes_of_all_ops: Sequence[tuple[int, ...]] = ((3, 5),)
    carries: Callable[[Op, torch.dtype], bool] = lambda op, dtype: True
    bits_are_equal: bool = True
    seed: int = 0


def ops_of(dtype: torch.dtype) -> tuple[Op, ...]:
    """The ops that are defined for a dtype. Pure."""
    if dtype.is_complex:
        return _ARITHMETIC
    if dtype.is_floating_point:
        return _ARITHMETIC + _ORDER
    if dtype is torch.bool or dtype in UNSIGNED[1:]:
        return ("sum", "product", *_ORDER, *_BITS)
    return _ARITHMETIC + _ORDER + _BITS


def check_transport(factory: Callable[[], Transport], coverage: Coverage | None = None) -> int:
    """Raise AssertionError if a transport doesn't behave as `Transport` specifies.

    Collective: every rank calls this, with equal arguments.

    Args:
        factory: Makes this rank's end of a new transport, which is closed at the end.
        coverage: The cases to check; None: all.

    Returns:
        The number of collectives that were checked.
    """
    coverage = coverage or Coverage()
    transport = factory()
    try:
        checker = _Checker(transport, coverage)
        for index, dtype in enumerate(coverage.dtypes):
            ops = [op for op in ops_of(dtype) if coverage.carries(op, dtype)]
            for shape in coverage.shapes:
                # The number of elements and the op are independent, so not all pairs are checked. The dtype is
                # irrelevant to collectives that only move bytes.
                turn = checker.num_turns % max(1, len(ops))
                some = ops if shape in coverage.shapes_of_all_ops else (ops[turn:] + ops[:turn])[:2]
                is_small = math.prod(shape) < _MANY
                checker.check_shape(dtype, shape, some if is_small else some[:1], moves=is_small or index % 4 == 0)
        checker.check_barrier()
        checker.check_allocate()
        checker.check_many_in_flight()
        checker.check_split()
    finally:
        transport.close()
        transport.close()  # a second call does nothing
    return checker.num_checked


def reference(values: Sequence[Tensor], op: Op) -> Tensor:
    """The expected result of combining: float64, complex128 or the integer dtype itself. Slow and simple."""
    dtype = values[0].dtype
    if dtype is torch.bool:
        name: Op = {"sum": "bor", "max": "bor", "product": "band", "min": "band"}.get(op, op)  # type: ignore[assignment]
        return _fold([value.to(torch.uint8) for value in values], name).to(torch.bool)
    if dtype.is_complex:
        return _fold([value.to(torch.complex128) for value in values], op)
    if dtype.is_floating_point:
        return _fold([value.to(torch.float64) for value in values], op)
    if dtype is torch.uint64 and op in _ORDER:  # too large for int64's order
        pick = max if op == "max" else min
        flat = [pick(column) for column in zip(*(value.reshape(-1).tolist() for value in values), strict=True)]
        return torch.tensor(flat, dtype=dtype, device="cpu").view(values[0].shape)
    whole = [value.to(torch.int64) for value in values]
    if op == "mean":  # of the overflowed sum, rounded towards zero
        total = _fold(whole, "sum").to(dtype).to(torch.int64)
        return (total.abs() // len(values) * total.sign()).to(dtype)
    return _fold(whole, op).to(dtype)


def _fold(values: Sequence[Tensor], op: Op) -> Tensor:
    total = values[0].clone()
    for value in values[1:]:
        if op in ("sum", "mean"):
            total = total + value
        elif op == "product":
            total = total * value
        elif op == "max":
            total = torch.maximum(total, value)
        elif op == "min":
            total = torch.minimum(total, value)
        elif op == "band":
            total = total & value
        elif op == "bor":
            total = total | value
        else:
            total = total ^ value
    return total / len(values) if op == "mean" else total


class _Checker:
    def __init__(self, transport: Transport, coverage: Coverage) -> None:
        self._transport = transport
        self._coverage = coverage
        self._cpu = torch.device("cpu")
        self._generator = torch.Generator().manual_seed(coverage.seed)
        self._seen: list[tuple[str, int]] = []
        self.num_checked = 0
        self.num_turns = 0

    def check_shape(self, dtype: torch.dtype, shape: tuple[int, ...], ops: Sequence[Op], *, moves: bool) -> None:
        """Every collective, with values that are drawn once."""
        numel = math.prod(shape)
        values = self._draw(dtype, shape)
        share = numel // self._transport.world_size if numel >= _MANY else numel
        wide = self._draw(dtype, (self._transport.world_size * share,))
        if moves:
            self.check_moves(values)
            self.check_parts(wide, share)
            self.check_uneven(wide)
            for op in ops[:1]:
                self.check_reduce(values, op)
        for op in ops:
            self.check_all_reduce(values, op)
            self.check_reduce_scatter(wide, op)
            self.num_turns += 1
        if (dtype.is_floating_point or dtype.is_complex) and "sum" in ops:
            self.check_sum_of_gradients(values, wide)
        self._compare_seen()

    def check_moves(self, values: Sequence[Tensor]) -> None:
        t, answers = self._transport, f"of {values[0].dtype} {list(values[0].shape)}"
        src = self.num_checked % t.world_size
        got = values[t.rank].clone()
        t.broadcast(got, src).wait()
        self._same(got, values[src], f"broadcast {answers} from {src}")
        everybodys = torch.cat([value.reshape(-1) for value in values])
        out = torch.zeros_like(everybodys)
        t.all_gather(out, values[t.rank].reshape(-1)).wait()
        self._same(out, everybodys, f"all_gather {answers}")
        dst = self.num_checked % t.world_size
        out = torch.zeros_like(everybodys)
        mine = self._mine(values)
        t.gather(out if t.rank == dst else None, mine.view(-1), dst).wait()
        self._same(out, everybodys if t.rank == dst else torch.zeros_like(out), f"gather {answers} to {dst}")

    def check_parts(self, values: Sequence[Tensor], share: int) -> None:
        """Collectives that cut a rank's tensor into one part per rank."""
        t, answers = self._transport, f"of {values[0].dtype} {list(values[0].shape)}"
        begin, end = t.rank * share, (t.rank + 1) * share
        src = self.num_checked % t.world_size
        out = torch.zeros(share, dtype=values[0].dtype, device="cpu")
        t.scatter(out, self._mine(values) if t.rank == src else None, src).wait()
        self._same(out, values[src][begin:end], f"scatter {answers} from {src}")
        out = torch.zeros_like(values[0])
        t.all_to_all(out, self._mine(values)).wait()
        self._same(out, torch.cat([value[begin:end] for value in values]), f"all_to_all {answers}")

    def check_uneven(self, values: Sequence[Tensor]) -> None:
        """Each rank sends a different amount to each rank."""
        t, answers = self._transport, f"of {values[0].dtype} {list(values[0].shape)}"
        shared = random.Random(self._coverage.seed + self.num_checked)
        splits = [_cut(values[0].numel(), t.world_size, shared) for _ in values]
        received = [
            value[sum(each[: t.rank]) : sum(each[: t.rank + 1])] for value, each in zip(values, splits, strict=True)
        ]
        expected = torch.cat(received)
        out = torch.zeros_like(expected)
        t.all_to_all(out, values[t.rank].clone(), [each.numel() for each in received], splits[t.rank]).wait()
        self._same(out, expected, f"uneven all_to_all {answers} with {splits}")
        # In place, each rank receives as much from a rank as it sends to it.
        most = values[0].numel() // t.world_size
        sent = [[0] * t.world_size for _ in values]
        for one, two in itertools.combinations_with_replacement(range(t.world_size), 2):
            sent[one][two] = sent[two][one] = shared.randint(0, most)
        mine = sent[t.rank]
        given = [
            torch.split(value, [*each, value.numel() - sum(each)]) for value, each in zip(values, sent, strict=True)
        ]
        out = values[t.rank][: sum(mine)].clone()
        t.all_to_all(out, out, mine, mine).wait()
        self._same(out, torch.cat([each[t.rank] for each in given]), f"all_to_all {answers} in place with {sent}")

    def check_barrier(self) -> None:
        work = self._transport.barrier()
        work.wait()
        assert work.is_completed(), "a barrier is not completed after wait"

    def check_all_reduce(self, values: Sequence[Tensor], op: Op) -> None:
        t = self._transport
        expected = reference(values, op)
        for is_allocated in (False, True):
            mine = values[t.rank].clone()
            if is_allocated:
                mine = t.allocate(mine.numel(), dtype=mine.dtype, device=self._cpu).view(mine.shape).copy_(mine)
            t.all_reduce(mine, op).wait()
            answers = f"{'allocated ' if is_allocated else ''}{mine.dtype} {list(mine.shape)}"
            self._close(mine, expected, f"all_reduce({op}) of {answers}")
            self._seen.append((f"all_reduce({op}) of {answers}", zlib.crc32(to_bytes(_bits(mine)))))

    def check_reduce(self, values: Sequence[Tensor], op: Op) -> None:
        t = self._transport
        dst = self.num_checked % t.world_size
        mine = self._mine(values)
        t.reduce(mine, dst, op).wait()
        if t.rank == dst:
            self._close(mine, reference(values, op), f"reduce({op}) of {mine.dtype} {list(mine.shape)} to {dst}")
        else:
            self.num_checked += 1

    def check_reduce_scatter(self, values: Sequence[Tensor], op: Op) -> None:
        t = self._transport
        share = values[0].numel() // t.world_size
        expected = reference(values, op)[t.rank * share : (t.rank + 1) * share]
        out = torch.zeros(share, dtype=values[0].dtype, device="cpu")
        t.reduce_scatter(out, self._mine(values), op).wait()
        self._close(out, expected, f"reduce_scatter({op}) of {out.dtype} {share} per rank")

    def check_sum_of_gradients(self, values: Sequence[Tensor], wide: Sequence[Tensor]) -> None:
        """Sums with a header, and with rows: each kind of window, and ranks without samples."""
        t = self._transport
        shared = random.Random(self._coverage.seed + self.num_checked)
        weights = [shared.choice([0.0, shared.uniform(0.1, 300.0)]) for _ in values]
        plain = shared.choice([t.world_size, 2 * t.world_size + 1])
        size = shared.choice([1, 7, 3000])
        for rows, divisor in (
            (None, 1.0),
            ([Row(weight, 1.0, 0.0) if weight else Row() for weight in weights], math.fsum(weights) or plain),
            ([Row(0.0, 1.0, 0.0) for _ in weights], math.inf),
            ([Row(0.0, 0.0, float(weight > 0)) for weight in weights], plain),
        ):
            row = None if rows is None else rows[t.rank]
            answers = f"of {values[0].dtype} {list(values[0].shape)} with rows {rows}, plain {plain}"
            numbers = [
                torch.tensor([shared.random() for _ in range(size)], dtype=torch.float64, device="cpu") for _ in values
            ]
            mine, beside = values[t.rank].clone(), numbers[t.rank].clone()
            t.run(Collective("all_reduce", mine, mine, "sum", beside=beside, row=row, plain=plain)).wait()
            self._close(mine, reference(values, "sum") / (divisor if t.divides else 1.0), f"all_reduce {answers}")
            self._close(beside, reference(numbers, "sum"), f"{size} numbers beside it")
            share = wide[0].numel() // t.world_size
            out = torch.zeros(share, dtype=wide[0].dtype, device="cpu")
            t.run(Collective("reduce_scatter", self._mine(wide), out, "sum", row=row, plain=plain)).wait()
            expected = reference(wide, "sum")[t.rank * share : (t.rank + 1) * share]
            self._close(out, expected / (divisor if t.divides else 1.0), f"reduce_scatter {answers}")

    def check_allocate(self) -> None:
        for numel in (0, 1, 100_000, 1_000_000):
            memory = self._transport.allocate(numel, dtype=torch.float32, device=self._cpu)
            assert memory.shape == (numel,), f"allocate({numel}) has shape {memory.shape}"
            assert not memory.any(), f"allocate({numel}) is not zeroed"
            memory.fill_(1.0)

    def check_many_in_flight(self) -> None:
        """Works are launched in one order and awaited in any, different on each rank."""
        t = self._transport
        shared, own = random.Random(self._coverage.seed), random.Random(t.rank)
        for _ in range(5):
            sizes = [shared.choice([0, 1, 100, 20_000, 200_000]) for _ in range(40)]
            values = [self._draw(torch.int64, (size,)) for size in sizes]
            tensors = [t.allocate(size, dtype=torch.int64, device=self._cpu) for size in sizes]
            works: list[Work] = []
            for tensor, each in zip(tensors, values, strict=True):
                tensor.copy_(each[t.rank])
                works.append(t.all_reduce(tensor))
            order = list(range(len(works)))
            own.shuffle(order)
            for index in order:
                works[index].wait()
                assert works[index].is_completed(), "is_completed is False after wait"
                self._same(tensors[index], reference(values[index], "sum"), f"work {index} of {len(works)}")

    def check_split(self) -> None:
        """Calls of two transports don't mix, whatever their order."""
        t = self._transport
        other = t.split()
        try:
            ours, theirs = torch.ones(70_000, device="cpu"), torch.ones(3, device="cpu")
            works = [t.all_reduce(ours), other.all_reduce(theirs)]
            for work in works if t.rank % 2 else reversed(works):
                work.wait()
            self._same(ours, torch.full_like(ours, t.world_size), "a collective beside one of a split")
            self._same(theirs, torch.full_like(theirs, t.world_size), "a collective of a split")
        finally:
            other.close()

    # ------------------------------------------------------------------

    def _draw(self, dtype: torch.dtype, shape: tuple[int, ...]) -> list[Tensor]:
        """Every rank's tensor, the same list on every rank."""
        values = []
        for _ in range(self._transport.world_size):
            if dtype.is_floating_point or dtype.is_complex:
                kind = torch.complex64 if dtype.is_complex else torch.float32
                value = torch.randn(shape, dtype=kind, generator=self._generator, device="cpu")
            else:
                value = torch.randint(-(2**40), 2**40, shape, generator=self._generator, device="cpu")
                value = value > 0 if dtype is torch.bool else value
            values.append(value.to(dtype))
        return values

    def _same(self, got: Tensor, expected: Tensor, what: str) -> None:
        self.num_checked += 1
        assert got.dtype is expected.dtype, f"{what} on rank {self._transport.rank} became {got.dtype}"
        assert torch.equal(_bits(got), _bits(expected)), (
            f"{what} on rank {self._transport.rank}: {got} instead of {expected}"
        )

    def _close(self, got: Tensor, expected: Tensor, what: str) -> None:
        if not (got.dtype.is_floating_point or got.dtype.is_complex):
            self._same(got, expected, what)
            return
        self.num_checked += 1
        # At worst rounded once per combination in the dtype itself, or once at the end.
        tolerance = torch.finfo(got.dtype).eps * 2 * self._transport.world_size
        got = got.to(expected.dtype)
        # Not `torch.testing.assert_close`, which imports DTensor and so costs seconds in every rank process.
        assert got.shape == expected.shape, f"{what} on rank {self._transport.rank} has shape {list(got.shape)}"
        assert torch.allclose(got, expected, rtol=tolerance, atol=tolerance * 4), (
            f"{what} on rank {self._transport.rank} is off by {(got - expected).abs().max()}: {got}, not {expected}"
        )

    def _mine(self, values: Sequence[Tensor]) -> Tensor:
        """A copy of this rank's tensor. In every other call, every other rank's copy is in memory from `allocate`."""
        t, value = self._transport, values[self._transport.rank]
        if (self.num_checked + t.rank) % 3 == 0 or self.num_checked % 3 == 1:
            return t.allocate(value.numel(), dtype=value.dtype, device=self._cpu).view(value.shape).copy_(value)
        return value.clone()

    def _compare_seen(self) -> None:
        """Results of all_reduce have the same bits on every rank."""
        seen, self._seen = self._seen, []
        if not self._coverage.bits_are_equal:
            return
        everybodys = exchange(self._transport, [crc for _, crc in seen])
        for (what, _), crcs in zip(seen, zip(*everybodys, strict=True), strict=True):
            assert len(set(crcs)) == 1, f"{what}: the ranks' results differ in their bits"


def _cut(numel: int, num_parts: int, shared: random.Random) -> list[int]:
    """Random lengths of parts, some 0, that add up to `numel`. Pure except for the draws."""
    cuts = sorted(shared.choice((0, numel, shared.randint(0, numel))) for _ in range(num_parts - 1))
    return [end - begin for begin, end in zip([0, *cuts], [*cuts, numel], strict=True)]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
