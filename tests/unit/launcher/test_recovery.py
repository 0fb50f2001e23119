"""Whether, and with how many ranks, a run goes on after a loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from evenstep.errors import ConfigurationError
from evenstep.health.first_failure import CrashReport, Exit
from evenstep.health.heartbeat import Heartbeat, Phase
from evenstep.health.recovery_files import (
    Losses,
    forget_kept,
    keep_what_belongs_together,
    kept_by_survivors,
    losses_of,
    memory_directory,
    note_kept,
    note_losses,
)
from evenstep.launcher.elastic.agreement import Saved
from evenstep.launcher.elastic.recovery import Recoveries, Recovery, RecoveryPolicy, is_loss
from evenstep.launcher.failure.detection import Hang
from evenstep.launcher.failure.report import Failure, RemoteFailure, judge
from evenstep.launcher.options.flags import parse
from evenstep.logger.logger import costs_of


def report(rank: int, *, is_consequence: bool = False, exit_code: int = 1, traceback: str = "Traceback") -> CrashReport:
    return CrashReport(rank, 100 + rank, 1, is_consequence, exit_code, "Error: text", traceback)


def killed(*ranks: int, of: int = 4, stopped: tuple[int, ...] = ()) -> Failure:
    """An attempt in which some were killed, the launcher had to stop some, and the others reported their loss."""
    left = [rank for rank in range(of) if rank not in ranks and rank not in stopped]
    exits = [Exit(rank, 100 + rank, -9) for rank in ranks]
    exits += [Exit(rank, 100 + rank, -15, stopped_by_launcher=True) for rank in stopped]
    exits += [Exit(rank, 100 + rank, 76) for rank in left]
    failure = judge(exits, [report(rank, is_consequence=True, exit_code=76) for rank in left], attempt=0)
    assert failure is not None
    return failure


def test_as_many_ranks_as_before_or_those_that_are_left() -> None:
    failure = killed(1, 3, stopped=(2,))
    found = Recoveries(RecoveryPolicy()).plan(failure, num_ranks=4, in_memory=7, on_disk=5)
    assert found == Recovery(4, (1, 3), 7, from_memory=True)
    found = Recoveries(RecoveryPolicy(shrinks=True)).plan(failure, num_ranks=4, in_memory=7, on_disk=7)
    assert found == Recovery(2, (1, 3), 7, from_memory=True)
    assert str(found) == "2 ranks go on from memory, at step 7"


def test_the_newest_step_counts_and_without_any_there_is_nothing_to_go_on_from() -> None:
    found = Recoveries(RecoveryPolicy()).plan(killed(0, of=2), num_ranks=2, in_memory=7, on_disk=9)
    assert found == Recovery(2, (0,), 9, from_memory=False)
    assert str(found) == "2 ranks go on from the newest checkpoint on disk, at step 9"
    found = Recoveries(RecoveryPolicy()).plan(killed(0, of=2), num_ranks=2, in_memory=None, on_disk=None)
    assert found == "nothing was saved; that needs a Checkpointer, with resume() and step()"


@pytest.mark.parametrize(("num_virtual", "left"), [(8, 2), (6, 3), (1, 1), (4, 2), (5, 1)])
def test_in_reproducible_mode_the_number_of_ranks_divides_the_virtual_ones(num_virtual: int, left: int) -> None:
    recoveries = Recoveries(RecoveryPolicy(shrinks=True))
    found = recoveries.plan(killed(2), num_ranks=4, in_memory=1, on_disk=None, virtual_ranks=num_virtual)
    assert isinstance(found, Recovery)
    assert found.num_ranks == left


def test_below_the_fewest_ranks_it_ends() -> None:
    recoveries = Recoveries(RecoveryPolicy(shrinks=True, min_ranks=3))
    assert isinstance(recoveries.plan(killed(0), num_ranks=4, in_memory=1, on_disk=None), Recovery)
    found = recoveries.plan(killed(0, 1), num_ranks=4, in_memory=1, on_disk=None)
    assert found == "2 ranks could go on, and --min-ranks is 3"
    everybody = judge([Exit(0, 100, -9)], [], attempt=0)
    assert everybody is not None
    found = Recoveries(RecoveryPolicy(shrinks=True)).plan(everybody, num_ranks=1, in_memory=1, on_disk=None)
    assert found == "0 ranks could go on, and --min-ranks is 1"


def test_three_times_without_another_step_end_it() -> None:
    recoveries, failure = Recoveries(RecoveryPolicy()), killed(0, of=2)

    def go_on(step: int) -> bool:
        found = recoveries.plan(failure, num_ranks=2, in_memory=step, on_disk=None)
        if isinstance(found, Recovery):
            recoveries.note(found, noticed_ns=0)
            return True
        assert found == "3 recoveries in a row came to no step beyond 6"
        return False

    assert [go_on(step) for step in (5, 5, 5, 6, 6, 6, 6)] == [True, True, True, True, True, True, False]
    assert go_on(7), "a step was finished"


def test_a_loss_is_no_mistake() -> None:
    assert is_loss(killed(0))
    assert not is_loss(None)
    for end, told, expected in [
        (Exit(0, 100, -11), [], True),
        (Exit(0, 100, 3), [], True),
        (Exit(0, 100, 1), [report(0)], True),
        (Exit(0, 100, 1), [report(0, traceback="")], False),
        (Exit(0, 100, 78), [report(0, exit_code=78)], False),
        (Exit(0, 100, 73), [report(0, exit_code=73)], False),
        (Exit(0, 100, 76), [report(0, is_consequence=True, exit_code=76)], False),
    ]:
        failure = judge([end], told, attempt=0)
        assert failure is not None
        assert is_loss(failure) is expected, (end, told)
    lost_only = judge([Exit(0, 100, 76)], [report(0, is_consequence=True, exit_code=76)], attempt=0)
    assert lost_only is not None
    assert is_loss(replace(lost_only, hang=Hang(1, 101, 30.0, None)))
    assert not is_loss(replace(killed(0), remote_failure=RemoteFailure("lost", 76)))


def test_where_no_rank_is_left_to_save_all_steps_of_the_attempt_are_repeated() -> None:
    page = Heartbeat(pid=100, phase=Phase.FORWARD, step=17, collective=3, is_waiting=False, time_ns=0)
    failure = replace(killed(0, 1, of=2), pages={0: page, 1: replace(page, step=16)})
    found = Recoveries(RecoveryPolicy()).plan(failure, num_ranks=2, in_memory=5, on_disk=None, is_new=False)
    assert found == Recovery(2, (0, 1), 5, from_memory=True, num_repeated=18)
    found = Recoveries(RecoveryPolicy()).plan(failure, num_ranks=2, in_memory=22, on_disk=None)
    assert found == Recovery(2, (0, 1), 22, from_memory=True, num_repeated=1)


def test_what_it_cost_is_told_at_the_end() -> None:
    recoveries = Recoveries(RecoveryPolicy())
    assert recoveries.describe() == ""
    recoveries.note(Recovery(2, (1,), 5, from_memory=True), noticed_ns=1_000_000_000)
    assert recoveries.awaits_step
    recoveries.note(Recovery(2, (0,), 5, from_memory=True), noticed_ns=2_000_000_000)
    recoveries.stepped(2_900_000_000)
    assert not recoveries.awaits_step
    recoveries.stepped(9_900_000_000)
    assert recoveries.describe() == "2 ranks were lost and replaced, 2 steps repeated at most, 1.9 s lost"
    assert recoveries.losses == Losses(num_ranks=2, num_repeated=2, num_from_disk=0, lost_s=1.9)


def test_ranks_read_what_the_launcher_has_noted(tmp_path: Path) -> None:
    assert losses_of(tmp_path) is None
    losses = Losses(num_ranks=3, num_repeated=2, num_from_disk=1, lost_s=1.9)
    note_losses(tmp_path, losses)
    assert losses_of(tmp_path) == losses
    costs = {"recovery/ranks_lost": 3.0, "recovery/steps_repeated": 2.0, "recovery/lost_s": 1.9}
    assert costs_of(losses) == costs
    shrinks = Recoveries(RecoveryPolicy(shrinks=True))
    shrinks.note(Recovery(1, (1,), 5, from_memory=False), noticed_ns=0)
    shrinks.stepped(400_000_000)
    assert shrinks.describe() == (
        "1 rank was lost, 0 steps repeated at most, 1 time from a checkpoint on disk, 0.4 s lost"
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--recover", "in-place"], ["--recover", "in-place", "replace"]),
        (["--recover", "shrink", "--min-ranks", "0"], ["--min-ranks", "0"]),
        (["--recover", "replace", "--min-ranks", "2"], ["--min-ranks 2", "--recover shrink"]),
        (["--min-ranks", "2"], ["--min-ranks 2", "--recover shrink"]),
        (["--recover", "shrink", "--nnodes", "2"], ["--recover shrink", "one node", "--nnodes MIN:MAX"]),
        (["--recover", "shrink", "--servers", "1"], ["--recover shrink", "server", "--max-restarts"]),
    ],
)
def test_flags_that_make_no_sense(flags: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse([*flags, "train.py"])
    for word in words:
        assert word in str(caught.value)


def test_all_nodes_decide_alike() -> None:
    """Whatever each of them knows: of the loss, and of steps in memory and on disk."""
    here = Saved(True, 5, in_memory=7, is_new=True, is_loss=True)
    elsewhere = Saved(True, 10, in_memory=8, is_new=False, is_loss=None)
    for each in ([here, elsewhere], [elsewhere, here]):
        assert Saved.of_all_nodes(each) == Saved(True, 10, in_memory=8, is_new=True, is_loss=True)
    mistake = replace(elsewhere, is_loss=False)
    assert Saved.of_all_nodes([here, mistake]).is_loss is False, "the next ranks would make it, too"
    assert Saved.of_all_nodes([elsewhere, elsewhere]).is_loss is None, "nobody knows why: no reason to go on"


def test_on_several_nodes_as_many_ranks_go_on_as_they_have_then() -> None:
    remote = RemoteFailure("on node 1: rank 2 was killed", 137, is_loss=True, lost=(2, 3))
    failure = replace(killed(0, of=2), remote_failure=remote)
    assert is_loss(failure)
    found = Recoveries(RecoveryPolicy()).plan(failure, num_ranks=None, in_memory=7, on_disk=None)
    assert found == Recovery(None, (2, 3), 7, from_memory=True)
    assert str(found) == "all ranks go on from memory, at step 7"
    assert not is_loss(replace(failure, remote_failure=replace(remote, is_loss=False)))


def in_memory(run_directory: Path) -> list[str]:
    return sorted(str(path.relative_to(run_directory / "memory")) for path in run_directory.glob("memory/*/step-*"))


def saved(run_directory: Path, rank: int, key: str, step: int) -> None:
    (memory_directory(run_directory, key) / f"step-{step:07}").mkdir(parents=True, exist_ok=True)
    note_kept(run_directory, rank, 1, key, step)


def test_the_run_goes_on_from_what_one_survivor_has_saved_of_all_its_checkpointers(tmp_path: Path) -> None:
    for rank in (0, 2):
        for key in ("net", "all"):
            note_kept(tmp_path, rank, 1, key, None)
    assert kept_by_survivors(tmp_path, 1) == (None, False)
    for key in ("net", "all"):
        (memory_directory(tmp_path, key) / "step-0000004").mkdir(parents=True)
    keep_what_belongs_together(tmp_path, 1)
    assert in_memory(tmp_path) == ["all/step-0000004", "net/step-0000004"], "what an earlier loss has left"
    saved(tmp_path, 0, "net", 6)
    assert kept_by_survivors(tmp_path, 1) == (None, True)
    saved(tmp_path, 0, "all", 6)
    saved(tmp_path, 2, "net", 7)
    assert kept_by_survivors(tmp_path, 1) == ({"net": 6, "all": 6}, True)
    assert kept_by_survivors(tmp_path, 11) == (None, False)
    keep_what_belongs_together(tmp_path, 1)
    assert in_memory(tmp_path) == ["all/step-0000006", "net/step-0000006"], "rank 2 died over its second save"


def test_a_part_of_what_a_survivor_had_to_save_is_no_state_to_go_on_from(tmp_path: Path) -> None:
    note_kept(tmp_path, 0, 1, "net", None)
    note_kept(tmp_path, 0, 1, "all", None)
    saved(tmp_path, 0, "net", 6)
    keep_what_belongs_together(tmp_path, 1)
    assert in_memory(tmp_path) == []


def test_a_checkpointer_that_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    for key in ("first", "last", "next"):
        note_kept(tmp_path, 0, 1, key, None)
    saved(tmp_path, 0, "last", 9)  # at its end
    for key in ("first", "last"):
        forget_kept(tmp_path, 0, 1, key)
    saved(tmp_path, 0, "next", 3)
    assert kept_by_survivors(tmp_path, 1) == ({"last": 9, "next": 3}, True)
