"""Where calls run: in which loops, under which conditions, on which ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("libcst")

import libcst as cst

from evenstep.tools.reading.contexts import Script
from evenstep.tools.reading.tree import Call, text_of

HEAD = (
    "import torch\nimport torch.distributed as dist\nfrom torch.utils.data import DataLoader\nrank = dist.get_rank()\n"
)


@pytest.fixture
def read(tmp_path: Path):
    def read(text: str) -> tuple[Script, Call]:
        """A script, and its call of `at()`."""
        path = tmp_path / "train.py"
        path.write_text(HEAD + text)
        script = Script(path)
        return script, next(each for each in script.calls if each.name == "at")

    return read


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("for x in y:\n    at()", []),
        ("for x in y:\n    if x:\n        at()", ["x"]),
        ("for x in y:\n    if x:\n        continue\n    at()", ["x"]),
        ("for x in y:\n    x and at()", ["x"]),
        ("def f(): at()\nfor x in y:\n    if x:\n        f()", ["x"]),
        # Two ways lead there, and the one without a condition counts.
        ("def f(): at()\nfor x in y:\n    if x:\n        f()\n    f()", []),
        ("def f(): at()\nfor x in y:\n    f()\n    if x:\n        f()", []),
        ("def f(n):\n    at()\n    f(n - 1)\nfor x in y:\n    f(1)", []),
        ("at()\nfor x in y:\n    pass", None),
    ],
)
def test_conditions_between_a_call_and_a_loop(read, text: str, expected: list[str] | None):
    script, call = read(text)
    (loop,) = script.loops
    conditions = script.conditions_until(call.frame, loop)
    assert (None if conditions is None else [text_of(each.test) for each in conditions]) == expected
    assert script.in_every_round(call.frame, loop) == (expected == [])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("for x in a:\n    for y in b:\n        at()", ["b", "a"]),
        ("def f():\n    for y in b:\n        at()\nfor x in a:\n    f()", ["b", "a"]),
        ("def f():\n    f()\n    at()\nfor x in a:\n    f()", ["a"]),
        ("class A:\n    def f(self): at()\n    def g(self):\n        for x in a:\n            self.f()", ["a"]),
        ("class M(torch.nn.Module):\n    def forward(self): at()\nm = M()\nfor x in a:\n    m()", []),
        ("for x in a:\n    pass\nelse:\n    at()", []),
        ("while True:\n    [at() for x in a]", ["a", ""]),
    ],
)
def test_loops_around_a_call(read, text: str, expected: list[str]):
    script, call = read(text)
    assert [text_of(each.iterates) for each in script.loops_around(call.frame)] == expected


@pytest.mark.parametrize(
    ("text", "surely", "perhaps"),
    [
        ("at()", False, False),
        ("if rank == 0:\n    at()", True, True),
        ("if rank != 0:\n    pass\nelse:\n    at()", True, True),
        ("if rank == 0 and x:\n    at()", True, True),
        ("if rank == 0 or x:\n    at()", False, True),
        ("if not (rank == 0 or x):\n    at()", True, True),
        ("if x.is_main:\n    at()", True, True),
        ("if verbose:\n    at()", False, True),
        ("def f():\n    if rank != 0:\n        return\n    at()\nf()", True, True),
        ("def f(): at()\nif rank == 0:\n    f()", True, True),
        ("def f(): at()\nif rank == 0:\n    f()\nf()", False, False),
        ("def f(): at()\nif rank == 0:\n    start(f)\n    f()", False, False),
        ("@rank_zero_only\ndef f(): at()\nf()", True, True),
        ("def f():\n    def g(): at()\n    g()\nif rank == 0:\n    f()", True, True),
        ("rank == 0 and at()", True, True),
        ("x = at() if rank == 0 else None", True, True),
        ("if rank == 0:\n    def f(): at()\n", True, True),
        ("def f():\n    if rank == 0:\n        def g(): at()\n", True, True),
    ],
)
def test_ranks_that_run_a_call(read, text: str, surely: bool, perhaps: bool):
    script, call = read(text)
    assert (script.some_ranks_only(call.frame), script.perhaps_some_ranks_only(call.frame)) == (surely, perhaps)


@pytest.mark.parametrize(
    ("text", "is_evaluation", "is_training"),
    [
        ("for x in DataLoader(d):\n    at()", True, False),
        ("o = torch.optim.Adam(p)\nfor x in DataLoader(d):\n    at()\n    o.step()", False, True),
        ("def f(k):\n    for x in k: yield x\nfor x in f(DataLoader(d)):\n    at()", True, False),
        ("for x in y:\n    at()", False, False),
        ("for x in [torch.optim.Adam(p)]:\n    x.step()\n    at()", False, False),
    ],
)
def test_loops_over_loaders(read, text: str, is_evaluation: bool, is_training: bool):
    script, call = read(text)
    around = script.loops_around(call.frame)
    assert (any(each in script.evaluation_loops for each in around)) == is_evaluation
    assert (any(each in script.step_loops for each in around)) == is_training


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("at()", False),
        ("at('cuda')", True),
        ("at(f'cuda:{rank}')", True),
        ("at('cuda_graphs.txt')  # 'cuda'", False),
        ("at(model.cuda())", True),
        ("torch.cuda.set_device(at())", True),
    ],
)
def test_gpus_are_used_where_a_value_says_so(read, text: str, expected: bool):
    """A comment or another word does not."""
    script, _ = read(text)
    assert script.uses_gpus == expected


def test_an_expression_of_a_rules_own_is_read_where_it_is_asked_about(read):
    text = "x = DataLoader(d)\ndef f():\n    x = torch.optim.Adam(p)\n    at()\n"
    script, call = read(text)
    for expression, inside, outside in (("x", "optimizer", "loader"), ("iter(x)", "optimizer", "loader")):
        node = cst.parse_expression(expression)
        for frame, expected in ((call.frame, inside), (script.files[0].frames[script.files[0].module], outside)) * 2:
            assert script.kinds(node, frame) == {expected}


def test_a_module_that_is_too_long_is_not_read(tmp_path: Path):
    (tmp_path / "large.py").write_text("x = 1\n" * 10_001)
    (tmp_path / "train.py").write_text("from large import x\nprint(x)\n")
    script = Script(tmp_path / "train.py")
    assert len(script.files) == 1
    (note,) = script.notes
    assert "large.py was not read: the script and its modules have more lines" in note


def test_what_tuples_and_dictionaries_hold(read):
    script, at = read("a = [DataLoader(d), {'x': torch.optim.Adam(p), 'y': ()}]\na.append(a)\nb = (a, [a])\nat(b)\n")
    values = script.values(at.node.args[0].value, at.frame)
    assert {each.kind for each in values} == {"tuple"}
    assert {each.kind for each in script.parts(values)} == {"tuple", "dict", "loader", "optimizer"}
    made = script.makers(script.parts(values))
    assert sorted(each.last for each in made) == ["Adam", "DataLoader"]
    assert [each.last for each in script.makers(script.parts(values), "optimizer", "model")] == ["Adam"]


def test_a_list_that_holds_itself(read):
    script, at = read("a = [DataLoader(d)]\na = [a, a]\nat(a)\n")
    values = script.values(at.node.args[0].value, at.frame)
    assert {each.kind for each in script.parts(values)} == {"tuple", "loader"}


def test_a_name_of_a_rule_is_read_anew_in_each_frame(read):
    script, at = read("x = DataLoader(d)\ndef f(x):\n    y = x\nf(torch.optim.Adam(p))\nat(f)\n")
    own = cst.parse_expression("x")
    function = script.files[0].functions["f"]
    inside = next(each.frame for each in script.files[0].assignments if each.frame.function is function)
    for _ in range(2):
        assert script.kinds(own, at.frame) == {"loader"}
        assert script.kinds(own, inside) == {"optimizer"}
