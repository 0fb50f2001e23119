"""The pairs of torch and python on which evenstep's tests were run. docs/reference/versions.md shows the same table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SuiteRun:
    """One run of the tests on one pair.

    Args:
        torch: Its full version.
        wheel: "CPU", or "CUDA" for the one that the package index gives without being asked.
        python: Major and minor version.
        date: When, as year-month-day.
        tests: Which tests ran.
        passed: Number of tests that passed.
        failed: Number of tests that failed, also alone.
        skipped: Number of tests that were skipped.
    """

    torch: str
    wheel: str
    python: str
    date: str
    tests: str
    passed: int
    failed: int
    skipped: int

    @property
    def result(self) -> str:
        """How the run ended."""
        return f"{self.passed:,} passed, {self.failed:,} failed, {self.skipped:,} skipped"


RUNS = (
    SuiteRun("2.15.0", "CUDA", "3.11", "2026-11-25", "core", 4800, 0, 141),
    SuiteRun("2.15.0", "CUDA", "3.11", "2026-11-25", "rest", 785, 0, 2),
    SuiteRun("2.15.0", "CUDA", "3.12", "2026-11-24", "core", 4203, 0, 138),
    SuiteRun("2.15.0", "CUDA", "3.13", "2026-11-24", "core", 4203, 0, 138),
    SuiteRun("2.14.1", "CUDA", "3.11", "2026-11-24", "core", 4203, 0, 138),
    SuiteRun("2.14.1", "CUDA", "3.10", "2026-11-24", "core", 4203, 0, 138),
    SuiteRun("2.13.0", "CPU", "3.11", "2026-11-24", "core", 4203, 0, 138),
    SuiteRun("2.11.0", "CUDA", "3.11", "2026-11-24", "core", 4203, 0, 138),
)


def runs_on(torch: str, python: str, runs: Sequence[SuiteRun] = RUNS) -> list[SuiteRun]:
    """Return the runs on a pair of versions, of which the first two numbers count.

    Args:
        torch: Such as "2.15.0+cu130".
        python: Such as "3.12.1".
        runs: The table.
    """
    return [run for run in runs if (_minor(run.torch), run.python) == (_minor(torch), _minor(python))]


def untested(torch: str, python: str, runs: Sequence[SuiteRun] = RUNS) -> str | None:
    """Return a warning for a pair on which the tests were never run, or None; arguments as of `runs_on`."""
    if runs_on(torch, python, runs):
        return None
    pairs = sorted({(_numbers(_minor(run.torch)), _numbers(run.python)) for run in runs})
    listed = ", ".join(f"{a}.{b} with {c}.{d}" for (a, b), (c, d) in pairs)
    return (
        f"evenstep's tests were never run on torch {_minor(torch)} with python {_minor(python)}, but on torch and "
        f"python {listed}. In a checkout, this runs them: make test-torch TORCH={torch.partition('+')[0]} "
        f"PYTHON=python{_minor(python)}"
    )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _numbers(version: str) -> tuple[int, int]:
    major, minor = map(int, version.split("."))
    return major, minor
