"""The README and docs/how-to/examples.md are true: every command in them and every program in them is run."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
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
    "pip install .": "test_pip_install_gives_a_working_command",
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


def test_exemptions_are_still_in_the_readme():
    assert set(EXEMPT) <= set(commands())


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


@pytest.mark.parametrize(
    ("target", "variable", "other"),
    [("bench", "NAME", "models"), ("bench", "NAME", "step house"), ("stress", "PART", "")],
)
def test_make_lists_benchmarks_and_parts_when_asked_for_none_of_them(target: str, variable: str, other: str):
    done = subprocess.run(["make", target, f"{variable}={other}"], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert done.returncode != 0
    said = done.stderr.splitlines()[0]
    assert said.startswith(f"make {target}: {variable} is one of ")
    for name in said.partition(" is one of ")[2].split():
        dry = subprocess.run(["make", "-n", target, f"{variable}={name}"], cwd=ROOT, capture_output=True, text=True)
        assert dry.returncode == 0, dry.stderr
        commands = [line for line in dry.stdout.splitlines() if ".venv/bin/python" in line]
        assert commands, f"{name} runs nothing"
        if target == "bench":
            assert (ROOT / "benchmarks" / f"{name}.py").is_file()


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


@pytest.mark.parametrize("threads", ["", "3"])
def test_a_second_call_installs_nothing_also_in_a_folder_with_a_space(tmp_path: Path, threads: str):
    """With a python that only notes how it is called: installing torch takes minutes."""
    checkout = tmp_path / "my projects" / "evenstep"
    (checkout / "requirements").mkdir(parents=True)
    for name in ("requirements/install.sh", "requirements/test.txt", "pyproject.toml", "Makefile"):
        shutil.copy(ROOT / name, checkout / name)
    fake = tmp_path / "fake python"
    fake.write_text(FAKE_PYTHON)
    fake.chmod(0o755)
    log = tmp_path / "log"
    env = environment(tmp_path) | {"LOG": str(log)} | ({"OMP_NUM_THREADS": threads} if threads else {})

    def make_demo(directory: Path) -> list[str]:
        """What was run, without looks at what there is."""
        log.unlink(missing_ok=True)
        done = subprocess.run(
            ["make", "demo", f"PYTHON={fake}"], cwd=directory, env=env, capture_output=True, text=True, timeout=30
        )
        assert done.returncode == 0, done.stderr
        return [line.removeprefix(f"{threads}: ") for line in log.read_text().splitlines() if ": -m " in line]

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


def test_another_torch_has_an_environment_of_its_own(tmp_path: Path):
    """With the python that only notes how it is called."""
    (tmp_path / "requirements").mkdir()
    for name in ("requirements/install.sh", "requirements/test.txt", "pyproject.toml", "Makefile"):
        shutil.copy(ROOT / name, tmp_path / name)
    fake = tmp_path / "python3.12"
    fake.write_text(FAKE_PYTHON)
    fake.chmod(0o755)
    log = tmp_path / "log"

    def make_test_torch(*arguments: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        log.unlink(missing_ok=True)
        done = subprocess.run(
            ["make", "test-torch", f"PYTHON={fake}", *arguments],
            cwd=tmp_path,
            env=environment(tmp_path) | {"LOG": str(log)},
            capture_output=True,
            text=True,
            timeout=30,
        )
        ran = log.read_text().splitlines() if log.exists() else []
        return done, [line.partition(": ")[2] for line in ran if ": -m " in line]

    folder = "build/venv-torch-2.15.0+cpu-python3.12"
    tests = "-m pytest --numprocesses 2 --dist loadfile --part"
    done, ran = make_test_torch("TORCH=2.15.0+cpu")
    assert done.returncode == 0, done.stderr
    assert ran[:2] == [f"-m venv {folder}", f"-m pip install --quiet -r {folder}/pins.txt"]
    assert ran[-1] == f"{tests} core"
    ours = (tmp_path / "requirements" / "test.txt").read_text().splitlines()
    theirs = (tmp_path / folder / "pins.txt").read_text().splitlines()
    differing = [theirs[line] for line in range(len(ours)) if ours[line] != theirs[line]]
    assert differing == ["setuptools>=77.0.3", "torch==2.15.0+cpu"], "torch 2.11 refuses the pinned setuptools"
    assert make_test_torch("TORCH=2.15.0+cpu", "PART=rest")[1] == [f"{tests} rest"], "installed once"
    assert not (tmp_path / ".venv").exists()
    done, ran = make_test_torch()
    assert done.returncode != 0
    assert "which torch?" in done.stderr
    assert ran == []


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


@pytest.mark.extended
def test_pip_install_gives_a_working_command(tmp_path: Path):
    """In an environment that has nothing of evenstep but what `pip install .` puts there; its needs are lent to it."""
    source = tmp_path / "a copy"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    env = environment(tmp_path)
    env.pop("PYTHONPATH", None)  # by which the sources themselves would be found
    # Without a pip and a setuptools of its own: older pythons' are too old to build this.
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True, env=env, timeout=DEADLINE_S
    )
    scripts = tmp_path / "venv" / "bin"
    site = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    (site / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    env["PATH"] = os.pathsep.join([str(scripts), env["PATH"]])
    done = call(
        "python -m pip install --quiet --no-index --no-build-isolation --ignore-installed --no-deps .", source, env
    )
    assert done.returncode == 0, done.stderr
    found = call("python -c 'import evenstep; print(evenstep.__file__)'", tmp_path, env).stdout.strip()
    assert Path(found).parent == site / "evenstep"
    assert (site / "evenstep" / "py.typed").exists()
    assert call("command -v evenstep", tmp_path, env).stdout.strip() == str(scripts / "evenstep")
    (tmp_path / "script.py").write_text("import evenstep\nprint(evenstep.init().world_size)\n")
    done = call("evenstep run --nproc-per-node 2 script.py", tmp_path, env)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
