"""What a loss hangs on beside its batch: what earlier batches left, code that isn't read, the batch's size."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.tools.convert.test_convert import HEAD, LOOP, after, converted, why_not
from tests.unit.tools.convert.test_rightness import WEIGHTED, notes

LOSS = "        loss = nn.functional.mse_loss(model(x), y)\n"
STEP = "        optimizer.step()\n"


def loop(loss: str, behind: str = "", before: str = "") -> str:
    """A script with another loss, lines before its loops and behind the step of each round."""
    text = LOOP.replace(LOSS, "".join(f"        {line}\n" for line in loss.splitlines()))
    return HEAD + before + text.replace(STEP, STEP + "".join(f"        {line}\n" for line in behind.splitlines()))


HISTORY = """\
class History:
    def __init__(self):
        self.data = []

    def push(self, rows):
        self.data.extend(rows)
        return torch.stack(self.data[-8:])
history = History()
"""
CENTERED = """\
class Centered(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(1))

    def forward(self, out):
        loss = (out - self.center).pow(2).mean()
        self.update(out.detach())
        return loss

    def update(self, out):
        self.center = 0.9 * self.center + 0.1 * out.mean(0)
criterion = Centered()
"""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "center",
            loop(
                "out = model(x)\nloss = nn.functional.mse_loss(out - center, y)",
                "center = 0.9 * center + 0.1 * out.detach().mean(0)",
                "center = torch.zeros(1)\n",
            ),
        ),
        (
            "center",
            loop(
                "out = model(x)\nif epoch:\n    center = 0.9 * center + 0.1 * out.detach().mean(0)\nelse:\n"
                "    center = out.detach().mean(0)\nloss = nn.functional.mse_loss(out - center, y)",
            ),
        ),
        (
            "queue",
            loop(
                "out = model(x)\nqueue.append(out.detach())\nloss = (out - torch.stack(queue).mean()).pow(2).mean()",
                before="queue = []\n",
            ),
        ),
        (
            "bank",
            loop(
                "out = model(x)\nloss = (out - bank.mean()).pow(2).mean()",
                "bank[:16] = out.detach()",
                "bank = torch.zeros(64, 1)\n",
            ),
        ),
        ("self.data", loop("out = model(x)\nloss = (out - history.push(out.detach())[0]).pow(2).mean()", "", HISTORY)),
        ("self.center", loop("loss = criterion(model(x))", "", CENTERED)),
    ],
)
def test_what_batches_leave_behind_is_of_each_rank(name: str, text: str, tmp_path: Path):
    said = f"each rank keeps its own {name}, made of its own samples: use world.mean or world.gather before it is kept"
    assert said in notes(tmp_path, text)
    assert f"# evenstep convert: {said}\n" in after(tmp_path, text)


@pytest.mark.parametrize(
    "text",
    [
        loop("out = model(x)\nouts = []\nouts.append(out)\nloss = (torch.stack(outs)[0] - y).pow(2).mean()"),
        loop("loss = nn.functional.mse_loss(model(x), y)", "shown = 0.9 * shown + 0.1 * loss.item()", "shown = 0\n"),
        loop(
            "try:\n    x = next(other)\nexcept StopIteration:\n    x = y\nx = x.float()\n"
            "w = x.mean()\nif epoch:\n    w = w * 2\nloss = (w * model(x) - y).pow(2).mean()"
        ),
        loop("out = model(x)\nloss = (out - y).pow(2).mean()\nloss = loss + out.pow(2).mean()"),
    ],
)
def test_what_begins_anew_with_each_batch_or_is_no_part_of_a_loss_is_not_said_to_be_kept(text: str, tmp_path: Path):
    assert not [each for each in notes(tmp_path, text) if "keeps" in each]


@pytest.mark.parametrize("made", ["self.rows = nn.Parameter({})", "self.register_buffer('rows', {})"])
def test_a_parameter_with_a_row_for_each_sample_is_refused(made: str, tmp_path: Path):
    made = made.format("torch.randn(batch_size, 4)")
    own = f"""\
class Net(nn.Module):
    def __init__(self, batch_size):
        super().__init__()
        {made}
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x + self.rows)
"""
    text = HEAD + own + LOOP.replace("nn.Linear(4, 1)", "Net(16)")
    reason = "this has a row for each sample of a whole batch, and a rank has fewer samples: give it the shape (1, ...)"
    assert reason in why_not(tmp_path, text)
    assert converted(tmp_path, text).problems[0].line == 9
    assert WEIGHTED in after(
        tmp_path, HEAD + own.replace("batch_size", "width") + LOOP.replace("nn.Linear(4, 1)", "Net(16)")
    )
