"""`evenstep verify` says how many runs it makes, which one is running, and how long the rest takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenstep.errors import UsageError
from evenstep.tools.verify import ranks
from evenstep.tools.verify.evidence import Plan, Seen, write_step


def test_each_run_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now_s = [0.0]
    monkeypatch.setattr(ranks.time, "monotonic", lambda: now_s[0])

    def start(plan: Path, rehearsal: Path, number: int) -> tuple[int, str]:
        now_s[0] += 10.0
        for rank in range(number):
            write_step(Plan.read(plan), rank, 0, Seen(losses=[(1.0, None)], digests={"grad/w": str(number)}), {}, {})
        return len(said) // 3, "no data"  # the second run fails

    said: list[str] = []
    (tmp_path / "train.py").touch()
    with pytest.raises(UsageError, match="no data"):
        ranks.verify_ranks(str(tmp_path / "train.py"), [], ranks=(1, 2), say=said.append, start=start)
    assert said == [
        "2 runs, and up to 2 more in float64 where results differ",
        f"run 1 of at most 4: {tmp_path / 'train.py'} on 2 ranks",
        f"run 2 of at most 4: {tmp_path / 'train.py'} on 1 rank (at most about 30 s left)",
    ]
