"""A user's mistake ends every rank with one message, no traceback, and a status of its own; nothing hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import call

PREAMBLE = """
import torch, evenstep
from torch import nn

class NoLength:
    def __getitem__(self, index):
        return index

world = evenstep.init()
odd = world.rank == 1
"""

MISTAKES = {
    "parameter count": (
        "evenstep.DistributedDataParallel(nn.Sequential(*[nn.Linear(2, 2)] + [nn.Linear(2, 2)] * odd))",
        72,
        "MismatchError: the ranks don't have the same model: rank 0 has 2 parameters, rank 1 has 4; the first that "
        "only rank 1 has is '1.weight' [2, 2].",
    ),
    "parameter shape": (
        "evenstep.DistributedDataParallel(nn.Linear(2, 3 if odd else 2))",
        72,
        "parameter 'weight' has shape [2, 2] on rank 0 but [3, 2] on rank 1.",
    ),
    "parameter dtype": (
        "evenstep.DistributedDataParallel(nn.Linear(2, 2, dtype=torch.float64 if odd else None))",
        72,
        "parameter 'weight' has dtype float32 on rank 0 but float64 on rank 1.",
    ),
    "parameter order": (
        "m = nn.Module()\nfor n in ('ba' if odd else 'ab'): setattr(m, n, nn.Linear(2, 2))\n"
        "evenstep.DistributedDataParallel(m)",
        72,
        "parameter 0 is 'a.weight' on rank 0 but 'b.weight' on rank 1 (registered in another order).",
    ),
    "small global batch": ("evenstep.DataLoader(range(10), global_batch_size=1)", 78, "ConfigurationError: "),
    "empty data set": ("evenstep.DataLoader([], global_batch_size=4)", 78, "ConfigurationError: "),
    "no length": ("evenstep.DataLoader(NoLength(), global_batch_size=4)", 78, "ConfigurationError: "),
    "init twice": ("evenstep.init(seed=3)", 78, "evenstep.init was called before with other arguments: now seed=3"),
    "the world has ended": (
        "m = evenstep.DistributedDataParallel(nn.Linear(1, 1))\nworld.close()\nm(torch.ones(1, 1)).sum().backward()",
        1,
        "the world of evenstep.init has ended, with its `with` block or by close(), at script.py:12 in <module>.",
    ),
    "mixed backwards": (
        "m = evenstep.DistributedDataParallel(nn.Linear(1, 1))\nx = torch.ones(1, 1)\n"
        "with m.accumulate(): m.backward(m(x).sum())\nm(x).sum().backward()",
        1,
        "UsageError: loss.backward() after model.backward(loss, ...) in the same accumulation window",
    ),
}


@pytest.mark.extended(beyond=4)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_message_and_an_exit_status(tmp_path: Path, mistake: str) -> None:
    code_of_user, status, words = MISTAKES[mistake]
    code, command = call(
        tmp_path, ["--nproc-per-node", "2", "--device", "cpu", "script.py"], PREAMBLE + code_of_user + "\nprint('on')"
    )
    assert code == status
    assert words in command.stderr
    assert command.stderr.count(words) == 1, "said once, whichever rank said it first"
    assert "Traceback" not in command.stderr
    assert "script.py, line" in command.stderr
    assert command.stdout == ""
    assert command.leaves_no_process()


@pytest.mark.extended
def test_under_torchrun_every_rank_says_it_and_ends(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PREAMBLE + MISTAKES["parameter shape"][0])
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=90,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert result.returncode != 0
    assert "MismatchError: the ranks don't have the same model" in result.stderr
    assert 'File "' + str(script) not in result.stderr, "no traceback of the user's script"
    assert "exitcode  : 72" in result.stderr


HALF = {"RANK": "0", "WORLD_SIZE": "2"}
SAYS_HALF = "ConfigurationError: RANK=0, WORLD_SIZE=2 are set without LOCAL_RANK"


@pytest.mark.extended(beyond=2)
@pytest.mark.parametrize(
    ("call", "variables", "message"),
    [
        ("init(seed='zero')", {}, "ConfigurationError: evenstep.init: seed='zero'; a whole number from 0 to "),
        ("DataLoader(range(8), 2)", HALF, SAYS_HALF),
        ("init(5)", {}, "ConfigurationError: evenstep.init: arguments without a name: none. Write the names of"),
        ("init(sed=0)", {}, "ConfigurationError: evenstep.init: there is no argument sed. Did you mean seed?"),
        ("DataLoader([], 4)", {}, "ConfigurationError: "),
        ("init()", HALF, SAYS_HALF),
        ("DistributedSampler(range(4))", HALF, SAYS_HALF),
    ],
)
def test_without_a_launcher_a_mistake_is_one_line_with_its_place(
    tmp_path: Path, call: str, variables: dict[str, str], message: str
) -> None:
    """Also if nothing has seen to how this process ends before that call."""
    script = tmp_path / "script.py"
    script.write_text(f"import evenstep\nevenstep.{call}\n")
    result = subprocess.run(
        [sys.executable, script.name],
        cwd=tmp_path,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 78, result.stderr
    first, *others = result.stderr.splitlines()
    assert first.startswith(f"evenstep: {message}")
    assert others == [f"  at {script}, line 2, in <module>"]
