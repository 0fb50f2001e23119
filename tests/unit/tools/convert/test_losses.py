"""Numbers: what is one of a batch alone, what is a mean of samples, and what an evaluation may divide."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.tools.convert.test_convert import HEAD, LOOP, after, converted, why_not
from tests.unit.tools.convert.test_rightness import WEIGHTED, evaluation, notes

LOSS = "nn.functional.mse_loss(model(x), y)"
PAIRS = "compared with all others"
STATISTIC = "each rank computes this statistic inside the loss from its own part of the batch"


def with_loss(loss: str, *, before: str = "", head: str = "") -> str:
    return f"{head}{HEAD}" + LOOP.replace(f"        loss = {LOSS}\n", f"{before}        loss = {loss}\n")


# ---------------------------------------------------------------------- pairs


@pytest.mark.parametrize(
    "loss",
    [
        "torch.cdist(z, model.weight).mean()",  # the model's own
        "(z @ model.weight.T).mean()",
        "nn.functional.cross_entropy(z @ model.weight, y.long())",
    ],
)
def test_samples_beside_what_the_model_keeps_are_no_pairs(loss: str, tmp_path: Path):
    assert WEIGHTED in after(tmp_path, with_loss(loss, before="        z = model(x)\n"))


@pytest.mark.parametrize(
    "loss",
    [
        "(z @ model(y).T).mean()",
        "(z @ z.T).logsumexp(1).mean()",
        "torch.cdist(z, z).amax(1).mean()",
        "nn.CrossEntropyLoss()(z, torch.arange(len(x)))",
        "(z[:, None] - z[None]).square().amin(1).mean()",
        "nn.functional.cosine_similarity(z.unsqueeze(1), z.unsqueeze(0), dim=-1).mean()",
    ],
)
def test_samples_beside_samples_are_pairs(loss: str, tmp_path: Path):
    assert PAIRS in why_not(tmp_path, with_loss(loss, before="        z = model(x)\n"))


@pytest.mark.parametrize("metric", ["torch.cdist(p, p).amax(1).mean()", "((p - p.mean(0)) / p.std(0)).square().mean()"])
def test_an_evaluation_of_samples_beside_each_other_is_whole(metric: str, tmp_path: Path):
    found = converted(
        tmp_path, evaluation(f"total += {metric}.item()", before="total = 0.0\n", behind="print(total)\n")
    )
    assert "test = DataLoader(data, batch_size=8)\n" in found.after
    assert any("what total adds up isn't understood" in note.text for note in found.notes)


# ---------------------------------------------------------------------- statistics


@pytest.mark.parametrize(
    ("loss", "is_marked"),
    [
        ("(p / p.max()).mean()", True),
        ("nn.functional.mse_loss(torch.softmax(p, dim=0), y)", True),
        ("nn.functional.binary_cross_entropy_with_logits(p, y, pos_weight=(y == 0).sum() / y.sum())", True),
        ("(p - p.max(1, keepdim=True)[0]).mean()", False),
        ("nn.functional.mse_loss(p, y).mean()", False),
        ("nn.functional.mse_loss(torch.max(p, y), y)", False),
    ],
)
def test_statistics_of_a_batch_inside_a_loss_are_marked(loss: str, is_marked: bool, tmp_path: Path):
    assert (STATISTIC in notes(tmp_path, with_loss(loss, before="        p = model(x)\n"))) is is_marked


# ---------------------------------------------------------------------- means and sums


def test_one_random_factor_leaves_a_mean_a_mean(tmp_path: Path):
    """Mixup."""
    head = "import numpy as np\n"
    loss = f"lam * {LOSS} + (1 - lam) * nn.functional.mse_loss(model(x), b)"
    drawn = (
        "        lam = np.random.beta(1.0, 1.0)\n        b = y.flip(0)\n        x = lam * x + (1 - lam) * x.flip(0)\n"
    )
    text = with_loss(loss, before=drawn, head=head) + "        print(loss.data[0])\n"
    found = converted(tmp_path, text)
    assert WEIGHTED in found.after
    assert "world.print(world.mean(loss.data[0], weight=loader.num_samples))" in found.after
    assert not found.notes


def test_a_sum_that_goes_on_over_epochs_is_added_up_step_by_step(tmp_path: Path):
    """Added up behind each epoch, the first epoch's would count several times."""
    text = after(tmp_path, f"{HEAD}seen = 0\n{LOOP}        seen += len(x)\n    print(seen)\n")
    assert "seen += sum(world.exchange(len(x)))" in text
    assert "seen = sum(" not in text
