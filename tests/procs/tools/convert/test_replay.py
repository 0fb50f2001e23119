"""A converted script beside the script as it was, on one rank: the same batches, weights and random numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from evenstep.cli.main import main
from evenstep.errors import UsageError
from evenstep.tools.convert.convert import convert
from evenstep.tools.convert.replay import Replay, replay

SCRIPT = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(150, 4), torch.randn(150, 1))
loader = DataLoader(data, batch_size=16, shuffle=True)
print(next(iter(DataLoader(data, batch_size=5)))[0].shape)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(9):
    for x, y in loader:
        style = 0.0
        for weight in (1, 2):
            part = weight * nn.functional.l1_loss(model(x + 0.1 * torch.randn_like(x)), y)
            style += part
        loss = nn.functional.mse_loss(model(x), y) + style
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@pytest.fixture
def replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Replay]:
    def run(*changes: tuple[str, str], before: str = SCRIPT) -> Replay:
        monkeypatch.chdir(tmp_path)
        Path("script.py").write_text(before)
        text = convert("script.py").after
        for old, new in changes:
            assert text.count(old) == 1
            text = text.replace(old, new)
        Path("converted.py").write_text(text)
        return replay("script.py", "converted.py", [], say=print)

    return run


@pytest.mark.extended
def test_a_script_without_a_seed_is_compared_to_the_end_of_its_epoch(replayed: Callable[..., Replay]):
    """150 samples are 10 batches, of which the first four and the last one reach the loop."""
    assert replayed() == Replay(num_steps=5, differences=(), epoch_steps=10)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("style += part", "style += world.mean(part.detach())"), "step 1: the gradient differs by"),
        pytest.param(
            ("lr=0.1", "lr=0.2"),
            "step 1: the change of the weights differs by",
            marks=pytest.mark.extended,
        ),
        pytest.param(
            ("optimizer.step()", "optimizer.step() if len(x) > 6 else None"),
            "the script makes 5 steps with these batches, the converted one 4",
            marks=pytest.mark.extended,
        ),
        pytest.param(
            ("DataLoader(data, g", "DataLoader(torch.utils.data.Subset(data, [k % 99 for k in range(150)]), g"),
            "51 samples",
            marks=pytest.mark.extended,
        ),
        pytest.param(
            ("global_batch_size=16, shuffle=True)\n", "global_batch_size=16, shuffle=True, drop_last=True)\n"),
            "144 samples",
            marks=pytest.mark.extended,
        ),
    ],
)
def test_what_another_script_does_is_told(change: tuple[str, str], says: str, replayed: Callable[..., Replay]):
    seeded = SCRIPT.replace("data =", "torch.manual_seed(0)\ndata =")
    (difference, *_) = replayed(change, before=seeded).differences
    assert says in difference


def test_a_script_that_fails_is_told_so(replayed: Callable[..., Replay]):
    with pytest.raises(
        UsageError, match=r"script.py in one process failed with status 1(.|\n)*ZeroDivisionError"
    ) as told:
        replayed(before=SCRIPT.replace("style = 0.0", "1 / 0"))
    assert "replay.py" not in str(told.value)


@pytest.mark.extended
def test_a_conversion_that_fails_is_told_by_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """What ran is a file that isn't there any more, so that neither its name nor a traceback helps."""
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(f"{SCRIPT}print(loader.batch_sampler.batch_size)\n".replace("range(9)", "range(0)"))
    assert main(["convert", "script.py", "--verify"]) == 1
    err = capsys.readouterr().err
    assert "converted, it fails at `world.print(loader.batch_sampler.batch_size)`: AttributeError: 'NoneType'" in err
    assert "Traceback" not in err
    assert "_converted_" not in err
