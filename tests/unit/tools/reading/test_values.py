"""What names stand for: each script ends with an expression, and is asked for its value."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("libcst")

import libcst as cst

from evenstep.tools.convert.values import Flow as OneFlow
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
        ("DataLoader(d)", "loader(DataLoader)"),
        ("make_something()", ""),
        ("def f(g): g()\ng", ""),
        ("x: object = DataLoader(d)\nx", "loader(DataLoader)"),
        ("(x := DataLoader(d))\nx", "loader(DataLoader)"),
        ("with DataLoader(d) as x: pass\nx", "loader(DataLoader)"),
        ("x, (y, *z) = 1, (2, DataLoader(d))\nz", "loader(DataLoader)"),
        ("x = (nn.Linear(1, 1), DataLoader(d))\nx[0]", "object(nn.Linear)"),
        ("x = [nn.Linear(1, 1), DataLoader(d)]\nx[1]", "loader(DataLoader)"),
        ("x = [nn.Linear(1, 1), DataLoader(d)]\nx[i]", "loader(DataLoader) object(nn.Linear)"),
        ("x = {'a': nn.Linear(1, 1), 'b': DataLoader(d)}\nx['b']", "loader(DataLoader)"),
        ("x = {}\nx['a'] = DataLoader(d)\nx['b']", "loader(DataLoader)"),
        ("x = {'a': DataLoader(d)}\nfor k, v in x.items(): pass\nv", "loader(DataLoader)"),
        ("x = {'a': DataLoader(d)}\nfor k, v in x.items(): pass\nk", ""),
        ("for x, y in ((DataLoader(d), Adam(p)),): pass\ny", "optimizer(Adam)"),
        ("x = [DataLoader(e) for e in d]\nx[0]", "loader(DataLoader)"),
        ("x = random_split(d, n)\nx[1]", "dataset(random_split)"),
        ("def f():\n    global x\n    x = DataLoader(d)\nx", "loader(DataLoader)"),
        ("def f():\n    x = DataLoader(d)\nx", ""),
        (
            "def f():\n    x = None\n    def g():\n        nonlocal x\n        x = Adam(p)\n    return x\nf()",
            "optimizer(Adam)",
        ),
        ("def f(a, *, b): return b\nf(DataLoader(d), b=Adam(p))", "optimizer(Adam)"),
        (
            "def f():\n    def g(): return Adam(p)\ndef h():\n    def g(): return DataLoader(d)\n    return g()\nh()",
            "loader(DataLoader)",
        ),
        ("def f(a, b): return b\nf(*c, DataLoader(d))", ""),
        ("DataLoader(d) or None", "loader(DataLoader)"),
        ("DataLoader(d) if a else None", "loader(DataLoader)"),
        ("DataLoader(d) if a else g", "loader(DataLoader) unknown"),
        ("def f(torch): torch.optim.Adam(p)\nf", "function"),
        ("async def f(): return await DataLoader(d)\nf()", "loader(DataLoader)"),
        ("torch.optim.swa_utils.AveragedModel(m)", ""),
        ("torch.optim.lr_scheduler.LambdaLR(o)", "scheduler(torch.optim.lr_scheduler.LambdaLR)"),
        ("import lion_pytorch\nlion_pytorch.Lion(p)", "optimizer(lion_pytorch.Lion)"),
        ("torch.cuda.amp.GradScaler()", "scaler(torch.cuda.amp.GradScaler)"),
        ("import made\nmade.Thing()", "object(made.Thing)"),
        ("models = {}\nmodels['net']()", "object(models['net'])"),
    ],
)
def test_values(text: str, expected: str):
    assert " ".join(sorted(map(shown, values_of(text)))) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("m = nn.Linear(1, 1).to(d)\nm.eval()", "object(nn.Linear)"),
        ("m = nn.Linear(1, 1)\nm.weight", "part(object(nn.Linear))"),
        ("m = nn.Linear(1, 1)\nm.weight.parameters()", "parameters(nn.Linear)"),
        ("m = nn.Linear(1, 1)\n[*a] + list(m.parameters())", ""),
        ("m = nn.Linear(1, 1)\na + [p for p in m.parameters()]", "parameters(nn.Linear)"),
        ("m = nn.Linear(1, 1)\nm.state_dict()", "state(m.state_dict)"),
        ("DDP(nn.Linear(1, 1))", "wrapped(DDP)"),
        ("DDP(nn.Linear(1, 1)).module", "object(nn.Linear)"),
        ("m = nn.Linear(1, 1)\nm = DDP(m)\nm = DDP(m)\nm.module", "object(nn.Linear)"),
        ("class M(nn.Module):\n    def f(self): return Adam(p)\nM().f()", "optimizer(Adam)"),
        ("class M(nn.Module):\n    def forward(self, x): return x\nM()(Adam(p))", ""),
        ("class M:\n    def __call__(self, x): return x\nM()(Adam(p))", "optimizer(Adam)"),
        ("class M(nn.Module):\n    def __init__(self): self.x = Adam(p)\nM().x", "part(object(M))"),
        ("class M:\n    def __init__(self): self.x = Adam(p)\nM().x", "optimizer(Adam)"),
        ("class M:\n    def __init__(self, x): self.x = x\nM(Adam(p)).x", "optimizer(Adam)"),
        ("class M:\n    @staticmethod\n    def f(x, y): return y\nM().f(1, Adam(p))", "optimizer(Adam)"),
        ("cfg.x = Adam(p)\ncfg.x", "optimizer(Adam)"),
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
        ("A().x", "loader(DataLoader)"),
    ],
)
def test_attributes_of_classes_above_and_below(text: str, expected: str):
    assert " ".join(sorted(map(shown, values_of(CLASSES + text)))) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("for x, y in l: pass\nx", "batch"),
        ("for i, (x, y) in enumerate(l): pass\ny", "batch"),
        ("for i, (x, y) in enumerate(l): pass\ni", ""),
        ("for pair in enumerate(l): pass\npair[1]", "batch"),
        ("for i, (x, y) in enumerate(zip(l, k)): pass\ny", ""),
        ("for i, (x, y) in enumerate(zip(k, l)): pass\ny", "batch"),
        ("for x in tqdm(l): pass\nx", "batch"),
        ("x = next(iter(l))\nx.to(d)[0]", "batch(iter)"),
        ("for x in l: pass\nx.shape", ""),
        ("for x in l: pass\nx.mean()", ""),
        ("for x in l:\n    for k, v in x.items(): pass\nv", "batch"),
        ("iter(l)", "iterator(DataLoader)"),
        ("list(l)", "passed(loader(DataLoader))"),
        ("for x in list(l): pass\nx", ""),
        ("def g(k):\n    for x, y in k: yield x.to(d), y\ng(l)", "iterator(DataLoader)"),
        ("def g(k):\n    for x, y in k: yield x.to(d), n\ng(l)", "passed(loader(DataLoader))"),
        ("def g(k): yield from k\ng(l)", "iterator(DataLoader)"),
        ("def g(k):\n    for x in k: yield n\ng(l)", "passed(loader(DataLoader))"),
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
        ("dist.get_rank()", {"rank"}),
        ("int(os.environ['LOCAL_RANK'])", {"local rank"}),
        ("os.environ.get('WORLD_SIZE', 1)", {"world size"}),
        ("os.environ['HOME']", set()),
        ("args.local_rank", {"local rank"}),
        ("args.is_main_process", {"main"}),
        ("def main(): pass\nmain", {"function"}),
        ("r == 0", {"main"}),
        ("0 == r", {"main"}),
        ("r != 0", {"others"}),
        ("r > 0", {"others"}),
        ("r >= 0", set()),
        ("r < 1", {"main"}),
        ("r <= 0", {"main"}),
        ("r < 4", set()),
        ("r == 1", {"main"}),
        ("0 <= r < 1", set()),
        ("r == dist.get_world_size() - 1", {"main"}),
        ("r in (-1, 0)", {"main"}),
        ("r in (0, 1)", set()),
        ("not r", {"main"}),
        ("not r == 0", {"others"}),
        ("r % 8 == 0", set()),
        ("r == 0 and x", {"main"}),
        ("os.environ['LOCAL_RANK'] == '0'", set()),
        ("int(os.environ['LOCAL_RANK']) == 0", {"main", "local main"}),
        ("dist.get_world_size() == 1", set()),
        ("def f(a, b): return b\ntorch.multiprocessing.spawn(f, args=(DataLoader(d),))\nf(1, 2)", {"loader"}),
        ("def f(a, b): return a\ntorch.multiprocessing.spawn(f, args=(DataLoader(d),))\nf(1, 2)", {"rank"}),
    ],
)
def test_ranks(text: str, expected: set[str]):
    assert {each.kind for each in values_of(f"r = dist.get_rank()\n{text}")} == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("accelerator.prepare(DataLoader(d))", {"loader"}),
        ("accelerator.prepare(nn.Linear(1, 1))", {"wrapped"}),
        ("m, l = accelerator.prepare(nn.Linear(1, 1), DataLoader(d))\nl", {"loader"}),
        ("m, l = accelerator.prepare(nn.Linear(1, 1), DataLoader(d))\nm", {"wrapped"}),
        ("m = accelerator.prepare(nn.Linear(1, 1))\naccelerator.unwrap_model(m)", {"object"}),
        ("accelerator.is_main_process", {"main"}),
        ("accelerator.is_local_main_process", {"main", "local main"}),
        ("accelerator.device", {"device of this rank"}),
    ],
)
def test_what_accelerate_makes(text: str, expected: set[str]):
    text = f"from accelerate import Accelerator\naccelerator = Accelerator()\n{text}"
    assert {each.kind for each in values_of(text)} == expected


def test_what_holds_itself_is_read():
    for text, expected in (
        ("x = [x[0], DataLoader(d)]\nx[i]", {"loader"}),
        ("x = [x[k] for k in x]\nx", {"items"}),
        ("m = [m, Adam(p)]\nfor a in m: m = a\nm", {"items", "optimizer"}),
        ("s = {'a': Adam(p)}\nfor k in s: s = s[k].state_dict()\ns", {"items", "state"}),
    ):
        assert {each.kind for each in values_of(text)} == expected


def test_a_part_of_a_model_is_the_model_for_convert():
    text = f"{IMPORTS}m = nn.DataParallel(nn.Linear(1, 1))\n"
    for expression in ("m", "m.module", "m.module.weight"):
        file = File(cst.parse_module(f"{text}{expression}\n"))
        assert [shown(each) for each in OneFlow(file).of(last(file))] == ["object(nn.Linear)"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from parts.data import load\nload()", {"loader"}),
        ("import parts.data\nparts.data.load()", {"loader"}),
        ("from parts import data as d\nd.load()", {"loader"}),
        ("from parts import load\nload()", {"loader"}),  # by way of the package
        ("from parts.data import READY\nREADY", {"loader"}),
        ("from parts.data import *\nREADY", {"loader"}),
        ("from parts.data import Holder\nHolder().held", {"loader"}),
        ("from parts.data import Holder\nclass H(Holder): pass\nH().held", {"loader"}),
        ("from parts.data import build\nbuild()", {"model"}),
        ("import torch\ndef build(): return torch.nn.Linear(1, 1)\nbuild()", {"model"}),
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
