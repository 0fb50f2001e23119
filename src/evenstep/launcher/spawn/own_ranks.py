"""Refuses scripts that start their own ranks, as with `torch.multiprocessing.spawn`, before the first rank starts.

Otherwise each of two ranks would start two more, which would rendezvous at one port and fail, or wait for each other.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any

from evenstep.errors import ConfigurationError
from evenstep.ground.health.users_code import is_users

_JOINS = "init_process_group"


def refuse_own_ranks() -> None:
    """From now on raise a `ConfigurationError` when the script starts a process that would join a process group."""
    start = BaseProcess.start

    @functools.wraps(start)
    def start_no_rank(process: Any) -> None:
        # torch's `spawn` starts its own function, whose first argument is the script's function.
        for function in (process._target, *process._args[:1]):
            if joins_a_group(function):
                script, name = sys.argv[0], getattr(function, "__name__", "its function")
                raise ConfigurationError(
                    f"{script} starts its own ranks: processes in which {name} calls {_JOINS}. Start it with `python "
                    f"{script}`. Or change it to call {name} once, with the environment variable LOCAL_RANK as the "
                    f"rank and WORLD_SIZE as the number of ranks: evenstep starts the ranks."
                )
        start(process)

    BaseProcess.start = start_no_rank  # type: ignore[method-assign, assignment]


def joins_a_group(function: object) -> bool:
    """Whether a function, or any function in the user's files that it uses, names `init_process_group`. Pure."""
    waiting: list[Any] = [function]
    known: set[int] = set()
    while waiting:
        each = waiting.pop()
        if isinstance(each, types.MethodType):
            waiting.append(each.__self__ if isinstance(each.__self__, type) else type(each.__self__))
        while isinstance(each, functools.partial | types.MethodType | staticmethod | classmethod):
            each = each.func if isinstance(each, functools.partial) else each.__func__
        each = getattr(each, "__wrapped__", each) if isinstance(each, types.FunctionType) else each
        if id(each) in known:
            continue
        known.add(id(each))
        if isinstance(each, type):
            waiting += vars(each).values()
        elif isinstance(each, types.FunctionType):
            names = set(_names(each.__code__))
            if _JOINS in names:
                return True
            if is_users(each.__code__.co_filename):
                found = [each.__globals__[name] for name in names if name in each.__globals__]
                modules = [thing for thing in found if isinstance(thing, types.ModuleType)]
                waiting += found + [vars(module)[name] for module in modules for name in names if name in vars(module)]
    return False


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)
