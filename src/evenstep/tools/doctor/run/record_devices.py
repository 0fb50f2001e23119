"""Where the host waits for a GPU: torch says so itself (`set_sync_debug_mode`), in a few steps of a run."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from evenstep.tools.doctor.run.recorder import Recorder
from evenstep.tools.observing.patching import Patches

FIRST, LAST = 2, 6  # steps: in the first ones much is made that is kept


class Devices:
    """Notes lines that make the host wait.

    Args:
        recorder: Where to.
        patches: Undoes it.
    """

    def __init__(self, recorder: Recorder, patches: Patches) -> None:
        self._recorder, self._patches = recorder, patches
        self._is_listening = False

    def stepped(self) -> None:
        """An optimizer has stepped."""
        if not torch.cuda.is_available():
            return
        if self._recorder.num_steps == FIRST and not self._is_listening:
            self._listen()
        elif self._recorder.num_steps == LAST and self._is_listening:
            self._is_listening = False
            torch.cuda.set_sync_debug_mode("default")

    def _listen(self) -> None:
        self._is_listening = True
        filters = list(warnings.filters)
        warnings.filterwarnings("always", message=".*synchroniz.*")
        self._patches.replace(warnings, "showwarning", self._hearing)
        self._patches.later(lambda: setattr(warnings, "filters", filters))
        self._patches.later(lambda: torch.cuda.set_sync_debug_mode("default"))
        torch.cuda.set_sync_debug_mode("warn")

    def _hearing(self, original: Any) -> Any:
        def showwarning(message: Any, category: Any, filename: str, lineno: int, *rest: Any, **named: Any) -> None:
            if "synchroniz" in str(message) and self._is_listening:
                self._recorder.note("sync")
            else:
                original(message, category, filename, lineno, *rest, **named)

        return showwarning
