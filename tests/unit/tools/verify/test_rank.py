"""What one rank of `evenstep verify` records of a script's steps, in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from evenstep.tools.observing.models import digest
from evenstep.tools.observing.patching import Patches
from evenstep.tools.observing.record import Recorder
from evenstep.tools.verify.evidence import Plan, Run, read_run
from evenstep.tools.verify.rank import Steps

DATA = TensorDataset(torch.arange(24.0).reshape(12, 2), torch.ones(12, 1))


def recorded(
    directory: Path, script: Callable[[], object], *, num_steps: int = 2, skipped: tuple[int, ...] = ()
) -> Run:
    """What is recorded of a function that trains, as if this file were the script."""
    plan = Plan(str(directory), num_steps, 1, skipped=skipped, script=__file__)
    with Patches() as patches:
        Recorder(Steps(plan, 0, patches)).install(patches)
        with pytest.raises(SystemExit):
            script()
    return read_run(directory, 1)


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(Path(__file__).read_text().splitlines(), 1) if text in line)


def train(scale: float = 1.0, *, accumulate: int = 1, fused: bool = False) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, backoff_factor=2.0**-60, enabled=scale != 1.0)
    for number, (x, y) in enumerate(DataLoader(DATA, batch_size=2), 1):
        hidden = checkpoint(model[0], x, use_reentrant=False)
        out = model[1:](hidden)
        scaler.scale(F.mse_loss(out, y) / accumulate).backward()  # the pass
        if number % accumulate == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_is_recorded_whole(tmp_path: Path, accumulate: int) -> None:
    run = recorded(tmp_path, lambda: train(accumulate=accumulate))
    first, second = (step[0] for step in (run.at(0), run.at(1)))
    assert run.num_steps == 2
    # The first layer is called by `checkpoint`, and again in the backward pass: that is no forward.
    assert [len(rows) for rows in first.rows] == [2, 0] * accumulate
    samples = [digest(row) for row in DATA.tensors[0]]
    assert first.rows[0] == samples[:2]
    assert first.loaded == samples[: 2 * accumulate]
    assert second.loaded == samples[2 * accumulate : 4 * accumulate]
    assert len(first.losses) == len(first.graphs) == accumulate
    assert first.settings[0]["lr"] == 1e-4
    assert len(first.dropouts) == accumulate
    assert first.digests["grad/0.weight" if "grad/0.weight" in first.digests else "grad/weight"]
    assert (first.skipped, first.draws, first.held_back) == ([], False, False)
    assert first.batch_sizes == [2]
    probes = run.probes(0, 0)
    added = sum(probes[str(number)] for number in range(accumulate))
    torch.testing.assert_close(added, probes["applied"], rtol=1e-5, atol=1e-8)
    assert set(probes) == {"applied", *map(str, range(accumulate))}


def test_lines_of_the_script_are_recorded(tmp_path: Path) -> None:
    lines = recorded(tmp_path, train).at(1)[0].lines
    assert {file for file, _ in lines.values()} == {__file__}
    assert lines["loss"][1] == line_of("# the pass")
    assert lines["loader"][1] == line_of("in enumerate(DataLoader(")
    assert lines["model"][1] == line_of("out = model[1:]")
    assert lines["optimizer"][1] == line_of("scaler.step(optimizer)")


def test_a_loss_is_recorded_without_the_factor_of_a_scaler(tmp_path: Path) -> None:
    plain, scaled = tmp_path / "plain", tmp_path / "scaled"
    for each in (plain, scaled):
        each.mkdir()
    (without,) = recorded(plain, train).at(0)[0].losses
    (same,) = recorded(scaled, lambda: train(64.0)).at(0)[0].losses
    assert same == (pytest.approx(without[0]), None)


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_scaler_skips_are_recorded_and_can_be_skipped_again(fused: bool, tmp_path: Path) -> None:
    """A scale under which the loss is infinite: a call makes no step. A fused optimizer is called all the same."""
    overflowing, again = tmp_path / "overflowing", tmp_path / "again"
    for each in (overflowing, again):
        each.mkdir()
    run = recorded(overflowing, lambda: train(2.0**127, fused=fused))
    assert run.skipped == [1]
    replayed = recorded(again, train, skipped=(1,))
    assert replayed.skipped == []
    assert replayed.at(1)[0].loaded == [digest(row) for row in DATA.tensors[0][2:6]], "two batches in one step"
