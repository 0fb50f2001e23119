"""What `evenstep verify --resume` says of two runs that differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evenstep.tools.verify.traces import Step, first_difference, read_trace


def run(**changes: object) -> dict[int, Step]:
    steps = {step: Step((step, step + 10, step + 20), {"model/w": step, "model/b": -step}) for step in range(1, 6)}
    return steps | {int(key[1:]): value for key, value in changes.items()}  # type: ignore[misc]


def after(step: int, trace: dict[int, Step]) -> dict[int, Step]:
    return {number: value for number, value in trace.items() if number > step}


def test_equal_runs_differ_nowhere():
    assert first_difference([run(), run()], [after(2, run()), after(2, run())]) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (run(_4=Step((4, 15, 24), {"model/w": 4, "model/b": 9})), "step 4 on rank 1: sample 1 of the 3 that the model"),
        (run(_3=Step((3, 13), {"model/w": 3, "model/b": -3})), "step 3 on rank 1: 2 samples instead of 3"),
        (
            run(_3=Step((3, 13, 23), {"model/w": 3, "model/b": 1})),
            r"step 3 on rank 1: the samples are the same, and tensor model/b differs \(of 2\)",
        ),
        (
            run(_5=Step((5, 15, 25), {"model/w": 1, "model/b": 1, "ema/x": 1})),
            r"tensor model/w differs, and 2 more",
        ),
        (run(_6=Step((), {})), "step 6 on rank 0: missing in the resumed run"),
    ],
)
def test_the_first_difference_is_named_by_step_rank_and_sample_or_tensor(changed, message):
    import re

    told = first_difference([run(), run()], [after(2, run()), after(2, changed)])
    assert told is not None
    assert re.search(message, told), told


def test_a_run_that_ends_early_differs():
    assert first_difference([run()], [after(2, run(_6=Step((), {})))]) == (
        "step 6 on rank 0: the undisturbed run had ended before"
    )
    short = {step: value for step, value in run().items() if step in (3, 4)}
    assert "ended with step 5, and the resumed one with step 4" in str(first_difference([run()], [short]))


def test_a_trace_that_a_kill_has_cut_is_read(tmp_path: Path):
    lines = [json.dumps({"step": step, "rows": [step], "tensors": {"w": step}}) for step in (1, 2)]
    (tmp_path / "rank-0.jsonl").write_text("\n".join(lines) + '\n{"step": 3, "ro')
    assert read_trace(tmp_path / "rank-0.jsonl") == {1: Step((1,), {"w": 1}), 2: Step((2,), {"w": 2})}
    assert read_trace(tmp_path / "none") == {}
