"""Where calls run: in which loops, under which conditions, on which ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("libcst")


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
        ("for x in y:\n    if x:\n        continue\n    at()", ["x"]),
        ("def f(): at()\nfor x in y:\n    if x:\n        f()", ["x"]),
        # Two ways lead there, and the one without a condition counts.
        ("def f(): at()\nfor x in y:\n    if x:\n        f()\n    f()", []),
        ("def f(n):\n    at()\n    f(n - 1)\nfor x in y:\n    f(1)", []),
        ("at()\nfor x in y:\n    pass", None),
    ],
)
def test_conditions_between_a_call_and_a_loop(read, text: str, expected: list[str] | None):
    script, call = read(text)
    (loop,) = script.loops
    conditions = script.conditions_until(call.frame, loop)
    assert (None if conditions is None else [text_of(each.test) for each in conditions]) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f():\n    for y in b:\n        at()\nfor x in a:\n    f()", ["b", "a"]),
        ("def f():\n    f()\n    at()\nfor x in a:\n    f()", ["a"]),
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
        ("if rank == 0 and x:\n    at()", True, True),
        ("if rank == 0 or x:\n    at()", False, True),
        ("if not (rank == 0 or x):\n    at()", True, True),
        ("if verbose:\n    at()", False, True),
        ("def f():\n    if rank != 0:\n        return\n    at()\nf()", True, True),
        ("def f(): at()\nif rank == 0:\n    f()\nf()", False, False),
        ("def f(): at()\nif rank == 0:\n    start(f)\n    f()", False, False),
        ("@rank_zero_only\ndef f(): at()\nf()", True, True),
        ("def f():\n    def g(): at()\n    g()\nif rank == 0:\n    f()", True, True),
        ("def f():\n    if rank == 0:\n        def g(): at()\n", True, True),
    ],
)
def test_ranks_that_run_a_call(read, text: str, surely: bool, perhaps: bool):
    script, call = read(text)
    assert (script.some_ranks_only(call.frame), script.perhaps_some_ranks_only(call.frame)) == (surely, perhaps)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("at()", False),
        ("at(f'cuda:{rank}')", True),
        ("at('cuda_graphs.txt')  # 'cuda'", False),
        ("at(model.cuda())", True),
    ],
)
def test_gpus_are_used_where_a_value_says_so(read, text: str, expected: bool):
    """A comment or another word does not."""
    script, _ = read(text)
    assert script.uses_gpus == expected
