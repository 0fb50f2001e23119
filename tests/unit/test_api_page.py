"""docs/reference/api.md: every public name is described there, and has an example, which runs."""

from __future__ import annotations

import re

import pytest

import evenstep
from tests import pages

PAGE = "reference/api.md"
EXAMPLES = pages.blocks("python", PAGE)


def test_every_public_name_is_described_and_has_an_example() -> None:
    described = set(re.findall(r"^\.\. auto\w+:: evenstep\.(\w+)$", pages.text(PAGE), re.MULTILINE)) - {"errors"}
    used = {name for example in EXAMPLES for name in re.findall(r"evenstep\.(\w+)", example)}
    assert described == set(evenstep.__all__)
    assert set(evenstep.__all__) - used == {"World"}, "World is what init returns"


@pytest.mark.extended
@pytest.mark.parametrize("example", EXAMPLES, ids=[each.partition("\n")[0].removeprefix("# ") for each in EXAMPLES])
def test_an_example_runs(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    exec(compile(example, PAGE, "exec"), {"__name__": "__main__"})
