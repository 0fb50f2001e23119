"""Rules and findings. Pure.

A rule is a module such as `rules/EV101.py`. Its docstring is its page: a first line `name (severity).`, a paragraph on
what the script does, one on what that costs, further text, and two scripts, `Wrong:` and `Right:`. A rule has a
function `read(script)`, which finds the mistake in the source, or `seen(run)`, which finds it in a run, or both. Then
the run confirms what was read. `COMPARED` names the causes of `verify` that show the mistake if neither function does.
"""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evenstep.tools.reading.tree import Call, File

# By group, the digit after "EV".
GROUPS = {"data": "1", "output": "2", "devices": "3", "collectives": "4", "step": "5", "starting": "6"}
_PAGE = re.compile(r"(.+) \((error|warning|note)\)\.\n\n(.+?)\n\n(.+?)\n\n", re.DOTALL)
_EXAMPLES = re.compile(r"(?:Wrong|Right):\n\n```python\n(.*?)```", re.DOTALL)


class Severity(Enum):
    """How bad a mistake is. Values are those of SARIF's `level`."""

    ERROR = "error"  # a wrong result, a hang or a crash
    WARNING = "warning"  # time, memory or order is lost
    NOTE = "note"  # something to know; does not change the exit status


@dataclass(frozen=True)
class Edit:
    """A change of a file that mends a finding: `text` replaces the lines `first` to `last`, counted from 1.

    If `last` is `first - 1`, `text` is inserted before line `first`.
    """

    first: int
    last: int
    text: str


@dataclass(frozen=True)
class Finding:
    """One mistake at one place of a script.

    Attributes:
        path: The file, as the user named it or relative to the current directory.
        line: The line, counted from 1; in a notebook, within the cell.
        column: The column, counted from 1.
        evidence: What was read or seen, with values: "DataLoader(train_set, shuffle=True) has no sampler".
        cost: What the mistake costs in this script; "" if the rule's `why` says all.
        mend: A few lines of code for this script; "" if the rule's `mend` says all.
        confirmed: Whether a run has shown the mistake; False if it was only read.
        cell: The notebook's cell, counted from 1; None in a script.
        edits: The changes that `--fix` makes; () if the mend isn't certain.
        rule: The rule's id, set by the caller of `read` or `seen`.
    """

    path: str
    line: int
    column: int
    evidence: str
    cost: str = ""
    mend: str = ""
    confirmed: bool = False
    cell: int | None = None
    edits: tuple[Edit, ...] = ()
    rule: str = ""

    @property
    def place(self) -> str:
        """The place as text: `train.py:12`, or `train.ipynb, cell 3:12`."""
        return f"{self.path}:{self.line}" if self.cell is None else f"{self.path}, cell {self.cell}:{self.line}"


@dataclass(frozen=True)
class Refuted:
    """A run has shown that the script doesn't make a rule's mistake: findings of reading are dropped."""

    rule: str = ""


Found = Iterator[Finding]
Seen = Iterator[Finding | Refuted]


@dataclass(frozen=True)
class Rule:
    """One mistake that `doctor` knows.

    Attributes:
        id: "EV" and three digits, of which the first is the group's. Never reused for another mistake.
        name: The mistake in a few words, for tables.
        severity: How bad the mistake is.
        what: What the script does.
        why: What the mistake costs.
        text: The page without its first line, in Markdown.
        wrong, right: The two scripts of the page.
        read, seen: The functions that find the mistake in a script or in a run; None: it can't be found that way.
        compared: The kinds of `verify`'s causes that show the mistake.
    """

    id: str
    name: str
    severity: Severity
    what: str
    why: str
    text: str
    wrong: str
    right: str
    read: Callable[[Any], Found] | None
    seen: Callable[[Any], Seen] | None
    compared: tuple[str, ...] = ()

    @classmethod
    def of(cls, module: ModuleType) -> Rule:
        """Make the rule that a module defines.

        Raises:
            ValueError: The module's docstring isn't a page, or it has neither `read` nor `seen`.
        """
        key, text = module.__name__.rpartition(".")[2], (module.__doc__ or "").strip() + "\n"
        page, examples = _PAGE.match(text), _EXAMPLES.findall(text)
        read, seen = (getattr(module, name, None) for name in ("read", "seen"))
        if page is None or len(examples) != 2 or (read or seen) is None:
            raise ValueError(f"{key} lacks a part of its page, or `read` and `seen`: see rule.py")
        name, severity, what, why = page.groups()
        body = text.partition("\n\n")[2]
        what, why = " ".join(what.split()), " ".join(why.split())
        compared = getattr(module, "COMPARED", ())
        return cls(key, name, Severity(severity), what, why, body, examples[0], examples[1], read, seen, compared)

    @property
    def group(self) -> str:
        """The group of the rule, a key of `GROUPS`."""
        return next(name for name, digit in GROUPS.items() if digit == self.id[2])

    @property
    def found_by(self) -> str:
        """How the rule finds mistakes: by reading, by running, or both."""
        if self.seen is None:
            return "reading"
        return "running" if self.read is None else "reading, confirmed by running"

    @property
    def mend(self) -> str:
        """The lines of the right script that the wrong one lacks."""
        wrong, right = self.wrong.splitlines(), self.right.splitlines()
        changes = difflib.SequenceMatcher(None, wrong, right, autojunk=False).get_opcodes()
        lines = [line for kind, _, _, first, last in changes if kind != "equal" for line in right[first:last]]
        return textwrap.dedent("\n".join(lines))

    @property
    def explain(self) -> str:
        """The command that prints the rule's page."""
        return f"evenstep doctor --explain {self.id}"

    @property
    def section(self) -> str:
        """The rule's section of the page on its group, in Markdown."""
        return f"## {self.id}\n\n**{self.name} ({self.severity.value}).** {self.text}"


def found(
    at: Call | tuple[File, int],
    evidence: str,
    *,
    mend: str = "",
    edits: tuple[Edit, ...] = (),
) -> Finding:
    """Make a finding of reading, at a call or at a line of a file."""
    file, line, column = (*at, 1) if isinstance(at, tuple) else (at.frame.file, at.line, at.column)
    shown, cell = file.source.place(line)
    return Finding(str(file.source.path), shown, column, evidence, mend=mend, cell=cell, edits=edits)
