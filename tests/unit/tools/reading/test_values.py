"""What names stand for: each script ends with an expression, and is asked for its value."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("libcst")

import libcst as cst

from evenstep.tools.reading.contexts import Script
from evenstep.tools.reading.tree import File, text_of
from evenstep.tools.reading.values import Flow, Value, Values

IMPORTS = """\
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Adam
from torch.utils.data import DataLoader, random_split
from tqdm import tqdm
"""


def last(file: File) -> cst.BaseExpression:
    """The expression at the end of a file."""
    return next(node.value for node in reversed(file.nodes) if isinstance(node, cst.Expr))


def values_of(text: str) -> Values:
    file = File(cst.parse_module(IMPORTS + text))
    return Flow([file], {}).of(last(file))


def shown(value: Value) -> str:
    """A value's kind, with what made it, or with what is inside of it."""
    made = text_of(value.site.func) if isinstance(value.site, cst.Call) else ""
    inside = made or ", ".join(sorted(map(shown, value.inner)))
    return f"{value.kind}({inside})" if inside else value.kind


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x: object = DataLoader(d)\nx", "loader(DataLoader)"),
        ("x, (y, *z) = 1, (2, DataLoader(d))\nz", "loader(DataLoader)"),
        ("x = [nn.Linear(1, 1), DataLoader(d)]\nx[1]", "loader(DataLoader)"),
        ("x = [nn.Linear(1, 1), DataLoader(d)]\nx[i]", "loader(DataLoader) object(nn.Linear)"),
        ("x = {'a': nn.Linear(1, 1), 'b': DataLoader(d)}\nx['b']", "loader(DataLoader)"),
        ("x = {'a': DataLoader(d)}\nfor k, v in x.items(): pass\nv", "loader(DataLoader)"),
        ("def f():\n    global x\n    x = DataLoader(d)\nx", "loader(DataLoader)"),
        ("def f(a, *, b): return b\nf(DataLoader(d), b=Adam(p))", "optimizer(Adam)"),
        (
            "def f():\n    def g(): return Adam(p)\ndef h():\n    def g(): return DataLoader(d)\n    return g()\nh()",
            "loader(DataLoader)",
        ),
        ("def f(a, b): return b\nf(*c, DataLoader(d))", ""),
        ("DataLoader(d) if a else g", "loader(DataLoader) unknown"),
        ("def f(torch): torch.optim.Adam(p)\nf", "function"),
        ("import lion_pytorch\nlion_pytorch.Lion(p)", "optimizer(lion_pytorch.Lion)"),
    ],
)
def test_values(text: str, expected: str):
    assert " ".join(sorted(map(shown, values_of(text)))) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("m = nn.Linear(1, 1).to(d)\nm.eval()", "object(nn.Linear)"),
        ("m = nn.Linear(1, 1)\n[*a] + list(m.parameters())", ""),
        ("m = nn.Linear(1, 1)\na + [p for p in m.parameters()]", "parameters(nn.Linear)"),
        ("m = nn.Linear(1, 1)\nm.state_dict()", "state(m.state_dict)"),
        ("m = nn.Linear(1, 1)\nm = DDP(m)\nm = DDP(m)\nm.module", "object(nn.Linear)"),
        ("class M(nn.Module):\n    def f(self): return Adam(p)\nM().f()", "optimizer(Adam)"),
        ("class M(nn.Module):\n    def forward(self, x): return x\nM()(Adam(p))", ""),
        ("class M:\n    def __init__(self, x): self.x = x\nM(Adam(p)).x", "optimizer(Adam)"),
        ("class M:\n    @staticmethod\n    def f(x, y): return y\nM().f(1, Adam(p))", "optimizer(Adam)"),
        ("from torch.utils.tensorboard import SummaryWriter\nclass W(SummaryWriter): pass\nW()", "writer(W)"),
    ],
)
def test_objects(text: str, expected: str):
    assert " ".join(sorted(map(shown, values_of(text)))) == expected


def test_what_a_function_makes_is_made_by_its_call():
    """So that two calls of `make_model` make two models; but the model of an optimizer stays that model."""
    make = "def make():\n    m = nn.Linear(1, 1)\n    return m\na, b = make(), make()\n"
    assert [shown(each) for each in values_of(f"{make}a")] == ["object(make)"]
    assert not values_of(f"{make}a") & values_of(f"{make}b")
    both = "def make():\n    m = nn.Linear(1, 1)\n    return m, Adam(m.parameters())\nm, o = make()\n"
    assert [shown(each) for each in values_of(f"{both}m")] == ["object(nn.Linear)"]


CLASSES = """\
class Base:
    def __init__(self): self.own = Adam(p)
    def run(self): return self.x
class A(Base):
    def __init__(self): self.x = DataLoader(d)
    def look(self): return self.x
class B(Base):
    def __init__(self): self.x = Adam(p)
    def look(self): return self.own
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A().look()", "loader(DataLoader)"),  # and not what its sibling has by the same name
        ("A().run()", "loader(DataLoader) optimizer(Adam)"),  # one function, called for both
        ("B().look()", "optimizer(Adam)"),
    ],
)
def test_attributes_of_classes_above_and_below(text: str, expected: str):
    assert " ".join(sorted(map(shown, values_of(CLASSES + text)))) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("for x, y in l: pass\nx", "batch"),
        ("for pair in enumerate(l): pass\npair[1]", "batch"),
        ("for i, (x, y) in enumerate(zip(k, l)): pass\ny", "batch"),
        ("for x in l: pass\nx.shape", ""),
        ("for x in list(l): pass\nx", ""),
        ("def g(k):\n    for x, y in k: yield x.to(d), y\ng(l)", "iterator(DataLoader)"),
        ("def g(k):\n    for x, y in k: yield x.to(d), n\ng(l)", "passed(loader(DataLoader))"),
        (
            "def g(k):\n    last = None\n    for x in k:\n        yield last\n        last = x\ng(l)",
            "passed(loader(DataLoader))",
        ),
        ("def tqdm(k): return k\nm = tqdm(DataLoader(e))\ntqdm(l)", "iterator(DataLoader)"),
    ],
)
def test_batches(text: str, expected: str):
    assert " ".join(sorted(map(shown, values_of(f"l = DataLoader(d)\n{text}")))) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("int(os.environ['LOCAL_RANK'])", {"local rank"}),
        ("args.local_rank", {"local rank"}),
        ("args.is_main_process", {"main"}),
        ("r == 0", {"main"}),
        ("0 == r", {"main"}),
        ("r != 0", {"others"}),
        ("r > 0", {"others"}),
        ("r < 1", {"main"}),
        ("r == dist.get_world_size() - 1", {"main"}),
        ("r in (0, 1)", set()),
        ("not r == 0", {"others"}),
        ("r % 8 == 0", set()),
        ("int(os.environ['LOCAL_RANK']) == 0", {"main", "local main"}),
        ("def f(a, b): return b\ntorch.multiprocessing.spawn(f, args=(DataLoader(d),))\nf(1, 2)", {"loader"}),
        ("def f(a, b): return a\ntorch.multiprocessing.spawn(f, args=(DataLoader(d),))\nf(1, 2)", {"rank"}),
    ],
)
def test_ranks(text: str, expected: set[str]):
    assert {each.kind for each in values_of(f"r = dist.get_rank()\n{text}")} == expected


def test_what_holds_itself_is_read():
    for text, expected in (
        ("x = [x[0], DataLoader(d)]\nx[i]", {"loader"}),
        ("x = [x[k] for k in x]\nx", {"items"}),
        ("m = [m, Adam(p)]\nfor a in m: m = a\nm", {"items", "optimizer"}),
        ("s = {'a': Adam(p)}\nfor k in s: s = s[k].state_dict()\ns", {"items", "state"}),
    ):
        assert {each.kind for each in values_of(text)} == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from parts.data import load\nload()", {"loader"}),
        ("from parts import data as d\nd.load()", {"loader"}),
        ("from parts import load\nload()", {"loader"}),  # by way of the package
        ("from parts.data import *\nREADY", {"loader"}),
        ("from parts.data import Holder\nclass H(Holder): pass\nH().held", {"loader"}),
        ("from parts.data import build\nbuild()", {"model"}),
        ("from parts.data import absent\nabsent()", set()),
    ],
)
def test_names_taken_from_modules(tmp_path: Path, text: str, expected: set[str]):
    package = tmp_path / "parts"
    package.mkdir()
    (package / "__init__.py").write_text("from .data import load\n")
    (package / "data.py").write_text(
        "from torch.utils.data import DataLoader\nfrom .net import Net\nREADY = DataLoader(d)\n"
        "def load():\n    return READY\nclass Holder:\n    def __init__(self):\n        self.held = READY\n"
        "def build():\n    return Net()\n"
    )
    (package / "net.py").write_text("import torch\nclass Net(torch.nn.Module):\n    pass\n")
    path = tmp_path / "train.py"
    path.write_text(text)
    script = Script(path)
    assert script.notes == []
    assert script.kinds(last(script.files[0]), script.files[0].frames[last(script.files[0])]) == expected
