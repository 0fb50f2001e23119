"""The headers of calls, and the view of a tensor as bytes."""

from __future__ import annotations

import pytest
import torch

from evenstep.transport.core.header import (
    DTYPES,
    Fingerprint,
    explain_mismatch,
    pack_place,
    unpack_header,
)
from evenstep.transport.core.validation import flat_view


@pytest.mark.parametrize("dtype", DTYPES)
def test_headers_come_back_as_they_were(dtype):
    fingerprint = Fingerprint("all_reduce", "max", dtype, (3, 0, 5), -1)
    place, is_ready, packed = unpack_header(pack_place(4096) + fingerprint.pack() + b"beyond")
    assert (place, packed) == (4096, fingerprint.pack())
    assert Fingerprint.unpack(packed) == fingerprint
    assert not is_ready
    assert unpack_header(pack_place(None) + packed)[0] is None
    assert unpack_header(pack_place(None, is_ready=True) + packed)[:2] == (None, True)
    assert unpack_header(pack_place(0, is_ready=True) + packed)[:2] == (0, True)


def test_a_mismatch_names_both_sides():
    same = Fingerprint("broadcast", None, torch.int64, (2, 3), 1).pack()
    other = Fingerprint("all_reduce", "sum", torch.float32, (6,)).pack()
    assert explain_mismatch(1, "shared memory", [same, same], {}, range(2)) is None
    text = explain_mismatch(7, "shared memory", [same, other, same], {}, range(3))
    assert text is not None
    assert "number 7" in text
    assert "ranks 0, 2: broadcast from rank 1 of int64 [2, 3]" in text
    assert "rank 1: all_reduce(sum) of float32 [6]" in text


def test_a_mismatch_in_a_ninth_dimension_is_one():
    one, other = (Fingerprint("barrier", None, torch.uint8, (1,) * 8 + last).pack() for last in ((2, 3), (3, 2)))
    assert explain_mismatch(1, "shared memory", [one, one], {}, range(2)) is None
    text = explain_mismatch(1, "shared memory", [one, other], {}, range(2))
    assert text is not None
    assert "rank 1: barrier of uint8 [1, 1, 1, 1, 1, 1, 1, 1] and 2 more dimensions" in text


def test_one_element_can_be_looked_at_as_bytes_whatever_its_stride_is():
    for numel in (0, 1):
        memory = torch.arange(12.0)
        with_gaps = memory[5::3][:numel]
        assert with_gaps.is_contiguous()
        raw = flat_view(with_gaps).view(torch.uint8)
        assert raw.shape == (4 * numel,)
        raw.zero_()
        assert memory.eq(0).nonzero().flatten().tolist() == ([0, 5] if numel else [0])
