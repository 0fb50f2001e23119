"""Storages: a directory, and what fsspec reaches; which folders are checkpoints, and what a kill may leave."""

from __future__ import annotations

import json
import os
import random
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from evenstep import World
from evenstep.checkpoint import tools
from evenstep.checkpoint.directory import checkpoints_in, sweep
from evenstep.checkpoint.load.reader import check_checkpoint
from evenstep.checkpoint.lock import Lock, LockedError, take_lock
from evenstep.checkpoint.store import LocalDirectory, Storage, storage_at
from evenstep.errors import CheckpointError, ConfigurationError
from evenstep.testing.storage import check_storage, read_all
from tests.checkpoint_runs import Training, assert_same
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
        ("s3:/bucket/run", "it needs two slashes, and a Path drops one"),
        ("nowhere://bucket/run", "can't be reached: Protocol not known: nowhere"),
        ("gs://bucket/run", "needs gcsfs: pip install 'evenstep\\[gs\\]'"),
        ("az://bucket/run", "needs adlfs: pip install 'evenstep\\[az\\]'"),
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


@pytest.mark.parametrize("says_so", [True, False])
def test_a_store_that_cannot_create_only_is_refused_for_a_lock(monkeypatch: pytest.MonkeyPatch, says_so: bool):
    """As servers that don't know S3's If-None-Match, and clients without it: both of two jobs would have the lock."""
    from fsspec.implementations.memory import MemoryFileSystem

    storage = Storage(f"memory://{uuid.uuid4().hex}")
    really = MemoryFileSystem.pipe_file

    def pipe_file(self, path, value, mode="overwrite"):
        if mode == "create" and says_so:
            raise NotImplementedError("mode")
        really(self, path, value)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", pipe_file)
    with pytest.raises(OSError, match="can't create a file only if it doesn't exist, so no lock would be safe"):
        take_lock(storage, {})


def test_links_and_pipes_are_not_read(tmp_path: Path):
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "x").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "x")
    storage = LocalDirectory(tmp_path / "linked")  # the directory itself may be one
    storage.put("step-0000001-00001-1/manifest.json", [b"x"])
    folder = tmp_path / "x" / "step-0000001-00001-1"
    (folder / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(folder / "pipe")
    (tmp_path / "x" / "step-0000002-00001-2").symlink_to(folder)
    for path in ("step-0000001-00001-1/link", "step-0000001-00001-1/pipe", "step-0000002-00001-2/manifest.json"):
        with pytest.raises(OSError), storage.open(path):
            pass
    assert checkpoints_in(storage) == {1: "step-0000001-00001-1"}
    assert read_all(storage, "step-0000001-00001-1/manifest.json") == b"x"


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


def test_a_run_goes_on_from_a_storage_of_any_kind(root: str, capsys: pytest.CaptureFixture[str]):
    """Bit for bit; a damaged checkpoint is passed over, kept, and found damaged again by the next start."""

    def training(**options) -> Training:
        return Training(root, World.alone(device="cpu"), **{"every_minutes": None, **options})

    straight = training(every_steps=2, keep=2).run_to(6)
    expected = straight.everything()
    straight.checkpoint.close()
    storage = storage_at(root)
    folders = checkpoints_in(storage)
    assert list(folders) == [4, 6]
    content = bytearray(read_all(storage, f"{folders[6]}/model.safetensors"))
    content[-1] ^= 1
    storage.put(f"{folders[6]}/model.safetensors", [content])
    for _ in range(2):
        run = training(seed=99)
        assert run.checkpoint.resume() == 4
        assert f"damaged, skipped and kept: {root}/{folders[6]}/model.safetensors: tensor" in capsys.readouterr().err
        run.checkpoint._release()
    assert [(each["step"], each["state"]) for each in tools.list_checkpoints(root)] == [(4, "good"), (6, "damaged")]
    run = training(seed=98, every_steps=1, keep=1)
    run.checkpoint.resume()
    run.run_to(6)
    assert_same(run.everything(), expected)
    run.checkpoint.close()
    assert [(each["step"], each["state"]) for each in tools.list_checkpoints(root)] == [(6, "damaged"), (6, "good")]
    assert tools.verify(root, None) == {checkpoints_in(storage)[6]: []}


def test_a_run_whose_only_checkpoint_is_damaged_never_starts_at_step_0(root: str):
    """However often it is started."""
    run = Training(root, World.alone(device="cpu"), every_minutes=None).run_to(1)
    run.checkpoint.close()
    storage = storage_at(root)
    storage.put(f"{checkpoints_in(storage)[1]}/manifest.json", [b"\0" * 100])
    for _ in range(3):
        run = Training(root, World.alone(device="cpu"), every_minutes=None)
        with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be read"):
            run.checkpoint.resume()
        run.checkpoint._release()


@pytest.mark.parametrize("at", ["manifest", "removal"])
def test_a_job_that_was_stopped_behind_its_look_at_the_lock_changes_nothing_that_counts(tmp_path: Path, at: str):
    """It is requeued meanwhile, and the next attempt begins; then it goes on."""
    others: list[Lock] = []

    def requeue(operation: str, path: str) -> None:
        is_manifest = path == "step-0000003-00001-3/manifest.json" and operation == "create"
        is_removal = path == "step-0000001-00001-1/manifest.json" and operation == "unlink"
        if not others and (is_manifest if at == "manifest" else is_removal):
            others.append(take_lock(LocalDirectory(tmp_path), {}))

    storage, keep = LocalDirectory(tmp_path, hook=requeue), 9 if at == "manifest" else 2
    run = Training(storage, World.alone(device="cpu"), every_steps=1, every_minutes=None, keep=keep)
    failed = 3 if at == "manifest" else 4
    with pytest.raises(CheckpointError, match=rf"step {failed} could not be saved .*taken over by") as caught:
        run.run_to(5)
    assert caught.value.exit_code == 74
    folders = {1: "step-0000001-00001-1", 2: "step-0000002-00001-2", 3: "step-0000003-00001-3"}
    counted = {"manifest": [1, 2], "removal": [2, 3]}[at]
    assert checkpoints_in(storage) == {step: folders[step] for step in counted}
    (other,) = others
    assert other.manifests == [folders[step] for step in ([1, 2] if at == "manifest" else [1, 2, 3])]
    other.confirm()
    other.release()
    run.checkpoint._release()


# ---------------------------------------------------------------------- which folders are checkpoints


def fill(storage: Storage, *folders: str) -> None:
    for folder in folders:
        storage.put(f"{folder}/x.safetensors", [b"x"])
        storage.put(f"{folder}/manifest.json", [folder.encode()])


def test_what_killed_jobs_left_is_swept_and_what_is_damaged_is_not(root: str):
    storage = storage_at(root)
    fill(storage, "step-0000002-00001-1", "step-0000003-00001-2", "step-0000005-mine")
    storage.put("step-0000004-00001-3/x.safetensors", [b"half of a save"])
    storage.put("notes/mine.txt", [b"x"])
    lock = take_lock(storage, {})
    sweep(storage, lock)
    names = ["lock-00002.json", "notes", "step-0000002-00001-1", "step-0000003-00001-2", "step-0000005-mine"]
    assert storage.list() == names, "their manifests don't parse, and once they did; others have other names"
    lock.release()


def test_a_manifest_that_comes_after_the_next_job_has_listed_them_is_none(root: str):
    """A job was stopped between its look at the lock and its manifest, and goes on."""
    storage = storage_at(root)
    first = take_lock(storage, {})
    fill(storage, "step-0000001-00001-1")
    second = take_lock(storage, {})
    fill(storage, "step-0000009-00001-2", "step-0000002-00002-1")
    with pytest.raises(LockedError, match="taken over by"):
        sweep(storage, first)
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


# ---------------------------------------------------------------------- a power cut


def test_a_put_syncs_the_file_before_it_has_its_name_and_the_folder_behind(tmp_path: Path, monkeypatch):
    """What the kernel is told, in order: hooks come before it."""
    done: list[str] = []
    sync, rename = os.fsync, Path.rename

    def noted_sync(descriptor: int) -> None:
        done.append(f"sync {os.path.basename(os.readlink(f'/proc/self/fd/{descriptor}'))[:5]}")
        sync(descriptor)

    def noted_rename(path: Path, target: Path) -> Path:
        done.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    LocalDirectory(tmp_path / "run").put("step", [b"x"])
    assert done == [f"sync {tmp_path.name[:5]}", "sync .put-", "rename", "sync run"], "the folder that it makes first"


def test_a_file_that_a_network_file_system_still_keeps_holds_no_removal_up(tmp_path: Path, monkeypatch):
    LocalDirectory(tmp_path).put("step-1/x", [b"x"])
    monkeypatch.setattr(Path, "unlink", lambda path, missing_ok: path.rename(path.with_name(".nfs0001")))
    LocalDirectory(tmp_path).remove("step-1")
    assert LocalDirectory(tmp_path).list("step-1") == []


class Recorder:
    """Keeps what was done to a disk, so that it can be played to any instant without what wasn't synced."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.effects: list[tuple[str, str, bytes]] = []

    def __call__(self, operation: str, path: str) -> None:
        content = b""
        if operation == "sync" and path.endswith((".json", ".safetensors")):
            newest = max((self.root / path).parent.glob(".put-*"), key=lambda each: each.stat().st_mtime_ns)
            content = newest.read_bytes()
        self.effects.append((operation, path, content))

    def after_a_cut(self, number: int, keeps: Callable[[], bool]) -> dict[str, bytes]:
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


def test_a_power_cut_at_any_instant_leaves_every_checkpoint_that_was_committed_before(tmp_path: Path, fresh_seed: int):
    """What wasn't synced is dropped at random, names and folders alike."""
    generator = random.Random(fresh_seed)
    recorder = Recorder(tmp_path / "run")
    run = Training(
        LocalDirectory(tmp_path / "run", hook=recorder),
        World.alone(device="cpu"),
        every_steps=1,
        every_minutes=None,
        keep=2,
    )
    committed = [(0, 0)]  # number of effects, newest step
    for step in range(1, 6):
        run.run_to(step)
        run.checkpoint.wait()
        committed.append((len(recorder.effects), step))
    run.checkpoint.close()
    for number in [generator.randrange(len(recorder.effects) + 1) for _ in range(60)]:
        left = tmp_path / f"cut-{number}-{generator.random()}"
        left.mkdir()
        for name, content in recorder.after_a_cut(number, lambda: generator.random() < 0.5).items():
            (left / name).parent.mkdir(exist_ok=True)
            (left / name).write_bytes(content)
        storage = LocalDirectory(left)
        found = checkpoints_in(storage)
        newest = max(step for effects, step in committed if effects <= number)
        assert max(found, default=0) >= newest, f"cut at {number}, {recorder.effects[number - 1][:2]}"
        for folder in found.values():
            assert check_checkpoint(storage, folder) == []
