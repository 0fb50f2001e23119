"""A mend that is shown is a line that runs: in the script's own names, and with tensors where torch wants some."""

from __future__ import annotations

import ast
import builtins
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("libcst")

from evenstep.tools.doctor.examination import read

PLANTED = sorted((Path(__file__).parents[3] / "scripts" / "planted").glob("*.py"))
# What a mend may name beside what its script does: modules, and what a page of torch's or a library's has.
KNOWN = {"torch", "os", "datasets", "DistributedSampler", "loader", "epoch", *vars(builtins)}


def mends(script: Path) -> list[tuple[str, str, str]]:
    """(rule, mend, text of its file) of each finding that has a mend of its own."""
    return [(each.rule, each.mend, Path(each.path).read_text()) for each in read(script).findings if each.mend]


def named(tree: ast.AST) -> set[str]:
    """What a file's code has names for."""
    names = {each.id for each in ast.walk(tree) if isinstance(each, ast.Name)}
    names |= {each.arg for each in ast.walk(tree) if isinstance(each, ast.arg)}
    imports = [each for each in ast.walk(tree) if isinstance(each, ast.Import | ast.ImportFrom)]
    return names | {(one.asname or one.name).partition(".")[0] for each in imports for one in each.names}


@pytest.mark.parametrize("script", PLANTED, ids=lambda path: path.stem)
def test_a_mend_is_python_in_the_names_of_its_script(script: Path):
    for rule, mend, text in mends(script):
        lines = "\n".join(f"    {line}" for line in mend.splitlines())
        inside = [each for each in ast.walk(ast.parse(f"while True:\n    pass\n{lines}")) if isinstance(each, ast.Name)]
        made = {each.id for each in inside if isinstance(each.ctx, ast.Store)}
        given = {each.id for each in inside if isinstance(each.ctx, ast.Load)}
        assert not given - made - named(ast.parse(text)) - KNOWN, (rule, mend)


def all_reduce(tensor: Any) -> None:
    """Of two ranks with the same number."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError("Expected parameter tensor of type torch.Tensor")
    tensor *= 2


@pytest.mark.parametrize(
    ("name", "given"),
    [("trainer_stops_alone", {"val_loss": 0.5}), ("skips_nan_alone", {"loss": torch.tensor(0.5)})],
)
def test_ranks_exchange_a_tensor(name: str, given: dict[str, Any]):
    """A validation loss is a float, which `all_reduce` refuses; and its sum over ranks is no mean."""
    script = next(each for each in PLANTED if each.stem == name)
    ((rule, mend, _),) = mends(script)
    assert rule == "EV402"
    dist = SimpleNamespace(all_reduce=all_reduce, get_world_size=lambda: 2)
    text = mend if name == "trainer_stops_alone" else "\n".join(mend.splitlines()[:2])
    names = {"torch": torch, "dist": dist, **given}
    exec(text, names)
    assert float(names.get("val_loss", names.get("is_bad"))) == given.get("val_loss", 0.0)


def test_a_condition_that_names_a_mean_stays_as_it_is(tmp_path: Path):
    script = next(each for each in PLANTED if each.stem == "skips_nan_alone")
    changed = tmp_path / "changed.py"
    changed.write_text(re.sub(r"(is\w+)\(loss\)", r"\1(loss.mean())", script.read_text()))
    ((_, mend, _),) = mends(changed)
    assert mend.startswith("is_bad = torch.tensor(float(")
    assert "(loss.mean())" in mend.splitlines()[0]
