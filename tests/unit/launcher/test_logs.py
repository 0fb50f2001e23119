from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import Std

from evenstep.errors import ConfigurationError
from evenstep.launcher.options.logs import (
    Destination,
    OutputChoices,
    RankLogs,
    choose_keep_days,
    describe_kept_logs,
    make_log_directory,
    name_of_run,
    plan_destination,
    remove_old_logs,
    tail,
)


def wishes(redirects: str = "0", tee: str = "0", shown: str = "") -> OutputChoices:
    return OutputChoices.parse(redirects=redirects, tee=tee, local_ranks_filter=shown)


@pytest.mark.parametrize(
    ("asked", "rank", "expected"),
    [
        (wishes(), 0, Destination("", "", Std.NONE)),
        (wishes(), 1, Destination("d/rank-1.log", "d/rank-1.log", Std.NONE)),
        (wishes(tee="3"), 0, Destination("", "", Std.NONE)),
        (wishes(tee="3"), 1, Destination("d/rank-1.log", "d/rank-1.log", Std.ALL)),
        (wishes(tee="2:3"), 1, Destination("d/rank-1.log", "d/rank-1.log", Std.NONE)),
        # Only one of the two is shown, so they can't share a file.
        (wishes(tee="2"), 1, Destination("d/rank-1.stdout.log", "d/rank-1.stderr.log", Std.ERR)),
        (wishes(redirects="3"), 0, Destination("d/rank-0.log", "d/rank-0.log", Std.NONE)),
        (wishes(redirects="0:1"), 0, Destination("d/rank-0.stdout.log", "", Std.NONE)),
        (wishes(shown="1"), 0, Destination("d/rank-0.log", "d/rank-0.log", Std.NONE)),
        (wishes(shown="1"), 1, Destination("d/rank-1.log", "d/rank-1.log", Std.ALL)),
        (wishes(shown="0,2", tee="3"), 1, Destination("d/rank-1.log", "d/rank-1.log", Std.NONE)),
    ],
)
def test_where_a_rank_writes(asked: OutputChoices, rank: int, expected: Destination) -> None:
    assert plan_destination(asked, local_rank=rank, rank=rank, directory=Path("d")) == expected


def test_rank_0_of_the_second_host_is_not_rank_0() -> None:
    plan = plan_destination(wishes(), local_rank=0, rank=4, directory=Path("d"), attempt=2)
    assert plan.stdout == "d/rank-4.attempt-2.log"


@pytest.mark.parametrize("asked", [{"redirects": "4"}, {"tee": "x"}, {"shown": "a"}])
def test_nonsense_is_refused(asked: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError):
        wishes(**asked)


def test_torchelastic_is_told_of_every_local_rank(tmp_path: Path) -> None:
    logs = RankLogs(wishes(tee="3"), tmp_path / "logs", tmp_path)
    envs = {index: {"RANK": str(index), "TORCHELASTIC_RESTART_COUNT": "0"} for index in range(3)}
    told = logs.reify(envs)
    assert told.stdouts.keys() == told.stderrs.keys() == told.error_files.keys() == {0, 1, 2}
    assert told.tee_stdouts.keys() == {1, 2}
    assert told.tee_stderrs == {}
    assert (tmp_path / "logs").is_dir()


def test_tail(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"".join(b"line %d\n" % i for i in range(50)) + b"\xff end")
    assert tail(str(tmp_path / "log"), num_lines=2) == "line 49\n\ufffd end"
    assert tail(str(tmp_path / "none")) == ""


DAY_S = 86_400.0


def age(directory: Path, days: float) -> Path:
    """Have nothing written there for some days."""
    then = time.time() - days * DAY_S
    for path in (*directory.iterdir(), directory):
        os.utime(path, (then, then))
    return directory


def gone_pid() -> int:
    with subprocess.Popen(["true"]) as process:
        pass
    return process.pid


def test_old_logs_go_and_what_may_still_be_needed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gone = gone_pid()

    def logs(name: str, days: float, file: str = "rank-1.log") -> Path:
        directory = tmp_path / name
        directory.mkdir()
        (directory / file).write_text("said")
        return age(directory, days)

    old, young = logs(f"evenstep-logs-{gone}-aaaa", 15), logs(f"evenstep-logs-{gone}-bbbb", 13)
    runs, foreign = logs(f"evenstep-logs-{os.getpid()}-cccc", 15), logs(f"evenstep-logs-{gone}-dddd", 15, "notes.txt")
    written = logs(f"evenstep-logs-{gone}-eeee", 15)
    (written / "rank-1.log").write_text("said again")
    other = logs("20260101-000000-1", 15)
    own = make_log_directory(None)
    remove_old_logs(None, days=choose_keep_days(None, log_dir=None), keep=own)
    assert not old.exists()
    assert all(path.exists() for path in (young, runs, foreign / "notes.txt", written, other, own))
    said = describe_kept_logs(None, keep=None)
    assert (
        said
        == f"{tmp_path} has 5 folders of logs; those of 14 days ago are removed when a run starts (--keep-logs DAYS)"
    )
    remove_old_logs(None, days=choose_keep_days(0, log_dir=None), keep=own, now=time.time() + 1)
    assert sorted(path for path in tmp_path.iterdir()) == sorted([runs, foreign, other, own])


def test_logs_in_a_directory_of_the_users_go_only_on_request(tmp_path: Path) -> None:
    own, old = make_log_directory(str(tmp_path)), tmp_path / f"20260101-000000-{gone_pid()}"
    assert describe_kept_logs(str(tmp_path), keep=None) == ""
    for name in ("rank-0.log", "rank-1.attempt-2.log", "rank-1.stdout.log", "filtered_stdout.log"):
        old.mkdir(exist_ok=True)
        (old / name).touch()
    age(old, 400)
    remove_old_logs(str(tmp_path), days=choose_keep_days(None, log_dir=str(tmp_path)), keep=own)
    assert old.exists()
    assert "has 2 folders of logs; all are kept (--keep-logs DAYS)" in describe_kept_logs(str(tmp_path), keep=None)
    remove_old_logs(str(tmp_path), days=choose_keep_days(30, log_dir=str(tmp_path)), keep=own)
    assert list(tmp_path.iterdir()) == [own]


@pytest.mark.parametrize("days", [-1.0, float("nan")])
def test_logs_are_kept_for_a_number_of_days(days: float) -> None:
    with pytest.raises(ConfigurationError, match="--keep-logs"):
        choose_keep_days(days, log_dir=None)


def test_a_run_is_named_as_its_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert re.fullmatch(rf"{os.getpid()}-\w+", name_of_run(make_log_directory(None)))
