"""Ranks that are copies of a template: nothing tells them from ranks that python has started, but their speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from evenstep.launcher.spawn.zygote import mapped_files, why_not
from tests.commands import call

DESCRIBES_ITSELF = """
    import faulthandler, gc, json, locale, multiprocessing, os, signal, sys, threading, warnings
    from pathlib import Path
    import numpy, torch
    import random

    def status(name):
        return next(l.split(None, 1)[1].strip() for l in open("/proc/self/status") if l.startswith(name))

    def stream(s):
        raw = s.buffer
        return [type(s).__name__, type(raw).__name__, s.encoding, s.errors, s.newlines, s.line_buffering,
                s.write_through, s.fileno(), s.name, s.mode]

    own = {"RANK", "LOCAL_RANK", "EVENSTEP_SETTINGS", "TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE",
           "EVENSTEP_TEST_MARK"}
    try:
        import threadpoolctl
        pools = sorted((p["internal_api"], p["num_threads"]) for p in threadpoolctl.threadpool_info())
    except ImportError:
        pools = []
    told = {
        "argv": sys.argv, "path": sys.path, "main": sorted(vars(sys.modules["__main__"])), "cwd": os.getcwd(),
        "shown": [w for i, w in enumerate(open("/proc/self/cmdline").read().split("\\0")) if i != 3],
        "shown variables": sorted(
            v for v in open("/proc/self/environ").read().split("\\0") if v and "evenstep" not in v
            and v.partition("=")[0] not in own
        ),
        "variables": {k: v for k, v in os.environ.items() if k not in own and "evenstep" not in v},
        "threads": [torch.get_num_threads(), threading.active_count(), len(os.listdir("/proc/self/task"))],
        "pools": pools,
        "handlers": {s.name: str(signal.getsignal(s)) for s in signal.Signals if s not in (9, 19)},
        "masks": [status(name) for name in ("SigBlk", "SigIgn")], "umask": status("Umask"),
        "session": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "streams": [stream(sys.stdout), stream(sys.stderr), sys.stdout is sys.__stdout__, sys.stdin.fileno()],
        "descriptors": sorted(os.readlink(f"/proc/self/fd/{fd}").partition(":")[0].rpartition("/")[2]
                              for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")),
        "cuda": torch.cuda.is_initialized(), "gc": gc.isenabled(),
        "warnings": [str(w[:2]) for w in warnings.filters], "start": multiprocessing.get_start_method(True),
        "faulthandler": faulthandler.is_enabled(), "profile": [sys.gettrace() is None, sys.getprofile() is None],
        "locale": locale.setlocale(locale.LC_ALL), "recursion": sys.getrecursionlimit(),
        "is_child": multiprocessing.parent_process() is None, "hook": sys.excepthook.__module__,
    }
    draws = [random.random(), float(numpy.random.rand()), torch.initial_seed()]
    Path(f"told-{os.environ['RANK']}").write_text(json.dumps(
        [told, draws, os.getpid(), os.getppid(), "torch.distributed.run" in sys.modules]
    ))
    open("unclosed-" + os.environ["RANK"], "w").write("written at the end")
    kept = open("kept-" + os.environ["RANK"], "w")
    kept.write("written by the finaliser")
"""


def told(directory: Path, rank: int) -> list[object]:
    return json.loads((directory / f"told-{rank}").read_text())


@pytest.mark.extended
def test_a_copy_is_what_python_would_have_started(tmp_path: Path) -> None:
    flags = ["--nproc-per-node", "2", "--device", "cpu", "--threads-per-rank", "1"]
    states = {}
    for name, more in {"warm": [], "cold": ["--cold-start"]}.items():
        (tmp_path / name).mkdir()
        code, command = call(tmp_path / name, [*flags, *more, "script.py", "-x", "a b"], DESCRIBES_ITSELF, fresh=True)
        assert code == 0, command.stderr
        states[name] = [told(tmp_path / name, rank) for rank in range(2)]
        for rank in range(2):
            assert (tmp_path / name / f"kept-{rank}").read_text() == "written by the finaliser"
        is_copy = told(tmp_path / name, 0)[4]
        assert is_copy == (name == "warm")
        assert command.left_files() == []
        assert command.leaves_no_process()
    for rank in range(2):
        warm, cold = (json.loads(json.dumps(states[name][rank][0]).replace(name, "DIR")) for name in states)
        assert warm == cold
    draws = [draw for states_of in states.values() for state in states_of for draw in state[1]]
    assert len(set(draws)) == len(draws), "generators that nobody has seeded differ between ranks"


DRAWS_IN_COPIES = """
import os, numpy.random, torch
from evenstep.launcher.spawn.zygote import become_fresh
for _ in range(2):
    if os.fork() == 0:
        become_fresh(dict(os.environ), [])
        print(numpy.random.rand(), torch.initial_seed(), flush=True)
        os._exit(0)
    os.wait()
"""


def test_copies_draw_other_numbers_also_if_the_template_has_numpys_generator() -> None:
    """As it has from the second attempt on: torch._dynamo imports it."""
    variables = os.environ | {"OMP_NUM_THREADS": "1"}  # a template has one thread
    command = [sys.executable, "-c", DRAWS_IN_COPIES]
    made = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert len(set(made.stdout.split())) == 4, made.stdout


@pytest.mark.parametrize(
    ("options", "files", "words"),
    [
        (["-m", "evenstep", "run"], ["/usr/lib/a.py", "_ops.py", None], None),
        (["/usr/bin/evenstep", "run", "-O"], [], None),
        (["-u", "-m", "evenstep"], [], None),
        (["-O", "-m", "evenstep"], [], "started with -O"),
        (["-c", "..."], [], "started with -c"),
        (["-m", "evenstep"], ["/home/me/random.py"], "/home/me/random.py was imported"),
        (["-m", "evenstep"], ["/home/me/sub/random.py"], None),
    ],
)
def test_where_a_copy_could_differ_there_is_none(options: list[str], files: list[str | None], words: str) -> None:
    found = why_not("/home/me", options, files)
    assert found is None if words is None else words in (found or "")


def test_a_mapped_file_may_have_a_space_in_its_name() -> None:
    maps = """\
7f00-7f01 r-xp 00000000 fe:00 123                        /my work/.venv/libopenblas 64.so
7f01-7f02 rw-p 00001000 fe:00 123                        /my work/.venv/libopenblas 64.so
7f02-7f03 rw-p 00000000 00:00 0
7ffc-7ffd rw-p 00000000 00:00 0                          [stack]
"""
    assert mapped_files(maps) == {"/my work/.venv/libopenblas 64.so"}


LOOKS_AT_THE_LAUNCHER = """
    import os, time
    from pathlib import Path

    print(*sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                  if os.path.exists(f"/proc/self/fd/{fd}")), flush=True)
    reader, writer = os.pipe()
    if os.fork() == 0:
        parent = os.getpid()
        if os.fork() == 0:
            while os.getppid() == parent:
                time.sleep(0.01)
            os.write(writer, b"launcher" if os.getppid() == launcher else b"another")
        os._exit(0)
    os.wait()
    print(os.read(reader, 100).decode())
"""


def test_a_copy_holds_nothing_that_the_launcher_was_given_and_leaves_it_no_orphans(tmp_path: Path) -> None:
    """Whoever starts the launcher may hold a lock, or be a make with a jobserver. Orphans would stay as zombies."""
    script = textwrap.dedent(LOOKS_AT_THE_LAUNCHER).replace(
        "import os, time", "import os, time; launcher = os.getppid()"
    )
    (tmp_path / "script.py").write_text(script)
    reader, writer = os.pipe()
    with open(tmp_path / "lock", "w") as lock:
        command = [sys.executable, "-m", "evenstep", "run", "--nproc-per-node", "1", "--device", "cpu", "script.py"]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            pass_fds=[reader, writer, lock.fileno()],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        links = {os.readlink(f"/proc/self/fd/{fd}") for fd in (reader, writer, lock.fileno())}
    os.close(reader)
    os.close(writer)
    assert done.returncode == 0, done.stderr
    descriptors, parent = done.stdout.splitlines()
    assert not links & set(descriptors.split())
    assert parent == "another"


def test_what_was_printed_before_the_launcher_forked_is_written_once(tmp_path: Path) -> None:
    """As by a `sitecustomize.py`: in a pipe it is still in the buffer, which every fork has a copy of."""
    (tmp_path / "script.py").write_text("import sys\nprint('copy', 'torch.distributed.run' in sys.modules)\n")
    (tmp_path / "start").mkdir()  # what lies beside a script is on its path, and then nothing is forked
    flags = ["--nproc-per-node", "2", "--all-ranks", "--device", "cpu", "--threads-per-rank", "1"]
    (tmp_path / "start" / "start.py").write_text(
        "import sys\n"
        "print('before')\n"
        "from evenstep.cli.main import main\n"
        f"sys.argv = {['evenstep', 'run', *flags, 'script.py']}\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "start/start.py"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[rank 1] copy True", "before", "copy True"]
