"""Gloo between some ranks, who alone make it.

`dist.new_group` can do that too (`use_local_synchronization`), but names the group after the number of groups that a
rank is in. Ranks that are in different numbers of groups then wait for each other under different names, and after a
group has been destroyed the next one meets its dead addresses under the same name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, ProcessGroupGloo, Store

from evenstep.transport.process_group import ProcessGroupTransport

_num_opened: Counter[tuple[int, ...]] = Counter()


def open_gloo(members: Sequence[int], *, timeout_s: float) -> ProcessGroupTransport:
    """Connect some ranks of the default group.

    Collective: every one of `members` calls this; those who call it several times, in the same order.

    Args:
        members: Their numbers in the default group.
        timeout_s: Deadline of a call.
    """
    key = tuple(members)
    _num_opened[key] += 1
    store = PrefixStore(f"evenstep {key} {_num_opened[key]}", dist.distributed_c10d._get_default_store())
    return connect_gloo(store, members.index(dist.get_rank()), len(members), timeout_s=timeout_s)


def connect_gloo(store: Store, rank: int, size: int, *, timeout_s: float) -> ProcessGroupTransport:
    """Connect the ranks that meet in a store of their own.

    Collective: all of them call this.
    """
    timeout = timedelta(seconds=timeout_s)
    group = ProcessGroup(store, rank, size)
    gloo = ProcessGroupGloo(PrefixStore("gloo/", store), rank, size, timeout=timeout)
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):  # ranks may share a GPU
        group._register_backend(torch.device(device), ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    num_splits = 0

    def split() -> ProcessGroupTransport:
        nonlocal num_splits
        num_splits += 1
        return connect_gloo(PrefixStore(f"split {num_splits}/", store), rank, size, timeout_s=timeout_s)

    return ProcessGroupTransport(group, name="gloo", timeout_s=timeout_s, split_by=split, close_by=group.abort)
