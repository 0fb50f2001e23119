"""How torchelastic's agent gets its processes: copies of our template where there is one, else new pythons."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from typing import Any, Protocol
from unittest import mock

from torch.distributed.elastic.multiprocessing import api as multiprocessing
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from evenstep.launcher.template import WORKER, Template


class RankProcess(Protocol):
    """What the launcher needs of a rank's process; `subprocess.Popen` and `CopiedProcess` have it."""

    @property
    def pid(self) -> int:
        """Its process, which leads a session of its own."""

    @property
    def returncode(self) -> int | Any:
        """None while it runs; negative: the signal that ended it."""

    def poll(self) -> int | None:
        """`returncode`, as of now."""

    def send_signal(self, which: int, /) -> None:
        """Send it a signal, if it still runs."""


class CopyingHandler(SubprocessHandler):
    """torchelastic's handler of one process, with a template to copy it from."""

    def __init__(self, *args: Any, template: Template, **kwargs: Any) -> None:
        self._template = template
        super().__init__(*args, **kwargs)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
        # Anything else, as a program that binds it to cores and then starts it, is started as it is written.
        if tuple(args[:3]) == (sys.executable, "-u", WORKER) and _is_open(0):
            out = self._stdout.fileno() if self._stdout else 1
            err = self._stderr.fileno() if self._stderr else 2
            process = self._template.start(args[4:], env, [0, out, err])
            if process is not None:
                return process
        return super()._popen(args, env)


@contextlib.contextmanager
def copied_from(template: Template | None) -> Iterator[None]:
    """Have torchelastic copy the processes that it starts inside; None: start them."""
    if template is None or not hasattr(multiprocessing, "get_subprocess_handler"):
        yield
        return
    # It has no argument for this: the name that it looks up is ours for the while.
    with mock.patch.object(
        multiprocessing, "get_subprocess_handler", functools.partial(CopyingHandler, template=template)
    ):
        yield


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
