"""The text of a script: a file or a notebook, in its encoding, with the places that a person would name."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from evenstep.errors import ConfigurationError
from evenstep.ground.host.named_files import encoding_of, read_script

_IGNORE = re.compile(r"#\s*evenstep:\s*ignore(?:\[([^\]]*)\])?")


@dataclass(frozen=True)
class Source:
    """One file of python.

    Attributes:
        path: As the user named it, or relative to it.
        text: With `\\n` at the ends of lines; of a notebook the code of all cells, one after the other.
        cells: The first line in `text` of each code cell of a notebook, with the cell's number; else empty.
        ignored: By line, the rules that a comment of that line switches off; an empty set is all of them.
    """

    path: Path
    text: str
    cells: tuple[tuple[int, int], ...] = ()
    ignored: dict[int, frozenset[str]] = field(default_factory=dict)

    def place(self, line: int) -> tuple[int, int | None]:
        """(line, cell) as a person counts them, of a line of `text`."""
        for start, number in reversed(self.cells):
            if line >= start:
                return line - start + 1, number
        return line, None


def read_source(path: Path) -> Source:
    """Read a script or notebook.

    Raises:
        ConfigurationError: As `read_script` and `encoding_of`; or it is no notebook of format 4.
    """
    data = read_script(path)
    return _notebook(path, data) if path.suffix == ".ipynb" else _source(path, data.decode(encoding_of(data, path)))


def _source(path: Path, text: str, cells: tuple[tuple[int, int], ...] = ()) -> Source:
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    ignored: dict[int, frozenset[str]] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if "evenstep" in line and (match := _IGNORE.search(line)):
            ignored[number] = frozenset(re.split(r"[,\s]+", match[1].strip())) if match[1] else frozenset()
    return Source(path, text, cells, ignored)


def _notebook(path: Path, data: bytes) -> Source:
    try:
        cells = json.loads(data)["cells"]
        code = [(number, cell["source"]) for number, cell in enumerate(cells, 1) if cell["cell_type"] == "code"]
        texts = [(number, source if isinstance(source, str) else "".join(source)) for number, source in code]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{path} is no notebook of format 4: {error!r}.") from error
    lines: list[str] = []
    starts: list[tuple[int, int]] = []
    for number, text in texts:
        starts.append((len(lines) + 1, number))
        lines += _python_of(text)
    return _source(path, "\n".join(lines) + "\n", tuple(starts))


def _python_of(cell: str) -> list[str]:
    """The lines of a cell with `%magic`, `!command` and `name?` left out, each replaced by a line that does nothing."""
    lines = cell.splitlines()
    if lines and lines[0].startswith("%%") and not lines[0].startswith(("%%time", "%%capture")):
        return ["pass" for _ in lines]  # a cell in another language
    plain = []
    for line in lines:
        bare = line.lstrip()
        if bare.startswith(("%", "!")) or re.fullmatch(r"\?{1,2}[\w.]+|[\w.]+\?{1,2}", bare.rstrip()):
            line = line[: len(line) - len(bare)] + "pass"
        plain.append(line)
    return plain
