"""A script and its own modules that it imports from, file by file."""

from __future__ import annotations

import ast
import contextlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import libcst as cst

from evenstep.errors import ConfigurationError
from evenstep.tools.reading.source import Source, read_source
from evenstep.tools.reading.tree import File

MOST_NESTING = 300
_MOST_CALLS = 5_000  # LibCST takes some ten calls for a level of nesting
# At most so many files, and lines in all of them, are read: nobody would wait for more.
MOST_FILES = 20
MOST_LINES = 10_000


def read_file(path: Path, module_name: str = "", most_lines: int | None = None) -> File:
    """Read and parse one file.

    Raises:
        ConfigurationError: The file can't be read, is not python, or has more lines than `most_lines`.
    """
    source = read_source(path)
    if most_lines is not None and source.text.count("\n") > most_lines:
        raise ConfigurationError("the script and its modules have more lines or files than are followed.")
    return File(parse(source, source.text), source, module_name)


def parse(source: Source, content: str | bytes) -> cst.Module:
    """Parse the text of a file, or its bytes to keep its line ends and encoding.

    Python's own parser comes first, for two reasons. It explains a syntax error better. And LibCST's parser recurses
    in native code, where thousands of nested parentheses would overflow the stack and end the process.

    Raises:
        ConfigurationError: The text is not python, or is nested too deeply.
    """
    path = source.path
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the script: invalid escapes, `is` with a literal
            level: list[ast.AST] = [ast.parse(content)]
        for _ in range(MOST_NESTING + 1):
            level = [child for node in level for child in ast.iter_child_nodes(node)]
        if level:
            raise RecursionError
        return cst.parse_module(content)
    except SyntaxError as error:
        version = ".".join(map(str, sys.version_info[:2]))
        raise ConfigurationError(
            f"{_told(source, error.lineno or 1)}: this is not python {version}: {error.msg}."
        ) from error
    except cst.ParserSyntaxError as error:
        message = error.message.splitlines()[0]
        raise ConfigurationError(f"{_told(source, error.raw_line)}: LibCST can't read this: {message}") from error
    except (RecursionError, MemoryError) as error:  # their messages differ between versions of python
        raise ConfigurationError(
            f"{path}: statements or expressions are nested more than {MOST_NESTING} deep, too deeply to be read."
        ) from error
    except ValueError as error:
        raise ConfigurationError(f"{path}: can't be parsed: {error}.") from error


@contextlib.contextmanager
def recursing(path: Path) -> Iterator[None]:
    """Raise python's recursion limit so that code can follow expressions nested `MOST_NESTING` deep.

    Raises:
        ConfigurationError: The script's expressions or calls are nested more deeply still.
    """
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, _MOST_CALLS))
    try:
        yield
    except RecursionError as error:
        raise ConfigurationError(f"{path}: its expressions or calls are nested too deeply to be followed.") from error
    finally:
        sys.setrecursionlimit(limit)


def _told(source: Source, line: int) -> str:
    shown, cell = source.place(line)
    return f"{source.path}:{shown}" if cell is None else f"{source.path}, cell {cell}:{shown}"


def read_program(path: Path) -> tuple[list[File], dict[str, File], list[str]]:
    """Read a script and those of its own modules whose names it uses, directly or through other modules.

    Returns:
        (files, the script first; modules by the names under which they are imported; notes on modules not read).
    """
    folders = [path.parent]
    while (folders[-1] / "__init__.py").is_file():  # a script inside a package: `from package.data import ...`
        folders.append(folders[-1].parent)
    inside = path.absolute().relative_to(folders[-1].absolute()).with_suffix("")
    script = read_file(path, ".".join(inside.parts))
    files, modules, notes = [script], {}, []
    read = {path.resolve(): script}
    num_lines = script.source.text.count("\n")
    asked: set[str] = set()  # names used from modules, which may have imported them from other modules
    for file in files:  # the list grows
        asked |= {file.imports[local] for local in file.used & file.imports.keys()}
        asked |= {file.qualified(node) or "" for node in file.nodes if type(node) is cst.Attribute}
        itself = file.module_name.removesuffix(".__init__")
        for name, local in file.taken:
            target = next((found for each in folders if (found := _module_file(each, name))), None)
            is_asked = local == "*" or local in file.used or f"{itself}.{local}" in asked
            if not name or target is None or name in modules or not is_asked:
                continue
            key = target.resolve()
            if key not in read:
                try:
                    room = MOST_LINES - num_lines if len(files) < MOST_FILES else -1
                    read[key] = read_file(target, name if target.stem != "__init__" else f"{name}.__init__", room)
                except ConfigurationError as error:
                    notes.append(f"{target} was not read: {error}")
                    continue
                files.append(read[key])
                num_lines += read[key].source.text.count("\n")
            modules[name] = read[key]
    for file in reversed(files):
        for name, local in file.taken:
            if local == "*" and name in modules:
                star = modules[name]
                given = {each: f"{name}.{each}" for each in star.bindings.get(None, ())}
                file.imports.update({**star.imports, **given, **file.imports})
    return files, modules, notes


def _module_file(folder: Path, name: str) -> Path | None:
    """The file of a module below a folder, or None."""
    base = folder.joinpath(*name.split("."))
    return next((each for each in (base.with_suffix(".py"), base / "__init__.py") if each.is_file()), None)
