"""One file: nodes in order, places, what nodes stand in, and what binds names."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("libcst")

import libcst as cst

from evenstep.tools.reading.tree import Call, File, text_of

ROOT = Path(__file__).parents[4]
SCRIPTS = sorted((ROOT / "tests" / "scripts").rglob("*.py"))
ODD = """\
@decorated(1)
class A(B, metaclass=C):
    @staticmethod
    def f(a, /, b: int = g(), *rest, c=h(), **more) -> list[int]:
        return (yield from k)


match value:
    case {"a": [1, *_]} if test(value):
        x = [i async for i in l() if m(i) if not n for j in o(i)]
try:
    with (open(path) as file, p()):
        x: int = (y := 5) if q else lambda z=r(): s(z)
except (OSError, ValueError) as error:
    del x[1:t():2]
else:
    assert u, f"{v():>{w()}}" "text"
finally:
    for a, *b in d[{**e}, (1,)]:
        async def f(): await f(*x, key=y, **z)
    else: x += -1 or not a and b < c
"""


def file_of(text: str) -> File:
    return File(cst.parse_module(text))


def call(file: File, name: str) -> Call:
    (found,) = (each for each in file.calls if each.name == name)
    return found


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_places_are_those_of_libcst(newline: str):
    metadata = pytest.importorskip("libcst.metadata")
    for text in (ODD, *(path.read_text() for path in SCRIPTS[::20])):
        file = file_of(text.replace("\n", newline))
        known = metadata.MetadataWrapper(file.module, unsafe_skip_copy=True).resolve(metadata.PositionProvider)
        for node in file.nodes:
            if not isinstance(node, cst.IndentedBlock | cst.Module):
                assert (file.line(node), file.column(node) - 1) == (known[node].start.line, known[node].start.column)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("if a:\n    f()", [("if", "a", True)]),
        ("if a:\n    pass\nelse:\n    f()", [("if", "a", False)]),
        ("a and f()", [("if", "a", True)]),
        ("a or f()", [("if", "a", False)]),
        ("f() and a", []),
        ("b if a else f()", [("if", "a", False)]),
        ("for x in y:\n    if a:\n        continue\n    f()", [("if", "a", False), ("loop", "", True)]),
        (
            "for x in y:\n    if a:\n        b\n    else:\n        break\n    f()",
            [("if", "a", True), ("loop", "", True)],
        ),
        ("for x in y:\n    pass\nelse:\n    f()", []),
        ("try:\n    pass\nexcept E:\n    f()", [("except", "", True)]),
        ("try:\n    pass\nfinally:\n    f()", []),
        ("[x for z in y for x in f()]", [("loop", "", True)]),
        ("lambda: f()", [("lambda", "", True)]),
        ("lambda x=f(): x", []),
        ("if a:\n    def g():\n        f()", [("function", "", True)]),
        ("def g(x=f()):\n    pass", []),
    ],
)
def test_what_a_call_stands_in(text: str, expected: list[tuple[str, str, bool]]):
    frames = list(call(file_of(text), "f").frame.outwards())
    shown = [(each.kind, text_of(each.test), each.holds) for each in frames if each.kind != "module"]
    assert shown == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from torch import optim as o\no.Adam()", "torch.optim.Adam"),
        ("import torch.optim as o\no.Adam[0].step()", "torch.optim.Adam.step"),
        ("from .data import load\nload()", ".data.load"),
        ("import torch as o\ndef f(o):\n    o.Adam()", "o.Adam"),
        ("import torch as o\ndef f():\n    for o in p:\n        def g():\n            o.Adam()", "o.Adam"),
        ("import torch as o\ndef f():\n    global o\n    o = 1\n    o.Adam()", "torch.Adam"),
        ("from torch.utils.data import *\nDataLoader()", "torch.utils.data.DataLoader"),
    ],
)
def test_names_of_calls(text: str, expected: str):
    """A local name hides what was imported under the same one."""
    (only,) = file_of(text).calls
    assert only.name == expected
