"""Where a rank is, by what faulthandler has written of it."""

from __future__ import annotations

import faulthandler
import os
import resource
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import evenstep
from evenstep.launcher.failure.stacks import Place, parse_stacks, place_in_worker, place_of
from evenstep.launcher.spawn import script_runner
from evenstep.launcher.spawn.script_runner import STACK_SIGNAL, open_far, register_stacks

TORCH = Path(torch.__file__).parent
LAUNCHER = Path(evenstep.__file__).parent / "launcher" / "spawn" / "script_runner.py"
ENGINE = (f"{TORCH}/autograd/graph.py", 865, "_engine_run_backward")


def dump(*threads: list[tuple[str, int, str]]) -> str:
    """As faulthandler writes it: of each thread the frames, the innermost first; the main thread last."""
    lines = []
    for number, frames in enumerate(threads):
        lines.append(f"{'Current thread' if number == len(threads) - 1 else 'Thread'} 0x00007f{number} (most recent:")
        lines += [f'  File "{file}", line {line} in {function}' for file, line, function in frames]
        lines.append("")
    return "\n".join(lines)


def where(*frames: tuple[str, int, str], text: str = "", is_idle: bool = True, has_gpu: bool = False) -> Place:
    main = [*frames, ("train.py", 40, "<module>"), (str(LAUNCHER), 160, "_run_as_main"), ("start.py", 1, "main")]
    return place_of(parse_stacks(dump(main)), is_idle=is_idle, has_gpu=has_gpu, source=lambda *_: text)


def test_the_call_in_which_a_rank_waits_and_the_line_of_the_script() -> None:
    c10d = f"{TORCH}/distributed/distributed_c10d.py"
    barrier = where((c10d, 5356, "barrier"), (f"{TORCH}/distributed/c10d_logger.py", 83, "wrapper"), text="x = f()\n")
    assert (barrier.call, barrier.site) == ("barrier", "train.py:40 in <module>: x = f()")
    ddp, modules = f"{TORCH}/nn/parallel/distributed.py", f"{TORCH}/nn/modules/module.py"
    forward = where((ddp, 2, "_sync_buffers"), (ddp, 3, "forward"), (modules, 1, "_call_impl"))
    assert (forward.call, forward.phase) == ("forward", "in forward")
    made = where((f"{TORCH}/distributed/utils.py", 286, "_verify_param_shape_across_processes"), (ddp, 9, "__init__"))
    assert made.call == "DistributedDataParallel()"
    joining = where(
        (f"{TORCH}/distributed/rendezvous.py", 1, "_env_rendezvous_handler"), (c10d, 2, "init_process_group")
    )
    assert (joining.call, joining.phase) == ("init_process_group", "joining the others")
    assert where(("train.py", 30, "main"), text="handle.wait()").call == "a collective"


def test_who_computes_loads_or_saves_does_not_wait() -> None:
    assert where(("train.py", 30, "main"), text="time.sleep(60)").call == ""
    assert where(("train.py", 30, "main"), text="handle.wait()", is_idle=False).call == "", "it runs"
    assert where((f"{TORCH}/distributed/checkpoint/filesystem.py", 5, "write"), text="x").call == ""
    loading = where(("/x/selectors.py", 1, "select"), (f"{TORCH}/utils/data/dataloader.py", 2, "_try_get_data"))
    assert (loading.call, loading.phase) == ("", "loading data")
    compiling = where((f"{TORCH}/_inductor/codecache.py", 1, "compile"), (f"{TORCH}/_dynamo/x.py", 1, "y"))
    assert (compiling.call, compiling.phase, compiling.patience > 1) == ("", "compiling", True)


def test_a_backward_pass_waits_when_it_uses_no_processor() -> None:
    tensor = (f"{TORCH}/_tensor.py", 500, "backward")
    assert where(ENGINE, tensor).call == "backward"
    busy = where(ENGINE, tensor, is_idle=False)
    assert (busy.call, busy.phase) == ("", "in backward")
    hook = where(("train.py", 9, "hook"), ENGINE, tensor)
    assert (hook.call, hook.phase) == ("", "in backward")


def test_a_rank_that_reads_from_its_gpu_waits_for_it() -> None:
    read = where(("train.py", 33, "main"), text="losses.append(loss.item())", is_idle=False, has_gpu=True)
    assert (read.call, read.is_for_device) == ("item", True)
    assert where(("train.py", 33, "main"), text="losses.append(loss.item())").call == "", "on a CPU nothing waits there"


def test_a_worker_is_where_it_is_and_not_where_its_rank_was_when_it_forked_it() -> None:
    fork = [("/lib/multiprocessing/process.py", 314, "_bootstrap"), ("train.py", 20, "main")]
    loop = (f"{TORCH}/utils/data/_utils/worker.py", 349, "_worker_loop")
    place = place_in_worker(parse_stacks(dump([("data.py", 9, "__getitem__"), loop, *fork])), source=lambda *_: "")
    assert place is not None
    assert place.site == "data.py:9 in __getitem__"
    assert "train.py" not in place.stack
    queue = (f"{sysconfig.get_path('stdlib')}/multiprocessing/queues.py", 113, "get")
    assert place_in_worker(parse_stacks(dump([queue, loop, *fork]))) is None, "it has nothing to do"
    assert place_in_worker([]) is None


@pytest.mark.parametrize("text", ["", "Fatal Python error: nothing", "  File without a thread", "Thread 0x1 :\n  ..."])
def test_what_is_no_stack_says_nothing(text: str) -> None:
    assert place_of(parse_stacks(text), is_idle=True) == Place()


@pytest.mark.parametrize(("has_gpu", "servers"), [(False, ""), (False, "1"), (True, "1")])
def test_a_rank_writes_the_stack_of_its_main_thread_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_gpu: bool, servers: str
) -> None:
    """Another thread's frames may be gone while they are read: servers, whose RPC runs python, died of it."""
    monkeypatch.setattr(script_runner, "has_gpu_driver", lambda: has_gpu)
    monkeypatch.setenv("EVENSTEP_SERVERS", servers)
    with (tmp_path / "stacks").open("w") as file, ThreadPoolExecutor(1) as pool:
        register_stacks(file.fileno())
        try:
            pool.submit(time.sleep, 0.01)
            os.kill(os.getpid(), STACK_SIGNAL)
        finally:
            faulthandler.unregister(STACK_SIGNAL)
    (main,) = parse_stacks((tmp_path / "stacks").read_text())
    assert any(frame.function.startswith("test_a_rank_writes") for frame in main)


@pytest.mark.parametrize("is_limited", [False, True])
def test_stacks_never_end_up_in_a_file_of_the_script(tmp_path: Path, is_limited: bool) -> None:
    """A script that closes all low descriptors opens its own files under their numbers."""
    (tmp_path / "stacks").touch()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Earlier tests may have left files open in this process.
    limit = max(map(int, os.listdir("/proc/self/fd"))) + 64 if is_limited else None
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        far, near = open_far(str(tmp_path / "stacks")), os.open(tmp_path / "own", os.O_WRONLY | os.O_CREAT)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    try:
        assert far >= (limit or min(before[0], 1024)) - 16 > near
        assert not os.get_inheritable(far)
        os.write(far, b"here")
    finally:
        os.close(far)
        os.close(near)
    assert (tmp_path / "stacks").read_text() == "here"
