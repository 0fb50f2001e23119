"""Run torch's own tests of collectives and groups, which ship in its wheel, over Gloo or over our backend.

    python -m tests.torchs_own.runner --nproc 3 --backend evenstep --names test_barrier test_broadcast

prints a line of JSON per test: its name, how it ended, and the end of the error's text. Ranks are forked from a process
that has imported torch and done nothing else with it; torch itself would spawn them, which takes five seconds a test.
Nothing is copied from torch, whose module is imported.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import unittest
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

MODULE = "torch.testing._internal.distributed.distributed_test"

_TEST_LIMIT_S = 100  # torch's own is 300
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Outcome:
    """How one test ended."""

    name: str
    how: Literal["passed", "failed", "skipped"]
    text: str  # the error's or the skip's
    took_s: float


def run_tests(nproc: int, backend: str, names: Sequence[str] = ()) -> dict[str, Outcome]:
    """Run torch's tests, in a process of their own.

    Args:
        nproc: Number of ranks.
        backend: "gloo" or "evenstep".
        names: Of the tests; none: all but those of DistributedDataParallel.
    """
    command = [sys.executable, "-m", "tests.torchs_own.runner", "--nproc", str(nproc), "--backend", backend]
    command += ["--names", *names] if names else []
    with tempfile.TemporaryDirectory() as scratch:
        variables = {**os.environ, "PYTHONPATH": str(_ROOT), "TMPDIR": scratch}
        done = subprocess.run(command, cwd=_ROOT, env=variables, capture_output=True, text=True)
    outcomes = [Outcome(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return {each.name: each for each in outcomes}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the tests that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, required=True)
    parser.add_argument("--backend", choices=["gloo", "evenstep"], required=True)
    parser.add_argument("--names", nargs="+", default=[])
    given = parser.parse_args(arguments)
    # What torch's module reads when it is imported.
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(given.nproc), RANK="0", MASTER_ADDR="127.0.0.1")
    own_stdout = os.dup(1)
    os.dup2(2, 1)  # what the tests print is none of the outcomes
    with os.fdopen(own_stdout, "w") as report:
        for outcome in _outcomes(given.names, given.backend):
            print(json.dumps(asdict(outcome)), file=report, flush=True)


def _outcomes(names: Sequence[str], backend: str) -> Iterator[Outcome]:
    tests = importlib.import_module(MODULE)
    common = importlib.import_module("torch.testing._internal.common_distributed")
    common.TIMEOUT_DEFAULT = _TEST_LIMIT_S

    class TorchsOwn(tests.TestDistBackend, tests.DistributedTest._DistTestBase):  # type: ignore[misc,name-defined]
        """torch's tests."""

        def setUp(self) -> None:
            """Fork the ranks."""
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

        @classmethod
        def _run(cls, rank: int, test_name: str, file_name: str, pipe: Any, **kwargs: Any) -> None:
            if backend != "gloo":
                _replace_gloo(tests, backend)
            super()._run(rank, test_name, file_name, pipe, **kwargs)

    all_tests = {name: getattr(TorchsOwn, name) for name in dir(TorchsOwn) if name.startswith("test_")}
    for name in names or [name for name, test in all_tests.items() if not _is_about_ddp(name, test)]:
        yield _run_one(TorchsOwn, name)


def _replace_gloo(tests: Any, backend: str) -> None:
    """On a rank: the tests, which were imported for Gloo, make groups of another backend."""
    import evenstep  # noqa: F401  # registers it

    make_group = dist.new_group

    @functools.wraps(make_group)
    def new_group(*args: Any, **kwargs: Any) -> Any:
        return make_group(*args, **{**kwargs, **({"backend": backend} if kwargs.get("backend") == "gloo" else {})})

    tests.BACKEND, dist.new_group = backend, new_group


def _is_about_ddp(name: str, test: Callable[..., object]) -> bool:
    marks = ("ddp", "dataparallel", "accumulate_gradients", "bucket", "static_graph", "syncbatchnorm", "sync_bn")
    text = f"{name} {inspect.getsource(inspect.unwrap(test))}".lower()
    return any(mark in text for mark in marks)


def _run_one(case: Any, name: str) -> Outcome:
    result = unittest.TestResult()
    began = time.monotonic()
    case(name).run(result)
    took = functools.partial(Outcome, name, took_s=round(time.monotonic() - began, 2))
    for _, text in (*result.failures, *result.errors):
        return took("failed", text[-2500:])
    for _, text in result.skipped:
        return took("skipped", text)
    return took("passed", "")


if __name__ == "__main__":
    main()
