"""The README and docs/how-to/examples.md are true: every command in them and every program in them is run."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
README = "\n".join((ROOT / page).read_text() for page in ("README.md", "docs/how-to/examples.md"))
DEADLINE_S = 150.0

# What is shown elsewhere, and where.
EXEMPT = {
    "make test": "it is what runs this test",
    "make demo": "test_make_demo_runs_the_digits; the same command line runs in test_examples.py",
    "evenstep run --nproc-per-node 2 examples/digits.py": "test_examples.py runs it and reads its table",
    "pip install .": "test_distribution.py builds what it installs",
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    return [line for block in blocks("bash") for line in block.splitlines() if line.strip()]


PROGRAMS = {block.split("\n", 1)[0].removeprefix("# "): block for block in blocks("python")}


def environment(directory: Path) -> dict[str, str]:
    """A person's: this environment's commands come first; nothing is there of pytest or of an outer make."""
    makes = {"MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "MFLAGS", "TORCH", "PYTHON", "PART"}
    env = {k: v for k, v in os.environ.items() if k not in makes and not k.startswith(("PYTEST", "PET_", "OMP_NUM"))}
    scripts = sysconfig.get_path("scripts")
    return env | {"PATH": os.pathsep.join([scripts, env["PATH"]]), "TMPDIR": str(directory), "COLUMNS": "80"}


@functools.cache
def read_aloud(command: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """A command of the README, run once however many tests look at what it says."""
    return call(command, directory)


def call(command: str, directory: Path, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command],
        cwd=directory,
        env=environment(directory) if env is None else env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the README's programs and the examples, as the reader has it."""
    directory = tmp_path_factory.mktemp("reader")
    for name, program in PROGRAMS.items():
        (directory / name).write_text(program)
    shutil.copytree(ROOT / "examples", directory / "examples", ignore=shutil.ignore_patterns("__pycache__", "runs"))
    return directory


def test_every_program_has_a_name_and_is_run():
    assert all(re.fullmatch(r"\w+\.py", name) for name in PROGRAMS), list(PROGRAMS)
    started_by_commands = {name for name in PROGRAMS if any(name in command for command in commands())}
    assert set(PROGRAMS) == started_by_commands | {"before.py", "from_a_function.py"}


def _slowly(command: str) -> object:
    """Programs that other tests run in other ways too."""
    is_slow = any(word in command for word in ("textbook", "language_model", "torchrun", "--nproc-per-node 3"))
    return pytest.param(command, marks=pytest.mark.extended) if is_slow else command


@pytest.mark.extended
@pytest.mark.parametrize("command", [_slowly(c) for c in commands() if c not in EXEMPT])
def test_command_of_the_readme(command: str, workplace: Path):
    done = read_aloud(command, workplace)
    if done.returncode != 0 and "--with torch" in command and "terminate called without" in done.stderr:
        done = call(command, workplace)  # torch's own exit, see test_examples.py
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert done.stdout.strip()


@pytest.mark.extended
@pytest.mark.parametrize(
    ("command", "says"),
    [("python before.py", "epoch 2: loss"), ("python from_a_function.py", "5.0")],
)
def test_program_of_the_readme(command: str, says: str, workplace: Path):
    done = call(command, workplace)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert says in done.stdout


@pytest.mark.extended
def test_the_loss_does_not_depend_on_the_number_of_replicas(workplace: Path):
    """As the README says of train.py."""
    one = read_aloud("python train.py", workplace).stdout
    three = read_aloud("evenstep run --nproc-per-node 3 --threads-per-rank 1 train.py", workplace).stdout
    assert len(re.findall(r"^epoch \d: loss \d\.\d{4}$", one, re.MULTILINE)) == 3, one
    assert one == three


def test_make_demo_runs_the_digits():
    """Without running it: make's own account of what it would do, which test_examples.py does."""
    done = subprocess.run(["make", "-n", "demo"], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert ".venv/bin/python -m evenstep run --nproc-per-node 2 examples/digits.py" in done.stdout


def test_make_explains_a_python_that_is_too_old(tmp_path: Path):
    old = tmp_path / "old python"
    old.write_text('#!/bin/sh\ncase "$2" in *exit*) exit 1;; *) echo 3.8.10;; esac\n')
    old.chmod(0o755)
    (tmp_path / "requirements").mkdir()
    for name in ("requirements/install.sh", "requirements/test.txt", "pyproject.toml", "Makefile"):
        shutil.copy(ROOT / name, tmp_path / name)
    done = subprocess.run(["make", "demo", f"PYTHON={old}"], cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert done.returncode != 0
    assert "is python 3.8.10; 3.10 or later is needed" in done.stderr
    done = subprocess.run(["make", "demo", "PYTHON=python9"], cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert "there is no 'python9' here" in done.stderr
    assert not (tmp_path / ".venv").exists()


FAKE_PYTHON = """\
#!/bin/sh
# Stands for python: makes an environment that holds nothing but itself, and notes what is installed and run.
echo "$OMP_NUM_THREADS: $*" >>"$LOG"
case "$*" in
-c*version_info\\[*) echo 3.12.1 ;;
"-m venv"*) for folder; do :; done; mkdir -p "$folder/bin" && cp "$0" "$folder/bin/python" ;;
esac
"""


def test_a_second_call_installs_nothing_also_in_a_folder_with_a_space(tmp_path: Path):
    """With a python that only notes how it is called: installing torch takes minutes."""
    checkout = tmp_path / "my projects" / "evenstep"
    (checkout / "requirements").mkdir(parents=True)
    for name in ("requirements/install.sh", "requirements/test.txt", "pyproject.toml", "Makefile"):
        shutil.copy(ROOT / name, checkout / name)
    fake = tmp_path / "fake python"
    fake.write_text(FAKE_PYTHON)
    fake.chmod(0o755)
    log = tmp_path / "log"
    env = environment(tmp_path) | {"LOG": str(log), "OMP_NUM_THREADS": "3"}

    def make_demo(directory: Path) -> list[str]:
        """What was run, without looks at what there is."""
        log.unlink(missing_ok=True)
        done = subprocess.run(
            ["make", "demo", f"PYTHON={fake}"], cwd=directory, env=env, capture_output=True, text=True, timeout=30
        )
        assert done.returncode == 0, done.stderr
        return [line.removeprefix("3: ") for line in log.read_text().splitlines() if ": -m " in line]

    install = ["-m venv .venv", "-m pip install --quiet -r requirements/test.txt"]
    install.append("-m pip install --quiet --no-deps --no-build-isolation -e .")
    demo = ["-m evenstep run --nproc-per-node 2 examples/digits.py"]
    assert make_demo(checkout) == install + demo
    assert make_demo(checkout) == demo
    with (checkout / "requirements" / "test.txt").open("a") as pins:
        pins.write("another==1\n")
    assert make_demo(checkout) == install + demo
    assert make_demo(checkout.rename(checkout.with_name("moved"))) == install + demo
    (checkout.with_name("moved") / ".venv" / "installed").unlink()  # as after an install that was interrupted
    assert make_demo(checkout.with_name("moved")) == install + demo


def test_what_is_installed_with_it_is_enough():
    """torch works without numpy, but safetensors moves torch's tensors through it: `broadcast_object`, `verify`."""
    listed = re.search(r"^dependencies = (\[.*\])$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert listed is not None
    installed = {name_of(requirement) for requirement in json.loads(listed[1])}
    wanted = importlib.metadata.requires("safetensors") or []
    needed = {name_of(each) for each in wanted if re.search("extra == ['\"](torch|numpy)['\"]", each)}
    assert "torch" in needed
    assert needed <= installed


def name_of(requirement: str) -> str:
    return re.split(r"[^\w-]", requirement)[0]
