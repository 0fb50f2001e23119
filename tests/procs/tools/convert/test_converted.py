"""Converted scripts compute what they computed: on one rank and on three, and beside the script as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenstep.testing import RankPool
from evenstep.tools.convert.convert import convert
from evenstep.tools.verify.ranks import verify_ranks
from evenstep.tools.verify.report import Report
from tests.procs.tools.verify.test_verify_ranks import OnPool

SCRIPTS = Path(__file__).parents[3] / "scripts" / "single"
REFUSED = {
    "contrastive",
    "masked_sequences",
    "sliced_tensors",
    "triplets",
    "unnamed_loader",
}
CONVERTED = sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem not in REFUSED)
QUICK = {"gan", "class_weights"}
# The ranks of the pool are another program's, with its arguments.
ALONE = "import sys; sys.argv[1:] = []\n"
# Several passes make a step, whose losses verify weighs by their samples: gradients and parameters are the same.
OTHER_LOSS = {"accumulation", "gan", "gpt"}
# The converted script evaluates with torch's loader, so verify takes the original's batches for those of one rank.
EVALUATED_WHOLE = frozenset({"imagenet_style"})


def cases(*, left_out: frozenset[str] = frozenset()) -> list[object]:
    return [
        pytest.param(name, id=name, marks=() if name in QUICK else (pytest.mark.extended,))
        for name in CONVERTED
        if name not in left_out
    ]


class BesideTheOriginal:
    """One rank runs the script as it was, and three run the converted one."""

    def __init__(self, ranks: RankPool, original: Path, converted: Path) -> None:
        self._original, self._converted = OnPool(ranks, original), OnPool(ranks, converted)

    def __call__(self, plan: Path, rehearsal: Path, num_ranks: int) -> tuple[int, str]:
        chosen = self._original if num_ranks == 1 else self._converted
        return chosen(plan, rehearsal, num_ranks)


def fresh(name: str, directory: Path, monkeypatch: pytest.MonkeyPatch, *, shuffled: bool = True) -> Path:
    """A copy of a script beside which there is its conversion, "converted.py"."""
    monkeypatch.chdir(directory)
    text = (SCRIPTS / f"{name}.py").read_text()
    if not shuffled:  # each library has an order of its own
        text = text.replace("shuffle=True", "shuffle=False").replace("sampler=RandomSampler(train_ds)", "shuffle=False")
    script = directory / "script.py"
    script.write_text(text)
    found = convert(str(script))
    assert not found.problems
    (directory / "converted.py").write_bytes(ALONE.encode() + found.content)
    script.write_text(ALONE + text)
    return script


def is_fine(report: Report) -> bool:
    print(report.as_json())  # noqa: T201
    return report.is_fine


@pytest.mark.parametrize("name", cases())
def test_one_rank_and_three_compute_the_same(
    name: str, ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fresh(name, tmp_path, monkeypatch)
    script = tmp_path / "converted.py"
    # More than the steps of an epoch in each of them, whose last batch is a shorter one.
    report = verify_ranks(str(script), [], ranks=(1, 3), num_steps=25, say=print, start=OnPool(ranks, script))
    assert report.num_steps > 5
    assert is_fine(report)


@pytest.mark.extended
@pytest.mark.parametrize("name", cases(left_out=EVALUATED_WHOLE))
def test_three_ranks_compute_what_the_script_computed(
    name: str, ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    script = fresh(name, tmp_path, monkeypatch, shuffled=False)
    start = BesideTheOriginal(ranks, script, tmp_path / "converted.py")
    report = verify_ranks(str(script), [], ranks=(1, 3), say=print, start=start)
    (verdict,) = report.verdicts
    if name in OTHER_LOSS and verdict.difference is not None:
        assert verdict.difference.kind == "loss"
        assert verdict.apart < 1e-5
    else:
        assert is_fine(report)
