"""`evenstep doctor`: reads a script, runs it for some steps, compares it with one process, and reports."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from evenstep import checks
from evenstep.errors import ConfigurationError
from evenstep.tools.doctor.findings import Reading, Watched, merge, order
from evenstep.tools.doctor.report import Report
from evenstep.tools.doctor.rule import GROUPS, Finding, Severity
from evenstep.tools.doctor.rules import all_rules


def examine(
    script: str,
    arguments: Sequence[str] = (),
    *,
    runs: bool = True,
    compares: bool = True,
    num_ranks: int = 2,
    num_steps: int = 12,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    say: Callable[[str], None] = lambda line: None,
) -> Report:
    """Look for mistakes in a training script.

    Args:
        script: A python file or a notebook. A notebook is read and never run.
        arguments: The command-line arguments of the script.
        runs: Whether to run the script; False: only read it.
        compares: Whether to compare the script with one process, as `evenstep verify` does, if nothing was found.
        num_ranks: The number of ranks of the run.
        num_steps: The number of optimizer steps that are watched.
        select: The rules to apply, as ids, beginnings of ids, or groups; empty: all.
        ignore: The rules to leave out, in the same form.
        say: Called with each line of progress.

    Raises:
        ConfigurationError: There is no such script, it isn't python, a rule is unknown, or LibCST is missing.
    """
    wanted = chosen_rules(select, ignore)
    path = Path(script)
    reading = read(path)
    notes = list(reading.notes)
    seen, took_s = Watched(), 0.0

    def kept() -> list[Finding]:
        merged = merge(reading.findings, seen)
        return [each for each in merged if each.rule in wanted and not is_ignored(each, reading.ignored)]

    if runs and path.suffix == ".ipynb":
        notes.append("A notebook is read, not run.")
    elif runs and not reading.looked.communicates:
        notes.append(
            f"{script} has no call that makes it distributed, so it was not run: `evenstep convert {script}` makes it "
            f"data-parallel."
        )
    elif runs:
        from evenstep.tools.doctor.run.runs import watch
        from evenstep.tools.doctor.verdict import watched

        began_s = time.monotonic()
        evidence = watch(script, arguments, ranks=num_ranks, num_steps=num_steps, say=say)
        took_s = time.monotonic() - began_s
        seen = watched(evidence, script=script, directory=os.getcwd(), facts=reading.facts)
    rules = all_rules()
    is_fine = all(rules[each.rule].severity is Severity.NOTE for each in kept())
    compared: str | None = None
    if compares and is_fine and seen.num_steps and num_ranks > 1 and not seen.notes:
        if evidence.all("spawns"):
            notes.append("The script starts its own ranks, so it was not compared with one process.")
        else:
            from evenstep.tools.doctor.comparing import compare

            found, note, is_done = compare(script, arguments, num_ranks=num_ranks, took_s=took_s, say=say)
            compared = note if is_done else None
            seen = replace(seen, findings=[*seen.findings, *found], notes=[] if is_done else [note])
    return Report(script, kept(), [*notes, *seen.notes], seen.num_steps, reading.looked, compared, seen.failed)


def read(path: Path) -> Reading:
    """Read a script and apply the rules to its source.

    Raises:
        ConfigurationError: The script can't be read, isn't python, or LibCST is missing.
    """
    rules = all_rules()
    from evenstep.tools.reading.contexts import Script
    from evenstep.tools.reading.program import recursing

    found: dict[tuple[str, str, int, int | None], Finding] = {}
    with recursing(path):
        script = Script(path)
        unreached = {(str(file.source.path), *file.source.place(line)) for file, line in script.unreached_lines}
        for rule in rules.values():
            # Most rules are for scripts that train on several ranks, and rules of devices for scripts that use GPUs.
            fits = script.is_distributed or rule.group == "starting"
            if rule.read is None or not fits or (rule.group == "devices" and not script.uses_gpus):
                continue
            for each in rule.read(script):
                if (each.path, each.line, each.cell) not in unreached:
                    # At most one finding of a rule at a line.
                    found.setdefault((rule.id, each.path, each.line, each.cell), replace(each, rule=rule.id))
        looked, facts = script.looked, script.facts
    ignored = {}
    for file in script.files:
        for line, names in file.source.ignored.items():
            shown, cell = file.source.place(line)
            ignored[str(file.source.path), cell, shown] = names
    return Reading(sorted(found.values(), key=order), script.notes, ignored, looked, facts)


def is_ignored(finding: Finding, ignored: Mapping[tuple[str, int | None, int], frozenset[str]]) -> bool:
    """Whether a comment on the finding's line switches its rule off."""
    rules = ignored.get((finding.path, finding.cell, finding.line))
    return rules is not None and (not rules or finding.rule in rules)


def chosen_rules(select: Sequence[str], ignore: Sequence[str]) -> set[str]:
    """The ids of the rules to apply.

    Raises:
        ConfigurationError: A name matches no rule.
    """
    chosen = _matching("--select", select) if select else set(all_rules())
    return chosen - _matching("--ignore", ignore)


def _matching(option: str, names: Sequence[str]) -> set[str]:
    matching: set[str] = set()
    rules = all_rules()
    for name in names:
        fitting = {key for key, rule in rules.items() if rule.group == name.lower() or key.startswith(name.upper())}
        if not fitting or name.upper() in ("E", "EV", ""):
            guess = checks.meant(name, [*rules, *GROUPS])
            raise ConfigurationError(
                f"{option} {name}: there is no such rule.{guess} Rules are {min(rules)} to {max(rules)}, groups "
                f"{', '.join(GROUPS)}."
            )
        matching |= fitting
    return matching
