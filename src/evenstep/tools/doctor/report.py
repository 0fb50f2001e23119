"""Findings for users (a terminal or plain text) and for programs (JSON, SARIF 2.1.0)."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rich.console import Console
from rich.text import Text

from evenstep.checks import counted
from evenstep.errors import EXIT_SCRIPT_FAILED
from evenstep.tools.doctor.rule import Finding, Rule, Severity
from evenstep.tools.doctor.rules import all_rules
from evenstep.tools.reading.looked import Looked

JSON_VERSION = 2
_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.NOTE: "bold cyan"}


@dataclass(frozen=True)
class Report:
    """The report of `evenstep doctor`.

    Attributes:
        script: The path, as the user wrote it.
        findings: The findings, sorted by place.
        notes: Sentences on what couldn't be examined.
        num_steps: The number of steps watched; None if the script was only read.
        looked: What doctor examined in the script.
        compared: The result of the comparison with one process; None if there was no comparison.
        failed: Whether the script itself failed before its first step.
    """

    script: str
    findings: Sequence[Finding]
    notes: Sequence[str] = ()
    num_steps: int | None = None
    looked: Looked = field(default_factory=Looked)
    compared: str | None = None
    failed: bool = False

    @property
    def is_fine(self) -> bool:
        """Whether there is no finding but notes, and the script didn't fail before its first step."""
        return not self._real() and not self.failed

    @property
    def status(self) -> int:
        """The exit status of the command: 1 with findings, else that for a script that failed, else 0."""
        return 1 if self._real() else EXIT_SCRIPT_FAILED if self.failed else 0

    def show(self, console: Console) -> None:
        """Print the findings, each with its evidence, cost and mend, then the notes and the summary."""
        for finding in self.findings:
            _show_finding(console, finding)
        for note in [*self.notes, *([] if self.compared is None else [self.compared])]:
            console.print(Text(note))
        console.print(Text(self.summary()))

    def summary(self) -> str:
        """The last line of the report."""
        ran = "" if self.num_steps is None else f", and run for {counted(self.num_steps, 'step')}"
        looked = f"read{ran}{'' if self.compared is None else ', and compared'}: {self.looked}"
        if not self.findings and not self.num_steps and not self.looked.is_distributed:
            is_unknown = "no call that makes it distributed is known" if self.looked.communicates else "not distributed"
            return f"{self.script}: {is_unknown}: not examined."
        failed = "the script failed; " if self.failed else ""
        if not self.findings:
            return f"{self.script}: {failed}nothing found ({looked})."
        real = self._real()
        parts = [counted(len(real), "finding")]
        confirmed = sum(each.confirmed for each in real)
        if self.num_steps is not None and real:
            count = "none" if confirmed == 0 else f"{confirmed} of them"
            parts.append(f"{'' if confirmed == len(real) else count + ' '}confirmed by the run")
        if len(real) < len(self.findings):
            parts.append(counted(len(self.findings) - len(real), "note"))
        return f"{self.script}: {failed}{', '.join(parts)} ({looked})."

    def _real(self) -> list[Finding]:
        """The findings that aren't notes."""
        rules = all_rules()
        return [each for each in self.findings if rules[each.rule].severity is not Severity.NOTE]

    def as_json(self) -> str:
        """The report as JSON."""
        found = [
            {
                "rule": rule.id,
                "name": rule.name,
                "severity": rule.severity.value,
                "path": each.path,
                "cell": each.cell,
                "line": each.line,
                "column": each.column,
                "confirmed": each.confirmed,
                "evidence": each.evidence,
                "cost": each.cost or rule.why,
                "mend": each.mend or rule.mend,
                "explain": rule.explain,
            }
            for each in self.findings
            for rule in [all_rules()[each.rule]]
        ]
        result = {
            "version": JSON_VERSION,
            "script": self.script,
            "fine": self.is_fine,
            "steps": self.num_steps,
            "failed": self.failed,
            "distributed": self.looked.is_distributed,
            "loaders": self.looked.num_loaders,
            "wrapped_models": self.looked.num_wrapped,
            "not_understood": [{"text": text, "line": line} for text, line in self.looked.unknown],
            "findings": found,
            "notes": list(self.notes),
            "compared": self.compared,
        }
        return json.dumps(result, indent=2)

    def as_sarif(self, version: str) -> str:
        """The report for code review tools, in OASIS's Static Analysis Results Interchange Format (SARIF) 2.1.0.

        Args:
            version: evenstep's version.
        """
        used = sorted({each.rule for each in self.findings})
        run = {
            "tool": {
                "driver": {
                    "name": "evenstep doctor",
                    "version": version,
                    "rules": [_sarif_rule(all_rules()[each]) for each in used],
                }
            },
            "columnKind": "unicodeCodePoints",
            "results": [_sarif_result(each, used.index(each.rule)) for each in self.findings],
        }
        schema = "https://json.schemastore.org/sarif-2.1.0.json"
        return json.dumps({"$schema": schema, "version": "2.1.0", "runs": [run]}, indent=2)


def explained(rule: Rule) -> str:
    """The page of a rule, for `--explain`."""
    return f"{rule.id} {rule.name}\n\n{rule.text}\nFound by {rule.found_by}.\n"


def _show_finding(console: Console, finding: Finding) -> None:
    rule = all_rules()[finding.rule]
    heading = Text()
    heading.append(finding.place, style="bold")
    heading.append(f"  {rule.id} ", style=_STYLES[rule.severity])
    heading.append(rule.name)
    if finding.confirmed:
        heading.append("  confirmed", style="bold green")
    console.print(heading)
    for line in (f"{finding.evidence.rstrip('.')}.", f"Cost: {finding.cost or rule.why}"):
        for wrapped in textwrap.wrap(line, max(console.width - 6, 40), break_long_words=False, break_on_hyphens=False):
            console.print(Text(f"    {wrapped}"))
    code = finding.mend or rule.mend
    for line in code.splitlines():
        console.print(Text(f"        {line}", style="cyan"))
    console.print(Text(f"    More: {rule.explain}\n", style="dim"))


def _sarif_rule(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.id,
        "name": "".join(part.capitalize() for part in rule.name.replace("-", " ").replace(",", "").split()),
        "shortDescription": {"text": rule.name},
        "fullDescription": {"text": f"{rule.what} {rule.why}"},
        "help": {
            "text": f"{rule.what} {rule.why}\n\n{rule.mend}\n\nMore: {rule.explain}",
            "markdown": f"{rule.what} {rule.why}\n\n```python\n{rule.mend}\n```\n\nMore: `{rule.explain}`",
        },
        "defaultConfiguration": {"level": rule.severity.value},
        "properties": {"tags": [rule.group], "foundBy": rule.found_by},
    }


def _sarif_result(finding: Finding, index: int) -> dict[str, Any]:
    rule = all_rules()[finding.rule]
    cell = "" if finding.cell is None else f"In cell {finding.cell}: "
    text = f"{cell}{finding.evidence}. {finding.cost or rule.why}"
    return {
        "ruleId": finding.rule,
        "ruleIndex": index,
        "level": rule.severity.value,
        "message": {"text": text},
        "locations": [
            {
                "physicalLocation": {
                    "artifactLocation": {"uri": _uri(Path(finding.path))},
                    "region": {"startLine": finding.line, "startColumn": finding.column},
                }
            }
        ],
        "properties": {"confirmed": finding.confirmed, "mend": finding.mend or rule.mend},
    }


def _uri(path: Path) -> str:
    """The URI of a file: relative to the working directory, as code review tools expect, if the file is below it."""
    path = path.absolute()
    here = Path.cwd()
    return quote(path.relative_to(here).as_posix()) if path.is_relative_to(here) else path.as_uri()
