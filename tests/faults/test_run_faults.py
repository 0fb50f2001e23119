"""`evenstep run` where something goes wrong: who is blamed, what is left, and how fast it ends."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from evenstep.ground.host.processes import children
from tests.commands import Command, call, start

WAITS = """
    import os, time
    open(f"up-{os.environ['RANK']}", "w").close()
    time.sleep(100)
"""


def is_up(command: Command, num_ranks: int = 2) -> bool:
    return all((command.directory / f"up-{rank}").exists() for rank in range(num_ranks))


@pytest.mark.extended
def test_in_a_cascade_the_culprit_is_shown_and_the_witness_is_not(tmp_path: Path) -> None:
    """Rank 1 raises; rank 0 then loses its peer in an all-reduce, and with it its connection."""
    script = """
        import evenstep, torch

        with evenstep.init() as world:
            for step in range(5):
                if step == 3 and world.rank == 1:
                    raise ValueError(f"bad sample in step {step}")
                world.transport.all_reduce(torch.ones(1000)).wait()
    """
    code, command = call(
        tmp_path, ["--nproc-per-node", "2", "--device", "cpu", "--threads-per-rank", "1", "script.py"], script
    )
    assert code == 1
    _, state, logs, *_, verdict = command.stderr.splitlines()
    assert ": rank 1 (pid " in state, "the culprit's state, not the witness's"
    assert command.stderr.count("Traceback") == 1
    assert "bad sample in step 3" in Path(logs.rpartition(": ")[2], "rank-1.log").read_text()
    assert re.fullmatch(r"evenstep: rank 1 \(pid \d+\) failed: ValueError: bad sample in step 3", verdict)
    assert "launcher" not in command.stderr, "frames of the machinery are left out"
    assert command.leaves_no_process()


@pytest.mark.extended
def test_a_rank_whose_loop_is_shorter_is_named_and_the_others_shown_where_they_waited(tmp_path: Path) -> None:
    script = """
        import evenstep, torch

        with evenstep.init() as world:
            model = evenstep.DistributedDataParallel(torch.nn.Linear(1, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(5 - world.rank):
                model.backward(model(torch.ones(1, 1)).sum())
                optimizer.step()
    """
    code, command = call(tmp_path, ["--nproc-per-node", "2", "--device", "cpu", "script.py"], script)
    assert code == 72
    assert "Traceback" not in command.stderr
    verdict = command.stderr.splitlines()[-1]
    # A process may take a while to end behind its group.
    ended = r"evenstep: rank 1 \(pid \d+\) had (ended with status 0|left its process group) while rank 0 still waited: "
    assert re.match(ended + "its loop was shorter", verdict)
    assert " early, after 4 steps. Rank 0 waited at script.py, line 8. Give all ranks" in verdict
    assert "must not be inside an `if`" in verdict, "a call on rank 0 alone looks like this, too"


@pytest.mark.extended
def test_a_rank_that_left_a_loop_over_torchs_wrapper_is_named_and_not_the_one_that_waits(tmp_path: Path) -> None:
    """Gloo tells the other rank of a closed connection, "typically caused by a remote worker crashing"."""
    script = """
        import torch, torch.distributed as dist

        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5 + dist.get_rank()):
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
        dist.destroy_process_group()
    """
    code, command = call(tmp_path, ["--nproc-per-node", "2", "--device", "cpu", "script.py"], script)
    assert code == 72
    verdict = command.stderr.splitlines()[-1]
    assert re.match(r"evenstep: rank 0 \(pid \d+\) had .* while rank 1 still waited: its loop was shorter", verdict)
    assert " early, after 5 steps. Rank 1 waited at script.py, line 8. " in verdict


def test_a_rank_that_raises_ends_the_others_within_seconds(tmp_path: Path) -> None:
    script = """
        import os, time
        if os.environ["RANK"] == "1":
            open("raised", "w").close()
            raise KeyError("boom")
        time.sleep(100)
    """
    command = start(tmp_path, ["--nproc-per-node", "2", "script.py"], script)
    command.wait_until((tmp_path / "raised").exists)
    started = time.monotonic()
    assert command.wait() == 1
    assert time.monotonic() - started < 10  # under a second on a quiet machine
    assert command.stderr.endswith("failed: KeyError: 'boom'\n")
    (logs,) = command.left_files()
    assert f"output of the other ranks: {command.temporary / logs}" in command.stderr
    assert "KeyError: 'boom'" in (command.temporary / logs / "rank-1.log").read_text()
    assert command.leaves_no_process()


@pytest.mark.extended(beyond=1)
@pytest.mark.parametrize(
    ("ending", "code", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by SIGKILL (from outside: the kernel killed none"),
        ("sys.exit(7)", 7, "exited with status 7"),
        ("ctypes.string_at(0)", 139, "was killed by SIGSEGV"),
    ],
)
def test_who_ends_without_an_exception_is_named(tmp_path: Path, ending: str, code: int, words: str) -> None:
    script = f"""
        import ctypes, os, signal, sys, time
        if os.environ["RANK"] == "1":
            print("the last words", flush=True)
            {ending}
        time.sleep(100)
    """
    status, command = call(tmp_path, ["--nproc-per-node", "2", "script.py"], script)
    assert status == code
    assert command.stderr.splitlines()[-1].startswith("evenstep: rank 1 (pid ")
    assert words in command.stderr.splitlines()[-1]
    assert "the last words" in command.stderr
    if code == 139:
        assert "script.py" in command.stderr, "faulthandler's stack is in the tail of the log"


def test_a_rank_that_told_of_its_end_and_lingers_is_stopped_and_keeps_its_status(tmp_path: Path) -> None:
    script = """
        import atexit, os, time
        if os.environ["RANK"] == "1":
            atexit.register(time.sleep, 200)
            raise ValueError("boom")
        time.sleep(200)
    """
    code, command = call(tmp_path, ["--nproc-per-node", "2", "--shutdown-timeout", "1", "script.py"], script)
    assert code == 1
    assert command.stderr.endswith("failed: ValueError: boom\n")
    assert command.leaves_no_process()


def test_who_failed_may_finish_its_exit_handlers_and_pythons_own_end_is_not_waited_for(tmp_path: Path) -> None:
    script = """
        import atexit, gc, os, time

        class Recorder:
            def __init__(self):
                self.file, self.itself = open("unflushed", "w"), self  # python's last collection would close it

        class EndsLate:
            def __del__(self, sleep=time.sleep, open=open):
                sleep(3)
                open("ended late", "w").close()

        def finish():
            time.sleep(0.5)
            open("finished", "w").close()

        if os.environ["RANK"] == "1":
            atexit.register(finish)
            late, recorder = EndsLate(), Recorder()
            recorder.file.write("the last line")
            raise KeyError("boom")
        time.sleep(100)
    """
    code, command = call(tmp_path, ["--nproc-per-node", "2", "--device", "cpu", "script.py"], script)
    assert code == 1
    assert command.stderr.splitlines()[-1].endswith(") failed: KeyError: 'boom'")
    assert (tmp_path / "finished").exists()
    assert (tmp_path / "unflushed").read_text() == "the last line"
    assert not (tmp_path / "ended late").exists(), "the run had to wait for it"


@pytest.mark.extended(beyond=1)
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_launcher_stops_all_in_one_line(tmp_path: Path, sent: signal.Signals, code: int) -> None:
    command = start(tmp_path, ["--nproc-per-node", "2", "script.py"], WAITS)
    command.wait_until(lambda: is_up(command))
    command.process.send_signal(sent)
    assert command.wait() == code
    assert len(command.stderr.splitlines()) == 2, command.stderr  # the line at the start, and one more
    assert command.leaves_no_process()
    assert command.left_files() == []


@pytest.mark.extended
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_node_that_waits_for_node_0_says_so_and_ends_when_asked(
    tmp_path: Path, sent: signal.Signals, code: int
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    command = start(tmp_path, [*flags, "--nproc-per-node", "1", "script.py"], WAITS)
    command.wait_until(lambda: f"evenstep: waiting for node 0 at 127.0.0.1:{port}\n" in command.stderr)
    command.process.send_signal(sent)
    asked = time.monotonic()
    assert command.wait() == code
    assert time.monotonic() - asked < 10, "torch waits for 900 s"
    assert len(command.stderr.splitlines()) == 3, command.stderr
    assert command.leaves_no_process()


@pytest.mark.extended
def test_where_node_0_is_gone_with_its_store_the_others_end_with_a_line(tmp_path: Path) -> None:
    """Another attempt is allowed, but there is no place to meet any more."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    nodes = []
    for node in range(2):
        (directory := tmp_path / str(node)).mkdir()
        flags = ["--nnodes", "2", "--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port)]
        flags += ["--nproc-per-node", "1", "--max-restarts", "2", "--node-timeout", "3"]
        nodes.append(start(directory, [*flags, "script.py"], WAITS))
    for node, command in enumerate(nodes):
        command.wait_until((command.directory / f"up-{node}").exists)
    for pid in nodes[0].processes():
        os.kill(pid, signal.SIGKILL)
    nodes[0].process.wait()
    assert nodes[1].wait() == 76
    assert "Traceback" not in nodes[1].stderr
    assert re.search(r"evenstep: the node of the store, .* is gone: .* Start all nodes anew.", nodes[1].stderr)
    assert nodes[1].leaves_no_process()


def test_ctrl_c_while_the_ranks_still_start_is_one_line_too(tmp_path: Path) -> None:
    command = start(tmp_path, ["--nproc-per-node", "2", "script.py"], WAITS)
    command.wait_until(lambda: len(children(command.process.pid)) >= 3)  # the template is one of them
    command.process.send_signal(signal.SIGINT)
    assert command.wait() == 130
    assert "Traceback" not in command.stderr
    assert command.leaves_no_process()


def test_who_ignores_sigterm_is_killed_after_the_timeout_with_its_children(tmp_path: Path) -> None:
    script = """
        import os, signal, subprocess, time
        if os.environ["RANK"] == "1":
            while not os.path.exists("up-0"):
                time.sleep(0.02)
            raise SystemExit(3)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen(["sleep", "100"])
        open("up-0", "w").close()
        while True:
            time.sleep(1)
    """
    command = start(tmp_path, ["--nproc-per-node", "2", "--shutdown-timeout", "1", "script.py"], script)
    command.wait_until((tmp_path / "up-0").exists)
    started = time.monotonic()
    assert command.wait() == 3
    assert time.monotonic() - started < 15
    assert command.leaves_no_process()


@pytest.mark.parametrize(
    "target",
    [
        ["script.py"],
        ["--no-python", "sh", "-c", "sleep 100 & touch up-$RANK; exec sleep 100"],
        pytest.param(["--cold-start", "script.py"], marks=pytest.mark.extended),
    ],
    ids=["python", "program", "cold"],
)
def test_what_ranks_have_started_ends_with_a_launcher_that_is_killed(tmp_path: Path, target: list[str]) -> None:
    """Within a second. What ranks have started doesn't get the signal by which the kernel ends ranks."""
    script = """
        import os, subprocess, time
        subprocess.Popen(["sleep", "100"])
        open(f"up-{os.environ['RANK']}", "w").close()
        time.sleep(100)
    """
    command = start(tmp_path, ["--nproc-per-node", "2", *target], script)
    command.wait_until(lambda: is_up(command))
    assert len(command.processes()) >= 6, "launcher, two ranks with a process each, and what ends these"
    os.kill(command.process.pid, signal.SIGKILL)
    command.process.wait()
    assert command.leaves_no_process(within_s=1.0)


STEPS = """
    import os
    import evenstep, torch

    with evenstep.init() as world:
        for step in range(100_000):
            world.transport.all_reduce(torch.ones(10)).wait()
            if step == 100:
                open(f"up-{world.rank}", "w").write(str(os.getpid()))
"""


def test_a_suspended_rank_is_named_and_given_up_with_71(tmp_path: Path) -> None:
    """A launcher of ours says so whatever carries the gradients; here also what it was doing."""
    flags = ["--nproc-per-node", "2", "--device", "cpu", "--stopped-grace", "3"]
    command = start(tmp_path, [*flags, "script.py"], STEPS)
    command.wait_until(lambda: is_up(command) and bool((tmp_path / "up-1").read_text()))
    os.kill(int((tmp_path / "up-1").read_text()), signal.SIGSTOP)
    stopped = time.monotonic()
    command.wait_until(lambda: "is stopped (state T) between steps, collective " in command.stderr)
    assert time.monotonic() - stopped < 2.0 + 3.0  # 2 s on a quiet machine
    assert command.wait() == 71
    last = command.stderr.splitlines()[-1]
    assert re.match(r"evenstep: rank 1 \(pid \d+\) is stopped \(state T\).* It was not continued, so the run", last)
    assert command.leaves_no_process()


@pytest.mark.parametrize("holds_the_lock", [False, True])
@pytest.mark.extended
def test_who_does_not_come_is_shown_where_it_is(tmp_path: Path, holds_the_lock: bool) -> None:
    """With its stack, also while it holds the interpreter lock."""
    sleep = "ctypes.PyDLL(None).sleep(100)" if holds_the_lock else "time.sleep(100)"
    script = f"""
        import ctypes, time
        import evenstep, torch

        def deadlock():
            {sleep}

        with evenstep.init(timeout_s=3) as world:
            world.barrier()
            if world.rank == 1:
                deadlock()
            world.barrier()
    """
    code, command = call(tmp_path, ["--nproc-per-node", "2", "--device", "cpu", "script.py"], script)
    assert code == 71
    assert "evenstep: rank 1 was here:\n" in command.stderr
    assert "in deadlock" in command.stderr
    assert "had not arrived where rank 0 waited; it was still running, and has been stopped" in command.stderr
    assert command.leaves_no_process()


TRAINS = """
    import evenstep, torch

    with evenstep.init(seed=0) as world:
        model = evenstep.DistributedDataParallel(torch.nn.Linear(4, 4), compare_every=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(8):
            model.backward(model(torch.ones(2, 4)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("fault", "code", "verdict"),
    [
        (
            "kill:rank=1,step=5,phase=backward",
            137,
            r"rank 1 .* was killed by SIGKILL.* step 5 of this attempt, collective \d+$",
        ),
        pytest.param(
            "exit:rank=0,step=3,phase=forward",
            72,
            r"rank 0 .* had (ended with status 0|left its process group) .* early(, after 3 steps.*)?\. ",
            marks=pytest.mark.extended,
        ),
        pytest.param(
            "drift:rank=1,step=2",
            73,
            r"drifted apart: ranks 0 and 1 differ in parameter 'weight', .* it is undecidable which one is right",
            marks=pytest.mark.extended,
        ),
    ],
)
def test_injected_faults_end_with_their_status(tmp_path: Path, fault: str, code: int, verdict: str) -> None:
    flags = ["--nproc-per-node", "2", "--device", "cpu", "--inject", fault]
    status, command = call(tmp_path, [*flags, "script.py"], TRAINS)
    assert status == code, command.stderr
    assert re.search(verdict, command.stderr, re.MULTILINE), command.stderr
    assert command.leaves_no_process()


@pytest.mark.extended
def test_a_child_of_a_rank_that_fails_is_none_of_the_launchers_business(tmp_path: Path) -> None:
    """Children have the rank's variables, and a forked one its hooks and its world, too."""
    script = """
        import os, subprocess, sys
        import evenstep

        CHILD = "import evenstep; print(evenstep.init().world_size); raise ValueError('in the subprocess')"
        with evenstep.init() as world:
            if world.rank == 0:
                done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True)
                print(done.returncode, done.stdout.split(), "ValueError: in the subprocess" in done.stderr)
                print("from which this process has inherited the launcher's variables" in done.stderr, flush=True)
                for ending in ("raise", "exit", "init"):
                    pid = os.fork()
                    if pid == 0:
                        if ending == "raise":
                            raise ValueError("in the fork")
                        if ending == "init":
                            evenstep.init()
                        sys.exit(3)
                    print(ending, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
            print(world.mean(1.0 + world.rank))
    """
    code, command = call(tmp_path, ["--nproc-per-node", "2", "--device", "cpu", "script.py"], script)
    assert code == 0, command.stderr
    lines = ["1 ['1'] True", "True", "raise 1", "exit 3", "init 1", "1.5"]
    assert command.stdout.splitlines() == lines, command.stderr
    assert command.stderr.count("ValueError: in the fork") == 1
    assert "this process was forked from rank 0 of 2, whose connections it can't use" in command.stderr
    assert " failed: " not in command.stderr
    assert command.leaves_no_process()


def test_an_exit_handler_can_not_hide_that_a_rank_failed(tmp_path: Path) -> None:
    script = """
        import atexit, os
        if os.environ["RANK"] == "1":
            atexit.register(os._exit, 0)
            raise ValueError("hidden")
    """
    code, command = call(tmp_path, ["--nproc-per-node", "2", "script.py"], script)
    assert code == 1
    assert command.stderr.count("Traceback") == 1
    assert command.stderr.endswith("failed: ValueError: hidden\n")


@pytest.mark.parametrize("flags", [[], pytest.param(["--cold-start"], marks=pytest.mark.extended)])
def test_every_rank_is_started_once_and_its_end_known_where_sigchld_was_ignored(
    tmp_path: Path, flags: list[str]
) -> None:
    script = """
        import os, signal, sys
        print("started", os.environ["RANK"], signal.getsignal(signal.SIGCHLD).name, flush=True)
        sys.exit(4)
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    ignoring = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    )
    command = [sys.executable, "-m", "evenstep", "run", "--nproc-per-node", "1", *flags, "script.py"]
    done = subprocess.run(
        [sys.executable, "-c", ignoring, *command], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (4, "started 0 SIG_DFL\n"), done.stderr


AS_PROCESS_1 = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


@pytest.mark.extended
@pytest.mark.parametrize("flags", [[], pytest.param(["--cold-start"], marks=pytest.mark.extended)])
def test_as_process_1_of_a_container_it_reaps_what_others_leave(tmp_path: Path, flags: list[str]) -> None:
    if shutil.which("unshare") is None or subprocess.run([*AS_PROCESS_1, "true"], check=False).returncode != 0:
        pytest.skip("no namespaces here")
    script = """
        import os, pathlib, sys, time
        reader, writer = os.pipe()
        if os.fork() == 0:
            orphan = os.fork()
            if orphan == 0:
                time.sleep(0.2)
            else:
                os.write(writer, str(orphan).encode())
            os._exit(0)
        os.wait()
        orphan = pathlib.Path("/proc", os.read(reader, 20).decode())
        until = time.monotonic() + 20
        while orphan.exists() and time.monotonic() < until:
            time.sleep(0.05)
        print("left" if orphan.exists() else "reaped", flush=True)
        pathlib.Path("up").touch()
        time.sleep(100 if "waits" in sys.argv else 0)
        sys.exit(5)
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    run = [sys.executable, "-m", "evenstep", "run", "--nproc-per-node", "1", "--device", "cpu", *flags, "script.py"]
    done = subprocess.run([*AS_PROCESS_1, *run], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (5, "reaped\n"), done.stderr
    (tmp_path / "up").unlink()
    with subprocess.Popen([*AS_PROCESS_1, *run, "waits"], cwd=tmp_path, stderr=subprocess.PIPE, text=True) as outside:
        while not (tmp_path / "up").exists():
            assert outside.poll() is None
            time.sleep(0.05)
        (first,) = children(outside.pid)
        os.kill(first, signal.SIGTERM)
        _, said = outside.communicate(timeout=60)
    assert outside.returncode == 143
    assert said.endswith("evenstep: stopped by SIGTERM; all ranks were stopped\n")
