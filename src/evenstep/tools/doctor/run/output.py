"""What a rank under watch shows and saves, as events: lines on the screen, trackers, files and checkpoints."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch

from evenstep.tools.doctor.run.events import Place
from evenstep.tools.doctor.run.writer import Writer
from evenstep.tools.observing.patching import Patches
from evenstep.tools.observing.record import Subscriber
from evenstep.tools.observing.script import caller

_SHOWN = 200  # characters of a line
_BARS = ("tqdm", "rich")
_LOGS = ("logging", "loguru", "structlog")
_FOR_THE_SCRIPT = (
    *_BARS,
    *_LOGS,
    "click",
    "pprint",
    "textwrap",
    "contextlib",
    "functools",
    "codecs",
    "io",
    "encodings",
)
# Of a module, what opens a run of a tracker. Looked for once they are imported: importing them takes seconds.
_TRACKERS = {
    "wandb": "init",
    "torch.utils.tensorboard": "SummaryWriter",
    "torch.utils.tensorboard.writer": "SummaryWriter",
    "tensorboardX": "SummaryWriter",
    "mlflow": "start_run",
    "swanlab": "init",
    "aim": "Run",
    "comet_ml": "Experiment",
}


class Output(Subscriber):
    """Writes down what this process shows and saves.

    Args:
        writer: Where to.
        patches: Undoes it.
    """

    def __init__(self, writer: Writer, patches: Patches) -> None:
        self._writer, self._patches = writer, patches
        self._watched: set[str] = set()
        self._begun: dict[int, tuple[list[Place], str]] = {}  # by stream, the line that isn't complete
        for number, stream in enumerate((sys.stdout, sys.stderr)):
            patches.around(stream, "write", functools.partial(self._writes, number))

    def look_for_trackers(self) -> None:
        """Watch the trackers that the script has imported by now."""
        for name, function in _TRACKERS.items():
            module = sys.modules.get(name)
            if module is None or name in self._watched:
                continue
            self._watched.add(name)
            opened = functools.partial(self._opened, f"{name.split('.')[0]}.{function}")
            opener = getattr(module, function, None)
            owner, attribute = (opener, "__init__") if isinstance(opener, type) else (module, function)
            self._patches.around(owner, attribute, opened)

    def save(self, obj: Any, f: Any = None, *args: Any, **kwargs: Any) -> None:
        """See base class."""
        path = os.path.abspath(f) if isinstance(f, str | os.PathLike) else ""
        self._writer.note("save", path=path, has_prefix=has_prefix(obj))

    def _opened(self, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._writer.note("tracker", tracker=name)
        return original(*args, **kwargs)

    def _writes(self, stream: int, original: Callable[[str], int], text: str) -> int:
        via, frame = self._who_writes()
        if via == "bar":
            self._show(self._writer.script.places(frame), via, text)
        elif via:
            # `print` writes each of its arguments by itself.
            places, begun = self._begun.pop(stream, (self._writer.script.places(frame), ""))
            if text.endswith("\n") or len(begun) > _SHOWN:
                self._show(places, via, begun + text)
            else:
                self._begun[stream] = places, begun + text
        return original(text)

    def _show(self, places: list[Place], via: str, text: str) -> None:
        if places and text.strip():
            self._writer.write("output", places, {"via": via, "text": text.strip()[:_SHOWN]})

    def _who_writes(self) -> tuple[str, FrameType | None]:
        """How the script writes, and from where; "" if a library writes for itself."""
        frame: FrameType | None = caller()
        via = "print"
        while frame is not None:
            name = str(frame.f_globals.get("__name__", ""))
            package = name.partition(".")[0]
            if self._writer.script.own_file(frame.f_code.co_filename):
                return via, frame
            if package in _BARS and frame.f_code.co_name != "write" and via != "log":
                via = "bar" if package == "tqdm" or "progress" in name else via
            elif package in _LOGS:
                via = "log"
            elif package not in _FOR_THE_SCRIPT:
                return "", None
            frame = frame.f_back
        return "", None


def has_prefix(saved: Any, depth: int = 2) -> bool:
    """Whether a checkpoint has the state of a wrapper: names of tensors that all begin with `module.`. Pure."""
    if not isinstance(saved, Mapping):
        return False
    names = [name for name, value in saved.items() if isinstance(value, torch.Tensor)]
    if names and all(isinstance(name, str) and name.startswith("module.") for name in names):
        return True
    return depth > 0 and any(has_prefix(value, depth - 1) for value in saved.values())
