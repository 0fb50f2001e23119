"""What a rank shows and saves: lines on the screen, trackers, files and checkpoints."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from evenstep.tools.doctor.run.events import Place
from evenstep.tools.doctor.run.recorder import Recorder
from evenstep.tools.observing.patching import Patches

CALLS_FOR_THE_SCRIPT = True  # for `Scratch`: what `_saving` passes on is saved by the script
_SHOWN = 200  # characters of a line
_BARS = ("tqdm", "rich")
_LOGS = ("logging", "loguru", "structlog")
_FOR_THE_SCRIPT = (*_BARS, *_LOGS, "click", "pprint", "textwrap", "contextlib", "functools")
# Of a module, what opens a run of a tracker. Looked for once they are imported: importing them takes seconds.
_TRACKERS = {
    "wandb": ("init",),
    "torch.utils.tensorboard": ("SummaryWriter",),
    "torch.utils.tensorboard.writer": ("SummaryWriter",),
    "tensorboardX": ("SummaryWriter",),
    "mlflow": ("start_run",),
    "swanlab": ("init",),
    "aim": ("Run",),
    "comet_ml": ("Experiment",),
}


class Output:
    """Notes what this process shows and saves."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._patches = Patches()
        self._watched: set[str] = set()
        self._begun: dict[int, tuple[list[Place], str]] = {}  # by stream, the line that isn't complete

    def install(self, patches: Patches) -> None:
        """Watch until the patches are undone. After `Scratch`: its functions are wrapped here."""
        self._patches = patches
        for stream in (sys.stdout, sys.stderr):
            patches.replace(stream, "write", functools.partial(self._writing, id(stream)))
        patches.replace(torch, "save", self._saving)

    def look_for_trackers(self) -> None:
        """Watch the trackers that the script has imported by now."""
        for name, functions in _TRACKERS.items():
            module = sys.modules.get(name)
            if module is None or name in self._watched:
                continue
            self._watched.add(name)
            for function in functions:
                opened = functools.partial(self._opening, f"{name.split('.')[0]}.{function}")
                owner = getattr(module, function, None)
                if isinstance(owner, type):
                    self._patches.replace(owner, "__init__", opened)
                else:
                    self._patches.replace(module, function, opened)

    def writes(self, path: str) -> None:
        """Note that a file is about to be written."""
        self._recorder.note("write", path=path)

    def _opening(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def opened(*args: Any, **kwargs: Any) -> Any:
            self._recorder.note("tracker", tracker=name)
            return original(*args, **kwargs)

        return opened

    def _writing(self, stream: int, original: Callable[[str], int]) -> Callable[[str], int]:
        def write(text: str) -> int:
            via, frame = self._who_writes()
            if via == "bar":
                self._show(self._recorder.places(frame), via, text)
            elif via:
                # `print` writes each of its arguments by itself.
                places, begun = self._begun.pop(stream, (self._recorder.places(frame), ""))
                if text.endswith("\n") or len(begun) > _SHOWN:
                    self._show(places, via, begun + text)
                else:
                    self._begun[stream] = places, begun + text
            return original(text)

        return write

    def _show(self, places: list[Place], via: str, text: str) -> None:
        if places and text.strip():
            self._recorder.write("output", places, {"via": via, "text": text.strip()[:_SHOWN]})

    def _who_writes(self) -> tuple[str, Any]:
        """How the script writes, and from where; "" if a library writes for itself."""
        frame: Any = sys._getframe(2)
        via = "print"
        while frame is not None:
            name = str(frame.f_globals.get("__name__", ""))
            package = name.partition(".")[0]
            if self._recorder.own_file(frame.f_code.co_filename):
                return via, frame
            if package in _BARS and frame.f_code.co_name != "write" and via != "log":
                via = "bar" if package == "tqdm" or "progress" in name else via
            elif package in _LOGS:
                via = "log"
            elif package not in _FOR_THE_SCRIPT and package not in ("codecs", "io", "encodings"):
                return "", None
            frame = frame.f_back
        return "", None

    def _saving(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def save(obj: Any, f: Any = None, *args: Any, **kwargs: Any) -> None:
            path = os.path.abspath(f) if isinstance(f, str | os.PathLike) else ""
            self._recorder.note("save", path=path, has_prefix=has_prefix(obj))
            original(obj, f, *args, **kwargs)

        return save


def has_prefix(saved: Any, depth: int = 2) -> bool:
    """Whether a checkpoint has the state of a wrapper: names of tensors that all begin with `module.`. Pure."""
    if not isinstance(saved, Mapping):
        return False
    names = [name for name, value in saved.items() if isinstance(value, torch.Tensor)]
    if names and all(isinstance(name, str) and name.startswith("module.") for name in names):
        return True
    return depth > 0 and any(has_prefix(value, depth - 1) for value in saved.values())
