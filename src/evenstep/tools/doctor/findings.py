"""What reading a script has found, what a run has shown, and how both become one list. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from evenstep.tools.doctor.rule import Finding, Refuted
from evenstep.tools.reading.looked import Facts, Looked


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
class Watched:
    """What a run under watch has shown.

    Attributes:
        findings: Each `confirmed`, at the line where a person would mend it.
        refuted: What reading may have found and the run didn't.
        notes: One sentence each, for the person: why a run ended early, what it couldn't look at.
        num_steps: Optimizer steps that all ranks made; 0 if the script doesn't run; None if it wasn't run.
        failed: Whether the script itself failed before its first step.
    """

    findings: Sequence[Finding] = ()
    refuted: Sequence[Refuted] = ()
    notes: Sequence[str] = ()
    num_steps: int | None = None
    failed: bool = False


def merge(read: Iterable[Finding], watched: Watched) -> list[Finding]:
    """Confirm, drop and complete what was read by what a run has shown; sorted by place.

    A seen finding confirms the read one of its rule on the same line, else the only one of its rule in the same file.
    Any other seen finding is added.
    """
    refuted = {each.rule for each in watched.refuted}
    found = [each for each in read if each.rule not in refuted]
    for seen in watched.findings:
        same_rule = [each for each in found if each.rule == seen.rule and each.path == seen.path]
        matches = [each for each in same_rule if each.line == seen.line] or same_rule
        if matches and (len(matches) == 1 or matches[0].line == seen.line):
            found = [_confirmed(each, seen) if each in matches else each for each in found]
        else:
            found.append(seen)
    return sorted(found, key=order)


def order(finding: Finding) -> tuple[str, int, int, int, str]:
    """By place, then by rule."""
    return finding.path, finding.cell or 0, finding.line, finding.column, finding.rule


def _confirmed(read: Finding, seen: Finding) -> Finding:
    evidence = read.evidence if seen.evidence in read.evidence else f"{read.evidence}; {seen.evidence}"
    return replace(read, evidence=evidence, cost=seen.cost, mend=seen.mend or read.mend, confirmed=True)
