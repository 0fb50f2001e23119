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
# Nodes that hold nothing that is asked about.
PUNCTUATION = (
    *(cst.BaseParenthesizableWhitespace, cst.TrailingWhitespace, cst.EmptyLine, cst.Newline, cst.Comment, cst.Comma),
    *(
        cst.LeftParen,
        cst.RightParen,
        cst.Semicolon,
        cst.Dot,
        cst.AssignEqual,
        cst.Colon,
        cst.BaseBinaryOp,
        cst.BaseAugOp,
    ),
    *(cst.BaseUnaryOp, cst.BaseBooleanOp, cst.BaseCompOp, cst.LeftSquareBracket, cst.RightSquareBracket),
    *(cst.LeftCurlyBrace, cst.RightCurlyBrace, cst.ParamStar, cst.ParamSlash, cst.Asynchronous),
)


def file_of(text: str) -> File:
    return File(cst.parse_module(text))


def call(file: File, name: str) -> Call:
    (found,) = (each for each in file.calls if each.name == name)
    return found


@pytest.mark.parametrize("text", [ODD, *(path.read_text() for path in SCRIPTS[::12])])
def test_all_nodes_are_there_in_the_order_of_the_text(text: str):
    file = file_of(text)
    expected: list[object] = []
    pending = [file.module]
    while pending:
        node = pending.pop()
        expected.append(node)
        if not isinstance(node, cst.Import | cst.ImportFrom):
            pending += [each for each in reversed(node.children) if not isinstance(each, PUNCTUATION)]
    assert set(map(id, file.nodes)) == set(map(id, expected))
    places = [(file.line(node), file.column(node)) for node in file.nodes if not isinstance(node, cst.Module)]
    named = [place for node, place in zip(file.nodes[1:], places, strict=True) if isinstance(node, cst.Name)]
    assert named == sorted(named)
    assert all(file.inside(node)[0] is node for node in file.nodes)
    assert all(file.is_inside(node, file.parent(node)) for node in file.nodes[1:])


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_places_are_those_of_libcst(newline: str):
    metadata = pytest.importorskip("libcst.metadata")
    for text in (ODD, *(path.read_text() for path in SCRIPTS[::20])):
        file = file_of(text.replace("\n", newline))
        known = metadata.MetadataWrapper(file.module, unsafe_skip_copy=True).resolve(metadata.PositionProvider)
        for node in file.nodes:
            if not isinstance(node, cst.IndentedBlock | cst.Module):
                assert (file.line(node), file.column(node) - 1) == (known[node].start.line, known[node].start.column)


def test_a_node_and_all_within_it():
    file = file_of("a = f(b, c)\nd = e\n")
    assign = file.parent(file.parent(call(file, "f").node) or file.module)
    assert assign is not None
    assert [text_of(each) for each in file.inside(assign) if isinstance(each, cst.Name)] == ["a", "f", "b", "c"]
    assert [text_of(each) for each in file.parts(call(file, "f").node)] == ["f", "b", "c"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("if a:\n    f()", [("if", "a", True)]),
        ("if a:\n    pass\nelse:\n    f()", [("if", "a", False)]),
        ("if a:\n    pass\nelif b:\n    f()", [("if", "b", True), ("if", "a", False)]),
        ("a and f()", [("if", "a", True)]),
        ("a or f()", [("if", "a", False)]),
        ("f() and a", []),
        ("f() if a else b", [("if", "a", True)]),
        ("b if a else f()", [("if", "a", False)]),
        ("b if f() else a", []),
        ("for x in y:\n    if a:\n        continue\n    f()", [("if", "a", False), ("loop", "", True)]),
        ("for x in y:\n    if a:\n        pass\n    f()", [("loop", "", True)]),
        (
            "for x in y:\n    if a:\n        b\n    else:\n        break\n    f()",
            [("if", "a", True), ("loop", "", True)],
        ),
        ("for x in y:\n    pass\nelse:\n    f()", []),
        ("for x in f():\n    pass", []),
        ("while f():\n    pass", [("loop", "f()", True)]),
        ("with a:\n    f()", [("with", "", True)]),
        ("try:\n    f()\nexcept E:\n    pass", [("try", "", True)]),
        ("try:\n    pass\nexcept E:\n    f()", [("except", "", True)]),
        ("try:\n    pass\nfinally:\n    f()", []),
        ("[f() for x in y]", [("loop", "", True)]),
        ("[x for x in f()]", []),
        ("[x for z in y for x in f()]", [("loop", "", True)]),
        ("{a: f() for x in y if b}", [("loop", "", True)]),
        ("lambda: f()", [("lambda", "", True)]),
        ("lambda x=f(): x", []),
        ("class A:\n    f()", [("class", "", True)]),
        ("if a:\n    def g():\n        f()", [("function", "", True)]),
        ("def g(x=f()):\n    pass", []),
        ("@f()\ndef g():\n    pass", []),
    ],
)
def test_what_a_call_stands_in(text: str, expected: list[tuple[str, str, bool]]):
    frames = list(call(file_of(text), "f").frame.outwards())
    shown = [(each.kind, text_of(each.test), each.holds) for each in frames if each.kind != "module"]
    assert shown == expected


def test_loops_of_a_function_and_no_others():
    text = "for a in b:\n    def g():\n        while c:\n            [f() for x in y]\n        else:\n            h()\n"
    file = file_of(text)
    assert [type(each).__name__ for each in file.loops(call(file, "f").node)] == ["While"]
    assert file.loops(call(file, "h").node) == []
    assert [(each.line, each.is_comprehension) for each in file.all_loops] == [(1, False), (3, False), (4, True)]


def test_records_of_assignments():
    text = "a = b = 1\nc: int = 2\nd: int\ne += 3\nwith f as (g, h):\n    pass\nfor i, j in k:\n    pass\n(m := 4)\n"
    found = [
        (text_of(each.target), text_of(each.value), each.line, each.operator, each.each)
        for each in file_of(text).assignments
    ]
    assert found == [
        ("a", "1", 1, "=", False),
        ("b", "1", 1, "=", False),
        ("c", "2", 2, "=", False),
        ("e", "3", 4, "+=", False),
        ("(g, h)", "f", 5, "=", False),
        ("i, j", "k", 7, "=", True),
        ("m", "4", 9, "=", False),
    ]
    assert set(file_of(text).assigned) == {*"abceghijm"}


def test_functions_and_classes():
    text = "class A:\n    if b:\n        @torch.no_grad()\n        def f(self, x, /, y, *, z): return 1\n"
    text += "def g():\n    def h():\n        yield 2\n        return 3\n    return 4\n"
    file = file_of(f"import torch\n{text}")
    methods, plain = file.classes["A"].methods, file.functions
    assert (methods["f"].parameters, methods["f"].decorators) == (("self", "x", "y", "z"), ("torch.no_grad",))
    assert [list(map(text_of, each.returns)) for each in (methods["f"], plain["g"], plain["h"])] == [
        ["1"],
        ["4"],
        ["3"],
    ]
    assert [len(each.yields) for each in (plain["g"], plain["h"])] == [0, 1]
    assert [each.line for each in file.all_functions] == [5, 6, 7]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from torch import optim as o\no.Adam()", "torch.optim.Adam"),
        ("import torch.optim\ntorch.optim.Adam()", "torch.optim.Adam"),
        ("import torch.optim as o\no.Adam[0].step()", "torch.optim.Adam.step"),
        ("from .data import load\nload()", ".data.load"),
        ("import o\ndef f(o):\n    o.Adam()", "o.Adam"),
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


def test_whose_a_name_is():
    text = "x = 1\ndef f(a):\n    def g():\n        nonlocal a\n        global x\n        a = x = y = 2\n"
    text += "    class C:\n        def a(self): pass\n"
    file = file_of(text)
    f, g = file.functions["f"].node, file.functions["g"].node
    assert [len(file.bindings[None][name]) for name in ("x", "f")] == [2, 1]
    assert {name: len(by) for name, by in file.bindings[f].items()} == {"a": 2, "g": 1, "C": 1}
    assert set(file.bindings[g]) == {"y"}
    assert [file.scope(name, g.body) for name in ("a", "x", "y", "z")] == [f, None, g, None]
