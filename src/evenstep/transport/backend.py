"""The `torch.distributed` backend "evenstep": any torch program's CPU ranks of one host exchange through shared memory.

[Note: the whole group]

torch replaces the whole process group by what a Python backend returns, also in "cpu:evenstep,cuda:nccl", and makes no
other backend then. So a group makes and registers its own Gloo and NCCL. Collectives of CPU tensors go over shared
memory; GPU tensors are NCCL's; whatever else there is falls through to Gloo and is counted (`fall_through`). What
torch calls for a collective is in `group_calls`.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, Store

from evenstep.transport.deadline import TellingGloo, set_timeout
from evenstep.transport.gloo import connect_gloo
from evenstep.transport.group_calls import GroupCalls
from evenstep.transport.hosts import connect_ranks
from evenstep.transport.local import LocalTransport
from evenstep.transport.process_group import ProcessGroupTransport
from evenstep.transport.uncompiled import uncompiled

NAME = "evenstep"

_LOOK_S = 0.1  # between two looks at calls that nobody waits for


def register_backend() -> None:
    """Let `init_process_group("evenstep")` find the backend. Nothing is started. Twice is once."""
    if dist.is_available() and NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _make_group, extended_api=True, devices=["cpu", "cuda"])


def _make_group(made_for: Any, options: Any) -> EvenstepGroup:
    return EvenstepGroup(
        made_for.store,
        made_for.group_rank,
        made_for.group_size,
        timeout=made_for.timeout,
        name=made_for.group_id,
        global_ranks=list(made_for.global_ranks_in_group),
        nccl_options=options,
    )


@uncompiled
class EvenstepGroup(GroupCalls):
    """A process group whose CPU tensors travel through shared memory. torch makes it.

    Collective: every rank of the group makes it, and makes the same calls in the same order.

    Args:
        store: Where the ranks meet.
        rank: This rank.
        size: Number of ranks.
        timeout: Deadline of a call.
        name: Of the group.
        global_ranks: The ranks' numbers in the default group; empty for that one.
        nccl_options: What the script gave as `pg_options`, if it is for NCCL.

    Attributes:
        why_gloo: Why there is no shared memory, where there is none: then everything falls through.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        timeout: timedelta,
        name: str,
        global_ranks: list[int],
        nccl_options: Any = None,
    ) -> None:
        has_nccl = dist.is_nccl_available() and torch.cuda.is_available()
        super().__init__(NAME, rank, size, inner=ProcessGroup(store, rank, size), has_nccl=has_nccl)
        self._store = store
        self._timeout = timeout
        # Held: python's part of it, which hears of deadlines, would be gone with the last reference from python.
        self._gloo = gloo = TellingGloo(PrefixStore("gloo/", store), rank, size, timeout=timeout)
        gloo.options.global_ranks_in_group = global_ranks
        gloo.options.group_name = name  # type: ignore[assignment]
        gloo._set_sequence_number_for_group()
        self._register("cpu", ProcessGroup.BackendType.GLOO, gloo)
        if has_nccl:
            nccl = _make_nccl(store, rank, size, timeout, name, global_ranks, nccl_options)
            self._register("cuda", ProcessGroup.BackendType.NCCL, nccl)
        for group in (self._inner, self):
            group._set_default_backend(ProcessGroup.BackendType.GLOO)
        self.why_gloo: str | None = None
        self._connect(is_default=not global_ranks)
        hears = weakref.WeakMethod(self._set_timeout)
        gloo.told = lambda timeout: (hear := hears()) and hear(timeout)

    def _set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        set_timeout(self._shared, timeout.total_seconds())

    def _register(self, device: str, kind: ProcessGroup.BackendType, backend: Any) -> None:
        for group in (self._inner, self):
            group._register_backend(torch.device(device), kind, backend)

    def _connect(self, *, is_default: bool) -> None:
        if self.size() == 1:
            self._shared = LocalTransport()
            return
        timeout_s = self._timeout.total_seconds()
        control = ProcessGroupTransport(self._inner, name="gloo", timeout_s=timeout_s)
        made = connect_ranks(control, self._gloo_among, timeout_s=timeout_s, is_shared=True)
        if not isinstance(made, str):
            self._shared = made
            return
        self.why_gloo = made
        if is_default and self.rank() == 0:
            print(f"evenstep: Gloo, for want of shared memory: {made}", file=sys.stderr, flush=True)  # noqa: T201

    def _gloo_among(self, ranks: Sequence[int]) -> ProcessGroupTransport:
        """Gloo between some ranks, who alone call this."""
        store = PrefixStore(f"among {','.join(map(str, ranks))}/", self._store)
        timeout_s = self._timeout.total_seconds()
        return connect_gloo(store, ranks.index(self.rank()), len(ranks), timeout_s=timeout_s)

    # ------------------------------------------------------------------ what torch asks

    def getBackendName(self) -> str:
        """What `name()` says. The name in C++."""
        return NAME

    def get_group_store(self) -> Store:
        """Where the ranks met."""
        return self._store

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: Any = None,
        group_desc: str | None = None,
        device_types: list[torch.device] | None = None,
    ) -> EvenstepGroup | None:
        """A group of some of these ranks. Collective: every rank of `new_ranks` calls this; None on others."""
        if self.rank() not in new_ranks:
            return None
        name = group_name or f"{self.group_name}/{','.join(map(str, new_ranks))}"
        group = EvenstepGroup(
            PrefixStore(f"{name}/", self._store),
            new_ranks.index(self.rank()),
            len(new_ranks),
            timeout=timeout or self._timeout,
            name=name,
            global_ranks=new_ranks,
        )
        group._set_group_name(name)
        group._set_group_desc(group_desc or "undefined")
        return group

    def shutdown(self) -> None:
        """Let go of shared memory and sockets."""
        self._close()
        self._inner.shutdown()

    def abort(self) -> None:
        """Let go of shared memory and sockets, whatever is in flight."""
        self._close()
        self._inner.abort()

    def _close(self) -> None:
        shared, self._shared = self._shared, None
        if shared is not None:
            shared.close()
        running = [work for work in tuple(self._at_gloo) if not work.is_completed()]
        if running:
            threading.Thread(target=_outlast, args=(running, self._inner), name="evenstep gloo", daemon=True).start()

    def __repr__(self) -> str:
        carrier = self._shared if self._shared is not None else self.why_gloo or "closed"
        return f"<EvenstepGroup rank {self.rank()}/{self.size()} {carrier}>"


def _outlast(works: Sequence[Any], holder: object) -> None:
    """Hold a group's Gloo until its calls have ended, if only by their deadline.

    The destructor of torch's ProcessGroupGloo waits for them, and `abort` doesn't end them. Where this rank alone has
    made a call, that would keep whoever destroys the group for as long.

    Args:
        works: The calls. They are looked at now and then: a thread that waits inside C++ when the interpreter ends
            takes the process with it (std::terminate).
        holder: Has Gloo.
    """
    while not all(work.is_completed() for work in works):
        time.sleep(_LOOK_S)


def _make_nccl(
    store: Store, rank: int, size: int, timeout: timedelta, name: str, global_ranks: list[int], options: Any
) -> Any:
    from torch._C._distributed_c10d import ProcessGroupNCCL  # not in every build

    options = options if isinstance(options, ProcessGroupNCCL.Options) else ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.global_ranks_in_group = global_ranks
    options.group_name = name
    nccl = ProcessGroupNCCL(PrefixStore("nccl/", store), rank, size, options)
    nccl._set_sequence_number_for_group()
    return nccl
