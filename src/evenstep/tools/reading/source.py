"""The text of a script: a file or a notebook, decoded, with lines and cells as a user counts them."""

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
    """The text of one python file or notebook.

    Attributes:
        path: The path as the user wrote it; that of an imported module begins with the script's folder.
        text: The code with `\\n` at the ends of lines. For a notebook, the code of all cells, one after the other.
        cells: For each code cell of a notebook, its first line in `text` and its number. Empty for other files.
        ignored: By line, the rules that a comment on that line switches off. An empty set stands for all rules.
    """

    path: Path
    text: str
    cells: tuple[tuple[int, int], ...] = ()
    ignored: dict[int, frozenset[str]] = field(default_factory=dict)

    def place(self, line: int) -> tuple[int, int | None]:
        """Convert a line of `text` to (line, cell) as a user counts them; the cell is None in a file."""
        for start, number in reversed(self.cells):
            if line >= start:
                return line - start + 1, number
        return line, None


def read_source(path: Path) -> Source:
    """Read a script or notebook.

    Raises:
        ConfigurationError: The errors of `read_script` and `encoding_of`, or the file is no notebook of format 4.
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
    """The lines of a cell, with each `%magic`, `!command` and `name?` replaced by `pass`."""
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
