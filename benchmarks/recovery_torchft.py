"""torchft's side of `recovery.py`, which starts it in an environment that has torchft; by itself it measures nothing.

    PYTHON benchmarks/recovery_torchft.py lighthouse          prints its address, and serves until it is stopped
    PYTHON benchmarks/recovery_torchft.py RANK WIDTH DEPTH    a replica group of one rank, in the current directory

The training is that of `recovery.py` as torchft's documentation and its `train_ddp.py` write it. What a rank reaches is
written to `marks-RANK` at once: a word, and when.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torchft
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchft.coordination import LighthouseServer

DIES_AT = 8
# A dead rank is waited for until its last heartbeat is this old. Shorter, and busy ranks are taken for dead.
HEARTBEAT_EVERY, HEARTBEAT_TIMEOUT_MS, TICK_MS = timedelta(milliseconds=50), 250, 10
TIMEOUT = timedelta(seconds=60)  # for calls: a connection whose other end has died ends at once
TOLD = {  # what torchft logs, and how it is called here
    "reconfiguring for": "regrouping",
    "resetting fr recording": "joined",
    "peers need recovery from us": "sending",
    "Loaded state dict": "resumed",
}


class Marks(logging.Handler):
    """Writes down what a rank reaches, also as torchft logs it."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._file = open(f"marks-{rank}", "a", buffering=1)  # noqa: SIM115  # until the process is killed

    def mark(self, name: str, number: int = 0) -> None:
        """A rank has reached this."""
        self._file.write(f"{name} {time.monotonic()!r} {number}\n")

    def emit(self, record: logging.LogRecord) -> None:
        """One line of torchft's log."""
        for text, name in TOLD.items():
            if text in record.getMessage():
                self.mark(name)


def serve() -> None:
    """A lighthouse."""
    lighthouse = LighthouseServer(
        bind="[::]:0",
        min_replicas=1,
        join_timeout_ms=10_000,  # how long a rank that lives and is late is waited for
        quorum_tick_ms=TICK_MS,
        heartbeat_timeout_ms=HEARTBEAT_TIMEOUT_MS,
    )
    print(lighthouse.address(), flush=True)
    sys.stdin.read()


def train(rank: int, width: int, depth: int, marks: Marks) -> None:
    """A replica group: rank 1 kills itself in the backward pass of a step, unless it replaces one that has."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(64, width), *(nn.Linear(width, width) for _ in range(depth)), nn.Linear(width, 1))
    data = torch.randn(4096, 64)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        connect_timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        replica_id=f"rank{rank}",
        heartbeat_interval=HEARTBEAT_EVERY,
        init_sync=False,  # all have the same seed
    )
    model = torchft.DistributedDataParallel(manager, net)
    optimizer = torchft.Optimizer(manager, torch.optim.AdamW(model.parameters(), lr=1e-4))
    sampler = torchft.DistributedSampler(data, rank, num_replica_groups=2, group_rank=0, num_replicas=1, shuffle=True)
    is_replacement = Path("died").exists()
    marks.mark("built")
    if not is_replacement:  # a common start: else the first one trains alone, and the second one is sent its state
        Path(f"ready-{rank}").touch()
        while not Path(f"ready-{1 - rank}").exists():
            time.sleep(0.001)

    def die(_: Tensor) -> None:
        if rank == 1 and not is_replacement and manager.current_step() == DIES_AT:
            Path("died").write_text(repr(time.monotonic()))
            os.kill(os.getpid(), 9)

    while True:
        for x in DataLoader(data, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            y = model(x)
            y.register_hook(die)
            y.square().mean().backward()
            if manager.errored() is not None:
                marks.mark("noticed")
            step, takes_part = manager.current_step(), manager.is_participating()
            optimizer.step()
            if manager.current_step() == step or not takes_part:
                marks.mark("dropped")
            else:
                marks.mark("stepped", manager.num_participants())


if __name__ == "__main__":
    if sys.argv[1] == "lighthouse":
        serve()
    else:
        its_marks = Marks(int(sys.argv[1]))
        logging.getLogger("torchft").addHandler(its_marks)
        logging.getLogger("torchft").setLevel(logging.INFO)
        its_marks.mark("started")
        train(*map(int, sys.argv[1:]), its_marks)
