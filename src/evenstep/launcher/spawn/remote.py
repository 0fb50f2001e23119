"""Functions that a parent process runs on its ranks: the messages of both, and the rank's side.

Messages are pickled, and sent over pipes between this process and its children: no bytes from the network or from disk
are read.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing import spawn
from multiprocessing.connection import Connection
from typing import Any

from evenstep import checks
from evenstep.errors import ConfigurationError
from evenstep.ground.health.excepthook import describe
from evenstep.ground.health.first_failure import CrashReport


@dataclass(frozen=True)
class Task:
    """One call.

    Attributes:
        preparation: In a rank's first task, multiprocessing's data for importing the parent's `__main__`.
    """

    call: bytes
    wants_result: bool
    preparation: dict[str, Any] | None


@dataclass(frozen=True)
class Answer:
    """A rank's answer.

    Attributes:
        value: The packed result or exception; None if the parent doesn't need it or it can't be sent.
        report: The report of the rank's exception; None: the call succeeded.
    """

    value: bytes | None
    report: CrashReport | None = None


def serve(descriptor: int, rank: int) -> None:
    """Run one task after the other until the parent closes the pipe or a task fails. In the rank."""
    os.set_inheritable(descriptor, False)
    connection: Connection[Answer, Task] = Connection(descriptor)
    while True:
        try:
            task = connection.recv()
        except (EOFError, OSError):
            return
        answer = _perform(task, rank)
        try:
            connection.send(answer)
        except OSError:
            return
        if answer.report is not None:
            # Close sockets only now, after the report: peers that notice the broken connections then report after this
            # rank.
            raise SystemExit(answer.report.exit_code)


def _perform(task: Task, rank: int) -> Answer:
    try:
        if task.preparation is not None:
            _import_main(task.preparation)
        fn, args, kwargs = unpack_call(task.call)
        try:
            result = fn(*args, **kwargs)
        except SystemExit as error:
            if error.code:
                raise
            result = None
        return Answer(pack_answer(result) if task.wants_result else None)
    except BaseException as error:
        report, exception = CrashReport.of(error, rank=rank, traceback=describe(error)), None
        if isinstance(error, SystemExit):
            # `sys.exit(3)` on a rank must not end the parent: the parent raises a RankFailedError with its text.
            report = replace(report, exit_code=error.code if isinstance(error.code, int) else 1)
        else:
            with contextlib.suppress(TypeError):
                exception = pack_answer(error)
        return Answer(exception, report)


def _import_main(preparation: dict[str, Any]) -> None:
    process: Any = multiprocessing.current_process()
    # Starting processes during the import would recurse without end: the pool's `_refuse_while_importing`.
    process._inheriting = True
    try:
        spawn.prepare(preparation)
    finally:
        del process._inheriting


def pack_call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Pack a call as bytes that a rank can load.

    Functions of importable modules are sent by name. Lambdas, functions inside functions, and functions typed into a
    notebook or passed to `python -c` are sent by value, which needs cloudpickle.

    Raises:
        ConfigurationError: cloudpickle is needed and not installed, or an argument can't be sent.
    """
    call = (fn, tuple(args), dict(kwargs))
    problem: Exception | None = None
    try:
        data = pickle.dumps(call)
        if not (b"__main__" in data and not main_is_importable()):
            return data
    except Exception as error:
        # The object's own pickling may raise any exception, and cloudpickle may still succeed.
        problem = error
    name = getattr(fn, "__qualname__", repr(fn))
    try:
        cloudpickle = importlib.import_module("cloudpickle")
    except ImportError:
        raise ConfigurationError(
            f"{name} can't be imported by the ranks: it is a lambda, a function inside a function, or was typed into a "
            f"notebook or `python -c`. Put it at the top level of a file. As it is, "
            + checks.needs("it", "cloudpickle", "notebook")
            + (f" ({problem})" if problem is not None else "")
        ) from None
    try:
        by_value: bytes = cloudpickle.dumps(call)
    except Exception as error:
        raise ConfigurationError(f"{name} or one of its arguments can't be sent to the ranks: {error}") from error
    return by_value


def unpack_call(data: bytes) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The inverse of `pack_call`."""
    fn, args, kwargs = pickle.loads(data)
    return fn, args, kwargs


def pack_answer(value: Any) -> bytes:
    """Pack a result or an exception as bytes. Tensors are sent by value: the caller would have to free shared memory.

    Raises:
        TypeError: The value can't be sent, or couldn't be restored, such as an exception with its own constructor.
    """
    cloudpickle = sys.modules.get("cloudpickle")  # a rank has imported it only if the call was sent by value
    problems = []
    for dumps in [pickle.dumps] if cloudpickle is None else [pickle.dumps, cloudpickle.dumps]:
        try:
            data: bytes = dumps(value)
            if isinstance(value, BaseException):
                pickle.loads(data)
            return data
        except Exception as error:  # another library's __reduce__ or __init__ may raise anything
            problems.append(str(error))
    raise TypeError(f"the function returned a {type(value).__name__} that can't be sent to the parent: {problems[0]}")


def main_is_importable() -> bool:
    """Whether a spawned child can import this process's `__main__`."""
    main = sys.modules.get("__main__")
    if getattr(main, "__spec__", None) is not None:
        return True
    path = getattr(main, "__file__", None)
    return path is not None and not path.startswith("<")
