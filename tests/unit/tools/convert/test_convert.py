"""Converting scripts in this process: what is changed, what is left, and what is refused."""

from __future__ import annotations

import os
import re
import textwrap
from pathlib import Path

import pytest

from evenstep.cli.main import main
from evenstep.errors import ConfigurationError
from evenstep.tools.convert.convert import Conversion, convert
from tests import pages

SCRIPTS = sorted((Path(__file__).parents[3] / "scripts" / "single").glob("*.py"))
REFUSED = {
    "contrastive": (21, "each sample is compared with all others of its batch"),
    "masked_sequences": (22, "iter(...) takes a whole batch, and this loader is divided over ranks"),
    "sliced_tensors": (17, "no torch DataLoader of this file gives this loss its batches"),
    "triplets": (26, "each sample is compared with all others of its batch"),
    "unnamed_loader": (20, "the loader of this batch has no name here"),
}
QUICK = {"plain_loop", "contrastive", "tqdm_bars"}  # the others with `make test-all`
IN_PART = [
    pytest.param(path, id=path.stem, marks=() if path.stem in QUICK else (pytest.mark.extended,)) for path in SCRIPTS
]
HEAD = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
"""
LOOP = """\
loader = DataLoader(data, batch_size=16, shuffle=True)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def converted(tmp_path: Path, text: str) -> Conversion:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(text))
    return convert(str(path))


def after(tmp_path: Path, text: str) -> str:
    found = converted(tmp_path, text)
    assert not found.problems, found.problems
    return found.after


def why_not(tmp_path: Path, text: str) -> str:
    found = converted(tmp_path, text)
    assert found.after == found.before
    assert len(found.problems) == 1, found.problems
    return found.problems[0].text


# ---------------------------------------------------------------------- the scripts of the corpus


def test_the_corpus_is_as_large_as_it_has_to_be():
    assert len(SCRIPTS) >= 30
    assert len(SCRIPTS) - len(REFUSED) >= 22


@pytest.mark.parametrize("script", IN_PART)
def test_converting_twice_changes_nothing_and_comments_stay(script: Path, tmp_path: Path):
    found = convert(str(script))
    if script.stem in REFUSED:
        assert [(each.line, each.text[:40]) for each in found.problems] == [
            (REFUSED[script.stem][0], REFUSED[script.stem][1][:40])
        ]
        assert found.after == found.before
        return
    assert not found.problems
    compile(found.after, script.name, "exec")
    comments = [line.strip() for line in found.before.splitlines() if line.strip().startswith("#")]
    assert all(comment in found.after for comment in comments)
    assert not any(line != line.rstrip() for line in found.after.splitlines())
    again = tmp_path / script.name
    again.write_bytes(found.content)
    second = convert(str(again))
    assert second.by == "evenstep"
    assert second.after == found.after


# ---------------------------------------------------------------------- what is changed


@pytest.mark.parametrize(
    ("loss", "backward"),
    [
        ("nn.functional.mse_loss(model(x), y)", "model.backward(loss, weight=loader.num_samples)"),
        ("nn.functional.mse_loss(model(x), y, reduction='sum')", "(loss * world.world_size).backward()"),
        ("((model(x) - y) ** 2).mean(0).sum()", "model.backward(loss, weight=loader.num_samples)"),
        ("((model(x) - y).abs() * (y > 0)).sum() / (y > 0).sum()", "weight=(y > 0).sum())"),
        ("nn.functional.cross_entropy(model(x).view(-1, 4), y.view(-1))", "weight=(y.view(-1) != -100).sum())"),
        ("((model(x) - y) ** 2).sum() / x.size(0)", "model.backward(loss, weight=loader.num_samples)"),
        ("((model(x) - y) ** 2).mean(dim=1).sum()", "(loss * world.world_size).backward()"),
        ("nn.functional.cross_entropy(model(x), y, ignore_index=-1)", "model.backward(loss, weight=(y != -1).sum())"),
        (
            "nn.functional.mse_loss(model(x), y) + 1e-4 * sum(p.pow(2).sum() for p in model.parameters())",
            "model.backward(loss, weight=loader.num_samples)",
        ),
    ],
)
def test_losses_are_weighted_by_what_they_were_averaged_over(loss: str, backward: str, tmp_path: Path):
    text = after(tmp_path, HEAD + LOOP.replace("nn.functional.mse_loss(model(x), y)", loss))
    assert backward in text


def test_only_rank_0_prints_writes_and_shows(tmp_path: Path):
    text = after(
        tmp_path,
        HEAD.replace("import torch\n", "import torch\nimport os, json, wandb\nfrom tqdm import tqdm\n", 1)
        + "os.mkdir('out')\nwandb.init(project='a', mode='online')\n"
        + LOOP.replace("in loader:", "in tqdm(loader):")
        + "    print('loss', loss.item(), flush=True)\n"
        + "    wandb.log({'loss': loss.item()})\n"
        + "    with open('log.json', 'w') as file:\n        json.dump({}, file)\n"
        + "    torch.save(model.state_dict(), 'a.pt')\n",
    )
    assert "os.makedirs('out', exist_ok=True)" in text
    assert "wandb.init(project='a', mode='online' if world.is_main else \"disabled\")" in text
    assert "tqdm(loader, disable=not world.is_main)" in text
    assert "world.print('loss', world.mean(loss.item(), weight=loader.num_samples))" in text
    assert "wandb.log({'loss': world.mean(loss.item(), weight=loader.num_samples)})" in text  # on every rank
    assert "with open('log.json' if world.is_main else \"/dev/null\", 'w') as file:" in text
    assert "        torch.save(model.module.state_dict(), 'a.pt')\n" in text
    line = "torch.save(model.state_dict(), 'a.pt'); steps = 1\n"
    assert "rank 0 alone calls torch.save: give it a line of its own" in why_not(tmp_path, HEAD + LOOP + line)


def test_what_all_ranks_compute_is_computed_outside_of_a_guard(tmp_path: Path):
    """`if writer:` holds on rank 0 alone, so a mean over ranks inside of it would wait for ever."""
    text = after(
        tmp_path,
        HEAD.replace(
            "from torch import nn\n", "from torch import nn\nfrom torch.utils.tensorboard import SummaryWriter\n"
        )
        + "writer = SummaryWriter()\n"
        + LOOP
        + "        if writer:\n            if epoch: writer.add_scalar('loss', loss, epoch)\n",
    )
    assert "writer = SummaryWriter() if world.is_main else None" in text
    assert "mean_loss = world.mean(loss, weight=loader.num_samples)\n        if writer:" in text
    assert "writer.add_scalar('loss', mean_loss, epoch)" in text


def test_sums_are_multiplied_as_a_whole(tmp_path: Path):
    loss = "loss = nn.functional.mse_loss(model(x), y, reduction='sum')"
    script = HEAD + LOOP.replace("loss = nn.functional.mse_loss(model(x), y)", f"{loss}\n        other = loss")
    text = after(tmp_path, script.replace("loss.backward()", "(loss + other).backward()"))
    assert "((loss + other) * world.world_size).backward()" in text


NAMED_LOSSES = (
    HEAD
    + """\
sums, n = {"mse": 0.0, "l1": 0.0}, 0
"""
    + LOOP.replace(
        "loss = nn",
        "losses = {'mse': nn.functional.mse_loss(model(x), y), 'l1': (model(x) - y).abs().mean()}\n        loss = nn",
    )
)
NAMED_LOSSES += """\
        for name, value in losses.items():
            sums[name] += value.item() * len(x)
        n += len(x)
print({name: value / n for name, value in sums.items()})
"""


def test_numbers_weighted_by_the_batch_are_added_up_beside_their_count(tmp_path: Path):
    """Both or none: a sum of this rank over a count of all would be half of what it was."""
    text = after(tmp_path, NAMED_LOSSES)
    assert "sums[name] += sum(world.exchange(value.item() * len(x)))" in text
    assert "n += sum(world.exchange(len(x)))" in text or "n = sum(world.exchange(n))" in text
    text = after(tmp_path, NAMED_LOSSES.replace("value.item() * len(x)", "measure(value, x)"))
    assert "exchange" not in text
    assert "what sums[name] adds up isn't understood" in text


def test_what_rank_0_alone_would_compute_is_refused(tmp_path: Path):
    """The other ranks would wait for rank 0, and never call it."""
    body = textwrap.indent(LOOP, "    ")
    show = "print('best', run(), file=sys.stderr)\n"
    reason = why_not(tmp_path, f"import sys\n{HEAD}def run():\n{body}    return 3\n\n{show}")
    assert reason.startswith("rank 0 alone runs this, and run(...) needs all ranks: call it in a line before")


@pytest.mark.parametrize(("encoding", "newline"), [("latin-1", "\n"), ("utf-8-sig", "\r\n")])
def test_encodings_line_ends_and_tabs_stay(newline: str, encoding: str, tmp_path: Path):
    cookie = "" if encoding == "utf-8-sig" else f"# -*- coding: {encoding} -*-\n"
    text = f"{cookie}{HEAD}# größer\n{LOOP}".replace("    ", "\t").replace("\n", newline)
    path = tmp_path / "train.py"
    path.write_bytes(text.encode(encoding))
    found = convert(str(path))
    assert found.content.decode(encoding) == found.after.lstrip("\ufeff")
    assert "# größer" in found.after
    assert "\t\tmodel.backward(loss, weight=loader.num_samples)" in found.after
    assert found.after.count("\n") == found.after.count(newline)
    compile(found.content, "train.py", "exec")


def test_the_weight_of_a_loss_in_a_function_is_said_in_the_callers_words(tmp_path: Path):
    masked = "def masked(a, b):\n    return None, nn.functional.cross_entropy(a, b, ignore_index=-1)\n"
    loss = LOOP.replace("loss = nn.functional.mse_loss(model(x), y)", "_, loss = masked(model(x), y.view(-1))")
    assert "model.backward(loss, weight=(y.view(-1) != -1).sum())" in after(tmp_path, HEAD + masked + loss)


def test_batches_of_a_generator_are_counted(tmp_path: Path):
    endless = "def endless(batches):\n    while True:\n        yield from batches\n"
    text = LOOP.replace("for x, y in loader:", "for x, y in endless(loader):")
    assert "model.backward(loss, weight=loader.num_samples)" in after(tmp_path, HEAD + endless + text)


def test_ranks_draw_other_noise_for_their_samples(tmp_path: Path):
    """The script's own seed is the same on all ranks."""
    line = "torch.manual_seed(torch.initial_seed() + world.rank)  # other noise on each rank"
    function = "def noise(x):\n    return torch.randn_like(x)\n"
    for noisy in ("x + torch.randn_like(x)", "x + noise(x)"):
        assert re.search(
            rf"{re.escape(line)}\nfor epoch in",
            after(tmp_path, HEAD + function + LOOP.replace("model(x)", f"model({noisy})")),
        )
    assert "other noise" not in after(tmp_path, HEAD + function + "start = noise(torch.ones(3))\n" + LOOP)
    drawn = "for _ in range(9):\n    drawn = torch.rand(2, generator=g)\n"  # the same on all ranks
    assert "other noise" not in after(tmp_path, f"{HEAD}g = torch.Generator()\n{drawn}{LOOP}")


# ---------------------------------------------------------------------- what is refused

STEPPING = """\
class Stepping(nn.Linear):
    def __init__(self):
        super().__init__(4, 1)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)


"""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("loss.backward()", "pass"), "no training loop"),
        (("torch.optim.SGD(model.parameters(), lr=0.1)", "torch.optim.LBFGS(model.parameters())"), "LBFGS"),
        (("batch_size=16, ", ""), "a batch of one sample can't be divided"),
        (
            ("batch_size=16", "**options"),
            "**options passes arguments to DataLoader that convert doesn't see: write them out in the call "
            "(batch_size=...)",
        ),
        (("in loader:", "in batches:"), "no torch DataLoader of this file"),
        (("model(x)", "model.score(x)"), "isn't the model's forward pass"),
        (("loss.backward()", "loss.backward(torch.ones(1))"), "the loss has to be one number"),
        (("torch.optim.SGD(model.parameters(), lr=0.1)", "None"), "no torch optimizer"),
        (("torch.optim.SGD(model.parameters(), lr=0.1)", "torch.optim.SGD(groups)"), "it isn't clear which model"),
        (
            (
                "model = nn.Linear(4, 1)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
                f"{STEPPING}model = Stepping()\noptimizer = model.optimizer",
            ),
            "the model Stepping makes its own optimizer",
        ),
    ],
)
def test_what_cannot_be_converted_is_left_with_the_reason(change: tuple[str, str], reason: str, tmp_path: Path):
    text = LOOP.replace(*change).replace("model =", "from data import get_loader\nbatches = get_loader()\nmodel =")
    assert reason in why_not(tmp_path, HEAD + text)


@pytest.mark.parametrize(
    ("line", "by"),
    [
        ("import evenstep", "evenstep"),
        ("import torch.distributed as dist", "torch.distributed"),
        ("from torch.nn.parallel import DistributedDataParallel as DDP", "torch.distributed"),
        ("from accelerate import Accelerator", "accelerate"),
    ],
)
def test_what_is_data_parallel_already_is_left(line: str, by: str, tmp_path: Path):
    found = converted(tmp_path, f"{line}\n{HEAD}{LOOP}")
    assert found.by == by
    assert found.after == found.before


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("train.ipynb", b"{}", "is a notebook"),
        ("train.py", b"\n  \n", "is empty"),
        ("train.py", b"x = = 1\n", r"train\.py:1: this is not python 3\.\d+: invalid syntax"),
        ("train.py", b"if 1:\n\tx = 1\n        y = 2\n", r"train\.py:3: this is not python .*tabs"),
        ("train.py", b"x = '\xe9'\n", "not text in the encoding"),
        ("train.py", b"x = '\0'\n", "zero bytes"),
        ("train.py", b"x = " + b"(" * 3000 + b")" * 3000, "nested"),  # LibCST's parser ends python
        ("train.py", b"x = " + b"1 + " * 1500 + b"1\n", "nested more than 300 deep"),
    ],
)
def test_files_that_are_no_scripts(name: str, content: bytes, says: str, tmp_path: Path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigurationError, match=says):
        convert(str(tmp_path / name))
    assert (tmp_path / name).read_bytes() == content


# ---------------------------------------------------------------------- the command


def test_the_command_shows_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(HEAD + LOOP)
    script.chmod(0o754)
    assert main(["convert", "train.py"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("--- a/train.py\n+++ b/train.py\n")
    assert "nothing was written" in err
    assert script.read_text() == HEAD + LOOP

    assert main(["convert", "train.py", "--write"]) == 0
    assert "evenstep run --nproc-per-node 2 train.py" in capsys.readouterr().err
    assert script.stat().st_mode & 0o777 == 0o754
    assert os.listdir() == ["train.py"]
    written = script.read_text()
    assert main(["convert", "--write", "train.py"]) == 0
    out, err = capsys.readouterr()
    assert (out, err) == ("", "train.py is data-parallel already, by evenstep: nothing to do.\n")
    assert script.read_text() == written


def test_a_link_is_followed_and_a_file_that_is_read_only_or_was_changed_meanwhile_is_left(tmp_path: Path):
    script, link = tmp_path / "train.py", tmp_path / "link.py"
    script.write_text(HEAD + LOOP)
    link.symlink_to(script)
    found = convert(str(link))
    script.chmod(0o444)
    with pytest.raises(ConfigurationError, match="is read-only"):
        found.write()
    script.chmod(0o644)
    script.write_text(HEAD + LOOP + "# later\n")
    with pytest.raises(ConfigurationError, match="has been changed since"):
        found.write()
    assert script.read_text() == HEAD + LOOP + "# later\n"
    script.write_text(HEAD + LOOP)
    found.write()
    assert link.is_symlink()
    assert script.read_text() == found.after
    assert sorted(os.listdir(tmp_path)) == ["link.py", "train.py"]


def test_what_is_refused_is_said_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    script = tmp_path / "train.py"
    script.write_text(HEAD + LOOP.replace("loss.backward()", "pass"))
    assert main(["convert", "--write", str(script)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{script}:1: no training loop" in err
    assert "was left as it is" in err


def test_the_page_shows_what_the_command_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    page = pages.text("how-to/convert.md")
    before = page.partition("```python\n# train.py\n")[2].partition("```")[0]
    diff = page.partition("```diff\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(before)
    assert convert("train.py").diff == diff
