"""Tests that run on ranks: the body of one is called on each of them, with the rank's world."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

import evenstep

Test = TypeVar("Test", bound=Callable[..., object])


def on_ranks(*sizes: int) -> Callable[[Test], Test]:
    """Run a test on so many ranks, one size after the other.

    Its first parameter is `world`, of the rank; `nproc` may be another. All arguments are sent to the ranks.
    """

    def marked(test: Test) -> Test:
        return pytest.mark.usefixtures("ranks")(pytest.mark.on_ranks(*sizes)(test))

    return marked


def call_on_rank(test: Callable[..., object], given: dict[str, Any]) -> None:
    """On a rank."""
    test(world=evenstep.init(quiet=True), **given)
