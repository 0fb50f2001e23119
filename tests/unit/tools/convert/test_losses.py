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
        "(z[:, None] - model.weight[None]).square().mean()",
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
        "torch.pdist(z).mean()",
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
        ("torch.topk((p - y).square(), 4)[0].mean()", True),
        ("(p - p.max(1, keepdim=True)[0]).mean()", False),
        ("nn.functional.mse_loss(torch.softmax(p, dim=1), y)", False),
        ("nn.functional.mse_loss(nn.functional.normalize(p), y)", False),
        ("nn.functional.mse_loss(p, y).mean()", False),
        ("nn.functional.mse_loss(torch.max(p, y), y)", False),
    ],
)
def test_statistics_of_a_batch_inside_a_loss_are_marked(loss: str, is_marked: bool, tmp_path: Path):
    assert (STATISTIC in notes(tmp_path, with_loss(loss, before="        p = model(x)\n"))) is is_marked


def test_a_statistic_in_a_models_forward_pass_is_marked_as_what_it_may_be(tmp_path: Path):
    net = "class Net(nn.Linear):\n    def forward(self, x):\n        return super().forward(x - x.mean(0))\n"
    text = HEAD + net + LOOP.replace("nn.Linear(4, 1)", "Net(4, 1)")
    assert f"{STATISTIC}, if it is over samples" in notes(tmp_path, text)


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


def test_a_name_is_what_it_was_before_its_own_line(tmp_path: Path):
    text = with_loss("loss * 2", before=f"        loss = {LOSS}\n")
    assert not notes(tmp_path, text)


def test_what_a_loop_gives_is_no_constant(tmp_path: Path):
    body = "parts = [p.mean(), y.mean()]\n    for part in parts:\n        total += part.item()"
    found = converted(tmp_path, evaluation(body, before="total = 0.0\n", behind="print(total)\n"))
    assert any("every rank evaluates all of this" in note.text for note in found.notes)


def test_a_sum_that_goes_on_over_epochs_is_added_up_step_by_step(tmp_path: Path):
    """Added up behind each epoch, the first epoch's would count several times."""
    text = after(tmp_path, f"{HEAD}seen = 0\n{LOOP}        seen += len(x)\n    print(seen)\n")
    assert "seen += sum(world.exchange(len(x)))" in text
    assert "seen = sum(" not in text


def test_a_loss_is_weighted_for_the_models_that_it_goes_through(tmp_path: Path):
    more = LOOP.replace(
        "optimizer =", "other = nn.Linear(4, 1)\nother_optimizer = torch.optim.SGD(other.parameters())\noptimizer ="
    )
    more += (
        "        loss = nn.functional.mse_loss(other(x), y)\n        loss.backward()\n        other_optimizer.step()\n"
    )
    text = after(tmp_path, HEAD + more)
    assert f"        {WEIGHTED}\n" in text
    assert "        other.backward(loss, weight=loader.num_samples)\n" in text
