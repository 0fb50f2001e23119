"""`--fix`: what is certain is written, everything else stays; mends are in the script's own names."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("libcst")

from evenstep.cli.main import main
from evenstep.tools.doctor.examination import read
from evenstep.tools.doctor.fixes import fix
from evenstep.tools.doctor.rules import all_rules

PLANTED = Path(__file__).parents[3] / "scripts" / "planted"
SCRIPT = """\
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

dist.init_process_group("gloo")
my_rank = dist.get_rank()
loader = DataLoader(data, batch_size=8, shuffle=True)
model = DDP(torch.nn.Linear(2, 2))
optimizer = torch.optim.Adam(model.parameters())
for number in range(3):
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
    print("epoch", number,
          "is done")  # for people
torch.save(model.module.state_dict(), "model.pt")
dist.destroy_process_group()
"""
MENDED = """\
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler

dist.init_process_group("gloo")
my_rank = dist.get_rank()
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=True))
model = DDP(torch.nn.Linear(2, 2))
optimizer = torch.optim.Adam(model.parameters())
for number in range(3):
    loader.sampler.set_epoch(number)
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
    if my_rank == 0:
        print("epoch", number,
              "is done")  # for people
if my_rank == 0:
    torch.save(model.module.state_dict(), "model.pt")
dist.destroy_process_group()
"""

RANK, LOCAL = "my_rank = dist.get_rank()", "gpu = int(os.environ['LOCAL_RANK'])"
CLIPPED = """\
        grad_scaler = torch.amp.GradScaler("cuda")
        grad_scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        grad_scaler.step(optimizer)"""


def fixed(path: Path, text: str) -> str:
    path.write_text(text)
    fix(str(path), set(all_rules()))
    return path.read_text()


def test_certain_mends_are_written(tmp_path: Path):
    path = tmp_path / "train.py"
    assert fixed(path, SCRIPT) == MENDED
    assert read(path).findings == []
    assert fix(str(path), set(all_rules())) == ""


def test_encodings_and_ends_of_lines_stay(tmp_path: Path):
    path = tmp_path / "train.py"
    head = "# -*- coding: latin-1 -*-\n# Gr\u00f6\u00dfe\n"
    path.write_bytes((head + SCRIPT).replace("\n", "\r\n").encode("latin-1"))
    fix(str(path), set(all_rules()))
    assert path.read_bytes() == (head + MENDED).replace("\n", "\r\n").encode("latin-1")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('    print("epoch", number,\n          "is done")  # for people', "    print(compute_on_all(model))"),
        (
            'torch.save(model.module.state_dict(), "model.pt")',
            'x = 1; torch.save(model.module.state_dict(), "model.pt")',
        ),
        ('torch.save(model.module.state_dict(), "model.pt")', 'torch.save(model, "model.pt")\ntorch.load("model.pt")'),
        ("shuffle=True)", "shuffle=shuffles)"),
        ("DataLoader(data, batch_size=8, shuffle=True)", "DataLoader(make(), batch_size=8, shuffle=True)"),
    ],
)
def test_what_is_not_certain_stays(before: str, after: str, tmp_path: Path):
    """A print that may communicate, more than one statement in a line, a file that is read, a data set made twice."""
    assert before in SCRIPT
    text = SCRIPT.replace(before, after)
    assert after.splitlines()[0] in fixed(tmp_path / "train.py", text)


def test_a_loader_stays_where_a_function_makes_the_group(tmp_path: Path):
    text = SCRIPT.replace("dist.init_process_group", "def start():\n    dist.init_process_group")
    mended = fixed(tmp_path / "train.py", text.replace("my_rank =", "start()\nmy_rank =", 1))
    assert "DataLoader(data, batch_size=8, shuffle=True)" in mended


@pytest.mark.parametrize("script", sorted(PLANTED.glob("*.py")), ids=lambda path: path.stem)
def test_a_mend_adds_no_finding(script: Path, tmp_path: Path):
    path = tmp_path / "train.py"
    path.write_text(script.read_text())
    before = {each.rule for each in read(path).findings}
    fix(str(path), set(all_rules()))
    compile(path.read_text(), "train.py", "exec")
    assert {each.rule for each in read(path).findings} <= before


def test_the_command_shows_what_it_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    assert main(["doctor", "--fix", "--select", "EV204", "--no-run", str(path)]) == 0
    output = capsys.readouterr().out
    assert '+if my_rank == 0:\n+    torch.save(model.module.state_dict(), "model.pt")' in output
    assert path.read_text() == SCRIPT.replace("torch.save", "if my_rank == 0:\n    torch.save")
    assert main(["doctor", "--fix", "--select", "EV204", "--no-run", str(path)]) == 0
    assert "no mend that is certain, so nothing was changed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rule", "changes", "mend"),
    [
        ("EV101", ('"gloo")\nmy', '"gloo")\nstart()\nmy'), "sampler=DistributedSampler(data, shuffle=True))"),
        ("EV102", ("shuffle=True)", "sampler=(mine := DistributedSampler(data)))"), "loader.sampler.set_epoch(number)"),
        ("EV301", (RANK, f"{LOCAL}\nx.to('cuda')"), "torch.cuda.set_device(gpu)"),
        ("EV110", (RANK, f"{RANK}\na, b = torch.utils.data.random_split(data, [1, 2])"), "(data, [1, 2], generator="),
        ("EV503", ("        optimizer.step()", CLIPPED), "grad_scaler.unscale_(optimizer)"),
    ],
)
def test_mends_have_the_scripts_own_names(rule: str, changes: tuple[str, str], mend: str, tmp_path: Path):
    path = tmp_path / "train.py"
    text = SCRIPT.replace(*changes).replace("import DataLoader", "import DataLoader, DistributedSampler")
    path.write_text(f"import os\n{text}")
    mends = [each.mend for each in read(path).findings if each.rule == rule]
    assert mends
    assert all(mend in each for each in mends), mends


def test_a_name_that_is_given_later_is_no_condition(tmp_path: Path):
    path = tmp_path / "train.py"
    later = SCRIPT.replace(f"{RANK}\n", "").replace("dist.destroy", f"{RANK}\ndist.destroy")
    mended = fixed(path, later)
    assert "if dist.get_rank() == 0:\n        print(" in mended
    assert "my_rank == 0" not in mended
