"""Replicas are compared when a run has ended well, however short it was."""

from __future__ import annotations

import copy
import time
import warnings

import pytest
import torch
from torch import nn

import evenstep
from evenstep.errors import DriftError, MismatchError


def ends(seed: int, kind: str) -> list[str]:
    """A run of four steps, behind which ranks do different things. Returns warnings on comparisons."""
    with warnings.catch_warnings(record=True) as caught:
        run_to_its_end(seed, kind)
    return [str(each.message) for each in caught if "not compared" in str(each.message)]


def run_to_its_end(seed: int, kind: str) -> None:
    with evenstep.init(quiet=True) as world:
        warnings.simplefilter("always")  # behind `init`, which has ranks other than 0 show none
        torch.manual_seed(seed)
        model = evenstep.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
        parameters = list(model.parameters())
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters[:2], lr=0.01)
        second = torch.optim.SGD(parameters[2:], lr=0.01)
        if kind == "sharded":
            optimizer = second = evenstep.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01)
        for number in range(4):
            model.zero_grad()
            model.backward(model(torch.randn(3, 4)).mean(), weight=3)
            if kind == "a random step on one rank" and number == 2 and world.rank == 1:
                parameters[0].grad.add_(0.5)
            optimizer.step()
            second.step()
        if kind == "local steps at the end":
            with model.no_sync():
                model(torch.randn(3, 4)).mean().backward()
            optimizer.step()
            second.step()
        if kind == "another model's steps":
            for _ in range(3):
                torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1).step()
        if kind == "a parameter set by hand on one rank" and world.rank == 1:
            parameters[0].data.mul_(1.5)  # unseen by versions, as faulty memory is
        if kind == "the best weights on rank 0" and world.rank == 0:
            model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
        if kind == "the best weights on rank 0, and a probe" and world.rank == 0:
            model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
            probe = nn.Parameter(torch.zeros(1))
            probe.grad = torch.ones(1)
            torch.optim.SGD([probe], lr=0.1).step()
        if kind == "a copy on one rank":
            copied = copy.deepcopy(model) if world.rank == 0 else None
            later = evenstep.DistributedDataParallel(nn.Linear(4, 1))
            step = torch.optim.SGD(later.parameters(), lr=0.1)
            later(torch.randn(3, 4)).mean().backward()
            step.step()
            if copied is not None:
                with torch.no_grad():
                    next(copied.parameters()).add_(1)
                torch.optim.SGD(copied.parameters(), lr=0.1).step()
        if kind == "quantised on rank 0" and world.rank == 0:
            with torch.no_grad():
                parameters[0].round_()
        if kind == "a rank that stays away" and world.rank == 0:
            world.before_close.clear()
            time.sleep(1)
        if kind == "a longer loop" and world.rank == 1:
            world.exchange("of its next step")
        if kind == "a rank that ends by an exception" and world.rank == 1:
            raise ValueError("its own")


@pytest.mark.extended(beyond=2)
@pytest.mark.parametrize("nproc", [2, 3])
@pytest.mark.parametrize("kind", ["a random step on one rank", "a parameter set by hand on one rank"])
def test_replicas_that_differ_at_the_end_are_an_error_on_all_ranks(ranks, fresh_seed, nproc, kind):
    """A step with another gradient on one rank, and memory that changed, in a run that no window's comparison sees."""
    with pytest.raises(DriftError, match="noticed at the end of the run") as error:
        ranks.run(ends, nproc, fresh_seed, kind)
    assert error.value.exit_code == 73
    assert "0.weight" in str(error.value)
    assert nproc == 2 or "rank 1 differs" in str(error.value)


@pytest.mark.extended(beyond=4)
@pytest.mark.parametrize(
    "kind",
    [
        "nothing",
        "sharded",
        "local steps at the end",
        "another model's steps",
        "the best weights on rank 0",
        "the best weights on rank 0, and a probe",
        "a copy on one rank",
        "quantised on rank 0",
    ],
)
def test_what_changed_since_the_last_step_is_not_compared(ranks, fresh_seed, kind):
    assert ranks.run(ends, 2, fresh_seed, kind) == [[], []]


def test_a_rank_that_does_not_come_is_a_warning(ranks, fresh_seed, monkeypatch):
    started = time.monotonic()
    first, second = ranks.run(ends, 2, fresh_seed, "a rank that stays away")
    assert first == []
    assert len(second) == 1
    assert time.monotonic() - started < 60


def test_a_call_of_a_longer_loop_is_told_whose_loop_has_ended(ranks, fresh_seed):
    with pytest.raises(MismatchError, match=r"rank 0: the end of the loop.*rank 1: an exchange.*shorter on some ranks"):
        ranks.run(ends, 2, fresh_seed, "a longer loop")


def test_after_an_exception_nothing_is_compared(ranks, fresh_seed):
    with pytest.raises(ValueError, match="its own"):
        ranks.run(ends, 2, fresh_seed, "a rank that ends by an exception")
