"""One job per directory: who holds a lock, as far as that can be known, and what then becomes of it."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
from pathlib import Path
from unittest import mock

import pytest

from evenstep.checkpoint import lock as locks
from evenstep.checkpoint import tools
from evenstep.checkpoint.lock import LockedError, read_top, take_lock
from evenstep.checkpoint.store import LocalDirectory


def hold_lock(directory, connection):
    lock = take_lock(LocalDirectory(directory), {})
    connection.send("taken")
    connection.recv()
    lock.release()


def test_two_jobs_do_not_share_a_directory_and_a_dead_one_does_not_keep_it(tmp_path: Path):
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=hold_lock, args=(tmp_path, theirs))
    child.start()
    assert ours.recv() == "taken"
    why = f"belongs to another job: pid {child.pid} on .* another directory.*60 s loses.*checkpoint unlock {tmp_path}$"
    with pytest.raises(LockedError, match=why):
        take_lock(LocalDirectory(tmp_path), {}, wait_s=60)  # it is seen to run: nothing to wait for
    with pytest.raises(LockedError, match=f"pid {child.pid} .*End it first"):
        tools.unlock(str(tmp_path))
    child.kill()
    child.join()
    take_lock(LocalDirectory(tmp_path), {}).release()
    assert is_released(tmp_path)


def is_released(directory: Path) -> bool:
    """Nobody has the lock; its number is kept."""
    (path,) = directory.iterdir()
    return path.name.startswith("lock-") and json.loads(path.read_text())["released"]


def as_of(directory: Path, age_s: float = 0.0, **changes: object) -> None:
    """Make a lock one of another process, that long after its last heartbeat."""
    path = max(directory.glob("lock-*.json"))
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    modified_s = path.stat().st_mtime - age_s
    os.utime(path, (modified_s, modified_s))


@pytest.mark.parametrize(
    ("changes", "is_certain"),
    [
        ({"start": 1}, True),  # another process has got the number since
        ({"boot": "before the restart"}, False),  # or of a container, a virtual machine of the same name
        ({"boot": "elsewhere", "hostname": "elsewhere"}, False),
        ({"boot": ""}, False),
        ({"processes": "pid:[1]", "pid": 1}, False),
        ({"processes": "pid:[1]", "time": "yesterday"}, False),
        ({"processes": "pid:[1]", "time": 1e300}, False),
        ({"processes": "pid:[1]", "time": None}, False),
    ],
)
def test_which_locks_are_stale(tmp_path: Path, changes, is_certain):
    lock = take_lock(LocalDirectory(tmp_path), {})
    as_of(tmp_path, **changes)
    if not is_certain:
        for age_s in (0, 50, -3600):  # seen from here its clock is ahead
            as_of(tmp_path, age_s)
            since = "since an unknown time" if "time" in changes else r", since \d\d\d\d-.*"
            with pytest.raises(LockedError, match=f"{since}, last heartbeat {max(0, age_s)} s ago"):
                take_lock(LocalDirectory(tmp_path), {})
        as_of(tmp_path, 3600 + 61)
    next_one = take_lock(LocalDirectory(tmp_path), {})
    with pytest.raises(LockedError, match="was taken over by"):
        lock.confirm()
    lock.release()
    next_one.confirm()
    next_one.release()


def test_a_holder_that_cannot_be_seen_keeps_its_lock_while_its_heart_beats(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(locks, "RENEW_EVERY_S", 0.05)
    monkeypatch.setattr(locks, "_POLL_EVERY_S", 0.02)
    lock = take_lock(LocalDirectory(tmp_path), {})
    lock.record |= {"boot": "elsewhere", "hostname": "node7"}
    as_of(tmp_path, 30, boot="elsewhere", hostname="node7")
    with pytest.raises(LockedError, match=f"pid {os.getpid()} on node7"):
        take_lock(LocalDirectory(tmp_path), {}, wait_s=50)
    told = capsys.readouterr().err
    assert "on node7" in told
    assert "Waiting for its next heartbeat; 60 s after the last one the lock is taken over" in told
    lock.confirm()
    lock.release()


def test_a_lock_that_somebody_removed_is_put_back_if_nobody_took_it(tmp_path: Path):
    lock = take_lock(LocalDirectory(tmp_path), {})
    assert tools.unlock(str(tmp_path / "..")).endswith("is not locked")
    as_of(tmp_path, 7, processes="pid:[1]")
    (tmp_path / "lock-00001.json").unlink()
    lock.confirm()
    as_of(tmp_path, 7, processes="pid:[1]")
    assert "removed the lock of pid" in tools.unlock(str(tmp_path))
    assert tools.unlock(str(tmp_path)).endswith("is not locked")
    assert is_released(tmp_path)
    with pytest.raises(LockedError, match=r"its lock was removed\. It saves nothing more"):
        lock.confirm()
    again = take_lock(LocalDirectory(tmp_path), {})
    with pytest.raises(LockedError, match="taken over by another Checkpointer of this process"):
        lock.confirm()
    again.release()
    lock.release()
    assert is_released(tmp_path)


def test_a_lock_that_another_job_has_created_at_the_same_moment_is_that_jobs(tmp_path: Path, monkeypatch):
    create = LocalDirectory.put_new

    def outrun(storage: LocalDirectory, path: str, content: bytes) -> bool:
        others = json.loads(content) | {"key": "another", "boot": "elsewhere"}
        assert create(storage, path, json.dumps(others).encode())
        return create(storage, path, content)

    monkeypatch.setattr(LocalDirectory, "put_new", outrun)
    with pytest.raises(LockedError, match="belongs to another job"):
        take_lock(LocalDirectory(tmp_path), {})
    assert read_top(LocalDirectory(tmp_path)).record["key"] == "another"


def test_where_files_have_no_links_a_lock_is_created(tmp_path: Path, monkeypatch):
    def no_links(*_):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_links)
    take_lock(LocalDirectory(tmp_path), {}).release()
    assert is_released(tmp_path)
    assert not LocalDirectory(tmp_path).put_new("lock-00001.json", b"another")


@pytest.mark.parametrize(
    ("theirs", "mine", "is_mine"),
    [
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, True),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}, True),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, False),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, False),
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"}, False),
        ({}, {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"}, False),
        (
            {"SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "0"},
            {"SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "1"},
            True,
        ),
        (  # two steps of one allocation
            {"SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "0"},
            {"SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "b", "TORCHELASTIC_RESTART_COUNT": "1"},
            False,
        ),
        ({"TORCHELASTIC_RUN_ID": "none"}, {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "1"}, False),
    ],
)
def test_a_job_that_is_started_again_has_its_lock_at_once(tmp_path: Path, theirs, mine, is_mine):
    """Its predecessor is on another node, and may live and write on."""
    names = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    others = {name: value for name, value in os.environ.items() if name not in names}
    with mock.patch.dict(os.environ, others | theirs, clear=True):
        before = take_lock(LocalDirectory(tmp_path), {})
    as_of(tmp_path, 5, boot="elsewhere", hostname="node7")
    with mock.patch.dict(os.environ, others | mine, clear=True):
        if not is_mine:
            with pytest.raises(LockedError, match="on node7"):
                take_lock(LocalDirectory(tmp_path), {})
            before.release()
            return
        now = take_lock(LocalDirectory(tmp_path), {})
        with pytest.raises(LockedError, match="was taken over by"):
            before.confirm()  # before it writes a manifest, or removes a checkpoint
        now.confirm()
        now.release()
