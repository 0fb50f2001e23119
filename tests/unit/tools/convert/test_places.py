"""Where things are put: loaders and results that get names, models that are wrapped, files, what rank 0 does alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.unit.tools.convert.test_convert import HEAD, LOOP, after, converted, why_not
from tests.unit.tools.convert.test_rightness import WEIGHTED, notes

# ---------------------------------------------------------------------- loaders


def test_a_loader_without_a_name_is_refused(tmp_path: Path):
    loop = LOOP.partition("\n")[2].replace("in loader:", "in DataLoader(data, batch_size=16, shuffle=True):")
    assert "loop over one DataLoader that has a name" in why_not(tmp_path, HEAD + loop)


def test_a_batch_of_one_sample_is_refused(tmp_path: Path):
    assert "a batch of one sample" in why_not(tmp_path, HEAD + LOOP.replace("batch_size=16", "batch_size=1"))


@pytest.mark.parametrize(
    ("loader", "becomes"),
    [
        ("DataLoader(data, 16, True)", "evenstep.DataLoader(data, 16, True)"),
        (
            "DataLoader(data, 16, True, None, None, 2)",
            "evenstep.DataLoader(data, 16, True, sampler=None, batch_sampler=None, num_workers=2)",
        ),
        (
            "DataLoader(data, shuffle=True, batch_size=16)",
            "evenstep.DataLoader(data, shuffle=True, global_batch_size=16)",
        ),
    ],
)
def test_arguments_of_a_loader(loader: str, becomes: str, tmp_path: Path):
    assert f"loader = {becomes}\n" in after(
        tmp_path, HEAD + LOOP.replace("DataLoader(data, batch_size=16, shuffle=True)", loader)
    )


def test_a_hint_names_what_is_not_given_yet(tmp_path: Path):
    given = LOOP.replace("shuffle=True", "shuffle=True, **options")
    assert why_not(tmp_path, HEAD + given).endswith("convert doesn't see: write them out in the call")


def test_the_batch_size_that_is_read_is_that_of_all_ranks(tmp_path: Path):
    text = after(tmp_path, HEAD + LOOP + "print(loader.batch_size)\n")
    assert "world.print(loader.global_batch_size)" in text


# ---------------------------------------------------------------------- models


@pytest.mark.parametrize(
    "setup",
    [
        "model[1] = nn.Linear(4, 1)",
        "model.head = nn.Linear(4, 1)",
        "for p in model.parameters(): p.requires_grad = True",
        "print(model)",
        "with torch.no_grad():\n    model[0].weight.zero_()",
    ],
)
def test_a_model_is_wrapped_when_it_is_set_up(setup: str, tmp_path: Path):
    made = f"nn.Sequential(nn.ReLU(), nn.Linear(4, 1))\n{setup}\n"
    text = after(tmp_path, HEAD + LOOP.replace("nn.Linear(4, 1)\n", made))
    assert text.index(setup.splitlines()[-1].strip().replace("print", "world.print")) < text.index(
        "DistributedDataParallel(model)"
    )


@pytest.mark.parametrize("use", ["models = [model]", "whole = nn.Sequential(model, nn.ReLU())", "alias = model"])
def test_a_model_is_wrapped_before_it_is_kept(use: str, tmp_path: Path):
    """What keeps the model itself would train it without its wrapper."""
    text = after(tmp_path, HEAD + LOOP.replace("optimizer =", f"{use}\noptimizer =", 1))
    assert text.index("DistributedDataParallel(model)") < text.index(use.split(" =")[0] + " =")


# ---------------------------------------------------------------------- files


def test_files_that_are_read_have_been_written(tmp_path: Path):
    save, load = "torch.save(model, 'a.pt')\n", "state = torch.load('a.pt', weights_only=True)\n"
    barrier = "world.barrier()  # rank 0 has written it\nstate = "
    behind = after(tmp_path, HEAD + LOOP + save + load)
    assert f"{barrier}torch.load('a.pt', weights_only=True, map_location=world.device)\n" in behind
    assert "barrier" not in after(tmp_path, HEAD + load + LOOP + save)


def test_files_of_a_temporary_directory_are_every_ranks(tmp_path: Path):
    """Each rank has its own: what rank 0 alone had saved, the others wouldn't find."""
    head = "import os\nfrom tempfile import TemporaryDirectory\n"
    behind = "with TemporaryDirectory() as kept:\n    path = os.path.join(kept, 'a.pt')\n"
    behind += "    torch.save(model.state_dict(), path)\n"
    text = after(tmp_path, head + HEAD + LOOP + behind + "    model.load_state_dict(torch.load(path))\n")
    assert "\n    torch.save(model.module.state_dict(), path)\n" in text
    assert "barrier" not in text
    plain = after(tmp_path, head + HEAD + LOOP + behind.replace("TemporaryDirectory()", "open('b')"))
    assert "if world.is_main:\n        torch.save" in plain


# ---------------------------------------------------------------------- rank 0


def test_a_bar_of_another_file_is_drawn_by_rank_0(tmp_path: Path):
    head = "from utils import progress_bar, train_step\n"
    text = after(tmp_path, head + HEAD + LOOP + "        progress_bar(1, 2, loss.item())\n        train_step(1)\n")
    assert "        if world.is_main:\n            progress_bar(1, 2, mean_loss)\n        train_step(1)\n" in text


def test_what_traces_a_model_gets_the_module(tmp_path: Path):
    head = "from torch.utils.tensorboard import SummaryWriter\nwriter = SummaryWriter()\n"
    text = after(tmp_path, head + HEAD + LOOP + "writer.add_graph(model, torch.zeros(1, 4))\n")
    assert "writer.add_graph(model.module, torch.zeros(1, 4))\n" in text


def test_a_writer_that_is_read_is_refused_with_what_reads_it(tmp_path: Path):
    head = "from torch.utils.tensorboard import SummaryWriter\nwriter = SummaryWriter()\nfolder = str(writer.log_dir)\n"
    assert "writer.log_dir has to be a statement of its own" in why_not(tmp_path, HEAD + head + LOOP)


@pytest.mark.parametrize(
    "imports",
    [
        "try:\n    import torch\nexcept ImportError:\n    raise\n",
        "if True:\n    import torch\n",
        "'''About.'''\nfrom __future__ import annotations\nimport os; import torch\n",
        "def helper():\n    import torch\n    return torch\ntorch = helper()\n",
    ],
)
def test_names_that_are_added_stand_behind_their_import(imports: str, tmp_path: Path):
    text = after(tmp_path, imports + HEAD.removeprefix("import torch\n") + LOOP)
    nodes = [each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.Name | ast.alias)]
    for name in ("evenstep", "world"):
        uses = [each for each in nodes if isinstance(each, ast.Name) and each.id == name]
        bound = [each.lineno for each in uses if isinstance(each.ctx, ast.Store)]
        bound += [each.lineno for each in nodes if isinstance(each, ast.alias) and each.name == name]
        assert all(min(bound) <= each.lineno for each in uses)
    assert converted(tmp_path, text).by == "evenstep"


def test_a_generator_passes_on_a_ranks_part_of_a_batch(tmp_path: Path):
    """A loop in it evaluates nothing: with whole batches, every rank would train on all samples."""
    plain = "def passing(batches):\n    for batch in batches:\n        yield batch\n"
    text = after(tmp_path, HEAD + plain + LOOP.replace("in loader:", "in passing(loader):"))
    assert "    for batch in batches:\n" in text
    assert WEIGHTED in text


def test_a_bar_is_rank_0s_wherever_its_name_comes_from(tmp_path: Path):
    text = after(tmp_path, "from torch.hub import tqdm\n" + HEAD + LOOP.replace("in loader:", "in tqdm(loader):"))
    assert "in tqdm(loader, disable=not world.is_main):" in text


def test_what_rank_0_does_alone_stands_under_one_condition(tmp_path: Path):
    """A new line begins a paragraph of its own."""
    save = "torch.save(model, 'a.pt')\n"
    assert after(tmp_path, HEAD + LOOP + 3 * save).count("if world.is_main:") == 1
    assert after(tmp_path, HEAD + LOOP + save + "\n" + save).count("if world.is_main:") == 2


def test_a_model_is_wrapped_before_a_function_that_reaches_for_it(tmp_path: Path):
    """The function is called before the training and behind it, and asks the wrapper for the model both times."""
    show = "def show():\n    print(model.bias)\ndef report():\n    show()\n"
    text = after(tmp_path, HEAD + show + LOOP.replace("optimizer =", "report()\noptimizer =") + "report()\n")
    assert "world.print(model.module.bias)" in text
    assert "\nmodel = evenstep.DistributedDataParallel(model)\nreport()\noptimizer" in text


SIZED = "shuffle=True, global_batch_size=kwargs['batch_size'], **{**kwargs, 'batch_size': None}"


@pytest.mark.parametrize(
    ("settings", "arguments"),
    [
        (
            "kwargs = {'num_workers': 1, 'pin_memory': True} if torch.cuda.is_available() else {}",
            "global_batch_size=16, shuffle=True, **kwargs",
        ),
        ("kwargs = dict(batch_size=16, num_workers=1)", SIZED),
        ("kwargs = {'batch_size': 16} if torch.cuda.is_available() else {'batch_size': 8, 'num_workers': 1}", SIZED),
        (
            "kwargs = {'batch_size': 16}\nif torch.cuda.is_available():\n"
            "    more = {'num_workers': 1}\n    kwargs.update(more)",
            SIZED,
        ),
        ("kwargs = {'batch_size': 16}\nkwargs.update({'num_workers': 1})", SIZED),
        ("kwargs = {'batch_size': 16}\ndef other():\n    kwargs = [1]\n    return kwargs.pop()", SIZED),
    ],
)
def test_a_dictionary_of_settings_is_read(settings: str, arguments: str, tmp_path: Path):
    size = "" if "batch_size" in settings else "batch_size=16, "
    call = f"DataLoader(data, {size}shuffle=True, **kwargs)"
    text = f"{HEAD}{settings}\n" + LOOP.replace("DataLoader(data, batch_size=16, shuffle=True)", call)
    assert f"loader = evenstep.DataLoader(data, {arguments})\n" in after(tmp_path, text)


@pytest.mark.parametrize(
    "settings",
    [
        "kwargs = {'batch_size': 16} if torch.cuda.is_available() else {}",  # not in any case
        "kwargs = {'batch_size': 16, 'generator': torch.Generator()}",
        "kwargs = {'num_workers': 1}\nkwargs.update({'batch_size': 16})",
        "kwargs = {'batch_size': 16}\nkwargs.update({'generator': torch.Generator()})",
        "kwargs = {'batch_size': 16}\nkwargs.update(other)",
        "kwargs = {'batch_size': 16}\nkwargs.update(num_workers=1)",
        "kwargs = {'batch_size': 16}\nkwargs.update(kwargs)",
        "kwargs = {'batch_size': 16}\nmore = {'num_workers': 1}\nmore['in_order'] = False\nkwargs.update(more)",
        "kwargs = {'batch_size': 16}\nmore = {'num_workers': 1}\nmore.update(other)\nkwargs.update(more)",
        "kwargs = {'num_workers': 1}\nkwargs['batch_size'] = 16",
        "kwargs = {'batch_size': 16}\ndel kwargs['batch_size']",
        "kwargs = {'batch_size': 16}\nfill(kwargs)",
        "kwargs = {'batch_size': 16}\nkwargs |= other",
        "kwargs = {'batch_size': 16}\nkwargs.pop('batch_size')",
        "kwargs = options = {'batch_size': 16}\noptions.update(other)",
        "kwargs = {'batch_size': 16} if torch.cuda.is_available() else other",
        "kwargs = {'batch_size': 16}\nif torch.cuda.is_available():\n    kwargs = other",
        "kwargs = {'num_workers': 1, **other}",
        "kwargs = {name: 1}",
        "kwargs = dict(other)",
        "from settings import kwargs",
    ],
)
def test_a_dictionary_whose_keys_are_not_seen_is_refused(settings: str, tmp_path: Path):
    loader = "DataLoader(data, shuffle=True, **kwargs)"
    text = f"{HEAD}{settings}\n" + LOOP.replace("DataLoader(data, batch_size=16, shuffle=True)", loader)
    assert "convert doesn't see: write them out in the call (batch_size=...)" in why_not(tmp_path, text)


@pytest.mark.parametrize(
    ("settings", "loop", "reason"),
    [
        ("{'batch_size': 16} if fast else {'batch_size': 1}", LOOP, "a batch of one sample can't be divided"),
        (
            "{'batch_size': 16} if fast else {'batch_size': 8}",
            LOOP.replace("model(x)", "model(x + torch.randn(16, 4))"),
            "torch.randn(16, 4) expects a whole batch",
        ),
        (
            "{'batch_size': 16} if fast else {'batch_size': 8}",
            LOOP.replace("model(x)", "model(x + torch.randn(8, 4))"),
            "torch.randn(8, 4) expects a whole batch",
        ),
    ],
)
def test_each_batch_size_of_a_dictionary_counts(settings: str, loop: str, reason: str, tmp_path: Path):
    loop = loop.replace("DataLoader(data, batch_size=16, shuffle=True)", "DataLoader(data, **kwargs)")
    assert reason in why_not(tmp_path, f"{HEAD}from settings import fast\nkwargs = {settings}\n{loop}")


def test_a_dictionary_may_hold_the_batches_themselves(tmp_path: Path):
    head = HEAD + "from settings import groups\nkwargs = {'batch_sampler': groups}\n"
    text = head + LOOP.replace("batch_size=16, shuffle=True", "**kwargs")
    assert "loader = evenstep.DataLoader(data, **kwargs)\n" in after(tmp_path, text)


def test_settings_that_two_loaders_share_stay_for_the_one_that_is_not_divided(tmp_path: Path):
    kwargs = "kwargs = {'batch_size': 16, 'collate_fn': pad}\n"
    test = "test = DataLoader(data, **kwargs)\nfor x, y in test:\n    print(model(x).view(16, 1).sum())\n"
    text = HEAD + "from settings import pad\n" + kwargs + LOOP.replace("batch_size=16", "**kwargs") + test
    found = converted(tmp_path, text)
    assert kwargs in found.after
    assert "test = DataLoader(data, **kwargs)\n" in found.after
    assert any("if samples have different lengths, weight it by" in note.text for note in found.notes)


def test_a_model_that_divides_over_devices_itself_is_marked(tmp_path: Path):
    net = "class Net(nn.Linear):\n    def forward(self, x):\n"
    net += "        return nn.parallel.data_parallel(super().forward, x, range(2))\n"
    found = notes(tmp_path, HEAD + net + LOOP.replace("nn.Linear(4, 1)", "Net(4, 1)"))
    assert "each rank has one device, and this uses several: call super().forward(x) instead" in found


def test_an_option_that_chose_the_device_is_named(tmp_path: Path):
    head = "import argparse\nargs = argparse.ArgumentParser().parse_args()\ndevice = torch.device(args.device)\n"
    assert "args.device no longer chooses the device: evenstep run --device does" in notes(tmp_path, HEAD + head + LOOP)


def test_a_layer_of_torchs_gets_no_batch_norm_of_all_ranks(tmp_path: Path):
    assert "SyncBatchNorm" not in after(tmp_path, "from datautils import Rows\n" + HEAD + LOOP)
    own = LOOP.replace("nn.Linear(4, 1)", "nn.Sequential(block(4), nn.Linear(4, 1))")
    assert "SyncBatchNorm" in after(tmp_path, "from datautils import block\n" + HEAD + own)


def test_what_is_not_converted_gets_no_remarks_of_changes(tmp_path: Path):
    text = f"{HEAD}from settings import kwargs\nfetch(download=True)\n"
    found = converted(tmp_path, text + LOOP.replace("shuffle=True", "**kwargs"))
    assert found.problems
    assert not found.notes
