"""Groups over Gloo between some ranks, made by these ranks alone.

`dist.new_group` can do that too (`use_local_synchronization`), but names the group after the number of groups that a
rank is in. Ranks that are in different numbers of groups then wait for each other under different names, and after a
group has been destroyed the next one finds its dead addresses under the same name.
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

_LAST_TAG = 0x65740000  # nothing is sent with it
_num_opened: Counter[tuple[int, ...]] = Counter()


def open_gloo(members: Sequence[int], *, timeout_s: float) -> ProcessGroupTransport:
    """Connect some ranks of the default group.

    Collective: every one of `members` calls this; those who call it several times, in the same order.

    Args:
        members: Their numbers in the default group.
        timeout_s: Deadline of a call.
    """
    return connect_gloo(store_of(members), members.index(dist.get_rank()), len(members), timeout_s=timeout_s)


def store_of(members: Sequence[int]) -> Store:
    """A store for one meeting of some ranks of the default group.

    Every one of `members` calls this; those who call it several times, in the same order.
    """
    key = tuple(members)
    _num_opened[key] += 1
    return PrefixStore(f"evenstep {key} {_num_opened[key]}", default_store())


def connect_gloo(store: Store, rank: int, size: int, *, timeout_s: float) -> ProcessGroupTransport:
    """Connect ranks through a store of their own.

    Collective: all of them call this, and none goes on before all are connected. Gloo's own constructor returns on one
    rank while another one still accepts its connection, and fails there if the first rank closes the group by then.
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
    """End the calls of a Gloo that are under way on this rank, with an error, and close its connections.

    Local. Gloo's own `abort` doesn't, and a Gloo that is released waits for its calls until their deadline. But where a
    receive times out, Gloo closes the connections with all ranks, which ends whatever waits for them.
    """
    for peer in range(gloo.size()):
        if peer != gloo.rank():  # the first one is enough, unless its connection has been lost
            with contextlib.suppress(RuntimeError):
                gloo.recv([torch.empty(1, device="cpu")], peer, _LAST_TAG).wait(timedelta(milliseconds=1))
