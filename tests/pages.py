"""Pages of docs/, read for tests: their text, their programs and their commands, in order."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def text(*pages: str) -> str:
    """The text of pages, named by their path below docs/, one after the other."""
    return "\n".join((DOCS / page).read_text() for page in pages)


def blocks(language: str, *pages: str) -> list[str]:
    """What stands in fences of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text(*pages), re.MULTILINE | re.DOTALL)


def programs(*pages: str) -> dict[str, str]:
    """Programs by file name, which their first line says in a comment."""
    found: dict[str, str] = {}
    for block in blocks("python", *pages):
        name = re.match(r"# (\w+\.py)\n", block)
        if name is not None:
            assert found.setdefault(name[1], block) == block, f"two programs are called {name[1]}"
    return found


def commands(*pages: str) -> list[str]:
    """Lines of shell commands."""
    return [line for block in blocks("bash", *pages) for line in block.splitlines() if line.strip()]
