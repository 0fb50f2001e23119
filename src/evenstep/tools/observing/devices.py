"""The lines where the host waits for a GPU, from the warnings of torch's `set_sync_debug_mode`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from evenstep.tools.observing.patching import Patches


class Waits:
    """Reports the waits of this process for its GPU, from `listen` to `stop`.

    Args:
        heard: Called for each wait, with the file and line that torch names.
    """

    def __init__(self, heard: Callable[[str, int], object]) -> None:
        self._heard = heard
        self._patches = Patches()

    def listen(self) -> None:
        """Start to report waits."""
        filters = list(warnings.filters)
        warnings.filterwarnings("always", message=".*synchroniz.*")
        self._patches.later(lambda: setattr(warnings, "filters", filters))
        self._patches.around(warnings, "showwarning", self._shown)
        torch.cuda.set_sync_debug_mode("warn")
        self._patches.later(lambda: torch.cuda.set_sync_debug_mode("default"))

    def stop(self) -> None:
        """Stop to report waits; does nothing if `listen` wasn't called."""
        self._patches.restore()

    def _shown(
        self, original: Callable[..., None], message: Any, category: Any, file: str, line: int, *rest: Any
    ) -> None:
        if "synchroniz" in str(message):
            self._heard(file, line)
        else:
            original(message, category, file, line, *rest)
