"""`evenstep convert script.py`: reads a script, converts it in memory, and writes it only as a whole."""

from __future__ import annotations

import codecs
import difflib
import io
import os
import tempfile
import tokenize
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import libcst as cst

from evenstep.convert.plan import already_distributed, plan
from evenstep.convert.source import Script
from evenstep.convert.work import Remark
from evenstep.errors import ConfigurationError, UsageError
from evenstep.verify.ranks import verify_ranks
from evenstep.verify.report import Report

TARGETS = ("evenstep", "torch")


@dataclass(frozen=True)
class Conversion:
    """What became of a script.

    Attributes:
        before, after: The text; the same where nothing was changed.
        content: `after` in the file's encoding.
        by: Who divides the training already, so that nothing is to be done.
        problems: Why it can't be converted; then nothing was changed.
        notes: What a person should know of it.
        launch: The command that starts it on two ranks.
    """

    script: str
    before: str
    after: str
    content: bytes
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
        """Put the new text in the place of the old one, as a whole, with the file's mode."""
        path = Path(self.script).resolve()  # of a link, what it points to
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with open(descriptor, "wb") as file:
                file.write(self.content)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, path.stat().st_mode & 0o7777)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise

    def verify(self, arguments: Sequence[str], *, say: Callable[[str], None]) -> Report:
        """Run the new text on one rank and on two, and compare.

        Args:
            arguments: Of the script.
            say: Told what is going on.

        Raises:
            UsageError: The script fails, or makes no steps.
        """
        path = Path(self.script)
        # Beside the script, which may import and read what lies there.
        copy = path.with_name(f"{path.stem}_converted_{os.getpid()}.py")
        try:
            copy.write_bytes(self.content)
        except OSError as error:
            raise UsageError(f"--verify: can't write {copy}, which is what is run: {error.strerror}.") from None
        try:
            return verify_ranks(
                str(copy), arguments, ranks=(1, 2), say=lambda line: say(line.replace(str(copy), self.script))
            )
        finally:
            copy.unlink(missing_ok=True)


def convert(script: str, to: str = "evenstep") -> Conversion:
    """Convert a script, in memory.

    Args:
        script: A file.
        to: "evenstep" or "torch".

    Raises:
        ConfigurationError: There is no such script, or it can't be read as one.
        UsageError: It isn't python that can be parsed.
    """
    path = Path(script)
    module, content = _parse(path)
    before = module.code
    source = Script(module)
    by = already_distributed(source)
    if by is not None:
        return Conversion(script, before, before, content, by=by)
    work = plan(source, to, file=path.name)
    problems, notes = tuple(sorted(work.problems)), tuple(sorted(work.notes))
    if problems:
        return Conversion(script, before, before, content, problems=problems, notes=notes)
    after = work.edits.apply()
    _validate(after, path)
    mark = codecs.BOM_UTF8 if content.startswith(codecs.BOM_UTF8) else b""
    new = mark + after.removeprefix("\ufeff").encode(_encoding(content).removesuffix("-sig"))
    return Conversion(script, before, after, new, notes=notes, launch=work.launch)


def _parse(path: Path) -> tuple[cst.Module, bytes]:
    if path.suffix == ".ipynb":
        raise ConfigurationError(f"{path} is a notebook: export it as a script first (jupyter nbconvert --to script).")
    if path.is_dir():
        raise ConfigurationError(f"{path} is a directory: name the script that trains.")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}.") from None
    try:
        content.decode(_encoding(content))
    except (SyntaxError, UnicodeDecodeError) as error:
        text = str(error).splitlines()[0]
        raise UsageError(f"{path}: its encoding can't be read ({text}). Save it as UTF-8.") from None
    if b"\0" in content:
        raise UsageError(f"{path} holds null bytes: it is no text.")
    try:
        return cst.parse_module(content), content
    except cst.ParserSyntaxError as error:
        raise UsageError(f"{path}, line {error.raw_line}: this is no python that can be parsed.") from None
    except RecursionError:
        raise UsageError(f"{path}: it is nested too deeply to be read.") from None


def _encoding(content: bytes) -> str:
    encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
    return encoding


def _validate(text: str, path: Path) -> None:
    """Never write what doesn't parse: that would be a fault of ours."""
    try:
        cst.parse_module(text)
        compile(text, str(path), "exec", dont_inherit=True)
    except (cst.ParserSyntaxError, SyntaxError) as error:
        raise UsageError(
            f"{path}: the converted script wouldn't parse ({str(error).splitlines()[0]}), so nothing was changed. "
            f"This is a fault of evenstep convert."
        ) from None
