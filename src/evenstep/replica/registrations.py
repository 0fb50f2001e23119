"""Has anything been registered in a module since it was wrapped?

To look costs microseconds per forward pass, and more the more layers there are. torch tells, through hooks that it
calls for every module of the process: they count, and only who finds another number looks.
"""

from __future__ import annotations

from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

counted = 0  # parameters and modules registered anywhere, since `watch`; read as `registrations.counted`
_is_watching = False


def _counted(*_: object) -> None:
    global counted
    counted += 1


def watch() -> int:
    """Count from now on; the number to compare `counted` with."""
    global _is_watching
    if not _is_watching:
        _is_watching = True
        register_module_parameter_registration_hook(_counted)
        register_module_module_registration_hook(_counted)
    return counted
