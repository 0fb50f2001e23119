"""`evenstep convert script.py`: reads a script, converts it in memory, and writes the whole result or nothing."""

from __future__ import annotations

import ast
import codecs
import difflib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import libcst as cst

from evenstep.errors import ConfigurationError, UsageError
from evenstep.ground.host.named_files import encoding_of, read_script, replace_file
from evenstep.tools.convert.edits import Remark
from evenstep.tools.convert.plan import already_distributed, plan
from evenstep.tools.convert.replay import Replay, replay
from evenstep.tools.reading.program import parse, recursing
from evenstep.tools.reading.source import Source
from evenstep.tools.reading.tree import File
from evenstep.tools.verify.ranks import verify_ranks
from evenstep.tools.verify.report import Report

_NUM_STEPS = 5  # compared on three ranks, unless the whole first epoch is
_LONGEST_EPOCH = 50  # steps; of a longer epoch only the first steps are compared


@dataclass(frozen=True)
class Conversion:
    """The result of converting a script.

    Attributes:
        script: The path, as the user wrote it.
        before, after: The text before and after conversion; equal if nothing was changed.
        content: `after` in the file's encoding.
        original: The bytes of the file when it was read.
        by: The library that already distributes the training. Then nothing is changed. None: there is none.
        problems: Why the script can't be converted. If there are any, nothing is changed.
        notes: Remarks for the user about the conversion.
        launch: The command that starts the script on two ranks.
    """

    script: str
    before: str
    after: str
    content: bytes
    original: bytes
    by: str | None = None
    problems: tuple[Remark, ...] = ()
    notes: tuple[Remark, ...] = ()
    launch: str = ""

    @property
    def diff(self) -> str:
        """The changes as a unified diff."""
        name = self.script.lstrip("/")
        before, after = (text.splitlines(keepends=True) for text in (self.before, self.after))
        found = "".join(difflib.unified_diff(before, after, f"a/{name}", f"b/{name}"))
        return found.replace("\r\n", "\n")

    def write(self) -> None:
        """Replace the file's content by the new text, atomically, and keep its mode.

        Raises:
            ConfigurationError: The file is read-only, or has changed since it was read. It is left as it is.
            OSError: The file can't be written. It is left as it is.
        """
        path = Path(self.script).resolve()  # replaces the target of a link, not the link
        if not path.stat().st_mode & 0o222 or not os.access(path, os.W_OK):
            raise ConfigurationError(f"{self.script} is read-only, and is as it was: chmod u+w {self.script}")
        if path.read_bytes() != self.original:
            raise ConfigurationError(
                f"{self.script} has been changed since it was read, and is as it was: convert again."
            )
        replace_file(path, self.content)

    def verify(self, arguments: Sequence[str], *, say: Callable[[str], None]) -> tuple[Replay, Report | None]:
        """Compare the converted script with the original on one rank, and then with itself on three ranks.

        On two ranks with equal shares, a wrong weight wouldn't show. Short epochs are compared to their end.

        Args:
            arguments: The command-line arguments of the script.
            say: Called with each line of progress.

        Returns:
            The result on one rank, and the result on three, or None if the first shows a difference. A failure of the
            converted script counts as a difference.

        Raises:
            UsageError: The original script fails, or makes no optimizer steps.
        """
        path = Path(self.script)
        # In the script's folder: the script may import modules and read files from there.
        copy = path.with_name(f"{path.stem}_converted_{os.getpid()}.py")
        try:
            copy.write_bytes(self.content)
        except OSError as error:
            raise UsageError(f"--verify: can't write the converted script, {copy}: {error.strerror}.") from None

        def tell(line: str) -> None:
            say(line.replace(str(copy), f"{self.script}, converted,"))

        try:
            shown = replay(self.script, str(copy), arguments, say=tell)
            if shown.differences:
                return shown, None
            num_steps = shown.epoch_steps if shown.epoch_steps <= _LONGEST_EPOCH else _NUM_STEPS
            return shown, verify_ranks(
                str(copy), arguments, ranks=(1, 3), num_steps=max(num_steps, _NUM_STEPS), say=tell
            )
        except UsageError as error:
            failure = self._failure(str(error), copy.name)
            if failure is None:
                raise
            return Replay(0, (failure,), 0), None
        finally:
            copy.unlink(missing_ok=True)

    def _failure(self, said: str, copy: str) -> str | None:
        """The line at which the converted script failed, and the error; None if another script failed.

        The line is quoted, because the copy that ran has been deleted.
        """
        place = re.compile(rf'  File ".*{re.escape(copy)}", line (\d+).*\n')
        parts = place.split(said)
        if len(parts) < 3:
            return None
        text = self.after.splitlines()[int(parts[-2]) - 1].strip()
        why = next((line for line in parts[-1].splitlines() if line[:1].strip()), "it ended there")
        return f"converted, it fails at `{text}`: {why}"


def convert(script: str) -> Conversion:
    """Convert a script in memory.

    Args:
        script: The path of the file.

    Raises:
        ConfigurationError: There is no such script, or it can't be parsed as python.
    """
    path = Path(script)
    with recursing(path):
        return _convert(script, path)


def _convert(script: str, path: Path) -> Conversion:
    module, content = _parse(path)
    before = module.code
    source = File(module)
    by = already_distributed(source)
    if by is not None:
        return Conversion(script, before, before, content, content, by=by)
    work = plan(source, file=path.name)
    problems, notes = tuple(sorted(work.problems)), tuple(sorted(work.notes))
    if problems:
        return Conversion(script, before, before, content, content, problems=problems)
    after = work.edits.apply()
    _validate(after, path, ("evenstep", work.world))
    mark = codecs.BOM_UTF8 if content.startswith(codecs.BOM_UTF8) else b""
    new = mark + after.removeprefix("\ufeff").encode(encoding_of(content, path).removesuffix("-sig"))
    return Conversion(script, before, after, new, content, notes=notes, launch=work.launch)


def _parse(path: Path) -> tuple[cst.Module, bytes]:
    if path.suffix.lower() == ".ipynb":
        raise ConfigurationError(f"{path} is a notebook: export it as a script first (jupyter nbconvert --to script).")
    content = read_script(path)
    encoding_of(content, path)
    if not content.strip():
        raise ConfigurationError(f"{path} is empty: name the script that trains.")
    return parse(Source(path, ""), content), content


def _validate(text: str, path: Path, names: Sequence[str]) -> None:
    """Refuse a converted text that doesn't parse, or uses one of our names before it is bound: a fault of convert."""
    try:
        cst.parse_module(text)
        compile(text, str(path), "exec", dont_inherit=True)
        reason = next(
            (f"would use {each} before it is defined" for each in names if _is_late(ast.parse(text), each)), None
        )
    except (cst.ParserSyntaxError, SyntaxError) as error:
        reason = f"wouldn't parse ({str(error).splitlines()[0]})"
    if reason is not None:
        raise UsageError(
            f"{path}: the converted script {reason}, so nothing was changed. This is a fault of evenstep convert."
        )


def _is_late(tree: ast.Module, name: str) -> bool:
    """Whether a module's top-level code uses a name in a line before the one that binds it."""
    running = [each for each in tree.body if not isinstance(each, ast.FunctionDef | ast.ClassDef)]
    nodes = [node for statement in running for node in ast.walk(statement)]
    uses = [node for node in nodes if isinstance(node, ast.Name) and node.id == name]
    reads = [node.lineno for node in uses if isinstance(node.ctx, ast.Load)]
    binds = [node.lineno for node in uses if isinstance(node.ctx, ast.Store)]
    binds += [node.lineno for node in nodes if isinstance(node, ast.alias) and node.name == name]
    return bool(reads) and min(reads) < min(binds, default=0)
