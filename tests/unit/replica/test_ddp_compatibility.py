"""docs/reference/ddp-compatibility.md: complete, and no line without a test that exists."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

import evenstep
from tests import pages

ROOT = Path(__file__).parents[3]
PAGE = pages.text("reference/ddp-compatibility.md")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith(("| ---", "| argument", "| name", "| | "))
]
TESTS = {
    name
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
}


def test_every_argument_of_torchs_has_a_line_and_is_taken():
    named = {name for row in ROWS for name in re.findall(r"`(\w+)`", row[0])}
    torchs = set(inspect.signature(TorchDistributedDataParallel.__init__).parameters) - {"self"}
    assert torchs <= named
    assert torchs <= set(inspect.signature(evenstep.DistributedDataParallel.__init__).parameters)


def test_every_public_method_of_torchs_has_a_line():
    named = {name for row in ROWS for name in re.findall(r"`(\w+)`", row[0])}
    public = {name for name in vars(TorchDistributedDataParallel) if not name.startswith("_")}
    assert public <= named
    # What isn't ours runs torch's code, which looks for parts of torch's class that are never set up.
    inherited = public - vars(evenstep.DistributedDataParallel).keys() - vars(nn.Module).keys()
    manual = {"require_manual_backward_finalization", "should_finalize_after_backward", "finalize_backward"}  # missing
    assert inherited <= {"gather", "scatter", "to_kwargs", *manual}, "a newer torch has a method that ours doesn't know"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].replace("`", "")[:40])
def test_a_line_has_a_test(row):
    assert row[1] in ("same", "better", "accepted", "refused", "missing")
    tests = re.findall(r"`(test_\w+)`", row[3])
    assert (row[1] == "missing") == (not tests)
    assert set(tests) <= TESTS
