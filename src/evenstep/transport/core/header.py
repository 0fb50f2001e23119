"""The call header: 128 bytes with which ranks check that they make the same call.

0  u64   the offset of this rank's tensor in its zone, `ELSEWHERE` if it has to be copied; the highest bit is 1 if
         the first chunk is already staged
8  101 B the fingerprint: collective, op, dtype, number of dimensions, root, number of elements, eight dimensions, a
         checksum of further dimensions, number and dtype of the numbers beside it, and the divisor of a plain sum
120 u64  the call's number, from 0, which each rank compares with its own; written and read as a number
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from evenstep.console import printable
from evenstep.transport.base import Op

ELSEWHERE = (1 << 63) - 1

_FINGERPRINT = struct.Struct("<4BiQ9QIBd")
_PLACE = struct.Struct("<Q")
NUMBER_OFFSET = 120  # offset of the call's number in a call header
COMPARED_BYTES = _PLACE.size + _FINGERPRINT.size
assert COMPARED_BYTES <= NUMBER_OFFSET
_MAX_DIMS = 8

# The call of a rank that refuses its arguments, with the reason. Without this call the others would wait for the rank.
REFUSED = "refused"
REASON_BYTES = 1024

# The report, with the whole message, that a rank sends to other nodes if the ranks of its node disagree.
REPORT = "report"
REPORT_BYTES = 3072

# A call that Gloo carries for the backend "evenstep". Ranks compare it, too, because another rank may use shared
# memory.
OVER_GLOO = "over gloo"

# Call headers contain positions in these lists: append, never insert.
COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "barrier",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    REFUSED,
    *(
        f"{collective} {OVER_GLOO}"
        for collective in (
            "all_reduce",
            "broadcast",
            "all_gather",
            "reduce_scatter",
            "reduce",
            "gather",
            "scatter",
            "all_to_all",
        )
    ),
    REPORT,
)
OPS: tuple[Op, ...] = ("sum", "max", "min", "mean", "product", "band", "bor", "bxor")
DTYPES: tuple[torch.dtype, ...] = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex32,
    *([torch.bcomplex32] if hasattr(torch, "bcomplex32") else []),  # from torch 2.15 on
)


@dataclass(frozen=True)
class Fingerprint:
    """The properties of a call on which all ranks must agree.

    Attributes:
        collective: The collective's name.
        op: How values are combined; None if they aren't.
        dtype: The tensor's dtype.
        shape: The tensor's shape.
        root: The only rank whose input is used, or that gets the output; -1 if there is none.
        num_more_dims: Number of dimensions of an unpacked shape beyond the eighth.
        num_beside: Number of numbers that are added beside the tensor.
        dtype_beside: The dtype of these numbers.
        plain: The divisor of the sum if no rank's row is weighted; None if there are no rows.
    """

    collective: str
    op: Op | None
    dtype: torch.dtype
    shape: tuple[int, ...]
    root: int = -1
    num_more_dims: int = 0
    num_beside: int = 0
    dtype_beside: torch.dtype = torch.float64
    plain: float | None = None

    def pack(self) -> bytes:
        """The bytes that ranks compare."""
        dims = [*self.shape[:_MAX_DIMS], *[0] * (_MAX_DIMS - len(self.shape))]
        beyond = zlib.crc32(repr(self.shape[_MAX_DIMS:]).encode()) if len(self.shape) > _MAX_DIMS else 0
        op = 255 if self.op is None else OPS.index(self.op)
        return _FINGERPRINT.pack(
            COLLECTIVES.index(self.collective),
            op,
            DTYPES.index(self.dtype),
            len(self.shape),
            self.root,
            math.prod(self.shape),
            *dims,
            beyond,
            self.num_beside,
            DTYPES.index(self.dtype_beside),
            math.nan if self.plain is None else self.plain,
        )

    @classmethod
    def unpack(cls, data: bytes) -> Fingerprint:
        """The inverse of `pack`, except for dimensions beyond the eighth."""
        collective, op, dtype, num_dims, root, _, *dims, _, num_beside, beside, plain = _FINGERPRINT.unpack(data)
        shape = tuple(dims[: min(num_dims, _MAX_DIMS)])
        rest = num_dims - len(shape), num_beside, DTYPES[beside], None if math.isnan(plain) else plain
        return cls(COLLECTIVES[collective], None if op == 255 else OPS[op], DTYPES[dtype], shape, root, *rest)

    def __str__(self) -> str:
        if self.collective == REFUSED:
            return "no call, because its arguments were refused"
        if self.collective.endswith(OVER_GLOO):
            return f"{self.collective} of tensors that shared memory doesn't carry"
        combined = f"({self.op})" if self.op is not None else ""
        way = "to" if self.collective in ("reduce", "gather") else "from"
        root = f" {way} rank {self.root}" if self.root >= 0 else ""
        more = f" and {self.num_more_dims} more dimensions" if self.num_more_dims else ""
        beside = f", with {self.num_beside} {str(self.dtype_beside)[6:]} numbers beside it" if self.num_beside else ""
        divided = "" if self.plain is None else f", divided by the weights or by {self.plain:g}"
        return f"{self.collective}{combined}{root} of {str(self.dtype)[6:]} {list(self.shape)}{more}{beside}{divided}"


def pack_place(place: int | None, *, is_ready: bool = False) -> bytes:
    """The part of a call header with the tensor's offset, and whether its first chunk is staged."""
    return _PLACE.pack((ELSEWHERE if place is None else place) | is_ready << 63)


def unpack_header(data: bytes) -> tuple[int | None, bool, bytes]:
    """Split a call header: the tensor's offset, whether its first chunk is staged, and the packed fingerprint."""
    (packed,) = _PLACE.unpack_from(data)
    place = packed & ELSEWHERE
    return (
        (None if place == ELSEWHERE else place),
        bool(packed >> 63),
        data[_PLACE.size : _PLACE.size + _FINGERPRINT.size],
    )


def pack_text(text: str, num_bytes: int = REASON_BYTES) -> bytes:
    """Encode a text with a fixed length, so that ranks that all refuse make the same call."""
    return text.encode()[:num_bytes].ljust(num_bytes, b"\0")


def unpack_text(data: bytes) -> str:
    """The inverse of `pack_text`, except for texts that were cut. Safe to print, even from another rank."""
    return printable(data.rstrip(b"\0").decode(errors="replace"))


def text_bytes(packed: bytes) -> int:
    """Length of the text that comes with a rank's fingerprint; 0 if there is none. Pure."""
    return {REFUSED: REASON_BYTES, REPORT: REPORT_BYTES}.get(COLLECTIVES[packed[0]], 0)


def explain_mismatch(
    number: int,
    name: str,
    packed: Sequence[bytes],
    texts: Mapping[int, str],
    known_as: Sequence[int],
) -> str | None:
    """The message if ranks make different calls; None if all make the same call. Pure, and equal on all ranks.

    Args:
        number: The call's number, counted from 1.
        name: The transport's name.
        packed: Every rank's fingerprint, in order of rank.
        texts: The text that came with a rank's fingerprint (`text_bytes`), by rank, if it is known.
        known_as: The ranks' numbers in the message.
    """
    for rank, each in enumerate(packed):
        if COLLECTIVES[each[0]] == REPORT:
            return texts[rank]
    if all(each == packed[0] for each in packed):
        return None
    groups: dict[bytes, list[int]] = {}
    for rank, each in enumerate(packed):
        groups.setdefault(each, []).append(known_as[rank])
    calls = "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {Fingerprint.unpack(each)}"
        for each, ranks in groups.items()
    )
    if texts:
        calls += ". " + " ".join(f"Rank {known_as[rank]}: {reason}" for rank, reason in texts.items())
        return f"the ranks disagree in collective number {number} over {name}. {calls}"
    return (
        f"the ranks disagree in collective number {number} over {name}. {calls}. Every rank must make the same calls, "
        f"in the same order, with equal shapes and dtypes: look for a loop that is shorter on some ranks, and for a "
        f"branch that only some ranks take."
    )
