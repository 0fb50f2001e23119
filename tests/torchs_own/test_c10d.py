"""What Gloo passes of torch's own tests of collectives and groups, our backend passes, but for a list with reasons."""

from __future__ import annotations

import pytest

from tests.torchs_own.runner import Outcome, run_tests

_TEXT = "looks for words of Gloo's error; ours is a RuntimeError, too, and names all missing ranks"
_BY_GLOO_ONLY = f"before torch 2.15 `torch.distributed.monitored_barrier` refuses all backends but Gloo; and it {_TEXT}"
LISTED = {
    "test_barrier_timeout_full_group": _TEXT,
    "test_monitored_barrier_gloo": _BY_GLOO_ONLY,
    "test_monitored_barrier_gloo_rank_0_timeout": _TEXT,
    "test_monitored_barrier_gloo_subgroup": _BY_GLOO_ONLY,
}
SAMPLE = ("test_all_gather_coalesced_simple", "test_barrier", "test_reduce_max", "test_scatter_object_list")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("nproc", [2, 3, 4])
def test_what_gloo_passes_our_backend_passes(nproc: int) -> None:
    gloos, ours = run_tests(nproc, "gloo"), run_tests(nproc, "evenstep")
    passed = {name for name, outcome in gloos.items() if outcome.how == "passed"}
    assert len(passed) > 40, "torch's tests are found, and run"
    print(f"{nproc} ranks: Gloo passes {len(passed)}, evenstep {len(passed & _passed(ours))} of these")  # noqa: T201
    failed = sorted(passed - _passed(ours) - LISTED.keys())
    assert not failed, "\n\n".join(f"{name}: {ours[name].text}" for name in failed)


@pytest.mark.brief
@pytest.mark.extended
def test_a_sample_of_them() -> None:
    ours = run_tests(2, "evenstep", SAMPLE)
    assert {name: outcome.how for name, outcome in ours.items()} == dict.fromkeys(SAMPLE, "passed"), ours


def _passed(outcomes: dict[str, Outcome]) -> set[str]:
    return {name for name, outcome in outcomes.items() if outcome.how == "passed"}
