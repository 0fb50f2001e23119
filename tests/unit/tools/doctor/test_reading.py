"""Reading: files, notebooks, encodings, broken input, imports, comments, and what names stand for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("libcst")

from evenstep.errors import ConfigurationError
from evenstep.tools.doctor.examination import examine, read

SCRIPT = """\
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

dist.init_process_group("gloo")
loader = DataLoader(make_data(), batch_size=8)
model = DDP(torch.nn.Linear(2, 2))
optimizer = torch.optim.Adam(model.parameters())
for x in loader:
    model(x).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""
IMPORT = "from torch.utils.data import DataLoader"


def found(path: Path) -> list[tuple[str, int]]:
    return [(each.rule, each.line) for each in read(path).findings]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"def f(:\n    pass\n", r"broken\.py:1: this is not python"),
        (b"x = 1\nif x\n    y = 2\n", r"broken\.py:2: this is not python"),
        (b"# -*- coding: klingon -*-\nx = 1\n", r"not text in the encoding it declares.*unknown encoding"),
        (b"\x7fELF\x00\x00\x00", r"a python script"),
        (b"x = " + b"(" * 3000 + b")" * 3000, r"broken\.py:1: .*too many nested parentheses"),
        (b"x = 1" + b" + 1" * 5000, r"broken\.py: .*nest"),
    ],
)
def test_what_is_not_python_is_refused_with_its_place(tmp_path: Path, data: bytes, message: str):
    (tmp_path / "broken.py").write_bytes(data)
    with pytest.raises(ConfigurationError, match=message):
        read(tmp_path / "broken.py")


@pytest.mark.parametrize("encoding", ["utf-8-sig", "latin-1", "shift_jis"])
def test_other_encodings_and_line_ends_are_read(tmp_path: Path, encoding: str):
    name = {"latin-1": "Größe", "shift_jis": "大きさ"}.get(encoding, "Größe 大きさ")
    declared = "" if encoding.startswith("utf") else f"# -*- coding: {encoding} -*-"
    text = f"{declared}\n# {name}\n{SCRIPT}".replace("\n", "\r\n")
    (tmp_path / "train.py").write_bytes(text.encode(encoding))
    assert found(tmp_path / "train.py") == [("EV101", 9)]


HELPERS = """\
import json
import os
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.utils.tensorboard import SummaryWriter

RANK = int(os.environ.get("RANK", -1))


@contextmanager
def main_goes_first(rank):
    if rank not in {-1, 0}:
        dist.barrier()
    yield
    if rank == 0:
        dist.barrier()


class Log:
    def __init__(self, folder):
        self.writer = SummaryWriter(folder)


class Unused:
    def __init__(self):
        self.writer = SummaryWriter("runs")


def export(model):
    torch.save(model.state_dict(), "exported.pt")


def note(path, numbers):
    with open(path, "w") as file:
        json.dump(numbers, file)


def save(model):
    torch.save(model.state_dict(), "model.pt")


def main():
    save(torch.nn.Linear(2, 2))


if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        ("", []),
        ("log = helpers.Log('runs') if helpers.RANK in {-1, 0} else None\n", []),
        ("log = helpers.Log('runs')\n", [("EV203", "SummaryWriter(folder)")]),
        ("with helpers.main_goes_first(int(os.environ['RANK'])):\n    download()\n", []),
        ("if dist.get_rank() == 0:\n    helpers.save(model.module)\n", []),
        ("helpers.save(model.module)\n", [("EV204", "torch.save(")]),
        ("helpers.note('numbers.json', [])\n", [("EV205", "open(path")]),
    ],
)
def test_of_an_imported_module_only_what_the_script_runs_counts(
    tmp_path: Path, added: str, expected: list[tuple[str, str]]
):
    write(tmp_path / "helpers.py", HELPERS)
    text = SCRIPT.replace("import torch\n", "import os\n\nimport helpers\nimport torch\n", 1)
    text = text.replace("make_data(), batch_size=8", "data, sampler=(sampler := DistributedSampler(data))")
    text = text.replace("for x in loader", "sampler.set_epoch(0)\nfor x in loader")
    text = text.replace(IMPORT, f"{IMPORT}, DistributedSampler")
    text = text.replace("dist.destroy", f"{added}dist.destroy")
    received = read(write(tmp_path / "train.py", text)).findings
    lines = {path: (tmp_path / path).read_text().splitlines() for path in ("helpers.py", "train.py")}
    shown = [(each.rule, lines[Path(each.path).name][each.line - 1]) for each in received]
    assert len(shown) == len(expected), shown
    for (rule, line), (expected_rule, part) in zip(shown, expected, strict=True):
        assert rule == expected_rule
        assert part in line


def test_a_notebook_is_read_by_cell(tmp_path: Path):
    first, second = SCRIPT.split("model =")
    cells = [
        {"cell_type": "markdown", "source": ["# Training"]},
        {
            "cell_type": "code",
            "source": ["%matplotlib inline\n", "!pip install something\n", "import os\n", "os.path?"],
        },
        {"cell_type": "code", "source": first.splitlines(keepends=True)},
        {"cell_type": "code", "source": "%%bash\nls -l | grep x\n"},
        {"cell_type": "code", "source": f"model ={second}"},
    ]
    path = write(tmp_path / "train.ipynb", json.dumps({"cells": cells, "nbformat": 4}))
    report = examine(str(path))
    (finding,) = report.findings
    assert (finding.rule, finding.cell, finding.line) == ("EV101", 3, 7)
    assert finding.place.endswith("train.ipynb, cell 3:7")
    assert report.notes == ["A notebook is read, not run."]
    assert report.num_steps is None


@pytest.mark.parametrize(
    ("comment", "is_found"),
    [
        ("# evenstep: ignore[EV101]", False),
        ("# evenstep: ignore[EV102, EV101]", False),
        ("# evenstep: ignore[EV102]", True),
    ],
)
def test_a_comment_in_the_line_switches_a_rule_off(tmp_path: Path, comment: str, is_found: bool):
    text = SCRIPT.replace("batch_size=8)", f"batch_size=8)  {comment}")
    report = examine(str(write(tmp_path / "train.py", text)), runs=False)
    assert bool(report.findings) == is_found


def test_what_was_looked_at_is_said(tmp_path: Path):
    text = SCRIPT.replace("make_data(), batch_size=8", "make_data(), **options.loader")
    report = examine(str(write(tmp_path / "train.py", text)), runs=False)
    assert report.summary().endswith(
        "nothing found (read: 1 loader, 1 wrapped model; not understood: `**options.loader` (line 7))."
    )
    text = SCRIPT.replace("for x in loader", "for x in make_batches()").replace("loader = DataLoader", "other = list")
    report = examine(str(write(tmp_path / "train.py", text)), runs=False)
    assert "0 loaders, 1 wrapped model; not understood: `make_batches()` (line 10)" in report.summary()


def test_a_script_that_is_not_distributed_was_not_examined(tmp_path: Path):
    path = write(tmp_path / "train.py", "import torch\nmodel = torch.nn.Linear(2, 1)\n")
    report = examine(str(path))
    assert (report.summary(), report.is_fine) == (f"{path}: not distributed: not examined.", True)
    assert "evenstep convert" in report.notes[0]
    report = examine(str(write(path, "import deepspeed\n")), runs=False)
    assert report.summary() == f"{path}: no call that makes it distributed is known: not examined."
    write(tmp_path / "engine.py", "from accelerate import Accelerator\n\ndef start():\n    return Accelerator()\n")
    assert read(write(path, "import engine\n\nengine.start()\n")).looked.communicates


def test_modules_are_followed_as_far_as_names_are_taken_from_them(tmp_path: Path):
    """Also by way of a package's `__init__`, relative imports and stars; never more than can be read in a moment."""
    for number in range(30):
        write(tmp_path / f"part{number}.py", f"from part{number + 1} import *\nx{number} = {number}\n")
    write(tmp_path / "part30.py", "")
    received = read(write(tmp_path / "train.py", f"import part0\nprint(part0.x0)\n{SCRIPT}"))
    assert len(received.notes) == 1
    assert "part19.py was not read: the script and its modules have more lines or files" in received.notes[0]


def test_a_long_chain_of_calls_is_read(tmp_path: Path):
    """Each call is asked for by all that follow: once each, and not twice as often with every further call."""
    chain = "".join(f".f{number}(x)" for number in range(60))
    assert found(write(tmp_path / "train.py", f"{SCRIPT}y = model{chain}\n")) == [("EV101", 7)]


def test_calls_behind_a_condition_on_the_rank_are_known_to_the_run(tmp_path: Path):
    text = """import torch.distributed as dist

def report(value):
    if not is_main_process():
        return
    dist.reduce(value, dst=0)

def train(rank, x):
    if x.sum() > 2:
        dist.all_reduce(x)
    if rank == 0:
        print(x)
        dist.barrier()
"""
    path = write(tmp_path / "train.py", text)
    guarded = read(path).facts.guarded
    assert guarded is not None
    assert [(str(path), number) in guarded for number in (6, 10, 13)] == [True, False, True]
