"""Checkpoints of several ranks in an object store: a run is stopped on 2 ranks and goes on with 3."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from unittest import mock

import pytest

from evenstep.checkpoint.directory import checkpoints_in
from evenstep.checkpoint.store import storage_at
from tests.checkpoint_runs import Training, world_for_this_test
from tests.object_store import s3_server


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with s3_server() as url:
        if url is None:
            pytest.skip("moto or s3fs isn't installed")
        yield url


def train(url: str, variables: dict[str, str], upto: int, stops_at: int | None):
    """The samples of each step of this rank, and where it began."""
    with mock.patch.dict(os.environ, variables):
        world = world_for_this_test()
        run = Training(url, world, every_steps=2, every_minutes=None, keep=2, plain=True, seed=3 + world.rank)
        begun = run.checkpoint.resume()
        try:
            while run.checkpoint.num_steps < upto:
                if run.checkpoint.num_steps == stops_at and world.rank == 1:
                    world.request_stop("the scheduler")
                run.step()
        except SystemExit:
            pass
        run.checkpoint.close()
        run.checkpoint._release()
        return begun, run.checkpoint.num_steps, run.seen


@pytest.mark.extended
@pytest.mark.timeout(400)
def test_a_run_in_a_bucket_is_stopped_on_2_ranks_and_goes_on_with_3(ranks, bucket):
    url = f"{bucket}/run"
    variables = {name: os.environ[name] for name in os.environ if name.startswith("AWS_")}
    first = ranks.run(train, 2, url, variables, 9, 4)
    ((begun, stopped),) = {(begun, stopped) for begun, stopped, _ in first}
    assert begun == 0
    assert 5 <= stopped <= 6
    second = ranks.run(train, 3, url, variables, 9, None)
    assert {(begun, ended) for begun, ended, _ in second} == {(stopped, 9)}
    seen = [
        sorted(itertools.chain(*step)) for part in (first, second) for step in zip(*(s for *_, s in part), strict=True)
    ]
    assert seen == [list(range(6 * step, 6 * step + 6)) for step in range(9)]
    storage = storage_at(url)
    folders = checkpoints_in(storage)
    assert list(folders) == [8, 9]
    assert set(storage.list()) == {*folders.values(), "lock-00002.json"}
    assert not storage._files.call_s3("list_multipart_uploads", Bucket="bucket", Prefix="run/").get("Uploads")
