"""What makes the host wait for a GPU, and how long that really computes: looked at in a few steps after those counted.

torch says by itself where the host waits (`set_sync_debug_mode`); its profiler says when kernels run. Both cost time,
so neither is on while steps are counted.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from evenstep.ground.compat.torch_autograd import DeviceType

NUM_STEPS = 6  # half of them for each look
_HALF = NUM_STEPS // 2
_PACKAGE = Path(__file__).parents[2]


class Inspection:
    """Looks at `NUM_STEPS` steps on a GPU.

    Attributes:
        is_over: Whether enough was seen.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._num_steps = 0
        self._lines: Counter[str] = Counter()
        self._profiler: Any = None
        self._busy_s: float | None = None
        self._show: Any = None

    def step(self) -> None:
        """A step has ended; called once before the first that is looked at."""
        if self._num_steps == 0:
            self._listen()
        elif self._num_steps == _HALF:
            self._listen_no_more()
            torch.cuda.synchronize()
            self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profiler.start()
        elif self._num_steps == 2 * _HALF:
            torch.cuda.synchronize()
            self._profiler.stop()
            intervals = [
                (event.time_range.start, event.time_range.end)
                for event in self._profiler.events()
                if event.device_type == DeviceType.CUDA and "nccl" not in event.name.lower()
            ]
            self._busy_s = covered(intervals) / 1e6 / _HALF
            self.is_over = True
        self._num_steps += 1

    def syncs(self) -> tuple[tuple[str, float], ...]:
        """Lines that made the host wait, and how often in a step."""
        return tuple((line, count / _HALF) for line, count in self._lines.most_common())

    @property
    def device_busy_s(self) -> float | None:
        """How long in a step the GPU computed; None if that wasn't seen."""
        return self._busy_s or None

    def _listen(self) -> None:
        self._show = warnings.showwarning
        self._filters = warnings.filters[:]
        warnings.simplefilter("always")
        warnings.showwarning = self._hear
        torch.cuda.set_sync_debug_mode("warn")

    def _listen_no_more(self) -> None:
        torch.cuda.set_sync_debug_mode("default")
        warnings.showwarning = self._show
        warnings.filters[:] = self._filters  # type: ignore[index]

    def _hear(self, message: Any, category: Any, filename: str, lineno: int, *rest: Any, **named: Any) -> None:
        if "synchroniz" not in str(message):
            return
        if is_of_the_script(filename):
            self._lines[f"{os.path.basename(filename)}:{lineno}"] += 1


def is_of_the_script(filename: str) -> bool:
    """Whether a file is the user's own: neither torch's nor ours."""
    path = Path(filename)
    return not path.is_relative_to(Path(torch.__file__).parent) and not path.is_relative_to(_PACKAGE)


def covered(intervals: list[tuple[float, float]]) -> float:
    """The length of a union of intervals. Pure."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
