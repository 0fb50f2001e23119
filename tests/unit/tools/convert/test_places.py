"""Where things are put: loaders and results that get names, models that are wrapped, files, what rank 0 does alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.unit.tools.convert.test_convert import HEAD, LOOP, after, converted, why_not

# ---------------------------------------------------------------------- loaders


def test_a_loader_without_a_name_is_refused(tmp_path: Path):
    loop = LOOP.partition("\n")[2].replace("in loader:", "in DataLoader(data, batch_size=16, shuffle=True):")
    assert "loop over one DataLoader that has a name" in why_not(tmp_path, HEAD + loop)


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


# ---------------------------------------------------------------------- models


@pytest.mark.parametrize(
    "setup",
    [
        "model[1] = nn.Linear(4, 1)",
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


# ---------------------------------------------------------------------- rank 0


@pytest.mark.parametrize(
    "imports",
    [
        "try:\n    import torch\nexcept ImportError:\n    raise\n",
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
        "kwargs = {'batch_size': 16}\nkwargs.update(other)",
        "kwargs = {'batch_size': 16}\nmore = {'num_workers': 1}\nmore['in_order'] = False\nkwargs.update(more)",
        "kwargs = {'batch_size': 16}\ndel kwargs['batch_size']",
        "kwargs = {'batch_size': 16}\nfill(kwargs)",
        "kwargs = options = {'batch_size': 16}\noptions.update(other)",
        "kwargs = {'batch_size': 16}\nif torch.cuda.is_available():\n    kwargs = other",
        "kwargs = {'num_workers': 1, **other}",
        "from settings import kwargs",
    ],
)
def test_a_dictionary_whose_keys_are_not_seen_is_refused(settings: str, tmp_path: Path):
    loader = "DataLoader(data, shuffle=True, **kwargs)"
    text = f"{HEAD}{settings}\n" + LOOP.replace("DataLoader(data, batch_size=16, shuffle=True)", loader)
    assert "convert doesn't see: write them out in the call (batch_size=...)" in why_not(tmp_path, text)


def test_settings_that_two_loaders_share_stay_for_the_one_that_is_not_divided(tmp_path: Path):
    kwargs = "kwargs = {'batch_size': 16, 'collate_fn': pad}\n"
    test = "test = DataLoader(data, **kwargs)\nfor x, y in test:\n    print(model(x).view(16, 1).sum())\n"
    text = HEAD + "from settings import pad\n" + kwargs + LOOP.replace("batch_size=16", "**kwargs") + test
    found = converted(tmp_path, text)
    assert kwargs in found.after
    assert "test = DataLoader(data, **kwargs)\n" in found.after
    assert any("if samples have different lengths, weight it by" in note.text for note in found.notes)
