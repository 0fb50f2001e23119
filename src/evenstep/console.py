"""Output for the user while training runs: lines on stderr and one progress bar."""

from __future__ import annotations

import contextlib
import errno
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import TYPE_CHECKING, Any, TypeVar

from evenstep import checks

if TYPE_CHECKING:
    from rich.console import Console

Item = TypeVar("Item")


def printable(text: str) -> str:
    """Make another process's text safe to print: control characters, as in terminal escapes, become text. Pure."""
    return "".join(c if c in "\n\t" or c.isprintable() else repr(c)[1:-1] for c in text)


def say(line: str) -> None:
    """Print a line to stderr at once. Control characters in it, as from a file's name or a log, are shown as text.

    If stderr can't be written, because a disk is full or a terminal closed, nobody could read the line: the error is
    ignored.
    """
    if sys.stderr is not None:  # None: stderr was closed when python started, and `print` would write to stdout
        with contextlib.suppress(OSError):
            print(printable(line), file=sys.stderr, flush=True)  # noqa: T201


def on_stdout(**settings: Any) -> Console:
    """rich's console for reports. A closed pipe raises an error; rich alone would end the process.

    Args:
        settings: Arguments of `rich.console.Console`.
    """
    from rich.console import Console

    class Stdout(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError(errno.EPIPE, "the reader of standard output has gone")

    return Stdout(**settings)


def progress(
    items: Iterable[Item],
    *,
    description: str | None = None,
    total: int | None = None,
    interval_s: float = 10.0,
    is_shown: bool = True,
) -> Iterator[Item]:
    """Yield `items`, with a bar on a terminal, or with a plain line per interval elsewhere.

    Args:
        items: The objects to iterate over.
        description: Text before the bar; None: the epoch, if `items` has one.
        total: Number of items; None: `len(items)`, or unknown.
        interval_s: Seconds between two plain lines. One more line follows the last item.
        is_shown: False: show nothing, only yield, as ranks other than 0 do.

    Raises:
        ConfigurationError: `items` can't be iterated, or another argument is wrong. Raised on every rank.
    """
    if not isinstance(items, Iterable) and not hasattr(items, "__getitem__"):
        raise checks.refuse("world.progress: items", items, "what a loop can go through: a DataLoader, a list")
    if description is not None and not isinstance(description, str):
        raise checks.refuse("world.progress: description", description, "a text, or None for the epoch")
    if total is not None:
        total = checks.whole("world.progress: total", total, least=0, otherwise="None for len(items)")
    checks.number("world.progress: interval_s", interval_s, least=0, finite=False)
    if not is_shown:
        return iter(items)
    if description is None:
        epoch = getattr(items, "epoch", None)
        description = "steps" if epoch is None else f"epoch {epoch}"
    if total is None and isinstance(items, Sized):
        with contextlib.suppress(TypeError):  # a loader of a stream has a length only if the stream has
            total = len(items)
    if sys.stderr.isatty():
        return _bar(items, description, total)
    return _lines(items, description, total, interval_s)


def _bar(items: Iterable[Item], description: str, total: int | None) -> Iterator[Item]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        yield from bar.track(items, total=total, description=description)


def _lines(items: Iterable[Item], description: str, total: int | None, interval_s: float) -> Iterator[Item]:
    of = "" if total is None else f"/{total}"
    start = last = time.monotonic()
    count = 0
    try:
        for item in items:
            yield item
            count += 1
            now = time.monotonic()
            if now - last >= interval_s:
                last = now
                say(f"{description}: {count}{of}, {count / (now - start):.1f} a second")
    finally:
        elapsed = time.monotonic() - start
        rate = f", {count / elapsed:.1f} a second" if elapsed > 0 else ""
        say(f"{description}: {count}{of} in {elapsed:.1f} s{rate}")


def quieten() -> Callable[[], None]:
    """Silence this process's log records below ERROR and its warnings. Returns a function that undoes this.

    For ranks other than 0 that share a terminal with rank 0. Records at ERROR concern this rank and are shown.
    """
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    filters = warnings.filters[:]
    warnings.simplefilter("ignore")
    mine = warnings.filters[0]

    def restore() -> None:
        logging.disable(before)
        if mine not in filters and mine in warnings.filters:
            warnings.filters.remove(mine)  # type: ignore[attr-defined]
            warnings._filters_mutated()  # type: ignore[attr-defined]

    return restore
