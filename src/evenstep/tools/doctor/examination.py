"""`evenstep doctor`: a script is read, then run for some steps; what both show becomes one report."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from evenstep import checks
from evenstep.errors import ConfigurationError
from evenstep.tools.doctor.findings import Finding, Reading, Watched, merge
from evenstep.tools.doctor.report import Report
from evenstep.tools.doctor.rules import GROUPS, RULES

DEEPEST_CALLS = 5_000  # LibCST takes some ten calls for a level of nesting


def examine(
    script: str,
    arguments: Sequence[str] = (),
    *,
    runs: bool = True,
    num_ranks: int = 2,
    num_steps: int = 12,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    say: Callable[[str], None] = lambda line: None,
) -> Report:
    """Look for mistakes in a training script.

    Args:
        script: A python file or a notebook. A notebook is read and never run.
        arguments: The script's own.
        runs: False: only read it.
        num_ranks: Ranks of the run.
        num_steps: Optimizer steps of the run.
        select: Rules to look for: ids, beginnings of ids, or groups; empty: all.
        ignore: Rules to leave out, in the same way.
        say: Called with a line before something takes long.

    Raises:
        ConfigurationError: There is no such script, it isn't python, a rule is unknown, or LibCST is missing.
    """
    wanted = chosen_rules(select, ignore)
    path = Path(script)
    reading = read(path)
    notes = list(reading.notes)
    seen = Watched()
    if runs and path.suffix == ".ipynb":
        notes.append("A notebook is read, not run.")
    elif runs and not reading.looked.communicates:
        notes.append(
            f"It has no call that makes it distributed, so it was not run: `evenstep convert {script}` makes a "
            f"data-parallel script of it."
        )
    elif runs:
        from evenstep.tools.doctor.evidence.verdict import watched
        from evenstep.tools.doctor.run.runs import watch

        evidence = watch(script, arguments, ranks=num_ranks, num_steps=num_steps, say=say)
        seen = watched(evidence, script=script, directory=os.getcwd(), facts=reading.facts)
    merged = merge(reading.findings, seen)
    kept = [each for each in merged if each.rule in wanted and not _is_ignored(each, reading.ignored)]
    return Report(script, kept, [*notes, *seen.notes], seen.num_steps, reading.looked)


def read(path: Path) -> Reading:
    """What reading a script finds.

    Raises:
        ConfigurationError: It can't be read, isn't python, or LibCST is missing.
    """
    script, checks = _modules()
    found: dict[tuple[str, str, int, int | None], Finding] = {}
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, DEEPEST_CALLS))
    try:
        read_script = script.Script(path)
        unreached = {(str(file.source.path), file.source.place(line)) for file, line in read_script.unreached_lines}
        for check in checks:
            for finding in check(read_script):
                if (finding.path, (finding.line, finding.cell)) in unreached:
                    continue
                # One finding of a rule at a line, whichever way it was found.
                found.setdefault((finding.rule, finding.path, finding.line, finding.cell), finding)
        looked, facts = read_script.looked, read_script.facts
    except RecursionError as error:
        raise ConfigurationError(f"{path}: its expressions or calls are nested too deeply to be followed.") from error
    finally:
        sys.setrecursionlimit(limit)
    ignored = {}
    for file in read_script.files:
        for line, rules in file.source.ignored.items():
            shown, cell = file.source.place(line)
            ignored[str(file.source.path), cell, shown] = rules
    return Reading(sorted(found.values(), key=_order), read_script.notes, ignored, looked, facts)


def _order(finding: Finding) -> tuple[str, int, int, int, str]:
    return finding.path, finding.cell or 0, finding.line, finding.column, finding.rule


def _modules() -> tuple[ModuleType, list[Callable[..., Iterable[Finding]]]]:
    try:
        import libcst  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(checks.needs("evenstep doctor", "LibCST", "doctor")) from error
    from evenstep.tools.doctor.diagnosis import collectives, data, devices, output, starting, step
    from evenstep.tools.reading import contexts

    return contexts, [each.check for each in (data, output, devices, collectives, step, starting)]


def _is_ignored(finding: Finding, ignored: Mapping[tuple[str, int | None, int], frozenset[str]]) -> bool:
    rules = ignored.get((finding.path, finding.cell, finding.line))
    return rules is not None and (not rules or finding.rule in rules)


def chosen_rules(select: Sequence[str], ignore: Sequence[str]) -> set[str]:
    """The ids of the rules that are looked for.

    Raises:
        ConfigurationError: A name fits no rule.
    """
    chosen = _matching("--select", select) if select else set(RULES)
    return chosen - _matching("--ignore", ignore)


def _matching(option: str, names: Sequence[str]) -> set[str]:
    matching: set[str] = set()
    for name in names:
        fitting = {key for key, rule in RULES.items() if rule.group == name.lower() or key.startswith(name.upper())}
        if not fitting or name.upper() in ("E", "EV", ""):
            guess = checks.meant(name, [*RULES, *GROUPS])
            raise ConfigurationError(
                f"{option} {name}: there is no such rule.{guess} Rules are EV101 to EV606, groups {', '.join(GROUPS)}."
            )
        matching |= fitting
    return matching
