"""From what ranks have written to findings, without a run: hangs, samples, calls and lines."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("libcst")

from evenstep.tools.doctor.calls import how_it_hangs
from evenstep.tools.doctor.findings import Watched
from evenstep.tools.doctor.rules.EV502 import wrong_factor
from evenstep.tools.doctor.run.events import Event, EventFile, Evidence, Hang
from evenstep.tools.doctor.run.hangs import find_hang, first_apart
from evenstep.tools.doctor.scene import Scene, share_of_equal
from evenstep.tools.doctor.verdict import watched

SCRIPT = "/home/a/train.py"


def at(line: int) -> list[tuple[str, int]]:
    return [(SCRIPT, line)]


def event(kind: str, time_s: float = 0.0, *, line: int = 0, step: int = 0, **facts: Any) -> Event:
    return Event(kind, time_s, step, at(line) if line else (), facts)


def call(number: int, op: str = "all_reduce", time_s: float = 0.0, line: int = 10) -> Event:
    return event("enter", time_s, line=line, op=op, call=number, group="")


def done(number: int, time_s: float = 0.0) -> Event:
    return event("leave", time_s, call=number)


def judged(*ranks: Sequence[Event], hang: Hang | None = None) -> Watched:
    return watched(Evidence(ranks, hang), script="train.py", directory="/home/a")


def rules(seen: Watched) -> set[str]:
    return {each.rule for each in seen.findings}


def test_events_are_read_while_they_are_written(tmp_path: Path):
    """A line that isn't complete is read when it is."""
    path = tmp_path / "events"
    file, first, second = EventFile(path), event("batch", 1.5, line=3, rows=["a"]), event("stepped", 2.0, step=1)
    assert file.read() == []
    path.write_text(f"{first.as_line()}\n{second.as_line()[:9]}")
    assert [each.kind for each in file.read()] == ["batch"]
    with path.open("a") as more:
        more.write(f"{second.as_line()[9:]}\n")
    received = file.read()
    assert [(each.kind, each.time_s, each.step) for each in received] == [("batch", 1.5, 0), ("stepped", 2.0, 1)]
    assert received[0].place == (SCRIPT, 3)
    assert received[0]["rows"] == ["a"]


def test_a_rank_that_has_left_is_never_awaited():
    ranks = [[call(1, time_s=1.0)], [event("end", 1.5, status="0")]]
    assert find_hang(ranks, 3.0) is None  # it may be on its way out
    hang = find_hang(ranks, 5.0)
    assert hang is not None
    assert set(hang.waiting) == {0}
    assert set(hang.missing) == {1}


def test_ranks_are_awaited_as_long_as_one_of_those_that_are_missing_works():
    quiet = [event("idle", t, line=7) for t in range(1, 40)]
    works = [event("batch", float(t), line=8) for t in range(1, 40)]
    assert find_hang([[call(1, time_s=1.0)], quiet, works], 40.0) is None
    assert find_hang([[call(1, time_s=1.0)], quiet, quiet], 40.0) is not None


def test_ranks_in_the_same_call_are_let_alone():
    ranks = [[call(1, time_s=1.0)], [call(1, time_s=2.0)]]
    assert find_hang(ranks, 30.0) is None
    assert find_hang(ranks, 100.0) is not None


def test_ranks_in_different_calls_never_meet():
    ranks = [[call(1), done(1), call(2, "broadcast", 1.0)], [call(1), done(1), call(2, "all_reduce", 1.0)]]
    assert first_apart(ranks) is not None
    hang = find_hang(ranks, 5.0)
    assert hang is not None
    told = how_it_hangs(Scene(Evidence(ranks, hang), "train.py", "/home/a"))
    assert "rank 0 waits in broadcast at train.py:10; rank 1 in all_reduce at train.py:10" in told


def test_samples_of_two_ranks(fresh_seed: int):
    draw = random.Random(fresh_seed)
    all_of_them = [str(i) for i in range(200)]
    draw.shuffle(all_of_them)
    halves = all_of_them[:100], all_of_them[100:]
    assert share_of_equal(*halves, in_any_order=True) == 0.0
    assert share_of_equal(all_of_them, all_of_them[::-1], in_any_order=True) == 1.0
    assert share_of_equal(all_of_them, all_of_them[::-1], in_any_order=False) < 0.1
    assert share_of_equal(["same"] * 50 + ["a"], ["b"] + ["same"] * 49, in_any_order=True) > 0.9  # in place
    assert share_of_equal(["same", "b"] * 50, ["c", "same"] * 50, in_any_order=True) == 0.0  # repeats say nothing


def backward(factor: float, *, is_mean: bool = True) -> Event:
    return event("backward", factor=factor, is_mean=is_mean, weighted=False)


def test_divisors():
    """Divided by the passes of a step and by nothing else; a factor such as 0.3 is the weight of a loss."""
    assert not wrong_factor([backward(0.25)], 4, 2, in_all=4)
    assert not wrong_factor([backward(0.3)], 1, 2, in_all=1)
    assert "by nothing" in wrong_factor([backward(1.0)], 4, 2, in_all=4)
    assert "divided by 8: by 4 passes and the 2 ranks" in wrong_factor([backward(0.125)], 4, 2, in_all=4)
    assert "the 2 ranks" in wrong_factor([backward(0.5)], 1, 2, in_all=1)
    written_out = {"passes": 1, "world_size": 2, "in_all": 2}
    assert not wrong_factor([backward(0.5)], **written_out), "two lines of an accumulation, or a loss with a weight"
    assert "divided by 4: by 2 passes and the 2 ranks" in wrong_factor([backward(0.25)], **written_out)


def test_an_error_is_told_once_and_no_call_is_blamed_for_it():
    """Ranks wait for the one that has failed; that isn't their mistake."""
    ranks = (
        [call(1, line=20)],
        [event("raised", 1.0, line=5, type="ValueError", message="no data"), event("end", 1.0, status="1")],
    )
    seen = judged(*ranks, hang=Hang({0: ranks[0][0]}, {1: ranks[1][1]}))
    assert seen.findings == []
    assert seen.notes == [
        "The script failed at train.py:5, before its first step: ValueError: no data. The rest of the script was only "
        "read."
    ]
    assert seen.failed
    made = [event("wrapped", wrapper="torch", num_bytes=4), event("stepped", line=3)]
    later = judged(*([*made, *events] for events in ranks))
    assert later.notes[0].startswith("The script failed at train.py:5, after 1 step: ValueError")
    assert not later.failed


def test_a_script_without_a_step():
    ended = [event("start"), event("end", 1.0, status="0")]
    assert "without a step" in judged(ended, ended).notes[0]
    assert not judged(ended, ended).failed
    late = watched(Evidence([[event("idle", line=9)]] * 2, is_late=True), script="train.py", directory="/home/a")
    assert late.notes == [
        "doctor ended the script after 0 steps, when the time of the run was over (rank 0 was at train.py:9)."
    ]


def looped(
    iteration: int, samples: Sequence[str], *, epoch: int | None, num_steps: int, ends: bool = True
) -> list[Event]:
    facts = {"loader": 1, "iteration": iteration}
    kind = {"is_distributed": True, "is_shuffled": True, "num_samples": 64, "epoch": epoch}
    events = [event("iterate", line=30, **facts, **kind)]
    for each in samples:
        events += [event("batch", line=30, rows=[each], **facts), *[event("stepped", line=31)] * bool(num_steps)]
    return [*events, *[event("iterated", num_batches=len(samples), cut=False, **facts)] * ends]


def test_one_batch_that_is_looked_at_is_no_epoch():
    """`next(iter(loader))` before the loop: its sampler is in epoch 0, as in the first epoch."""
    look = looped(0, "abcdefgh"[:1], epoch=0, num_steps=0, ends=False)
    wrapped = event("wrapped", wrapper="torch", num_bytes=4)
    events = [
        wrapped,
        *look,
        *looped(1, "abcdefgh", epoch=0, num_steps=1),
        *looped(2, "hgfedcba", epoch=1, num_steps=1),
    ]
    assert "EV102" not in rules(judged(events, events))
    events = [wrapped, *looped(1, "abcdefgh", epoch=0, num_steps=1), *looped(2, "abcdefgh", epoch=0, num_steps=1)]
    assert "EV102" in rules(judged(events, events))
    events = [wrapped, *looped(1, "abcdefgh", epoch=None, num_steps=1), *looped(2, "hgfedcba", epoch=None, num_steps=1)]
    assert "EV102" not in rules(judged(events, events)), "a sampler of the script's own tells no epoch"
