"""Stamps before the lines of a log file."""

from __future__ import annotations

import io
import logging
import re
import warnings

import pytest

from evenstep.console import quieten
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


def test_other_ranks_of_a_shared_terminal_log_errors_only(capsys: pytest.CaptureFixture[str]) -> None:
    level, filters = logging.root.manager.disable, list(warnings.filters)
    handler = logging.StreamHandler()  # to stderr
    logger = logging.getLogger("a library")
    logger.addHandler(handler)
    try:
        restore = quieten()
        logger.warning("said by rank 0")
        warnings.warn("said by rank 0", stacklevel=1)
        logger.error("a disk is full")
        restore()
        assert capsys.readouterr().err == "a disk is full\n"
        assert (logging.root.manager.disable, list(warnings.filters)) == (level, filters)
        logger.warning("heard again")
        assert capsys.readouterr().err == "heard again\n"
    finally:
        logger.removeHandler(handler)
