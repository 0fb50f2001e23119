"""What is built for others to install: the source distribution, and the wheel that is built from it."""

from __future__ import annotations

import email.parser
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest

import evenstep

ROOT = Path(__file__).parents[3]
# What the build frontend does without isolation, without the frontend: this environment's setuptools builds.
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"
NOT_COPIED = shutil.ignore_patterns(".*", "build", "dist", "runs", "logs", "*.egg-info", "__pycache__", "venv-*")


def build(kind: str, source: Path, folder: Path) -> Path:
    done = subprocess.run(
        [sys.executable, "-c", BUILD.format(kind=kind), str(folder)],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "Deprecat" not in done.stderr, "the next setuptools refuses it"
    return folder / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(the source distribution, unpacked; the wheel)."""
    folder = tmp_path_factory.mktemp("distribution")
    shutil.copytree(ROOT, folder / "checkout", ignore=NOT_COPIED)
    archive = build("sdist", folder / "checkout", folder)
    with tarfile.open(archive) as tar:
        # The first releases of python 3.10 have no filters, and from 3.12 on none is a warning.
        tar.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    source = folder / archive.name.removesuffix(".tar.gz")
    return source, build("wheel", source, folder)


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as files:
        name = next(name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        return email.parser.Parser().parsestr(files.read(name).decode())


def test_the_source_distribution_has_what_its_tests_need(built: tuple[Path, Path]):
    source, _ = built
    for folder in ("benchmarks", "docs", "examples", "requirements", "src/evenstep", "tests"):
        wanted = {
            path.relative_to(ROOT)
            for path in (ROOT / folder).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
        }
        assert wanted
        assert wanted <= {path.relative_to(source) for path in source.rglob("*")}
    for name in ("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "pyproject.toml"):
        assert (source / name).read_bytes() == (ROOT / name).read_bytes()


def test_the_wheel_has_every_module_and_needs_no_compiler(built: tuple[Path, Path]):
    _, wheel = built
    assert wheel.name == f"evenstep-{evenstep.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as files:
        names = {name for name in files.namelist() if ".dist-info/" not in name}
    modules = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "evenstep").rglob("*.py")}
    assert names == modules | {"evenstep_command.py", "evenstep/py.typed"}


def test_what_the_wheel_says_of_itself(built: tuple[Path, Path]):
    source, wheel = built
    said = metadata(wheel)
    assert said["Version"] == evenstep.__version__
    assert source.name == f"evenstep-{evenstep.__version__}"
    assert said["Requires-Python"] == ">=3.10"
    assert said["License-Expression"] == "BSD-3-Clause"
    assert said.get_payload().strip() == (ROOT / "README.md").read_text().strip()
    assert {"notebook", "examples"} <= set(said.get_all("Provides-Extra", []))
    needed = [line for line in said.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert {re.split(r"[^\w-]", line)[0] for line in needed} == {"torch", "safetensors", "numpy", "rich"}
    with zipfile.ZipFile(wheel) as files:
        name = next(name for name in files.namelist() if name.endswith(".dist-info/entry_points.txt"))
        assert "evenstep = evenstep_command:main" in files.read(name).decode()


def test_the_version_stands_in_one_place():
    """`evenstep.__version__`; pyproject.toml reads it from there."""
    assert not re.search(r"^version *= *\"", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert re.search(rf'^__version__ = "{evenstep.__version__}"$', Path(evenstep.__file__).read_text(), re.MULTILINE)
