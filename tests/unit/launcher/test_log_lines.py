"""Stamps before the lines of a log file."""

from __future__ import annotations

import io
import re

from evenstep.launcher.spawn.log_lines import StampedLines

STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} rank 3 step 0 \| "


def test_every_line_has_one_stamp_in_whatever_pieces_it_comes() -> None:
    raw = io.BytesIO()
    stream = StampedLines(io.TextIOWrapper(raw, encoding="utf-8"), rank=3)
    for piece in ("one ", "and", " the rest\n", "two\nthree\n", "", "fo\u00fcr"):
        assert stream.write(piece) == len(piece)
    print(" and", 5, file=stream)
    stream.flush()
    lines = raw.getvalue().decode().splitlines()
    assert [re.sub(STAMP, "", line) for line in lines] == ["one and the rest", "two", "three", "foür and 5"]
    assert all(len(re.findall(STAMP, line)) == 1 for line in lines)
