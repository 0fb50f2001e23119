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


@pytest.mark.parametrize("value", [*NO_NUMBERS, 2.0, NAN, 0, 8, -1])
def test_no_whole_number_from_1_to_7(value):
    with pytest.raises(ConfigurationError, match=r"^Who: what=.*; a whole number from 1 to 7, or None for all.$"):
        checks.whole("Who: what", value, least=1, most=7, otherwise="None for all")


@pytest.mark.parametrize("value", [3, numpy.int64(3), torch.tensor(3)])
def test_whole_numbers_become_pythons(value):
    assert type(checks.whole("x", value, least=3)) is int


@pytest.mark.parametrize("value", [*NO_NUMBERS, NAN, INF, 0.0, -1, 2, 10**400])
def test_no_number_between_0_and_2(value):
    with pytest.raises(ConfigurationError, match=r"^x=.*; a number, greater than 0 and less than 2.$"):
        checks.number("x", value, above=0, below=2)


def test_numbers_may_be_infinite_where_that_is_meant():
    assert checks.number("x", INF, least=0, finite=False) == INF
    assert checks.number("x", torch.tensor(1.5)) == 1.5
    with pytest.raises(ConfigurationError, match="a finite number"):
        checks.number("x", INF)
    with pytest.raises(ConfigurationError, match="at least 0 and at most 1"):
        checks.number("x", 1.01, least=0, most=1)


@pytest.mark.parametrize("value", ["yes", None, 2, 1.0, [], torch.tensor(True), NAN])
def test_no_switches(value):
    with pytest.raises(ConfigurationError, match=r"^x=.*; True or False.$"):
        checks.switch("x", value)


def test_switches_choices_texts_and_functions():
    assert [checks.switch("x", value) for value in (True, 0, numpy.bool_(True))] == [True, False, True]
    checks.switches("", otherwise="None", a=None, b=True)
    with pytest.raises(ConfigurationError, match=r"^Who: b=None; True or False.$"):
        checks.switches("Who: ", a=True, b=None)
    for value in ("c", None, 5, []):
        with pytest.raises(ConfigurationError, match=r"; 'a' or 'b'.$"):
            checks.choice("x", value, ("a", "b"))
    for value in ("", None, 5, b"a"):
        with pytest.raises(ConfigurationError, match=r"; a text.$"):
            checks.text("x", value)
    for value in (None, 5, "f"):
        with pytest.raises(ConfigurationError, match=r"; a function.$"):
            checks.function("x", value)


class Unshowable:
    def __repr__(self):
        raise RuntimeError


def test_values_are_shown_in_one_short_line():
    assert checks.shown(Unshowable()) == "a Unshowable"
    assert checks.shown(torch.zeros(50, 50)).count("\n") == 0
    assert len(checks.shown("x" * 5000)) <= 60


def said(what="Loader", kind="", problem="", **facts):
    return {"what": what, "kind": kind, "problem": problem, "facts": facts}


def test_ranks_that_agree_say_nothing():
    assert judge([said(size=3), said(size=3)]) is None


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


def test_one_rank_alone_asks_nobody():
    class Alone:
        world_size = 1
        exchange = None

    validate_on_all_ranks(Alone(), "Loader", dict)

    def wrong():
        raise ConfigurationError("Loader: size=0.")

    with pytest.raises(ConfigurationError, match=r"^Loader: size=0.$"):
        validate_on_all_ranks(Alone(), "Loader", wrong)


def test_what_the_users_own_code_raises_is_kept_on_its_rank_and_said_on_the_others():
    """A mistake keeps its cause, too."""

    class OfTwo:
        world_size = 2

        def __init__(self):
            self.said = None

        def exchange(self, value):
            self.said = self.said or value
            return [said(), self.said]

    def broken():
        raise KeyError("image")

    ranks = OfTwo()
    with pytest.raises(KeyError, match="image") as caught:
        validate_on_all_ranks(ranks, "Loader", broken)
    assert caught.traceback[-1].name == "broken"
    with pytest.raises(OtherRankFailedError, match=r"^Loader on rank 1: KeyError: 'image'$") as caught:
        validate_on_all_ranks(ranks, "Loader", dict)
    assert caught.value.is_consequence

    def wrong():
        raise ConfigurationError("no length") from TypeError("no number")

    with pytest.raises(ConfigurationError, match=r"^Loader on rank 1: no length$") as caught:
        validate_on_all_ranks(OfTwo(), "Loader", wrong)
    assert isinstance(caught.value.__cause__, TypeError)
