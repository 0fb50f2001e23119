"""`evenstep run --check` on two ranks."""

from __future__ import annotations

from pathlib import Path

from tests.commands import call


def test_check_adds_up_takes_a_step_and_measures(tmp_path: Path) -> None:
    code, command = call(tmp_path, ["--check", "--nproc-per-node", "2", "--threads-per-rank", "1", "--device", "cpu"])
    assert code == 0, command.stderr
    total, step, everybody, pair = command.stdout.splitlines()
    assert total == "a sum over 2 ranks: right"
    assert step == "a training step on cpu: the same as one process's"
    assert everybody.startswith("all ranks: shared memory, latency ")
    assert pair.startswith("ranks 0 and 1: shared memory, latency ")
    assert pair.endswith(" GB/s (all-reduce of 16 MiB)")
