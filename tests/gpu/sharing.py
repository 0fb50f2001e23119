"""Several ranks on GPUs: each on its own where there are enough, else all on the first.

NCCL refuses two ranks that share a GPU. It tells that by host and bus, so ranks that claim to be on hosts of their own
get on, over sockets; their kernels take turns. That is slow and otherwise the real thing.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator

import torch

import evenstep
from evenstep import world as worlds


def device_of(num_ranks: int) -> str:
    """What `evenstep.init(device=)` takes."""
    return "cuda" if torch.cuda.device_count() >= num_ranks else "cuda:0"


@contextlib.contextmanager
def world_over(transport: str) -> Iterator[evenstep.World]:
    """A world on GPUs, in place of the one that a pool's rank keeps."""
    before = worlds.initialised()
    if before is not None:
        before.close()
    on_one_gpu(transport)
    with evenstep.init(device=device_of(int(os.environ["WORLD_SIZE"])), transport=transport, quiet=True) as world:
        assert world.transport_name == transport
        assert world.device.type == "cuda"
        yield world


def on_one_gpu(transport: str) -> None:
    """Before the ranks meet: let them share a GPU also over NCCL."""
    if transport == "nccl" and device_of(int(os.environ["WORLD_SIZE"])) == "cuda:0":
        os.environ["NCCL_HOSTID"] = f"host {os.environ['RANK']}"
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"


@contextlib.contextmanager
def never_waiting() -> Iterator[None]:
    """What the host may not do in here: wait for the GPU."""
    torch.cuda.synchronize()
    _set_debug_mode("error")
    try:
        yield
    finally:
        _set_debug_mode("default")


def _set_debug_mode(mode: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode(mode)
