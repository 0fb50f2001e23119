"""The private names of torch: each is seen in the versions that its row says, and the rows are whole."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import evenstep
from evenstep.ground.compat import private_names
from evenstep.ground.compat.private_names import PrivateName
from tests.unit.test_house import private_torch

COMPAT = Path(evenstep.__file__).parent / "ground" / "compat"
THEMES = {
    file: importlib.import_module(f"evenstep.ground.compat.{file.stem}") for file in sorted(COMPAT.glob("torch_*.py"))
}
NAMES: list[PrivateName] = [name for theme in THEMES.values() for name in getattr(theme, "NAMES", ())]
VERSION = ".".join(torch.__version__.split(".")[:2])


def shown(name: PrivateName) -> str:
    return name.where.replace(":", ".").replace("~", ": ")


def is_there(name: PrivateName) -> bool:
    """Whether this torch has it. Imports the module that it is in: for parts of torch.compile, seconds."""
    module, _, rest = name.where.partition(":")
    attributes, _, used = rest.partition("~")
    try:
        found: Any = importlib.import_module(module)
        for attribute in attributes.split("."):
            found = getattr(found, attribute)
        code = inspect.unwrap(found).__code__ if used else None
    except (ImportError, AttributeError):
        return False
    return code is None or used in (*code.co_names, *code.co_consts)


def is_needed(name: PrivateName, torch_version: str) -> bool:
    """Whether a torch should have it. One that was never looked at should have whatever something depends on."""
    minor = ".".join(torch_version.split(".")[:2])
    return minor in name.seen if minor in private_names.SEEN else name.without != private_names.NOTHING


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[pytest.mark.extended] * ("_dynamo" in each.where), id=shown(each)) for each in NAMES],
)
def test_seen_in_the_versions_that_the_list_names(name: PrivateName):
    """In a torch that was never looked at, those fail that are missing."""
    is_expected = is_needed(name, VERSION) or (VERSION not in private_names.SEEN and is_there(name))
    assert is_there(name) == is_expected, f"torch {VERSION}: {name.without}; listed: {', '.join(name.seen)}"


def private_parts(tree: ast.AST) -> set[str]:
    used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    used |= {str(n.value) for n in ast.walk(tree) if isinstance(n, ast.Constant)}
    used |= {n.name for n in ast.walk(tree) if isinstance(n, ast.alias)}
    return {each for each in used if re.fullmatch(r"_[A-Za-z]\w*", each)}


@pytest.mark.parametrize("file", THEMES, ids=lambda file: file.stem)
def test_a_theme_names_what_its_import_does_not_look_for(file: Path):
    """Whatever begins with an underscore, is torch's, and is used only inside functions; and nothing else."""
    tree = ast.parse(file.read_text())
    listed = {part for each in getattr(THEMES[file], "NAMES", ()) for part in re.split(r"[.:~]", each.where)}
    inside = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    own = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    own |= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    own |= {"_start", "_stdout", "_stderr"} if file.stem == "torch_elastic" else set()
    used = {part for function in inside for part in private_parts(function)}
    bound = {part for n in tree.body if not isinstance(n, ast.FunctionDef | ast.ClassDef) for part in private_parts(n)}
    bound |= {part for found in private_torch(tree) for part in found.split(": ")[1].split(".") if part in bound}
    assert used - own - {"_C"} <= listed | bound, used - own - listed - bound


def test_nothing_is_listed_that_is_used_no_longer():
    for file, theme in THEMES.items():
        used, _, _ = file.read_text().partition("\nNAMES = ")
        listed = {re.split(r"[.:~]", each.where)[-1] for each in getattr(theme, "NAMES", ())}
        assert not {name for name in listed if name not in used}, file.name


def test_a_name_that_is_not_there_is_not_found():
    missing = ("torch._C:_made_up", "torch._made_up:x", "torch.nn:Module.__init__~_made_up", "torch:float32~x")
    assert not any(is_there(PrivateName(where, "", "")) for where in missing)
    assert is_there(PrivateName("torch.nn:Module.__init__~_load_state_dict_pre_hooks", "", ""))


@pytest.mark.parametrize(
    ("owner", "name"), [("torch._C", "_will_engine_execute_node"), ("torch.distributed.algorithms.join", "_JoinConfig")]
)
def test_a_torch_without_a_name_that_import_needs_is_refused(owner: str, name: str):
    script = f"import importlib\ndelattr(importlib.import_module({owner!r}), {name!r})\nimport evenstep"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    lacks = rf"ImportError: torch {re.escape(torch.__version__)} lacks a private name that evenstep needs: .*{name}"
    seen = "Torch 2.11, 2.12, 2.13, 2.14, 2.15 have it: install one of these, or a newer evenstep."
    assert re.fullmatch(rf"{lacks}.* {re.escape(seen)}", done.stderr.splitlines()[-1]), done.stderr
