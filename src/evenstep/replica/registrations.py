"""Has anything been registered in a module since it was wrapped?

To look costs microseconds per forward pass, and more the more layers there are. torch tells, through hooks that it
calls for every module of the process: they count, and only who finds another number looks.
"""

from __future__ import annotations

from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

_count = 0
_is_watching = False


def _counted(*_: object) -> None:
    global _count
    _count += 1


def watch() -> int:
    """Count from now on; the number to compare with `count`."""
    global _is_watching
    if not _is_watching:
        _is_watching = True
        register_module_parameter_registration_hook(_counted)
        register_module_module_registration_hook(_counted)
    return _count


def count() -> int:
    """How many parameters and modules have been registered anywhere."""
    return _count
