"""The results of reading a script and of watching a run, and their merge into one list of findings. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from evenstep.tools.doctor.rule import Finding, Refuted
from evenstep.tools.reading.looked import Facts, Looked


@dataclass(frozen=True)
class Reading:
    """The result of reading a script.

    Attributes:
        findings: The findings, sorted by place.
        notes: Sentences on files that weren't read.
        ignored: By (path, cell, line), the rules that a comment switches off; an empty set stands for all.
        looked: What doctor examined in the script.
        facts: Facts of the source by which the run is judged.
    """

    findings: Sequence[Finding]
    notes: Sequence[str] = ()
    ignored: Mapping[tuple[str, int | None, int], frozenset[str]] = field(default_factory=dict)
    looked: Looked = field(default_factory=Looked)
    facts: Facts = field(default_factory=Facts)


@dataclass(frozen=True)
class Watched:
    """The result of a watched run.

    Attributes:
        findings: The findings, all `confirmed`, at the line where the user would mend them.
        refuted: The rules whose findings of reading the run has refuted.
        notes: Sentences for the user: why the run ended early, what it couldn't examine.
        num_steps: Optimizer steps that all ranks made; 0 if the script doesn't run; None if it wasn't run.
        failed: Whether the script itself failed before its first step.
    """

    findings: Sequence[Finding] = ()
    refuted: Sequence[Refuted] = ()
    notes: Sequence[str] = ()
    num_steps: int | None = None
    failed: bool = False


def merge(read: Iterable[Finding], watched: Watched) -> list[Finding]:
    """Merge findings of reading with those of a run: confirm, drop or add findings. Sorted by place.

    A finding of the run confirms that of the same rule on the same line, or else the only one of that rule in the same
    file. Any other finding of the run is added.
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
    """A key that sorts findings by place, then by rule."""
    return finding.path, finding.cell or 0, finding.line, finding.column, finding.rule


def _confirmed(read: Finding, seen: Finding) -> Finding:
    evidence = read.evidence if seen.evidence in read.evidence else f"{read.evidence}; {seen.evidence}"
    return replace(read, evidence=evidence, cost=seen.cost, mend=seen.mend or read.mend, confirmed=True)
