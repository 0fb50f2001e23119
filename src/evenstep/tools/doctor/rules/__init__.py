"""The rules of `evenstep doctor`, one file for each.

EV1.. data, EV2.. output, EV3.. devices, EV4.. collectives, EV5.. the step, EV6.. starting. A new file is a new rule;
docs/contributing/rules.md says how to write one.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from pathlib import Path

from evenstep import checks
from evenstep.errors import ConfigurationError
from evenstep.tools.doctor.rule import Rule


def all_rules() -> Mapping[str, Rule]:
    """All rules by id, in order.

    Raises:
        ConfigurationError: LibCST, which rules need, is missing.
    """
    try:
        import libcst  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(checks.needs("evenstep doctor", "LibCST", "doctor")) from error
    return rules_in(Path(__file__).parent)


@functools.cache
def rules_in(folder: Path) -> Mapping[str, Rule]:
    """The rules in the files of a folder, by id.

    Raises:
        ValueError: A rule lacks a part.
    """
    names = sorted(each.stem for each in folder.glob("EV*.py"))
    return {name: Rule.of(importlib.import_module(f"{__name__}.{name}")) for name in names}
