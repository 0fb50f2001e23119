"""Nothing that is converted is wrong in silence: weights, metrics, looks, gradients, files, devices."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.tools.convert.test_convert import HEAD, LOOP, after, converted, why_not

WEIGHTED = "model.backward(loss, weight=loader.num_samples)"


def notes(tmp_path: Path, text: str) -> list[str]:
    found = converted(tmp_path, text)
    assert not found.problems, found.problems
    return [note.text for note in found.notes]


def evaluation(body: str, *, before: str = "", behind: str = "") -> str:
    """A script whose evaluation has a body."""
    loop = "test = DataLoader(data, batch_size=8)\nmodel.eval()\nfor x, y in test:\n    p = model(x)\n"
    return f"{HEAD}{before}{LOOP}{loop}    {body}\n{behind}"


# ---------------------------------------------------------------------- what a batch weighs


@pytest.mark.parametrize(
    ("target", "loss"),
    [
        ("batch", "model(batch['x']).pow(2).mean()"),  # its length is the number of keys
        ("batch", "sum(model(images).mean() for images in batch[0]) / 2"),  # of images, the channels
        ("x, y", "nn.functional.mse_loss(model(x.transpose(0, 1)), y.transpose(0, 1))"),  # time comes first
        ("i, (x, y)", "nn.functional.mse_loss(model(x), y)"),
    ],
)
def test_the_loader_counts_the_samples_of_a_batch(target: str, loss: str, tmp_path: Path):
    text = HEAD + LOOP.replace("for x, y in loader", f"for {target} in loader")
    text = text.replace("nn.functional.mse_loss(model(x), y)", loss)
    if target.startswith("i,"):
        text = text.replace("in loader:", "in enumerate(loader):")
    assert WEIGHTED in after(tmp_path, text)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("x, y in loader:", "(x, y), (z, _) in zip(loader, other):"), "the loader of this batch has no name here"),
        (("in loader:", "in list(loader):"), "no torch DataLoader of this file"),
        (("model(x)", "model(x + torch.randn(16, 4))"), "torch.randn(16, 4) expects a whole batch"),
    ],
)
def test_batches_that_nobody_counts_are_refused(change: tuple[str, str], reason: str, tmp_path: Path):
    text = LOOP.replace(*change)
    if "zip" in change[1]:
        text = text.replace("model(x)", "model(x) + model(z)")
    assert reason in why_not(tmp_path, f"{HEAD}size = 16\nother = DataLoader(data, batch_size=4)\n{text}")


def test_a_loop_that_cuts_its_batch_is_refused(tmp_path: Path):
    body = "        for part in x.split(4):\n            loss = model(part).mean()\n            loss.backward()\n"
    text = LOOP.replace("        loss.backward()\n", body)
    assert "cuts its batch into parts" in why_not(tmp_path, HEAD + text)
    over_time = body.replace("x.split(4)", "range(x.size(1))").replace("part)", "x)")
    assert "weight=loader.num_samples" in after(tmp_path, HEAD + LOOP.replace("        loss.backward()\n", over_time))


def test_a_generator_that_reads_ahead_is_refused(tmp_path: Path):
    """The loader has counted the next batch by then."""
    loop = LOOP.replace("in loader:", "in ahead(loader):")
    plain = "def ahead(batches):\n    for batch in batches:\n        yield batch\n"
    converted = after(tmp_path, HEAD + plain + loop)
    assert WEIGHTED in converted
    assert "    for batch in batches:\n" in converted  # of this rank's part: it isn't a loop that evaluates
    kept = "def ahead(batches):\n    kept = None\n    for batch in batches:\n        if kept:\n            yield kept\n"
    kept += "        kept = batch\n    yield kept\n"
    assert "no torch DataLoader of this file" in why_not(tmp_path, HEAD + kept + loop)


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        ("measure(model(x), y)", "is taken to be the mean over the batch's samples"),
        (
            "nn.functional.mse_loss(model(x) - model(x).mean(0, keepdim=True), y)",
            "each rank computes this statistic inside the loss from its own part",
        ),
    ],
)
def test_a_loss_that_may_be_another_on_a_part_of_a_batch_is_marked(loss: str, says: str, tmp_path: Path):
    text = "from measures import measure\n" + HEAD + LOOP.replace("nn.functional.mse_loss(model(x), y)", loss)
    assert any(says in note for note in notes(tmp_path, text))
    assert re.search(f"# evenstep convert: .*{re.escape(says)}", after(tmp_path, text))


# ---------------------------------------------------------------------- gradients


# ---------------------------------------------------------------------- evaluations


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("metric.add_batch(p, y)", "metric.add_batch is given results of samples"),
        ("score = metric(p, y)", "convert doesn't see whether metric(...) keeps what it is given"),
        ("table[p.argmax(), y] += 1", "what table[p.argmax(), y] adds up isn't understood"),
        ("meter.update(nn.functional.mse_loss(p, y).item(), len(x))", "is given results of samples"),
        ("for a, b in zip(p, y): hits += 1", "it goes through samples one by one"),
        ("if (p == y).all(): hits += 1", "what it does depends on samples"),
        ("hits += measure(p, y)", "what hits adds up isn't understood"),
        ("last = p", "last is read behind the loop"),
    ],
)
def test_an_evaluation_is_divided_only_where_every_use_is_understood(body: str, reason: str, tmp_path: Path):
    head = "from measures import Meter, measure\nmetric, meter, table, hits = Meter(), Meter(), {}, 0\n"
    text = evaluation(body, before=head, behind="print(metric, meter, table, hits, last)\n")
    found = converted(tmp_path, text)
    assert "test = DataLoader(data, batch_size=8)\n" in found.after
    assert any("every rank evaluates all of this" in each.text and reason in each.text for each in found.notes)


def test_an_evaluation_of_sums_and_means_is_divided(tmp_path: Path):
    body = "right += (p.argmax(1) == y).sum().item(); n += len(x); total += nn.functional.mse_loss(p, y).item()"
    text = after(tmp_path, evaluation(body, before="right, n, total = 0, 0, 0.0\n", behind="print(right / n, total)\n"))
    assert "test = evenstep.DataLoader(data, global_batch_size=8)" in text
    assert "total += world.mean(nn.functional.mse_loss(p, y).item(), weight=test.num_samples)" in text
    assert "right = sum(world.exchange(right))" in text or "right += sum(world.exchange(" in text


# ---------------------------------------------------------------------- what a training loop shows


@pytest.mark.parametrize(
    ("line", "becomes"),
    [
        ("print(i * len(x), loss.item())", "print(sum(world.exchange(i * len(x))), world.mean(loss.item(), "),
        ("meter.update(loss.item(), x.size(0))", ", weight=loader.num_samples), sum(world.exchange(x.size(0))))"),
        ("show(f'{i}: {loss:.3f}')", "show(f'{i}: {world.mean(loss, weight=loader.num_samples):.3f}')"),
        (
            "log.info(f'{i}: {loss:.3f}')",
            "loss = world.mean(loss, weight=loader.num_samples)\n        if world.is_main:\n            log.info(f'",
        ),
        ("losses.append(loss.item())", "losses.append(world.mean(loss.item(), weight=loader.num_samples))"),
        ("total += loss.item() * x.size(0)", "total += sum(world.exchange(loss.item() * x.size(0)))"),
    ],
)
def test_numbers_of_a_training_loop_are_those_of_all_ranks(line: str, becomes: str, tmp_path: Path):
    head = "from bars import bar, meter, log, show\nlosses, total = [], 0.0\n"
    loop = LOOP.replace("for x, y in loader", "for i, (x, y) in enumerate(loader)")
    text = after(tmp_path, HEAD + head + loop + f"        {line}\n        print(total)\n")
    assert becomes in text


@pytest.mark.parametrize(
    "line", ["print(measure(model(x), y))", "metric.update(model(x), y)", "meter.update(measure(x), len(x))"]
)
def test_numbers_that_are_rank_0s_alone_are_marked(line: str, tmp_path: Path):
    head = "from measures import measure, metric, meter\n"
    text = after(tmp_path, HEAD + head + LOOP + f"        {line}\n")
    assert "# evenstep convert: " in text
    assert "from rank 0's samples alone" in text


def test_a_count_beside_a_sum_that_is_not_understood_stays_one_ranks_own(tmp_path: Path):
    """Their quotient is one of the same samples."""
    counts = (
        "        right += 0.5 * measure(model(x), y)\n        n += len(x)\n    print('%.2f (%d)' % (right / n, n))\n"
    )
    text = after(tmp_path, f"from measures import measure\n{HEAD}right, n = 0.0, 0\n{LOOP}{counts}")
    assert "exchange" not in text
    assert "# evenstep convert: right, n: from rank 0's samples alone" in text


def test_a_mean_whose_weight_is_of_another_batch_by_then_is_marked(tmp_path: Path):
    loop = LOOP.replace("mse_loss(model(x), y)", "cross_entropy(model(x), y, ignore_index=9)")
    shows = "print(f'{loss.item()}')\n"
    assert "{world.mean(loss.item(), weight=(y != 9).sum())}" in after(tmp_path, f"{HEAD}{loop}    {shows}")
    other = "for x, y in test:\n    worst = model(x).max().item()\n"
    text = f"{HEAD}test = DataLoader(data, batch_size=8)\n{loop}{other}{shows.replace('()}', '()} {worst}')}"
    assert "loss.item(): from rank 0's samples alone" in notes(tmp_path, text)


def test_what_ranks_do_by_their_own_samples_is_the_same_or_marked(tmp_path: Path):
    """A learning rate that differs between ranks, or a step that one of them leaves out."""
    head = "from schedules import scheduler\n"
    text = after(tmp_path, f"{HEAD}{head}{LOOP}        scheduler.step(loss)\n")
    assert "scheduler.step(world.mean(loss, weight=loader.num_samples))" in text
    skips = LOOP.replace("        optimizer.zero_grad()\n", "        if torch.isnan(loss):\n            continue\n", 1)
    assert "each rank decides this from its own samples, so ranks may differ" in notes(tmp_path, HEAD + skips)
    known = LOOP + "        if loss.item() > 3 or x is None:\n            break\n"
    assert not notes(tmp_path, HEAD + known)
    squeezed = LOOP.replace("model(x)", "model(x).squeeze()")
    assert any(
        note.startswith("squeeze() removes the dimension of samples") for note in notes(tmp_path, HEAD + squeezed)
    )


# ---------------------------------------------------------------------- programs that start, and go on


@pytest.mark.parametrize("line", ["train = random_split(data, [32, 32])[0]", "train = load()"])
def test_ranks_are_seeded_before_anything_may_draw(line: str, tmp_path: Path):
    head = "from torch.utils.data import DataLoader, TensorDataset, random_split\nimport torch\nfrom torch import nn\n"
    head += "from files import data, load\n"
    text = after(tmp_path, f"{head}{line}\n{LOOP.replace('DataLoader(data', 'DataLoader(train')}")
    assert text.index("evenstep.init(") < text.index(line)


def test_a_function_of_another_file_gets_the_model_itself(tmp_path: Path):
    text = "from evaluation import evaluate, loss_of\n" + HEAD + LOOP
    assert "evaluate(model.module, 3)" in after(tmp_path, text + "    evaluate(model, 3)\n")
    text = text.replace("nn.functional.mse_loss(model(x), y)", "loss_of(model, x, y)")
    assert any("loss_of gets the wrapped model" in note for note in notes(tmp_path, text))
    assert "torch.save(model.module, 'a.pt')" in after(tmp_path, f"{HEAD}{LOOP}torch.save(model, 'a.pt')\n")


def test_names_and_kinds_of_a_model_are_those_of_the_module(tmp_path: Path):
    """In the wrapper every name begins with "module.", so a group of parameters chosen by name would be empty."""
    text = LOOP.replace("model.parameters()", "[p for n, p in model.named_parameters() if n.startswith('weight')]")
    text = after(tmp_path, HEAD + text + "    print(isinstance(model, nn.Linear), hasattr(model, 'bias'))\n")
    assert "for n, p in model.module.named_parameters() if" in text
    assert "world.print(isinstance(model.module, nn.Linear), hasattr(model.module, 'bias'))" in text


# ---------------------------------------------------------------------- seeds, devices, files


def test_seeds_of_the_command_line_decide_the_order(tmp_path: Path):
    head = "import argparse\nargs = argparse.ArgumentParser().parse_args()\ntorch.manual_seed(args.seed)\n"
    text = after(tmp_path, HEAD + head + LOOP)
    assert "torch.manual_seed(args.seed)\nworld.seed = torch.initial_seed()  # of the loaders' orders\n" in text
    assert "shuffle=True)\n" in text  # a loader that is made later would read a generator that ranks have used


@pytest.mark.parametrize(
    ("lines", "is_drawn"),
    [
        ("torch.manual_seed(random.randint(1, 10000))", True),
        ("if a.seed is None:\n    a.seed = numpy.random.randint(9)\ntorch.manual_seed(int(a.seed))", True),
        ("torch.manual_seed(a.seed)\nwhere = random.randint(1, 9)", False),
    ],
)
def test_a_seed_that_is_drawn_is_said_to_be_the_same_in_every_run(lines: str, is_drawn: bool, tmp_path: Path):
    head = f"import random\nimport numpy\nfrom options import a\n{lines}\n"
    said = "a seed that is drawn is the same in every run now: choose one in evenstep.init"
    assert notes(tmp_path, HEAD + head + LOOP) == [said] * is_drawn
    assert (f"# evenstep convert: {said}\ntorch.manual_seed(" in after(tmp_path, HEAD + head + LOOP)) == is_drawn


def test_every_rank_has_its_own_device(tmp_path: Path):
    head = "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '0'\ndevice = 0\n"
    head += "name = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
    head += "place = torch.device('cuda:1') if torch.cuda.is_available() else torch.device('cpu')\n"
    text = after(tmp_path, f"import torch\n{head}{HEAD}{LOOP.replace('model(x)', 'model(x.to(device))')}")
    assert "name = world.device.type\nplace = world.device\n" in text
    assert "CUDA_VISIBLE_DEVICES" not in text
    assert "device = world.device" in text


def test_what_every_rank_would_do_with_a_writer_is_refused(tmp_path: Path):
    head = "from torch.utils.tensorboard import SummaryWriter\nwriter = SummaryWriter()\nfolder = writer.log_dir\n"
    assert "rank 0 alone has a writer" in why_not(tmp_path, HEAD + head + LOOP + "writer.close()\n")


def test_log_files_and_writers_of_the_scripts_own_are_rank_0s(tmp_path: Path):
    head = """\
import logging
from torch.utils.tensorboard import SummaryWriter
handler = logging.FileHandler('a.log')
logging.basicConfig(filename='b.log')

class Board(SummaryWriter):
    pass

board = Board('runs')
"""
    text = after(tmp_path, HEAD + head + LOOP + "        board.add_scalar('loss', loss.item())\n")
    assert "logging.FileHandler('a.log' if world.is_main else \"/dev/null\")" in text
    assert "filename='b.log' if world.is_main else \"/dev/null\"" in text
    assert "board = Board('runs') if world.is_main else None" in text
    assert "if world.is_main:\n            board.add_scalar" in text


@pytest.mark.parametrize(
    ("imports", "model"),
    [
        ("from torch import nn", "nn.Linear(4, 1)"),
        ("import models", "models.__dict__['net']()"),
        ("from models import Net", "nn.Sequential(Net(), nn.Linear(4, 1))"),
        ("from torch import hub", "torch.hub.load('some', 'net')"),
        ("norm = nn.BatchNorm1d", "nn.Sequential(norm(4), nn.Linear(4, 1))"),
    ],
)
def test_a_model_that_may_have_a_batch_norm_gets_that_of_all_ranks(imports: str, model: str, tmp_path: Path):
    text = HEAD.replace("from torch import nn\n", f"from torch import nn\n{imports}\n") + LOOP
    text = after(tmp_path, text.replace("nn.Linear(4, 1)", model))
    assert model in text
    assert ("SyncBatchNorm" in text) is (model != "nn.Linear(4, 1)")


@pytest.mark.parametrize(
    "loss",
    [
        "(model(x) - y).square().sum() + model.weight.square().sum()",
        "1 - 2 * (model(x) * y).sum() / (model(x).sum() + y.sum())",
        "((model(x) - y).abs() * (y > 0)).sum() / (y > 0).sum().clamp(min=1)",
        "((model(x) - y).abs() * (y > 0)).sum() / ((y > 0).sum() + 1e-6)",
    ],
)
def test_a_loss_that_no_weight_makes_right_is_marked(loss: str, tmp_path: Path):
    text = after(tmp_path, HEAD + LOOP.replace("nn.functional.mse_loss(model(x), y)", loss))
    assert "the loss is taken to be the mean over the batch's samples" in text
