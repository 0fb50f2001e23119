"""`evenstep bench compare` as far as it needs no ranks: ratios with their spread, losses, and commands refused."""

from __future__ import annotations

import io
import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from evenstep.cli.main import main
from evenstep.errors import ConfigurationError
from evenstep.tools.bench.compare import (
    as_data,
    compare_losses,
    losses_of,
    remarks,
    summarise,
    table,
    validate_scripts,
    verdicts,
)
from evenstep.tools.bench.plan import Setting
from evenstep.tools.bench.runs import Wish
from evenstep.tools.bench.scaling import Run, Spread
from evenstep.tools.bench.watching import LossWatch
from evenstep.tools.observing.patching import Patches
from evenstep.tools.observing.record import Recorder
from tests.bench_runs import CALM, FACTS, make_run

WISH = Wish("a.py", (), (2,), 20, 3, 1, watches_losses=True)
NAMES = ("a.py", "b.py")


def run_of(pace: float, *, rows: int = 32, losses: list[list[float]] | None = None) -> Run:
    """Two ranks whose step takes `pace` times as long as usual; losses by rank and step, all of weight 2."""
    run = make_run(
        Setting(2, None),
        lambda rank, step: {name: seconds * pace for name, seconds in CALM.items()},
        rows=rows,
        noise=0,
        facts=FACTS,
    )
    seen = losses or [[3.0, 2.0, 1.0]] * 2
    records = [replace(r, losses=tuple((2 * x, 2.0) for x in seen[r.rank])) for r in run.records]
    return replace(run, records=tuple(records))


# ---------------------------------------------------------------------- ratios


def test_a_ratio_is_taken_within_a_round() -> None:
    """The host gets slower by half and by two, and the ratio of the scripts doesn't move."""
    rounds = [(run_of(pace), run_of(1.5 * pace)) for pace in (1.0, 1.5, 2.0)]
    first, other = summarise(NAMES, rounds)
    assert first.ratio == Spread(1.0, 1.0, 1.0)
    assert first.losses is None
    assert (other.ratio.low, other.ratio.median, other.ratio.high) == pytest.approx([1.5] * 3, rel=1e-3)
    assert other.ratios == pytest.approx([1.5] * 3, rel=1e-3)
    assert other.step_s.median == pytest.approx(1.5 * first.step_s.median, rel=1e-3)
    assert first.step_s.low < first.step_s.median < first.step_s.high
    assert verdicts([first, other]) == [
        "b.py: slower than a.py in every round, 1.50 times as long; losses: the same in 3 steps"
    ]


def test_another_batch_is_told_and_compared_by_the_sample() -> None:
    rounds = [(run_of(1.0), run_of(1.5, rows=64))] * 3
    sides = summarise(NAMES, rounds)
    assert sides[1].ratio.median == pytest.approx(0.75, rel=1e-3)
    (line,) = remarks(WISH, sides, rounds)
    assert line == "b.py takes 128 samples a step, and a.py 64: they are compared by the sample"
    unknown = [(run_of(1.0), run_of(1.5, rows=0))] * 3
    sides = summarise(NAMES, unknown)
    assert sides[1].ratio.median == pytest.approx(1.5, rel=1e-3), "by the step, where samples of one aren't known"
    (line,) = remarks(WISH, sides, unknown)
    assert line == "no tensor went into a model of b.py, so its samples aren't known"


def test_the_table_and_the_file_have_a_line_for_each_script() -> None:
    rounds = [(run_of(1.0), run_of(1.5), run_of(1.0, losses=[[3.0, math.nan, 1.0]] * 2))] * 3
    sides = summarise(("a.py", "b.py", "a.py (2)"), rounds)
    out = io.StringIO()
    Console(file=out, width=80).print(table(sides, WISH))
    assert "…" not in out.getvalue()
    assert [word in out.getvalue() for word in ("a.py (2)", "1.5 (1.5 to 1.5)", "On 2 ranks, 3 rounds")] == [True] * 3
    data = json.loads(json.dumps(as_data(sides, ["a remark"], WISH), allow_nan=False))
    assert [each["name"] for each in data["scripts"]] == ["a.py", "b.py", "a.py (2)"]
    assert data["scripts"][1]["ratio"]["median"] == pytest.approx(1.5, rel=1e-3)
    assert [each["losses"] and each["losses"]["difference"] for each in data["scripts"]] == [None, 0, "inf"]
    assert data["remarks"] == ["a remark"]


# ---------------------------------------------------------------------- losses


@pytest.mark.parametrize(
    ("others", "told"),
    [
        ([[2.0, 1.5, 1.0]], "the same in 3 steps"),
        ([[2.0, 1.6, 1.1]], "apart by 0.05 of the largest in step 2 of 3 steps; rounds of the first script by 0"),
        ([[2.0, 1.5, math.nan]], "apart by inf of the largest in step 3 of 3 steps; rounds of the first script by 0"),
        ([[2.0, 1.5]], "the same in 2 steps"),
        ([[2.0, None, 1.0]], "the same in 2 steps"),
        ([[]], "not compared: both scripts need a step whose backward pass begins with a single number, the loss"),
    ],
)
def test_losses_are_the_same_or_apart_or_not_compared(others: list[list[float | None]], told: str) -> None:
    assert str(compare_losses([[2.0, 1.5, 1.0]], others)) == told


def test_losses_that_end_in_nan_alike_are_the_same() -> None:
    losses = [[1.0, math.nan, math.inf]]
    assert compare_losses(losses, losses).difference == 0
    assert compare_losses([[0.0, 0.0]], [[0.0, 1e-9]]).difference == math.inf


def test_a_loss_is_the_mean_over_ranks_by_their_weights(fresh_seed: int) -> None:
    draw = random.Random(fresh_seed)
    values = [[draw.uniform(0, 5) for _ in range(3)] for _ in range(2)]
    weights = [[draw.randrange(1, 9) for _ in range(3)] for _ in range(2)]
    run = run_of(1.0)
    records = [
        replace(r, losses=(*((v * w, w) for v, w in zip(values[r.rank], weights[r.rank], strict=True)), (0, 0)))
        for r in run.records
    ]
    expected = [
        sum(values[r][s] * weights[r][s] for r in range(2)) / sum(weights[r][s] for r in range(2)) for s in range(3)
    ]
    found = losses_of(replace(run, records=tuple(records)))
    assert found[:3] == pytest.approx(expected)
    assert found[3] is None


def test_backward_passes_are_seen_by_step() -> None:
    watch = LossWatch()
    x = torch.ones(3, requires_grad=True)
    with Patches() as patches:
        recorder = Recorder(watch)
        recorder.install(patches)
        (2 * x).sum().backward()
        (x * x).sum().backward()  # a second micro-batch: plain passes add up
        recorder.num_steps = 1
        torch.autograd.backward([3 * x.mean()], [torch.tensor(12.0)])
        torch.autograd.backward(x.mean() / 0, torch.tensor(0.0))  # an empty share
    assert list(watch.by_step(3)) == [(9.0, 1.0), (36.0, 12.0), (0, 0.0)]


# ---------------------------------------------------------------------- the command


def test_the_same_script_twice_has_two_names(tmp_path: Path) -> None:
    script = str(tmp_path / "a.py")
    Path(script).write_text("")
    assert validate_scripts([script, script, script]) == (script, f"{script} (2)", f"{script} (3)")
    with pytest.raises(ConfigurationError, match="no such script"):
        validate_scripts([script, str(tmp_path / "b.py")])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "the following arguments are required: script"),
        (["{}"], "bench compare needs two scripts or more"),
        (["{}", "no/such.py"], "no/such.py: no such script"),
        (["--steps", "999", "{}", "{}"], "--steps 999: at most 995 are remembered"),
        (["--json", "no/such/file.json", "{}", "{}"], "--json no/such/file.json: can't be written"),
    ],
)
def test_commands_that_make_no_sense(
    arguments: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.py").write_text("raise SystemExit('it is started')")
    assert main(["bench", "compare", *(each.format(tmp_path / "a.py") for each in arguments)]) == 78
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert told in err
