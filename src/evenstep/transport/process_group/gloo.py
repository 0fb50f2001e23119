"""Groups over Gloo between some ranks, made by these ranks alone.

`dist.new_group` can do that, too (`use_local_synchronization`), but names the group after the number of groups that a
rank is in. Ranks in different numbers of groups then wait for each other under different names. And a group that
follows a destroyed group has the same name, and finds the dead addresses of that group.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo, Store

from evenstep.ground.compat.torch_distributed import add_backend, default_store, set_default_backend
from evenstep.transport.process_group.transport import ProcessGroupTransport

_LAST_TAG = 0x65740000  # no message has this tag
_num_opened: Counter[tuple[int, ...]] = Counter()


def open_gloo(members: Sequence[int], *, timeout_s: float) -> ProcessGroupTransport:
    """Connect some ranks of the default group.

    Collective: every one of `members` calls this. Members that call it several times do so in the same order.

    Args:
        members: The ranks' numbers in the default group.
        timeout_s: Deadline of a call.
    """
    return connect_gloo(store_of(members), members.index(dist.get_rank()), len(members), timeout_s=timeout_s)


def store_of(members: Sequence[int]) -> Store:
    """Make a store for one rendezvous of some ranks of the default group.

    Every one of `members` calls this. Members that call it several times do so in the same order.
    """
    key = tuple(members)
    _num_opened[key] += 1
    return PrefixStore(f"evenstep {key} {_num_opened[key]}", default_store())


def connect_gloo(store: Store, rank: int, size: int, *, timeout_s: float) -> ProcessGroupTransport:
    """Connect ranks through their own store.

    Collective: all of these ranks call this, and it returns only when all are connected. Gloo's constructor returns on
    one rank while another rank still accepts its connection; if the first rank then closes the group, the constructor
    fails on the other.
    """
    timeout = timedelta(seconds=timeout_s)
    group = ProcessGroup(store, rank, size)
    gloo = ProcessGroupGloo(PrefixStore("gloo/", store), rank, size, timeout=timeout)
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)  # ranks may share a GPU
    add_backend(group, devices, ProcessGroup.BackendType.GLOO, gloo)
    set_default_backend(group, ProcessGroup.BackendType.GLOO)
    group.barrier().wait()
    numbers = itertools.count(1)

    def split() -> ProcessGroupTransport:
        return connect_gloo(PrefixStore(f"split {next(numbers)}/", store), rank, size, timeout_s=timeout_s)

    end = functools.partial(end_calls, gloo)
    return ProcessGroupTransport(group, name="gloo", timeout_s=timeout_s, split_by=split, close_by=end)


def end_calls(gloo: Any) -> None:
    """End this rank's calls in flight over a Gloo with an error, and close its connections.

    Local. Gloo's own `abort` doesn't do this, and a released Gloo waits for its calls until their deadline. But if a
    receive times out, Gloo closes the connections with all ranks, which ends every call that waits for them.
    """
    for peer in range(gloo.size()):
        if peer != gloo.rank():  # the first peer is enough, unless its connection has been lost
            with contextlib.suppress(RuntimeError):
                gloo.recv([torch.empty(1, device="cpu")], peer, _LAST_TAG).wait(timedelta(milliseconds=1))
