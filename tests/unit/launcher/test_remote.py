from __future__ import annotations

import pickle
import sys

import pytest

from evenstep.errors import ConfigurationError, RankFailedError
from evenstep.launcher.pool.remote import pack_answer, pack_call, unpack_call


class TwoArguments(Exception):
    """Pickles, and can't be unpickled: its constructor takes more than its message."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} {second}")


def at_the_top(x: int, y: int = 0) -> int:
    return x + y


def test_a_function_of_a_module_travels_by_name() -> None:
    data = pack_call(at_the_top, (1,), {"y": 2})
    assert len(data) < 200
    fn, args, kwargs = unpack_call(data)
    assert fn is at_the_top
    assert fn(*args, **kwargs) == 3


def test_a_closure_travels_by_value() -> None:
    offset = 5
    fn, args, kwargs = unpack_call(pack_call(lambda x: x + offset, (1,), {}))
    assert fn(*args, **kwargs) == 6


def test_without_cloudpickle_a_closure_is_refused_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'evenstep\[notebook\]'"):
        pack_call(lambda: None, (), {})


def test_an_argument_that_cannot_be_sent_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="can't be sent"):
        pack_call(at_the_top, (sys._getframe(),), {})


def test_exceptions_travel_if_they_survive_it() -> None:
    assert pickle.loads(pack_answer(RankFailedError("x", rank=3, exitcode=-9))).rank == 3
    with pytest.raises(TypeError, match="can't be sent"):
        pack_answer(TwoArguments(1, 2))


def test_a_result_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(TypeError, match="returned a frame that can't be sent"):
        pack_answer(sys._getframe())
