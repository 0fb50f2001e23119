"""`evenstep doctor --fix`: applies the mends that are certain, and shows the changes."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path

from evenstep.ground.host.named_files import encoding_of, read_script, replace_file
from evenstep.tools.doctor.examination import is_ignored, read
from evenstep.tools.doctor.rule import Edit, Finding

_MOST_ROUNDS = 5  # one mend may uncover another: a sampler, then its `set_epoch`


def fix(script: str, wanted: Collection[str]) -> str:
    """Apply the certain mends to a script and its own modules.

    A mend that would make a file invalid python is left out. Files are replaced atomically, in their own encoding.

    Args:
        script: The path of a python file. A notebook isn't changed.
        wanted: The ids of the rules whose mends are applied.

    Returns:
        The changes as a unified diff; "" if there are none.

    Raises:
        ConfigurationError: The script can't be read.
        OSError: A file can't be written.
    """
    before: dict[Path, list[str]] = {}
    for _ in range(_MOST_ROUNDS):
        reading = read(Path(script))
        certain = [each for each in reading.findings if each.edits and each.cell is None and each.rule in wanted]
        certain = [each for each in certain if not is_ignored(each, reading.ignored)]
        changed = [_rewrite(path, certain, before) for path in sorted({Path(each.path) for each in certain})]
        if not any(changed):
            break
    diff: list[str] = []
    for path, lines in before.items():
        after = _lines(path)[0]
        diff += difflib.unified_diff(lines, after, str(path), f"{path}, mended", n=1, lineterm="")
    return "\n".join(diff)


def _lines(path: Path) -> tuple[list[str], str, str]:
    """(lines, line end, encoding) of a file."""
    data = read_script(path)
    encoding = encoding_of(data, path)
    text = data.decode(encoding)
    end = "\r\n" if "\r\n" in text else "\n"
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n"), end, encoding


def _rewrite(path: Path, findings: Sequence[Finding], before: dict[Path, list[str]]) -> bool:
    """Apply edits to a file. Returns whether the file has changed."""
    lines, end, encoding = _lines(path)
    before.setdefault(path, lines)
    chosen: list[Edit] = []
    for finding in (each for each in findings if each.path == str(path)):
        taken = {line for each in chosen for line in range(each.first, each.last + 1)}
        is_free = not any(taken & {*range(each.first, each.last + 1)} for each in finding.edits)
        if is_free and _is_python(_edited(lines, [*chosen, *finding.edits]), path):
            chosen += finding.edits
    mended = _edited(lines, chosen)
    if mended != lines:
        replace_file(path, end.join(mended).encode(encoding))
    return mended != lines


def _edited(lines: Sequence[str], edits: Sequence[Edit]) -> list[str]:
    """Lines after edits. The last edit is applied first, so that the line numbers of the others stay valid."""
    edited = list(lines)
    for edit in sorted(edits, key=lambda each: each.first, reverse=True):
        edited[edit.first - 1 : max(edit.last, edit.first - 1)] = edit.text.split("\n") if edit.text else []
    return edited


def _is_python(lines: Sequence[str], path: Path) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the script: invalid escapes, `is` with a literal
            compile("\n".join(lines), str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True
