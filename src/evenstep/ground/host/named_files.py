"""Files that a person names on a command line: the script to examine, the report to write.

A script is refused with a one-line error if reading it would block (a pipe), never end (/dev/zero) or give no text, or
if its name can't be printed. A report replaces its file as a whole, and never replaces a script.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import tempfile
import tokenize
from pathlib import Path

from evenstep.checks import shown
from evenstep.errors import ConfigurationError

MOST_BYTES = 2 << 20  # of a script; for a notebook with its pictures: `MOST_BYTES_OF_NOTEBOOK`
MOST_BYTES_OF_NOTEBOOK = 64 << 20
# Write errors that the disk, or the reader of a pipe, has caused.
OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EROFS, errno.EPIPE}
_SCRIPTS = (".py", ".ipynb")


def read_script(script: str | Path) -> bytes:
    """The bytes of a script or notebook that a person has named.

    Raises:
        ConfigurationError: The file is missing, not regular, larger than any script, or binary; or its name has
            characters that can't be printed.
    """
    path = Path(script)
    if not str(path).isprintable():  # terminal escapes, line ends, bytes that aren't text
        raise ConfigurationError(f"{str(path)!a}: a name with characters that can't be printed. Rename the file.")
    most = MOST_BYTES_OF_NOTEBOOK if path.suffix == ".ipynb" else MOST_BYTES
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise ConfigurationError(f"{path} is a directory. Name the script, such as {path / 'train.py'}.")
        if not stat.S_ISREG(mode):
            raise ConfigurationError(f"{path} isn't a regular file. Name the script, such as train.py.")
        with path.open("rb") as file:
            data = file.read(most + 1)
    except FileNotFoundError:
        raise ConfigurationError(f"{path}: no such script (looked in {Path.cwd()}).") from None
    except OSError as error:
        raise ConfigurationError(f"{shown(str(path))} can't be read: {error.strerror}.") from None
    if len(data) > most:
        raise ConfigurationError(f"{path} has more than {most >> 20} MiB, too many for a script.")
    if b"\0" in data:
        raise ConfigurationError(f"{path} isn't a python script: it has zero bytes, as binary files do.")
    return data


def encoding_of(data: bytes, path: str | Path) -> str:
    """The encoding that a script declares, UTF-8 if it declares none.

    Raises:
        ConfigurationError: Python doesn't know the encoding, or the file isn't text in it.
    """
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        data.decode(encoding)
    except (SyntaxError, LookupError, ValueError) as error:  # LookupError: rot13, which doesn't encode text
        raise ConfigurationError(
            f"{path} is not text in the encoding it declares (UTF-8 if it declares none): {error}. "
            "Save it as UTF-8, or name its encoding in the first line: # -*- coding: latin-1 -*-"
        ) from None
    return encoding


def validate_script(script: str | Path) -> None:
    """Refuse a file that can't be read as a script; for commands that only run it.

    Raises:
        ConfigurationError: As in `read_script` and `encoding_of`.
    """
    encoding_of(read_script(script), script)


def validate_target(option: str, file: str | None, *sources: str | None) -> None:
    """Refuse a report's file that can't or mustn't be written. Called before the runs, which take minutes.

    Args:
        option: The option that names the file: "--json".
        file: The file's path; None: nothing is written.
        sources: Files that the report mustn't replace: scripts, other reports.

    Raises:
        ConfigurationError: `file` is a script, one of `sources`, a directory, or in a missing directory.
    """
    if file is None:
        return
    path = Path(file)
    shown_path = file if file.isprintable() else ascii(file)
    if path.suffix in _SCRIPTS or any(_is_same(path, Path(each)) for each in sources if each is not None):
        raise ConfigurationError(
            f"{option} {shown_path}: this file is a script, or belongs to another option, and isn't replaced. Name a "
            f"new file, such as out.json."
        )
    try:
        folder = path.absolute().parent
        can_be = not path.is_dir() and folder.is_dir() and os.access(path if path.exists() else folder, os.W_OK)
    except (OSError, ValueError):  # a name that is too long
        can_be = False
    if not can_be:
        raise ConfigurationError(f"{option} {shown_path}: can't be written. Name a file in a directory that exists.")


def _is_same(path: Path, other: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return path.resolve() == other.resolve() or path.samefile(other)
    return False


def write_report(file: str | Path | None, text: str) -> None:
    """Write a report; None: write nothing. An old file is replaced by the whole report, or stays as it is.

    Raises:
        OSError: The file can't be written; `filename` has its path.
    """
    if file is None:
        return
    path = Path(file)
    try:
        if path.is_file() and not path.is_symlink():  # not /dev/stdout, nor a pipe
            replace_file(path, text.encode())
        else:
            path.write_text(text)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from None


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file's content as a whole, and flush it to the disk. The file keeps its mode and owner.

    Raises:
        OSError: The file can't be written, and is unchanged.
    """
    was = path.stat()
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name[:100]}.", dir=path.absolute().parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(PermissionError):
            os.chown(name, was.st_uid, was.st_gid)
        os.chmod(name, was.st_mode & 0o7777)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
