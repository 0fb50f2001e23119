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


def test_a_mismatch_in_a_ninth_dimension_is_one():
    one, other = (Fingerprint("barrier", None, torch.uint8, (1,) * 8 + last).pack() for last in ((2, 3), (3, 2)))
    assert explain_mismatch(1, "shared memory", [one, one], {}, range(2)) is None
    text = explain_mismatch(1, "shared memory", [one, other], {}, range(2))
    assert text is not None
    assert "rank 1: barrier of uint8 [1, 1, 1, 1, 1, 1, 1, 1] and 2 more dimensions" in text
