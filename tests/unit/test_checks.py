"""What an argument may be, and what ranks say of each other's."""

from __future__ import annotations

import pytest
import torch

from evenstep import checks
from evenstep.errors import ConfigurationError, MismatchError, OtherRankFailedError, UsageError
from evenstep.ground.coordination.agreement import judge, validate_on_all_ranks

numpy = pytest.importorskip("numpy")
NAN, INF = float("nan"), float("inf")
NO_NUMBERS = (None, "3", b"3", [], [1], {}, object(), torch.ones(2), 1j, True, numpy.bool_(True), int)


@pytest.mark.parametrize("value", [*NO_NUMBERS, 2.0, 0, 8])
def test_no_whole_number_from_1_to_7(value):
    with pytest.raises(ConfigurationError, match=r"^Who: what=.*; a whole number from 1 to 7, or None for all.$"):
        checks.whole("Who: what", value, least=1, most=7, otherwise="None for all")


@pytest.mark.parametrize("value", [*NO_NUMBERS, NAN, 0.0, 2, 10**400])
def test_no_number_between_0_and_2(value):
    with pytest.raises(ConfigurationError, match=r"^x=.*; a number, greater than 0 and less than 2.$"):
        checks.number("x", value, above=0, below=2)


class Unshowable:
    def __repr__(self):
        raise RuntimeError


def test_values_are_shown_in_one_short_line():
    assert checks.shown(Unshowable()) == "a Unshowable"
    assert checks.shown(torch.zeros(50, 50)).count("\n") == 0
    assert len(checks.shown("x" * 5000)) <= 60


def said(what="Loader", kind="", problem="", **facts):
    return {"what": what, "kind": kind, "problem": problem, "facts": facts}


def test_a_problem_of_one_rank_is_named_and_that_of_all_is_nobodys():
    wrong = said(kind="UsageError", problem="too late.")
    one, everybody = judge([said(), said(), wrong]), judge([wrong, wrong])
    assert isinstance(one, UsageError)
    assert str(one) == "Loader on rank 2: too late."
    assert str(everybody) == "Loader: too late."


def test_the_first_difference_is_told_with_both_values():
    error = judge([said(size=3, seed=1), said(size=3, seed=1), said(size=3, seed=2)])
    assert isinstance(error, MismatchError)
    assert str(error).startswith("Loader: seed is 1 on rank 0 and 2 on rank 2. Pass the same")
    assert "size is None on rank 0 and 4 on rank 1" in str(judge([said(), said(size=4)]))
    assert "rank 0 is at Loader, and rank 1 at Checkpointer" in str(judge([said(), said("Checkpointer")]))


def test_what_the_users_own_code_raises_is_kept_on_its_rank_and_said_on_the_others():
    class OfTwo:
        world_size = 2
        told = None

        def exchange(self, value):
            self.told = self.told or value
            return [said(), self.told]

    def broken():
        raise KeyError("image")

    ranks = OfTwo()
    with pytest.raises(KeyError, match="image"):
        validate_on_all_ranks(ranks, "Loader", broken)
    with pytest.raises(OtherRankFailedError, match=r"^Loader on rank 1: KeyError: 'image'$") as caught:
        validate_on_all_ranks(ranks, "Loader", dict)
    assert caught.value.is_consequence
