"""The private names of torch: each is seen in the versions of which the list says so, and the list is whole."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import evenstep
from evenstep.cli.main import main
from evenstep.compat import private_names
from evenstep.compat.private_names import NAMES, PrivateName, is_there, refuse_other_torch
from tests.unit.test_house import private_torch

COMPAT = Path(evenstep.__file__).parent / "compat"
VERSION = ".".join(torch.__version__.split(".")[:2])
MADE_UP = PrivateName("torch._C:_made_up", "for this test")


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[pytest.mark.extended] * ("_dynamo" in each.where), id=each.name) for each in NAMES],
)
def test_seen_in_the_versions_that_the_list_names(name: PrivateName):
    """In a torch that was never looked at, those fail that are missing."""
    is_expected = name.is_needed(VERSION) or (VERSION not in private_names.SEEN and is_there(name))
    assert is_there(name) == is_expected, f"torch {VERSION}: {name.without}; listed: {', '.join(name.seen)}"


def test_the_list_is_whole():
    """Whatever begins with an underscore in `compat/torch_*.py` and isn't the file's own."""
    listed = {part for each in NAMES for part in re.split(r"[.:~]", each.where)}
    for file in sorted(COMPAT.glob("torch_*.py")):
        tree = ast.parse(file.read_text())
        own = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        own |= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        own |= {"_start", "_stdout", "_stderr"} if file.stem == "torch_elastic" else set()
        used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
        used |= {str(n.value) for n in ast.walk(tree) if isinstance(n, ast.Constant)}
        used |= {part for found in private_torch(tree) for part in found.split(": ")[1].split(".")}
        private = {each for each in used if re.fullmatch(r"_[A-Za-z]\w*", each)} - own - {"_C"}
        assert private <= listed, f"{file.name}: {private - listed}"


def test_nothing_is_listed_that_is_used_no_longer():
    used = " ".join(file.read_text() for file in COMPAT.glob("torch_*.py"))
    assert not [each.name for each in NAMES if re.split(r"[.:~]", each.where)[-1] not in used]


@pytest.mark.parametrize(
    ("version", "without", "is_needed"),
    [
        ("2.11.1", "an error", True),
        ("2.15.0+cu132", "an error", False),
        ("2.99.0", "an error", True),
        ("2.99.0", private_names.NOTHING, False),
    ],
)
def test_a_torch_needs_what_its_version_was_seen_with(version: str, without: str, is_needed: bool):
    assert replace(MADE_UP, without=without, seen=("2.11",)).is_needed(version) == is_needed


@pytest.mark.parametrize(
    ("where", "is_found"),
    [
        ("torch._C:_made_up", False),
        ("torch._made_up:x", False),
        ("torch.nn:Module._load_from_state_dict", True),
        ("torch.nn:Module.__init__~_load_state_dict_pre_hooks", True),
        ("torch.nn:Module.__init__~_made_up", False),
        ("torch.nn:Module._made_up~x", False),
        ("torch:float32~x", False),
    ],
)
def test_looking_for_a_name(where: str, is_found: bool):
    assert is_there(PrivateName(where, "")) == is_found


def test_a_torch_without_a_name_that_import_needs_is_refused():
    needed = PrivateName("torch._C:_set_grad_enabled", "the switch", seen=("2.11",))
    refuse_other_torch([needed, replace(MADE_UP, without="an AttributeError")])
    with pytest.raises(ImportError) as raised:
        refuse_other_torch([needed, replace(MADE_UP, seen=("2.11", "2.13"))])
    assert str(raised.value) == (
        f"torch {torch.__version__} lacks private names on which evenstep stands: torch._C._made_up (for this test). "
        f"They were seen in torch 2.11, 2.13: install one of these, or a newer evenstep."
    )


def test_check_torch_goes_through_them(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    few = [name for name in NAMES if name.where.startswith("torch._C:")]
    monkeypatch.setattr(private_names, "NAMES", few)
    assert main(["env", "--check-torch"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == f"torch {torch.__version__} has {len(few)} of {len(few)} private names"
    assert lines[::2] == [f"  has   {name.name}" for name in few]
    monkeypatch.setattr(private_names, "NAMES", [*few, replace(MADE_UP, seen=("0.1",), without=private_names.NOTHING)])
    assert main(["env", "--check-torch"]) == 0
    assert "  lacks torch._C._made_up\n" in capsys.readouterr().out
    monkeypatch.setattr(private_names, "NAMES", [*few, MADE_UP])
    assert main(["env", "--check-torch"]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith(f"torch {torch.__version__} has {len(few)} of {len(few) + 1} private names\n")
    seen = ", ".join(MADE_UP.seen)
    told = f"          for this test; without it: evenstep can't be imported; seen in {seen}\n"
    assert shown.endswith(f"  LACKS torch._C._made_up\n{told}")
    assert main(["env", "--check-torch", "--json"]) == 1
    assert [each["is there"] for each in json.loads(capsys.readouterr().out)["names"]] == [*[True] * len(few), False]
