"""The pages on optimizers are true: every program in them is run, on two ranks."""

from __future__ import annotations

import contextlib
import io
import re

import pytest

from evenstep import world as worlds
from tests import pages

PAGES = (
    "how-to/optimizers.md",
    "how-to/mixed-precision.md",
    "how-to/contrastive.md",
    "how-to/learning-rates.md",
    "how-to/local-sgd.md",
)
PROGRAMS = pages.programs(*PAGES)
SAYS = {
    "sharded.py": r"\d+ bytes of state here; the norm was \d+\.\d{3}",
    "finetune.py": r"body trained too: True",
    "bf16.py": r"loss \d\.\d{3}, gradients travel as torch.float32",
    "precision.py": r"scale 256, 0 steps skipped",
    "contrastive.py": r"loss \d\.\d{4} over 1 pairs",
    "rates.py": r"linear rule, times 4.*\n0\.0040 in the first step, 0\.4000 after the warm-up, 0\.0004 in the last",
    "diloco.py": r"20 local steps",
    "divided.py": r"DividedModel: 20 local steps",
    "averages.py": r"evaluated with the average of 4 states",
}


def run(program: str) -> str:
    """On a rank of the pool, whose world the program closes."""
    if worlds._current is not None:  # another test's, made with other arguments
        worlds._current.close()
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        exec(compile(program, "optimizers.md", "exec"), {"__name__": "__main__"})
    return told.getvalue()


def test_every_program_is_run():
    assert PROGRAMS.keys() == SAYS.keys()


@pytest.mark.parametrize("name", SAYS)
def test_program_of_the_page(ranks, name):
    told = ranks.run(run, 2, PROGRAMS[name])
    assert re.search(SAYS[name], told[0]), told[0]
    assert told[1] == ""


@pytest.mark.extended
def test_a_loss_over_all_ranks_is_that_of_one_process(ranks):
    program = PROGRAMS["contrastive.py"].replace("randn(22, 8)", "randn(22, 8).double()")
    program = program.replace("Linear(8, 4)", "Linear(8, 4).double()").replace(
        'world.print(f"loss {loss.item():.4f}', 'print(f"{float(model.module.weight.sum().detach()):.10f}'
    )
    told = [run_alike(ranks, program, nproc) for nproc in (1, 2, 3)]
    assert told[0] == told[1] == told[2]


def run_alike(ranks, program, nproc):
    told = ranks.run(run, nproc, program)
    assert len(set(told)) == 1
    return told[0].splitlines()[-1]
