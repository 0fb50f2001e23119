"""Scripts compared by `evenstep bench compare`, from runs that never ran."""

from __future__ import annotations

import dataclasses
import io
import math
import random
from collections.abc import Sequence

import pytest
from rich.console import Console

from evenstep.bench.compare import as_data, compare_losses, compared, difference, print_compared
from evenstep.bench.measure.plan import Setting
from evenstep.bench.measure.runs import Wish
from evenstep.bench.measure.scaling import Run
from evenstep.cli.main import main
from tests.bench_runs import CALM, make_run

WISH = Wish("a.py", (), (2,), "strong", None, 2, 20, 3, 1)


def run_with(losses: Sequence[Sequence[float]], dtype: str = "float32", *, scale: float = 1.0, seed: int = 0) -> Run:
    """On as many ranks as there are sequences of losses; steps take `scale` times as long."""
    phases = {name: scale * ms for name, ms in CALM.items()}
    run = make_run(Setting(len(losses), None), lambda rank, step: phases, seed=seed)
    records = [
        dataclasses.replace(record, losses=tuple(its), loss_dtype=dtype)
        for record, its in zip(run.records, losses, strict=True)
    ]
    return Run(run.setting, tuple(records))


def test_the_ratio_is_that_of_one_round() -> None:
    """The machine becomes twice as slow from round to round; each round says 2."""
    seed = random.randrange(2**32)
    rounds = [
        {0: run_with([[1.0]], scale=2 * 2**r, seed=seed + r), 1: run_with([[1.0]], scale=2**r, seed=seed + r)}
        for r in range(3)
    ]
    first, second = (compared(["a.py", "b.py"], rounds, each) for each in range(2))
    assert (first.speed.median, first.speed.low, first.losses) == (1.0, 1.0, "")
    assert second.speed.low == pytest.approx(2.0, rel=0.02), seed
    assert second.speed.high == pytest.approx(2.0, rel=0.02), seed
    assert second.step_ms.high > 1.5 * second.step_ms.low
    assert second.losses == "the same, bit by bit"


@pytest.mark.parametrize(
    ("first", "other", "words", "differs"),
    [
        ([[1.0, 0.5]], [[1.0, 0.5]], "the same, bit by bit", False),
        ([[1.0, 0.5]], [[1.0, 0.5001]], "the same: at most 1.0e-04 apart", False),
        ([[1.0, 0.5]], [[1.0, 0.6]], "DIFFERENT: 1.0e-01 apart in backward pass 2", True),
        ([[1.0, 0.5]], [[1.0, math.nan]], "DIFFERENT: inf apart in backward pass 2", True),
        ([[1.0, math.nan]], [[1.0, math.nan]], "the same, bit by bit", False),
        # Ranks may divide a batch otherwise: their mean is what is compared.
        ([[1.0, 3.0], [3.0, 1.0]], [[2.0, 2.0], [2.0, 2.0]], "the same, bit by bit", False),
        ([[1.0, 0.5]], [[1.0, 0.5, 0.4]], "not compared: 2 backward passes in a.py, and 3 in b.py", False),
        ([[1.0]], [[]], "not compared: in b.py no backward pass began at a loss of one element", False),
        ([[0.0]], [[0.1]], "DIFFERENT: inf apart in backward pass 1", True),
    ],
)
def test_losses_of_two_scripts(first: list[list[float]], other: list[list[float]], words: str, differs: bool) -> None:
    assert compare_losses([run_with(first)], [run_with(other)], "a.py", "b.py") == (words, differs)


def test_a_script_that_differs_from_itself_may_differ_twice_as_much() -> None:
    unseeded = [run_with([[1.0, 0.5]]), run_with([[1.0, 0.53]])]
    words, differs = compare_losses(unseeded, [run_with([[1.0, 0.55]])] * 2, "a.py", "b.py")
    assert not differs
    assert words == "the same: at most 5.0e-02 apart; runs of one script differ by 3.0e-02"
    words, differs = compare_losses(unseeded, [run_with([[1.0, 0.57]])] * 2, "a.py", "b.py")
    assert differs
    assert words.startswith("DIFFERENT: 7.0e-02 apart in backward pass 2")


def test_sixteen_bits_may_differ_more_and_float64_less() -> None:
    for dtype, expected in (("bfloat16", False), ("float32", True), ("float64", True)):
        runs = [run_with([[1.0]], dtype), run_with([[1.03]], dtype)]
        assert compare_losses(runs[:1], runs[1:], "a.py", "b.py")[1] is expected


def test_where_the_difference_is_largest() -> None:
    assert difference([1.0, 2.0, 4.0], [1.1, 2.4, 4.0]) == (pytest.approx(0.1), 1)
    assert difference([1.0], [1.0]) == (0.0, 0)


def test_what_is_printed_and_written() -> None:
    rounds = [{0: run_with([[1.0]]), 1: run_with([[2.0]], scale=0.5)}]
    found = [compared(["a.py", "b[1].py"], rounds, each) for each in range(2)]
    text = io.StringIO()
    print_compared(found, dataclasses.replace(WISH, num_steps=30), Console(file=text, width=120))
    assert "speed over a.py" in text.getvalue()
    assert "losses of b[1].py and a.py: DIFFERENT" in text.getvalue()
    assert "a.py ended by itself after 20 of 30 steps that were to count" in text.getvalue()
    data = as_data(found, WISH)
    assert [each["losses_differ"] for each in data["scripts"]] == [False, True]
    assert data["scripts"][1]["speed"]["median"] == found[1].speed.median > 1.5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a.py"], "one script, a.py: name those to compare it with"),
        (["a.py", "nothing.py"], "nothing.py: no such script"),
        (["--warmup", "1", "a.py", "a.py"], "--warmup 1: at least 2"),
        (["--steps", "100000", "a.py", "a.py"], "at most"),
        (["--json", "nowhere/x.json", "a.py", "a.py"], "can't be written"),
        (["--json", ".", "a.py", "a.py"], "can't be written"),
        ([], "script"),
    ],
)
def test_wrong_calls(
    arguments: list[str],
    words: str,
    tmp_path: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    open("a.py", "w").close()
    assert main(["bench", "compare", *arguments]) == 78
    assert words in capsys.readouterr().err
