"""docs/how-to/reproducible.md is true: its programs say the same on one rank, on two and on four."""

from __future__ import annotations

import contextlib
import io
import re
import runpy

import pytest

from evenstep import world as worlds
from tests import pages

PROGRAMS = pages.programs("how-to/reproducible.md")
SAYS = {
    "digits.py": r"last losses \[(\d\.\d+, ){3}\d\.\d+\], bits \[-?\d+(, -?\d+){3}\]",
    "resume.py": r"reproducible mode: .* because the CPU",
}


def run_program(path):
    before = worlds.initialised()
    if before is not None:
        before.close()
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        runpy.run_path(path, run_name="__main__")
    return said.getvalue()


def test_every_program_is_run():
    assert set(PROGRAMS) == set(SAYS)


@pytest.mark.extended
@pytest.mark.parametrize("name", SAYS)
def test_programs_say_the_same_on_any_number_of_ranks(ranks, tmp_path, name):
    path = tmp_path / name
    path.write_text(PROGRAMS[name])
    said = {ranks.run(run_program, nproc, str(path), timeout_s=120)[0] for nproc in (1, 2, 4)}
    assert len(said) == 1
    assert re.search(SAYS[name], said.pop())
