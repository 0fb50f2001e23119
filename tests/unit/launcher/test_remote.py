from __future__ import annotations

import sys

import pytest

from evenstep.errors import ConfigurationError
from evenstep.launcher.spawn.remote import pack_answer, pack_call


def test_without_cloudpickle_a_closure_is_refused_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'evenstep\[notebook\]'"):
        pack_call(lambda: None, (), {})


def test_an_argument_that_cannot_be_sent_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="can't be sent"):
        pack_call(max, (sys._getframe(),), {})


def test_a_result_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(TypeError, match="returned a frame that can't be sent"):
        pack_answer(sys._getframe())
