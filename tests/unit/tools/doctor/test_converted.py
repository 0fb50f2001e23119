"""Nothing is found in what `evenstep convert` writes, but what it has left."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("libcst")

from evenstep.tools.convert.convert import convert
from evenstep.tools.doctor.examination import read

# A mistake of the script itself.
LEFT = {"save_resume": ["EV207"]}
SINGLE = sorted((Path(__file__).parents[3] / "scripts" / "single").glob("*.py"))


@pytest.mark.parametrize("script", SINGLE, ids=lambda path: path.stem)
def test_nothing_is_found_in_a_converted_script(script: Path, tmp_path: Path):
    converted = convert(str(script))
    if converted.problems:
        pytest.skip("it can't be converted")
    path = tmp_path / script.name
    path.write_bytes(converted.content)
    received = read(path)
    assert [each.rule for each in received.findings] == LEFT.get(script.stem, []), received.findings
    assert received.looked.is_distributed
