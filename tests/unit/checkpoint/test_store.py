"""Storages: a directory, and what fsspec reaches; which folders are checkpoints, and what a kill may leave."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from evenstep.checkpoint.directory import checkpoints_in, remove_checkpoint, sweep
from evenstep.checkpoint.lock import take_lock
from evenstep.checkpoint.store import LocalDirectory, Storage, storage_at
from evenstep.errors import ConfigurationError
from evenstep.testing.storage import check_storage, read_all
from tests.object_store import s3_server


@pytest.fixture(scope="module")
def bucket() -> Iterator[str | None]:
    """The URL of a bucket; None where no server is installed."""
    with s3_server() as url:
        yield url


@pytest.fixture(params=["local", "memory", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path, bucket: str | None) -> str:
    """Where nothing lies yet: a path, or a URL."""
    if request.param == "s3":
        if bucket is None:
            pytest.skip("moto or s3fs isn't installed")
        return f"{bucket}/{uuid.uuid4().hex}"
    return f"{tmp_path}/deep/run" if request.param == "local" else f"memory://{uuid.uuid4().hex}"


def test_every_storage_does_what_a_storage_does(root: str):
    numbers = iter(range(100))
    assert check_storage(lambda: storage_at(f"{root}/{next(numbers)}")) == 8


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3:/bucket/run", "it takes two slashes, and a Path drops one"),
        ("nowhere://bucket/run", "can't be reached: Protocol not known: nowhere"),
        ("gs://bucket/run", "can't be reached: .*gcsfs"),
        ("az://bucket/run", "can't be reached: .*adlfs"),
    ],
)
def test_a_url_that_cannot_be_reached_is_refused(url: str, message: str):
    with pytest.raises(ConfigurationError, match=message):
        storage_at(url)


def test_a_file_url_is_a_path(tmp_path: Path):
    for url in (f"file://{tmp_path}/x", f"file:{tmp_path}/x", f"{tmp_path}/x"):
        assert storage_at(url).root == tmp_path / "x"
    assert storage_at("runs/a:b").root == Path.cwd() / "runs" / "a:b"
    with pytest.raises(ConfigurationError, match="private=False is for a local directory"):
        storage_at("memory://x", private=False)


def test_a_store_that_cannot_create_only_is_refused_for_a_lock(monkeypatch: pytest.MonkeyPatch):
    """As servers that don't know S3's If-None-Match: both of two jobs would have the lock."""
    from fsspec.implementations.memory import MemoryFileSystem

    storage = Storage(f"memory://{uuid.uuid4().hex}")
    really = MemoryFileSystem.pipe_file
    monkeypatch.setattr(
        MemoryFileSystem, "pipe_file", lambda self, path, value, mode="overwrite", **_: really(self, path, value)
    )
    with pytest.raises(OSError, match="replaces a file that was only to be created, so that no lock is safe"):
        take_lock(storage, {})


def test_files_belong_to_their_owner_alone(tmp_path: Path):
    storage = LocalDirectory(tmp_path / "runs" / "x")
    storage.put("step/file", [b"x"])
    assert (tmp_path / "runs" / "x" / "step" / "file").stat().st_mode & 0o777 == 0o600
    for folder in ("runs", "runs/x", "runs/x/step"):
        assert (tmp_path / folder).stat().st_mode & 0o777 == 0o700


def test_links_and_pipes_are_not_read(tmp_path: Path):
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "x").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "x")
    storage = LocalDirectory(tmp_path / "linked")  # the directory itself may be one
    storage.put("step-0000001/manifest.json", [b"x"])
    folder = tmp_path / "x" / "step-0000001"
    (folder / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(folder / "pipe")
    (tmp_path / "x" / "step-0000002").symlink_to(folder)
    for path in ("step-0000001/link", "step-0000001/pipe", "step-0000002/manifest.json"):
        with pytest.raises(OSError), storage.open(path):
            pass
    assert checkpoints_in(storage) == {1: "step-0000001"}
    assert read_all(storage, "step-0000001/manifest.json") == b"x"


def test_files_may_be_shared_as_the_umask_says(tmp_path: Path):
    before = os.umask(0o027)
    try:
        storage = LocalDirectory(tmp_path / "runs" / "x", private=False)
        storage.put("step/file", [b"x"])
        lock = take_lock(storage, {})
    finally:
        os.umask(before)
    for name in ("step/file", "lock-00001.json"):
        assert (tmp_path / "runs" / "x" / name).stat().st_mode & 0o777 == 0o640
    for folder in ("runs", "runs/x", "runs/x/step"):
        assert (tmp_path / folder).stat().st_mode & 0o777 == 0o750
    lock.release()


def test_an_upload_in_parts_that_a_kill_has_ended_is_aborted(bucket: str | None):
    """It costs money, and no listing shows it. Those of other runs are left alone."""
    if bucket is None:
        pytest.skip("moto or s3fs isn't installed")
    ours, theirs = (Storage(f"{bucket}/{name}") for name in ("ours", "ours-too"))
    files = ours._files
    for storage in (ours, theirs):
        _, key, _ = files.split_path(f"{storage._root}/step-0000001-00001-1/model.safetensors")
        files.call_s3("create_multipart_upload", Bucket="bucket", Key=key)
    ours.sweep()
    left = files.call_s3("list_multipart_uploads", Bucket="bucket")["Uploads"]
    assert [each["Key"] for each in left] == ["ours-too/step-0000001-00001-1/model.safetensors"]


# ---------------------------------------------------------------------- which folders are checkpoints


def fill(storage: Storage, *folders: str) -> None:
    for folder in folders:
        storage.put(f"{folder}/x.safetensors", [b"x"])
        storage.put(f"{folder}/manifest.json", [folder.encode()])


def test_what_killed_jobs_left_is_swept_and_what_is_damaged_is_not(root: str):
    storage = storage_at(root)
    fill(storage, "step-0000002-00001-1", "step-0000003-00001-2", "step-0000005")
    storage.put("step-0000004-00001-3/x.safetensors", [b"half of a save"])
    storage.put("notes/mine.txt", [b"x"])
    lock = take_lock(storage, {})
    sweep(storage, lock)
    names = ["lock-00002.json", "notes", "step-0000002-00001-1", "step-0000003-00001-2", "step-0000005"]
    assert storage.list() == names, "their manifests don't parse, and once they did"
    lock.release()


def test_a_manifest_that_comes_after_the_next_job_has_listed_them_is_none(root: str):
    """A job was stopped between its look at the lock and its manifest, and goes on."""
    storage = storage_at(root)
    first = take_lock(storage, {})
    fill(storage, "step-0000001-00001-1")
    second = take_lock(storage, {})
    fill(storage, "step-0000009-00001-2", "step-0000002-00002-1")
    assert checkpoints_in(storage) == {1: "step-0000001-00001-1", 2: "step-0000002-00002-1"}
    second.release()
    assert checkpoints_in(storage) == {1: "step-0000001-00001-1", 2: "step-0000002-00002-1"}
    third = take_lock(storage, {})
    assert third.manifests == ["step-0000001-00001-1", "step-0000002-00002-1"]
    sweep(storage, third)
    assert "step-0000009-00001-2" not in storage.list()
    for lock in (third, first):
        lock.release()


def test_where_a_taker_was_killed_before_it_had_listed_them_all_manifests_count(root: str):
    storage = storage_at(root)
    lock = take_lock(storage, {})
    fill(storage, "step-0000001-00001-1")
    lock.release()
    storage.put("lock-00002.json", [json.dumps({"manifests": None, "released": True}).encode()])
    assert checkpoints_in(storage) == {1: "step-0000001-00001-1"}
    storage.put("lock-00002.json", [b"\x00 damaged"])
    assert checkpoints_in(storage) == {1: "step-0000001-00001-1"}


def test_a_lock_that_somebody_deleted_does_not_give_its_number_again(root: str):
    storage = storage_at(root)
    fill(storage, "step-0000001-00007-1")
    lock = take_lock(storage, {})
    assert lock.number == 8
    lock.release()


def test_at_every_kill_during_a_removal_a_checkpoint_is_whole_or_none(tmp_path: Path):
    number = 0
    for number in range(100):
        root = tmp_path / str(number)
        plain = LocalDirectory(root)
        fill(plain, "step-0000001-00001-1")
        effects = iter(range(number))

        def fault(operation: str, path: str, effects: Iterator[int] = effects) -> None:
            if next(effects, None) is None:
                raise KeyboardInterrupt(f"{operation} {path}")

        try:
            remove_checkpoint(LocalDirectory(root, hook=fault), "step-0000001-00001-1")
            break
        except KeyboardInterrupt:
            whole = checkpoints_in(plain) == {} or plain.list("step-0000001-00001-1") == [
                "manifest.json",
                "x.safetensors",
            ]
            assert whole
    assert number > 3
    assert plain.list() == []


# ---------------------------------------------------------------------- a power cut


class Recorder:
    """Keeps what was done to a disk, so that it can be played to any instant without what wasn't synced."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.effects: list[tuple[str, str, bytes]] = []

    def __call__(self, operation: str, path: str) -> None:
        content = b""
        if operation == "sync" and "." in Path(path).name:
            newest = max((self.root / path).parent.glob(".put-*"), key=os.path.getmtime)
            content = newest.read_bytes()
        self.effects.append((operation, path, content))

    def after_a_cut(self, number: int, keeps: object) -> dict[str, bytes]:
        """Files after a cut before an effect; `keeps()` says whether a change that wasn't synced is kept."""
        durable: dict[str, bytes] = {}
        folders, content = {"."}, {}
        pending: list[tuple[str, str, str]] = []  # kind, path, folder in which it is made durable
        for operation, path, data in self.effects[:number]:
            folder = os.path.dirname(path) or "."
            if operation == "mkdir":
                pending.append(("mkdir", path, folder))
            elif operation == "sync" and data:
                content[path] = data
            elif operation in ("rename", "link"):
                pending.append(("name", path, folder))
            elif operation in ("unlink", "rmdir") and path in durable:
                pending.append(("drop", path, folder))
            elif operation == "sync":
                for kind, name, _ in [each for each in pending if each[2] == path]:
                    self._apply(kind, name, durable, folders, content)
                pending = [each for each in pending if each[2] != path]
        for kind, name, _ in pending:
            if keeps():
                self._apply(kind, name, durable, folders, content)
        return {name: data for name, data in durable.items() if (os.path.dirname(name) or ".") in folders}

    def _apply(self, kind, name, durable, folders, content) -> None:
        if kind == "mkdir":
            folders.add(name)
        elif kind == "name":
            durable[name] = content.get(name, b"never synced")
        else:
            durable.pop(name, None)
