"""What a rule is, and what a finding is. Pure.

A rule is a module `rules/EV101.py`. Its docstring is its page: a first line `name (severity).`, a paragraph of what the
script does, one of what it costs, whatever else there is to say, and two scripts, `Wrong:` and `Right:`. It has a
function `read(script)` where reading decides, `seen(run)` where a run shows the mistake, or both: then a run confirms
what was read. `COMPARED` names the causes of `verify` that show it where neither does.
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

# The digit after EV.
GROUPS = {"data": "1", "output": "2", "devices": "3", "collectives": "4", "step": "5", "starting": "6"}
_PAGE = re.compile(r"(.+) \((error|warning|note)\)\.\n\n(.+?)\n\n(.+?)\n\n", re.DOTALL)
_EXAMPLES = re.compile(r"(?:Wrong|Right):\n\n```python\n(.*?)```", re.DOTALL)


class Severity(Enum):
    """How bad it is. Values are those of SARIF's `level`."""

    ERROR = "error"  # a wrong result, a hang or a crash
    WARNING = "warning"  # time, memory or order is lost
    NOTE = "note"  # something to know; does not change the exit status


@dataclass(frozen=True)
class Edit:
    """A change of a file that mends a finding: its lines `first` to `last`, counted from 1, become `text`.

    If `last` is `first - 1`, `text` comes before line `first`.
    """

    first: int
    last: int
    text: str


@dataclass(frozen=True)
class Finding:
    """One mistake at one place of a script.

    Attributes:
        path: The file, as the user named it or relative to the current directory.
        line: Counted from 1. In a notebook, from the first line of its cell.
        column: Counted from 1.
        evidence: What was read or seen, with values: "DataLoader(train_set, shuffle=True) has no sampler".
        cost: What it costs in this script; "" if the rule's `why` says all.
        mend: A few lines of code for this script; "" if the rule's `mend` says all.
        confirmed: True if a run has shown it; False if it was only read.
        cell: The notebook's cell, counted from 1; None in a script.
        edits: What `--fix` writes; () where that isn't certain.
        rule: The rule's id; set by whoever asks the rule.
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
        """Where it is: `train.py:12`, or `train.ipynb, cell 3:12`."""
        return f"{self.path}:{self.line}" if self.cell is None else f"{self.path}, cell {self.cell}:{self.line}"


@dataclass(frozen=True)
class Refuted:
    """A run has shown that a rule holds after all, so that what was read is no finding."""

    rule: str = ""


Found = Iterator[Finding]
Seen = Iterator[Finding | Refuted]


@dataclass(frozen=True)
class Rule:
    """One mistake that `doctor` knows.

    Attributes:
        id: "EV" and three digits, the first of its group; never used again for another mistake.
        name: In a few words, for tables.
        severity: How bad it is.
        what: What the script does.
        why: What comes of it.
        text: The page without its first line, in Markdown.
        wrong, right: Its two scripts.
        read, seen: See above; None: reading, or a run, says nothing of it.
        compared: Kinds of `verify`'s causes that show it.
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
        """The rule that a module is.

        Raises:
            ValueError: Its docstring isn't a page, or it has no function that finds anything.
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
        """A key of `GROUPS`."""
        return next(name for name, digit in GROUPS.items() if digit == self.id[2])

    @property
    def found_by(self) -> str:
        """How its findings come to be."""
        if self.seen is None:
            return "reading"
        return "running" if self.read is None else "reading, confirmed by running"

    @property
    def mend(self) -> str:
        """The lines of the right script that the wrong one hasn't."""
        wrong, right = self.wrong.splitlines(), self.right.splitlines()
        changes = difflib.SequenceMatcher(None, wrong, right, autojunk=False).get_opcodes()
        lines = [line for kind, _, _, first, last in changes if kind != "equal" for line in right[first:last]]
        return textwrap.dedent("\n".join(lines))

    @property
    def explain(self) -> str:
        """The command that prints its page, on any machine that has evenstep."""
        return f"evenstep doctor --explain {self.id}"

    @property
    def section(self) -> str:
        """Its part of that page."""
        return f"## {self.id}\n\n**{self.name} ({self.severity.value}).** {self.text}"


def found(
    at: Call | tuple[File, int],
    evidence: str,
    *,
    mend: str = "",
    edits: tuple[Edit, ...] = (),
) -> Finding:
    """A finding of reading, at a call or at a line of a file."""
    file, line, column = (*at, 1) if isinstance(at, tuple) else (at.frame.file, at.line, at.column)
    shown, cell = file.source.place(line)
    return Finding(str(file.source.path), shown, column, evidence, mend=mend, cell=cell, edits=edits)
