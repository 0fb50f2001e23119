"""Tests in here start programs of the host's: what each needs, and where it comes from."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launchers.slurm import OneNodeSlurm, missing_programs

INSTALL = "`make test-launchers` installs it on Debian"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a run of all tests these are skipped, and counted: they have a make target of their own."""
    here = Path(__file__).parent
    if any(here.name in argument for argument in config.args):
        return
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="the real launchers are started by `make test-launchers`"))


@pytest.fixture(scope="session")
def slurm() -> Iterator[OneNodeSlurm]:
    """A Slurm of this host's own, for as long as the tests run."""
    missing = missing_programs()
    if missing:
        pytest.skip(f"no Slurm: {', '.join(missing)} not installed; {INSTALL}")
    if os.geteuid() != 0:
        pytest.skip("slurmd starts jobs only as root")
    # Not pytest's own directory: its unix sockets would have names that are too long.
    directory = Path(tempfile.mkdtemp(prefix="es-", dir="/tmp"))
    try:
        with OneNodeSlurm(directory) as running:
            yield running
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def mpiexec(kind: str) -> list[str]:
    """The command that starts ranks with "openmpi" or "mpich", without their number; skips where there is none."""
    name = f"mpiexec.{kind}"
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name}; {INSTALL}")
    flags = {"openmpi": ["--oversubscribe", "--bind-to", "none"], "mpich": []}[kind]
    if kind == "openmpi" and os.geteuid() == 0:
        flags.append("--allow-run-as-root")
    return [found, *flags]


PYTHON = sys.executable
