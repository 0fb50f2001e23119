"""The excepthook of a rank: output, report and exit status when an exception ends the process.

A user's mistake is shown as one message and the line of the user's file that made it. Any other exception keeps its
traceback, without the frames of the code that started the script. Under evenstep's launchers a rank prints nothing: it
writes a report, and the launcher prints the report of the first failure, once, at the end.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import ParamSpec, TextIO, TypeVar

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from evenstep import checks
from evenstep.errors import ConfigurationError, EvenstepError
from evenstep.ground.environment import Placement, current_placement
from evenstep.ground.health.first_failure import CrashReport, is_consequence
from evenstep.ground.health.peer_heartbeats import own_page
from evenstep.ground.health.users_code import PACKAGE, is_users

_MACHINERY = (f"{PACKAGE}launcher", "<frozen runpy>", "runpy.py")
_WORKER = f"{PACKAGE}launcher/spawn/script_runner.py"
_NAMED = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)

_Arguments = ParamSpec("_Arguments")
_Returned = TypeVar("_Returned")
_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def describe(error: BaseException) -> str:
    """The text to print for an exception: one message for a user's mistake, else the traceback."""
    if isinstance(error, EvenstepError) and error.is_users_mistake:
        where = _where_the_user_called(error.__traceback__)
        added = getattr(error, "__notes__", None) or ([f"at {where}"] if where else [])
        raised = traceback_in_users_code(error.__cause__)
        lines = [each if "\n" in each else f"  {each}" for each in (*added, raised) if each]
        return "\n".join([f"{type(error).__name__}: {error}", *lines])
    tb = _without_machinery(error.__traceback__)
    if isinstance(error, SyntaxError) and all(_is_machinery(f.f_code.co_filename) for f, _ in traceback.walk_tb(tb)):
        tb = None  # a syntax error of the script: it shows the line itself, and python prints no frames either
    shown = traceback.TracebackException(type(error), error, tb)
    if isinstance(error, EvenstepError) and error.is_consequence:
        # Another rank failed: only the place where this rank waited is of interest.
        inner = [f.filename.startswith(PACKAGE) or f.filename == contextlib.__file__ for f in shown.stack]
        if not all(inner):
            num_outer = len(inner) - inner[::-1].index(False)
            shown.stack = traceback.StackSummary.from_list(shown.stack[:num_outer])
    text, suggestion = "".join(shown.format()).rstrip(), _suggestion(error)
    return text if text.endswith(suggestion) else text + suggestion  # in python 3.10 exceptiongroup has added it


def traceback_in_users_code(error: BaseException | None) -> str:
    """The traceback from the user's code on, if evenstep called that code and it raised the error; else ""."""
    if error is None or isinstance(error, EvenstepError):
        return ""
    first = next((step for step in _steps(error.__traceback__) if is_users(step.tb_frame.f_code.co_filename)), None)
    if first is None:
        return ""
    return "".join(traceback.TracebackException(type(error), error, first).format(chain=False)).rstrip()


def install(placement: Placement) -> _Hook:
    """Make uncaught exceptions end this process as described above. Returns the previous hook."""
    before: _Hook = sys.excepthook
    pid = os.getpid()

    def end(kind: type[BaseException], error: BaseException, tb: TracebackType | None, /) -> None:
        if os.getpid() != pid:  # a forked child, whose end isn't the rank's
            print(describe(error), file=_real_stderr(), flush=True)
            raise SystemExit(1)
        if isinstance(error, KeyboardInterrupt):
            if not placement.pages:
                before(kind, error, tb)
            raise SystemExit(130)
        text = describe(error)
        stderr = _real_stderr()
        page = own_page(placement)
        if page is not None:
            page.write_report(CrashReport.of(error, rank=placement.rank, traceback=text).pack())
            if placement.rank != 0:  # its stderr is its own log file
                print(text, file=stderr, flush=True)
        elif isinstance(error, EvenstepError):
            who = f" on rank {placement.rank}" if placement.world_size > 1 else ""
            print(f"evenstep{who}: {text}", file=stderr, flush=True)
        else:
            with contextlib.redirect_stderr(stderr):
                before(kind, error, tb)
        _tell_torchelastic(error)
        # CPython lets a hook choose the exit status; exit handlers still run.
        raise SystemExit(error.exit_code if isinstance(error, EvenstepError) else 1)

    sys.excepthook = end
    return before


@contextlib.contextmanager
def reporting_mistakes() -> Iterator[None]:
    """Context in which a user's uncaught mistake ends this process as after `install`, even before that is called."""
    try:
        yield
    except EvenstepError as error:
        # Not in an interactive python, because the hook would end it.
        if error.is_users_mistake and sys.excepthook is sys.__excepthook__ and not hasattr(sys, "ps1"):
            try:
                placement = current_placement()
            except ConfigurationError:  # perhaps the mistake itself
                placement = Placement()
            install(placement)
        raise


def for_users(function: Callable[_Arguments, _Returned]) -> Callable[_Arguments, _Returned]:
    """Decorate functions that users call once: a user's mistake inside is one message, even before there is a world.

    An unknown or missing argument is such a mistake: a `ConfigurationError`.
    """

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Returned:
        with reporting_mistakes():
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                is_of_the_call = error.__traceback__ is not None and error.__traceback__.tb_next is None
                if isinstance(error, EvenstepError) or not is_of_the_call:
                    raise
                raise ConfigurationError(_misfit(function, str(error))) from None

    return call


def _misfit(function: Callable[..., object], said: str) -> str:
    """The message for a call with missing or unknown arguments, which python has refused."""
    who = f"evenstep.{function.__qualname__.removesuffix('.__init__')}"
    parameters = [each for name, each in inspect.signature(function).parameters.items() if name not in ("self", "cls")]
    named = [str(each).partition(":")[0].partition("=")[0] for each in parameters if each.kind in _NAMED]
    free = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    unknown = re.search(r"unexpected keyword argument '(\w+)'", said)
    if unknown is not None:
        meant = checks.meant(unknown[1], [*free, *named]) or f" There are {', '.join([*free, *named])}."
        return f"{who}: there is no argument {unknown[1]}.{meant}"
    if " positional argument" in said and " given" in said:
        without = ", ".join(free) or "none"
        return f"{who}: arguments without a name: {without}. Write the names of the others: {', '.join(named)}."
    return f"{who}: {said.partition('() ')[2]}."


def _tell_torchelastic(error: BaseException) -> None:
    """Write the file from which torchrun prints the failure. Ignores a missing folder.

    The file's times are whole seconds, so if several ranks fail together, torchrun blames the lowest rank. Therefore
    ranks that only lost another rank write nothing. A user's mistake isn't written either, because it was printed
    without a traceback.
    """
    if is_consequence(error) or isinstance(error, EvenstepError):
        return
    with contextlib.suppress(Exception):
        try:
            raise error  # keeps the traceback of the handled exception
        except BaseException:
            get_error_handler().record_exception(error)


def _real_stderr() -> TextIO:
    # `init_process_group` wraps the existing hook: while that hook runs, a buffer replaces stderr, and the buffer is
    # written only if the hook returns. Evenstep's hook doesn't return, so its output would be lost.
    return sys.__stderr__ if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None else sys.stderr


def _suggestion(error: BaseException) -> str:
    """Python's "Did you mean", which before 3.12 only python's own excepthook adds."""
    if sys.version_info >= (3, 12) or not isinstance(error, NameError | AttributeError):
        return ""
    with contextlib.redirect_stderr(io.StringIO()) as shown:
        sys.__excepthook__(type(error), error, error.__traceback__)
    _, found, meant = shown.getvalue().rstrip().rpartition("\n")[2].rpartition(". Did you mean: ")
    return found + meant if found else ""


def _without_machinery(tb: TracebackType | None) -> TracebackType | None:
    # A rank forked from the launcher also has the launcher's caller on its stack.
    tb = next((frame for frame in _steps(tb) if frame.tb_frame.f_code.co_filename == _WORKER), tb)
    return next((frame for frame in _steps(tb) if not _is_machinery(frame.tb_frame.f_code.co_filename)), tb)


def _steps(tb: TracebackType | None) -> Iterator[TracebackType]:
    while tb is not None:
        yield tb
        tb = tb.tb_next


def _is_machinery(path: str) -> bool:
    return path.startswith("<frozen importlib") or any(part in path for part in _MACHINERY)


def _where_the_user_called(tb: TracebackType | None) -> str:
    """The innermost frame of the user's code: not of evenstep, an installed package or python itself."""
    where = ""
    for frame in traceback.extract_tb(_without_machinery(tb)):
        if is_users(frame.filename):
            where = f"{frame.filename}, line {frame.lineno}, in {frame.name}"
    return where
