"""Links between the pages, and from them to files and tests of the checkout."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tests.unit.test_house import ROOMS

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md"))]
TESTS = [path.read_text() for path in sorted((ROOT / "tests").rglob("*.py"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_links_to_exists(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
    missing = [each for each in targets if "://" not in each and not (page.parent / each).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_tests_that_a_page_names_exist(page: Path) -> None:
    named = set(re.findall(r"`(test_\w+)`", page.read_text()))
    missing = {name for name in named if not any(f"def {name}(" in text for text in TESTS)}
    assert not missing


def test_names_in_the_architecture_exist() -> None:
    """A newcomer looks for them in the source."""
    page = (ROOT / "docs" / "contributing" / "architecture.md").read_text()
    words = {word for path in (ROOT / "src").rglob("*.py") for word in re.findall(r"\w+", path.read_text())}
    words |= {path.stem for path in (ROOT / "src").rglob("*")} | {"ORDER", "ROOMS", "py", "tests", "unit", "test_house"}
    named = re.findall(r"`([A-Za-z_][\w./]*)(?:\([^`]*\))?`", page)
    assert not {name for name in named if not set(re.findall(r"\w+", name)) <= words}


def test_the_table_of_rooms_has_their_order() -> None:
    page = (ROOT / "docs" / "contributing" / "architecture.md").read_text()
    table = page[page.index("| room |") : page.index("Three rules")]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = [name for cell in cells for name in re.findall(r"`(\w+)(?:/|\.py)`", cell)]
    assert sorted(named, key=ROOMS.index) == named
    assert {*named, "__main__"} == set(ROOMS)


def test_the_pictures_are_what_their_script_draws() -> None:
    folder = ROOT / "docs" / "figures"
    figures = runpy.run_path(str(folder / "draw.py"))["FIGURES"]
    assert {each.stem for each in folder.glob("*.svg")} == figures.keys()
    for name, draw in figures.items():
        assert (folder / f"{name}.svg").read_text() == draw(), f"run docs/figures/draw.py for {name}.svg"
