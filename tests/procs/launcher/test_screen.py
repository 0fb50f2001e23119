"""All that a run writes to the screen, to the letter: nothing but evenstep's lines and the script's.

With any wheel of torch: the one with CUDA brings triton, which an optimizer's first step imports.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.commands import call, start

ANNOUNCED = "evenstep: 2 ranks on 1 node, cpu, 1 thread per rank\n"
RUN = ["--nproc-per-node", "2", "--threads-per-rank", "1", "--device", "cpu"]

TRAINS = """
    import torch, evenstep

    world = evenstep.init(seed=1)
    model = evenstep.DistributedDataParallel(torch.nn.Linear(2, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    print("trained")
"""

# As nanobind binds a C++ class. What the class holds is released with it, and says so.
BINDS = """
    import os

    class Held:
        def __del__(self, write=os.write):
            write(1, b"released\\n")

    kind = type("nb_type_0", (type,), {"__module__": "nanobind"})
    bound = kind("Bound", (), {"held": Held()})
"""


def without_numbers(text: str) -> str:
    """Process ids, run ids and folders differ from run to run."""
    text = re.sub(r"\(pid \d+\)", "(pid N)", text)
    text = re.sub(r"run \d+-\w+, attempt 1 of 1, host [^:]+:", "run ID, attempt 1 of 1, host HOST:", text)
    return re.sub(r"(output of the other ranks:) \S+", r"\1 FOLDER", text)


def test_a_run_writes_one_line_and_what_rank_0_prints(tmp_path: Path) -> None:
    code, command = call(tmp_path, [*RUN, "script.py"], TRAINS)
    assert (code, command.stdout, command.stderr) == (0, "trained\n", ANNOUNCED)


def test_what_a_library_counts_at_pythons_end_is_released(tmp_path: Path) -> None:
    code, command = call(tmp_path, [*RUN, "--all-ranks", "script.py"], BINDS)
    assert (code, command.stderr) == (0, ANNOUNCED)
    assert sorted(command.stdout.splitlines()) == ["[rank 1] released", "released"]


@pytest.mark.extended
def test_a_failing_rank_adds_its_traceback_and_lines_of_ours(tmp_path: Path) -> None:
    script = TRAINS + "    if world.rank == 1:\n        raise KeyError('boom')\n"
    code, command = call(tmp_path, [*RUN, "script.py"], script)
    assert (code, command.stdout) == (1, "trained\n")
    assert without_numbers(command.stderr) == ANNOUNCED + textwrap.dedent(
        """\
        evenstep: run ID, attempt 1 of 1, host HOST: rank 1 (pid N) was between steps, WHERE
        evenstep: output of the other ranks: FOLDER
        Traceback (most recent call last):
          File "script.py", line 11, in <module>
            raise KeyError('boom')
        KeyError: 'boom'
        evenstep: rank 1 (pid N) failed: KeyError: 'boom'
        """
    ).replace("WHERE", "step 1 of this attempt, collective 21")


@pytest.mark.extended
@pytest.mark.parametrize("everywhere", [False, True])
def test_ctrl_c_adds_one_line(tmp_path: Path, everywhere: bool) -> None:
    waits = TRAINS + "    import time\n    open(f'waits-{world.rank}', 'w').close()\n    time.sleep(60)\n"
    command = start(tmp_path, [*RUN, *["--all-ranks"] * everywhere, "script.py"], waits)
    command.wait_until(lambda: all((tmp_path / f"waits-{rank}").exists() for rank in range(2)))
    os.kill(command.process.pid, signal.SIGINT)
    assert command.wait() == 130
    assert sorted(command.stdout.splitlines()) == ["[rank 1] trained"] * everywhere + ["trained"]
    assert command.stderr == ANNOUNCED + "evenstep: interrupted; all ranks were stopped\n"


WARNS = """
    import sys, warnings
    import torch, evenstep

    def work(shows_all):
        world = evenstep.init(seed=1, log_on_all_ranks=shows_all)
        model = evenstep.DistributedDataParallel(torch.nn.Linear(2, 2))
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        warnings.showwarning = lambda message, *_, **__: sys.stderr.write(f"warned: {message}\\n")
        torch.nn.functional.mse_loss(torch.ones(2), torch.ones(2, 1))
        return "trained"

    if __name__ == "__main__":
        print(evenstep.launch(work, args=(len(sys.argv) > 1,), threads_per_rank=1, device="cpu"))
"""


@pytest.mark.extended
@pytest.mark.parametrize("shows_all", [False, True])
def test_launch_shows_a_warning_of_torchs_once(tmp_path: Path, shows_all: bool) -> None:
    """As torchrun's ranks under `evenstep.init`; all of them where the script asks for it."""
    (tmp_path / "script.py").write_text(textwrap.dedent(WARNS))
    command = subprocess.run(
        [sys.executable, "script.py", *["all"] * shows_all],
        cwd=tmp_path,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert (command.returncode, command.stdout) == (0, "trained\n")
    announced, *warned = command.stderr.splitlines()
    assert announced == ANNOUNCED.rstrip() + ", shared memory"
    assert len(warned) == 1 + shows_all
    assert [line for line in warned if not line.startswith("warned: Using a target size (torch.Size([2, 1]))")] == []
