"""Pages of docs/, played as a reader would: files are written, commands run, and what they print is compared.

    python -m tests.tutorials tutorials/first-run.md      # write what the commands print now into the page

A fence of python that begins with `# name.py` is a file. A fence of bash is run, line by line; lines that name a rank
of nodes are run at the same time, as on several machines. A fence of text behind it shows what came out: each of its
lines has to come in this order, whatever its numbers are; `...` stands for lines that are left out. Fences called `sh`
or `py` aren't run here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.pages import DOCS

_FENCE = re.compile(r"^```(python|bash|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"[-+]?\d+(?:[,.:]\d+)*(?:e[-+]?\d+)?%?|\b(?:inf|nan)\b")
_LIMIT_S = 240


@dataclass(frozen=True)
class Shown:
    """What a page shows of one fence of commands, and what they printed; where in the page it stands."""

    commands: str
    shown: str | None
    printed: str
    span: tuple[int, int]


def play(page: str, directory: Path) -> Iterator[Shown]:
    """Play a page in an empty directory.

    Raises:
        AssertionError: A command ended with another status than 0, without `# exit status N` behind it.
    """
    text = (DOCS / page).read_text()
    fences = list(_FENCE.finditer(text))
    for number, fence in enumerate(fences):
        kind, content = fence[1], fence[2]
        if kind == "python":
            name = re.match(r"# (\S+\.py)\n", content)
            if name is not None:
                (directory / name[1]).write_text(content)
        elif kind == "bash":
            following = fences[number + 1] if number + 1 < len(fences) else None
            shown = following if following is not None and following[1] == "text" else None
            span = shown.span(2) if shown is not None else (0, 0)
            yield Shown(content, None if shown is None else shown[2], _run(content, directory), span)


def _run(commands: str, directory: Path) -> str:
    lines = commands.splitlines()
    if any("--node-rank" in line for line in lines):
        running = [_start(line, directory) for line in lines]
        return "".join(_finish(process, line) for process, line in zip(running, lines, strict=True))
    return "".join(_finish(_start(line, directory), line) for line in lines)


def _start(line: str, directory: Path) -> subprocess.Popen[str]:
    command = line.partition(" # ")[0].replace("HOST", "127.0.0.1")
    binaries = str(Path(sys.executable).parent)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COLUMNS"))}
    env |= {"PATH": f"{binaries}{os.pathsep}{env['PATH']}", "COLUMNS": "100", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        ["bash", "-c", command], cwd=directory, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def _finish(process: subprocess.Popen[str], line: str) -> str:
    out, _ = process.communicate(timeout=_LIMIT_S)
    expected = re.search(r"# exit status (\d+)", line)
    assert process.returncode == int(expected[1] if expected else 0), f"{line}\n{out}"
    return out


def plain(line: str) -> str:
    """A line without its numbers, and with one space where there are several."""
    return re.sub(r"[ ─━┄-]+", " ", _NUMBER.sub("#", line)).strip()


def missing(shown: str, printed: str) -> list[str]:
    """The lines that a page shows and that weren't printed, in order."""
    pending = iter([plain(line) for line in printed.splitlines()])
    return [line for line in shown.splitlines() if line.strip() not in ("", "...") and plain(line) not in pending]


def record(page: str) -> None:
    """Write what the commands of a page print into it."""
    path = DOCS / page
    text = path.read_text()
    with tempfile.TemporaryDirectory() as directory:
        played = list(play(page, Path(directory)))
    for each in reversed(played):
        if each.shown is not None:
            begin, end = each.span
            lines = [line.rstrip() for line in each.printed.splitlines()]
            text = text[:begin] + "\n".join(lines).strip("\n") + "\n" + text[end:]
    path.write_text(text)


if __name__ == "__main__":
    for given in sys.argv[1:]:
        record(given)
