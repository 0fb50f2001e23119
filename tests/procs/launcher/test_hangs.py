"""`evenstep run` on scripts of torch alone: which rank keeps the others waiting is said, and nothing is ended."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.commands import Command, call, start

SCRIPT = """
    import os, sys, time
    import torch
    import torch.distributed as dist

    def fetch(step):
        if step == 10 and dist.get_rank() == 1:
            {fault}
        return torch.ones(4, 8)

    def train():  # torch's model ends with it: one that outlives its process group may never end
        model = torch.nn.Linear(8, 8)
        {wrap}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(20):
            x = fetch(step)
            if x is None:
                break
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def main():
        dist.init_process_group("gloo")
        train()
        dist.barrier()
        dist.destroy_process_group()

    main()
"""
DDP = "model = torch.nn.parallel.DistributedDataParallel(model)"
FSDP = "torch.distributed.fsdp.fully_shard(model, mesh=dist.init_device_mesh('cpu', (2,)))"
FSDP_1 = "model = torch.distributed.fsdp.FullyShardedDataParallel(model, device_id=torch.device('cpu'))"
FLAGS = ["--nproc-per-node", "2", "--device", "cpu", "--name-after", "1", "script.py"]


def check_named(said: str, *, line: str, phase: str = "between steps", call: str = "backward") -> None:
    """Rank 1 at that line of `fetch`, and rank 0 where it calls the model."""
    named = re.search(rf"evenstep: rank 1 \(pid \d+\) is {phase} of step 10; rank 0 waits since \d+ s\.", said)
    assert named, said
    said = said[named.start() :]  # where ranks have started apart, on a busy machine, that was said before
    assert re.search(rf'rank 1 is here:\n(.*\n)*?  File "script.py", line \d+, in fetch\n    {line}', said), said
    at = r"at script.py:\d+ in train: model\(x\).sum\(\).backward\(\)"
    assert re.search(rf"evenstep: rank 0 waits in {call} of step 10, {at}", said), said
    assert len(re.findall(rf", in fetch\n    {line}\n", said)) == 1, said  # a machine that stood still is named, too


def test_a_rank_that_sleeps_is_named_once_and_again_when_it_comes(tmp_path: Path) -> None:
    code, command = call(tmp_path, FLAGS, SCRIPT.format(fault="time.sleep(3)", wrap=DDP))
    assert code == 0, command.stderr
    check_named(command.stderr, line=r"time.sleep\(3\)")
    assert re.search(r"evenstep: rank 1 \(pid \d+\) has come, after \d+ s: the ranks that waited go on", command.stderr)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("wrap", "call_name"), [(FSDP, "forward"), (FSDP_1, "forward")], ids=["fully_shard", "FullyShardedDataParallel"]
)
def test_so_it_is_under_fsdp(tmp_path: Path, wrap: str, call_name: str) -> None:
    script = SCRIPT.replace("import torch\n", "import torch, torch.distributed.fsdp\n", 1)
    code, command = call(tmp_path, FLAGS, script.format(fault="time.sleep(3)", wrap=wrap))
    assert code == 0, command.stderr
    check_named(command.stderr, line=r"time.sleep\(3\)", call=call_name)


def interrupted(command: Command, words: str) -> str:
    """What was said, when the run has been interrupted after these words."""
    command.wait_until(lambda: words in command.stderr)
    command.process.send_signal(signal.SIGINT)
    assert command.wait() == 130
    assert command.leaves_no_process()
    return command.stderr


@pytest.mark.extended
@pytest.mark.parametrize(
    "fault",
    [
        "while True: pass",
        "import ctypes; ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(8), 8)",
    ],
    ids=["infinite loop", "C call that holds the interpreter lock"],
)
def test_a_rank_whose_python_does_not_run_is_named_with_its_line(tmp_path: Path, fault: str) -> None:
    said = interrupted(start(tmp_path, FLAGS, SCRIPT.format(fault=fault, wrap=DDP)), "rank 0 waits in")
    check_named(said, line=re.escape(fault))


@pytest.mark.extended
def test_a_loaders_worker_that_hangs_is_shown_with_its_line(tmp_path: Path) -> None:
    data = """
    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 40
        def __getitem__(self, index):
            if index == 30 and os.environ["RANK"] == "1":
                time.sleep(1000)
            return torch.ones(8)

    loader = None

    def fetch(step):
        global loader
        loader = loader or iter(torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=2))
        return next(loader)

    def train():"""
    script = SCRIPT.replace("\n    def train():", data, 1).format(fault="pass", wrap=DDP)
    said = interrupted(start(tmp_path, FLAGS, script), "in __getitem__\n    time.sleep")
    assert re.search(r"rank 1 \(pid \d+\) is loading data of step 1\d; rank 0 waits", said), said
    (worker,) = re.findall(r"a worker of rank 1's loader \(pid \d+\) is here:\n((?:  .*\n)+)", said)
    assert worker.endswith("in __getitem__\n    time.sleep(1000)\n"), worker
    assert "in main" not in worker, "what the rank did when it forked the worker"


@pytest.mark.extended
def test_a_script_with_handlers_of_its_own_for_user_signals_keeps_them(tmp_path: Path) -> None:
    fault = "time.sleep(3)"
    script = SCRIPT.format(fault=fault, wrap=DDP).replace(
        "    main()\n",
        "    import signal\n"
        "    for which in (signal.SIGUSR1, signal.SIGUSR2):\n"
        "        signal.signal(which, lambda *_: os._exit(9))\n"
        "    main()\n",
    )
    code, command = call(tmp_path, FLAGS, script)
    assert code == 0, command.stderr
    assert "is here:" in command.stderr
