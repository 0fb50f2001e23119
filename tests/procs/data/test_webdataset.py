"""webdataset's pipelines through `DataLoader`: what is divided, what is shuffled, what is refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import evenstep
from evenstep import DataLoader
from evenstep.data.sources.webdataset import count_shards, is_pipeline, part_of
from evenstep.errors import ConfigurationError
from evenstep.testing import RankPool
from tests.procs.data.test_resumed_streams import NUM_RECORDS, needs, write_shards
from tests.stub_worlds import stub_world

pytestmark = [
    pytest.mark.extended,
    pytest.mark.filterwarnings("ignore"),  # webdataset's own
]


@pytest.fixture
def urls(tmp_path: Path) -> str:
    needs("webdataset")
    write_shards(tmp_path)
    return f"{tmp_path}/shard-{{0..8}}.tar"


def order(pipeline: Any, seed: int = 0, epoch: int = 0, num_parts: int = 1, index: int = 0) -> list[int]:
    return [int(sample["cls"]) for sample in part_of(pipeline, seed, epoch, num_parts, index)]


def decoded(urls: str) -> tuple[list[int], list[int]]:
    """What this rank decodes, and what it is given."""
    import webdataset

    evenstep.init(quiet=True)
    numbers: list[int] = []

    def decode(sample: dict[str, Any]) -> int:
        numbers.append(int(sample["cls"]))
        return numbers[-1]

    pipeline = webdataset.WebDataset(urls, shardshuffle=False).shuffle(10).map(decode)
    return numbers, list(chain.from_iterable(DataLoader(pipeline, 8, collate_fn=list)))


@pytest.mark.parametrize("nproc", [2, 3])
def test_other_libraries_shards_are_decoded_once(ranks: RankPool, urls: str, nproc: int) -> None:
    of_ranks = ranks.run(decoded, nproc, urls)
    assert all(sorted(numbers) == sorted(given) for numbers, given in of_ranks), "a rank decodes what it is given"
    assert sorted(chain.from_iterable(given for _, given in of_ranks)) == list(range(NUM_RECORDS))


def test_other_libraries_shuffles_are_keyed(urls: str, fresh_seed: int) -> None:
    """By seed, epoch, stage and part; in another process too, where python's own seeds would differ."""
    import webdataset as wds

    shards = wds.SimpleShardList(urls)
    for make in (
        lambda: wds.WebDataset(urls, shardshuffle=5).shuffle(20),
        lambda: wds.WebDataset(urls, shardshuffle=5, detshuffle=True, seed=4),
        lambda: wds.DataPipeline(
            shards, wds.shuffle(9), wds.split_by_node, wds.split_by_worker, wds.tarfile_to_samples()
        ),
        lambda: wds.WebDataset(urls, shardshuffle=False).shuffle(20, rng=random.Random(5)),
        lambda: wds.WebDataset(urls, shardshuffle=False).compose(wds.shuffle(20, 10, random.Random(5))),
        lambda: wds.DataPipeline(wds.SimpleShardList(urls, seed=True), wds.tarfile_to_samples()),
        lambda: wds.DataPipeline(wds.WebDataset(urls, shardshuffle=False), wds.shuffle(20)),
    ):
        pipeline, again = make(), make()
        orders = [order(pipeline, fresh_seed, epoch) for epoch in range(3)]
        assert all(sorted(each) == list(range(NUM_RECORDS)) for each in orders)
        assert orders[0] != orders[1] != orders[2] != orders[0]
        assert order(pipeline, fresh_seed + 1) != orders[0]
        for epoch in (2, 0):
            assert order(again, fresh_seed, epoch) == orders[epoch], "whatever was iterated before"
        for num_parts in (2, 3):
            parts = [order(pipeline, fresh_seed, 1, num_parts, index) for index in range(num_parts)]
            assert sorted(chain.from_iterable(parts)) == list(range(NUM_RECORDS))
            assert parts == [order(again, fresh_seed, 1, num_parts, index) for index in range(num_parts)]


def test_other_libraries_draws_of_shards_and_mixes(urls: str) -> None:
    """Shards drawn with replacement, for an epoch of a given length; two sources in turns."""
    import webdataset as wds

    drawn = wds.WebDataset(urls, resampled=True).shuffle(5).with_epoch(70)
    assert count_shards(drawn) > 1 << 60
    parts = [order(drawn, 1, 0, 2, index) for index in (0, 1)]
    assert [len(part) for part in parts] == [70, 70]
    assert parts[0] != parts[1]
    assert parts[0] == order(drawn, 1, 0, 2, 0) != order(drawn, 1, 1, 2, 0)
    mix = wds.RoundRobin([wds.WebDataset(urls, shardshuffle=False).shuffle(30) for _ in range(2)], longest=True)
    assert is_pipeline(mix)
    assert count_shards(mix) == 9
    both = [order(mix, 1, 0, 3, index) for index in range(3)]
    assert sorted(chain.from_iterable(both)) == sorted([*range(NUM_RECORDS)] * 2)
    assert both[0][::2] != both[0][1::2], "each source has numbers of its own"
    assert count_shards(wds.DataPipeline([{"cls": 1}])) == 1
    cached = wds.WebDataset(urls, shardshuffle=False).shuffle(30).compose(wds.filters.Cached())
    assert order(cached, 1, 0) != order(cached, 1, 1), "no epoch is the first one's, which a resumed run hasn't seen"


def divided_by_hand(source: Iterator[Any]) -> Iterator[Any]:
    return source


def shuffled_by_hand(source: Iterator[Any]) -> Iterator[Any]:
    return source


def shuffled_with(source: Iterator[Any], rng: random.Random | None = None) -> Iterator[Any]:
    samples = list(source)
    (rng or random.Random()).shuffle(samples)
    return iter(samples)


def test_other_libraries_stages_that_cannot_be_repeated_are_refused(urls: str) -> None:
    import webdataset as wds

    def made(*stages: Any) -> Callable[[], Any]:
        return lambda: wds.DataPipeline(wds.SimpleShardList(urls), *stages, wds.tarfile_to_samples())

    plain = wds.WebDataset(urls, shardshuffle=False)
    for pipeline, told in (
        (
            wds.WebDataset(urls, shardshuffle=False, nodesplitter=divided_by_hand),
            "divided_by_hand, a stage .* before its",
        ),
        (made(divided_by_hand)(), "divided_by_hand, a stage .* before its files are opened, isn't known"),
        (plain.compose(shuffled_by_hand), "shuffled_by_hand, a stage .* takes rng=, a random.Random"),
        (made(wds.resampled(5))(), "resampled_, a stage"),
        (wds.WebLoader(plain, batch_size=2), "DataLoader, a stage"),
    ):
        with pytest.raises(ConfigurationError, match=told):
            DataLoader(pipeline, 8, world=stub_world())
    for pipeline in (plain.compose(shuffled_with), made(shuffled_with)()):
        assert order(pipeline, 1) == order(pipeline, 1) != order(pipeline, 1, 1)
    with pytest.raises(ConfigurationError, match="resume_streams='state': WebDataset has no state_dict"):
        DataLoader(plain, 8, resume_streams="state", world=stub_world())


def test_other_libraries_pipelines_with_too_few_shards_are_divided_by_record(ranks: RankPool, urls: str) -> None:
    """Also the batch of nothing at the end has the pipeline's form."""
    of_ranks = ranks.run(decoded, 2, urls.replace("0..8", "8..8"))
    assert sorted(chain.from_iterable(given for _, given in of_ranks)) == list(range(49, NUM_RECORDS))
    assert sorted(of_ranks[0][0]) == sorted(of_ranks[1][0]) == list(range(49, NUM_RECORDS))
