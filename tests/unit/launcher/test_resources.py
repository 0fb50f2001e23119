from __future__ import annotations

import pytest

from evenstep.errors import ConfigurationError
from evenstep.launcher.options.resources import Host, RankPlan, cores_within, plan_ranks

LAPTOP = Host(num_cores=8, num_cpus=16, num_gpus=0)
SERVER = Host(num_cores=64, num_cpus=128, num_gpus=0)
GPUS = Host(num_cores=32, num_cpus=64, num_gpus=8)


@pytest.mark.parametrize(
    ("nproc", "host", "asked", "expected"),
    [
        ("auto", Host(2, 2, 0), {}, RankPlan(2, 1)),
        ("auto", LAPTOP, {}, RankPlan(8, 1)),
        ("auto", SERVER, {"threads_per_rank": 16}, RankPlan(4, 16)),
        ("auto", LAPTOP, {"openmp_threads": 4, "threads_per_rank": 2}, RankPlan(4, 2)),
        ("auto", GPUS, {}, RankPlan(8, 4)),
        ("auto", GPUS, {"device": "cpu"}, RankPlan(8, 4)),
        ("auto", GPUS, {"device": "cuda:1"}, RankPlan(1, 32)),
        ("2", LAPTOP, {}, RankPlan(2, 4)),
        ("20", LAPTOP, {}, RankPlan(20, 1)),
        ("cpu", LAPTOP, {}, RankPlan(16, 1)),
        ("gpu", GPUS, {}, RankPlan(8, 4)),
        ("4", GPUS, {"device": "cuda:0"}, RankPlan(4, 8)),
    ],
)
def test_ranks_and_threads(nproc: str, host: Host, asked: dict[str, object], expected: RankPlan) -> None:
    assert plan_ranks(nproc, host, **asked) == expected  # type: ignore[arg-type]


def test_more_ranks_than_are_of_use_are_remarked_on() -> None:
    assert plan_ranks("16", Host(1, 2, 0)).remark == ""
    assert (
        plan_ranks("17", Host(1, 2, 0)).remark == "17 ranks on a node of 2 CPUs: they will mostly wait for each other"
    )


@pytest.mark.parametrize(
    ("nproc", "host", "asked", "message"),
    [
        ("0", LAPTOP, {}, "at least 1 rank"),
        ("two", LAPTOP, {}, "use auto, cpu, gpu or a number"),
        ("gpu", LAPTOP, {}, "no GPU"),
        ("2", LAPTOP, {"threads_per_rank": 0}, "0 threads per rank"),
        ("2", LAPTOP, {"threads_per_rank": 10**11}, "^100000000000 threads per rank: at most 1024 on a node of"),
        ("2", LAPTOP, {"openmp_threads": 10**11}, "OMP_NUM_THREADS.: at most 1024"),
        ("2", LAPTOP, {"device": "cuda"}, "2 ranks on this node, but it has no GPU"),
        ("9", GPUS, {"device": "cuda"}, "9 ranks on this node, but it has 8 GPUs"),
        ("2", GPUS, {"device": "tpu"}, "a device"),
        ("129", Host(1, 2, 0), {}, "^129 ranks on a node of 2 CPUs: at most 64 per CPU are allowed"),
    ],
)
def test_what_cannot_be_is_refused(nproc: str, host: Host, asked: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        plan_ranks(nproc, host, **asked)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("siblings", "limit", "expected"),
    [
        (["0,4", "1,5", "0,4", "1,5"], None, 2),
        (["0", "1"], 8.0, 2),
        (["0", "1", "2", "3"], 1.5, 2),
        (["0"], 0.1, 1),
        ([], None, 1),
    ],
)
def test_cores_within(siblings: list[str], limit: float | None, expected: int) -> None:
    assert cores_within(siblings, limit) == expected
