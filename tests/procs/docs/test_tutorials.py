"""Every tutorial, and every short how-to page, does what it says, with the output that it shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages import DOCS
from tests.tutorials import missing, plain, play

QUICK = {"tutorials/first-run.md"}
TUTORIALS = sorted(each.relative_to(DOCS).as_posix() for each in DOCS.glob("tutorials/*.md") if each.stem != "index")
HOW_TO = [
    *sorted(each.relative_to(DOCS).as_posix() for each in DOCS.glob("how-to/migrate/*.md") if each.stem != "index"),
    "how-to/accumulation.md",
    "how-to/compare.md",
    "how-to/export.md",
    "how-to/hang.md",
    "how-to/test.md",
    "how-to/logging.md",
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[] if page in QUICK else pytest.mark.extended) for page in [*TUTORIALS, *HOW_TO]]
)
def test_a_page_shows_what_happens(page: str, tmp_path: Path) -> None:
    num_shown = num_said = 0
    for each in play(page, tmp_path):
        num_said += bool(each.printed.strip())
        if each.shown is not None:
            num_shown += 1
            assert not (lost := missing(each.shown, each.printed)), f"{each.commands}{lost}\nprinted:\n{each.printed}"
    assert num_said, "a page that is played runs something"
    assert num_shown or page in HOW_TO, "a tutorial shows what comes out"


def test_lines_are_compared_without_their_numbers() -> None:
    printed = "epoch 0: loss 1.23\nepoch 1: loss 0.98\nranks: 2\n"
    assert plain("loss 1.2e-3, 50%") == plain("loss 0.4, 7%")
    assert missing("epoch 0: loss 9\n...\nranks: 4\n", printed) == []
    assert missing("epoch 0: loss 9\nepoch 1: cost 9\n", printed) == ["epoch 1: cost 9"]
    assert missing("ranks: 2\nepoch 0: loss 1\n", printed) == ["epoch 0: loss 1"]
