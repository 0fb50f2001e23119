"""How a world ends: all of it is closed, whatever fails; groups over NCCL are given up after a failure."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import evenstep
from evenstep import joining
from evenstep import world as worlds
from evenstep.errors import UsageError


@pytest.mark.parametrize(
    ("transport", "adopted", "given_up"), [("nccl", None, 1), ("nccl", "the script's", 0), ("gloo", None, 0)]
)
def test_who_made_a_group_ends_it(
    monkeypatch: pytest.MonkeyPatch, transport: str, adopted: str | None, given_up: int
) -> None:
    left = SimpleNamespace(transport_name=transport, _adopted_group=adopted, close=lambda: None)
    calls: list[None] = []
    monkeypatch.setattr(worlds, "abandoned", [left])
    monkeypatch.setattr(joining, "_give_up_nccl", lambda: calls.append(None))
    assert not dist.is_initialized()
    with evenstep.init(quiet=True, device="cpu"):
        assert worlds.abandoned == []
    assert len(calls) == given_up


@pytest.mark.parametrize(("code", "is_well"), [(None, True), (0, True), (3, False), ("a text", False)])
def test_a_block_that_leaves_by_sys_exit_has_ended_well_if_its_status_is_0(code: object, is_well: bool) -> None:
    told: list[BaseException | None] = []
    with pytest.raises(SystemExit), evenstep.init(quiet=True, device="cpu") as world:  # noqa: PT012
        world.at_end(told.append)
        sys.exit(code)
    assert [each is None for each in told] == [is_well]
    worlds.close_abandoned()


def test_what_fails_at_the_end_keeps_nothing_from_being_closed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []

    def fails(what: str) -> Callable[..., None]:
        def call(*_: object) -> None:
            calls.append(what)
            raise OSError(what)

        return call

    def end(error: BaseException | None) -> None:
        with evenstep.init(quiet=True, device="cpu", seed=0) as world:
            monkeypatch.setattr(world.transport, "close", fails("transport"))
            world._on_close[:0] = [fails("first"), lambda: calls.append("second")]
            world.at_end(fails("checkpoint"))
            world.at_end(lambda given: calls.append(f"logger {given!r}"))
            if error is not None:
                raise error

    hook = sys.excepthook
    with pytest.raises(OSError, match=r"^transport$"):
        end(None)
    assert calls == ["transport", "first", "second", "checkpoint", "logger None"]
    assert sys.excepthook is hook
    told = capsys.readouterr().err.splitlines()
    assert told == ["evenstep: then also OSError: first", "evenstep: then also OSError: checkpoint"]
    del calls[:]
    with pytest.raises(OSError, match=r"^checkpoint$") as caught:
        end(ZeroDivisionError())
    assert isinstance(caught.value.__context__, ZeroDivisionError)
    assert calls == ["checkpoint", "logger ZeroDivisionError()"]
    with pytest.raises(OSError, match=r"^transport$"):
        worlds.close_abandoned()
    assert calls[2:] == ["transport", "first", "second"]
    assert worlds.abandoned == []
    assert sys.excepthook is hook


def test_training_behind_the_block_is_a_mistake_and_an_evaluation_is_none() -> None:
    with evenstep.init(quiet=True, device="cpu") as world:
        model = evenstep.DistributedDataParallel(nn.Linear(2, 1))
    inputs = torch.ones(3, 2)
    ends: list[Callable[[], object]] = [
        model(inputs).sum().backward,
        lambda: model.backward(model(inputs).sum()),
        lambda: world.mean(1.0),
        world.barrier,
    ]
    for late in ends:
        with pytest.raises(
            UsageError, match=r"^rank 0: the world of evenstep.init has ended.*test_joining.py:\d+ in test_"
        ):
            late()
    assert model(inputs).shape == (3, 1)


@pytest.mark.parametrize("arguments", [{}, {"seed": 5}, {"timeout_s": 7.5}])
def test_init_behind_a_constructor_would_be_ignored_and_is_an_error(arguments: dict[str, Any]) -> None:
    loader = evenstep.DataLoader(torch.utils.data.TensorDataset(torch.ones(4)), global_batch_size=2)
    assert not loader.world.is_initialised
    try:
        with pytest.raises(
            UsageError, match=r"too late, DataLoader has made a world of one .*loader\.world\.close\(\)"
        ):
            evenstep.init(quiet=True, device="cpu", **arguments)
    finally:
        loader.world.close()
    with evenstep.init(quiet=True, device="cpu", **arguments) as world:
        assert world is not loader.world


def test_what_was_closed_is_not_kept_until_the_end_of_the_world(tmp_path: Path) -> None:
    with evenstep.init(quiet=True, device="cpu", seed=0) as world:
        model = evenstep.DistributedDataParallel(nn.Linear(2, 2))
        checkpoint = evenstep.Checkpointer(tmp_path / "checkpoints", model=model)
        logger = evenstep.Logger(tmp_path / "log")
        left = [weakref.ref(each) for each in (model, checkpoint, logger)]
        checkpoint.close()
        logger.close()
        del model, checkpoint, logger
        gc.collect()
        assert [each() for each in left] == [None, None, None]
        world.cancel_at_end(print)  # which it was never given
