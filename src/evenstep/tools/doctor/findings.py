"""What a finding is, and how those that were read and those that a run has shown become one list. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from evenstep.tools.doctor.rules import RULES, Rule
from evenstep.tools.reading.looked import Facts, Looked


@dataclass(frozen=True)
class Finding:
    """One mistake at one place of a script.

    Attributes:
        rule: Its id, a key of `RULES`: "EV101".
        path: The file, as the user named it or relative to the current directory.
        line: Counted from 1. In a notebook, from the first line of its cell.
        column: Counted from 1.
        evidence: What was read or seen, with values: "DataLoader(train_set, shuffle=True) has no sampler".
        cost: What it costs in this script; "" if the rule's `why` says all.
        mend: A few lines of code for this script; "" if the rule's `mend` says all.
        confirmed: True if a run has shown it; False if it was only read.
        cell: Of a notebook, the cell, counted from 1; None elsewhere.
    """

    rule: str
    path: str
    line: int
    column: int
    evidence: str
    cost: str = ""
    mend: str = ""
    confirmed: bool = False
    cell: int | None = None

    def __post_init__(self) -> None:
        assert self.rule in RULES, self.rule

    @property
    def about(self) -> Rule:
        """The rule that this finding breaks."""
        return RULES[self.rule]

    @property
    def place(self) -> str:
        """Where it is: `train.py:12`, or `train.ipynb, cell 3:12`."""
        return f"{self.path}:{self.line}" if self.cell is None else f"{self.path}, cell {self.cell}:{self.line}"


@dataclass(frozen=True)
class Reading:
    """What reading a script has found.

    Attributes:
        findings: Sorted by place.
        notes: Sentences about files that weren't read.
        ignored: By (path, cell, line), the rules that a comment switches off; empty: all.
        looked: What was looked at.
        facts: What its run is judged by.
    """

    findings: Sequence[Finding]
    notes: Sequence[str] = ()
    ignored: Mapping[tuple[str, int | None, int], frozenset[str]] = field(default_factory=dict)
    looked: Looked = field(default_factory=Looked)
    facts: Facts = field(default_factory=Facts)


@dataclass(frozen=True)
class Refuted:
    """A run has shown that a rule holds after all, so that what was read is no finding.

    Attributes:
        rule: Its id.
        path: The file; None: wherever it was read.
        line: The line; None: wherever it was read.
    """

    rule: str
    path: str | None = None
    line: int | None = None


@dataclass(frozen=True)
class Watched:
    """What a run under watch has shown.

    Attributes:
        findings: Each `confirmed`, at the line where a person would mend it.
        refuted: What reading may have found and the run didn't.
        notes: One sentence each, for the person: why a run ended early, what it couldn't look at.
        num_steps: Optimizer steps that all ranks made; 0 if the script doesn't run; None if it wasn't run.
    """

    findings: Sequence[Finding] = ()
    refuted: Sequence[Refuted] = ()
    notes: Sequence[str] = ()
    num_steps: int | None = None


def merge(read: Iterable[Finding], watched: Watched) -> list[Finding]:
    """Confirm, drop and complete what was read by what a run has shown; sorted by place.

    A seen finding confirms the read one of its rule on the same line, else the only one of its rule in the same file.
    Any other seen finding is added.
    """
    found = [each for each in read if not any(_refutes(it, each) for it in watched.refuted)]
    for seen in watched.findings:
        same_rule = [each for each in found if each.rule == seen.rule and each.path == seen.path]
        matches = [each for each in same_rule if each.line == seen.line] or (same_rule if len(same_rule) == 1 else [])
        if matches:
            confirmed = [_confirmed(each, seen) for each in matches]
            found = [each for each in found if each not in matches] + confirmed
        else:
            found.append(seen)
    return sorted(found, key=lambda each: (each.path, each.cell or 0, each.line, each.column, each.rule))


def _refutes(refuted: Refuted, finding: Finding) -> bool:
    return (
        refuted.rule == finding.rule
        and refuted.path in (None, finding.path)
        and refuted.line in (None, finding.line)
        and not finding.confirmed
    )


def _confirmed(read: Finding, seen: Finding) -> Finding:
    evidence = read.evidence if seen.evidence in read.evidence else f"{read.evidence}; {seen.evidence}"
    return replace(read, evidence=evidence, cost=seen.cost or read.cost, mend=seen.mend or read.mend, confirmed=True)
