"""The private names of torch: each is seen in the versions of which the list says so, and the list is whole."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import evenstep
from evenstep.ground.compat import private_names
from evenstep.ground.compat.private_names import NAMES, PrivateName, is_there, refuse_other_torch
from tests.unit.test_house import private_torch

COMPAT = Path(evenstep.__file__).parent / "ground" / "compat"
VERSION = ".".join(torch.__version__.split(".")[:2])
MADE_UP = PrivateName("torch._C:_made_up", "for this test")


def is_needed(name: PrivateName, torch_version: str) -> bool:
    """Whether a torch should have it. One that was never looked at should have whatever something depends on."""
    minor = ".".join(torch_version.split(".")[:2])
    return minor in name.seen if minor in private_names.SEEN else name.without != private_names.NOTHING


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[pytest.mark.extended] * ("_dynamo" in each.where), id=each.name) for each in NAMES],
)
def test_seen_in_the_versions_that_the_list_names(name: PrivateName):
    """In a torch that was never looked at, those fail that are missing."""
    is_expected = is_needed(name, VERSION) or (VERSION not in private_names.SEEN and is_there(name))
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
    ("version", "without", "expected"),
    [
        ("2.11.1", "an error", True),
        ("2.15.0+cu132", "an error", False),
        ("2.99.0", "an error", True),
        ("2.99.0", private_names.NOTHING, False),
    ],
)
def test_a_torch_needs_what_its_version_was_seen_with(version: str, without: str, expected: bool):
    assert is_needed(replace(MADE_UP, without=without, seen=("2.11",)), version) == expected


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
