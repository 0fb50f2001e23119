"""The `torch.distributed` backend "evenstep": CPU ranks of one node exchange through shared memory.

[Note: the whole group]

torch uses the object that a Python backend returns as the whole process group, also for "cpu:evenstep,cuda:nccl", and
then makes no other backend. So a group makes and registers its own Gloo and NCCL. Collectives of CPU tensors use shared
memory, those of GPU tensors use NCCL; all other calls fall back to Gloo and are counted (`fallback`). The methods that
torch calls for collectives are in `calls`.

Gloo listens on a port as long as it exists, and anyone who can connect can use up the process's descriptors. So a group
whose ranks share memory makes Gloo only in the first collective that needs it, because every rank calls that. Messages
between two ranks use shared memory, or are refused: the other ranks make no call, so no Gloo can be made for such
messages.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo, Store

from evenstep.console import say
from evenstep.ground.compat.torch_distributed import (
    VISITS_BACKENDS,
    add_backend,
    begin_sequence_numbers,
    is_made,
    loopback_gloo_options,
    outside_transforms,
    set_default_backend,
)
from evenstep.ground.compat.torch_dynamo import uncompiled
from evenstep.transport.backend.calls import GroupCalls
from evenstep.transport.core.store_gather import StoreGather
from evenstep.transport.core.transport import Transport
from evenstep.transport.factory import connect_ranks
from evenstep.transport.local import LocalTransport
from evenstep.transport.process_group.gloo import connect_gloo
from evenstep.transport.process_group.transport import ProcessGroupTransport
from evenstep.transport.shm.transport import SharedMemoryTransport

NAME = "evenstep"

_POLL_S = 0.1  # time between polls of calls for which no thread waits


def register_backend() -> None:
    """Register the backend for `init_process_group("evenstep")`. Nothing is started. A second call does nothing."""
    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _make_group, extended_api=True, devices=["cpu", "cuda"])


def _make_group(made_for: Any, options: Any) -> EvenstepGroup:
    is_transport = isinstance(options, SharedMemoryTransport)
    return EvenstepGroup(
        made_for.store,
        made_for.group_rank,
        made_for.group_size,
        timeout=made_for.timeout,
        name=made_for.group_id,
        global_ranks=list(made_for.global_ranks_in_group),
        shared=options if is_transport else None,
        nccl_options=None if is_transport else options,
    )


@uncompiled
class EvenstepGroup(GroupCalls):
    """A process group that sends CPU tensors through shared memory. torch makes it.

    Collective: every rank of the group makes it, and makes the same calls in the same order.

    Args:
        store: The store for the rendezvous of the group's ranks.
        rank: This rank.
        size: Number of ranks.
        timeout: Deadline of a call.
        name: The group's name.
        global_ranks: The ranks' numbers in the default group; empty for the default group itself.
        shared: Carries CPU tensors; the group then owns it. None: the ranks connect.
        nccl_options: The script's `pg_options`, if they are for NCCL.

    Attributes:
        why_gloo: The reason why there is no shared memory and Gloo carries everything; None if there is shared memory.
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
        shared: SharedMemoryTransport | None = None,
        nccl_options: Any = None,
    ) -> None:
        has_nccl = dist.is_nccl_available() and torch.cuda.is_available()
        super().__init__(rank, size, inner=ProcessGroup(store, rank, size), has_nccl=has_nccl)
        self._store = store
        self._timeout = timeout
        self._name, self._description = name, "undefined"
        self._global_ranks = global_ranks
        # Numbered: torch gives a new group the name of a destroyed one, whose addresses are still in the store.
        self._gloo_prefix = f"gloo {store.add(f'groups of rank {rank}', 1)}/"
        self._gloo: ProcessGroupGloo | None = None
        if not VISITS_BACKENDS:
            self._register("cpu", ProcessGroup.BackendType.GLOO, None)
        self._nccl: Any = None
        if has_nccl:
            self._nccl = _make_nccl(store, rank, size, timeout, name, global_ranks, nccl_options)
            self._register("cuda", ProcessGroup.BackendType.NCCL, self._nccl)
        self.why_gloo: str | None = None
        self._shared = shared or self._connect(is_default=not global_ranks)
        if isinstance(self._shared, SharedMemoryTransport):
            self._shared.recorded.name = name
            self._shared.name_ranks(global_ranks or range(size))
        elif size > 1:
            self._need_gloo("")

    def _need_gloo(self, collective: str, timeout_s: float | None = None) -> None:
        """Make Gloo, if there is none yet. Collective: all ranks make the same call.

        Args:
            collective: The call. The ranks compare it first, because Gloo would wait for a rank that makes another one.
                "": the group is being made.
            timeout_s: The call's own deadline; None: the group's.
        """
        if self._gloo is not None:
            return
        if collective and isinstance(self._shared, SharedMemoryTransport):
            with outside_transforms():
                self._shared.compare_call(collective).wait(timeout_s)
        store, rank, size = PrefixStore(self._gloo_prefix, self._store), self.rank(), self.size()
        if isinstance(self._shared, SharedMemoryTransport | LocalTransport):
            gloo = ProcessGroupGloo(store, rank, size, loopback_gloo_options(self._timeout))
        else:
            gloo = ProcessGroupGloo(store, rank, size, timeout=self._timeout)
        gloo.options.global_ranks_in_group = self._global_ranks
        gloo.options.group_name = self._name  # type: ignore[assignment]
        begin_sequence_numbers(gloo)
        self._register("cpu", ProcessGroup.BackendType.GLOO, gloo)
        # Add the backend only now: from torch 2.14 on, a group's rank and size are those of its default backend, if it
        # has one.
        for group in (self._inner, self):
            set_default_backend(group, ProcessGroup.BackendType.GLOO)
        super()._set_group_name(self._name)
        super()._set_group_desc(self._description)
        self._gloo = gloo

    def _get_backend(self, device: torch.device) -> Any:
        return CpuBackend(self) if device.type == "cpu" else super()._get_backend(device)

    def _register(self, device: str, kind: ProcessGroup.BackendType, backend: Any) -> None:
        for group in (self._inner, self):
            add_backend(group, [device], kind, backend)

    def _connect(self, *, is_default: bool) -> Transport | None:
        if self.size() == 1:
            return LocalTransport()
        timeout_s = self._timeout.total_seconds()
        control = StoreGather(self._store, self.rank(), self.size(), timeout_s=timeout_s)
        made = connect_ranks(control, self._connect_gloo, timeout_s=timeout_s)
        if not isinstance(made, str):
            return made
        self.why_gloo = made
        if is_default and self.rank() == 0:
            say(f"evenstep: using Gloo, because there is no shared memory: {made}")
        return None

    def _connect_gloo(self, ranks: Sequence[int]) -> ProcessGroupTransport:
        """Make a Gloo between some ranks. Collective among these only."""
        store = PrefixStore(f"among {','.join(map(str, ranks))}/", self._store)
        timeout_s = self._timeout.total_seconds()
        return connect_gloo(store, ranks.index(self.rank()), len(ranks), timeout_s=timeout_s)

    # ------------------------------------------------------------------ called by torch

    @property
    def _device_types(self) -> list[torch.device]:
        """Devices whose tensors the group carries: once torch has made it, the CPU even without a Gloo."""
        registered: list[torch.device] = super()._device_types
        cpu = torch.device("cpu")
        return registered if cpu in registered or not is_made(self) else [cpu, *registered]

    def getBackendName(self) -> str:
        """The backend's name, which `name()` also returns."""
        return NAME

    def _set_group_name(self, name: str) -> None:
        super()._set_group_name(name)
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        super()._set_group_desc(description)
        self._description = description

    def _get_sequence_number_for_group(self) -> int:
        if self._shared is None and self._gloo is not None:
            return int(super()._get_sequence_number_for_group())
        return self.num_calls

    def getGroupName(self) -> str:
        """The group's name, the same as `group_name`. torch's own method takes it from Gloo or NCCL."""
        return self._name

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the deadline of calls on all backends; in shared memory also of calls in flight."""
        self._timeout = timeout
        if self._shared is not None:
            self._shared.set_timeout(timeout.total_seconds())
        for backend in (self._gloo, self._nccl):
            if backend is not None:
                backend._set_default_timeout(timeout)

    def register_pre_hook(self, hook_id: int, hook: Callable[..., object]) -> None:
        """Refuse a hook: torch calls such hooks only around C++ backends.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            f"{self!r} calls no hooks around its collectives. Register hooks on a group from "
            f"torch.distributed.new_group(backend='gloo')."
        )

    register_post_hook = register_pre_hook

    def getGroupDesc(self) -> str:
        """The group's purpose, the same as `group_desc`."""
        return self._description

    def get_group_store(self) -> Store:
        """The store of the group's rendezvous."""
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
        """Make a group of some of these ranks. Collective: every rank of `new_ranks` calls this; None on other ranks.

        Args:
            new_ranks: The ranks' numbers in this group.
            timeout: Deadline of a call; None: this group's.
            opts: NCCL's options, if there is NCCL.
            group_name: The new group's name; None: built from this group's name and the ranks.
            group_desc: The new group's purpose.
            device_types: Must be all of this group's devices.
        """
        if self.rank() not in new_ranks:
            return None
        name = group_name or f"{self.group_name}/{','.join(map(str, new_ranks))}"
        group = EvenstepGroup(
            PrefixStore(f"{name}/", self._store),
            new_ranks.index(self.rank()),
            len(new_ranks),
            timeout=timeout or self._timeout,
            name=name,
            global_ranks=[self._global_ranks[rank] for rank in new_ranks] if self._global_ranks else new_ranks,
            nccl_options=opts,
        )
        group._set_group_name(name)
        group._set_group_desc(group_desc or "undefined")
        # torch uses the CPU's backend before it has finished making the group.
        group._need_gloo("")
        return group

    def shutdown(self) -> None:
        """Close shared memory and sockets."""
        self._close()
        self._inner.shutdown()

    def abort(self) -> None:
        """Close shared memory and sockets, even if calls are in flight."""
        self._close()
        self._inner.abort()

    def _close(self) -> None:
        shared, self._shared = self._shared, None
        self._is_over = True
        if shared is not None:
            shared.close()
        running = [work for work in tuple(self._at_gloo) if not work.is_completed()]
        if running:
            threading.Thread(target=_outlast, args=(running, self._inner), name="evenstep gloo", daemon=True).start()

    def __repr__(self) -> str:
        transport: object = self._shared if self._shared is not None else self.why_gloo or "closed"
        return f"<EvenstepGroup rank {self.rank()}/{self.size()} {transport}>"


def _outlast(works: Sequence[Any], holder: object) -> None:
    """Keep a group's Gloo alive until its calls have ended, at the latest by their deadline.

    The destructor of torch's ProcessGroupGloo waits for its calls, and `abort` doesn't end them. If this rank alone has
    made a call, destroying the group would wait for the deadline.

    Args:
        works: The calls. They are polled, because a thread that waits inside C++ when the interpreter ends aborts the
            process (std::terminate).
        holder: Keeps Gloo alive.
    """
    while not all(work.is_completed() for work in works):
        time.sleep(_POLL_S)


def _make_nccl(
    store: Store, rank: int, size: int, timeout: timedelta, name: str, global_ranks: list[int], options: Any
) -> Any:
    options_type = dist.ProcessGroupNCCL.Options
    options = options if isinstance(options, options_type) else options_type()
    options._timeout = timeout
    options.global_ranks_in_group = global_ranks
    options.group_name = name
    nccl = dist.ProcessGroupNCCL(PrefixStore("nccl/", store), rank, size, options)
    begin_sequence_numbers(nccl)
    return nccl


class CpuBackend:
    """A stand-in for the backend of CPU tensors: `_set_pg_timeout` looks for Gloo or NCCL in a group.

    Gloo itself may not exist yet, and wouldn't change the deadline of shared memory.
    """

    __class__ = ProcessGroupGloo  # type: ignore[assignment]

    def __init__(self, group: EvenstepGroup) -> None:
        self._group = group

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._group.set_timeout(timeout)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("supports_"):
            return name == "supports_splitting"  # asked by torch before it calls `EvenstepGroup.split_group`
        return getattr(self._group._gloo, name)
