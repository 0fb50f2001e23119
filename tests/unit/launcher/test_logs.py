from __future__ import annotations

import os
import platform
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import Std

from evenstep.errors import ConfigurationError
from evenstep.launcher.options.logs import (
    Destination,
    OutputChoices,
    make_log_directory,
    plan_destination,
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


def test_tail(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"".join(b"line %d\n" % i for i in range(50)) + b"\xff end")
    assert tail(str(tmp_path / "log"), num_lines=2) == "line 49\n\ufffd end"
    assert tail(str(tmp_path / "none")) == ""


def test_logs_have_the_hosts_name_and_a_folder_is_one_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launchers of several pods have pid 1, and may start in the same second."""
    monkeypatch.setattr(time, "strftime", lambda _: "now")
    first = make_log_directory(str(tmp_path))
    assert first.name == f"now-{platform.node()}-{os.getpid()}"
    assert make_log_directory(str(tmp_path)).name == f"{first.name}-2"
    monkeypatch.setattr(platform, "node", lambda: "another")
    assert make_log_directory(str(tmp_path)).name == f"now-another-{os.getpid()}"
