"""Arguments and JSON files that the sub-commands of `evenstep bench` share."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from evenstep.errors import ConfigurationError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def add_json_argument(parser: ArgumentParser, *, help: str = "write the figures there") -> None:
    """Add `--json FILE`, for `write_json`."""
    parser.add_argument("--json", metavar="FILE", help=help)


def write_json(file: str, figures: Any) -> None:
    """Write the file of `--json`, with the directories above it.

    Raises:
        ConfigurationError: It can't be written.
    """
    try:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(json.dumps(figures, indent=1))
    except OSError as error:
        raise ConfigurationError(f"--json {file}: {error.strerror or error}.") from error


def read_json(file: str) -> Any:
    """Read a file that `write_json` wrote, or any other JSON.

    Raises:
        ConfigurationError: It can't be read, or is no JSON.
    """
    try:
        return json.loads(Path(file).read_text())
    except OSError as error:
        raise ConfigurationError(f"{file}: {error.strerror or error}.") from error
    except ValueError as error:
        raise ConfigurationError(f"{file} is no JSON: {error}.") from error


def parse_counts(text: str) -> list[int]:
    """ "8,16" is [8, 16]."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigurationError(f"--ranks {text}: write numbers from 1 on, such as 8,16,64.")
    return [int(part) for part in parts]


def parse_size(text: str) -> int:
    """ "64M" is 64 MiB."""
    number, unit = text.upper().removesuffix("IB").removesuffix("B"), ""
    if number[-1:] in ("K", "M", "G"):
        number, unit = number[:-1], number[-1]
    if not number.isdigit() or int(number) == 0:
        raise ConfigurationError(f"{text!r} is no size: write 4096, 64K, 16M or 1G.")
    return int(number) * _UNITS[unit]
